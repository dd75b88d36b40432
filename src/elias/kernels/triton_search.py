"""The beam's expansion by Triton kernels and one `torch.topk`.

A kernel scores all paths, and `torch.topk` lists some times K of the best (`triton_listing`). Then
one program per point takes the list, and with it all paths to wanted labels. It keeps the best path
to each label (`triton_best_paths`), and of these the K best (`triton_selection`). Where the labels
that score above the list's last path are fewer than K, the program starts over with all paths: the
answer is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from elias.kernels.triton_best_paths import compete, drop_losers, find_wanted, walk_paths
from elias.kernels.triton_listing import list_paths
from elias.kernels.triton_selection import select

_TABLE_BYTES = 2**31  # of label tables in all
_MULTIPROCESSORS = 132  # of an H200; a GPU with fewer has programs wait
_BLOCK, _WARPS = 4096, 16
LISTED_A_LABEL = 4
"""So many times K paths are looked at first."""


def expand_beam(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
    *,
    block: int | None = None,
    n_programs: int = 2 * _MULTIPROCESSORS,
    n_warps: int | None = None,
    n_listed: int | None = None,
    entry: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels and paths (B, K) and wanted paths (B, Y) as `elias.kernels.Expansion` does.

    ``n_listed`` paths are looked at first, 0: all; ``entry`` is what a table of labels is made of;
    by default both are decided here.
    """
    n_rows, n_beam = beam.shape
    n_clusters, n_edges = edge_labels.shape
    n_paths = n_beam * n_edges
    n_keep = min(shortlist_size, n_labels)
    labels = torch.empty((n_rows, n_keep), dtype=torch.int64, device=beam.device)
    paths = torch.empty_like(labels)
    wanted_paths = torch.empty(wanted.shape, dtype=torch.int64, device=beam.device)
    if n_rows == 0:
        return labels, paths, wanted_paths
    # a point that has a multiprocessor to itself takes more of it
    room = 2 if n_rows <= _MULTIPROCESSORS else 1
    if n_listed is None:
        n_listed = LISTED_A_LABEL * n_keep if 2 * LISTED_A_LABEL * n_keep <= n_paths else 0
    n_listed = min(n_listed, n_paths)
    n_slots = n_paths + n_listed
    entry = entry or (torch.uint16 if n_slots <= 2**16 else torch.int32)
    n_programs = max(1, min(n_rows, n_programs, _TABLE_BYTES // (n_labels * entry.itemsize)))

    def scratch(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((n_programs, width), dtype=dtype, device=beam.device)

    given = (
        beam.contiguous(),
        beam_log.detach().float().contiguous(),
        edge_labels.contiguous(),
        edge_log.detach().float().contiguous(),
        wanted.contiguous(),
    )
    listed = tops = matches = n_matches = beam  # not read where nothing is listed
    if n_listed:
        listed, tops, matches, n_matches = list_paths(given, n_labels, n_listed)
    _expand[(n_programs,)](
        *given,
        listed,
        tops,
        matches,
        n_matches,
        scratch(n_labels, entry),
        scratch(n_slots),
        scratch(n_slots),
        scratch(n_slots),
        scratch(n_slots),
        scratch(n_slots, torch.int64),
        scratch(n_slots),
        labels,
        paths,
        wanted_paths,
        n_rows,
        n_beam,
        n_clusters,
        n_edges,
        n_labels,
        wanted.shape[1],
        n_keep,
        n_listed,
        BLOCK=block or room * _BLOCK,
        LISTED=n_listed > 0,
        num_warps=n_warps or room * _WARPS,
        num_stages=1,
        maxnreg=64,  # so that two programs of 16 warps share a multiprocessor
    )
    return labels, paths, wanted_paths


@triton.jit(
    do_not_specialize=[
        "n_rows",
        "n_beam",
        "n_clusters",
        "n_edges",
        "n_labels",
        "n_wanted",
        "n_keep",
        "n_listed",
    ]
)
def _expand(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    wanted: tl.tensor,
    listed: tl.tensor,
    tops: tl.tensor,
    matches: tl.tensor,
    n_matches: tl.tensor,
    table: tl.tensor,
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
    numbers: tl.tensor,
    best: tl.tensor,
    first: tl.tensor,
    out_labels: tl.tensor,
    out_paths: tl.tensor,
    out_wanted: tl.tensor,
    n_rows: tl.tensor,
    n_beam: tl.tensor,
    n_clusters: tl.tensor,
    n_edges: tl.tensor,
    n_labels: tl.tensor,
    n_wanted: tl.tensor,
    n_keep: tl.tensor,
    n_listed: tl.tensor,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    own = tl.program_id(0).to(tl.int64)
    n_paths = n_beam * n_edges
    room = own * (n_paths + n_listed)
    scratch = (
        table + own * n_labels,
        labels + room,
        scores + room,
        frees + room,
        numbers + room,
        best + room,
        first + room,
    )
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = own * 0 + row  # of 64 bits, and also where the interpreter gives a plain number
        listing = n_paths * 0
        n_slots = n_paths
        if LISTED:
            listing += 1
            n_slots = n_listed + tl.load(n_matches + at)
        going = n_paths > 0
        while going:
            lowest = walk_paths(
                beam + at * n_beam,
                beam_log + at * n_beam,
                edge_labels,
                edge_log,
                (
                    listed + at * n_listed,
                    tops + at * n_listed,
                    matches + at * n_paths,
                    n_listed,
                ),
                scratch,
                (n_slots, n_paths, n_clusters, n_edges, n_labels),
                listing,
                LISTED,
                BLOCK,
            )
            tl.debug_barrier()
            compete(scratch, n_slots, n_labels, False, BLOCK)
            tl.debug_barrier()
            compete(scratch, n_slots, n_labels, True, BLOCK)
            tl.debug_barrier()
            find_wanted(
                scratch,
                wanted + at * n_wanted,
                out_wanted + at * n_wanted,
                n_wanted,
                n_slots,
                n_labels,
                128,
            )
            tl.debug_barrier()
            n_found, n_above = drop_losers(scratch, n_slots, n_labels, lowest, BLOCK)
            tl.debug_barrier()
            enough = (n_above >= n_keep) | (lowest == -2147483647) | (listing == 0)
            if enough:
                select(
                    scratch,
                    (out_labels + at * n_keep, out_paths + at * n_keep),
                    (n_slots, n_labels, n_keep),
                    n_found,
                    BLOCK,
                )
            tl.debug_barrier()
            going = enough == 0  # a list too short: once more, with all paths
            listing = listing * 0
            n_slots = n_paths
