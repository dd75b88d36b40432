"""`convert`: write a corpus in any format, whole or not at all."""

from __future__ import annotations

import gzip
import logging
import re
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from elias.data.formats import folder as npz_folder
from elias.data.formats import lf, table_writing, xmc
from elias.data.formats.sources import bad, mend
from elias.data.formats.tabular import KINDS
from elias.data.staging import staged_folder
from elias.errors import DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elias.data.corpus import Corpus

log = logging.getLogger(__name__)

FORMATS = (*KINDS, "folder", "xmc", "lf", "pecos")
_SUFFIXES = {f".{kind}": kind for kind in KINDS} | {".ndjson": "jsonl", ".json": "jsonl"}
_OURS = re.compile(
    r"(raw/)?(Y|(trn|val|tst)_X|labels)\.txt|[XY]\.(trn|val|tst|lbl)\.(npz|txt)|output-items\.txt"
    r"|(train|validation|test)\.txt|filter_labels_(train|validation|test)\.txt"
    r"|(trn|val|tst|lbl)(_X_Xf|_X_Y)\.txt|(trn|val|tst|lbl)\.json\.gz|raw"
)


@dataclass(frozen=True, slots=True)
class Written:
    """What `convert` wrote."""

    path: Path
    format: str
    left_out: tuple[str, ...]
    """What of the corpus the format cannot hold, in words."""


def convert(
    corpus: Corpus, dst: str | Path, format: str | None = None, *, overwrite: bool = False
) -> Written:
    """Write a corpus; it appears under its name only when it is whole.

    Tables (``jsonl``, ``csv``, ``tsv``, ``parquet``) are one file with a column ``split``; the
    other formats are folders. Line-based formats (``folder``, ``xmc``, ``pecos``) hold a line end
    inside a text or a name as a space.

    Args:
        corpus: what to write.
        dst: the file or folder to write.
        format: one of `FORMATS`; without it, by the suffix of ``dst`` (``.gz`` allowed after
            it), and a folder of the ``folder`` format where there is none.
        overwrite: whether to replace what is there. A folder is replaced only when every file
            in it is one that a corpus has.

    Raises:
        DataError: if ``dst`` is there already, or the format cannot hold this corpus.
    """
    target = Path(dst).expanduser()
    chosen = _format_of(target, format)
    if target.exists() and not overwrite:
        raise bad(target, "already exists; choose another name, or pass overwrite=True")
    if target.is_dir() == (chosen in KINDS) and target.exists():
        raise bad(target, f"is in the way of the {chosen} format; remove it")
    clean = _encodable(corpus)
    if chosen in KINDS:
        _write_file(clean, target, chosen)
    else:
        _write_folder(clean, target, chosen)
    written = Written(target, chosen, tuple(_left_out(corpus, chosen)))
    if written.left_out:
        log.warning("%s: left out: %s", target, "; ".join(written.left_out))
    return written


def _format_of(target: Path, given: str | None) -> str:
    suffix = Path(target.name.removesuffix(".gz")).suffix.lower()
    if given is None:
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
        if target.name.endswith(".gz") or suffix in (".txt", ".npz", ".xlsx"):
            raise bad(target, f"no format goes with this name; use {', '.join(_SUFFIXES)}")
        return "folder"
    if given not in FORMATS:
        known = ", ".join(FORMATS)
        raise DataError(f"unknown format {given!r}{nearest(given, FORMATS)}; formats: {known}")
    return given


def _left_out(corpus: Corpus, chosen: str) -> list[str]:
    if chosen in KINDS:
        return table_writing.left_out(corpus)
    return xmc.left_out(corpus) if chosen == "xmc" else []


def _encodable(corpus: Corpus) -> Corpus:
    splits = {
        name: split if split.texts is None else replace(split, texts=mend(split.texts)[0])
        for name, split in corpus.splits.items()
    }
    return replace(corpus.with_splits(**splits), label_names=mend(corpus.label_names)[0])


def _write_file(corpus: Corpus, target: Path, kind: str) -> None:
    with _staged_file(target) as stream:
        if target.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
                table_writing.write_table(corpus, cast("IO[bytes]", packed), kind)
        else:
            table_writing.write_table(corpus, stream, kind)


@contextmanager
def _staged_file(target: Path) -> Iterator[IO[bytes]]:
    """Yield a stream that becomes ``target`` when the block ends without an error."""
    staging = _beside(target, "partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with staging.open("wb") as stream:
                yield stream
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise bad(target, f"cannot be written ({error.strerror or error})") from None


def _write_folder(corpus: Corpus, target: Path, chosen: str) -> None:
    replacing = target.exists() and any(target.iterdir())
    if replacing:
        _refuse_foreign(target)
    place = _beside(target, "new") if replacing else target
    try:
        with staged_folder(place) as folder:
            _fill(corpus, folder, chosen)
        if replacing:
            _swap(place, target)
    except OSError as error:
        raise bad(target, f"cannot be written ({error.strerror or error})") from None


def _fill(corpus: Corpus, folder: Path, chosen: str) -> None:
    if chosen == "xmc":
        xmc.write(corpus, folder)
    elif chosen == "lf":
        lf.write(corpus, folder)
    else:
        spelling = npz_folder.PECOS if chosen == "pecos" else npz_folder.RAW
        npz_folder.write(corpus, folder, spelling)


def _refuse_foreign(target: Path) -> None:
    names = (path.relative_to(target).as_posix() for path in sorted(target.rglob("*")))
    stray = next((name for name in names if not _OURS.fullmatch(name)), None)
    if stray is not None:
        raise bad(target, f"also holds {stray}, which is no part of a corpus; remove it yourself")


def _swap(new: Path, target: Path) -> None:
    """Put the folder ``new`` in the place of ``target``, which stays whole until then."""
    old = _beside(target, "old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old)


def _beside(target: Path, what: str) -> Path:
    whole = target.resolve()
    return whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.{what}")
