"""Beam expansion as Triton kernels.

First, `list_paths` scores all paths and lists the best of them with `torch.topk`. The list is
several times longer than the shortlist. Then one program per point processes the listed paths and
all paths to wanted labels. It finds the best path to each label and selects the K best labels. If
fewer than K labels score above the worst listed path, the program starts over with all paths. The
list saves time but does not change the result.

The best path to a label is found through a table with one entry per label. Each path has a slot,
and writes the index of this slot to the table entry of its label. If several paths write to the
same entry, one index remains. The slot with this index is the label's *representative*, in which
atomic operations collect the best of all paths to the label. The table is not cleared between
points. An entry is therefore used only if a path of the current point has just written it, or if
its slot stores the same label. Entries have 16 bits if that is enough to number all slots,
otherwise 32.

The K best labels are selected by radix selection on the score, without sorting. Ties are broken by
unsaturated score, then by label id. Each pass processes a digit of eight bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

_SCORE_BLOCK = 1024
_TABLE_BYTES = 2**31  # memory limit for the label tables of all programs
_MULTIPROCESSORS = 132  # of an H200; on a smaller GPU, some programs wait for others
_BLOCK, _WARPS = 4096, 16
LISTED_PER_LABEL = 4
"""Number of paths that `list_paths` lists for each label of the shortlist."""


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
    `list_paths` lists; if it is 0, all paths are processed at once. ``entry`` is the dtype of the
    label tables.
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
    # if each point has a multiprocessor to itself, give it more threads
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
    listed = tops = matches = n_matches = beam  # placeholders, not read without a list
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


def list_paths(
    inputs: tuple[Tensor, ...], n_labels: int, n_listed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best paths with their scores, and the paths to wanted labels with their count.

    Among the best paths, paths to wanted labels have the score -inf, so that none is used twice.
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
def is_among(label: tensor, ascending: tensor, n_ascending: tensor, HALVINGS: constexpr) -> tensor:
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
    beam: tensor,
    beam_log: tensor,
    edge_labels: tensor,
    edge_log: tensor,
    wanted: tensor,
    scores: tensor,
    matches: tensor,
    n_matches: tensor,
    n_beam: tensor,
    n_clusters: tensor,
    n_edges: tensor,
    n_labels: tensor,
    n_wanted: tensor,
    HALVINGS: constexpr,
    BLOCK: constexpr,
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
def score_of(beams: tensor, graph: tensor, path: tensor, inside: tensor) -> tensor:
    """Return label, score and unsaturated score of paths, and a mask of the paths that exist."""
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
def sortable(scores: tensor) -> tensor:
    """Map float32 values to int32 values that sort in the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def sort_key(score: tensor, unsaturated: tensor) -> tensor:
    """Combine two integers into a key that sorts by score, then by unsaturated score."""
    return score.to(tl.int64) * 4294967296 + (unsaturated.to(tl.int64) + 2147483648)


@triton.jit
def walk_paths(
    beams: tensor,
    graph: tensor,
    lists: tensor,
    scratch: tensor,
    n_slots: tensor,
    n_paths: tensor,
    listing: tensor,
    LISTED: constexpr,
    BLOCK: constexpr,
) -> tensor:
    """Store the label, scores and key of each path, and choose a representative of each label.

    If ``listing`` is not 0, only the listed paths of the point are processed, otherwise all of
    them. Return the lowest score of the listed paths as a sortable integer, or −(2³¹ − 1) if every
    path is listed.
    """
    table, labels, scores, unsaturated_scores, path_ids, best, first = scratch
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
            path = tl.where(top == -float("inf"), n_paths, path)  # no path, or a wanted one
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
        tl.store(path_ids + slot, path, mask=known)
        tl.store(best + slot, sort_key(score, unsaturated), mask=known)
        tl.store(first + slot, tl.zeros([BLOCK], tl.int32) + 2147483647, mask=known)
        tl.store(table + label, slot.to(table.dtype.element_ty), mask=inside)
    return tl.min(lowest, axis=0)


@triton.jit
def representative(table: tensor, label: tensor, inside: tensor) -> tensor:
    """Read each label's representative, bypassing the L1 cache to see writes of other threads."""
    return tl.load(table + label, mask=inside, other=0, cache_modifier=".cg").to(tl.int32)


