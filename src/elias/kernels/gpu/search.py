"""Beam expansion as Triton kernels.

First `list_paths` scores all paths and lists the best of them with `torch.topk`, several per label
to keep. Then one program per point processes the listed paths and all paths to wanted labels. It
finds the best path to each label and selects the K best labels (`elias.kernels.gpu.select`). If
fewer than K labels score above the worst listed path, the program starts over with all paths. The
list does not change the result.

The best path to a label is found through a table with one entry per label. Each path occupies a
slot, and writes the index of its slot to the entry of its label. One write survives: this slot is
the label's *representative*, and all paths to the label are compared there by atomic operations.
The table needs no clearing: an entry is read only if a path of the current point has just written
it, or it is checked against the label stored in the slot. Entries have 16 bits if these suffice to
number all slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from elias.kernels.gpu.select import select

_SCORE_BLOCK = 1024


def list_paths(
    inputs: tuple[Tensor, ...], n_labels: int, n_listed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best paths, their scores, the paths to wanted labels, and the latter's number.

    Among the best paths, paths to wanted labels count as -inf, because they are listed separately.
    """
    beam, _, edge_labels, _, wanted = inputs
    (n_rows, n_beam), (n_clusters, n_edges) = beam.shape, edge_labels.shape
    n_paths = n_beam * n_edges
    scores = torch.empty((n_rows, n_paths), dtype=torch.float32, device=beam.device)
    n_matches = torch.zeros(n_rows, dtype=torch.int32, device=beam.device)
    matches = n_matches
    if wanted.numel():
        matches = torch.empty((n_rows, n_paths), dtype=torch.int32, device=beam.device)
    _score_paths[(n_rows, triton.cdiv(n_paths, _SCORE_BLOCK))](
        *inputs,
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
    """Return a mask of the labels that are in the ascending list, found by binary search."""
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
    """Write the score of each path to ``scores``, and the paths to wanted labels to ``matches``.

    ``scores`` is -inf for paths that do not exist and for paths to wanted labels.
    """
    row = tl.program_id(0).to(tl.int64)
    path = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n_paths = n_beam * n_edges
    graph = (edge_labels, edge_log, n_clusters, n_edges, n_labels)
    beams = (beam + row * n_beam, beam_log + row * n_beam)
    label, score, _, inside = score_of(beams, graph, path, path < n_paths)
    if HALVINGS > 0:
        match = inside & is_among(label, wanted + row * n_wanted, n_wanted, HALVINGS)
        slot = tl.atomic_add(n_matches + row + path * 0, 1, mask=match, sem="relaxed")
        tl.store(matches + row * n_paths + slot, path, mask=match)
        inside = inside & (match == 0)
    score = tl.where(inside, score, -float("inf"))
    tl.store(scores + row * n_paths + path, score, mask=path < n_paths)


@triton.jit
def score_of(beams: tl.tensor, graph: tl.tensor, path: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return label, score and unsaturated score of a point's paths, and a mask of existing ones."""
    beam, beam_log = beams
    edge_labels, edge_log, n_clusters, n_edges, n_labels = graph
    position = path // n_edges
    cluster = tl.load(beam + position, mask=inside, other=n_clusters)
    inside = inside & (cluster < n_clusters)
    edge = cluster.to(tl.int64) * n_edges + (path - position * n_edges)
    cluster_unsaturated = tl.load(beam_log + position, mask=inside, other=0.0)
    edge_unsaturated = tl.load(edge_log + edge, mask=inside, other=-float("inf"))
    label = tl.load(edge_labels + edge, mask=inside, other=n_labels).to(tl.int32)
    unsaturated = cluster_unsaturated + edge_unsaturated
    inside = inside & (unsaturated != -float("inf")) & (label < n_labels)
    score = tl.minimum(cluster_unsaturated, 0.0) + tl.minimum(edge_unsaturated, 0.0)
    return label, score, unsaturated, inside


@triton.jit
def sortable(scores: tl.tensor) -> tl.tensor:
    """Map float32 values to int32 values in the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def sort_key(score: tl.tensor, unsaturated: tl.tensor) -> tl.tensor:
    """Combine two sortable integers into a key that orders by score, then unsaturated score."""
    return score.to(tl.int64) * 4294967296 + (unsaturated.to(tl.int64) + 2147483648)


@triton.jit
def walk_paths(
    beams: tl.tensor,
    graph: tl.tensor,
    lists: tl.tensor,
    scratch: tl.tensor,
    n_slots: tl.tensor,
    n_paths: tl.tensor,
    listing: tl.tensor,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Store label, scores and key of each path of a point, and a representative of each label.

    Return the lowest score of the listed paths, as a sortable integer; it is −(2³¹ − 1) if the list
    holds every path. If ``listing`` is 0, process all paths by number instead of the list.
    """
    table, labels, scores, unsaturated_scores, numbers, best, first = scratch
    listed, tops, matches, n_listed = lists
    _, _, _, _, n_labels = graph
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
            path = tl.where(top == -float("inf"), n_paths, path)  # no path, or one of the matches
        inside = known & (path < n_paths)
        label, score, unsaturated, inside = score_of(beams, graph, path, inside)
        score = sortable(score)
        unsaturated = sortable(unsaturated)
        if LISTED:
            floor = tl.where(inside, score, -2147483647)
            lowest = tl.minimum(lowest, tl.where(is_listed, floor, 2147483647))
        tl.store(labels + slot, tl.where(inside, label, n_labels), mask=known)
        tl.store(scores + slot, score, mask=known)
        tl.store(unsaturated_scores + slot, unsaturated, mask=known)
        tl.store(numbers + slot, path, mask=known)
        tl.store(best + slot, sort_key(score, unsaturated), mask=known)
        tl.store(first + slot, tl.zeros([BLOCK], tl.int32) + 2147483647, mask=known)
        tl.store(table + label, slot.to(table.dtype.element_ty), mask=inside)
    return tl.min(lowest, axis=0)


@triton.jit
def representative(table: tl.tensor, label: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return each label's representative; bypass the L1 cache to see other threads' writes."""
    return tl.load(table + label, mask=inside, other=0, cache_modifier=".cg").to(tl.int32)


@triton.jit
def best_path_per_label(
    scratch: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    BY_NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the best key of each label; with BY_NUMBER, the lowest path number with that key."""
    table, labels, scores, unsaturated_scores, numbers, best, first = scratch
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        slot_of_label = representative(table, label, inside)
        score = tl.load(scores + slot, mask=inside, other=0)
        unsaturated = tl.load(unsaturated_scores + slot, mask=inside, other=0)
        key = sort_key(score, unsaturated)
        if BY_NUMBER:
            top = tl.load(best + slot_of_label, mask=inside, other=0, cache_modifier=".cg")
            number = tl.load(numbers + slot, mask=inside, other=0)
            tl.atomic_min(first + slot_of_label, number, mask=inside & (key == top), sem="relaxed")
        else:
            tl.atomic_max(
                best + slot_of_label, key, mask=inside & (slot_of_label != slot), sem="relaxed"
            )


@triton.jit
def find_wanted(
    scratch: tl.tensor,
    wanted_lists: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the best path to each wanted label; ignore stale table entries of earlier points."""
    wanted, out, n_wanted = wanted_lists
    table, labels, _, _, _, _, first = scratch
    for start in range(0, n_wanted, BLOCK):
        i = start + tl.arange(0, BLOCK)
        label = tl.load(wanted + i, mask=i < n_wanted, other=n_labels)
        slot_of_label = representative(table, label, label < n_labels)
        named = (slot_of_label >= 0) & (slot_of_label < n_slots)
        slot_of_label = tl.where(named, slot_of_label, 0)
        stored = tl.load(labels + slot_of_label, mask=named, other=n_labels)
        named = named & (stored == label) & (label < n_labels)
        path = tl.load(first + slot_of_label, mask=named, other=-1, cache_modifier=".cg")
        tl.store(out + i, path.to(tl.int64), mask=i < n_wanted)


@triton.jit
def drop_losers(
    scratch: tl.tensor,
    n_slots: tl.tensor,
    n_labels: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Discard every path that is not the best path to its label.

    Return the number of labels left, and the number of those that score above ``lowest``.
    """
    table, labels, scores, _, numbers, _, first = scratch
    n_kept = tl.zeros([BLOCK], tl.int32)
    n_above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        slot_of_label = representative(table, label, inside)
        winner = tl.load(first + slot_of_label, mask=inside, other=-1, cache_modifier=".cg")
        number = tl.load(numbers + slot, mask=inside, other=0)
        score = tl.load(scores + slot, mask=inside, other=0)
        wins = inside & (winner == number)
        n_kept += wins.to(tl.int32)
        n_above += (wins & (score > lowest)).to(tl.int32)
        tl.store(labels + slot, slot * 0 + n_labels, mask=inside & (wins == 0))
    return tl.sum(n_kept, axis=0), tl.sum(n_above, axis=0)


_TABLE_BYTES = 2**31  # for the label tables of all programs
_MULTIPROCESSORS = 132  # of an H200; on a GPU with fewer, programs wait
_BLOCK, _WARPS = 4096, 16
LISTED_PER_LABEL = 4
"""Number of paths that `list_paths` lists per label to keep."""


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
    """Return the fields of `elias.kernels.Expansion`: labels, paths and wanted paths.

    The keyword arguments are for tests and benchmarks. ``n_listed`` is the number of paths that
    `list_paths` lists (0: process all paths at once). ``entry`` is the dtype of the label tables.
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
    # a point that has a multiprocessor to itself uses more of it
    share = 2 if n_rows <= _MULTIPROCESSORS else 1
    if n_listed is None:
        n_listed = LISTED_PER_LABEL * n_keep if 2 * LISTED_PER_LABEL * n_keep <= n_paths else 0
    n_listed = min(n_listed, n_paths)
    n_slots = n_paths + n_listed
    entry = entry or (torch.uint16 if n_slots <= 2**16 else torch.int32)
    n_programs = max(1, min(n_rows, n_programs, _TABLE_BYTES // (n_labels * entry.itemsize)))

    def scratch(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((n_programs, width), dtype=dtype, device=beam.device)

    inputs = (
        beam.contiguous(),
        beam_log.detach().float().contiguous(),
        edge_labels.contiguous(),
        edge_log.detach().float().contiguous(),
        wanted.contiguous(),
    )
    listed = tops = matches = n_matches = beam  # not read without a list
    if n_listed:
        listed, tops, matches, n_matches = list_paths(inputs, n_labels, n_listed)
    _expand[(n_programs,)](
        *inputs,
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
        BLOCK=block or share * _BLOCK,
        LISTED=n_listed > 0,
        num_warps=n_warps or share * _WARPS,
        num_stages=1,
        maxnreg=64,  # so that two programs of 16 warps share a multiprocessor
    )
    return labels, paths, wanted_paths


_SIZES = ["n_rows", "n_beam", "n_clusters", "n_edges", "n_labels", "n_wanted", "n_keep", "n_listed"]


@triton.jit(do_not_specialize=_SIZES)
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
    unsaturated_scores: tl.tensor,
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
    program = tl.program_id(0).to(tl.int64)
    n_paths = n_beam * n_edges
    offset = program * (n_paths + n_listed)
    scratch = (
        table + program * n_labels,
        labels + offset,
        scores + offset,
        unsaturated_scores + offset,
        numbers + offset,
        best + offset,
        first + offset,
    )
    graph = (edge_labels, edge_log, n_clusters, n_edges, n_labels)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = program * 0 + row  # 64 bits, also where the interpreter has a plain number
        listing = n_paths * 0
        n_slots = n_paths
        if LISTED:
            listing += 1
            n_slots = n_listed + tl.load(n_matches + at)
        going = n_paths > 0
        while going:
            beams = (beam + at * n_beam, beam_log + at * n_beam)
            lists = (listed + at * n_listed, tops + at * n_listed, matches + at * n_paths, n_listed)
            lowest = walk_paths(
                beams, graph, lists, scratch, n_slots, n_paths, listing, LISTED, BLOCK
            )
            tl.debug_barrier()
            best_path_per_label(scratch, n_slots, n_labels, False, BLOCK)
            tl.debug_barrier()
            best_path_per_label(scratch, n_slots, n_labels, True, BLOCK)
            tl.debug_barrier()
            wanted_lists = (wanted + at * n_wanted, out_wanted + at * n_wanted, n_wanted)
            find_wanted(scratch, wanted_lists, n_slots, n_labels, 128)
            tl.debug_barrier()
            n_kept, n_above = drop_losers(scratch, n_slots, n_labels, lowest, BLOCK)
            tl.debug_barrier()
            enough = (n_above >= n_keep) | (lowest == -2147483647) | (listing == 0)
            if enough:
                out = (out_labels + at * n_keep, out_paths + at * n_keep)
                select(scratch, out, (n_slots, n_labels, n_keep), n_kept, BLOCK)
            tl.debug_barrier()
            going = enough == 0  # the list was too short: repeat with all paths
            listing = listing * 0
            n_slots = n_paths
