"""Products with selected rows of a large table and their gradients as Triton kernels.

No B×K×D tensor is stored: each program loads the rows of a few labels into registers. For the
gradient of the table, the B·K (label, point) pairs are sorted by label, so that one program can sum
the gradient of each touched row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels.adamw_state import IndexGradients

_BLOCK_K = 16
_SUM_BLOCK_K = 8
_SUM_PROGRAMS = 8192  # number of one-warp programs that keeps a large GPU busy
_HEADS_BLOCK = 1024


def label_logits(
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    gradients: IndexGradients | None = None,
) -> Tensor:
    """Return the logit w_ℓ·φ + bias_ℓ of each label. Padded slots give 0.

    The backward pass adds the gradient of weights and biases to ``gradients``. If ``gradients`` is
    None, there is no backward pass.
    """
    if gradients is None:
        return gather_dot(embedding, weight, bias, labels)
    return _LabelLogits.apply(embedding, weight, bias, labels, gradients)


class _LabelLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        gradients: IndexGradients,
    ) -> Tensor:
        ctx.save_for_backward(embedding, weight, labels)
        ctx.gradients = gradients
        return gather_dot(embedding, weight, bias, labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        embedding, weight, labels = ctx.saved_tensors
        ctx.gradients.add_pairs(labels, grads[0], embedding)
        return gather_sum(grads[0], weight, labels), None, None, None, None


def gather_dot(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    labels: Int[Tensor, "B K"],
) -> Float[Tensor, "B K"]:
    """Return the logits w_ℓ·φ + bias_ℓ of K labels for each point. A padded label (L) gives 0."""
    n_rows, n_keep = labels.shape
    out = torch.empty((n_rows, n_keep), dtype=torch.float32, device=embedding.device)
    if out.numel():
        _gather_dot[(n_rows, triton.cdiv(n_keep, _BLOCK_K))](
            embedding.contiguous(),
            weight,
            bias,
            labels.contiguous(),
            out,
            n_keep,
            len(weight),
            weight.shape[1],
            BLOCK_K=_BLOCK_K,
            BLOCK_D=int(min(256, triton.next_power_of_2(weight.shape[1]))),
            num_warps=4,
        )
    return out


def gather_sum(
    coefficients: Float[Tensor, "B K"],
    weight: Float[Tensor, "L D"],
    labels: Int[Tensor, "B K"],
) -> Float[Tensor, "B D"]:
    """Return the gradient of each point's embedding, Σ_k coefficient_k · w_{ℓ_k}."""
    n_rows, n_keep = labels.shape
    dim = weight.shape[1]
    # a point's shortlist is split into parts, one program each, to use the whole GPU
    max_parts = triton.cdiv(n_keep, 2 * _SUM_BLOCK_K)
    n_parts = max(1, min(_SUM_PROGRAMS // max(1, n_rows), max_parts))
    per_part = triton.cdiv(triton.cdiv(max(1, n_keep), n_parts), _SUM_BLOCK_K) * _SUM_BLOCK_K
    n_parts = max(1, triton.cdiv(n_keep, per_part))
    out = torch.empty((n_parts, n_rows, dim), dtype=torch.float32, device=weight.device)
    block_a, block_b = block_sizes(dim)
    if out.numel():
        _gather_sum[(n_rows, n_parts)](
            coefficients.contiguous(),
            weight,
            labels.contiguous(),
            out,
            n_rows,
            n_keep,
            len(weight),
            dim,
            per_part,
            BLOCK_K=_SUM_BLOCK_K,
            BLOCK_A=block_a,
            BLOCK_B=block_b,
            num_warps=1,
        )
    return out[0] if n_parts == 1 else out.sum(dim=0)


def block_sizes(dim: int) -> tuple[int, int]:
    """Return two block sizes, powers of two, that together cover a row of ``dim`` values.

    For 768 they are 512 and 256, so that no lane is idle.
    """
    largest = 1 << (dim.bit_length() - 1)
    if largest == dim:
        half = max(1, dim // 2)
        return half, half
    return largest, int(triton.next_power_of_2(dim - largest))


class RowPairs(NamedTuple):
    """Pairs of a table row and a vector, sorted by row.

    The gradient of row r is the sum of coefficient · vector over its pairs.
    """

    ids: Int[Tensor, " pairs"]
    """Row id of each pair, ascending; padding ids (beyond the table) come last."""
    order: Int[Tensor, " pairs"]
    """Index of each pair before sorting; ``order // per_vector`` is the index of its vector."""
    heads: Int[Tensor, " pairs"]
    """Index of the first pair of each row, unsorted; the first ``n_heads`` entries are valid."""
    n_heads: Int[Tensor, " 1"]
    coefficients: Float[Tensor, " pairs"]
    vectors: Float[Tensor, "V D"]
    per_vector: int


def pair_rows(
    ids: Int[Tensor, "V K"], coefficients: Float[Tensor, "V K"], vectors: Float[Tensor, "V D"]
) -> RowPairs:
    """Sort all (row, vector) pairs by row id, without a device sync."""
    sorted_ids, order = ids.reshape(-1).to(torch.int32).sort(stable=True)
    heads = torch.empty_like(sorted_ids)
    n_heads = torch.zeros(1, dtype=torch.int32, device=ids.device)
    n_pairs = len(sorted_ids)
    if n_pairs:
        _find_heads[(triton.cdiv(n_pairs, _HEADS_BLOCK),)](
            sorted_ids, heads, n_heads, n_pairs, BLOCK=_HEADS_BLOCK, num_warps=4
        )
    flat = coefficients.reshape(-1).contiguous()
    return RowPairs(sorted_ids, order, heads, n_heads, flat, vectors.contiguous(), ids.shape[1])


@triton.jit
def _gather_dot(
    embedding: tensor,
    weight: tensor,
    bias: tensor,
    labels: tensor,
    out: tensor,
    n_keep: tensor,
    n_labels: tensor,
    dim: tensor,
    BLOCK_K: constexpr,
    BLOCK_D: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    label = tl.load(labels + row * n_keep + k, mask=k < n_keep, other=n_labels).to(tl.int64)
    real = label < n_labels
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        point = tl.load(embedding + row * dim + d, mask=d < dim, other=0.0).to(tl.float32)
        offsets = label[:, None] * dim + d[None, :]
        rows = tl.load(weight + offsets, mask=real[:, None] & (d < dim)[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * point[None, :], axis=1)
    total += tl.load(bias + label, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * n_keep + k, tl.where(real, total, 0.0), mask=k < n_keep)


@triton.jit(do_not_specialize=["n_rows"])
def _gather_sum(
    coefficients: tensor,
    weight: tensor,
    labels: tensor,
    out: tensor,
    n_rows: tensor,
    n_keep: tensor,
    n_labels: tensor,
    dim: tensor,
    per_part: tensor,
    BLOCK_K: constexpr,
    BLOCK_A: constexpr,
    BLOCK_B: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    a = tl.arange(0, BLOCK_A)
    b = BLOCK_A + tl.arange(0, BLOCK_B)
    last = tl.minimum((part + 1) * per_part, n_keep)
    total_a = tl.zeros([BLOCK_A], tl.float32)
    total_b = tl.zeros([BLOCK_B], tl.float32)
    for start in range(part * per_part, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        label = tl.load(labels + row * n_keep + k, mask=k < last, other=n_labels).to(tl.int64)
        real = label < n_labels
        coefficient = tl.load(coefficients + row * n_keep + k, mask=real, other=0.0)
        start_of_row = weight + (label * dim)[:, None]
        rows_a = tl.load(
            start_of_row + a[None, :], mask=real[:, None] & (a < dim)[None, :], other=0.0
        )
        rows_b = tl.load(
            start_of_row + b[None, :], mask=real[:, None] & (b < dim)[None, :], other=0.0
        )
        total_a += tl.sum(rows_a.to(tl.float32) * coefficient[:, None], axis=0)
        total_b += tl.sum(rows_b.to(tl.float32) * coefficient[:, None], axis=0)
    at = out + (part * n_rows + row) * dim
    tl.store(at + a, total_a, mask=a < dim)
    tl.store(at + b, total_b, mask=b < dim)


@triton.jit
def _find_heads(
    ids: tensor, heads: tensor, n_heads: tensor, n_pairs: tensor, BLOCK: constexpr
) -> None:
    """Write to ``heads`` the indices at which a new id begins."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + i, mask=i < n_pairs, other=-1)
    before = tl.load(ids + i - 1, mask=(i > 0) & (i < n_pairs), other=-1)
    begins = (i < n_pairs) & (row != before)
    counts = begins.to(tl.int32)
    first = tl.atomic_add(n_heads, tl.sum(counts, axis=0), sem="relaxed")
    slot = first + tl.cumsum(counts, axis=0) - 1
    tl.store(heads + slot, i, mask=begins)


@triton.jit
def row_sum(
    pairs: tensor, head: tensor, BLOCK_J: constexpr, BLOCK_A: constexpr, BLOCK_B: constexpr
) -> tensor:
    """Return Σ coefficient · vector (in two blocks) and Σ coefficient over the pairs of a row.

    ``head`` is the index of the first pair of the row.
    """
    ids, order, coefficients, vectors, n_pairs, per_vector, dim = pairs
    row = tl.load(ids + head)
    a = tl.arange(0, BLOCK_A)
    b = BLOCK_A + tl.arange(0, BLOCK_B)
    total_a = tl.zeros([BLOCK_A], tl.float32)
    total_b = tl.zeros([BLOCK_B], tl.float32)
    sums = tl.zeros([BLOCK_J], tl.float32)
    start = head
    going = head < n_pairs
    while going:
        j = start + tl.arange(0, BLOCK_J)
        same = tl.load(ids + j, mask=j < n_pairs, other=-1) == row
        pair = tl.load(order + j, mask=j < n_pairs, other=0).to(tl.int32)
        coefficient = tl.load(coefficients + pair, mask=same, other=0.0)
        vector = vectors + ((pair // per_vector) * dim)[:, None]
        rows_a = tl.load(vector + a[None, :], mask=same[:, None] & (a < dim)[None, :], other=0.0)
        rows_b = tl.load(vector + b[None, :], mask=same[:, None] & (b < dim)[None, :], other=0.0)
        total_a += tl.sum(rows_a.to(tl.float32) * coefficient[:, None], axis=0)
        total_b += tl.sum(rows_b.to(tl.float32) * coefficient[:, None], axis=0)
        sums += coefficient
        start += BLOCK_J
        going = tl.sum(same.to(tl.int32), axis=0) == BLOCK_J
    return total_a, total_b, tl.sum(sums, axis=0)
