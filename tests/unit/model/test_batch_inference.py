import numpy as np
import pytest
import torch

from elias.config import EncoderConfig
from elias.model.batch_inference import (
    cluster_all,
    embed_all,
    evaluating,
    rank_all,
    rank_in_threads,
)
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph
from elias.text.batches import collate
from elias.text.vectorizer import Featurizer

N_LABELS = 30
WORDS = ["cod", "liver", "oil", "red", "blue", "tape", "herring", "sea", "ship", "net", "rope"]
SIZES = SearchSizes(beam_size=4, shortlist_size=12)


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return ["", *(" ".join(rng.choice(WORDS, size)) for size in (1, 9, 3, 2, 40, 1, 5, 7, 4))]


@pytest.fixture
def model(texts):
    generator = torch.Generator().manual_seed(0)
    featurizer = Featurizer.fit(texts, char_ngrams=(3, 3), min_count=1)
    encoder = BagEncoder(EncoderConfig(dim=8, hidden_dim=8), featurizer, featurizer.n_features)
    rows = [torch.randperm(N_LABELS, generator=generator)[:7] for _ in range(8)]
    logits = torch.randn(8, 7, generator=generator)
    model = EliasModel(
        encoder, LabelGraph(torch.stack(rows), N_LABELS, 2.0, edge_logits=logits), 2.0
    )
    model.labels.weight.data *= 5
    model.clusters.weight.data *= 5
    return model


@pytest.fixture
def tokens(model, texts):
    return model.encoder.tokenize(texts)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_predictions_do_not_depend_on_the_batch_size(model, tokens, batch_size):
    whole = rank_all(model, tokens, SIZES, 5, batch_size=10)

    candidates = rank_all(model, tokens, SIZES, 5, batch_size=batch_size)

    assert np.array_equal(candidates.ids, whole.ids)
    np.testing.assert_allclose(candidates.scores, whole.scores, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_threads_rank_texts_as_one_thread_does(model, tokens, batch_size, training):
    model.train(training)
    whole, n_threads = rank_all(model, tokens, SIZES, 5, embed=True), torch.get_num_threads()

    candidates = rank_in_threads(model, tokens, SIZES, 5, batch_size=batch_size, embed=True)

    assert np.array_equal(candidates.ids, whole.ids)
    np.testing.assert_allclose(candidates.scores, whole.scores, rtol=1e-5)
    np.testing.assert_allclose(candidates.embedding, whole.embedding, rtol=1e-4, atol=1e-6)
    assert model.training == training
    assert torch.get_num_threads() == n_threads


def test_each_of_several_batches_has_one_thread(model, tokens):
    numbers = []

    def record(*_):
        numbers.append(torch.get_num_threads())

    with model.encoder.register_forward_hook(record):
        rank_in_threads(model, tokens, SIZES, 5, batch_size=5)

    assert numbers == [1, 1]


def test_a_text_is_ranked_alike_alone_and_beside_a_long_one(model, texts):
    longest = " ".join(WORDS * 20)
    alone = rank_all(model, model.encoder.tokenize([texts[1]]), SIZES, 5)

    beside = rank_all(model, model.encoder.tokenize([longest, texts[1]]), SIZES, 5)

    assert np.array_equal(beside.ids[1], alone.ids[0])
    np.testing.assert_allclose(beside.scores[1], alone.scores[0], rtol=1e-5)


def test_rows_are_in_the_order_of_the_texts_with_descending_scores(model, tokens, texts):
    candidates = rank_all(model, tokens, SIZES, 5)

    model.eval()
    for row in range(len(texts)):
        with torch.no_grad():
            embedding = model.encoder(collate(tokens, np.array([row])))
        labels, _ = model.rank(embedding, SIZES, 5)
        assert candidates.ids[row].tolist() == labels[0].tolist()
    assert (np.diff(candidates.scores, axis=1) <= 0).all()


def test_a_search_returns_the_embeddings_if_asked(model, tokens):
    assert rank_all(model, tokens, SIZES, 5).embedding is None

    candidates = rank_all(model, tokens, SIZES, 5, batch_size=4, embed=True)

    assert np.array_equal(candidates.embedding, embed_all(model.encoder, tokens, batch_size=4))


def test_at_most_shortlist_size_labels_are_returned(model, tokens):
    assert rank_all(model, tokens, SearchSizes(4, 3), 5).ids.shape == (10, 3)


def test_no_texts_give_no_rows(model):
    candidates = rank_all(model, model.encoder.tokenize([]), SIZES, 5)

    assert candidates.ids.shape == (0, 5)


def test_blocked_labels_are_not_predicted(model, tokens):
    blocked = torch.zeros(N_LABELS, dtype=torch.bool)
    blocked[rank_all(model, tokens, SIZES, 2).ids.ravel()] = True

    candidates = rank_all(model, tokens, SIZES, 5, blocked=blocked)

    assert not blocked[candidates.ids[candidates.ids < N_LABELS]].any()
    assert (candidates.ids[:, 0] < N_LABELS).all()


def test_embeddings_do_not_depend_on_the_batch_size(model, tokens):
    np.testing.assert_allclose(
        embed_all(model.encoder, tokens, batch_size=3),
        embed_all(model.encoder, tokens),
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_best_clusters_come_with_their_scores(model, tokens):
    beams, scores = cluster_all(model, tokens, 3, batch_size=4)

    with torch.no_grad():
        dense = (
            model.unsaturated_log(torch.from_numpy(embed_all(model.encoder, tokens)))
            .clamp(max=0)
            .exp()
            .numpy()
        )
    np.testing.assert_allclose(np.take_along_axis(dense, beams, 1), scores, rtol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-dense, axis=1)[:, :3], rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_switches_dropout_and_gradients_off_and_restores_them(model, training):
    model.train(training)

    with evaluating(model):
        inside = (model.training, torch.is_grad_enabled())

    assert inside == (False, False)
    assert (model.training, torch.is_grad_enabled()) == (training, True)


def test_a_failing_search_leaves_the_model_in_training(model):
    model.train()

    def fail(_):
        raise MemoryError("too large")

    model.encoder.forward = fail
    with pytest.raises(MemoryError):
        rank_all(model, model.encoder.tokenize(["cod"]), SIZES, 5)

    assert model.training
    assert torch.is_grad_enabled()
