"""Attention within packed texts of any length as Triton kernels.

Candidate for `elias.kernels.gpu.attention`, which has kernels for texts of up to 64 tokens. The
package does not use this module. It is correct in Triton's interpreter but not yet measured on a
GPU, which `gpu_attention.py` does.

Texts follow each other in one row of tokens. A text is divided into tiles, and a program computes
one head of one tile: its attention to itself, then to the other tiles of the text. A short text is
one tile. The backward pass computes the attention weights again from the logarithms of their sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels import plain

_MIN_TILE = 16  # minimum size of the operands of a matrix product
_MAX_TILE = 64
_MAX_TILE_BYTES = 8192  # a program holds several tiles in shared memory
_MAX_SIZE = 128  # of a head


class Tiling(NamedTuple):
    """How a kernel divides texts, and the resources of its programs."""

    tile: int
    """Tokens of a tile."""
    num_warps: int
    num_stages: int
    """Number of tiles in flight: while one is computed, the next ones are loaded."""


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Return the attention of each token over the tokens of its own text (N, H, d)."""
    size = query.shape[2]
    if size & (size - 1) or not _MIN_TILE <= size <= _MAX_SIZE:
        return plain.packed_attention(query, key, value, bounds, longest)
    result, _ = tiled_attention(query, key, value, bounds, longest)
    return result


@torch.library.custom_op("elias_benchmarks::tiled_attention", mutates_args=())
def tiled_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Return softmax(QKᵀ/√d)·V of each text and head (N, H, d), and log₂ of its sums (H, N).

    Args:
        query: (N, H, d) queries of all texts, one after the other.
        key: (N, H, d) keys.
        value: (N, H, d) values.
        bounds: (texts + 1,) first token of each text, and the number of tokens N.
        longest: Maximum number of tokens of a text.
    """
    inputs = tuple(part.contiguous() for part in (query, key, value))
    results = _results(query)
    _launch(_attention_forward, inputs, bounds, longest, results)
    return results


@torch.library.custom_op("elias_benchmarks::tiled_attention_gradients", mutates_args=())
def tiled_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given that of the result."""
    parts = query, key, value, result, log_sums, gradient
    inputs = tuple(part.contiguous() for part in parts)
    results = _like(query), _like(key), _like(value)
    _launch(_attention_backward, inputs, bounds, longest, results)
    return results


def _like(part: Tensor) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


def _results(query: Tensor) -> tuple[Tensor, Tensor]:
    n_tokens, n_heads, _ = query.shape
    return _like(query), query.new_empty(n_heads, n_tokens, dtype=torch.float32)


# the shapes of the results, for torch.compile
tiled_attention.register_fake(lambda query, *_: _results(query))
tiled_attention_gradients.register_fake(lambda _, *inputs: tuple(map(_like, inputs[:3])))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, bounds, ctx.longest = inputs
    ctx.save_for_backward(*tensors, *output, bounds)
    ctx.set_materialize_grads(False)  # log_sums have no gradient; zeros would be filled in


