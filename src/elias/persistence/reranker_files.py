"""Save a reranker to a folder and load it again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from scipy.sparse import csr_matrix

import elias
from elias.data.atomic import staged_folder
from elias.errors import VOCABULARY_FILE, DataError, ModelError, broken, quoted
from elias.persistence.labels_file import read_names, write_names
from elias.rerank.calibration import N_QUESTIONS, Calibration, Mixture
from elias.rerank.features import RankerFeatures
from elias.rerank.label_names import N_NAME_QUESTIONS, LabelNames
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import SparseRanker, Transform
from elias.text.vectorizer import Featurizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


FORMAT_VERSION = 2
"""Raised when an older elias-xmc could not read what this one writes."""

DESCRIPTION_FILE = "ranker.json"
ARRAYS_FILE = "ranker.safetensors"


class Parts(NamedTuple):
    """What is written of a reranker."""

    description: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    vocabulary: Sequence[str]


def write_parts(folder: Path, parts: Parts) -> None:
    """Write a folder that does not exist yet; it appears whole or not at all.

    Raises:
        ModelError: If the folder is taken, cannot be written, or a number is not finite.
    """
    described = {"format_version": FORMAT_VERSION, "elias_version": elias.__version__}
    text = json.dumps(described | parts.description, indent=2, allow_nan=False) + "\n"
    arrays = {name: np.ascontiguousarray(array) for name, array in parts.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ModelError(
                f"{folder}: the ranker is not saved: {name} has a number that is not finite; "
                "check the input features, or lower rerank.cost"
            )
    try:
        with staged_folder(folder) as staging:
            (staging / DESCRIPTION_FILE).write_text(text, encoding="utf8")
            save_file(arrays, staging / ARRAYS_FILE)
            # safetensors makes a file for its owner alone; the others may read it too
            shutil.copymode(staging / DESCRIPTION_FILE, staging / ARRAYS_FILE)
            write_names(staging / VOCABULARY_FILE, parts.vocabulary)
    except DataError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {quoted(error)}") from error


def read_description(
    folder: Path, needed: Mapping[str, type], *, since_version_2: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is said of the reranker in a folder, having checked that all of it is there.

    Args:
        folder: Where it is.
        needed: What must be said, and of which type.
        since_version_2: What older folders do not say, and what holds for them.

    Raises:
        ModelError: If it is missing, damaged, foreign, or from a newer version.
    """
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: has no {DESCRIPTION_FILE}; give the folder of a saved ranker")
    try:
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken(path, f"not valid JSON ({quoted(error)})") from error
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if type(version) is not int or "elias_version" not in tree:
        raise ModelError(f"{path}: not of a ranker that ELIAS saved; give the folder of one")
    if version > FORMAT_VERSION:
        raise ModelError(
            f"{path}: format {version}, written by elias-xmc {tree['elias_version']}, is newer "
            f"than format {FORMAT_VERSION} of this {elias.__version__}; upgrade elias-xmc"
        )
    described: dict[str, Any] = tree
    if version < 2:
        described |= since_version_2
    for key, kind in needed.items():
        value = described.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise broken(path, f"{key} is {value!r}")
    return described


def read_arrays(
    folder: Path, wanted: Mapping[str, tuple[type, tuple[int | None, ...]]]
) -> dict[str, NDArray[Any]]:
    """Return the arrays in a folder, which must be exactly the wanted ones.

    Args:
        folder: Where they are.
        wanted: The type and the shape of each; None is any length.

    Raises:
        ModelError: If one is missing, foreign, or not as it was saved.
    """
    path = folder / ARRAYS_FILE
    if not path.is_file():
        raise broken(path, "missing")
    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise broken(path, f"truncated or damaged ({quoted(error)})") from error
    for name in sorted(wanted.keys() ^ arrays.keys()):
        there = "is not a part of this ranker" if name in arrays else "is missing"
        raise broken(path, f"{name} {there}")
    for name, (kind, shape) in wanted.items():
        _check_array(path, name, arrays[name], kind, shape)
    return arrays


def read_vocabulary(folder: Path, n_names: int) -> tuple[str, ...]:
    """Return the words and n-grams in a folder, which must be so many."""
    return read_names(folder / VOCABULARY_FILE, n_names)


