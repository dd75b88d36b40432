"""Attention within short packed texts as Triton kernels.

Texts follow each other in one row of tokens. A program computes one head of one text, whose
queries, keys and values fit into one tile. Kernels for long texts divide them into tiles of 64 or
128 tokens, most of which would be empty here. The backward pass computes the attention weights
again, so only the inputs are stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels import plain

MAX_TOKENS = 64
"""Maximum number of tokens of a text, so that one tile holds it. Longer texts use torch's kernels,
which divide them into tiles."""
_MIN_TILE = 16  # minimum size of the operands of a matrix product
_MAX_SIZE = 128  # of a head; larger ones may not fit into shared memory


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Return the attention of each token over the tokens of its own text (N, H, d)."""
    size = query.shape[2]
    fits = longest <= MAX_TOKENS and _MIN_TILE <= size <= _MAX_SIZE and size & (size - 1) == 0
    attend = short_attention if fits else plain.packed_attention
    return attend(query, key, value, bounds, longest)


@torch.library.custom_op("elias::short_attention", mutates_args=())
def short_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Return softmax(QKᵀ/√d)·V of each text and head (N, H, d).

    Args:
        query: (N, H, d) queries of all texts, one after the other.
        key: (N, H, d) keys.
        value: (N, H, d) values.
        bounds: (texts + 1,) first token of each text, and the number of tokens N.
        longest: Maximum number of tokens of a text.
    """
    query, key, value = (part.contiguous() for part in (query, key, value))
    result = _like(query)
    _launch(_attention_forward, query, key, value, bounds, longest, result)
    return result


@torch.library.custom_op("elias::short_attention_gradients", mutates_args=())
def short_attention_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given that of the result."""
    query, key, value, gradient = (part.contiguous() for part in (query, key, value, gradient))
    results = _like(query), _like(key), _like(value)
    _launch(_attention_backward, query, key, value, bounds, longest, gradient, *results)
    return results


def _like(part: Tensor) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


# the shapes of the results, for torch.compile
short_attention.register_fake(lambda query, *_: _like(query))
short_attention_gradients.register_fake(lambda _, *inputs: tuple(map(_like, inputs[:3])))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bounds = ctx.saved_tensors
    inputs = query, key, value, bounds, ctx.longest
    return *short_attention_gradients(gradient, *inputs), None, None


short_attention.register_autograd(_gradients, setup_context=_remember)


def _launch(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *others: Tensor,
) -> None:
    """Run a kernel for each text and head."""
    _, n_heads, size = query.shape
    tile = max(_MIN_TILE, triton.next_power_of_2(longest))
    kernel[(len(bounds) - 1, n_heads)](
        query,
        key,
        value,
        bounds,
        *others,
        n_heads * size,
        size**-0.5,
        SIZE=size,
        TILE=tile,
        num_warps=max(1, tile * size // 1024),
    )


@triton.jit
def _weights(q: tensor, k: tensor, n_tokens: tensor, scale: tensor, TILE: constexpr) -> tensor:
    """Return the attention weights (TILE, TILE) of the tokens of a text."""
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where(tl.arange(0, TILE)[None, :] < n_tokens, scores, -1e30)
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _positions(
    bounds: tensor, stride: tensor, SIZE: constexpr, TILE: constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the offsets of a program's tile, which of its rows are tokens, and their number."""
    start = tl.load(bounds + tl.program_id(0)).to(tl.int64)
    n_tokens = tl.load(bounds + tl.program_id(0) + 1) - start
    rows, columns = tl.arange(0, TILE), tl.arange(0, SIZE)
    first = start * stride + tl.program_id(1) * SIZE
    return first + rows[:, None] * stride + columns[None, :], rows[:, None] < n_tokens, n_tokens


@triton.jit
def _load(vectors: tensor, at: tensor, inside: tensor) -> tensor:
    """Return the rows of a tile. Rows that are not tokens of the text are 0."""
    return tl.load(vectors + at, mask=inside, other=0.0)


@triton.jit
def _attention_forward(
    query: tensor,
    key: tensor,
    value: tensor,
    bounds: tensor,
    result: tensor,
    stride: tensor,
    scale: tensor,
    SIZE: constexpr,
    TILE: constexpr,
) -> None:
    at, inside, n_tokens = _positions(bounds, stride, SIZE, TILE)
    q, k, v = _load(query, at, inside), _load(key, at, inside), _load(value, at, inside)
    weights = _weights(q, k, n_tokens, scale, TILE)
    tl.store(result + at, tl.dot(weights.to(v.dtype), v).to(v.dtype), mask=inside)


@triton.jit
def _attention_backward(
    query: tensor,
    key: tensor,
    value: tensor,
    bounds: tensor,
    gradient: tensor,
    by_query: tensor,
    by_key: tensor,
    by_value: tensor,
    stride: tensor,
    scale: tensor,
    SIZE: constexpr,
    TILE: constexpr,
) -> None:
    at, inside, n_tokens = _positions(bounds, stride, SIZE, TILE)
    q, k, v = _load(query, at, inside), _load(key, at, inside), _load(value, at, inside)
    g = _load(gradient, at, inside)
    weights = _weights(q, k, n_tokens, scale, TILE)
    # rows outside of the text have zeros in g, so they add nothing
    tl.store(by_value + at, tl.dot(tl.trans(weights.to(g.dtype)), g).to(v.dtype), mask=inside)
    by_weights = tl.dot(g, tl.trans(v))
    mean = tl.sum(weights * by_weights, axis=1)[:, None]
    by_scores = (weights * (by_weights - mean) * scale).to(q.dtype)
    tl.store(by_query + at, tl.dot(by_scores, k).to(q.dtype), mask=inside)
    tl.store(by_key + at, tl.dot(tl.trans(by_scores), q).to(k.dtype), mask=inside)
