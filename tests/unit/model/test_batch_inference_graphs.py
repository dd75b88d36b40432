import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from elias.config import EncoderConfig
from elias.model.batch_inference import SEARCH_GRAPHS, SearchGraphs, rank_all
from elias.model.elias import EliasModel, SearchSizes
from elias.model.graph import LabelGraph
from elias.model.transformer import TransformerEncoder
from tiny_bert import WORDS, save_tiny_bert

N_LABELS = 30
SIZES = SearchSizes(beam_size=4, shortlist_size=12)


class Graphs(SearchGraphs):
    """Captures on a CPU: does the work again, and leaves the results in the same memory.

    Counts the captures and replays.
    """

    def __init__(self, **limits):
        self.recorded = self.repeated = 0
        super().__init__(
            **{"min_calls": 1, **limits},
            recorder=lambda _device: self.record,
            supported=lambda _model: True,
        )

    def record(self, work):
        outputs = tuple(part.clone() for part in work())
        self.recorded += 1

        def replay():
            self.repeated += 1
            for own, again in zip(outputs, work(), strict=True):
                own.copy_(again)

        return replay, outputs


@pytest.fixture
def graphs():
    """Graphs that are captured from the second call on."""
    return Graphs()


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("bert") / "bert")


def make_model(folder, seed=0):
    torch.manual_seed(seed)
    encoder = TransformerEncoder.from_config(EncoderConfig(model=folder))
    edges = torch.arange(32).view(8, 4) % N_LABELS
    graph = LabelGraph(edges, N_LABELS, 2.0, edge_logits=edges / 9)
    return EliasModel(encoder, graph, 2.0).eval()


@pytest.fixture
def model(tiny_bert):
    return make_model(tiny_bert)


def texts_of(*sizes):
    rng = np.random.default_rng(len(sizes))
    return [" ".join(rng.choice(WORDS, size)) for size in sizes]


def rank(model, *sizes, top_k=5, **options):
    return rank_all(model, model.encoder.tokenize(texts_of(*sizes)), SIZES, top_k, **options)


def plain(model, *sizes, **options):
    """The result without graphs."""
    return rank(copy.deepcopy(model), *sizes, **options)


def assert_alike(candidates, expected):
    assert np.array_equal(candidates.ids, expected.ids)
    np.testing.assert_allclose(candidates.scores, expected.scores, rtol=1e-4)


def record_one(model, graphs):
    """Rank a text often enough for its shape to be captured."""
    for _ in range(2):
        rank(model, 3, graphs=graphs)


def assert_right_again_and_again(model, graphs):
    """Rank that text often enough for its shape to be captured anew, and check the results."""
    for _ in range(3):
        assert_alike(rank(model, 3, graphs=graphs), plain(model, 3))


def test_a_recurring_shape_is_captured_and_reused_in_later_calls(model, graphs):
    for _ in range(5):
        assert_alike(rank(model, 3, graphs=graphs), plain(model, 3))

    assert (graphs.recorded, graphs.repeated) == (1, 4)


def test_a_shape_is_captured_after_min_calls(model):
    graphs = Graphs(min_calls=3)

    recorded = []
    for _ in range(5):
        rank(model, 3, graphs=graphs)
        recorded.append(graphs.recorded)

    assert recorded == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_captured_searches_rank_like_eager_ones(model, graphs, batch_size):
    calls = [(0, 1, 9, 3, 2, 30, 1, 5), (7, 4, 0), (1,), (3, 3), (2, 30, 9, 1, 4, 8, 9)]

    for sizes in calls * 3:
        candidates = rank(model, *sizes, batch_size=batch_size, graphs=graphs)
        assert_alike(candidates, plain(model, *sizes, batch_size=batch_size))

    assert graphs.repeated > len(calls)


def test_another_number_of_labels_uses_the_same_graphs(model, graphs):
    for top_k in (5, 5, 1, 3, 12, 100):
        candidates = rank(model, 3, top_k=top_k, graphs=graphs)
        assert_alike(candidates, plain(model, 3, top_k=top_k))

    assert graphs.recorded == 1


def test_graphs_for_more_labels_also_serve_calls_with_fewer(model):
    graphs = Graphs(min_width=2)

    for top_k in (2, 2, 6, 6, 2, 6):
        candidates = rank(model, 3, top_k=top_k, graphs=graphs)
        assert_alike(candidates, plain(model, 3, top_k=top_k))

    assert graphs.recorded == 2


def test_other_search_sizes_are_captured_again(model, graphs):
    tokens = model.encoder.tokenize(texts_of(3))
    for sizes in (SIZES, SIZES, SearchSizes(2, 12), SearchSizes(2, 12)):
        candidates = rank_all(model, tokens, sizes, 5, graphs=graphs)
        assert_alike(candidates, rank_all(model, tokens, sizes, 5))

    assert graphs.recorded == 2


def move(model):
    for parameter in model.encoder.parameters():
        parameter.data = parameter.data.clone()


def change_in_place(model):
    with torch.no_grad():
        model.graph.edge_logits.neg_()
        model.labels.weight.neg_()


def replace_tensor(model):
    state = {name: -tensor for name, tensor in model.labels.state_dict().items()}
    model.labels.load_state_dict(state, assign=True)


def replace_part(model):
    model.encoder = copy.deepcopy(model.encoder)
    model.encoder.bottleneck = torch.nn.Linear(model.encoder.dim, model.encoder.dim)
    model.eval()


def set_beta(model):
    model.graph.beta = 1.3


@pytest.mark.parametrize(
    "change", [move, change_in_place, replace_tensor, replace_part, set_beta, lambda m: m.double()]
)
def test_graphs_are_captured_again_when_the_weights_change(model, graphs, change):
    record_one(model, graphs)
    change(model)
    model.float()

    assert_right_again_and_again(model, graphs)

    assert graphs.recorded == 2


