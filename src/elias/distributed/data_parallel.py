"""Split batches over processes, sum gradients, and gather results.

Standard dropout draws its mask from a random generator, so the mask of a point depends on the
earlier points in its process. The mask of `KeyedDropout` does not depend on the number of
processes: it is a hash of the seed, the step, the point, the index of the dropout call in the
encoder, and the position in the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from elias.distributed.sharded_linear import ShardedRows
from elias.distributed.world import World
from elias.model.batch_inference import BATCH_SIZE, evaluating
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import TextEncoder
from elias.predictions import PADDING_SCORE, Candidates
from elias.progress import progress
from elias.text.batches import Batch, TokenBatch, collate
from elias.text.tokens import Tokens

_FLATTENED = 2**22  # elements; a larger gradient is summed separately, without a copy
_PURPOSE = "gradients of shared parameters"
_MASK_32_BITS = 0xFFFFFFFF
# One odd factor for each axis, so that all positions along an axis get different numbers. The
# factors must not depend on the shape of the tensor, because padding must not change the mask.
_STRIDES = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
_WINDOW_STRIDE = 0x165667B1  # difference between the keys of consecutive windows of a text


@torch.no_grad()
def sum_gradients(world: World, parameters: Iterable[Tensor]) -> None:
    """Replace the dense gradient of each parameter by its sum over all processes.

    A process without points must have zero gradients. A parameter must have a gradient in all
    processes or in none.
    """
    small: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.numel() > _FLATTENED:
            sum_touched(world, parameter.grad)
        else:
            small.append(parameter.grad)
    if small:
        flat = torch.cat([gradient.reshape(-1) for gradient in small])
        sizes = [gradient.numel() for gradient in small]
        parts = torch.split(world.all_reduce(flat, _PURPOSE), sizes)
        for gradient, part in zip(small, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def sum_touched(world: World, gradient: Tensor, touched: Tensor | None = None) -> None:
    """Sum a gradient with many zero rows over processes, in place.

    For example, a batch of B points with beam size b touches the edges of at most B·b clusters. If
    at most half of the rows of a large gradient are touched, only these rows are sent. ``touched``
    is 1 for each row that may be nonzero, and is also summed in place.
    """
    if gradient.dim() < 2 or gradient.numel() <= _FLATTENED:
        world.all_reduce(gradient, _PURPOSE)
        if touched is not None:
            world.all_reduce(touched, _PURPOSE)
        return
    if touched is None:
        touched = (gradient != 0).flatten(1).any(dim=1).to(torch.int32)
    rows = world.all_reduce(touched, _PURPOSE).nonzero()[:, 0]
    if 2 * len(rows) > len(gradient):
        world.all_reduce(gradient, _PURPOSE)
    else:
        gradient[rows] = world.all_reduce(gradient[rows], _PURPOSE)


@torch.no_grad()
def sum_rows(world: World, table: Tensor) -> None:
    """Sum a table's sparse gradient over all processes. A missing gradient counts as zero."""
    gradient = table.grad
    if gradient is None:
        indices = torch.zeros(1, 0, dtype=torch.int64)
        values = table.new_zeros(0, *table.shape[1:])
        gradient = torch.sparse_coo_tensor(indices, values, table.shape)
    gradient = gradient.coalesce()
    n_rows = gradient._nnz()
    longest = int(world.all_gather(torch.tensor([n_rows], device=table.device)).max())
    ids = torch.full((longest,), len(table), dtype=torch.int64, device=table.device)
    ids[:n_rows] = gradient.indices()[0]
    values = gradient.values().new_zeros(longest, *gradient.values().shape[1:])
    values[:n_rows] = gradient.values()
    all_ids = world.all_gather(ids, "gradients of rows")
    all_values = world.all_gather(values, "gradients of rows")
    is_row = all_ids < len(table)
    table.grad = torch.sparse_coo_tensor(
        all_ids[is_row].unsqueeze(0), all_values[is_row], table.shape, check_invariants=False
    ).coalesce()


@dataclass(frozen=True, slots=True)
class ShardedBatch(Batch):
    """This process's share of a training batch."""

    tokens: TokenBatch
    n_points: int
    """Number of points in the whole batch."""
    keys: Tensor
    """Dropout key of each point in this share (`KeyedDropout`)."""


def shard_batch(
    world: World,
    rows: NDArray[np.int64],
    seed: Sequence[int],
    collate: Callable[[NDArray[np.int64]], TokenBatch],
) -> ShardedBatch:
    """Return this process's share of the batch with the given row indices.

    ``collate`` gathers the tokens of rows into a batch.
    """
    share = rows[world.share(len(rows))]
    return ShardedBatch(collate(share), len(rows), point_keys(seed, share))


