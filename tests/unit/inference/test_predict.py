"""The steps of a prediction, on a model that was not trained."""

import numpy as np
import pytest
import torch

from elias import Elias
from elias.distributed import SingleProcess
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import DataError, RunError
from elias.inference import predict
from elias.model.batch_inference import SEARCH_GRAPHS, rank_all, rank_few
from elias.model.elias import EliasModel
from elias.predictions import Candidates
from untrained_model import NAMES, TEXTS, predicted_ids, untrained_model


@pytest.fixture(scope="module")
def model():
    return untrained_model()


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


@pytest.mark.parametrize("n_texts", [1, predict.FEW_TEXTS])
def test_few_texts_are_searched_by_one_thread(n_texts, monkeypatch):
    """With more, even torch's exp of 100 numbers starts threads, which wait for a busy core."""
    model, threads, before = untrained_model(), [], torch.get_num_threads()
    model.model.eval()
    monkeypatch.setattr(
        predict,
        "rank_few",
        lambda *args: threads.append(torch.get_num_threads()) or rank_few(*args),
    )

    model.predict(TEXTS[:1] * n_texts)

    assert threads == [1]
    assert torch.get_num_threads() == before


def test_a_text_that_is_not_a_string_is_refused(model):
    with pytest.raises(DataError, match=r"texts\[1\] is int, not a string"):
        model.predict(["cod", 3])


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


@pytest.mark.parametrize("n_texts", [1, 40])
@pytest.mark.parametrize("embed", [True, False])
def test_candidates_have_embeddings_only_if_asked_for(model, n_texts, embed):
    tokens = model.model.encoder.tokenize((TEXTS * n_texts)[:n_texts])
    options = predict.SearchOptions(5, embed=embed)

    candidates = predict.search(model.model, tokens, model.config.index, options)

    assert (candidates.embedding is not None) == embed
