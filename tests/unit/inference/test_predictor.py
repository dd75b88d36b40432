"""What predictions can be limited to, on a model that was not trained: it still ranks."""

import time

import numpy as np
import pytest
import torch

from elias import Elias, EliasConfig
from elias.config import EncoderConfig, IndexConfig
from elias.distributed import SingleProcess
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import DataError, ModelError, RunError
from elias.inference import predict
from elias.model.batched import SEARCH_GRAPHS, rank_all
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph, partition_edges
from elias.predictions import Candidates, Ranking
from elias.text.vectorizer import Featurizer

TEXTS = ["red cod", "blue cod", "red tape"]
NAMES = [*(f"label {i}" for i in range(38)), "twin", "twin"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    encoder = BagEncoder(EncoderConfig(dim=8, hidden_dim=8), featurizer, featurizer.n_features)
    edges = partition_edges(torch.arange(40) % 8, 8)
    graph = LabelGraph(edges, 40, 2.0, edge_logits=torch.rand(edges.shape))
    index = IndexConfig(
        n_clusters=8, edges_per_cluster=5, beam_size=2, shortlist_size=6, beta=2.0, alpha=1.5
    )
    config = EliasConfig(index=index).resolve(len(TEXTS), 40)
    return Elias(EliasModel(encoder, graph, alpha=1.5), config, NAMES)


def predicted_ids(predictions):
    return [set(ranking.ids.tolist()) for ranking in predictions]


@pytest.mark.parametrize(
    "few", [["label 3", "label 30"], [3, 30], ["label 3", 30], np.array([3, 30])]
)
def test_only_ranks_just_the_labels_named_wherever_they_are(model, few):
    predictions = model.predict(TEXTS, top_k=10, only=few)

    assert predicted_ids(predictions) == [{3, 30}] * 3


def test_only_ranks_as_an_exhaustive_search_over_those_labels_does(model):
    everything = Elias(
        model.model,
        model.config.override({"index.beam_size": 8, "index.shortlist_size": 40}).resolve(9, 40),
        NAMES,
    ).predict(TEXTS, top_k=40)

    few = model.predict(TEXTS, top_k=3, only=range(10))

    for all_of_them, some in zip(everything, few, strict=True):
        wanted = [i for i in all_of_them.ids.tolist() if i < 10][:3]
        assert some.ids.tolist() == wanted


def test_only_ranks_all_of_the_labels_though_the_shortlist_holds_fewer(model):
    wanted = set(range(1, 36))

    predictions = model.predict(TEXTS, top_k=40, only=range(1, 40), without=range(36, 40))

    assert model.sizes.shortlist_size < len(wanted)
    assert predicted_ids(predictions) == [wanted] * 3


def test_only_many_more_labels_than_can_be_scored_still_fills_the_ranking(model, monkeypatch):
    monkeypatch.setattr("elias.inference.predict.MAX_RANKED_CHOICES", 10)

    predictions = model.predict(TEXTS, top_k=6, only=range(1, 40))

    assert all(len(ranking) == 6 for ranking in predictions)
    assert all(0 not in ranking for ranking in predicted_ids(predictions))


@pytest.mark.parametrize("by", ["name", "id"])
def test_without_excludes_labels_and_others_are_ranked_instead(model, by):
    best = {int(ranking.ids[0]) for ranking in model.predict(TEXTS, top_k=1)}
    kept_off = [NAMES[i] for i in best] if by == "name" else best

    predictions = model.predict(TEXTS, top_k=3, without=kept_off)

    assert all(not best & ranking and len(ranking) == 3 for ranking in predicted_ids(predictions))


def test_only_and_without_together_leave_the_difference(model):
    predictions = model.predict(TEXTS, top_k=5, only=["label 3", 4, 5], without=[4])

    assert predicted_ids(predictions) == [{3, 5}] * 3


def test_a_name_that_two_labels_share_stands_for_both(model):
    assert model.label_ids(["twin", 0]) == [38, 39, 0]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("lable 7", "no label 'lable 7'; did you mean 'label 7'"),
        ("zzz", "no label 'zzz'; check the spelling"),
        (40, "no label 40; ids go from 0 to 39"),
        (-1, "no label -1"),
    ],
)
def test_an_unknown_label_is_refused_with_the_nearest_name(model, label, problem):
    with pytest.raises(DataError, match=problem):
        model.predict(TEXTS, only=[label])


