"""AdamW in place on the rows a step touched, the gradient summed in the same Triton kernel.

A row that skipped steps had a gradient of zero in them: its moments fade and its weights decay
accordingly before the new gradient enters, as in `elias.kernels.update`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.triton_rows import RowPairs, row_programs, sum_of_row
from elias.kernels.update import AdamWRates


class LinearState(NamedTuple):
    """The moments of weights and biases, and the step in which each row was last updated.

    A ``variance`` one wide holds one second moment for a row, the mean of its squared gradients.
    """

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R d"]
    bias_mean: Float[Tensor, " R"]
    bias_variance: Float[Tensor, " R"]
    last_step: Int[Tensor, " R"]


def adamw_pairs(
    weight: Float[Tensor, "R D"],
    bias: Float[Tensor, " R"],
    state: LinearState,
    pairs: RowPairs,
    *,
    step: int,
    rates: AdamWRates,
) -> None:
    """Sum each touched row's gradient over its pairs and update the row, all in place.

    The bias does not decay. A weight in bfloat16 is rounded stochastically, drawn from ``step``.
    """
    if not len(pairs.ids):
        return
    _adamw_pairs[(row_programs(pairs),)](
        weight.detach(),
        bias.detach(),
        *state,
        pairs.ids,
        pairs.order,
        pairs.heads,
        pairs.n_heads,
        pairs.coefficients,
        pairs.vectors,
        len(pairs.ids),
        pairs.per_vector,
        len(weight),
        weight.shape[1],
        step,
        *_numbers(rates, step),
        ONE_VARIANCE=state.variance.shape[1] == 1 < weight.shape[1],
        ROUND=weight.element_size() == 2,
        BLOCK_J=4,
        BLOCK_D=triton.next_power_of_2(weight.shape[1]),
        num_warps=4,
    )


class EdgeState(NamedTuple):
    """The moments of the edge logits, and the step in which each cluster was last updated."""

    mean: Float[Tensor, "C E"]
    variance: Float[Tensor, "C E"]
    last_step: Int[Tensor, " C"]


def adamw_edges(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    state: EdgeState,
    by_log: Float[Tensor, "C E"],
    touched: Int[Tensor, " C"],
    *,
    n_labels: int,
    step: int,
    rates: AdamWRates,
) -> None:
    """Turn the gradient by log softmax into that by the logits, and update the touched clusters.

    ``by_log`` and ``touched`` are cleared where they were used: all zero afterwards.
    """
    n_clusters, n_edges = edge_logits.shape
    block = triton.next_power_of_2(n_edges)
    _adamw_edges[(n_clusters,)](
        edge_logits.detach(),
        edge_labels,
        *state,
        by_log,
        touched,
        n_edges,
        n_labels,
        step,
        *_numbers(rates, step),
        BLOCK_E=block,
        num_warps=8 if block > 2048 else 4,
    )


def _numbers(rates: AdamWRates, step: int) -> tuple[float, ...]:
    """Return what the kernels need of the rates, the fades of one step as powers of two."""
    fades = (rates.beta1, rates.beta2, 1 - rates.lr * rates.decay)
    return (
        *(math.log2(max(fade, 1e-38)) for fade in fades),
        rates.lr / (1 - rates.beta1**step),
        rates.eps,
        1 - rates.beta1,
        1 - rates.beta2,
        1 / (1 - rates.beta2**step),
    )


@triton.jit
def _round_by_chance(values: tl.tensor, seed: tl.tensor, places: tl.tensor) -> tl.tensor:
    """Return float32 values in bfloat16: the neighbour above or below, on average the value."""
    noise = tl.randint(seed, places).to(tl.int32) & 0xFFFF
    bits = (values.to(tl.int32, bitcast=True) + noise) & -65536
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["step"])
def _adamw_pairs(
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    variance: tl.tensor,
    bias_mean: tl.tensor,
    bias_variance: tl.tensor,
    last_step: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    heads: tl.tensor,
    n_heads: tl.tensor,
    coefficients: tl.tensor,
    vectors: tl.tensor,
    n_pairs: tl.tensor,
    per_vector: tl.tensor,
    n_rows: tl.tensor,
    dim: tl.tensor,
    step: tl.tensor,
    log_fade1: tl.tensor,
    log_fade2: tl.tensor,
    log_shrink: tl.tensor,
    rate: tl.tensor,
    eps: tl.tensor,
    new1: tl.tensor,
    new2: tl.tensor,
    correction: tl.tensor,
    ONE_VARIANCE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    for i in range(tl.program_id(0), tl.load(n_heads), tl.num_programs(0)):
        head = tl.load(heads + i)
        row = tl.load(ids + head).to(tl.int64)
        if row < n_rows:
            g, bias_g = sum_of_row(
                ids, order, coefficients, vectors, head, n_pairs, per_vector, dim, BLOCK_J, BLOCK_D
            )
            skipped = (step - tl.load(last_step + row)).to(tl.float32)
            fade1 = tl.exp2(skipped * log_fade1)
            fade2 = tl.exp2(skipped * log_fade2)
            at = row * dim + d
            m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
            m = fade1 * m + new1 * g
            if ONE_VARIANCE:
                v = fade2 * tl.load(variance + row) + new2 * (tl.sum(g * g, axis=0) / dim)
                tl.store(variance + row, v)
            else:
                v = fade2 * tl.load(variance + at, mask=inside, other=0.0) + new2 * g * g
                tl.store(variance + at, v, mask=inside)
            w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            w = tl.exp2(skipped * log_shrink) * w
            w = w - rate * m / (tl.sqrt(v * correction) + eps)
            if ROUND:
                tl.store(mean + at, m.to(tl.bfloat16), mask=inside)
                places = row.to(tl.int32) * BLOCK_D + d  # may wrap: two rows then share their luck
                tl.store(weight + at, _round_by_chance(w, step, places), mask=inside)
            else:
                tl.store(mean + at, m, mask=inside)
                tl.store(weight + at, w, mask=inside)

            bm = fade1 * tl.load(bias_mean + row) + new1 * bias_g
            bv = fade2 * tl.load(bias_variance + row) + new2 * bias_g * bias_g
            b = tl.load(bias + row) - rate * bm / (tl.sqrt(bv * correction) + eps)
            tl.store(bias_mean + row, bm)
            tl.store(bias_variance + row, bv)
            tl.store(bias + row, b)
            tl.store(last_step + row, step)


@triton.jit(do_not_specialize=["step"])
def _adamw_edges(
    edge_logits: tl.tensor,
    edge_labels: tl.tensor,
    mean: tl.tensor,
    variance: tl.tensor,
    last_step: tl.tensor,
    by_log: tl.tensor,
    touched: tl.tensor,
    n_edges: tl.tensor,
    n_labels: tl.tensor,
    step: tl.tensor,
    log_fade1: tl.tensor,
    log_fade2: tl.tensor,
    log_shrink: tl.tensor,
    rate: tl.tensor,
    eps: tl.tensor,
    new1: tl.tensor,
    new2: tl.tensor,
    correction: tl.tensor,
    BLOCK_E: tl.constexpr,
) -> None:
    cluster = tl.program_id(0).to(tl.int64)
    if tl.load(touched + cluster) != 0:
        e = tl.arange(0, BLOCK_E)
        at = cluster * n_edges + e
        label = tl.load(edge_labels + at, mask=e < n_edges, other=n_labels)
        stored = label < n_labels
        logits = tl.load(edge_logits + at, mask=stored, other=-float("inf"))
        g = tl.load(by_log + at, mask=stored, other=0.0)
        shares = tl.exp(logits - tl.max(logits, axis=0))
        shares = shares / tl.sum(shares, axis=0)
        g = g - shares * tl.sum(g, axis=0)
        skipped = (step - tl.load(last_step + cluster)).to(tl.float32)
        m = tl.load(mean + at, mask=stored, other=0.0)
        m = tl.exp2(skipped * log_fade1) * m + new1 * g
        v = tl.load(variance + at, mask=stored, other=0.0)
        v = tl.exp2(skipped * log_fade2) * v + new2 * g * g
        a = tl.exp2(skipped * log_shrink) * logits - rate * m / (tl.sqrt(v * correction) + eps)
        tl.store(mean + at, m, mask=stored)
        tl.store(variance + at, v, mask=stored)
        tl.store(edge_logits + at, a, mask=stored)
        tl.store(by_log + at, tl.zeros([BLOCK_E], tl.float32), mask=e < n_edges)
        tl.store(last_step + cluster, step)
        tl.store(touched + cluster, 0)