def _check_array(
    path: Path, name: str, array: NDArray[Any], kind: type, shape: tuple[int | None, ...]
) -> None:
    fits = array.ndim == len(shape) and all(
        want in (None, size) for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        shown = tuple("any" if size is None else size for size in shape)
        raise broken(path, f"{name} has shape {array.shape}, not {shown}")
    if array.dtype != kind:
        raise broken(path, f"{name} is {array.dtype}, not {np.dtype(kind)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise broken(path, f"{name} has a number that is not finite")


_TREE = "calibration."
_NAMED_TREE = "by_name."
_NEEDED = {
    "n_labels": int,
    "n_features": int,
    "n_dense": int,
    "reads_text": bool,
    "n_words": int,
    "word_ngrams": int,
    "char_ngrams": list,
    "calibrated": bool,
    "named": bool,
    "transform": str,
    "mixture": str,
    "sharpness": float,
}
_OF_VERSION_1 = {"named": False, "sharpness": 1.0}


def save_reranker(reranker: Reranker, folder: str | Path) -> None:
    """Write a folder that `load_reranker` reads; it appears whole or not at all.

    Args:
        reranker: What to save.
        folder: Where to; it must not exist, or be empty.

    Raises:
        ModelError: If the folder is taken, or cannot be written.
    """
    weights, featurizer = reranker.ranker.weights, reranker.features.featurizer
    arrays: dict[str, NDArray[Any]] = {
        "weights.values": weights.data,
        "weights.columns": weights.indices.astype(np.int32, copy=False),
        "weights.starts": weights.indptr.astype(np.int64, copy=False),
        "biases": reranker.ranker.biases,
        "frequencies": reranker.frequencies,
    }
    description = {
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
    if featurizer is not None:
        arrays["idf"] = featurizer.idf
    for prefix, trees in ((_TREE, reranker.calibration), (_NAMED_TREE, reranker.by_name)):
        if trees is not None:
            arrays |= {prefix + name: array for name, array in trees.to_arrays().items()}
    if reranker.names is not None:
        arrays |= {"names.starts": reranker.names.starts, "names.columns": reranker.names.columns}
    names = [*featurizer.words, *featurizer.ngrams] if featurizer else []
    write_parts(Path(folder), Parts(description, arrays, names))


def load_reranker(folder: str | Path, *, n_labels: int | None = None) -> Reranker:
    """Read a folder that `save_reranker` wrote.

    Args:
        folder: Where it is.
        n_labels: L of the model it belongs to, where that is known.

    Raises:
        ModelError: If anything is missing, damaged, foreign, or from a newer version.
    """
    folder = Path(folder)
    described = read_description(folder, _NEEDED, since_version_2=_OF_VERSION_1)
    _check_description(folder / DESCRIPTION_FILE, described)
    if n_labels not in (None, described["n_labels"]):
        raise ModelError(
            f"{folder}: ranks {described['n_labels']} labels where the model has {n_labels}; "
            "put the ranker there that was saved with the model"
        )
    arrays = read_arrays(folder, _wanted(described))
    path = folder / ARRAYS_FILE
    _check_weights(path, arrays, described["n_features"] + described["n_dense"])
    return Reranker(
        features=_read_features(folder, described, arrays),
        ranker=_read_ranker(described, arrays),
        frequencies=arrays["frequencies"],
        calibration=_read_trees(path, arrays, _TREE) if described["calibrated"] else None,
        transform=described["transform"],
        mixture=described["mixture"],
        sharpness=described["sharpness"],
        names=_read_names(path, described, arrays) if described["named"] else None,
        by_name=_read_trees(path, arrays, _NAMED_TREE) if described["named"] else None,
    )


def _check_description(path: Path, described: Mapping[str, Any]) -> None:
    for key, choices in (("transform", get_args(Transform)), ("mixture", get_args(Mixture))):
        if described[key] not in choices:
            raise broken(path, f"{key} is {described[key]!r}, which is not known")
    if not 0 < described["sharpness"] < math.inf:
        raise broken(path, f"sharpness is {described['sharpness']!r}")
    span = described["char_ngrams"]
    if [type(size) for size in span] != [int, int] or not 0 <= span[0] <= span[1]:
        raise broken(path, f"char_ngrams is {span!r}")
    if described["n_words"] > described["n_features"]:
        raise broken(path, "n_words is more than n_features")
    if described["named"] and not (described["calibrated"] and described["reads_text"]):
        raise broken(path, "named is true of a ranker that has no calibration, or reads no text")


def _wanted(described: Mapping[str, Any]) -> dict[str, tuple[type, tuple[int | None, ...]]]:
    """Return type and shape of each array that a ranker so described has."""
    n_labels = described["n_labels"]
    wanted: dict[str, tuple[type, tuple[int | None, ...]]] = {
        "weights.values": (np.float32, (None,)),
        "weights.columns": (np.int32, (None,)),
        "weights.starts": (np.int64, (n_labels + 1,)),
        "biases": (np.float32, (n_labels,)),
        "frequencies": (np.int64, (n_labels,)),
    }
    if described["reads_text"]:
        wanted["idf"] = (np.float32, (described["n_features"],))
    for prefix, is_there in ((_TREE, "calibrated"), (_NAMED_TREE, "named")):
        if described[is_there]:
            kinds = Calibration.kinds()
            wanted |= {prefix + name: (kind, (None,)) for name, kind in kinds.items()}
    if described["named"]:
        wanted["names.starts"] = (np.int64, (n_labels + 1,))
        wanted["names.columns"] = (np.uint32, (None,))
    return wanted


def _check_weights(path: Path, arrays: Mapping[str, NDArray[Any]], width: int) -> None:
    """Refuse weights that no label or feature could have."""
    starts, columns = arrays["weights.starts"], arrays["weights.columns"]
    n_weights = len(columns)
    if starts[0] != 0 or starts[-1] != n_weights or (np.diff(starts) < 0).any():
        raise broken(path, "weights.starts does not divide the weights among the labels")
    if len(arrays["weights.values"]) != n_weights:
        raise broken(path, f"weights.values are not {n_weights}, one for each column")
    if n_weights and (columns.min() < 0 or columns.max() >= width):
        raise broken(path, f"weights.columns has a feature outside 0..{width - 1}")
    first = np.zeros(n_weights, dtype=bool)
    first[starts[:-1][starts[:-1] < n_weights]] = True
    if not (first[1:] | (np.diff(columns) > 0)).all():
        raise broken(path, "weights.columns are not ascending within a label")
    if (arrays["frequencies"] < 0).any():
        raise broken(path, "frequencies has a negative count")


def _read_features(
    folder: Path, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> RankerFeatures:
    n_features, n_words = described["n_features"], described["n_words"]
    if not described["reads_text"]:
        return RankerFeatures(n_features, None)
    names = read_vocabulary(folder, n_features)
    shortest, longest = described["char_ngrams"]
    featurizer = Featurizer(
        words=names[:n_words],
        ngrams=names[n_words:],
        idf=arrays["idf"],
        char_ngrams=(shortest, longest),
        word_ngrams=described["word_ngrams"],
    )
    return RankerFeatures(n_features, featurizer)


def _read_ranker(described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> SparseRanker:
    width = described["n_features"] + described["n_dense"]
    weights = csr_matrix(
        (arrays["weights.values"], arrays["weights.columns"], arrays["weights.starts"]),
        shape=(described["n_labels"], width),
    )
    return SparseRanker(weights, arrays["biases"], described["n_dense"])


def _read_trees(path: Path, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Calibration:
    trees = {name: arrays[prefix + name] for name in Calibration.kinds()}
    more = N_NAME_QUESTIONS if prefix == _NAMED_TREE else 0
    try:
        return Calibration.from_arrays(trees, N_QUESTIONS + more)
    except ModelError as error:
        raise broken(path, str(error)) from error


def _read_names(
    path: Path, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> LabelNames:
    starts, columns = arrays["names.starts"], arrays["names.columns"]
    if starts[0] != 0 or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
        raise broken(path, "names.starts does not divide the features among the labels")
    if len(columns) and columns.max() >= described["n_features"]:
        raise broken(path, f"names.columns has a feature outside 0..{described['n_features'] - 1}")
    return LabelNames(starts, columns, arrays["idf"])
