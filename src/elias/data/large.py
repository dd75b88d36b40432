"""Corpora too large for memory: read to disk once, and found there again while unchanged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, TypeAlias

from elias.data.formats import folder as npz_folder
from elias.data.formats.recognise import recognise
from elias.data.formats.sources import is_gzip
from elias.data.formats.spooling import (
    store_folder,
    store_lf,
    store_pecos,
    store_xmc,
    store_xmc_folder,
)
from elias.data.formats.streaming import store_tables
from elias.data.staging import cache_root, forget_oldest, in_use, staged_folder
from elias.data.storing import open_corpus
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elias.data.formats.options import Reading, ReadOptions

log = logging.getLogger(__name__)

OnDisk: TypeAlias = Literal["auto", "on", "off"]
LARGE = 1 << 30
"""Bytes of the files, gzipped ones counted four times, from which ``auto`` leaves them on disk. In
memory, a table takes about five times the size of its file while it is read."""
_GZIPPED = 4
_CACHE_LIMIT = 100 * 2**30  # bytes of corpora kept before the oldest goes
_FORMAT = 1


def belongs_on_disk(path: Path, on_disk: OnDisk) -> bool:
    """Say whether a corpus is to be left on disk."""
    if on_disk != "auto":
        return on_disk == "on"
    return sum(size * (_GZIPPED if packed else 1) for size, packed in _sizes(path)) > LARGE


def read_to_disk(path: Path, options: ReadOptions) -> Reading:
    """Read a corpus into the cache folder, or find it there.

    It is found again as long as its files have the same names, sizes and times.

    Raises:
        DataError: If it cannot be read, or there is no room for it.
    """
    kept = cache_root() / "corpora" / _key(path, options)
    with suppress(DataError):
        found = open_corpus(kept, path)
        in_use(kept)
        os.utime(kept)
        log.info("%s: found on disk, as it was read before", path)
        return found
    try:
        with staged_folder(kept, overwrite=True) as staging:
            _store(path, options, staging)
        in_use(kept)
        forget_oldest(kept.parent, _CACHE_LIMIT)
    except OSError as error:
        raise DataError(
            f"{kept.parent}: the corpus cannot be kept there ({error.strerror}); free some, or "
            "set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return open_corpus(kept, path)


def _store(path: Path, options: ReadOptions, folder: Path) -> None:
    """Write a corpus in whichever format into an empty folder."""
    kind, files = recognise(path)
    if files is None and kind == "npz":
        spelling = npz_folder.spelling_of(path)
        assert spelling is not None
        options.refuse(path, spelling.name)
        store_folder(path, spelling, folder)
    elif files is None:
        (store_lf if kind == "lf" else store_xmc_folder)(path, options, folder)
    elif kind == "xmc":
        store_xmc(files.by_split, options, files.source, folder)
    elif kind == "pecos":
        store_pecos(files.by_split, options, files.source, folder)
    else:
        store_tables(files, options, folder)


def _files(path: Path) -> Iterator[Path]:
    """Yield the file, or the files of a folder and of the folders in it."""
    if path.is_dir():
        for pattern in ("*", "*/*"):
            yield from sorted(file for file in path.glob(pattern) if file.is_file())
    elif path.is_file():
        yield path


def _sizes(path: Path) -> Iterator[tuple[int, bool]]:
    for file in _files(path):
        size = file.stat().st_size
        yield size, size > LARGE // _GZIPPED and is_gzip(file)


def _key(path: Path, options: ReadOptions) -> str:
    """Return a name for the files as they are now, and for how they are read."""
    stats = [(str(file.resolve()), file.stat()) for file in _files(path)]
    told = [
        _FORMAT,
        str(path.resolve()),
        asdict(options),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:40]
