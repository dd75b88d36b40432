"""Products with selected rows of a large table and their sparse gradients, compiled by numba.

Points or table rows are divided among threads. Each sum is computed by one thread in a fixed
order, so the result does not depend on the number of threads. The gradient of a table is a sparse
tensor that holds the touched rows; `elias.training.optimizer` applies it in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numba import get_num_threads, njit
from numpy.typing import NDArray
from torch import Tensor

from elias.kernels.threads import over_ranges, split_range, thread_map

Array: TypeAlias = NDArray[Any]

ZERO: Any = np.int64(0)  # a literal 0 has another type, for which numba would compile again

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz"}
_FEW_ROWS = 64  # up to this number of sums, one thread is faster than starting several
_SQRT_HALF = math.sqrt(0.5)
_SLOTS_PER_CHUNK = 64  # number of shortlist slots processed for all rows before the next slots


def bag_sum(weight: Tensor, ids: Tensor, offsets: Tensor, coefficients: Tensor) -> Tensor:
    """Return the weighted sum of vectors of each bag of ids, with a sparse gradient."""
    if torch.is_grad_enabled():
        return _BagSum.apply(weight, ids, offsets, coefficients)
    return _sum_bags(weight, ids, offsets, coefficients)


def _sum_bags(weight: Tensor, ids: Tensor, offsets: Tensor, coefficients: Tensor) -> Tensor:
    out = torch.empty((len(offsets) - 1, weight.shape[1]), dtype=torch.float32)
    arrays = (_array(weight), ids.numpy(), offsets.numpy(), coefficients.numpy(), out.numpy())
    if len(out) <= _FEW_ROWS:
        _sum_rows(0, len(out), *arrays)
    else:
        over_ranges(lambda begin, end: _sum_rows(begin, end, *arrays), len(out))
    return out


class _LabelLogits(torch.autograd.Function):
    """Autograd function of the logits w_ℓ·φ + bias_ℓ, with sparse gradients. Padding gives 0."""

    @staticmethod
    def forward(
        ctx: Any, embedding: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        out = torch.empty(labels.shape, dtype=torch.float32)
        arrays = (_array(embedding), _array(weight), _array(bias), _array(labels))
        if any(ctx.needs_input_grad):
            _over_chunks(_shortlist_dots, *arrays, out.numpy())
            ctx.save_for_backward(embedding, weight, bias, labels)
        else:
            _over_chunks(_gather_dot, *arrays, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        embedding, weight, bias, labels = ctx.saved_tensors
        ids, coefficients = _array(labels), _array(grads[0])
        by_embedding = torch.empty(embedding.shape, dtype=torch.float32)
        _over_chunks(_sum_shortlists, _array(weight), ids, coefficients, by_embedding.numpy())
        offsets = np.arange(len(labels) + 1, dtype=np.int64) * labels.shape[1]
        groups = group_by_id(ids.reshape(-1), offsets, len(weight))
        rows, gradient, sums = _row_gradient(groups, coefficients.reshape(-1), _array(embedding))
        by_weight = _sparse_gradient(rows, gradient, weight.shape)
        return by_embedding, by_weight, _sparse_gradient(rows, sums, bias.shape), None


label_logits = _LabelLogits.apply


class _BagSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, offsets: Tensor, coefficients: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, ids, offsets, coefficients)
        return _sum_bags(weight, ids, offsets, coefficients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, ids, offsets, coefficients = ctx.saved_tensors
        groups = group_by_id(ids.numpy(), offsets.numpy(), len(weight))
        rows, gradient, _ = _row_gradient(groups, coefficients.numpy(), _array(grads[0]))
        return _sparse_gradient(rows, gradient, weight.shape), None, None, None


def _sparse_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a table's gradient as a sparse tensor. ``rows`` must be ascending and distinct."""
    # torch 2.11 and 2.12 warn despite check_invariants=False. This context manager is silent in
    # all versions and does not change the user's setting.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=True)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _over_chunks(work: Callable[..., None], *arrays: Array) -> None:
    """Call ``work(begin, end, *arrays)`` for one large chunk of rows per thread.

    The rows of a chunk share what they read of a table. The last array has a row for each of them.
    """
    n_rows = len(arrays[-1])
    chunks = split_range(n_rows, max(1, -(-n_rows // get_num_threads())))
    list(thread_map(lambda rows, _: work(rows.start, rows.stop, *arrays), chunks, lambda: None))


def _row_gradient(
    groups: tuple[Array, ...], coefficients: Array, vectors: Array
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the touched rows of a table, their gradients, and their summed coefficients."""
    touched = torch.from_numpy(groups[0])
    gradient = torch.empty((len(touched), vectors.shape[1]))
    sums = torch.empty(len(touched))
    arrays = (vectors, groups, coefficients, gradient.numpy(), sums.numpy())
    over_ranges(lambda begin, end: _sum_groups(begin, end, *arrays), len(touched))
    return touched, gradient, sums


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def dot(row: Array, point: Array) -> np.float32:
    """Return the dot product of two vectors."""
    total = np.float32(0.0)
    for d in range(point.shape[0]):
        total += row[d] * point[d]
    return total


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _gather_dot(
    begin: int, end: int, embedding: Array, weight: Array, bias: Array, labels: Array, out: Array
) -> None:
    """Write ``out[i, k] = weight[labels[i, k]]·embedding[i] + bias``; a padded label gives 0."""
    n_labels = len(weight)
    for row in range(begin, end):
        point = embedding[row]
        for k in range(labels.shape[1]):
            label = labels[row, k]
            if label >= n_labels:
                out[row, k] = 0.0
                continue
            out[row, k] = dot(weight[label], point) + bias[label]


@njit(cache=True, fastmath=FASTMATH)
def _add_one(row: Array, c: float, total: Array) -> None:
    """Add c · row to ``total``. If the loop read c from an array, it would not vectorise."""
    for d in range(total.shape[0]):
        total[d] += c * row[d]


@njit(cache=True, fastmath=FASTMATH)
def _add_four(rows: tuple[Array, ...], c: tuple[float, ...], total: Array) -> None:
    """Add four weighted rows to ``total`` in one pass over it."""
    r0, r1, r2, r3 = rows
    for d in range(total.shape[0]):
        total[d] += (c[0] * r0[d] + c[1] * r1[d]) + (c[2] * r2[d] + c[3] * r3[d])


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _sum_rows(
    begin: int,
    end: int,
    weight: Array,
    ids: Array,
    offsets: Array,
    coefficients: Array,
    out: Array,
) -> None:
    """Write ``out[i] = Σ_j coefficients[j]·weight[ids[j]]`` over j in offsets[i]:offsets[i+1].

    Ids beyond the last row of ``weight`` are ignored.
    """
    for row in range(begin, end):
        total = out[row]
        total[:] = 0.0
        _add_rows(weight, ids[offsets[row] : offsets[row + 1]], coefficients[offsets[row] :], total)


@njit(cache=True, fastmath=FASTMATH)
def _add_rows(weight: Array, ids: Array, coefficients: Array, total: Array) -> None:
    n_weights = weight.shape[0]
    j, end = 0, ids.shape[0]
    c = coefficients
    while j < end:
        if j + 4 <= end and max(ids[j], ids[j + 1], ids[j + 2], ids[j + 3]) < n_weights:
            rows = (weight[ids[j]], weight[ids[j + 1]], weight[ids[j + 2]], weight[ids[j + 3]])
            _add_four(rows, (c[j], c[j + 1], c[j + 2], c[j + 3]), total)
            j += 4
            continue
        if ids[j] < n_weights:
            _add_one(weight[ids[j]], c[j], total)
        j += 1


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _sum_shortlists(
    begin: int, end: int, weight: Array, labels: Array, coefficients: Array, out: Array
) -> None:
    """Compute `_sum_rows` for shortlists of equal length, one block of slots at a time.

    A block of slots is processed for all rows before the next block. If labels ascend within each
    row, the rows then read nearby weights at about the same time, and these stay in the cache.
    """
    n_slots = labels.shape[1]
    out[begin:end] = 0.0
    for first in range(0, n_slots, _SLOTS_PER_CHUNK):
        slots = slice(first, min(first + _SLOTS_PER_CHUNK, n_slots))
        for row in range(begin, end):
            _add_rows(weight, labels[row, slots], coefficients[row, slots], out[row])


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _sum_groups(
    begin: int,
    end: int,
    vectors: Array,
    groups: tuple[Array, ...],
    coefficients: Array,
    out: Array,
    sums: Array,
) -> None:
    """Write the weighted sum of each group's vectors, and the sum of its coefficients.

    ``groups`` is the result of `group_by_id`; its positions index ``coefficients``.
    """
    _, starts, rows, positions = groups
    c = coefficients
    for i in range(begin, end):
        total = out[i]
        total[:] = 0.0
        whole = np.float32(0.0)
        j, end = starts[i], starts[i + 1]
        while j + 4 <= end:
            p0, p1, p2, p3 = positions[j], positions[j + 1], positions[j + 2], positions[j + 3]
            r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
            four = (vectors[r0], vectors[r1], vectors[r2], vectors[r3])
            _add_four(four, (c[p0], c[p1], c[p2], c[p3]), total)
            whole += (c[p0] + c[p1]) + (c[p2] + c[p3])
            j += 4
        while j < end:
            _add_one(vectors[rows[j]], c[positions[j]], total)
            whole += c[positions[j]]
            j += 1
        sums[i] = whole


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def embed_bags(
    ids: Array,
    offsets: Array,
    coefficients: Array,
    weights: tuple[Array, ...],
    eps: float,
    out: Array,
) -> None:
    """Write φ(x) of a few bags of words, like `elias.model.encoder.BagEncoder` without dropout.

    ``weights`` holds the word vectors, then weight and bias of the first layer, the second layer
    and the layer norm.
    """
    vectors, widen, widen_bias, narrow, narrow_bias, norm, norm_bias = weights
    n_rows, dim = out.shape
    summed = np.empty((n_rows, dim), np.float32)
    hidden = np.empty((n_rows, widen.shape[0]), np.float32)
    _sum_rows(ZERO, n_rows, vectors, ids, offsets, coefficients, summed)
    for j in range(widen.shape[0]):
        for row in range(n_rows):
            z = np.float64(dot(widen[j], summed[row]) + widen_bias[j])
            hidden[row, j] = 0.5 * z * (1.0 + math.erf(z * _SQRT_HALF))  # GELU
    for j in range(dim):
        for row in range(n_rows):
            out[row, j] = summed[row, j] + dot(narrow[j], hidden[row]) + narrow_bias[j]
    for row in range(n_rows):
        mean, variance = 0.0, 0.0
        for value in out[row]:
            mean += value / dim
        for value in out[row]:
            variance += (value - mean) ** 2 / dim
        scale = 1.0 / math.sqrt(variance + eps)
        for j in range(dim):
            out[row, j] = (out[row, j] - mean) * scale * norm[j] + norm_bias[j]


@njit(cache=True, fastmath=FASTMATH)
def _dot_four(point: Array, rows: tuple[Array, ...]) -> tuple[np.float32, ...]:
    """Return the dot products of a point with four rows, in one pass over the point."""
    r0, r1, r2, r3 = rows
    t0, t1, t2, t3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for d in range(point.shape[0]):
        value = point[d]
        t0 += r0[d] * value
        t1 += r1[d] * value
        t2 += r2[d] * value
        t3 += r3[d] * value
    return t0, t1, t2, t3


@njit(cache=True, fastmath=FASTMATH)
def _dots(point: Array, weight: Array, bias: Array, labels: Array, out: Array) -> None:
    n_labels = weight.shape[0]
    k, end = 0, labels.shape[0]
    while k < end:
        if k + 4 <= end and max(labels[k], labels[k + 1], labels[k + 2], labels[k + 3]) < n_labels:
            l0, l1, l2, l3 = labels[k], labels[k + 1], labels[k + 2], labels[k + 3]
            products = _dot_four(point, (weight[l0], weight[l1], weight[l2], weight[l3]))
            out[k] = products[0] + bias[l0]
            out[k + 1] = products[1] + bias[l1]
            out[k + 2] = products[2] + bias[l2]
            out[k + 3] = products[3] + bias[l3]
            k += 4
            continue
        out[k] = 0.0
        if labels[k] < n_labels:
            out[k] = dot(weight[labels[k]], point) + bias[labels[k]]
        k += 1


@njit(cache=True, nogil=True, fastmath=FASTMATH)
def _shortlist_dots(
    begin: int, end: int, embedding: Array, weight: Array, bias: Array, labels: Array, out: Array
) -> None:
    """Compute `_gather_dot` in blocks of slots, as `_sum_shortlists` does."""
    n_slots = labels.shape[1]
    for first in range(0, n_slots, _SLOTS_PER_CHUNK):
        slots = slice(first, min(first + _SLOTS_PER_CHUNK, n_slots))
        for row in range(begin, end):
            _dots(embedding[row], weight, bias, labels[row, slots], out[row, slots])


@njit(cache=True, nogil=True)
def group_by_id(ids: Array, offsets: Array, n_ids: int) -> tuple[Array, Array, Array, Array]:
    """Group the entries of ragged lists by id: find the rows and positions of each id.

    Returns four arrays: the distinct ids, ascending; the start of each id's group in the other two
    arrays; the row of each occurrence; and its position in ``ids``. Rows ascend within each group.
    Ids of at least ``n_ids`` are padding. ``ids`` may have up to 2^31 entries.
    """
    counts = np.zeros(n_ids, dtype=np.int32)
    for i in ids:
        if i < n_ids:
            counts[i] += 1
    n_touched = ZERO
    for count in counts:
        n_touched += count > 0
    touched = np.empty(n_touched, dtype=np.int64)  # numba takes long to compile np.flatnonzero
    n_touched = ZERO
    for i in range(n_ids):
        if counts[i] > 0:
            touched[n_touched] = i
            n_touched += 1
    starts = np.zeros(touched.shape[0] + 1, dtype=np.int64)
    slots = counts  # where the next occurrence of each touched id is written
    for i, touched_id in enumerate(touched):
        starts[i + 1] = starts[i] + counts[touched_id]
        slots[touched_id] = starts[i]
    rows = np.empty(starts[-1], dtype=np.int32)
    positions = np.empty(starts[-1], dtype=np.int32)
    for row in range(offsets.shape[0] - 1):
        for j in range(offsets[row], offsets[row + 1]):
            if ids[j] < n_ids:
                slot = slots[ids[j]]
                rows[slot] = row
                positions[slot] = j
                slots[ids[j]] = slot + 1
    return touched, starts, rows, positions
