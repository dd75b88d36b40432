"""The scores of all paths of a beam by Triton, and which paths a search looks at first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCORE_BLOCK = 1024


def list_paths(
    given: tuple[Tensor, ...], n_labels: int, n_listed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the paths of highest score with that score, those to wanted labels, and their number.

    The former are without the latter, -inf in their place; the latter come first in their row.
    """
    beam, _, edge_labels, _, wanted = given
    (n_rows, n_beam), (n_clusters, n_edges) = beam.shape, edge_labels.shape
    n_paths = n_beam * n_edges
    scores = torch.empty((n_rows, n_paths), dtype=torch.float32, device=beam.device)
    n_matches = torch.zeros(n_rows, dtype=torch.int32, device=beam.device)
    matches = n_matches
    if wanted.numel():
        matches = torch.empty((n_rows, n_paths), dtype=torch.int32, device=beam.device)
    _score_paths[(n_rows, triton.cdiv(n_paths, _SCORE_BLOCK))](
        *given,
        scores,
        matches,
        n_matches,
        n_beam,
        n_clusters,
        n_edges,
        n_labels,
        wanted.shape[1],
        HALVINGS=wanted.shape[1].bit_length(),
        BLOCK=_SCORE_BLOCK,
        num_warps=4,
    )
    tops, listed = scores.topk(n_listed, dim=1, sorted=False)
    return listed, tops, matches, n_matches


@triton.jit
def is_among(
    label: tl.tensor,
    ascending: tl.tensor,
    n_ascending: tl.tensor,
    HALVINGS: tl.constexpr,
) -> tl.tensor:
    """Say which labels are among the ascending ones."""
    low = tl.zeros_like(label).to(tl.int32)
    high = low + n_ascending
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(ascending + middle, mask=open_, other=0) < label
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return tl.load(ascending + low, mask=low < n_ascending, other=-1) == label


@triton.jit(do_not_specialize=["n_wanted"])
def _score_paths(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    wanted: tl.tensor,
    scores: tl.tensor,
    matches: tl.tensor,
    n_matches: tl.tensor,
    n_beam: tl.tensor,
    n_clusters: tl.tensor,
    n_edges: tl.tensor,
    n_labels: tl.tensor,
    n_wanted: tl.tensor,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each path's score, -inf for no path; note paths to wanted labels apart, as -inf."""
    row = tl.program_id(0).to(tl.int64)
    path = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n_paths = n_beam * n_edges
    label, score, _, inside = score_of(
        beam + row * n_beam,
        beam_log + row * n_beam,
        edge_labels,
        edge_log,
        path,
        path < n_paths,
        (n_clusters, n_edges, n_labels),
    )
    if HALVINGS > 0:
        match = inside & is_among(label, wanted + row * n_wanted, n_wanted, HALVINGS)
        slot = tl.atomic_add(n_matches + row + path * 0, 1, mask=match, sem="relaxed")
        tl.store(matches + row * n_paths + slot, path, mask=match)
        inside = inside & (match == 0)
    tl.store(
        scores + row * n_paths + path,
        tl.where(inside, score, -float("inf")),
        mask=path < n_paths,
    )


@triton.jit
def score_of(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    path: tl.tensor,
    inside: tl.tensor,
    sizes: tl.tensor,
) -> tl.tensor:
    """Return label, score and unsaturated score of a point's paths, and which of them are any."""
    n_clusters, n_edges, n_labels = sizes
    position = path // n_edges
    cluster = tl.load(beam + position, mask=inside, other=n_clusters)
    inside = inside & (cluster < n_clusters)
    place = cluster.to(tl.int64) * n_edges + (path - position * n_edges)
    cluster_free = tl.load(beam_log + position, mask=inside, other=0.0)
    edge_free = tl.load(edge_log + place, mask=inside, other=-float("inf"))
    label = tl.load(edge_labels + place, mask=inside, other=n_labels).to(tl.int32)
    free = cluster_free + edge_free
    inside = inside & (free != -float("inf")) & (label < n_labels)
    score = tl.minimum(cluster_free, 0.0) + tl.minimum(edge_free, 0.0)
    return label, score, free, inside
