"""Lazy AdamW on the rows that a step touches, as Triton kernels that fuse gradient and update.

See `elias.kernels.adamw_state` for the decay of rows that skipped steps.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels.adamw_state import History, LinearState, RowState
from elias.kernels.gpu.rows import RowPairs, block_sizes, row_sum

_PROGRAMS = 2112  # they share the rows; 16 per multiprocessor of an H200


def adamw_pairs(
    weight: Float[Tensor, "R D"],
    bias: Float[Tensor, " R"],
    state: LinearState,
    pairs: RowPairs,
    history: History,
    *,
    n_warps: int | None = None,
) -> None:
    """Sum the gradient of each touched row over its pairs, and apply AdamW to the row, in place.

    The update belongs to the last step in ``history``. The bias has no weight decay. A bfloat16
    weight is rounded stochastically, with the step as seed.
    """
    if not len(pairs.ids):
        return
    compact = weight.element_size() == 2
    # if rows have few pairs, most pairs in a larger block would be masked
    block_j = 4 if len(pairs.ids) > 2 * len(weight) else 2
    block_a, block_b = block_sizes(weight.shape[1])
    _adamw_pairs[(min(_PROGRAMS, len(pairs.ids)),)](
        weight.detach(),
        bias.detach(),
        *state,
        *pairs[:-1],
        len(pairs.ids),
        pairs.per_vector,
        *weight.shape,
        *_numbers(history),
        ONE_VARIANCE=state.variance.shape[1] == 1 < weight.shape[1],
        ROUND=compact,
        BLOCK_J=block_j,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        num_warps=n_warps or (1 if compact else 2),
    )


def adamw_edges(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    state: RowState,
    by_log: Float[Tensor, "C E"],
    touched: Int[Tensor, " C"],
    history: History,
    *,
    n_labels: int,
) -> None:
    """Backpropagate through the log softmax and apply AdamW to the touched clusters, in place.

    ``by_log`` is the gradient with respect to the log softmax of the edge logits. ``by_log`` and
    ``touched`` are set to zero afterwards.
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
        *_numbers(history),
        BLOCK_E=block,
        num_warps=8 if block > 2048 else 4,
    )


def _numbers(history: History) -> tuple[float | Tensor, ...]:
    """Return the step and the numbers of its update, in the order of the kernels' parameters.

    They are the logs of the decay, log₂ β₁, log₂ β₂, the bias-corrected lr, ε, 1 − β₁, 1 − β₂ and
    1 / (1 − β₂^step).
    """
    rates, step = history.rates, history.step
    return (
        step,
        history.decay_log,
        *(math.log2(max(fade, 1e-38)) for fade in (rates.beta1, rates.beta2)),
        rates.lr / (1 - rates.beta1**step),
        rates.eps,
        1 - rates.beta1,
        1 - rates.beta2,
        1 / (1 - rates.beta2**step),
    )


@triton.jit
def _hash(bits: tensor) -> tensor:
    """Hash 32 bits. Each output bit, except the lowest four, depends on all input bits."""
    bits = (bits ^ (bits >> 15)) * 3141592653
    return (bits ^ (bits >> 12)) * 2718281829


@triton.jit
def _stochastic_round(values: tensor, seed: tensor, columns: tensor) -> tensor:
    """Round float32 to bfloat16, up or down at random, so that the expected value is the input.

    The noise of each weight is a cheap hash of the row's seed and the column.
    """
    noise = seed + columns.to(tl.uint32) * 2654435769
    noise = (noise ^ (noise >> 15)) * 1414213563
    bits = (values.to(tl.uint32, bitcast=True) + (noise >> 16)) & 4294901760
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _update_block(
    table: tensor,
    values: tensor,
    d: tensor,
    inside: tensor,
    numbers: tensor,
    seed: tensor,
    ONE_VARIANCE: constexpr,
    ROUND: constexpr,
) -> None:
    """Apply AdamW to one block of a row, given its weights, first moments and gradient."""
    weight, mean, variance = table
    w, m, g = values
    fade1, fade2, shrink, rate, eps, new1, new2, correction, row_rate = numbers
    m = fade1 * m.to(tl.float32) + new1 * g
    w = shrink * w.to(tl.float32)
    if ONE_VARIANCE:
        w -= row_rate * m
    else:
        v = fade2 * tl.load(variance + d, mask=inside, other=0.0) + new2 * g * g
        tl.store(variance + d, v, mask=inside)
        w -= rate * m / (tl.sqrt(v * correction) + eps)
    if ROUND:
        tl.store(mean + d, m.to(tl.bfloat16), mask=inside)
        tl.store(weight + d, _stochastic_round(w, seed, d), mask=inside)
    else:
        tl.store(mean + d, m, mask=inside)
        tl.store(weight + d, w, mask=inside)


