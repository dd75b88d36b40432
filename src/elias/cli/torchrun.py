"""Commands that `torchrun` starts several times, to do one thing together."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from elias.cli import console
from elias.cli.errors import tell_at_once
from elias.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from elias.distributed import World
    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


TOGETHER = ("evaluate", "predict", "train")
"""The commands that several processes share out; any other, each would do whole."""


def refuse_several(command: str | None) -> None:
    """Refuse a command that the processes `torchrun` started would each do, to the same files.

    Raises:
        ConfigError: If there are several, and it is such a command.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    # looked up here as in `elias.distributed.launched_rank`, which would import torch for --help
    if command in TOGETHER or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"elias {command}: each of the {size} processes that torchrun started would do the "
            f"same; run it without torchrun ({', '.join(TOGETHER)} are shared out)"
        )


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the other processes that `torchrun` started, if it started this one.

    All but rank 0 print errors only: rank 0 prints the progress of all.
    """
    from elias.distributed import SingleProcess, joined, launched_rank

    rank = launched_rank()
    if rank is None:
        yield SingleProcess()
        return
    if rank > 0:
        console.hush()
    with joined(device) as world:
        world.on_failure = tell_at_once
        yield world


@contextmanager
def shared_predict(world: World, model: Elias) -> Iterator[Callable[..., Predictions]]:
    """Yield `Elias.predict` for rank 0, which sends each call's texts to the other processes.

    Only rank 0 reads the texts; the others call `follow_predict` meanwhile.
    """

    def predict(texts: Sequence[str], **options: Any) -> Predictions:
        _broadcast_texts(world, texts)
        return model.predict(texts, **options)

    yield predict
    _broadcast_texts(world, None)


def follow_predict(world: World, model: Elias, options: Mapping[str, Any]) -> None:
    """Take part in all predictions that rank 0 makes in `shared_predict`."""
    while (texts := _broadcast_texts(world, None)) is not None:
        model.predict(texts, **options)


def _broadcast_texts(world: World, texts: Sequence[str] | None) -> Sequence[str] | None:
    """Return the texts of rank 0, however long it takes to read them."""
    world.run_on_rank0(lambda: None)
    return world.broadcast(texts)


@contextmanager
def leaving() -> Iterator[None]:
    """End this process at once where it is not parted from the others, which are gone or fail.

    Taken apart, what still waits for them ends a process with SIGABRT, whatever its exit code.
    """
    try:
        yield
    except BaseException as end:
        if not _is_joined():
            raise
        code = end.code if isinstance(end, SystemExit) else 1
        if not isinstance(end, SystemExit):
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _is_joined() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
