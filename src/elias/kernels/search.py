"""Search: expand the beam, keep the best path per label, keep the best labels (Eq. 4–6)."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels import compiled


class Expansion(NamedTuple):
    """What a beam reaches. A path is numbered ``position in the beam · E + edge``."""

    labels: Int[Tensor, "B K"]
    """The best labels in no order, padded with ``n_labels``; ties go to the lower label id."""
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

    An edge whose log score is -inf is no edge; a beam slot of ``C`` is empty.
    """
    run = _expand_torch if beam.is_cuda else _expand_compiled
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
    compiled.expand_beam(
        beam.numpy(),
        beam_log.detach().float().numpy(),
        edge_labels.numpy(),
        edge_log.detach().float().numpy(),
        wanted.numpy(),
        n_labels,
        min(numba.get_num_threads(), max(1, n_rows)),
        (labels, paths, wanted_paths),
    )
    return Expansion(*(torch.from_numpy(part) for part in (labels, paths, wanted_paths)))


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
    inside = beam < n_clusters
    clusters = beam.clamp(max=n_clusters - 1)
    scores = beam_log.detach().float().unsqueeze(-1) + edge_log.detach().float()[clusters]
    scores = scores.masked_fill(~inside.unsqueeze(-1), -torch.inf).flatten(1)  # (B, P)
    labels = edge_labels[clusters].flatten(1)  # (B, P)
    labels = labels.masked_fill(scores == -torch.inf, n_labels)
    n_paths = scores.shape[1]

    # One 64-bit key orders paths by score, then by number, so every maximum is unique.
    place = torch.arange(n_paths, device=beam.device)
    key = _sortable(scores) + (n_paths - place)
    best = torch.full((len(beam), n_labels + 1), _LOWEST, device=beam.device, dtype=torch.int64)
    best.scatter_reduce_(1, labels, key, "amax")
    best[:, n_labels] = _LOWEST
    wins = (key == best.gather(1, labels)) & (labels < n_labels)

    choice = torch.where(wins, _sortable(scores) + (n_labels - labels), _LOWEST)
    size = min(shortlist_size, n_paths)
    chosen, paths = choice.topk(size, dim=1, sorted=False)
    empty = chosen == _LOWEST
    wanted_key = best.gather(1, wanted.clamp(max=n_labels))
    wanted_path = n_paths - (wanted_key & 0xFFFFFFFF)
    return Expansion(
        labels=labels.gather(1, paths).masked_fill(empty, n_labels),
        paths=paths.masked_fill(empty, 0),
        wanted_paths=wanted_path.masked_fill(wanted_key == _LOWEST, -1),
    )


_LOWEST = -(2**63)


def _sortable(scores: Float[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """Map floats to integers of the same order, in the upper 32 bits."""
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered << 32
