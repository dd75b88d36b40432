"""Save the sparse ranker with its calibration and label names, and load it again.

Its description is an entry of the model's manifest; its arrays and vocabulary are in
`RANKER_FOLDER`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.errors import ModelError, broken
from elias.persistence.labels_file import read_names, write_names
from elias.persistence.manifest import (
    RANKER_FOLDER,
    RANKER_WEIGHTS_FILE,
    VOCABULARY_FILE,
    Entries,
    Expected,
    Manifest,
    check_values,
    write_tensors,
)
from elias.rerank.calibration import N_QUESTIONS, Calibration, Mixture
from elias.rerank.features import RankerFeatures
from elias.rerank.label_names import N_NAME_QUESTIONS, LabelNames
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import SparseRanker, Transform
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


_WEIGHTS = f"{RANKER_FOLDER}/{RANKER_WEIGHTS_FILE}"
_VOCABULARY = f"{RANKER_FOLDER}/{VOCABULARY_FILE}"
_TREES = "calibration."
_NAME_TREES = "by_name."
"""Prefixes of the arrays of both calibrations."""

_ENTRIES: Entries = {
    "n_labels": (int, 0),
    "n_features": (int, 0),
    "n_dense": (int, 0),
    "reads_text": (bool, None),
    "n_words": (int, 0),
    "word_ngrams": (int, 0),
    "char_ngrams": (list, None),
    "calibrated": (bool, None),
    "named": (bool, None),
    "transform": (str, None),
    "mixture": (str, None),
    "sharpness": (float, 0),
}


def save_reranker(reranker: Reranker, folder: Path) -> dict[str, Any]:
    """Write the files of a ranker below a model's folder; return its entry of the manifest."""
    weights, featurizer = reranker.ranker.weights, reranker.features.featurizer
    arrays: dict[str, NDArray[Any]] = {
        "weights.values": weights.data,
        "weights.columns": weights.indices.astype(np.int32, copy=False),
        "weights.starts": weights.indptr.astype(np.int64, copy=False),
        "biases": reranker.ranker.biases,
        "frequencies": reranker.frequencies,
    }
    if featurizer is not None:
        arrays["idf"] = featurizer.idf
    for prefix, trees in ((_TREES, reranker.calibration), (_NAME_TREES, reranker.by_name)):
        if trees is not None:
            arrays |= {prefix + name: array for name, array in trees.to_arrays().items()}
    if reranker.names is not None:
        arrays |= {"names.starts": reranker.names.starts, "names.columns": reranker.names.columns}
    (folder / RANKER_FOLDER).mkdir()
    write_tensors(
        folder / _WEIGHTS,
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
        "check the input features, or lower rerank.cost",
    )
    write_names(folder / _VOCABULARY, [*featurizer.words, *featurizer.ngrams] if featurizer else [])
    return {
        "n_labels": reranker.ranker.n_labels,
        "n_features": reranker.features.n_features,
        "n_dense": reranker.ranker.n_dense,
        "reads_text": featurizer is not None,
        "n_words": len(featurizer.words) if featurizer else 0,
        "word_ngrams": featurizer.word_ngrams if featurizer else 0,
        "char_ngrams": list(featurizer.char_ngrams) if featurizer else [0, 0],
        "calibrated": reranker.calibration is not None,
        "named": reranker.by_name is not None,
        "transform": reranker.transform,
        "mixture": reranker.mixture,
        "sharpness": float(reranker.sharpness),
    }


def load_reranker(manifest: Manifest) -> Reranker:
    """Load the ranker of a saved model.

    Raises:
        ModelError: If anything is missing, damaged, foreign, or of another model.
    """
    entry = manifest["ranker"]
    _check_entry(manifest.path, entry)
    if entry["n_labels"] != manifest["n_labels"]:
        raise broken(
            manifest.path,
            f"the ranker has {entry['n_labels']} labels, the model {manifest['n_labels']}",
        )
    tensors = manifest.tensors(_WEIGHTS)
    manifest.check_tensors(_WEIGHTS, tensors, _expected(entry))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    path = manifest.folder / _WEIGHTS
    n_features = entry["n_features"]
    width = n_features + entry["n_dense"]
    _check_weights(path, arrays, width)
    featurizer = names = None
    if entry["reads_text"]:
        vocabulary = read_names(manifest.file(_VOCABULARY), n_features)
        shortest, longest = entry["char_ngrams"]
        featurizer = Featurizer(
            words=vocabulary[: entry["n_words"]],
            ngrams=vocabulary[entry["n_words"] :],
            idf=arrays["idf"],
            char_ngrams=(shortest, longest),
            word_ngrams=entry["word_ngrams"],
        )
    if entry["named"]:
        starts, columns = arrays["names.starts"], arrays["names.columns"]
        _check_rows(path, "names", starts, columns, n_features)
        names = LabelNames(starts, columns, arrays["idf"])
    weights = csr_matrix(
        (arrays["weights.values"], arrays["weights.columns"], arrays["weights.starts"]),
        shape=(entry["n_labels"], width),
    )
    return Reranker(
        features=RankerFeatures(n_features, featurizer),
        ranker=SparseRanker(weights, arrays["biases"], entry["n_dense"]),
        frequencies=arrays["frequencies"],
        calibration=_read_trees(path, arrays, _TREES, N_QUESTIONS) if entry["calibrated"] else None,
        transform=entry["transform"],
        mixture=entry["mixture"],
        sharpness=entry["sharpness"],
        names=names,
        by_name=_read_trees(path, arrays, _NAME_TREES, N_QUESTIONS + N_NAME_QUESTIONS)
        if entry["named"]
        else None,
    )


