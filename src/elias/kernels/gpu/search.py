"""Beam expansion as Triton kernels.

Each path writes its number into a table of one entry per label; whichever write survives names the
label's *representative*, and all paths to that label compete at the representative's place. The
table needs no clearing: an entry is read only where a path of this point has just written it, or
checked against the path it names. Its entries have 16 bits where those can number all paths.

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

from elias.kernels.gpu.select import select

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


@triton.jit
def sortable(scores: tl.tensor) -> tl.tensor:
    """Map floats to integers of the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def one_key(score: tl.tensor, free: tl.tensor) -> tl.tensor:
    """Return one integer that orders by score, then by unsaturated score."""
    return score.to(tl.int64) * 4294967296 + (free.to(tl.int64) + 2147483648)


@triton.jit
def walk_paths(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    given: tl.tensor,
    scratch: tl.tensor,
    sizes: tl.tensor,
    listing: tl.tensor,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Note label, scores and key of a point's paths, and a representative per label.

    Return the lowest score among the listed paths, of all integers the lowest if they are all
    there are. ``listing`` 0: all paths are taken, by number.
    """
    table, labels, scores, frees, numbers, best, first = scratch
    listed, tops, matches, n_listed = given
    n_slots, n_paths, n_clusters, n_edges, n_labels = sizes
    lowest = tl.zeros([BLOCK], tl.int32) + 2147483647
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        known = slot < n_slots
        path = slot
        if LISTED:
            is_listed = known & (slot < n_listed) & (listing != 0)
            is_match = known & (slot >= n_listed) & (listing != 0)
            top = tl.load(tops + slot, mask=is_listed, other=0.0)
            path = tl.load(listed + slot, mask=is_listed, other=0).to(tl.int32)
            path += tl.load(matches + slot - n_listed, mask=is_match, other=0).to(tl.int32)
            path = tl.where(listing != 0, path, slot)
            path = tl.where(top == -float("inf"), n_paths, path)  # none, or one of the matches
        label, score, free, inside = score_of(
            beam,
            beam_log,
            edge_labels,
            edge_log,
            path,
            known & (path < n_paths),
            (n_clusters, n_edges, n_labels),
        )
        score = sortable(score)
        free = sortable(free)
        if LISTED:
            floor = tl.where(inside, score, -2147483647)
            lowest = tl.minimum(lowest, tl.where(is_listed, floor, 2147483647))
        tl.store(labels + slot, tl.where(inside, label, n_labels), mask=known)
        tl.store(scores + slot, score, mask=known)
        tl.store(frees + slot, free, mask=known)
        tl.store(numbers + slot, path, mask=known)
        tl.store(best + slot, one_key(score, free), mask=known)
        tl.store(first + slot, tl.zeros([BLOCK], tl.int32) + 2147483647, mask=known)
        tl.store(table + label, slot.to(table.dtype.element_ty), mask=inside)
    return tl.min(lowest, axis=0)


@triton.jit
def representative(table: tl.tensor, label: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the place that the table has for each label; what others wrote is seen."""
    return tl.load(table + label, mask=inside, other=0, cache_modifier=".cg").to(tl.int32)


@triton.jit
def compete(
    scratch: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    BY_NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Bring the best key to each representative; then the first path that has it (BY_NUMBER)."""
    table, labels, scores, frees, numbers, best, first = scratch
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        chief = representative(table, label, inside)
        score = tl.load(scores + slot, mask=inside, other=0)
        free = tl.load(frees + slot, mask=inside, other=0)
        key = one_key(score, free)
        if BY_NUMBER:
            top = tl.load(best + chief, mask=inside, other=0, cache_modifier=".cg")
            number = tl.load(numbers + slot, mask=inside, other=0)
            tl.atomic_min(first + chief, number, mask=inside & (key == top), sem="relaxed")
        else:
            tl.atomic_max(best + chief, key, mask=inside & (chief != slot), sem="relaxed")


@triton.jit
def find_wanted(
    scratch: tl.tensor,
    wanted: tl.tensor,
    out: tl.tensor,
    n_wanted: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Look the wanted labels up in the table; an entry that no path has just written is void."""
    table, labels, _, _, _, _, first = scratch
    for start in range(0, n_wanted, BLOCK):
        i = start + tl.arange(0, BLOCK)
        label = tl.load(wanted + i, mask=i < n_wanted, other=n_labels)
        chief = representative(table, label, label < n_labels)
        named = (chief >= 0) & (chief < n_slots)
        chief = tl.where(named, chief, 0)
        found = tl.load(labels + chief, mask=named, other=n_labels)
        named = named & (found == label) & (label < n_labels)
        path = tl.load(first + chief, mask=named, other=-1, cache_modifier=".cg")
        tl.store(out + i, path.to(tl.int64), mask=i < n_wanted)


@triton.jit
def drop_losers(
    scratch: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Take the label from every path that is not the best to it.

    Return how many labels stay, and how many of them score above ``lowest``.
    """
    table, labels, scores, _, numbers, _, first = scratch
    n_found = tl.zeros([BLOCK], tl.int32)
    n_above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        chief = representative(table, label, inside)
        winner = tl.load(first + chief, mask=inside, other=-1, cache_modifier=".cg")
        number = tl.load(numbers + slot, mask=inside, other=0)
        score = tl.load(scores + slot, mask=inside, other=0)
        wins = inside & (winner == number)
        n_found += wins.to(tl.int32)
        n_above += (wins & (score > lowest)).to(tl.int32)
        tl.store(labels + slot, slot * 0 + n_labels, mask=inside & (wins == 0))
    return tl.sum(n_found, axis=0), tl.sum(n_above, axis=0)


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
