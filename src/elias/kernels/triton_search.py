"""The beam's expansion as one Triton kernel: a program walks all paths of one point.

The best path per label is found without a sort. Each path writes its number into a table of one
entry per label; whichever write survives names the label's *representative*, and all paths to that
label compete at the representative's place. The table needs no clearing: an entry is read only
where a path of this point has just written it, or checked against the path it names.

The K best labels are then found by radix selection, a digit of eight bits at a time, on the score,
the unsaturated score and the label id, in that order. Nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TABLE_ENTRIES = 2**29  # of label tables in all: 2 GiB
_MULTIPROCESSORS = 132  # of an H200; a GPU with fewer has programs wait
_BLOCK, _WARPS = 2048, 8


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels and paths (B, K) and wanted paths (B, Y) as `elias.kernels.Expansion` does."""
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
    n_programs = max(1, min(n_rows, n_programs, _TABLE_ENTRIES // n_labels))

    def scratch(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((n_programs, width), dtype=dtype, device=beam.device)

    _expand[(n_programs,)](
        beam.contiguous(),
        beam_log.detach().float().contiguous(),
        edge_labels.contiguous(),
        edge_log.detach().float().contiguous(),
        wanted.contiguous(),
        scratch(n_labels),
        scratch(n_paths),
        scratch(n_paths),
        scratch(n_paths),
        scratch(n_paths, torch.int64),
        scratch(n_paths),
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
        BLOCK=block or room * _BLOCK,
        LABEL_DIGITS=max(1, -(-n_labels.bit_length() // 8)),
        num_warps=n_warps or room * _WARPS,
        num_stages=1,
    )
    return labels, paths, wanted_paths


@triton.jit
def _sortable(scores: tl.tensor) -> tl.tensor:
    """Map floats to integers of the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _one_key(score: tl.tensor, free: tl.tensor) -> tl.tensor:
    """Return one integer that orders by score, then by unsaturated score."""
    return score.to(tl.int64) * 4294967296 + (free.to(tl.int64) + 2147483648)


@triton.jit
def _digit_counts(
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    prefix: tl.tensor,
    LEVEL: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Count, by its digit at SHIFT, the key of the labels that are level with the limits so far.

    Level 0 is the score, 1 the unsaturated score, 2 the label id turned around.
    """
    n_paths, n_labels = sizes
    score, free = limits
    counts = tl.zeros([256], tl.int32)
    for start in range(0, n_paths, BLOCK):
        path = start + tl.arange(0, BLOCK)
        label = tl.load(labels + path, mask=path < n_paths, other=n_labels)
        level = label < n_labels
        key = tl.load(scores + path, mask=level, other=0)
        if LEVEL > 0:
            level = level & (key == score)
            key = tl.load(frees + path, mask=level, other=0)
        if LEVEL > 1:
            level = level & (key == free)
            key = n_labels - label
        digit = (key >> SHIFT) & 255
        if SHIFT == 24:
            digit = digit ^ 128  # the sign: negative keys come first
        else:
            level = level & ((key >> (SHIFT + 8)) == prefix)
        counts += tl.histogram(digit, 256, mask=level)
    return counts


@triton.jit
def _choose_digit(
    counts: tl.tensor, prefix: tl.tensor, needed: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Return the limit, one digit longer, how many are level with it, and how many of them to keep.

    A key at the limit so far ranks by its next digit.
    """
    digits = tl.arange(0, 256)
    not_below = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    digit = tl.maximum(tl.sum((not_below >= needed).to(tl.int32), axis=0) - 1, 0)
    above = tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    level = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
    prefix = digit - 128 if SHIFT == 24 else prefix * 256 + digit
    return prefix, level, needed - above


@triton.jit
def _limit(
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    needed: tl.tensor,
    LEVEL: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the key of the last label to keep, how many share it, and how many of them to keep."""
    prefix = needed * 0
    level = needed
    for i in tl.static_range(DIGITS):
        counts = _digit_counts(
            labels, scores, frees, sizes, limits, prefix, LEVEL, 8 * (DIGITS - 1 - i), BLOCK
        )
        prefix, level, needed = _choose_digit(counts, prefix, needed, 8 * (DIGITS - 1 - i))
    return prefix, level, needed


@triton.jit
def _walk_paths(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    scratch: tl.tensor,
    sizes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Note label, scores and key of every path of a point, and a representative per label."""
    table, labels, scores, frees, best, first = scratch
    n_beam, n_clusters, n_edges, n_labels = sizes
    n_paths = n_beam * n_edges
    for start in range(0, n_paths, BLOCK):
        path = start + tl.arange(0, BLOCK)
        inside = path < n_paths
        position = path // n_edges
        cluster = tl.load(beam + position, mask=inside, other=n_clusters)
        inside = inside & (cluster < n_clusters)
        place = cluster.to(tl.int64) * n_edges + (path - position * n_edges)
        cluster_free = tl.load(beam_log + position, mask=inside, other=0.0)
        edge_free = tl.load(edge_log + place, mask=inside, other=-float("inf"))
        label = tl.load(edge_labels + place, mask=inside, other=n_labels).to(tl.int32)
        free = cluster_free + edge_free
        inside = inside & (free != -float("inf")) & (label < n_labels)
        score = _sortable(tl.minimum(cluster_free, 0.0) + tl.minimum(edge_free, 0.0))
        free = _sortable(free)
        known = path < n_paths
        tl.store(labels + path, tl.where(inside, label, n_labels), mask=known)
        tl.store(scores + path, score, mask=known)
        tl.store(frees + path, free, mask=known)
        tl.store(best + path, _one_key(score, free), mask=known)
        tl.store(first + path, tl.zeros([BLOCK], tl.int32) + n_paths, mask=known)
        tl.store(table + label, path, mask=inside)


@triton.jit
def _compete(
    scratch: tl.tensor,
    n_paths: tl.tensor,
    n_labels: tl.tensor,
    BY_NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Bring the best key to each representative; then the first path that has it (BY_NUMBER)."""
    table, labels, scores, frees, best, first = scratch
    for start in range(0, n_paths, BLOCK):
        path = start + tl.arange(0, BLOCK)
        label = tl.load(labels + path, mask=path < n_paths, other=n_labels)
        inside = label < n_labels
        chief = tl.load(table + label, mask=inside, other=0, cache_modifier=".cg")
        score = tl.load(scores + path, mask=inside, other=0)
        free = tl.load(frees + path, mask=inside, other=0)
        key = _one_key(score, free)
        if BY_NUMBER:
            top = tl.load(best + chief, mask=inside, other=0, cache_modifier=".cg")
            tl.atomic_min(first + chief, path, mask=inside & (key == top))
        else:
            tl.atomic_max(best + chief, key, mask=inside & (chief != path))


@triton.jit
def _find_wanted(
    scratch: tl.tensor,
    wanted: tl.tensor,
    out: tl.tensor,
    n_wanted: tl.tensor,
    n_paths: tl.tensor,
    n_labels: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Look the wanted labels up in the table; an entry that no path has just written is void."""
    table, labels, _, _, _, first = scratch
    for start in range(0, n_wanted, BLOCK):
        i = start + tl.arange(0, BLOCK)
        label = tl.load(wanted + i, mask=i < n_wanted, other=n_labels)
        chief = tl.load(table + label, mask=label < n_labels, other=-1, cache_modifier=".cg")
        named = (chief >= 0) & (chief < n_paths)
        chief = tl.where(named, chief, 0)
        found = tl.load(labels + chief, mask=named, other=n_labels)
        named = named & (found == label) & (label < n_labels)
        path = tl.load(first + chief, mask=named, other=-1, cache_modifier=".cg")
        tl.store(out + i, path.to(tl.int64), mask=i < n_wanted)


@triton.jit
def _drop_losers(
    scratch: tl.tensor,
    n_paths: tl.tensor,
    n_labels: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Take the label from every path that is not the best to it; return how many labels stay."""
    table, labels, _, _, _, first = scratch
    n_found = n_paths * 0
    for start in range(0, n_paths, BLOCK):
        path = start + tl.arange(0, BLOCK)
        label = tl.load(labels + path, mask=path < n_paths, other=n_labels)
        inside = label < n_labels
        chief = tl.load(table + label, mask=inside, other=0, cache_modifier=".cg")
        winner = tl.load(first + chief, mask=inside, other=-1, cache_modifier=".cg")
        n_found += tl.sum((inside & (winner == path)).to(tl.int32), axis=0)
        tl.store(labels + path, path * 0 + n_labels, mask=inside & (winner != path))
    return n_found


@triton.jit
def _write_kept(
    scratch: tl.tensor,
    out: tl.tensor,
    sizes: tl.tensor,
    limits: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the labels at or above the limits with their paths, then padding."""
    _, labels, scores, frees, _, _ = scratch
    out_labels, out_paths = out
    n_paths, n_labels, n_keep = sizes
    last_score, last_free, last_turned = limits
    n_written = n_paths * 0
    for start in range(0, n_paths, BLOCK):
        path = start + tl.arange(0, BLOCK)
        label = tl.load(labels + path, mask=path < n_paths, other=n_labels)
        inside = label < n_labels
        score = tl.load(scores + path, mask=inside, other=0)
        free = tl.load(frees + path, mask=inside, other=0)
        equal = (free > last_free) | ((free == last_free) & (n_labels - label >= last_turned))
        kept = inside & ((score > last_score) | ((score == last_score) & equal))
        slot = n_written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(out_labels + slot, label.to(tl.int64), mask=kept & (slot < n_keep))
        tl.store(out_paths + slot, path.to(tl.int64), mask=kept & (slot < n_keep))
        n_written += tl.sum(kept.to(tl.int32), axis=0)
    for start in range(0, n_keep, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        empty = (slot >= n_written) & (slot < n_keep)
        tl.store(out_labels + slot, slot.to(tl.int64) * 0 + n_labels, mask=empty)
        tl.store(out_paths + slot, slot.to(tl.int64) * 0, mask=empty)


@triton.jit(do_not_specialize=["n_rows", "n_beam", "n_wanted"])
def _expand(
    beam: tl.tensor,
    beam_log: tl.tensor,
    edge_labels: tl.tensor,
    edge_log: tl.tensor,
    wanted: tl.tensor,
    table: tl.tensor,
    labels: tl.tensor,
    scores: tl.tensor,
    frees: tl.tensor,
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
    BLOCK: tl.constexpr,
    LABEL_DIGITS: tl.constexpr,
) -> None:
    own = tl.program_id(0).to(tl.int64)
    n_paths = n_beam * n_edges
    labels += own * n_paths
    scores += own * n_paths
    frees += own * n_paths
    scratch = (
        table + own * n_labels,
        labels,
        scores,
        frees,
        best + own * n_paths,
        first + own * n_paths,
    )
    sizes = (n_paths, n_labels)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = own * 0 + row  # of 64 bits, and also where the interpreter gives a plain number
        _walk_paths(
            beam + at * n_beam,
            beam_log + at * n_beam,
            edge_labels,
            edge_log,
            scratch,
            (n_beam, n_clusters, n_edges, n_labels),
            BLOCK,
        )
        tl.debug_barrier()
        _compete(scratch, n_paths, n_labels, False, BLOCK)
        tl.debug_barrier()
        _compete(scratch, n_paths, n_labels, True, BLOCK)
        tl.debug_barrier()
        _find_wanted(
            scratch,
            wanted + at * n_wanted,
            out_wanted + at * n_wanted,
            n_wanted,
            n_paths,
            n_labels,
            128,
        )
        tl.debug_barrier()
        n_found = _drop_losers(scratch, n_paths, n_labels, BLOCK)
        tl.debug_barrier()

        needed = tl.minimum(n_found, n_keep)
        score, level, needed = _limit(labels, scores, frees, sizes, (0, 0), needed, 0, 4, BLOCK)
        free = needed * 0 - 2147483647  # below all: keep whatever has the last score
        turned = needed * 0
        if level > needed:
            free, level, needed = _limit(
                labels, scores, frees, sizes, (score, 0), needed, 1, 4, BLOCK
            )
            if level > needed:
                turned, level, needed = _limit(
                    labels, scores, frees, sizes, (score, free), needed, 2, LABEL_DIGITS, BLOCK
                )
        _write_kept(
            scratch,
            (out_labels + at * n_keep, out_paths + at * n_keep),
            (n_paths, n_labels, n_keep),
            (score, free, turned),
            BLOCK,
        )
        tl.debug_barrier()
