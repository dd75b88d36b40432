"""Average the weights over the last part of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elias.training.checkpoint import add_prefix, strip_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from elias.model.elias import EliasModel


class WeightAverage:
    """The running mean of a model's weights except A (stochastic weight averaging)."""

    def __init__(self, model: EliasModel) -> None:
        self._model = model
        self._mean: dict[str, Tensor] = {}
        self._count = 0

    @property
    def started(self) -> bool:
        """Return whether `update` was called at least once."""
        return self._count > 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the mean."""
        self._count += 1
        for name, parameter in self._model.named_parameters():
            if name.startswith("graph."):
                continue
            if name not in self._mean:
                self._mean[name] = parameter.detach().to(torch.float32, copy=True)
            else:
                self._mean[name].lerp_(parameter.detach().float(), 1 / self._count)

    def state(self) -> dict[str, Tensor]:
        """Return the mean weights and the number of updates, by name, without copying tensors."""
        return {"count": torch.tensor(self._count), **add_prefix("mean.", self._mean)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state` returned."""
        self._count = int(state["count"])
        means = strip_prefix("mean.", state)
        parameters = self._model.named_parameters()
        self._mean = {name: means[name].to(p.device) for name, p in parameters if name in means}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and the mean; a second call undoes the first."""
        for name, parameter in self._model.named_parameters():
            if name in self._mean:
                current = parameter.detach().to(torch.float32, copy=True)
                parameter.copy_(self._mean[name])
                self._mean[name] = current
