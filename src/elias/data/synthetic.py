"""A generated corpus of any size, seeded: for tests, for trials of scale, and without a network.

How it is made. There are topics, each with its own words. A label has one or more *modes*: it
belongs to that many unrelated topics, and in each it shows itself by other words. Frequent labels
have more modes. A point is about one topic; its labels are drawn among the topic's, following
the power law, and its text mixes words of the topic, words of its labels and noise. A tree that
files a label under one place cannot serve a label with several modes; a learned graph can.

Points come in chunks, each with a random generator of its own, and go straight to disk: memory
grows with the labels (some tens of bytes each), hardly with the points.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.corpus import Corpus, Split
from elias.data.formats.layout import SHORT
from elias.data.pseudowords import pseudowords
from elias.data.staging import LabelMatrixWriter, staged_folder
from elias.data.synthetic_world import Chunk, SyntheticSpec, World
from elias.progress import progress

logger = logging.getLogger(__name__)

_NAMES_PER_WRITE = 1 << 17
_NAME_SYLLABLES = 3


def write_synthetic(
    directory: str | Path, *, n_points: int, n_labels: int, seed: int = 0, **options: Any
) -> Path:
    """Generate a corpus straight to disk, in the ``raw/trn_X.txt`` + ``Y.trn.npz`` format.

    Args:
        directory: The folder to make; nothing but an empty folder may be there.
        n_points: Training points.
        n_labels: L.
        seed: Decides everything that is drawn.
        **options: The other fields of `SyntheticSpec`.

    Returns:
        The folder, which appears only when it is complete.
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    target = Path(directory)
    with staged_folder(target) as staging:
        (staging / "raw").mkdir()
        world = World(spec)
        _write_label_names(staging / "raw" / "Y.txt", n_labels)
        n_covered = {name: _write_split(staging, world, name) for name in spec.sizes}["train"]
        note = _describe(spec, n_labels - n_covered)
        (staging / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")
    return target


def synthetic_corpus(n_points: int, n_labels: int, seed: int = 0, **options: Any) -> Corpus:
    """Generate a corpus in memory, the same that `write_synthetic` writes.

    >>> corpus = synthetic_corpus(n_points=40, n_labels=20, modes=2)
    >>> len(corpus.train), corpus.n_labels, corpus.label_frequencies().min() > 0
    (40, 20, np.True_)
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    world = World(spec)
    splits = {name: _collect(list(world.chunks(name)), n_labels) for name in spec.sizes}
    corpus = Corpus(
        train=splits["train"],
        validation=splits.get("validation"),
        test=splits.get("test"),
        label_names=pseudowords(0, n_labels, _NAME_SYLLABLES),
        format="synthetic",
    )
    coverage = _describe_coverage(n_labels, int((corpus.label_frequencies() == 0).sum()))
    return replace(corpus, notes={"coverage": coverage})


def _write_label_names(path: Path, n_labels: int) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for start in range(0, n_labels, _NAMES_PER_WRITE):
            names = pseudowords(start, min(start + _NAMES_PER_WRITE, n_labels), _NAME_SYLLABLES)
            out.writelines(f"{name}\n" for name in names)


def _write_split(folder: Path, world: World, split: str) -> int:
    """Write one split and return how many different labels it has."""
    spec, prefix = world.spec, SHORT[split]
    seen = np.zeros(spec.n_labels, dtype=bool)
    with (
        (folder / "raw" / f"{prefix}_X.txt").open("w", encoding="utf-8", newline="\n") as texts,
        LabelMatrixWriter(folder / f"Y.{prefix}.npz", spec.n_labels) as labels,
        progress(f"generating {split} points", spec.sizes[split]) as advance,
    ):
        for chunk in world.chunks(split):
            texts.writelines(f"{text}\n" for text in chunk.texts)
            labels.append(chunk.lengths, chunk.label_ids)
            seen[chunk.label_ids] = True
            advance(len(chunk.texts))
    return int(seen.sum())


def _collect(chunks: list[Chunk], n_labels: int) -> Split:
    indices = np.concatenate([chunk.label_ids for chunk in chunks])
    indptr = np.cumsum(np.concatenate([[0], *(chunk.lengths for chunk in chunks)]))
    data = np.ones(len(indices), dtype=np.float32)
    labels = csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, n_labels))
    return Split(labels=labels, texts=[text for chunk in chunks for text in chunk.texts])


def _describe_coverage(n_labels: int, n_missing: int) -> str:
    if not n_missing:
        return f"Each of the {n_labels:,} labels has a training point."
    message = (
        f"{n_missing:,} of {n_labels:,} labels have no training point: "
        "more points, or more labels per point, would reach them."
    )
    logger.warning("synthetic corpus: %s", message)
    return message


def _describe(spec: SyntheticSpec, n_missing: int) -> str:
    fields = "\n".join(f"- {name} = {value}" for name, value in asdict(spec).items())
    coverage = _describe_coverage(spec.n_labels, n_missing)
    return f"# A generated corpus\n\n{coverage}\n\n{fields}\n"
