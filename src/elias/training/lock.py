"""One run in a folder at a time: a lock that goes with the process that holds it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from elias.errors import RunError

if sys.platform != "win32":  # runs are not locked there
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is there for this process alone.

    The lock is the system's (``flock``): it ends with the process, however that ends.

    Raises:
        RunError: If another process, or another run of this one, holds it.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / LOCK_FILE
    handle = _taken(path)
    try:
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: who waits for this file finds another (see _taken)
        os.close(handle)


def refuse_if_locked(folder: Path) -> None:
    """Refuse a folder that a run is at work in."""
    path = folder / LOCK_FILE
    if sys.platform == "win32" or not path.exists():
        return
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDWR)
        try:
            _lock(handle, path)
        finally:
            os.close(handle)


def _taken(path: Path) -> int:
    """Return the handle of the lock file at ``path``, held."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            with suppress(FileNotFoundError):
                if _is_at(handle, path):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed by the one who held it


def _lock(handle: int, path: Path) -> None:
    assert sys.platform != "win32"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        raise RunError(
            f"{path.parent}: a run is at work here (process {holder}); wait for it, stop it, or "
            "use another --out"
        ) from None


def _is_at(handle: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(handle), path.stat())
