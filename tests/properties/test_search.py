"""Both versions of the beam's expansion find what a walk over all paths finds."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elias.kernels import Expansion, expand_beam, plain


def expand_on_torch(*tensors, n_labels, shortlist_size):
    return Expansion(*plain.expand_beam(*tensors, n_labels, shortlist_size))


VERSIONS = pytest.mark.parametrize("expand", [expand_beam, expand_on_torch])
CASES = st.fixed_dictionaries(
    {
        "n_points": st.integers(1, 5),
        "n_clusters": st.integers(1, 6),
        "n_edges": st.integers(1, 6),
        "n_labels": st.integers(1, 12),
        "beam_size": st.integers(1, 6),
        "n_wanted": st.integers(0, 4),
        "levels": st.sampled_from([1, 3, 10**6]),  # few levels make ties
        "seed": st.integers(0, 2**31),
    }
)


def make(n_points, n_clusters, n_edges, n_labels, beam_size, n_wanted, levels, seed):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    def scores(*shape):  # from -1 or less to 1: saturated and not
        return 1 - 2 * integers(levels, *shape) / min(levels, 16)

    edge_labels = integers(n_labels + 1, n_clusters, n_edges)  # n_labels: no edge
    edge_log = scores(n_clusters, n_edges).masked_fill(edge_labels == n_labels, -torch.inf)
    beam = integers(n_clusters + 1, n_points, beam_size)  # n_clusters: an empty slot
    wanted = integers(n_labels + 1, n_points, n_wanted)
    return beam, scores(n_points, beam_size), edge_labels, edge_log, wanted


def walk(beam, beam_log, edge_labels, edge_log, wanted, *, n_labels, shortlist_size):
    """The best {label: path} of every row and the best path to each wanted label."""
    n_clusters, n_edges = edge_labels.shape
    rows = []
    for row in range(len(beam)):
        best = {}
        for position, cluster in enumerate(beam[row].tolist()):
            for edge in range(n_edges if cluster < n_clusters else 0):
                label, edge_score = edge_labels[cluster, edge].item(), edge_log[cluster, edge]
                parts = (beam_log[row, position], edge_score)
                score = (parts[0].clamp(max=0) + parts[1].clamp(max=0)).item()
                order = (score, (parts[0] + parts[1]).item())
                if label < n_labels and (label not in best or order > best[label][0]):
                    best[label] = (order, position * n_edges + edge)
        ranked = sorted(best, key=lambda label, best=best: (*(-x for x in best[label][0]), label))
        wanted_paths = [best[label][1] if label in best else -1 for label in wanted[row].tolist()]
        rows.append(({label: best[label][1] for label in ranked[:shortlist_size]}, wanted_paths))
    return rows


def rows_of(actual, n_labels):
    pairs = zip(actual.labels.tolist(), actual.paths.tolist(), strict=True)
    selected = [
        {label: path for label, path in zip(*pair, strict=True) if label < n_labels}
        for pair in pairs
    ]
    return list(zip(selected, actual.wanted_paths.tolist(), strict=True))


@VERSIONS
@given(case=CASES, shortlist_size=st.integers(1, 14))
def test_the_expansion_keeps_the_labels_and_paths_that_a_walk_over_all_paths_keeps(
    expand, case, shortlist_size
):
    tensors = make(**case)
    sizes = {"n_labels": case["n_labels"], "shortlist_size": shortlist_size}

    actual = expand(*tensors, **sizes)

    assert rows_of(actual, case["n_labels"]) == walk(*tensors, **sizes)


@VERSIONS
@given(case=CASES, shortlist_size=st.integers(1, 14))
def test_no_label_is_kept_twice_and_padding_points_at_path_zero(expand, case, shortlist_size):
    n_labels = case["n_labels"]

    actual = expand(*make(**case), n_labels=n_labels, shortlist_size=shortlist_size)

    for labels, paths in zip(actual.labels.tolist(), actual.paths.tolist(), strict=True):
        real = [label for label in labels if label < n_labels]
        assert len(real) == len(set(real))
        assert all(label <= n_labels for label in labels)
        assert not any(p for label, p in zip(labels, paths, strict=True) if label == n_labels)


@given(case=CASES, shortlist_size=st.integers(1, 14), repeats=st.integers(2, 40))
@example(
    case={
        "n_points": 3,
        "n_clusters": 4,
        "n_edges": 5,
        "n_labels": 9,
        "beam_size": 3,
        "n_wanted": 2,
        "levels": 3,
        "seed": 1,
    },
    shortlist_size=4,
    repeats=40,
)
def test_a_point_is_searched_alike_whatever_its_batch(case, shortlist_size, repeats):
    beam, beam_log, edge_labels, edge_log, wanted = make(**case)
    sizes = {"n_labels": case["n_labels"], "shortlist_size": shortlist_size}
    alone = expand_beam(beam, beam_log, edge_labels, edge_log, wanted, **sizes)

    many = expand_beam(
        beam.repeat(repeats, 1),
        beam_log.repeat(repeats, 1),
        edge_labels,
        edge_log,
        wanted.repeat(repeats, 1),
        **sizes,
    )

    rows = rows_of(many, case["n_labels"])
    assert rows == rows_of(alone, case["n_labels"]) * repeats
