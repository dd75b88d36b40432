"""Commands that `torchrun` starts several times, to do one thing together."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from elias.cli import talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elias.distributed import World


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
        talk.hush()
    with joined(device) as world:
        yield world