def _check_entry(path: Path, entry: Mapping[str, Any]) -> None:
    check_values(path, entry, _ENTRIES, "ranker.")
    for key, choices in (("transform", get_args(Transform)), ("mixture", get_args(Mixture))):
        if entry[key] not in choices:
            raise broken(path, f"ranker.{key} is {entry[key]!r}, which is not known")
    if entry["sharpness"] == 0:
        raise broken(path, "ranker.sharpness is 0")
    span = entry["char_ngrams"]
    if [type(size) for size in span] != [int, int] or not 0 <= span[0] <= span[1]:
        raise broken(path, f"ranker.char_ngrams is {span!r}")
    if entry["n_words"] > entry["n_features"]:
        raise broken(path, "ranker.n_words is more than ranker.n_features")
    if entry["named"] and not (entry["calibrated"] and entry["reads_text"]):
        raise broken(path, "ranker.named is true of a ranker without calibration or texts")


def _expected(entry: Mapping[str, Any]) -> Expected:
    """Return dtypes and shapes of the arrays of a ranker with this entry."""
    n_labels = entry["n_labels"]
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "weights.values": ("float32", (None,)),
        "weights.columns": ("int32", (None,)),
        "weights.starts": ("int64", (n_labels + 1,)),
        "biases": ("float32", (n_labels,)),
        "frequencies": ("int64", (n_labels,)),
    }
    if entry["reads_text"]:
        expected["idf"] = ("float32", (entry["n_features"],))
    for prefix, flag in ((_TREES, "calibrated"), (_NAME_TREES, "named")):
        if entry[flag]:
            for name, kind in Calibration.kinds().items():
                expected[prefix + name] = (np.dtype(kind).name, (None,))
    if entry["named"]:
        expected["names.starts"] = ("int64", (n_labels + 1,))
        expected["names.columns"] = ("uint32", (None,))
    return expected


def _check_weights(path: Path, arrays: Mapping[str, NDArray[Any]], width: int) -> None:
    """Refuse weights of labels or features that do not exist."""
    starts, columns = arrays["weights.starts"], arrays["weights.columns"]
    _check_rows(path, "weights", starts, columns, width)
    n_weights = len(columns)
    if len(arrays["weights.values"]) != n_weights:
        raise broken(path, f"weights.values has not {n_weights} numbers, one per column")
    first = np.zeros(n_weights, dtype=bool)
    first[starts[:-1][starts[:-1] < n_weights]] = True
    if not (first[1:] | (np.diff(columns) > 0)).all():
        raise broken(path, "weights.columns are not ascending within a label")
    if (arrays["frequencies"] < 0).any():
        raise broken(path, "frequencies has a negative count")


def _check_rows(
    path: Path, name: str, starts: NDArray[Any], columns: NDArray[Any], width: int
) -> None:
    """Refuse CSR rows whose offsets or columns are out of range."""
    if starts[0] != 0 or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
        raise broken(path, f"{name}.starts does not divide {name}.columns among the labels")
    if len(columns) and (columns.min() < 0 or columns.max() >= width):
        raise broken(path, f"{name}.columns has a feature outside 0..{width - 1}")


def _read_trees(
    path: Path, arrays: Mapping[str, NDArray[Any]], prefix: str, n_questions: int
) -> Calibration:
    trees = {name: arrays[prefix + name] for name in Calibration.kinds()}
    try:
        return Calibration.from_arrays(trees, n_questions)
    except ModelError as error:
        raise broken(path, str(error)) from error