def test_a_bare_label_is_refused(model):
    with pytest.raises(DataError, match="wrap a name in a list"):
        model.predict(TEXTS, only="label 3")


def test_many_label_names_are_looked_up_in_one_pass(model):
    names = [f"label {i}" for i in range(300_000)]
    large = Elias(model.model, model.config, names)

    begin = time.process_time()
    ids = large.label_ids(names[:40])

    assert ids == list(range(40))
    assert time.process_time() - begin < 1


def test_a_text_that_is_not_a_string_is_refused(model):
    with pytest.raises(DataError, match=r"texts\[1\] is int, not a string"):
        model.predict(["cod", 3])


def test_a_single_text_gives_one_ranking(model):
    ranking = model.predict("red cod", top_k=3)
    (expected,) = model.predict(["red cod"], top_k=3)

    assert isinstance(ranking, Ranking)
    assert ranking.labels == expected.labels
    assert ranking.scores.tolist() == expected.scores.tolist()
    assert len(model.predict("red cod", threshold=2.0)) == 0


def test_no_texts_give_no_rankings(model):
    assert len(model.predict([])) == 0


def test_the_batch_is_halved_if_memory_runs_out(model, monkeypatch):
    sizes = []

    def scarce(*args, batch_size, **kwargs):
        sizes.append(batch_size)
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rank_all(*args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr("elias.inference.predict.rank_all", scarce)

    predictions = model.predict(["a", "b", "c"], top_k=3, batch_size=8)

    assert sizes == [8, 4, 2]
    assert len(predictions) == 3


def test_graphs_are_released_before_the_batch_is_halved(model, monkeypatch):
    sizes, graphs = [], [True, False]

    def scarce(*args, batch_size, **kwargs):
        sizes.append(batch_size)
        if len(sizes) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rank_all(*args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr("elias.inference.predict.rank_all", scarce)
    monkeypatch.setattr(SEARCH_GRAPHS, "release", lambda: graphs.pop(0))

    predictions = model.predict(["a", "b", "c"], top_k=3, batch_size=8)

    assert sizes == [8, 8, 4]
    assert len(predictions) == 3


def test_too_little_memory_for_one_text_is_a_clear_error(model, monkeypatch):
    def none_left(*_, **__):
        raise MemoryError

    monkeypatch.setattr("elias.inference.predict.rank_all", none_left)

    with pytest.raises(RunError, match="Not even one text"):
        model.predict(["a"])


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("top_k", 2.5), ("batch_size", 0)])
def test_sizes_must_be_whole_and_positive(model, name, value):
    with pytest.raises(DataError, match=f"{name} must be a whole number"):
        model.predict(["a"], **{name: value})


def test_an_unfinished_run_is_reported_as_unfinished(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")

    with pytest.raises(ModelError, match="not finished"):
        Elias.from_pretrained(tmp_path)


def test_a_model_is_loaded_by_a_single_process(model, tmp_path):
    config = model.config.override({"encoder.dim": 8, "encoder.hidden_dim": 8})
    saved = Elias(model.model, config.resolve(len(TEXTS), 40), NAMES)
    folder = saved.save_pretrained(tmp_path / "model")

    loaded = Elias.from_pretrained(folder, device="cpu", world=SingleProcess())

    assert loaded.predict(TEXTS).ids.tolist() == model.predict(TEXTS).ids.tolist()


def test_a_sharded_search_keeps_the_embeddings(model, monkeypatch):
    candidates = Candidates(np.int64([[1, 2]] * 3), np.float32([[0.9, 0.5]] * 3), np.ones((3, 8)))
    monkeypatch.setattr(predict, "rank_sharded", lambda *_, **__: candidates)
    encoder, graph = model.model.encoder, model.model.graph
    rows = ShardedRows.of(SingleProcess(), model.model.labels)
    divided = EliasModel(encoder, graph, 1.5, rows)
    tokens = predict.tokenize(TEXTS, encoder)

    shared = predict.search_share(divided, tokens, model.config.index, predict.SearchOptions(2))

    assert shared.ids.tolist() == candidates.ids.tolist()
    assert shared.embedding is candidates.embedding
