"""The best path of a point to each label, by Triton, without a sort.

Each path writes its number into a table of one entry per label; whichever write survives names the
label's *representative*, and all paths to that label compete at the representative's place. The
table needs no clearing: an entry is read only where a path of this point has just written it, or
checked against the path it names. Its entries have 16 bits where those can number all paths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elias.kernels.triton_listing import score_of


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