@triton.jit
def best_path_per_label(
    scratch: tensor, n_slots: tensor, n_labels: tensor, BY_PATH_ID: constexpr, BLOCK: constexpr
) -> None:
    """Find the best key of each label or, with BY_PATH_ID, the lowest path id with this key."""
    table, labels, scores, unsaturated_scores, path_ids, best, first = scratch
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        slot_of_label = representative(table, label, inside)
        score = tl.load(scores + slot, mask=inside, other=0)
        unsaturated = tl.load(unsaturated_scores + slot, mask=inside, other=0)
        key = sort_key(score, unsaturated)
        if BY_PATH_ID:
            top = tl.load(best + slot_of_label, mask=inside, other=0, cache_modifier=".cg")
            path_id = tl.load(path_ids + slot, mask=inside, other=0)
            tl.atomic_min(first + slot_of_label, path_id, mask=inside & (key == top), sem="relaxed")
        else:
            tl.atomic_max(
                best + slot_of_label, key, mask=inside & (slot_of_label != slot), sem="relaxed"
            )


@triton.jit
def find_wanted(
    scratch: tensor, wanted_lists: tensor, n_slots: tensor, n_labels: tensor, BLOCK: constexpr
) -> None:
    """Write the best path to each wanted label. Ignore table entries left from earlier points."""
    wanted, out, n_wanted = wanted_lists
    table, labels, _, _, _, _, first = scratch
    for start in range(0, n_wanted, BLOCK):
        i = start + tl.arange(0, BLOCK)
        label = tl.load(wanted + i, mask=i < n_wanted, other=n_labels)
        slot_of_label = representative(table, label, label < n_labels)
        valid = (slot_of_label >= 0) & (slot_of_label < n_slots)
        slot_of_label = tl.where(valid, slot_of_label, 0)
        stored = tl.load(labels + slot_of_label, mask=valid, other=n_labels)
        valid = valid & (stored == label) & (label < n_labels)
        path = tl.load(first + slot_of_label, mask=valid, other=-1, cache_modifier=".cg")
        tl.store(out + i, path.to(tl.int64), mask=i < n_wanted)


@triton.jit
def drop_losers(
    scratch: tensor, n_slots: tensor, n_labels: tensor, lowest: tensor, BLOCK: constexpr
) -> tensor:
    """Discard every path that is not the best path to its label.

    Return the number of labels left, and how many of them score above ``lowest``.
    """
    table, labels, scores, _, path_ids, _, first = scratch
    n_kept = tl.zeros([BLOCK], tl.int32)
    n_above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        slot_of_label = representative(table, label, inside)
        winner = tl.load(first + slot_of_label, mask=inside, other=-1, cache_modifier=".cg")
        path_id = tl.load(path_ids + slot, mask=inside, other=0)
        score = tl.load(scores + slot, mask=inside, other=0)
        wins = inside & (winner == path_id)
        n_kept += wins.to(tl.int32)
        n_above += (wins & (score > lowest)).to(tl.int32)
        tl.store(labels + slot, slot * 0 + n_labels, mask=inside & (wins == 0))
    return tl.sum(n_kept, axis=0), tl.sum(n_above, axis=0)


@triton.jit
def _digit_counts(
    keys: tensor,
    sizes: tensor,
    limits: tensor,
    prefix: tensor,
    shift: tensor,
    LEVEL: constexpr,
    BLOCK: constexpr,
) -> tensor:
    """Return the histogram of the 8-bit digit at ``shift`` over the undecided labels.

    Labels are compared by score (``LEVEL`` 0), ties by unsaturated score (1), then by n_labels − id
    (2). A label is undecided if its keys of the earlier levels equal ``limits``, and the higher
    digits of its present key equal ``prefix``.
    """
    labels, scores, unsaturated_scores = keys
    n_slots, n_labels = sizes
    score, unsaturated = limits
    counts = tl.zeros([256], tl.int32)
    sign = tl.where(shift == 24, 128, 0)  # flip the sign bit, so that negative keys come first
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        undecided = label < n_labels
        key = tl.load(scores + slot, mask=undecided, other=0)
        if LEVEL > 0:
            undecided = undecided & (key == score)
            key = tl.load(unsaturated_scores + slot, mask=undecided, other=0)
        if LEVEL > 1:
            undecided = undecided & (key == unsaturated)
            key = n_labels - label
        undecided = undecided & ((shift == 24) | ((key >> tl.minimum(shift + 8, 31)) == prefix))
        counts += tl.histogram(((key >> shift) & 255) ^ sign, 256, mask=undecided)
    return counts


@triton.jit
def _limit(
    keys: tensor, sizes: tensor, limits: tensor, needed: tensor, LEVEL: constexpr, BLOCK: constexpr
) -> tensor:
    """Return the lowest key to keep, the number of labels with it, and how many of them to keep.

    The key is found digit by digit, the most significant first.
    """
    digits = tl.arange(0, 256)
    prefix = needed * 0
    n_equal = needed
    for i in range(4):
        shift = 24 - 8 * i
        counts = _digit_counts(keys, sizes, limits, prefix, shift, LEVEL, BLOCK)
        not_below = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        digit = tl.maximum(tl.sum((not_below >= needed).to(tl.int32), axis=0) - 1, 0)
        above = tl.sum(tl.where(digits > digit, counts, 0), axis=0)
        n_equal = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
        prefix = tl.where(shift == 24, digit - 128, prefix * 256 + digit)
        needed -= above
    return prefix, n_equal, needed


