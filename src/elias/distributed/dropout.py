"""Dropout masks that depend on the point and the step, but not on the number of processes.

Standard dropout draws its mask from a random generator, so the mask of a point depends on the
earlier points in its process. Here the mask is a hash of the seed, the step, the point, the number
of the dropout call in the encoder, and the position in the tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.text.batches import TokenBatch


_MASK_32_BITS = 0xFFFFFFFF
# One odd factor for each axis, so that all positions along an axis get different numbers. The
# factors must not depend on the shape of the tensor, because padding must not change the mask.
_STRIDES = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


def point_keys(seed: Sequence[int], rows: NDArray[np.int64]) -> Tensor:
    """Hash ``seed`` (random seed, stage, step) and each point's row to a key below 2^32.

    >>> one, other = (point_keys([0, 1], np.array(rows)) for rows in ([3, 4], [4, 3]))
    >>> bool((one == other.flip(0)).all())
    True
    """
    state = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)
    mixed = rows.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) + state
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.int64))


class KeyedDropout(TorchFunctionMode):
    """Replace every dropout inside the block by one whose mask depends on the keys of the points.

    The first axis of a dropout input must be the points of the batch. If the input has only one
    axis, that axis must be the tokens of the batch. Attention with dropout is computed without a
    fused kernel.
    """

    def __init__(self, keys: Tensor, batch: TokenBatch) -> None:
        super().__init__()
        self._keys = keys
        self._batch = batch
        self._calls = 0

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
        self._calls += 1
        if values.dim() == 1:
            lengths, n_tokens = self._batch.lengths(), len(values)
            keys = self._keys.repeat_interleave(lengths, output_size=n_tokens)
            starts = self._batch.offsets[:-1].repeat_interleave(lengths, output_size=n_tokens)
            position = torch.arange(n_tokens, device=values.device) - starts
            numbers = _hash(_hash(keys + self._calls) + position * _STRIDES[0])
        else:
            numbers = _hash(self._keys + self._calls)
            for length, stride in zip(values.shape[1:], _STRIDES, strict=False):
                position = torch.arange(length, device=values.device) * stride
                numbers = numbers.unsqueeze(-1) + position
            numbers = _hash(numbers)
        is_kept = numbers >= round(p * 2**32)
        return values * is_kept * (1 / (1 - p))

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
