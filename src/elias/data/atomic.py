"""Write files and folders atomically, record their checksums, and evict old cache entries.

A folder is written under a hidden name next to its target. It is renamed to the target when it is
complete and on disk, so that an interrupted write never looks like a corpus or a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import elias
from elias.errors import DataError

MANIFEST_FILE = "manifest.json"
_HEADER_BYTES = 128
_ABANDONED_SECONDS = 24 * 3600
"""Age after which an unfinished folder is assumed to be the leftover of a dead process."""
_used: set[Path] = set()  # cache entries that this process uses


def cache_root() -> Path:
    """Return the folder that contains all caches of ELIAS, inside the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "elias"


def digest(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(
    folder: Path, version: int, known: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write the manifest of a folder. Call this after all other files are written.

    Args:
        folder: The folder.
        version: The format version of its content.
        known: The manifest entries of files whose checksums are already known.
    """
    files = dict(known or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = manifest_entry(path)
    tree = {"format_version": version, "elias_version": elias.__version__, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(tree), encoding="utf8")


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return the size, modification time and checksum of a file."""
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest(path)}


def find_damage(folder: Path, version: int, *, trust_times: bool = False) -> str:
    """Check a folder against its manifest. Return the first problem, or an empty string.

    With ``trust_times``, files that still have the recorded modification time are not read.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf8"))
        if manifest["format_version"] != version:
            return f"has format {manifest['format_version']}, not {version}"
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            stat = path.stat()
            if stat.st_size != entry["bytes"]:
                return f"{name} has {stat.st_size} bytes, not {entry['bytes']}"
            is_trusted = trust_times and stat.st_mtime_ns == entry.get("mtime_ns")
            if not is_trusted and digest(path) != entry["sha256"]:
                return f"{name} was changed (its SHA-256 differs)"
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be read ({error})"
    return ""


def mark_in_use(entry: Path) -> None:
    """Record that a cache entry was just used, and protect it from eviction by this process."""
    _used.add(entry.resolve())
    with suppress(OSError):  # a read-only cache can be used, too
        os.utime(entry)


@contextmanager
def new_cache_entry(folder: Path, limit: int) -> Iterator[Path]:
    """Yield an empty folder that becomes the cache entry ``folder`` when the block ends.

    Then evict old entries until the cache has at most ``limit`` bytes.

    Raises:
        DataError: If a file cannot be written, for example because the disk is full.
    """
    try:
        # an existing entry is damaged, or was just written by another process
        with staged_folder(folder, overwrite=True) as staging:
            yield staging
        mark_in_use(folder)
        evict_oldest(folder.parent, limit)
    except OSError as error:
        raise cache_error(folder.parent, error) from error


def cache_error(folder: Path, error: OSError) -> DataError:
    """Return the error for a cache folder in which a file cannot be written."""
    return DataError(
        f"{folder}: cannot be written ({error.strerror}); free some space, or set XDG_CACHE_HOME "
        "to a folder on another disk"
    )


def evict_oldest(root: Path, limit: int) -> None:
    """Remove the least recently used entries of a cache until it has at most ``limit`` bytes.

    Keep the newest entry, entries that this process uses, and entries that another process may be
    writing. Ignore entries that another process removes at the same time.
    """
    total, newest_first = 0, sorted(root.iterdir(), key=_modified, reverse=True)
    for position, entry in enumerate(newest_first):
        paths = [entry]
        with suppress(FileNotFoundError):  # another process may remove it now
            paths.extend(entry.rglob("*"))
            total += sum(path.stat().st_size for path in paths if path.is_file())
        is_recent = max(map(_modified, paths)) > time.time() - _ABANDONED_SECONDS
        is_being_written = entry.name.startswith(".") and is_recent
        is_protected = position == 0 or is_being_written
        if total > limit and not is_protected and entry.resolve() not in _used:
            shutil.rmtree(entry, ignore_errors=True)


def _modified(path: Path) -> float:
    """Return the modification time of a file, or 0 if it no longer exists."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends without an error.

    Args:
        target: A path that does not exist, or an empty folder.
        overwrite: Replace an existing folder once the new one is complete. The caller must make
            sure that the existing folder may be removed.

    Raises:
        DataError: If ``target`` cannot be created, is a file, or is a folder that is not empty and
            must not be overwritten. An existing ``target`` is not changed.
    """
    target = target.resolve()  # so that "." has a name and a parent
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite)):
        raise DataError(f"{target}: already exists; remove it or choose another folder")
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{target}: cannot be created ({error.strerror}); choose another folder"
        ) from error
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        _exchange(staging, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``target`` when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.writing")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
    except OSError as error:
        error.filename = error.filename or str(target)  # the error of a full disk has no file name
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _exchange(staging: Path, target: Path) -> None:
    """Rename ``staging`` to ``target``, and remove the previous ``target`` if there is one."""
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
    """Flush a file, or the directory entries of a folder, to disk."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ArrayWriter:
    """Writer of a one-dimensional npy file in chunks. The length need not be known in advance.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with ArrayWriter(Path(folder) / "ids.npy", "<i4") as writer:
    ...         writer.append(np.array([3, 1]))
    ...         writer.append(np.array([2]))
    ...     np.load(Path(folder) / "ids.npy").tolist()
    [3, 1, 2]
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = dtype
        self._count = 0
        self._file = path.open("wb")
        self._file.seek(_HEADER_BYTES)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, numbers: NDArray[Any]) -> None:
        """Append numbers to the array."""
        self._count += len(numbers)
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).data)

    def close(self) -> None:
        """Write the header, unless it is already written."""
        if not self._file.closed:
            with self._file as file:
                file.seek(0)
                # NumPy pads the header to 128 bytes, whatever the length of the array
                header = {"descr": self._dtype, "fortran_order": False, "shape": (self._count,)}
                np.lib.format.write_array_header_1_0(file, header)
