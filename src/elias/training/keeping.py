"""Keeping a run while it trains: a checkpoint when one is due, and a last one when it must stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elias.errors import Interrupted
from elias.training.checkpoints import Checkpoint, Checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from elias.training.interruption import Interruption


@dataclass
class Keeper:
    """Writes the checkpoints of a member's training."""

    checkpoints: Checkpoints
    interruption: Interruption
    about: Callable[[], Mapping[str, Any]]
    """Returns what the run adds to each: which member it is of, what was recorded so far."""

    def after_step(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint if one is due; after a signal write one in any case, and stop."""
        stop = self.interruption.signal
        if stop is not None:
            self._stop(where, self._save(make(), wait=True), stop)
        if self.checkpoints.due():
            self._save(make(), wait=False)

    def after_stage(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint; stop after a signal."""
        stop = self.interruption.signal
        kept = self._save(make(), wait=stop is not None)
        if stop is not None:
            self._stop(where, kept, stop)

    def _save(self, checkpoint: Checkpoint, *, wait: bool) -> bool:
        if not self.checkpoints.enabled:
            return False
        copies = {name: _copied(tensor) for name, tensor in checkpoint.tensors.items()}
        facts = {**checkpoint.facts, **self.about()}
        return self.checkpoints.save(Checkpoint(facts, copies), wait=wait)

    def _stop(self, where: str, kept: bool, number: int) -> None:
        left = f"stopped after {where}"
        if not kept:
            left += ", of which no checkpoint could be written"
        raise Interrupted(left, signal_number=number)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's random numbers, on the host and on a GPU that is used."""
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers that `random_state` saw; a GPU's only on a GPU."""
    torch.set_rng_state(state["random.cpu"])
    if device.type == "cuda" and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"], device)