@triton.jit(do_not_specialize=["step"])
def _adamw_pairs(
    weight: tensor,
    bias: tensor,
    mean: tensor,
    variance: tensor,
    bias_mean: tensor,
    bias_variance: tensor,
    last_step: tensor,
    ids: tensor,
    order: tensor,
    heads: tensor,
    n_heads: tensor,
    coefficients: tensor,
    vectors: tensor,
    n_pairs: tensor,
    per_vector: tensor,
    n_rows: tensor,
    dim: tensor,
    step: tensor,
    decay_log: tensor,
    log_fade1: tensor,
    log_fade2: tensor,
    rate: tensor,
    eps: tensor,
    new1: tensor,
    new2: tensor,
    correction: tensor,
    ONE_VARIANCE: constexpr,
    ROUND: constexpr,
    BLOCK_J: constexpr,
    BLOCK_A: constexpr,
    BLOCK_B: constexpr,
) -> None:
    a = tl.arange(0, BLOCK_A)
    b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_a, in_b = a < dim, b < dim
    program = tl.program_id(0)
    n_touched = tl.load(n_heads)
    head = tl.load(heads + program, mask=program < n_touched, other=0)
    row = tl.load(ids + head).to(tl.int64)
    for i in range(program, n_touched, tl.num_programs(0)):
        # prefetch the next row before this one is done
        follows = i + tl.num_programs(0)
        next_head = tl.load(heads + follows, mask=follows < n_touched, other=0)
        next_row = tl.load(ids + next_head).to(tl.int64)
        if row < n_rows:
            # loaded before the gradient is summed, to hide the memory latency
            row_weight = weight + row * dim
            row_mean = mean + row * dim
            w_a = tl.load(row_weight + a, mask=in_a, other=0.0)
            w_b = tl.load(row_weight + b, mask=in_b, other=0.0)
            m_a = tl.load(row_mean + a, mask=in_a, other=0.0)
            m_b = tl.load(row_mean + b, mask=in_b, other=0.0)
            previous = tl.load(last_step + row)
            # in float64, because after many steps this is a small difference of large sums
            log_decay = tl.load(decay_log + step) - tl.load(decay_log + previous)
            bias_w, bias_m = tl.load(bias + row), tl.load(bias_mean + row)
            bias_v = tl.load(bias_variance + row)
            row_variance = variance + row * (1 if ONE_VARIANCE else dim)
            v = tl.load(row_variance)

            pairs = (ids, order, coefficients, vectors, n_pairs, per_vector, dim)
            g_a, g_b, bias_g = row_sum(pairs, head, BLOCK_J, BLOCK_A, BLOCK_B)
            skipped = (step - previous).to(tl.float32)
            fade1, fade2 = tl.exp2(skipped * log_fade1), tl.exp2(skipped * log_fade2)
            shrink = tl.exp2(log_decay.to(tl.float32))
            row_rate = rate
            if ONE_VARIANCE:
                square = tl.sum(g_a * g_a, axis=0) + tl.sum(g_b * g_b, axis=0)
                v = fade2 * v + new2 * (square / dim)
                tl.store(row_variance, v)
                row_rate = rate / (tl.sqrt(v * correction) + eps)
            seed = _hash(row.to(tl.uint32) * 2654435769 + _hash(step.to(tl.uint32)))
            numbers = (fade1, fade2, shrink, rate, eps, new1, new2, correction, row_rate)
            table = (row_weight, row_mean, row_variance)
            _update_block(table, (w_a, m_a, g_a), a, in_a, numbers, seed, ONE_VARIANCE, ROUND)
            _update_block(table, (w_b, m_b, g_b), b, in_b, numbers, seed, ONE_VARIANCE, ROUND)
            bias_m = fade1 * bias_m + new1 * bias_g  # the bias does not decay
            bias_v = fade2 * bias_v + new2 * bias_g * bias_g
            bias_w -= rate * bias_m / (tl.sqrt(bias_v * correction) + eps)
            tl.store(bias_mean + row, bias_m)
            tl.store(bias_variance + row, bias_v)
            tl.store(bias + row, bias_w)
            tl.store(last_step + row, step)
        head = next_head
        row = next_row


@triton.jit(do_not_specialize=["step"])
def _adamw_edges(
    edge_logits: tensor,
    edge_labels: tensor,
    mean: tensor,
    variance: tensor,
    last_step: tensor,
    by_log: tensor,
    touched: tensor,
    n_edges: tensor,
    n_labels: tensor,
    step: tensor,
    decay_log: tensor,
    log_fade1: tensor,
    log_fade2: tensor,
    rate: tensor,
    eps: tensor,
    new1: tensor,
    new2: tensor,
    correction: tensor,
    BLOCK_E: constexpr,
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
        previous = tl.load(last_step + cluster)
        log_decay = tl.load(decay_log + step) - tl.load(decay_log + previous)
        skipped = (step - previous).to(tl.float32)
        m = tl.load(mean + at, mask=stored, other=0.0)
        m = tl.exp2(skipped * log_fade1) * m + new1 * g
        v = tl.load(variance + at, mask=stored, other=0.0)
        v = tl.exp2(skipped * log_fade2) * v + new2 * g * g
        a = tl.exp2(log_decay.to(tl.float32)) * logits
        a -= rate * m / (tl.sqrt(v * correction) + eps)
        tl.store(mean + at, m, mask=stored)
        tl.store(variance + at, v, mask=stored)
        tl.store(edge_logits + at, a, mask=stored)
        tl.store(by_log + at, tl.zeros([BLOCK_E], tl.float32), mask=e < n_edges)
        tl.store(last_step + cluster, step)
        tl.store(touched + cluster, 0)
