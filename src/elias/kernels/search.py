"""Search: expand the beam, keep the best path per label, keep the best labels (Eq. 4–6)."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.cpu import search as cpu_search
from elias.kernels.device import runs_triton


class Expansion(NamedTuple):
    """What a beam reaches. A path is numbered ``position in the beam · E + edge``."""

    labels: Int[Tensor, "B K"]
    """The best labels in no order, padded with ``n_labels``."""
    paths: Int[Tensor, "B K"]
    """The best path to each (the first of equal ones), 0 in padded slots."""
    wanted_paths: Int[Tensor, "B Y"]
    """The best path to each wanted label, -1 where none was reached; not limited to the best K."""


def expand_beam(
    beam: Int[Tensor, "B b"],
    beam_log: Float[Tensor, "B b"],
    edge_labels: Int[Tensor, "C E"],
    edge_log: Float[Tensor, "C E"],
    wanted: Int[Tensor, "B Y"],
    *,
    n_labels: int,
    shortlist_size: int,
) -> Expansion:
    """Score each path log ŝ_c + log ŝ_{c,ℓ}, keep the best per label, then the K best labels.

    ``beam_log`` and ``edge_log`` come before the min(1, ·) of Eq. 1 and 5, which is taken here:
    many labels share the highest score there is, and of equal scores the one with more behind it
    goes first, then the lower label id. An edge of -inf is no edge; a beam slot of C is empty.
    ``wanted`` labels are ascending in each row, L is none.
    """
    run = _expand_compiled
    if beam.is_cuda:
        run = _expand_triton if runs_triton(beam) else _expand_torch
    with torch.no_grad():
        return run(beam, beam_log, edge_labels, edge_log, wanted, n_labels, shortlist_size)


def _expand_compiled(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
) -> Expansion:
    n_rows = len(beam)
    size = min(shortlist_size, n_labels)
    labels = np.full((n_rows, size), n_labels, dtype=np.int64)
    paths = np.zeros((n_rows, size), dtype=np.int64)
    wanted_paths = np.full(wanted.shape, -1, dtype=np.int64)
    cpu_search.expand_beam(
        (beam.numpy(), beam_log.detach().float().numpy()),
        ordered_edges(edge_labels, edge_log),
        wanted.numpy(),
        n_labels,
        min(numba.get_num_threads(), max(1, n_rows)),
        (labels, paths, wanted_paths),
    )
    return Expansion(*(torch.from_numpy(part) for part in (labels, paths, wanted_paths)))


def ordered_edges(
    edge_labels: Int[Tensor, "C E"], edge_log: Float[Tensor, "C E"]
) -> cpu_search.OrderedEdges:
    """Return the edges of each cluster, best first, as the compiled search wants them."""
    shape = tuple(edge_labels.shape)
    ordered = cpu_search.OrderedEdges(
        edges=np.empty(shape, dtype=np.int32),
        logs=np.empty(shape, dtype=np.float32),
        labels=np.empty(shape, dtype=np.int32),
        sizes=np.empty(shape[0], dtype=np.int64),
    )
    cpu_search.order_edges(edge_labels.numpy(), edge_log.detach().float().numpy(), *ordered)
    return ordered


def _expand_triton(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
) -> Expansion:
    from elias.kernels.gpu import search as gpu_search

    return Expansion(
        *gpu_search.expand_beam(
            beam, beam_log, edge_labels, edge_log, wanted, n_labels, shortlist_size
        )
    )


def _expand_torch(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
) -> Expansion:
    n_clusters = len(edge_labels)
    inside = (beam < n_clusters).unsqueeze(-1)
    clusters = beam.clamp(max=n_clusters - 1)
    parts = beam_log.detach().float().unsqueeze(-1), edge_log.detach().float()[clusters]
    free = (parts[0] + parts[1]).masked_fill(~inside, -torch.inf).flatten(1)  # (B, P)
    scores = (parts[0].clamp(max=0) + parts[1].clamp(max=0)).flatten(1)
    labels = edge_labels[clusters].flatten(1).masked_fill(free == -torch.inf, n_labels)
    n_paths = free.shape[1]

    # A path wins its label by score, then by unsaturated score (one 64-bit key), then by number.
    key = (sortable(scores) << 32) + (sortable(free) + 2**31)
    place = torch.arange(n_paths, device=beam.device).expand_as(key)
    best = torch.full((len(beam), n_labels + 1), _LOWEST, device=beam.device)
    best.scatter_reduce_(1, labels, key, "amax")
    first = torch.full_like(best, n_paths)
    candidates = place.masked_fill(key != best.gather(1, labels), n_paths)
    first.scatter_reduce_(1, labels, candidates, "amin")
    first[:, n_labels] = n_paths
    wins = place == first.gather(1, labels)

    # The K best: all above the K-th key, then those equal to it by label id.
    size = min(shortlist_size, n_labels, n_paths)
    choice = key.masked_fill(~wins, _LOWEST)
    last = choice.topk(size, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    tied = torch.where(wins & (choice == last), n_labels - labels, _LOWEST)
    chosen, paths = torch.where(choice > last, 2**40 + place, tied).topk(size, dim=1, sorted=False)
    empty = chosen == _LOWEST
    missing = min(shortlist_size, n_labels) - size
    wanted_path = first.gather(1, wanted.clamp(max=n_labels))
    return Expansion(
        labels=_widen(labels.gather(1, paths).masked_fill(empty, n_labels), missing, n_labels),
        paths=_widen(paths.masked_fill(empty, 0), missing, 0),
        wanted_paths=wanted_path.masked_fill(wanted_path == n_paths, -1),
    )


_LOWEST = -(2**63)


def _widen(slots: Tensor, missing: int, value: int) -> Tensor:
    return torch.nn.functional.pad(slots, (0, missing), value=value)


def sortable(scores: Float[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """Map floats to 32-bit integers of the same order, held in 64 bits."""
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
