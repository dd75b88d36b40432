"""Whether a run fits into the machine, and what to change where it does not."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from elias.distributed import n_launched
from elias.errors import RunError
from elias.pipeline.machine import device_room, host_room, shared
from elias.pipeline.memory import SO_FAR, expected_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from elias.config import EliasConfig
    from elias.pipeline.machine import Room
    from elias.pipeline.memory import Expected, Sizes

logger = logging.getLogger(__name__)

_DEVICE, _HOST = "GPU memory", "memory"
_LARGE_SHARE = 0.15
"""Of the whole; what is less is not worth a remedy."""


class Fit(NamedTuple):
    """What a run needs of one memory, and what there is."""

    where: str
    needed: int
    room: Room
    n_processes: int = 1
    """That take it together: those of this machine share its memory, and each has its own GPU."""

    @property
    def possible(self) -> bool:
        """Say whether it fits at all."""
        return self.needed <= self.room.total

    @property
    def free_now(self) -> bool:
        """Say whether it fits beside what else is in use now."""
        return self.needed <= self.room.free


def fits(expected: Expected, device: torch.device, held: int) -> list[Fit]:
    """Return how the run fits into the host's memory and the GPU's.

    What the processes of the run hold already is not free any more, but its own.
    """
    found = []
    on_host, on_device = host_room(), device_room(device)
    if on_device is not None:
        found.append(Fit(_DEVICE, expected.device_total, on_device))
    if on_host is not None:
        own = on_host._replace(free=on_host.free + held)
        found.append(Fit(_HOST, _on_host(expected), own, n_launched()[1]))
    return found


def _on_host(expected: Expected) -> int:
    """Return what all processes of this machine take; files they have mapped are there once."""
    more = n_launched()[1] - 1
    return expected.host_total + more * max(0, expected.host_total - shared())


def refuse_what_cannot_fit(
    expected: Expected,
    sizes: Sizes,
    config: EliasConfig,
    device: torch.device,
    *,
    resident: int,
    ignore: bool,
) -> None:
    """Refuse a run that needs more memory than there is; warn where others use too much of it.

    Raises:
        RunError: On one line, with what to change; unless it is to be ignored.
    """
    others = (n_launched()[1] - 1) * max(0, resident - shared())
    found = fits(expected, device, resident + others)
    for fit in found:
        needed, total = gib(fit.needed), gib(fit.room.total)
        if fit.possible and fit.free_now:
            continue
        told = remedies(expected, sizes, config, device, found)
        advice = "; ".join(told) or "use a larger machine"
        if fit.possible:
            logger.warning(
                "the run is going to take about %s of %s, of which %s is free now",
                needed,
                fit.where,
                gib(fit.room.free),
            )
        elif ignore:
            logger.warning("the run needs %s of %s, and there is %s", needed, fit.where, total)
        else:
            raise RunError(
                f"the run needs about {needed} of {fit.where}, and there is {total}; {advice}; "
                "or pass --ignore-memory to try it all the same"
            )


def remedies(
    expected: Expected,
    sizes: Sizes,
    config: EliasConfig,
    device: torch.device,
    found_room: Sequence[Fit] = (),
) -> list[str]:
    """Return what to change, what helps most first; a batch is to fit into ``found_room``."""
    parts = dict(expected.device or expected.host)
    total = sum(parts.values())
    large = {name for name, size in parts.items() if size > _LARGE_SHARE * total}
    found = []
    batch = max(stage.batch_size for stage in config.stages)
    if sizes.most_labels > 10 * max(1, sizes.n_entries // max(1, sizes.n_points)) + 1000:
        found.append(
            f"drop or split the point with {sizes.most_labels:,} labels, which its batches are "
            "padded to"
        )
    if large & {"label weights", "optimizer", "best epoch", "checkpoint on its way", "setting up"}:
        found += _narrower(sizes, config, device)
    if "activations of the encoder" in large and sizes.layers:
        if not config.encoder.gradient_checkpointing:
            found.append("set encoder.gradient_checkpointing=true")
        if config.encoder.precision == "float32":
            found.append("set encoder.precision=bfloat16")
    if large & {"activations of the encoder", "activations of the index"} and batch > 1:
        smaller = _batch_that_fits(expected, sizes, config, device, found_room)
        found.append(f"lower stages.*.batch_size from {batch} to {smaller}")
    if large & {SO_FAR, "setting up"} and config.data.on_disk != "on":
        found.append("set data.on_disk=on and data.setup_points")
    return found


def _batch_that_fits(
    expected: Expected,
    sizes: Sizes,
    config: EliasConfig,
    device: torch.device,
    found: Sequence[Fit],
) -> int:
    """Return the largest batch, by halves, with which the run fits; half if none is enough."""
    rooms = {fit.where: min(fit.room) for fit in found}
    largest = max(stage.batch_size for stage in config.stages)
    half = batch = max(1, min(largest, sizes.n_points) // 2)
    while rooms and batch >= 1:
        stages = tuple(replace(s, batch_size=min(s.batch_size, batch)) for s in config.stages)
        smaller = expected_memory(
            sizes,
            replace(config, stages=stages),
            device,
            resident=expected.host.get(SO_FAR, 0),
            keeps_checkpoints=expected.host.get("checkpoint on its way", 0) > 0,
            validates=expected.host.get("best epoch", 0) > 0,
        )
        needed = {_DEVICE: smaller.device_total, _HOST: _on_host(smaller)}
        if all(needed[where] <= room for where, room in rooms.items()):
            return batch
        batch //= 2
    return half


def _narrower(sizes: Sizes, config: EliasConfig, device: torch.device) -> list[str]:
    found = []
    key = "encoder.bottleneck" if sizes.layers else "encoder.dim"
    if sizes.dim > 64:
        found.append(f"set {key}={sizes.dim // 2}")
    compact = config.index.label_storage == "compact"
    if not compact and (device.type == "cuda" or config.index.kind == "all"):
        found.append("set index.label_storage=compact (bfloat16)")
    found.append("share the labels among more processes (torchrun)")
    return found


def gib(n_bytes: int) -> str:
    """Return bytes for people.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 100 << 20 else f"{n_bytes / 2**20:.0f} MiB"
