"""The XMC repository's sparse text formats.

One file, ``N D L`` on its first line and then ``label,label feature:value …`` for each point; or a
folder: ``train.txt`` and ``test.txt`` of that kind (also ``eurlex_train.txt``), or ``trn_X_Y.txt``
and ``trn_X_Xf.txt`` with a matrix each. Beside them, where there are any: texts in ``trn_X.txt``,
names in ``Y.txt`` or ``Yf.txt``, label features in ``lbl_X_Xf.txt``, and filter pairs.

Relevance other than 1 has no place in ``N D L`` files. Texts and names are one to a line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from elias.data.corpus import Corpus, Split
from elias.data.formats.layout import (
    SHORT,
    find,
    find_names,
    numbered,
    read_filters,
    the_only_file,
    write_filters,
)
from elias.data.formats.matrices import is_binary
from elias.data.formats.options import Reading, ReadOptions
from elias.data.formats.sources import bad, read_lines, read_names
from elias.data.formats.sparse_text import (
    labelled_lines,
    matrix_lines,
    read_labelled,
    read_matrix,
)
from elias.data.formats.text_lines import write_lines
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from scipy.sparse import csr_matrix

log = logging.getLogger(__name__)

LABEL_MATRIX = "{}_X_Y.txt"
FEATURE_MATRIX = "{}_X_Xf.txt"


def read_file(path: Path, options: ReadOptions) -> Reading:
    """Read one ``N D L`` file."""
    options.refuse(path, "XMC")
    labels, features = read_labelled(path)
    names = numbered(path, labels.shape[1], labels.nnz)
    train = Split(labels=labels, features=features)
    corpus = Corpus(train=train, label_names=names, source=path, format="xmc")
    return Reading(corpus, has_splits=False)


def read_files(files: dict[str, list[Path]], options: ReadOptions) -> Reading:
    """Read a folder with an ``N D L`` file for each split."""
    chosen = {split: the_only_file(split, paths) for split, paths in files.items()}
    folder = chosen["train"].parent
    splits = {split: read_labelled(path) for split, path in chosen.items()}
    return _assemble(folder, options, splits, chosen)


def read_folder(folder: Path, options: ReadOptions) -> Reading:
    """Read a folder of ``trn_X_Y.txt`` files, with texts or features for the points."""
    files = {split: find(folder, LABEL_MATRIX.format(SHORT[split])) for split in SHORT}
    chosen = {split: path for split, path in files.items() if path is not None}
    splits = {
        split: (read_matrix(path, "label"), read_features(folder, split))
        for split, path in chosen.items()
    }
    return _assemble(folder, options, splits, chosen)


def read_features(folder: Path, split: str) -> csr_matrix | None:
    """Return the features in ``trn_X_Xf.txt``, or None."""
    path = find(folder, FEATURE_MATRIX.format(SHORT[split]))
    return None if path is None else read_matrix(path, "feature")


def read_label_features(folder: Path) -> csr_matrix | None:
    """Return the label features in ``lbl_X_Xf.txt``, or None."""
    path = find(folder, FEATURE_MATRIX.format("lbl"))
    return None if path is None else read_matrix(path, "feature")


def _assemble(
    folder: Path,
    options: ReadOptions,
    matrices: Mapping[str, tuple[csr_matrix, csr_matrix | None]],
    files: dict[str, Path],
) -> Reading:
    options.refuse(folder, "XMC")
    splits: dict[str, Any] = {}
    for split, (labels, features) in matrices.items():
        log.info("%s: %d points, %d labels", files[split], *labels.shape)
        splits[split] = Split(
            labels=labels,
            features=features,
            texts=_read_texts(folder, split, labels.shape[0]),
            filters=read_filters(folder, split, labels.shape),
        )
    n_labels = splits["train"].labels.shape[1]
    n_uses = sum(split.labels.nnz for split in splits.values())
    corpus = Corpus(
        label_names=label_names(folder, n_labels, n_uses),
        label_features=read_label_features(folder),
        source=folder,
        format="xmc",
        **splits,
    )
    return Reading(corpus, has_splits=True)


def find_texts(folder: Path, split: str) -> Path | None:
    """Return the file of a split's texts, or None."""
    stem = f"{SHORT[split]}_X.txt"
    return find(folder, stem, f"raw/{stem}", f"{split}_raw_texts.txt")


def _read_texts(folder: Path, split: str, n_points: int) -> list[str] | None:
    path = find_texts(folder, split)
    if path is None:
        return None
    texts = read_lines(path)
    if len(texts) != n_points:
        raise bad(path, f"holds {len(texts)} texts for {n_points} points; give one line for each")
    return texts


def label_names(folder: Path, n_labels: int, n_uses: int) -> list[str]:
    """Return the names of a folder's labels, their numbers where there are none."""
    path = find_names(folder)
    if path is None:
        return numbered(folder, n_labels, n_uses)
    names = read_names(path)
    if len(names) != n_labels:
        raise bad(path, f"holds {len(names)} names for {n_labels} labels; give one line for each")
    return names


def left_out(corpus: Corpus) -> list[str]:
    """Say what of a corpus this format cannot hold."""
    binary = all(is_binary(split.labels) for split in corpus.splits.values())
    return [] if binary else ["relevance other than 1"]


def write(corpus: Corpus, folder: Path) -> None:
    """Write a corpus with features into an empty folder, a file for each split."""
    write_lines(folder / "Y.txt", corpus.label_names)
    if corpus.label_features is not None:
        write_lines(folder / FEATURE_MATRIX.format("lbl"), matrix_lines(corpus.label_features))
    for name, split in corpus.splits.items():
        if split.features is None:
            raise DataError(
                f"{corpus.source or 'the corpus'}: the {name} points have texts but no features, "
                "which the xmc format is made of; write it as lf, folder or jsonl"
            )
        write_lines(folder / f"{name}.txt", labelled_lines(split.labels, split.features))
        if split.texts is not None:
            write_lines(folder / f"{SHORT[name]}_X.txt", split.texts)
        write_filters(folder, name, split.filters)
