"""The K best labels of a point by Triton: radix selection, nothing is sorted.

Eight bits at a time, of the score, then of the unsaturated score, then of the label id.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _digit_counts(
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    prefix: tl.tensor,
    shift: tl.tensor,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Count, by its digit at ``shift``, the key of the labels level with the limits so far.

    Level 0 is the score, 1 the unsaturated score, 2 the label id turned around.
    """
    n_slots, n_labels = sizes
    score, free = limits
    counts = tl.zeros([256], tl.int32)
    sign = tl.where(shift == 24, 128, 0)  # negative keys come first
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        level = label < n_labels
        key = tl.load(scores + slot, mask=level, other=0)
        if LEVEL > 0:
            level = level & (key == score)
            key = tl.load(frees + slot, mask=level, other=0)
        if LEVEL > 1:
            level = level & (key == free)
            key = n_labels - label
        level = level & ((shift == 24) | ((key >> tl.minimum(shift + 8, 31)) == prefix))
        counts += tl.histogram(((key >> shift) & 255) ^ sign, 256, mask=level)
    return counts


@triton.jit
def _limit(
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    needed: tl.tensor,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the key of the last label to keep, how many share it, and how many of them to keep.

    A digit at a time: a key at the limit so far ranks by its next digit.
    """
    digits = tl.arange(0, 256)
    prefix = needed * 0
    level = needed
    for i in range(4):
        shift = 24 - 8 * i
        counts = _digit_counts(labels, scores, frees, sizes, limits, prefix, shift, LEVEL, BLOCK)
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
    """Write the labels at or above the limits with their paths, then padding."""
    _, labels, scores, frees, numbers, _, _ = scratch
    out_labels, out_paths = out
    n_slots, n_labels, n_keep = sizes
    last_score, last_free, last_turned = limits
    n_written = n_slots * 0
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        label = tl.load(labels + slot, mask=slot < n_slots, other=n_labels)
        inside = label < n_labels
        score = tl.load(scores + slot, mask=inside, other=0)
        free = tl.load(frees + slot, mask=inside, other=0)
        number = tl.load(numbers + slot, mask=inside, other=0)
        equal = (free > last_free) | ((free == last_free) & (n_labels - label >= last_turned))
        kept = inside & ((score > last_score) | ((score == last_score) & equal))
        place = n_written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(out_labels + place, label.to(tl.int64), mask=kept & (place < n_keep))
        tl.store(out_paths + place, number.to(tl.int64), mask=kept & (place < n_keep))
        n_written += tl.sum(kept.to(tl.int32), axis=0)
    for start in range(0, n_keep, BLOCK):
        place = start + tl.arange(0, BLOCK)
        empty = (place >= n_written) & (place < n_keep)
        tl.store(out_labels + place, place.to(tl.int64) * 0 + n_labels, mask=empty)
        tl.store(out_paths + place, place.to(tl.int64) * 0, mask=empty)


@triton.jit
def select(
    scratch: tl.tensor,
    out: tl.tensor,
    sizes: tl.tensor,
    n_found: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the K best of the labels that are left."""
    _, labels, scores, frees, _, _, _ = scratch
    n_slots, n_labels, n_keep = sizes
    both = (n_slots, n_labels)
    needed = tl.minimum(n_found, n_keep)
    score, level, needed = _limit(labels, scores, frees, both, (0, 0), needed, 0, BLOCK)
    free = needed * 0 - 2147483647  # below all: keep whatever has the last score
    turned = needed * 0
    if level > needed:
        free, level, needed = _limit(labels, scores, frees, both, (score, 0), needed, 1, BLOCK)
        if level > needed:
            turned, level, needed = _limit(
                labels, scores, frees, both, (score, free), needed, 2, BLOCK
            )
    _write_kept(scratch, out, sizes, (score, free, turned), BLOCK)