def rank_sharded(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
) -> Candidates:
    """Rank the labels of this process's texts, like `rank_all`, for a model with a sharded W_L.

    All processes must call this, each with its own texts. The number of texts may differ between
    processes, and may be zero. In each step, a process searches a batch of its own texts, and
    scores its own labels for the batches of all processes.
    """
    rows = model.labels
    assert isinstance(rows, ShardedRows)
    world, device = rows.world, rows.weight.device
    width = min(top_k, sizes.shortlist_size, model.n_labels)
    ids = np.full((len(tokens), width), model.n_labels, dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    longest = world.max_async([len(tokens)])()[0]
    order = np.argsort(tokens.lengths, kind="stable")  # sorting by length minimises padding
    with evaluating(model), progress("Searching", -(-longest // batch_size)) as advance:
        for start in range(0, longest, batch_size):
            batch = order[start : start + batch_size]
            rows.n_points = min(batch_size, longest - start) * world.size
            embedding = model.encoder(collate(tokens, batch).to(device)).float()
            labels, p = model.rank(embedding, sizes, width, blocked)
            ids[batch, : labels.shape[1]] = labels.cpu().numpy()
            scores[batch, : labels.shape[1]] = p.cpu().numpy()
            advance()
    scores[ids >= model.n_labels] = PADDING_SCORE
    return Candidates(ids, scores)


def all_gather_rows(world: World, rows: NDArray[Any], n_rows: int, padding: float) -> NDArray[Any]:
    """Return the rows of all processes, in rank order, on every process.

    ``n_rows`` is the total number of rows. If the processes have different numbers of
    columns, missing columns are filled with ``padding``.
    """
    width = world.max_async([rows.shape[1]])()[0]
    padded = np.full((world.max_share(n_rows), width), padding, dtype=rows.dtype)
    padded[: len(rows), : rows.shape[1]] = rows
    gathered = world.all_gather(torch.from_numpy(padded).to(world.device), "predictions")
    return gathered.cpu().numpy()[:n_rows]


def point_keys(seed: Sequence[int], rows: NDArray[np.int64]) -> Tensor:
    """Return a key below 2^32 for each point, a hash of ``seed`` and the row index of the point.

    ``seed`` contains the random seed, the stage and the step.

    >>> one, other = (point_keys([0, 1], np.array(rows)) for rows in ([3, 4], [4, 3]))
    >>> bool((one == other.flip(0)).all())
    True
    """
    state = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)
    mixed = rows.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) + state
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.int64))


class KeyedDropout(TorchFunctionMode):
    """Context manager for dropout whose masks depend only on the keys of the points.

    The rows of a dropout input must be the points of the batch or, while the encoder reads long
    texts, its `current_windows`. An input with a single axis must hold the tokens of the batch; the
    second axis of an input holds tokens while the encoder has `current_tokens`. Attention with
    dropout is computed without a fused kernel.

    torch.compile traces this mode as part of the code that it compiles. All numbers that change
    from call to call are therefore tensors; it would compile again for each value of an integer.
    """

    def __init__(self, keys: Tensor, batch: TokenBatch, encoder: TextEncoder) -> None:
        super().__init__()
        self._keys = keys
        self._batch = batch
        self._encoder = encoder
        self._windows: tuple[Tensor, Tensor] | None = None
        self._calls = keys.new_zeros(())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or its keyed replacement if ``func`` applies dropout."""
        del types
        options = dict(kwargs or {})
        if func is torch.nn.functional.dropout:
            return self._dropout(*args, **options)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **options)
        return func(*args, **options)

    def _dropout(
        self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        del inplace
        if not training or p == 0 or len(self._keys) == 0:
            return values
        keys, windows = self._keys, self._encoder.current_windows
        if windows is not None:
            if windows is not self._windows:  # the mask must not depend on earlier windows
                self._windows, self._calls = windows, torch.zeros_like(self._calls)
            keys = keys[windows[0]] + windows[1] * _WINDOW_STRIDE
        self._calls = self._calls + 1
        numbers = _hash(keys + self._calls)
        tokens = self._tokens() if values.dim() == 1 else self._encoder.current_tokens
        n_done = 1
        if tokens is not None:
            text, position = tokens
            numbers, n_done = numbers[text] + position * _STRIDES[0], 2
        axes = zip(values.shape[n_done:], _STRIDES[n_done - 1 :], strict=False)
        for length, stride in axes:
            position = torch.arange(length, device=values.device) * stride
            numbers = numbers.unsqueeze(-1) + position
        is_kept = _hash(numbers) >= round(p * 2**32)
        return values * is_kept * (1 / (1 - p))

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Return the index of each token's text, and the position of each token in its text."""
        batch, n_tokens = self._batch, len(self._batch.ids)
        text = torch.arange(len(batch), device=batch.ids.device)
        text = text.repeat_interleave(batch.lengths(), output_size=n_tokens)
        return text, torch.arange(n_tokens, device=text.device) - batch.offsets[text]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if dropout_p == 0 or is_causal or options:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
        scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(dim=-1), dropout_p) @ value


def _hash(numbers: Tensor) -> Tensor:
    """Hash the low 32 bits of each integer to a pseudo-random integer below 2^32."""
    mixed = numbers & _MASK_32_BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK_32_BITS
    return mixed ^ (mixed >> 16)
