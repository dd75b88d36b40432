"""Writing a folder whole or not at all, and label matrices larger than memory.

A folder is filled under a hidden name beside its target and renamed when it is complete and on
disk, so that an interrupted build never looks like a corpus or a model.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


_COPY_ITEMS = 1 << 20
_HEADER_BYTES = 128
_INT32_MAX = np.iinfo(np.int32).max
_ABANDONED = 24 * 3600
"""Seconds after which a folder that is not finished is taken for one of a process that died."""
_used: set[Path] = set()


def cache_root() -> Path:
    """Return where what can be made again is kept: the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "elias"


def mark_in_use(entry: Path) -> None:
    """Note that this process reads an entry of a cache: it may be mapped as long as it runs."""
    _used.add(entry.resolve())


def evict_oldest(root: Path, limit: int) -> None:
    """Drop the entries of a cache used longest ago until it is within so many bytes.

    The newest one stays, however large it is, and so do those that this process uses and those that
    another process may be writing. What another process removes meanwhile is passed over.
    """
    found = []
    for entry in root.iterdir():
        with suppress(FileNotFoundError):
            found.append((entry.stat().st_mtime, entry))
    total = 0
    for number, (_, entry) in enumerate(sorted(found, reverse=True)):
        size, changed = _extent(entry)
        total += size
        at_work = entry.name.startswith(".") and changed > time.time() - _ABANDONED
        if total > limit and number > 0 and not at_work and entry.resolve() not in _used:
            shutil.rmtree(entry, ignore_errors=True)


def _extent(entry: Path) -> tuple[int, float]:
    """Return the bytes of a folder's files, and when it or one of them was last changed."""
    size, changed = 0, 0.0
    with suppress(FileNotFoundError):
        changed = entry.stat().st_mtime
        for file in entry.rglob("*"):
            with suppress(FileNotFoundError):
                told = file.stat()
                size += told.st_size if file.is_file() else 0
                changed = max(changed, told.st_mtime)
    return size, changed


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends without an error.

    Args:
        target: A path that does not exist yet, or an empty folder.
        overwrite: Take the place of a folder that is there, which stays until the new one is
            whole. Whether it may go is the caller's to know.

    Raises:
        DataError: If something else is already there; it is left as it was.
    """
    # resolved, so that "." has a name and a parent to stage beside
    target = target.resolve()
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite)):
        raise DataError(f"{target}: already exists; remove it or choose another folder")
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{target}: cannot be created: {error.strerror}") from error
    try:
        yield staging
        for path in staging.rglob("*"):
            _sync(path)
        _sync(staging)
        _exchange(staging, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _exchange(staging: Path, target: Path) -> None:
    """Rename ``staging`` to ``target``, and remove what was there."""
    if not target.exists():
        staging.rename(target)
        return
    old = staging.with_suffix(".old")
    target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ArrayWriter:
    """Writes an npy file of one axis, a few numbers at a time; its length is known at the end.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with ArrayWriter(Path(folder) / "ids.npy", "<i4") as writer:
    ...         writer.append(np.array([3, 1]))
    ...         writer.append(np.array([2]))
    ...     np.load(Path(folder) / "ids.npy").tolist()
    [3, 1, 2]
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._count = 0

    def __enter__(self) -> ArrayWriter:
        self._file = self._path.open("wb")
        self._file.write(b"\0" * _HEADER_BYTES)
        return self

    def append(self, numbers: NDArray[Any]) -> None:
        """Add numbers to the end."""
        self._count += len(numbers)
        self._file.write(np.ascontiguousarray(numbers, dtype=self._kind).data)

    def append_file(self, path: Path) -> None:
        """Append the numbers of a file that another writer of the same kind wrote."""
        with path.open("rb") as source:
            source.seek(_HEADER_BYTES)
            shutil.copyfileobj(source, self._file, 4 * _COPY_ITEMS)
        self._count += (path.stat().st_size - _HEADER_BYTES) // np.dtype(self._kind).itemsize

    def __exit__(self, *_: object) -> None:
        told = f"{{'descr': '{self._kind}', 'fortran_order': False, 'shape': ({self._count},), }}"
        padded = told.ljust(_HEADER_BYTES - 11) + "\n"
        with self._file as file:
            file.seek(0)
            file.write(b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little"))
            file.write(padded.encode("latin1"))


class LabelMatrixWriter:
    """Writes an (N, L) matrix of ones to ``.npz`` as scipy reads it, a few rows at a time.

    Column ids wait in a file beside the target; in memory stay only the row lengths.

    >>> from tempfile import TemporaryDirectory
    >>> from scipy.sparse import load_npz
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "Y.npz"
    ...     with LabelMatrixWriter(path, n_labels=4) as writer:
    ...         writer.append(np.array([2, 1]), np.array([0, 3, 1]))
    ...     load_npz(path).toarray().astype(int).tolist()
    [[1, 0, 0, 1], [0, 1, 0, 0]]
    """

    def __init__(self, path: Path, n_labels: int) -> None:
        self.path = path
        self.n_labels = n_labels
        self._spool_path = path.with_suffix(".spool")
        self._lengths: list[NDArray[np.int32]] = []

    def __enter__(self) -> LabelMatrixWriter:
        self._spool = self._spool_path.open("wb")
        return self

    def append(self, lengths: NDArray[np.integer], label_ids: NDArray[np.integer]) -> None:
        """Add rows: how many labels each has, and all their ids, sorted within a row."""
        self._lengths.append(lengths.astype(np.int32))
        self._spool.write(label_ids.astype("<i4").tobytes())

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        self._spool.close()
        try:
            if exception_type is None:
                self._assemble()
        finally:
            self._spool_path.unlink()

    def _assemble(self) -> None:
        lengths = np.concatenate([np.zeros(1, np.int32), *self._lengths])
        indptr = np.cumsum(lengths, dtype=np.int64)
        n_entries = int(indptr[-1])
        if n_entries <= _INT32_MAX:
            indptr = indptr.astype(np.int32)
        with zipfile.ZipFile(self.path, "w") as archive:
            with _entry(archive, "indices") as out, self._spool_path.open("rb") as spool:
                _write_header(out, "<i4", n_entries)
                shutil.copyfileobj(spool, out, 4 * _COPY_ITEMS)
            with _entry(archive, "data") as out:
                _write_header(out, "<f4", n_entries)
                for start in range(0, n_entries, _COPY_ITEMS):
                    out.write(np.ones(min(_COPY_ITEMS, n_entries - start), "<f4").tobytes())
            shape = np.array([len(lengths) - 1, self.n_labels], dtype=np.int64)
            for name, array in (("indptr", indptr), ("format", np.array(b"csr")), ("shape", shape)):
                with _entry(archive, name) as out:
                    np.lib.format.write_array(out, array, allow_pickle=False)


def _entry(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    # a ZipInfo made by hand has a fixed date: the same rows give the same bytes
    info = zipfile.ZipInfo(f"{name}.npy")
    info.compress_type = zipfile.ZIP_DEFLATED
    return archive.open(info, "w", force_zip64=True)


def _write_header(out: IO[bytes], dtype: str, n_items: int) -> None:
    header = {"descr": dtype, "fortran_order": False, "shape": (n_items,)}
    np.lib.format.write_array_header_1_0(out, header)