def _gradients(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *tiled_attention_gradients(gradient, *ctx.saved_tensors, ctx.longest), None, None


tiled_attention.register_autograd(_gradients, setup_context=_remember)


def _tiling(size: int, longest: int, n_bytes: int) -> Tiling:
    """Return the tiling for heads of a size, with numbers of ``n_bytes`` bytes."""
    most = min(_MAX_TILE, _MAX_TILE_BYTES // (size * n_bytes))
    tile = max(_MIN_TILE, min(most, triton.next_power_of_2(longest)))
    return Tiling(tile, num_warps=min(4, max(1, tile * size // 512)), num_stages=1)


def _launch(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    bounds: Tensor,
    longest: int,
    results: tuple[Tensor, ...],
) -> None:
    """Run a kernel for each tile and head."""
    n_tokens, n_heads, size = inputs[0].shape
    n_texts = len(bounds) - 1
    tile, num_warps, num_stages = _tiling(size, longest, inputs[0].element_size())
    one_tile = longest <= tile
    n_tiles = n_texts if one_tile else n_texts + n_tokens // tile  # see `_own_tile`
    kernel[(n_tiles, n_heads)](
        *inputs,
        bounds,
        *results,
        n_tokens,
        n_texts,
        size**-0.5,
        SIZE=size,
        TILE=tile,
        ONE_TILE=one_tile,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _own_tile(
    bounds: tensor, n_texts: tensor, TILE: constexpr, ONE_TILE: constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the first token of a program's tile, and the bounds of its text.

    Text i has the tiles from number ``bounds[i] // TILE + i`` on: as many as it needs, or one more,
    which begins at or after its end. In a grid of texts and tiles of the longest text, most tiles
    of mixed texts would be empty.
    """
    number = tl.program_id(0)
    text = number
    if not ONE_TILE:
        text = 0
        end = n_texts
        while end - text > 1:
            middle = (text + end) // 2
            before = tl.load(bounds + middle) // TILE + middle <= number
            text = tl.where(before, middle, text)
            end = tl.where(before, end, middle)
    start = tl.load(bounds + text)
    first = start
    if not ONE_TILE:
        first += (number - start // TILE - text) * TILE
    return first, start, tl.load(bounds + text + 1)


@triton.jit
def _rows(
    first: tensor, end: tensor, SIZE: constexpr, TILE: constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the tokens of a tile, the offsets of their vectors, and which are inside the text."""
    tokens = first + tl.arange(0, TILE)
    row = tokens.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return tokens, row[:, None] * SIZE + tl.arange(0, SIZE)[None, :], tokens < end


@triton.jit
def _load(vectors: tensor, at: tensor, inside: tensor) -> tensor:
    return tl.load(vectors + at, mask=inside[:, None], other=0.0)


@triton.jit
def _scores(q: tensor, k: tensor, inside: tensor, scale: tensor) -> tensor:
    """Return the scores of the keys of a tile, as exponents of 2."""
    log2_e: constexpr = 1.4426950408889634
    return tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * (scale * log2_e), -1e30)


@triton.jit(do_not_specialize=["n_tokens", "n_texts"])
def _attention_forward(
    query: tensor,
    key: tensor,
    value: tensor,
    bounds: tensor,
    result: tensor,
    log_sums: tensor,
    n_tokens: tensor,
    n_texts: tensor,
    scale: tensor,
    SIZE: constexpr,
    TILE: constexpr,
    ONE_TILE: constexpr,
) -> None:
    first, start, end = _own_tile(bounds, n_texts, TILE, ONE_TILE)
    if first >= end:
        return
    tokens, at, inside = _rows(first, end, SIZE, TILE)
    q, k, v = _load(query, at, inside), _load(key, at, inside), _load(value, at, inside)
    scores = _scores(q, k, inside, scale)
    highest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - highest[:, None])
    total = tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v)
    if not ONE_TILE:
        for other in range(start, end - TILE, TILE):  # without the own tile
            tile = tl.where(other < first, other, other + TILE)
            _, there, known = _rows(tile, end, SIZE, TILE)
            k, v = _load(key, there, known), _load(value, there, known)
            scores = _scores(q, k, known, scale)
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            shrink = tl.exp2(highest - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None])
            highest = higher
    tl.store(result + at, (mixed / total[:, None]).to(v.dtype), mask=inside[:, None])
    sums = log_sums + tl.program_id(1) * n_tokens
    tl.store(sums + tokens, highest + tl.log2(total), mask=inside)


@triton.jit
def _query_side(
    query: tensor,
    gradient: tensor,
    result: tensor,
    log_sums: tensor,
    tokens: tensor,
    at: tensor,
    inside: tensor,
) -> tuple[tensor, tensor, tensor, tensor]:
    """Return queries, the gradients of their results, logarithms of sums, and means over keys.

    The mean is that of the gradients by the weights of a query, weighted by them. Rows outside of
    the text are 0, so they add nothing to the gradients of keys and values.
    """
    q, g = _load(query, at, inside), _load(gradient, at, inside)
    mean = tl.sum(g.to(tl.float32) * _load(result, at, inside).to(tl.float32), axis=1)
    return q, g, tl.load(log_sums + tokens, mask=inside, other=0.0), mean


@triton.jit
def _gradient_parts(
    q: tensor,
    g: tensor,
    log_sum: tensor,
    mean: tensor,
    k: tensor,
    v: tensor,
    inside: tensor,
    scale: tensor,
) -> tuple[tensor, tensor]:
    """Return the attention weights of two tiles, and the gradients of the scores QKᵀ/√d."""
    weights = tl.exp2(_scores(q, k, inside, scale) - log_sum[:, None])
    by_scores = weights * (tl.dot(g, tl.trans(v)) - mean[:, None])
    return weights.to(q.dtype), by_scores.to(q.dtype)


@triton.jit(do_not_specialize=["n_tokens", "n_texts"])
def _attention_backward(
    query: tensor,
    key: tensor,
    value: tensor,
    result: tensor,
    log_sums: tensor,
    gradient: tensor,
    bounds: tensor,
    by_query: tensor,
    by_key: tensor,
    by_value: tensor,
    n_tokens: tensor,
    n_texts: tensor,
    scale: tensor,
    SIZE: constexpr,
    TILE: constexpr,
    ONE_TILE: constexpr,
) -> None:
    """Compute the gradients of a tile, as queries and as keys.

    No other program writes to them, so sums need no atomic additions, and a tile that is the whole
    text computes its weights only once.
    """
    first, start, end = _own_tile(bounds, n_texts, TILE, ONE_TILE)
    if first >= end:
        return
    sums = log_sums + tl.program_id(1) * n_tokens
    tokens, at, inside = _rows(first, end, SIZE, TILE)
    q, g, log_sum, mean = _query_side(query, gradient, result, sums, tokens, at, inside)
    k, v = _load(key, at, inside), _load(value, at, inside)
    weights, by_scores = _gradient_parts(q, g, log_sum, mean, k, v, inside, scale)
    by_q = tl.dot(by_scores, k)
    by_k = tl.dot(tl.trans(by_scores), q)
    by_v = tl.dot(tl.trans(weights), g)
    if not ONE_TILE:
        for other in range(start, end - TILE, TILE):  # as queries, without the own tile
            tile = tl.where(other < first, other, other + TILE)
            _, there, known = _rows(tile, end, SIZE, TILE)
            k2, v2 = _load(key, there, known), _load(value, there, known)
            _, by_scores = _gradient_parts(q, g, log_sum, mean, k2, v2, known, scale)
            by_q = tl.dot(by_scores, k2, by_q)
    tl.store(by_query + at, (by_q * scale).to(q.dtype), mask=inside[:, None])
    if not ONE_TILE:
        for other in range(start, end - TILE, TILE):  # as keys
            tile = tl.where(other < first, other, other + TILE)
            tokens, there, known = _rows(tile, end, SIZE, TILE)
            q, g, log_sum, mean = _query_side(query, gradient, result, sums, tokens, there, known)
            weights, by_scores = _gradient_parts(q, g, log_sum, mean, k, v, inside, scale)
            by_k = tl.dot(tl.trans(by_scores), q, by_k)
            by_v = tl.dot(tl.trans(weights), g, by_v)
    tl.store(by_key + at, (by_k * scale).to(k.dtype), mask=inside[:, None])
    tl.store(by_value + at, by_v.to(v.dtype), mask=inside[:, None])
