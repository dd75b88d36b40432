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
    from collections.abc import Iterator

    from elias.distributed import World


TOGETHER = ("evaluate", "predict", "train")
"""The commands that several processes share out; any other, each would do whole."""


def refuse_several(command: str | None) -> None:
    """Refuse a command that the processes `torchrun` started would each do, to the same files.

    Raises:
        ConfigError: If there are several, and it is such a command.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    # looked up here as in `elias.distributed.launched`, which would import torch for --help
    if command in TOGETHER or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"elias {command}: each of the {size} processes that torchrun started would do the "
            f"same; run it without torchrun ({', '.join(TOGETHER)} are shared out)"
        )


@contextmanager
def several(device: str) -> Iterator[World | None]:
    """Meet the other processes that `torchrun` started; None where it did not start this one.

    All but the first tell errors alone: what they do, the first one tells.
    """
    from elias.distributed import joined, launched

    rank = launched()
    if rank is None:
        yield None
        return
    if rank > 0:
        console.hush()
    with joined(device) as world:
        world.last_words = tell_at_once
        yield world


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
