"""Support for commands that ``torchrun`` starts in several processes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import elias
from elias.cli import console
from elias.errors import ConfigError

if TYPE_CHECKING:
    from elias.distributed import World


DISTRIBUTED_COMMANDS = ("evaluate", "predict", "train")
"""Commands that can split their work among several processes."""


def check_single_process(command: str | None) -> None:
    """Raise an error if `torchrun` started several processes of a command that supports only one.

    Raises:
        ConfigError: If there are several processes, and the command cannot divide its work.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    # `elias.distributed.launched_rank` does the same, but its import would load torch for --help.
    launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    if command not in DISTRIBUTED_COMMANDS and launched and size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"elias {command}: cannot be divided among the {size} processes of torchrun; run it "
            f"without torchrun (only {', '.join(DISTRIBUTED_COMMANDS)} support several processes)"
        )


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the process group if `torchrun` started this process.

    Ranks other than 0 print errors only; rank 0 prints the progress.
    """
    from elias.distributed import SingleProcess, joined, launched_rank

    rank = launched_rank()
    if rank is None:
        yield SingleProcess()
        return
    if rank > 0:
        console.show_errors_only()
    with joined(device) as world:
        world.on_failure = console.report_error
        yield world


@contextmanager
def shared_predict(world: World, model: elias.Elias) -> Iterator[Callable[..., elias.Predictions]]:
    """Yield a function for rank 0 that is like `Elias.predict`, but uses all processes.

    Rank 0 reads the texts and broadcasts them. The other ranks must run `follow_predict`.
    """

    def predict(texts: Sequence[str], **options: Any) -> elias.Predictions:
        _broadcast_texts(world, texts)
        return model.predict(texts, **options)

    yield predict
    _broadcast_texts(world, None)


def follow_predict(world: World, model: elias.Elias, options: Mapping[str, Any]) -> None:
    """Predict this rank's share of the texts that rank 0 broadcasts in `shared_predict`."""
    while (texts := _broadcast_texts(world, None)) is not None:
        model.predict(texts, **options)


def _broadcast_texts(world: World, texts: Sequence[str] | None) -> Sequence[str] | None:
    """Wait, without a timeout, until rank 0 has read the next texts, and return them."""
    world.run_on_rank0(lambda: None)
    return world.broadcast(texts)


@contextmanager
def exit_at_once_if_joined() -> Iterator[None]:
    """Skip interpreter shutdown if a process fails while it is in a process group.

    Pending collective operations would abort the shutdown with SIGABRT and hide the exit code.
    """
    try:
        yield
    except BaseException as error:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
