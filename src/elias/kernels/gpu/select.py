"""Select the K best labels of a point in Triton, by radix selection without sorting.

The selection is by score; ties are resolved by unsaturated score, then by label id. Each pass
processes a digit of eight bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _digit_counts(
    keys: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    prefix: tl.tensor,
    shift: tl.tensor,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the histogram of the key digit at ``shift`` over the labels still undecided.

    These labels equal ``limits`` at all lower levels, and ``prefix`` in the digits above. The key
    is the score at level 0, the unsaturated score at level 1, and n_labels − id at level 2.
    """
    labels, scores, unsaturated_scores = keys
    n_slots, n_labels = sizes
    score, unsaturated = limits
    counts = tl.zeros([256], tl.int32)
    sign = tl.where(shift == 24, 128, 0)  # negative keys come first
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        level = label < n_labels
        key = tl.load(scores + slot, mask=level, other=0)
        if LEVEL > 0:
            level = level & (key == score)
            key = tl.load(unsaturated_scores + slot, mask=level, other=0)
        if LEVEL > 1:
            level = level & (key == unsaturated)
            key = n_labels - label
        level = level & ((shift == 24) | ((key >> tl.minimum(shift + 8, 31)) == prefix))
        counts += tl.histogram(((key >> shift) & 255) ^ sign, 256, mask=level)
    return counts


@triton.jit
def _limit(
    keys: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    needed: tl.tensor,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the lowest key to keep, the number of labels with it, and how many of them to keep.

    The key is found digit by digit, the most significant first.
    """
    digits = tl.arange(0, 256)
    prefix = needed * 0
    level = needed
    for i in range(4):
        shift = 24 - 8 * i
        counts = _digit_counts(keys, sizes, limits, prefix, shift, LEVEL, BLOCK)
        not_below = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        digit = tl.maximum(tl.sum((not_below >= needed).to(tl.int32), axis=0) - 1, 0)
        above = tl.sum(tl.where(digits > digit, counts, 0), axis=0)
        level = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
        prefix = tl.where(shift == 24, digit - 128, prefix * 256 + digit)
        needed -= above
    return prefix, level, needed


@triton.jit
def _write_kept(
    scratch: tl.tensor,
    out: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the labels that rank at or above ``limits``, and their paths; pad the other slots."""
    _, labels, scores, unsaturated_scores, numbers, _, _ = scratch
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
        number = tl.load(numbers + slot, mask=inside, other=0)
        equal = (unsaturated > last_unsaturated) | (
            (unsaturated == last_unsaturated) & (n_labels - label >= last_negated)
        )
        kept = inside & ((score > last_score) | ((score == last_score) & equal))
        slot_out = n_written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(out_labels + slot_out, label.to(tl.int64), mask=kept & (slot_out < n_keep))
        tl.store(out_paths + slot_out, number.to(tl.int64), mask=kept & (slot_out < n_keep))
        n_written += tl.sum(kept.to(tl.int32), axis=0)
    for start in range(0, n_keep, BLOCK):
        slot_out = start + tl.arange(0, BLOCK)
        empty = (slot_out >= n_written) & (slot_out < n_keep)
        tl.store(out_labels + slot_out, slot_out.to(tl.int64) * 0 + n_labels, mask=empty)
        tl.store(out_paths + slot_out, slot_out.to(tl.int64) * 0, mask=empty)


@triton.jit
def select(
    scratch: tl.tensor,
    out: tl.tensor,
    sizes: tl.tensor,
    n_left: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the K best of the labels left by `drop_losers`, and their paths."""
    _, labels, scores, unsaturated_scores, _, _, _ = scratch
    keys = (labels, scores, unsaturated_scores)
    n_slots, n_labels, n_keep = sizes
    both = (n_slots, n_labels)
    needed = tl.minimum(n_left, n_keep)
    score, level, needed = _limit(keys, both, (0, 0), needed, 0, BLOCK)
    unsaturated = needed * 0 - 2147483647  # below all: keep every label with the last score
    negated = needed * 0
    if level > needed:
        unsaturated, level, needed = _limit(keys, both, (score, 0), needed, 1, BLOCK)
        if level > needed:
            negated, level, needed = _limit(keys, both, (score, unsaturated), needed, 2, BLOCK)
    _write_kept(scratch, out, sizes, (score, unsaturated, negated), BLOCK)