@triton.jit
def _write_kept(
    scratch: tensor, out: tensor, sizes: tensor, limits: tensor, BLOCK: constexpr
) -> None:
    """Write the labels that rank at or above ``limits``, and their paths. Pad the other slots."""
    _, labels, scores, unsaturated_scores, path_ids, _, _ = scratch
    out_labels, out_paths = out
    n_slots, n_labels, n_keep = sizes
    last_score, last_unsaturated, last_negated = limits
    n_written = n_slots * 0
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        score = tl.load(scores + slot, mask=inside, other=0)
        unsaturated = tl.load(unsaturated_scores + slot, mask=inside, other=0)
        path_id = tl.load(path_ids + slot, mask=inside, other=0)
        equal = (unsaturated > last_unsaturated) | (
            (unsaturated == last_unsaturated) & (n_labels - label >= last_negated)
        )
        selected = inside & ((score > last_score) | ((score == last_score) & equal))
        slot_out = n_written + tl.cumsum(selected.to(tl.int32), axis=0) - 1
        tl.store(out_labels + slot_out, label.to(tl.int64), mask=selected & (slot_out < n_keep))
        tl.store(out_paths + slot_out, path_id.to(tl.int64), mask=selected & (slot_out < n_keep))
        n_written += tl.sum(selected.to(tl.int32), axis=0)
    for start in range(0, n_keep, BLOCK):
        slot_out = start + tl.arange(0, BLOCK)
        empty = (slot_out >= n_written) & (slot_out < n_keep)
        tl.store(out_labels + slot_out, slot_out.to(tl.int64) * 0 + n_labels, mask=empty)
        tl.store(out_paths + slot_out, slot_out.to(tl.int64) * 0, mask=empty)


@triton.jit
def select(scratch: tensor, out: tensor, sizes: tensor, n_left: tensor, BLOCK: constexpr) -> None:
    """Write the K best of the labels left by `drop_losers`, and their paths."""
    _, labels, scores, unsaturated_scores, _, _, _ = scratch
    keys = (labels, scores, unsaturated_scores)
    n_slots, n_labels, n_keep = sizes
    both = (n_slots, n_labels)
    needed = tl.minimum(n_left, n_keep)
    score, n_equal, needed = _limit(keys, both, (0, 0), needed, 0, BLOCK)
    unsaturated = needed * 0 - 2147483647  # below all: keep every label whose score is the limit
    negated = needed * 0
    if n_equal > needed:
        unsaturated, n_equal, needed = _limit(keys, both, (score, 0), needed, 1, BLOCK)
        if n_equal > needed:
            negated, n_equal, needed = _limit(keys, both, (score, unsaturated), needed, 2, BLOCK)
    _write_kept(scratch, out, sizes, (score, unsaturated, negated), BLOCK)


_SIZES = ["n_rows", "n_beam", "n_clusters", "n_edges", "n_labels", "n_wanted", "n_keep", "n_listed"]


@triton.jit(do_not_specialize=_SIZES)
def _expand(
    beam: tensor,
    beam_log: tensor,
    edge_labels: tensor,
    edge_log: tensor,
    wanted: tensor,
    listed: tensor,
    tops: tensor,
    matches: tensor,
    n_matches: tensor,
    table: tensor,
    labels: tensor,
    scores: tensor,
    unsaturated_scores: tensor,
    path_ids: tensor,
    best: tensor,
    first: tensor,
    out_labels: tensor,
    out_paths: tensor,
    out_wanted: tensor,
    n_rows: tensor,
    n_beam: tensor,
    n_clusters: tensor,
    n_edges: tensor,
    n_labels: tensor,
    n_wanted: tensor,
    n_keep: tensor,
    n_listed: tensor,
    BLOCK: constexpr,
    LISTED: constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    n_paths = n_beam * n_edges
    offset = program * (n_paths + n_listed)
    scratch = (
        table + program * n_labels,
        labels + offset,
        scores + offset,
        unsaturated_scores + offset,
        path_ids + offset,
        best + offset,
        first + offset,
    )
    graph = (edge_labels, edge_log, n_clusters, n_edges, n_labels)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = program * 0 + row  # 64 bits, even if row is a Python int in the interpreter
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
            going = enough == 0  # if the list was too short, repeat with all paths
            listing = listing * 0
            n_slots = n_paths
