"""Training that starts from a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, hstack

from elias import Corpus, Elias, EliasConfig, LabelTable, train
from elias.config import IndexConfig, StageConfig
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError
from elias.training.train import CONTINUED_EPOCHS, starting_config

CHANGES = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "stages.stage1.epochs": 1,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 1,
    "rerank.enabled": False,
}
CONFIG = EliasConfig().override(CHANGES)
STILL = dict.fromkeys(("encoder_lr", "bag_lr", "cluster_lr", "label_lr", "edge_lr"), 0.0)


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=400, n_labels=60)


@pytest.fixture(scope="module")
def model(corpus):
    return train(corpus, CONFIG, device="cpu")


def weights(model):
    return {name: value.clone() for name, value in model.model.state_dict().items()}


def still(stage):
    """The stage, with nothing learned in it."""
    return replace(stage, **STILL, weight_decay=0.0)


def only_stage2(stage2):
    return replace(CONFIG, stages=(stage2,))


@pytest.mark.parametrize("stages", [CONFIG.stages, CONFIG.stages[1:]], ids=["both", "second"])
def test_the_given_model_does_not_change(corpus, model, stages):
    before, config, names = weights(model), model.config, list(model.label_names)

    train(corpus, replace(CONFIG, stages=stages), device="cpu", init_from=model)

    after = weights(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (model.config, list(model.label_names)) == (config, names)


def test_a_first_stage_that_learns_the_graph_continues_with_that_of_the_model(corpus, model):
    again = train(corpus, only_stage2(still(CONFIG.stages[1])), device="cpu", init_from=model)

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_more_training_changes_edge_scores_but_not_which_edges_exist(corpus, model):
    again = train(corpus, only_stage2(CONFIG.stages[1]), device="cpu", init_from=model)

    before, after = weights(model), weights(again)
    assert torch.equal(before["graph.edge_labels"], after["graph.edge_labels"])
    assert not torch.equal(before["graph.edge_logits"], after["graph.edge_logits"])


def test_a_saved_model_serves_as_well_as_the_one_in_memory(corpus, model, tmp_path):
    saved = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    ours, theirs = (
        weights(train(corpus, CONFIG, device="cpu", init_from=start)) for start in (model, saved)
    )

    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_classifiers_of_the_same_labels_are_kept(corpus, model):
    stage1 = replace(still(CONFIG.stages[0]), keep_labels=True)

    again = train(corpus, replace(CONFIG, stages=(stage1,)), device="cpu", init_from=model)

    assert torch.equal(weights(again)["labels.weight"], weights(model)["labels.weight"])


@pytest.fixture(scope="module")
def unrelated():
    """A corpus that has no label of the model."""
    other = synthetic_corpus(n_points=300, n_labels=40, seed=1)
    return replace(other, label_names=[f"another {name}" for name in other.label_names])


def test_only_the_encoder_of_a_model_with_other_labels_is_used(model, unrelated):
    stages = tuple(replace(still(stage), keep_encoder=True) for stage in CONFIG.stages)

    new = train(unrelated, replace(CONFIG, stages=stages), device="cpu", init_from=model)

    before, after = weights(model), weights(new)
    encoder = [name for name in before if name.startswith("encoder.")]
    assert new.n_labels == 40
    assert encoder
    assert all(torch.equal(before[name], after[name]) for name in encoder)


def test_with_other_labels_the_graph_is_not_reused(model, unrelated):
    with pytest.raises(ConfigError, match="learn_graph"):
        train(unrelated, only_stage2(CONFIG.stages[1]), device="cpu", init_from=model)


def with_new_labels(corpus):
    """The corpus without its first 10 labels, with the others reversed, and with 2 new labels."""
    extra = csr_matrix(np.eye(2, dtype=np.float32)[np.arange(len(corpus.train)) % 2])
    splits = {}
    for name, split in corpus.splits.items():
        labels = hstack([split.labels[:, :9:-1], extra[: len(split)]], format="csr")
        splits[name] = replace(split, labels=labels)
    names = [*corpus.label_names[:9:-1], "even", "odd"]
    return replace(corpus.with_splits(**splits), label_names=names)


def edges(model):
    """The logit of each edge, by cluster and label."""
    graph = model.model.graph
    clusters, slots = (graph.edge_labels < model.n_labels).nonzero(as_tuple=True)
    labels, logits = graph.edge_labels[clusters, slots], graph.edge_logits[clusters, slots]
    return dict(
        zip(zip(clusters.tolist(), labels.tolist(), strict=True), logits.tolist(), strict=True)
    )


@pytest.mark.parametrize("kind", ["graph", "all"])
def test_labels_are_matched_and_new_ones_are_added(corpus, model, kind):
    first, stages = model, CONFIG.stages
    if kind == "all":
        stages = (StageConfig(name="one-vs-all", epochs=1),)
        index = IndexConfig(kind="all")
        first = train(corpus, replace(CONFIG, index=index, stages=stages), device="cpu")
    config = replace(CONFIG, stages=tuple(map(still, stages)))

    more = train(with_new_labels(corpus), config, device="cpu", init_from=first)

    assert list(more.label_names) == [*corpus.label_names, "even", "odd"]
    before, after = weights(first), weights(more)
    assert torch.equal(after["labels.weight"][:-2], before["labels.weight"])
    assert after["labels.weight"][-2:].abs().sum(dim=1).min() > 0
    assert more.added is None  # labels of the earlier training are not scored by their names
    if kind == "graph":
        ours, theirs = edges(first), edges(more)
        assert ours == {edge: logit for edge, logit in theirs.items() if edge[1] < 60}
        assert {60, 61} <= {label for _, label in theirs}


def test_old_and_new_labels_are_predicted(corpus, tmp_path):
    config = CONFIG.override({"stages.stage2.epochs": 3, "rerank.enabled": True})
    first = train(corpus, config, device="cpu")
    new = with_new_labels(corpus)

    train(new, config, device="cpu", init_from=first, out=tmp_path / "run")

    more = Elias.from_pretrained(tmp_path / "run", device="cpu")
    ids = more.predict(corpus.train.texts, top_k=10).ids
    assert np.isin([60, 61], ids).all()
    assert np.isin(ids, np.arange(10)).any()  # no new point has these
    frequencies = more.reranker.frequencies
    assert (frequencies[:10] == first.reranker.frequencies[:10]).all()
    assert frequencies[60:].min() > 0


def test_new_labels_with_few_points_are_scored_beside_the_index_until_they_have_more(corpus, model):
    few = np.arange(len(corpus.train)) < 8
    extra = csr_matrix(np.stack([few, ~few], axis=1), dtype=np.float32)
    labels = hstack([corpus.train.labels, extra], format="csr")
    train_split = replace(corpus.train, labels=labels)
    names = [*corpus.label_names, "rare", "frequent"]
    new = Corpus(train=train_split, label_names=names)

    more = train(new, CONFIG, device="cpu", init_from=model)
    frequent = train_split.take(np.flatnonzero(few).repeat(5))
    most = train(new.with_splits(train=frequent), CONFIG, device="cpu", init_from=more)

    assert more.added.labels.tolist() == [60]
    assert 0 < more.added.n_examples[0] <= 8
    assert {label for _, label in edges(more)} & {60, 61} == {61}
    assert most.added is None
    assert {60, 61} <= {label for _, label in edges(most)}


def test_an_added_label_without_new_points_keeps_its_examples(corpus, model):
    larger = model.add_labels(["rare", "no example"], {"rare": corpus.train.texts[:3]})

    more = train(corpus, CONFIG, device="cpu", init_from=larger)

    assert list(more.label_names) == [*corpus.label_names, "rare", "no example"]
    assert sorted(more.added.labels.tolist()) == [60, 61]
    assert [more.label_frequency(label) for label in (60, 61)] == [3, 0]
    (row,) = more.added.vectors[more.added.labels == 60]
    assert np.array_equal(row, larger.added.vectors[0])


def test_added_labels_with_few_new_points_keep_their_examples(corpus, model):
    names = [f"rare {i}" for i in range(100)]
    larger = model.add_labels(
        names, {name: corpus.train.texts[i : i + 3] for i, name in enumerate(names)}
    )
    own = csr_matrix(np.eye(len(corpus.train), 100, dtype=np.float32))  # one new point each
    split = replace(corpus.train, labels=hstack([corpus.train.labels, own], format="csr"))
    new = Corpus(train=split, label_names=larger.label_names)

    more = train(new, CONFIG, device="cpu", init_from=larger)

    counts = [more.label_frequency(label) for label in range(60, 160)]
    assert set(counts) == {3, 4}  # 3 if the new point was held out
    rows = more.added.relabel(np.arange(160)).vectors.tolist()
    assert all(vector in rows for vector in larger.added.vectors.tolist())


def test_labels_are_matched_by_id(corpus):
    names = tuple(corpus.label_names)
    with_ids = replace(corpus, label_names=LabelTable(names, ids=tuple(map(str, range(60)))))
    first = train(with_ids, CONFIG, device="cpu")
    renamed = LabelTable(("new name", "new"), ids=("7", "new id"))
    labels = csr_matrix(np.eye(2, dtype=np.float32)[np.arange(400) % 2])
    data = Corpus(train=replace(corpus.train, labels=labels), label_names=renamed)

    more = train(data, CONFIG, device="cpu", init_from=first)

    assert list(more.label_names) == [*names, "new"]


def test_fewer_epochs_and_the_index_of_the_model_are_the_defaults(corpus, model):
    config = starting_config(EliasConfig(), corpus, model)

    assert [stage.epochs for stage in config.stages] == [CONTINUED_EPOCHS] * 2
    assert config.index == model.config.index


def test_the_encoder_is_described_as_the_given_models_whatever_was_configured(
    corpus, model, tmp_path
):
    config = CONFIG.override({"encoder.dim": 32, "encoder.hidden_dim": 24})

    again = train(corpus, config, device="cpu", init_from=model, out=tmp_path / "run")

    saved = Elias.from_pretrained(tmp_path / "run", device="cpu")
    texts = corpus.test.texts
    assert again.config.encoder == model.config.encoder
    assert saved.predict(texts).ids.tolist() == again.predict(texts).ids.tolist()


@pytest.mark.parametrize(("changes", "message"), [({}, False), ({"encoder.dim": 32}, True)])
def test_unused_encoder_settings_are_reported(corpus, model, caplog, changes, message):
    caplog.set_level("INFO", logger="elias")

    config = starting_config(CONFIG.override(changes), corpus, model)

    assert config.encoder == model.config.encoder
    assert ("using the encoder and the encoder settings" in caplog.text) is message


def test_all_stages_continue_from_the_given_model(corpus, model):
    config = replace(CONFIG, stages=tuple(still(stage) for stage in CONFIG.stages))

    again = train(corpus, config, device="cpu", init_from=model)

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_a_model_with_the_fixed_graph_keeps_its_clusters_and_classifiers(corpus):
    changes = {"stages.stage1.cluster_with_encoder": False}
    config = CONFIG.override(changes)
    config = replace(config, stages=config.stages[:1])
    first = train(corpus, config, device="cpu")

    again = train(
        corpus, replace(config, stages=(still(config.stages[0]),)), device="cpu", init_from=first
    )

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(first).items())


def test_holding_out_more_than_half_of_the_points_is_refused(corpus):
    with pytest.raises(ConfigError, match=r"eval.validation_size is 300.*400 training points"):
        train(corpus, CONFIG.override({"eval.validation_size": 300}), device="cpu")


def test_the_ranker_is_kept_when_labels_become_too_many_to_rank_all_of_them():
    def texts_of(labels):
        return [f"alpha{label} beta{label} gamma{i % 7}" for i, label in enumerate(labels)]

    def trained(labels, **options):
        names = [[f"label{label}"] for label in labels]
        return train(
            config=EliasConfig().override({"encoder.dim": 16, "stages.one-vs-all.epochs": 1}),
            texts=texts_of(labels),
            labels=names,
            device="cpu",
            **options,
        )

    old = trained([*range(190)] * 3)
    new = trained([*range(185, 205)] * 6, init_from=old)

    assert new.reranker.features.n_features == old.reranker.features.n_features
    assert (new.reranker.frequencies[:190] >= old.reranker.frequencies).all()


def test_a_ranker_with_other_features_is_not_continued_and_the_log_says_so(corpus, caplog):
    config = CONFIG.override({"rerank.enabled": True, "rerank.trees": 2})
    old = train(corpus, config, device="cpu")

    train(corpus, config.override({"rerank.word_ngrams": 1}), device="cpu", init_from=old)

    assert "the initial model is not used: rerank.word_ngrams differs" in caplog.text
