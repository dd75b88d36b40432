import numpy as np
import pytest
import torch

from elias.kernels import Expansion, expand_beam, plain
from elias.kernels.cpu.search import kth_lowest, order_edges

EMPTY = -torch.inf
NO_EDGE = 4
EDGES = torch.tensor([[0, 1, NO_EDGE], [1, 2, 3]])
EDGE_LOG = torch.tensor([[-1.0, -2.0, EMPTY], [-1.0, -1.0, -3.0]])


def expand_on_torch(*tensors, n_labels, shortlist_size):
    return Expansion(*plain.expand_beam(*tensors, n_labels, shortlist_size))


@pytest.fixture(params=[expand_beam, expand_on_torch], ids=["compiled", "torch"])
def expand(request):
    def run(beam, beam_log, shortlist_size, wanted=()):
        wanted = torch.tensor([wanted], dtype=torch.int64)
        expansion = request.param(
            torch.tensor([beam]),
            torch.tensor([beam_log]),
            EDGES,
            EDGE_LOG,
            wanted,
            n_labels=4,
            shortlist_size=shortlist_size,
        )
        pairs = zip(expansion.labels[0].tolist(), expansion.paths[0].tolist(), strict=True)
        return {label: path for label, path in pairs if label < 4}, expansion.wanted_paths[
            0
        ].tolist()

    return run


def test_a_label_keeps_its_best_path(expand):
    paths, _ = expand([0, 1], [0.0, -0.5], shortlist_size=4)

    assert paths == {0: 0, 1: 3, 2: 4, 3: 5}  # label 1: -1.5 under cluster 1 beats -2


def test_of_equal_paths_the_first_in_the_beam_is_kept(expand):
    paths, _ = expand([0, 1], [0.0, -1.0], shortlist_size=4)

    assert paths[1] == 1


def test_of_equally_good_labels_the_lower_id_is_kept(expand):
    paths, _ = expand([1], [0.0], shortlist_size=1)

    assert paths == {1: 0}


def test_an_empty_slot_of_the_beam_leads_nowhere(expand):
    paths, _ = expand([2, 0], [0.0, 0.0], shortlist_size=4)

    assert paths == {0: 3, 1: 4}


def test_a_wanted_label_is_found_even_when_it_misses_the_shortlist(expand):
    paths, wanted = expand([1], [0.0], shortlist_size=1, wanted=(3, 0, 4))

    assert 3 not in paths
    assert wanted == [2, -1, -1]  # reached, not reached, padding


def test_a_beam_of_empty_slots_finds_nothing(expand):
    assert expand([2, 2], [0.0, 0.0], shortlist_size=3, wanted=(1,)) == ({}, [-1])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("n_levels", [2, 10, 1000])  # few levels make ties
def test_the_kth_lowest_value_is_that_of_a_sorted_copy(dtype, n_levels):
    generator = np.random.default_rng(n_levels)
    for size in (1, 2, 3, 50, 333):
        values = generator.integers(-n_levels, n_levels, size).astype(dtype)
        for k in {0, size // 3, size - 1}:
            assert kth_lowest(values.copy(), k) == np.sort(values)[k]


def test_the_kth_lowest_value_may_be_infinite_and_nan_does_not_stop_the_search():
    assert kth_lowest(np.array([1, -np.inf, 0], np.float32), 0) == -np.inf
    assert kth_lowest(np.array([1, np.inf, 0], np.float32), 2) == np.inf
    kth_lowest(np.array([np.nan, 1, np.nan, 0, np.nan], np.float32), 2)


def test_edges_are_ordered_by_score_and_then_by_number():
    scores = [[0.0, -1.5, 2.0, -0.0, EMPTY, 2.0], [EMPTY, -3.0, EMPTY, -0.5, 1e-30, -1e-30]]
    labels = torch.arange(12).view(2, 6)

    ordered = order_edges(labels, torch.tensor(scores))

    assert ordered.sizes.tolist() == [5, 4]
    assert ordered.edges[0, :5].tolist() == [2, 5, 0, 3, 1]
    assert ordered.edges[1, :4].tolist() == [4, 5, 3, 1]
    assert ordered.labels[1, :4].tolist() == [10, 11, 9, 7]
    assert ordered.logs[0, :5].tolist() == [2.0, 2.0, 0.0, 0.0, -1.5]
