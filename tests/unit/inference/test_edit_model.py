"""Labels that are added to a trained model, renamed, merged and removed."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias import Elias, EliasConfig, LabelTable, train
from elias.data.corpus import Corpus, Split
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError, ModelError
from elias.inference.edit_model import example_texts
from elias.model.graph import LabelGraph, relabel_graph
from saved_models import reseal

SETTINGS = {
    "encoder.dim": 16,
    "index.kind": "graph",
    "index.n_clusters": 4,
    "index.beam_size": 2,
    "stages.stage1.epochs": 2,
    "stages.stage2.epochs": 2,
    "rerank.candidates": 10,
    "eval.validation_size": 60,
}
NEW = LabelTable(
    ("red herring", "tin opener"),
    ids=("u:1", "u:2"),
    synonyms=(("kipper",), ()),
    descriptions=("A smoked fish.", ""),
)
TEXTS = ["the red herring", "a kipper for tea", "this tin opener works"]


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=300, n_labels=30)


@pytest.fixture(scope="module")
def model(corpus):
    return train(corpus, EliasConfig().override(SETTINGS), device="cpu")


@pytest.fixture(scope="module")
def larger(model):
    return model.add_labels(NEW)


def known_scores(predictions, n_labels):
    """Return {label: score} of each point for the first ``n_labels`` labels."""
    return [
        {label: score for label, score in zip(row.ids, row.scores, strict=True) if label < n_labels}
        for row in predictions
    ]


def test_added_labels_are_predicted_by_name_and_synonym(larger):
    predictions = larger.predict(TEXTS, only=NEW.names)

    assert [row[0]["label"] for row in predictions.to_dicts()] == [*NEW.names[:1] * 2, NEW.names[1]]
    assert [row[0]["uri"] for row in predictions.to_dicts()] == ["u:1", "u:1", "u:2"]
    assert larger.predict(TEXTS[0]).labels[0] == "red herring"


def test_scores_of_other_labels_stay_equal_to_the_bit(model, larger, corpus):
    texts = [*corpus.test.texts, *TEXTS]
    for component in model.components:
        before = model.predict(texts, top_k=30, component=component)
        after = larger.predict(texts, top_k=32, component=component)

        assert known_scores(after, 30) == known_scores(before, 30)


def test_scores_of_labels_added_earlier_stay_equal_to_the_bit(larger, corpus):
    for n_more in range(1, 12):
        again = larger.add_labels([f"eel {i} in the river" for i in range(n_more)])
        for text in corpus.test.texts[:10]:
            before, after = larger.predict([text], top_k=32), again.predict([text], top_k=50)

            assert known_scores(after, 32) == known_scores(before, 32)


def test_scores_of_added_labels_stay_equal_to_the_bit_when_another_is_edited(model, corpus):
    rng = np.random.default_rng(0)
    words = sorted({word for text in corpus.train.texts for word in text.split()})[:40]
    names = sorted({" ".join(rng.choice(words, 4, replace=False)) for _ in range(100)})
    larger = model.add_labels(names)
    edited = larger.rename_label(names[0], "another name").remove_labels([names[1]])
    texts = [" ".join(rng.choice(words, 12, replace=False)) for _ in range(30)]

    before, after = (m.predict(texts, top_k=140, component="rerank") for m in (larger, edited))

    for old, new in zip(before, after, strict=True):
        scores = dict(zip(new.labels, new.scores, strict=True))
        for name, score in zip(old.labels, old.scores, strict=True):
            assert name in names[:2] or scores[name] == score


def test_scores_of_an_ensemble_stay_equal_to_the_bit(model, corpus):
    other = train(corpus, EliasConfig().override(SETTINGS | {"seed": 1}), device="cpu")
    ensemble, texts = model.joined_by([other], model.config), corpus.test.texts
    words = sorted({word for text in texts for word in text.split()})
    larger = ensemble.add_labels([f"{word} eel" for word in words])

    before = ensemble.predict(texts, top_k=30)
    for top_k in (5, 100):
        after = known_scores(larger.predict(texts, top_k=top_k), 30)

        for old, new in zip(known_scores(before, 30), after, strict=True):
            assert new.items() <= old.items()


def test_unlikely_added_labels_seldom_replace_those_that_the_ranker_has_ranked(model, corpus):
    unlikely = model.add_labels(LabelTable(tuple(f"unknown{i} thing{i}" for i in range(50))))

    ranked = unlikely.predict(corpus.test.texts, top_k=3, component="rerank")

    assert (ranked.ids < 30).mean() > 0.9


def test_the_old_model_is_left_as_it_is(model, larger):
    assert (model.n_labels, larger.n_labels) == (30, 32)
    assert model.added is None


def test_examples_draw_a_label_to_their_texts(model, corpus):
    text = corpus.test.texts[0]
    plain, shown = (
        known_scores(m.predict([text], top_k=31), 31)[0][30]
        for m in (model.add_labels(["zzz"]), model.add_labels(["zzz"], {"zzz": [text]}))
    )

    assert shown > plain


def test_labels_of_a_split_are_not_matched_by_their_names_which_may_repeat():
    table = LabelTable(("herring", "cod", "herring"))
    split = Split(texts=["one", "two"], labels=csr_matrix(np.eye(3, dtype=np.float32)[[2, 1]]))

    texts, labels = example_texts(table, split)

    assert texts == ["one", "two"]
    assert labels.toarray().tolist() == [[0, 0, 1], [0, 1, 0]]


def test_examples_may_be_a_corpus_whose_labels_are_matched(model):
    labels = csr_matrix(np.float32([[1, 0], [0, 1]]))
    split = Split(labels=labels, texts=["smoked fish", "other"])
    examples = Corpus(train=split, label_names=["u:1", "not new"])

    larger = model.add_labels(NEW, examples)

    assert larger.added.n_examples.tolist() == [1, 0]


def test_labels_are_added_one_after_the_other(model, larger):
    one_by_one = model.add_labels(NEW.take([0])).add_labels(NEW.take([1]))

    assert one_by_one.predict(TEXTS).to_dicts() == larger.predict(TEXTS).to_dicts()


@pytest.mark.parametrize(
    ("labels", "examples", "problem"),
    [
        (["red herring"], None, "has 1 of the 1 labels, such as 'red herring'.* need ids"),
        (LabelTable(("new name",), ids=("u:1",)), None, "such as 'u:1'; remove them"),
        (["a", "a"], None, "'a' is given twice.* same name need ids"),
        (["a", " "], None, "the name ' ' is empty"),
        (["a"], {"a": "text"}, "examples of 'a' are a single text"),
        (["a"], {"a": [3]}, r"examples\['a'\]\[0\] is int, not a string"),
        (["a"], ["text"], "the examples are list; give a corpus"),
        (["a"], {"b": ["text"]}, "'b', which is not a label of the table"),
    ],
)
def test_labels_that_cannot_be_added_are_refused(larger, labels, examples, problem):
    with pytest.raises(DataError, match=problem):
        larger.add_labels(labels, examples)


def test_labels_that_the_model_has_can_be_skipped(larger):
    table = LabelTable(("kippers", "eel", "tin opener"), ids=("u:1", "u:3", "u:2"))

    again = larger.add_labels(table, skip_known=True)

    assert list(again.label_names[31:]) == ["tin opener", "eel"]
    assert larger.add_labels(NEW, skip_known=True).n_labels == 32


def test_only_and_without_apply_to_added_labels(larger):
    assert larger.predict(TEXTS[0], only=["u:2", 3]).labels[0] != "red herring"
    assert "red herring" not in larger.predict(TEXTS[0], without=["red herring"], top_k=32).labels
    assert larger.predict(TEXTS[0], only=["red herring"]).labels == ["red herring"]


def test_a_larger_model_is_saved_and_loaded(larger, tmp_path):
    saved = larger.save_pretrained(tmp_path / "model")

    again = Elias.from_pretrained(saved, device="cpu")

    assert list(again.label_table.rows()) == list(larger.label_table.rows())
    assert again.predict(TEXTS).to_dicts() == larger.predict(TEXTS).to_dicts()


def test_damaged_added_labels_are_refused(larger, tmp_path):
    (saved := larger.save_pretrained(tmp_path / "model")).joinpath("added.safetensors").unlink()

    with pytest.raises(ModelError, match=r"added\.safetensors: missing"):
        Elias.from_pretrained(saved, device="cpu")
    tree = json.loads((saved / "config.json").read_text())
    del tree["files"]["added.safetensors"]
    (saved / "config.json").write_text(json.dumps(tree))
    reseal(saved)
    with pytest.raises(ModelError, match=r"there is no added\.safetensors"):
        Elias.from_pretrained(saved, device="cpu")


def test_added_labels_are_explained(larger):
    best = larger.explain(TEXTS[:1], top_k=32)[0].labels[0]

    assert (best.label, best.uri, best.paths, best.n_paths) == ("red herring", "u:1", (), 0)
    assert best.name_coverage == pytest.approx(1)
    assert 0 < best.p <= 1


def test_a_renamed_label_keeps_its_scores_and_its_old_name_as_a_synonym(larger, corpus):
    renamed = larger.rename_label("tin opener", "can opener").rename_label(3, "other")

    old, new = larger.predict(corpus.test.texts), renamed.predict(corpus.test.texts)

    assert renamed.label_names[31] == "can opener"
    assert renamed.label_table.synonyms[31] == ("tin opener",)
    np.testing.assert_array_equal(old.ids, new.ids)
    assert renamed.predict("a can opener", only=NEW.take([0]).names).labels == ["red herring"]


def test_a_label_does_not_get_the_name_of_another_label(larger):
    with pytest.raises(DataError, match="label 30 is already called 'red herring'; merge"):
        larger.rename_label(3, "red herring")
    with pytest.raises(DataError, match="not a string"):
        larger.rename_label(3, 7)

    homonym = larger.rename_label("tin opener", "red herring")

    assert homonym.label_table.ids[30:] == ("u:1", "u:2")


def test_removed_labels_are_not_predicted_and_others_keep_their_scores(larger, corpus):
    smaller = larger.remove_labels([2, "red herring"])
    new_ids = {old: old - (old > 2) - (old > 30) for old in range(32)}

    before = larger.predict(corpus.test.texts, top_k=32, without=[2, 30], component="stage2")
    after = smaller.predict(corpus.test.texts, top_k=30, component="stage2")

    assert smaller.n_labels == 30
    for old, new in zip(known_scores(before, 32), known_scores(after, 30), strict=True):
        common = {new_ids[label]: score for label, score in old.items()}.keys() & new.keys()
        assert len(common) >= 5
        for label, score in old.items():
            if new_ids[label] in new:
                assert new[new_ids[label]] == pytest.approx(score, rel=1e-5)


def test_a_model_keeps_one_trained_label(larger):
    with pytest.raises(ModelError, match="keep one"):
        larger.remove_labels(range(30))


@pytest.mark.parametrize(("label", "into"), [(4, 9), (9, 4), (30, 31), (30, 4), (4, 30)])
def test_a_merged_label_keeps_the_name_of_the_second(larger, label, into, corpus, tmp_path):
    names = [larger.label_names[label], larger.label_names[into]]

    merged = larger.merge_labels(label, into)

    assert merged.n_labels == 31
    assert names[1] in merged.label_names
    assert names[0] not in merged.label_names
    (merged_id,) = merged.label_ids([names[1]])
    assert names[0] in merged.label_table.synonyms[merged_id]
    Elias.from_pretrained(merged.save_pretrained(tmp_path / "m")).predict(corpus.test.texts[:3])


def test_a_label_cannot_be_merged_with_itself(larger):
    with pytest.raises(DataError, match="with itself"):
        larger.merge_labels(3, 3)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), learned=st.booleans())
def test_relabelled_edges_have_the_summed_scores_of_the_old_ones(seed, learned):
    random = np.random.default_rng(seed)
    edges = torch.from_numpy(np.stack([random.permutation(7)[:5] for _ in range(3)]))
    edges[random.random((3, 5)) < 0.3] = 6
    logits = torch.from_numpy(random.normal(size=(3, 5))).float() if learned else None
    graph = LabelGraph(edges, 6, 2.0, edge_logits=logits).eval()
    new_ids = torch.from_numpy(random.integers(-1, 3, 6))

    with torch.no_grad():
        relabelled = relabel_graph(graph, new_ids, 3).eval()
        old, new = graph.unsaturated_log().exp(), relabelled.unsaturated_log().exp()

    for cluster in range(3):
        for label in range(3):
            parts = [
                float(old[cluster, slot])
                for slot in range(5)
                if edges[cluster, slot] < 6 and new_ids[edges[cluster, slot]] == label
            ]
            expected = sum(parts) if learned else float(bool(parts))
            actual = new[cluster][relabelled.edge_labels[cluster] == label]
            assert float(actual.sum()) == pytest.approx(expected, rel=1e-4)
            assert len(actual) <= 1
