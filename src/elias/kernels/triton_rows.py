"""Products with a few rows of a large table as Triton kernels, and the gradients of both sides.

No B×K×D is ever held: a program takes the rows of some labels through its registers. For the
table's gradient the B·K pairs of a label and a point are sorted by label; each touched row is then
summed by one program, once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK_K = 16
_ENOUGH_PROGRAMS = 2048  # to keep a large GPU busy
_ROW_PROGRAMS = 2112  # rows of a table in work at a time: 16 for each multiprocessor of an H200
_HEADS_BLOCK = 1024


def gather_dot(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    labels: Int[Tensor, "B K"],
) -> Float[Tensor, "B K"]:
    """Return w_ℓ·φ + bias_ℓ for the K labels of each point; a padded label (= L) gives 0."""
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
            BLOCK_D=_part_of_width(weight),
            num_warps=4,
        )
    return out


def gather_sum(
    coefficients: Float[Tensor, "B K"],
    weight: Float[Tensor, "L D"],
    labels: Int[Tensor, "B K"],
) -> Float[Tensor, "B D"]:
    """Return Σ_k coefficient_k · w_ℓ of each point: the embedding's gradient."""
    n_rows, n_keep = labels.shape
    dim = weight.shape[1]
    block_d = _part_of_width(weight)
    columns = triton.cdiv(dim, block_d)
    n_parts = min(16, max(1, _ENOUGH_PROGRAMS // max(1, n_rows * columns)))
    per_part = triton.cdiv(triton.cdiv(n_keep, n_parts), _BLOCK_K) * _BLOCK_K
    out = torch.empty((n_parts, n_rows, dim), dtype=torch.float32, device=weight.device)
    if out.numel():
        _gather_sum[(n_rows, columns, n_parts)](
            coefficients.contiguous(),
            weight,
            labels.contiguous(),
            out,
            n_rows,
            n_keep,
            len(weight),
            dim,
            per_part,
            BLOCK_K=_BLOCK_K,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out[0] if n_parts == 1 else out.sum(dim=0)


class RowPairs(NamedTuple):
    """Pairs of a table's row and a vector, in the order of the rows; the number is on the device.

    The gradient of row r is the sum of coefficient · vector over its pairs.
    """

    ids: Int[Tensor, " pairs"]
    """The rows, ascending, those over the table's length last."""
    order: Int[Tensor, " pairs"]
    """Where each pair stood before; ``order // per_vector`` is its vector."""
    heads: Int[Tensor, " pairs"]
    """Where each row's pairs begin, in no order; ``n_heads`` of them."""
    n_heads: Int[Tensor, " 1"]
    coefficients: Float[Tensor, " pairs"]
    vectors: Float[Tensor, "V D"]
    per_vector: int


def pair_rows(
    ids: Int[Tensor, "V K"], coefficients: Float[Tensor, "V K"], vectors: Float[Tensor, "V D"]
) -> RowPairs:
    """Sort the pairs of K rows with each vector by row, and find where each row begins."""
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


def row_programs(pairs: RowPairs) -> int:
    """Return how many programs share the rows of these pairs."""
    return max(1, min(_ROW_PROGRAMS, len(pairs.ids)))


def summed_rows(
    pairs: RowPairs, n_rows: int
) -> tuple[Int[Tensor, " r"], Float[Tensor, "r D"], Float[Tensor, " r"]]:
    """Return the touched rows ascending, their gradients, and the sums of their coefficients.

    For callers that want the gradient itself; the device is asked how many rows there are.
    """
    heads = pairs.heads[: int(pairs.n_heads)].sort().values
    heads = heads[pairs.ids[heads.long()] < n_rows]
    dim = pairs.vectors.shape[1]
    gradient = torch.empty((len(heads), dim), dtype=torch.float32, device=heads.device)
    sums = torch.empty(len(heads), dtype=torch.float32, device=heads.device)
    if len(heads):
        _sum_pairs[(len(heads),)](
            pairs.ids,
            pairs.order,
            heads,
            pairs.coefficients,
            pairs.vectors,
            gradient,
            sums,
            len(pairs.ids),
            pairs.per_vector,
            dim,
            BLOCK_J=4,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return pairs.ids[heads.long()].long(), gradient, sums


def _part_of_width(weight: Tensor) -> int:
    return int(min(256, triton.next_power_of_2(weight.shape[1])))


@triton.jit
def _gather_dot(
    embedding: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    labels: tl.tensor,
    out: tl.tensor,
    n_keep: tl.tensor,
    n_labels: tl.tensor,
    dim: tl.tensor,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    label = tl.load(labels + row * n_keep + k, mask=k < n_keep, other=n_labels).to(tl.int64)
    real = label < n_labels
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        point = tl.load(embedding + row * dim + d, mask=d < dim, other=0.0).to(tl.float32)
        places = label[:, None] * dim + d[None, :]
        rows = tl.load(weight + places, mask=real[:, None] & (d < dim)[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * point[None, :], axis=1)
    total += tl.load(bias + label, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * n_keep + k, tl.where(real, total, 0.0), mask=k < n_keep)


@triton.jit
def _gather_sum(
    coefficients: tl.tensor,
    weight: tl.tensor,
    labels: tl.tensor,
    out: tl.tensor,
    n_rows: tl.tensor,
    n_keep: tl.tensor,
    n_labels: tl.tensor,
    dim: tl.tensor,
    per_part: tl.tensor,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(2) * per_part
    last = tl.minimum(first + per_part, n_keep)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        label = tl.load(labels + row * n_keep + k, mask=k < last, other=n_labels).to(tl.int64)
        real = label < n_labels
        coefficient = tl.load(coefficients + row * n_keep + k, mask=real, other=0.0)
        places = label[:, None] * dim + d[None, :]
        rows = tl.load(weight + places, mask=real[:, None] & (d < dim)[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * coefficient[:, None], axis=0)
    at = (tl.program_id(2) * n_rows + row) * dim
    tl.store(out + at + d, total, mask=d < dim)


@triton.jit
def _find_heads(
    ids: tl.tensor,
    heads: tl.tensor,
    n_heads: tl.tensor,
    n_pairs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """List the places where the id differs from the one before."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + place, mask=place < n_pairs, other=-1)
    before = tl.load(ids + place - 1, mask=(place > 0) & (place < n_pairs), other=-1)
    begins = (place < n_pairs) & (own != before)
    counts = begins.to(tl.int32)
    slot = tl.atomic_add(n_heads, tl.sum(counts, axis=0)) + tl.cumsum(counts, axis=0) - 1
    tl.store(heads + slot, place, mask=begins)


@triton.jit
def sum_of_row(
    ids: tl.tensor,
    order: tl.tensor,
    coefficients: tl.tensor,
    vectors: tl.tensor,
    head: tl.tensor,
    n_pairs: tl.tensor,
    per_vector: tl.tensor,
    dim: tl.tensor,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Return Σ coefficient · vector over the pairs of the row that begins at ``head``, and Σ."""
    row = tl.load(ids + head)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_J], tl.float32)
    start = head
    going = head < n_pairs
    while going:
        j = start + tl.arange(0, BLOCK_J)
        same = tl.load(ids + j, mask=j < n_pairs, other=-1) == row
        place = tl.load(order + j, mask=same, other=0)
        coefficient = tl.load(coefficients + place, mask=same, other=0.0)
        places = (place // per_vector)[:, None] * dim + d[None, :]
        rows = tl.load(vectors + places, mask=same[:, None] & (d < dim)[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * coefficient[:, None], axis=0)
        sums += coefficient
        start += BLOCK_J
        going = tl.sum(same.to(tl.int32), axis=0) == BLOCK_J
    return total, tl.sum(sums, axis=0)


@triton.jit
def _sum_pairs(
    ids: tl.tensor,
    order: tl.tensor,
    heads: tl.tensor,
    coefficients: tl.tensor,
    vectors: tl.tensor,
    gradient: tl.tensor,
    sums: tl.tensor,
    n_pairs: tl.tensor,
    per_vector: tl.tensor,
    dim: tl.tensor,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    head = tl.load(heads + i)
    total, own_sum = sum_of_row(
        ids, order, coefficients, vectors, head, n_pairs, per_vector, dim, BLOCK_J, BLOCK_D
    )
    tl.store(gradient + i * dim + d, total, mask=d < dim)
    tl.store(sums + i, own_sum)
