"""The mean of the weights over the last part of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elias.training.checkpoint import prefixed, under

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from elias.model.elias import EliasModel


class WeightAverage:
    """The running mean of a model's weights, A excepted (SWA)."""

    def __init__(self, model: EliasModel) -> None:
        self._model = model
        self._mean: dict[str, Tensor] = {}
        self._count = 0

    @property
    def started(self) -> bool:
        """Say whether anything has been averaged."""
        return self._count > 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the mean."""
        self._count += 1
        for name, parameter in self._model.named_parameters():
            if name.startswith("graph."):
                continue
            if name not in self._mean:
                self._mean[name] = parameter.detach().to(torch.float32, copy=True)
            else:
                self._mean[name].lerp_(parameter.detach().float(), 1 / self._count)

    def state(self) -> dict[str, Tensor]:
        """Return the mean and what it is of, by name; the tensors themselves."""
        return {"count": torch.tensor(self._count), **prefixed("mean.", self._mean)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._count = int(state["count"])
        devices = {name: parameter.device for name, parameter in self._model.named_parameters()}
        self._mean = {name: mean.to(devices[name]) for name, mean in under("mean.", state).items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with the mean; a second call undoes the first."""
        for name, parameter in self._model.named_parameters():
            if name in self._mean:
                held = parameter.detach().to(torch.float32, copy=True)
                parameter.copy_(self._mean[name])
                self._mean[name] = held
