"""AdamW for the classifiers of a one-vs-all model, applied to a chunk of labels at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elias.kernels.dense_update import adamw_dense

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from elias.kernels.every_label import LabelUpdate
    from elias.kernels.update import AdamWRates
    from elias.model.elias import LinearRows


class LabelMoments:
    """W_L and its biases with their moments, held as W_L is.

    Beside a W_L in float32 both moments are whole. Beside one in bfloat16 the first is bfloat16
    too, and each label has one second moment: 4 bytes for a weight in all, instead of 12.
    """

    def __init__(self, labels: LinearRows, weight: AdamWRates, bias: AdamWRates) -> None:
        compact = labels.weight.dtype == torch.bfloat16
        self._parts = [
            _Part(labels.weight.detach(), weight, one_variance=compact),
            _Part(labels.bias.detach().unsqueeze(1), bias),
        ]

    def update(self, step: int, scale: float) -> LabelUpdate:
        """Return what applies the gradients of step ``step`` (from 1), rates times ``scale``."""

        def apply(first: int, weight_gradient: Tensor, bias_gradient: Tensor) -> None:
            gradients = (weight_gradient, bias_gradient.unsqueeze(1))
            for part, gradient in zip(self._parts, gradients, strict=True):
                part.apply(first, gradient, step, scale)

        return apply

    def state(self) -> dict[str, Tensor]:
        """Return the moments, by name."""
        return {
            f"{i}.{name}": moment
            for i, part in enumerate(self._parts)
            for name, moment in (("mean", part.mean), ("variance", part.variance))
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for i, part in enumerate(self._parts):
            part.mean.copy_(state[f"{i}.mean"])
            part.variance.copy_(state[f"{i}.variance"])


class _Part:
    """One table and its moments."""

    def __init__(self, table: Tensor, rates: AdamWRates, *, one_variance: bool = False) -> None:
        self.table = table
        self.rates = rates
        self.mean = torch.zeros_like(table)
        width = 1 if one_variance else table.shape[1]
        self.variance = torch.zeros(len(table), width, device=table.device)

    def apply(self, first: int, gradient: Tensor, step: int, scale: float) -> None:
        """Move the rows from ``first`` on."""
        rows = slice(first, first + len(gradient))
        adamw_dense(
            self.table[rows],
            self.mean[rows],
            self.variance[rows],
            gradient,
            step=step,
            rates=self.rates._replace(lr=self.rates.lr * scale),
        )
