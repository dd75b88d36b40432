"""Keeping a run while it trains: a checkpoint when one is due, and a last one when it must stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elias.errors import Interrupted
from elias.training.checkpoints import Attempt, Checkpoint, Checkpoints
from elias.training.shards import is_row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from elias.distributed import World
    from elias.training.interruption import Interruption


@dataclass
class Keeper:
    """Writes the checkpoints of a member's training."""

    checkpoints: Checkpoints
    interruption: Interruption
    about: Callable[[], Mapping[str, Any]]
    """Returns what the run adds to each: which member it is of, what was recorded so far."""
    world: World | None = None
    """The processes that stop together and each write a part; None: this one alone."""
    _asked: Callable[[], list[int]] | None = field(default=None, init=False)

    def after_step(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint if one is due; after a signal write one in any case, and stop.

        Several processes do so a step later, when each has heard what the others want: so none
        waits for an answer.
        """
        stop, due = self.interruption.signal, self.checkpoints.due()
        if self.world is not None:
            stop, due = self._agreed(stop, due)
        if stop is not None:
            self._stop(where, self._save(make(), wait=True), stop)
        if due:
            self._save(make(), wait=False)

    def after_stage(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint; stop after a signal."""
        stop = self.interruption.signal
        if self.world is not None:
            self._agreed(stop, False)  # as of a step ago
            stop, _ = self._agreed(stop, False)
            self._agreed(None, False)
            self._asked = None
        kept = self._save(make(), wait=stop is not None)
        if stop is not None:
            self._stop(where, kept, stop)

    def _agreed(self, stop: int | None, due: bool) -> tuple[int | None, bool]:
        """Say what this process wants; return what any of them wanted a step ago."""
        assert self.world is not None
        due = due and self.world.is_first
        asked, self._asked = self._asked, self.world.begin_highest([stop or 0, int(due)])
        if asked is None:
            return None, False
        signal_number, wanted = asked()
        return signal_number or None, bool(wanted)

    def _save(self, checkpoint: Checkpoint, *, wait: bool) -> bool:
        if not self.checkpoints.enabled:
            return False
        world = self.world
        copies = {
            name: _copied(tensor)
            for name, tensor in checkpoint.tensors.items()
            if world is None or world.is_first or is_row(name)
        }
        kept = Checkpoint({**checkpoint.facts, **self.about()}, copies)
        if world is None:
            return self.checkpoints.save(kept, wait=wait)
        self.checkpoints.join()  # the one before has its name
        attempt = Attempt(*world.tell(self.checkpoints.next_attempt()))
        begun = self.checkpoints.save(kept, attempt=attempt)
        return world.tell(bool(world.first(self.checkpoints.written))) if wait else begun

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