def test_a_model_in_training_keeps_no_graphs(model, graphs):
    record_one(model, graphs)
    model.train()

    for _ in range(3):
        rank(model, 3, graphs=graphs)

    assert graphs.repeated == 1
    assert model not in graphs.by_model


def test_graphs_of_a_model_in_training_last_for_one_call(model):
    graphs = Graphs(many_texts=8)
    expected = plain(model, *[3] * 8, batch_size=2)
    model.train()

    rank(model, *[3] * 7, batch_size=2, graphs=graphs)
    before = graphs.recorded
    candidates = rank(model, *[3] * 8, batch_size=2, graphs=graphs)

    assert before == 0
    assert (graphs.recorded, graphs.repeated) == (1, 3)
    assert_alike(candidates, expected)
    assert model not in graphs.by_model


def test_blocked_labels_do_not_use_cached_graphs(model, graphs):
    for _ in range(2):
        best = rank(model, 3, graphs=graphs).ids[0, 0]
    before = graphs.repeated

    for _ in range(3):
        blocked = torch.arange(N_LABELS) == best
        candidates = rank(model, 3, blocked=blocked, graphs=graphs)
        assert best not in candidates.ids

    assert graphs.repeated == before
    assert rank(model, 3, graphs=graphs).ids[0, 0] == best


def test_members_of_an_ensemble_have_their_own_graphs(tiny_bert, graphs):
    members = [make_model(tiny_bert, seed) for seed in (1, 2)]

    for _ in range(3):
        for member in members:
            assert_alike(rank(member, 3, graphs=graphs), plain(member, 3))

    assert graphs.recorded == 2


def test_copies_and_saved_weights_contain_no_graphs(model, graphs):
    names = list(model.state_dict())
    record_one(model, graphs)

    other = copy.deepcopy(model)

    assert list(model.state_dict()) == names
    assert other not in graphs.by_model
    assert graphs.recorded == 1


def test_graphs_are_freed_with_their_model(tiny_bert, graphs):
    model = make_model(tiny_bert)
    record_one(model, graphs)
    graphs_of_model = weakref.ref(graphs.by_model[model])

    del model
    gc.collect()

    assert graphs_of_model() is None
    assert graphs.recorded == 1


def test_two_threads_never_share_a_graph(model, graphs):
    record_one(model, graphs)
    expected = plain(model, 3)
    candidates = []

    with graphs.captured(model, SIZES, 5, None, 1) as captured:
        other = threading.Thread(target=lambda: candidates.append(rank(model, 3, graphs=graphs)))
        other.start()
        other.join()

    assert captured is not None
    assert graphs.repeated == 1
    assert_alike(candidates[0], expected)


def test_graphs_are_released_for_good_if_memory_runs_out(model, graphs):
    record_one(model, graphs)

    assert graphs.release()
    assert not graphs.release()

    assert_right_again_and_again(model, graphs)
    assert graphs.recorded == 1


def test_graphs_are_captured_again_after_a_failed_call(model, graphs):
    record_one(model, graphs)

    def interrupted():
        with graphs.captured(model, SIZES, 5, None, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    for _ in range(2):
        assert_alike(rank(model, 3, graphs=graphs), plain(model, 3))
    assert graphs.recorded == 2


@pytest.mark.parametrize(
    ("n_texts", "batch_size", "n_rows"), [(1, 8, 1), (3, 8, 4), (8, 8, 8), (5, 6, 6)]
)
def test_the_number_of_texts_is_rounded_up_to_a_power_of_two(
    model, graphs, n_texts, batch_size, n_rows
):
    tokens = model.encoder.tokenize(texts_of(*[3] * n_texts))
    batch = graphs.gather(model.encoder, batch_size, tokens, np.arange(n_texts))

    assert len(batch) == n_rows
    assert graphs.recorded == 0


def test_large_batches_are_not_padded_with_empty_texts(model):
    graphs = Graphs(max_padded_tokens=16)
    tokens = model.encoder.tokenize(texts_of(3, 3, 3))

    assert len(graphs.gather(model.encoder, 8, tokens, np.arange(3))) == 3
    assert graphs.recorded == 0


def test_large_batches_of_packed_texts_have_a_few_sizes(model, monkeypatch):
    monkeypatch.setattr(model.encoder, "packs", lambda _: True)
    graphs = Graphs(max_padded_tokens=16)
    tokens = model.encoder.tokenize(texts_of(3, 3, 3))

    batch = graphs.gather(model.encoder, 8, tokens, np.arange(3))

    assert (len(batch), len(batch.ids)) == (4, 64)


def test_texts_are_not_padded_if_graphs_are_not_used(model):
    with SEARCH_GRAPHS.captured(model, SIZES, 5, None, 10**6) as captured:
        assert captured is None

    assert model not in SEARCH_GRAPHS.by_model


def test_an_encoder_is_compiled_once_and_only_after_large_calls(model):
    prepared, graphs = [], Graphs(many_texts=6, large_call=3)
    model.encoder.prepare = lambda device: prepared.append(device.type) or True

    for sizes in [(3,)] * 6 + [(3, 3, 3)]:
        rank(model, *sizes, graphs=graphs)
    before = graphs.recorded, len(prepared)
    for sizes in [(3, 3, 3), (3, 3, 3), (3, 3, 3, 3), (3,), (3,)]:
        rank(model, *sizes, graphs=graphs)

    assert before == (1, 0)
    assert prepared == ["cpu"]
    assert graphs.recorded == 3  # of one text and of three or four, anew
