"""`EliasClassifier`: the model as scikit-learn's users know their estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, issparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from elias.config import EliasConfig
from elias.data.corpus import Corpus, Split
from elias.data.readers.files import sanitize
from elias.errors import DataError
from elias.inference.predictor import EVALUATED
from elias.training.trainer import train

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


_SETTINGS = {
    "dim": "encoder.dim",
    "n_clusters": "index.n_clusters",
    "beam_size": "index.beam_size",
    "rerank": "rerank.enabled",
    "members": "ensemble.members",
    "validation_size": "eval.validation_size",
    "random_state": "seed",
}
"""The parameters that are a key of the configuration each."""


class EliasClassifier(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Ranks and decides for the labels of texts, out of very many.

    Args:
        encoder: ``bag`` learns word and n-gram vectors; ``minilm``, a folder or a hub id is a
            transformer.
        epochs: Epochs of the last stage; None keeps the preset's.
        dim: Width of the ``bag`` encoder.
        n_clusters: C, clusters of labels; None derives it from the data.
        beam_size: b, clusters searched for a text; None derives it.
        rerank: Whether to train the sparse ranker; None decides by the size of the data.
        members: Models whose scores are averaged.
        validation_size: Points held out to choose the best epoch, calibrate and learn thresholds;
            None derives it, 0 holds none out.
        threshold: What `predict` decides by: a probability, ``"f1"``, ``"precision=0.8"`` or
            ``"recall=0.6"``. A model that could not learn probabilities decides for the best label.
        preset: Settings to start from, as ``elias presets`` lists them.
        settings: Any keys of the configuration, such as ``{"index.alpha": 20}``; they win.
        device: ``auto`` takes a GPU if there is one.
        random_state: The seed.

    Attributes:
        classes_: The labels, in the order of the columns that `predict` returns.
        model_: The trained `Elias`: ``model_.explain``, ``model_.metadata`` and all the rest.

    Example:
        >>> from elias import EliasClassifier
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> texts = corpus.train.texts
        >>> names = [[corpus.label_names[i] for i in row.indices] for row in corpus.train.labels]
        >>> classifier = EliasClassifier(dim=16, epochs=5).fit(texts, names)
        >>> classifier.predict_proba(texts[:4]).shape
        (4, 30)
        >>> [len(best) for best in classifier.predict_topk(texts[:2], k=3)]
        [3, 3]
    """

    classes_: NDArray[Any]
    model_: Elias

    def __init__(
        self,
        encoder: str = "bag",
        *,
        epochs: int | None = None,
        dim: int = 256,
        n_clusters: int | None = None,
        beam_size: int | None = None,
        rerank: bool | None = None,
        members: int = 1,
        validation_size: int | None = None,
        threshold: float | str = "f1",
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        device: str = "auto",
        random_state: int = 0,
    ) -> None:
        self.encoder = encoder
        self.epochs = epochs
        self.dim = dim
        self.n_clusters = n_clusters
        self.beam_size = beam_size
        self.rerank = rerank
        self.members = members
        self.validation_size = validation_size
        self.threshold = threshold
        self.preset = preset
        self.settings = settings
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> EliasClassifier:  # noqa: N803 - scikit-learn's name
        """Train on texts, or CSR features, and the labels of each.

        Args:
            X: N texts in a list, array or Series; or a matrix (N, D) of features.
            y: For each text a list of names (or other hashable labels that can be ordered); or a
                matrix (N, L) of zeros and ones, sparse or not.
        """
        given = _given(X)
        labels, classes = _labels(y)
        n_points = len(given) if isinstance(given, list) else given.shape[0]
        if n_points != labels.shape[0]:
            raise DataError(f"{n_points} texts, but labels of {labels.shape[0]}")
        config = self.config()
        texts, features = (given, None) if isinstance(given, list) else (None, given)
        corpus = Corpus(
            train=Split(labels=labels, texts=texts, features=features),
            label_names=[str(name) for name in classes],
        )
        self.model_ = train(config, corpus, device=self.device)
        self.classes_ = classes
        return self

    def config(self) -> EliasConfig:
        """Return the configuration that the parameters stand for."""
        start = EliasConfig() if self.preset is None else EliasConfig.preset(self.preset)
        usual = EliasClassifier().get_params()
        changes: dict[str, Any] = {}
        if self.encoder != "bag":
            changes |= {"encoder.kind": "transformer", "encoder.model": self.encoder}
        for name, key in _SETTINGS.items():
            value = getattr(self, name)
            # what was not touched is the preset's to say
            if value is not None and (self.preset is None or value != usual[name]):
                changes[key] = value
        if self.epochs is not None:
            changes[f"stages.{start.stages[-1].name}.epochs"] = self.epochs
        return start.override(changes | dict(self.settings or {}))

    def predict(self, X: Any) -> csr_matrix:  # noqa: N803
        """Return decisions as a matrix (N, L) of zeros and ones, columns as in ``classes_``."""
        check_is_fitted(self)
        if self.model_.probabilities is None and isinstance(self.threshold, str):
            decided = self._ranked(X, 1)
        else:
            decided = self._ranked(X, EVALUATED).threshold(self.model_.threshold(self.threshold))
        matrix = decided.to_csr()
        matrix.data = np.ones(len(matrix.data), dtype=np.int8)
        return matrix

    def predict_proba(self, X: Any) -> csr_matrix:  # noqa: N803
        """Return the probabilities of the best 100 labels of each text, a CSR matrix (N, L).

        Of a model that could not learn probabilities, its scores within 0 and 1.
        """
        check_is_fitted(self)
        found = self._ranked(X, EVALUATED)
        matrix = found.to_csr()
        probabilities = self.model_.probabilities
        if probabilities is not None:
            matrix.data = probabilities.of(matrix.data)
        else:
            matrix.data = np.clip(matrix.data, 0, 1)
        return matrix

    def predict_topk(self, X: Any, k: int = 5) -> list[list[Any]]:  # noqa: N803
        """Return the ``k`` best labels of each text, best first."""
        check_is_fitted(self)
        return [self.classes_[row.ids].tolist() for row in self._ranked(X, k)]

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return P@1: the share of texts whose best label is one of their own."""
        best = self.predict_topk(X, k=1)
        own = _label_sets(y)
        if len(best) != len(own):
            raise DataError(f"{len(best)} texts, but labels of {len(own)}")
        hits = [bool(found) and found[0] in labels for found, labels in zip(best, own, strict=True)]
        return float(np.mean(hits)) if hits else 0.0

    def _ranked(self, given: Any, k: int) -> Predictions:
        return self.model_.predict(_given(given), top_k=k)

    def __sklearn_tags__(self) -> Any:
        """Say that texts go in, and that any number of labels comes out."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.sparse = True
        tags.input_tags.one_d_array = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        tags.target_tags.one_d_labels = False
        tags.non_deterministic = False
        return tags


def _given(texts: Any) -> list[str] | csr_matrix:
    """Return texts as a list, sanitized like the texts of files; or features as a CSR matrix."""
    if isinstance(texts, str):
        raise DataError("a list of texts is needed; wrap the text in a list: [text]")
    if issparse(texts):
        return csr_matrix(texts, dtype=np.float32)
    if isinstance(texts, np.ndarray) and texts.ndim == 2 and texts.dtype.kind in "fiub":
        return csr_matrix(texts.astype(np.float32))
    if isinstance(texts, np.ndarray) and texts.ndim == 2 and texts.shape[1] == 1:
        texts = texts[:, 0]
    listed = list(texts)
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            raise DataError(f"X[{i}] is {type(text).__name__}, not a text")
    clean, _ = sanitize([str(text) for text in listed])
    return clean


def _is_indicator(labels: Any) -> bool:
    return issparse(labels) or (
        isinstance(labels, np.ndarray) and labels.ndim == 2 and labels.dtype.kind in "fiub"
    )


def _labels(y: Any) -> tuple[csr_matrix, NDArray[Any]]:
    """Return labels as a matrix (N, L), and what its columns are."""
    if y is None:
        raise DataError("labels are needed: a list of names for each text, or a matrix (N, L)")
    if _is_indicator(y):
        matrix = csr_matrix(y, dtype=np.float32)
        matrix.eliminate_zeros()
        matrix.data[:] = 1
        matrix.sort_indices()
        return matrix, np.arange(matrix.shape[1])
    sets = _label_sets(y)
    try:
        names = sorted({label for labels in sets for label in labels})
    except TypeError as error:
        raise DataError(f"labels cannot be put in order: {error}; use names alone") from error
    if not names:
        raise DataError("no text has a label")
    column = {name: i for i, name in enumerate(names)}
    rows = [sorted(column[label] for label in labels) for labels in sets]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    indices = np.array([i for row in rows for i in row], dtype=np.int64)
    data = np.ones(len(indices), dtype=np.float32)
    return csr_matrix((data, indices, starts), shape=(len(sets), len(names))), _as_array(names)


def _label_sets(y: Any) -> list[set[Any]]:
    """Return the labels of each text."""
    if _is_indicator(y):
        matrix = csr_matrix(y)
        matrix.eliminate_zeros()
        bounds = zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
        return [set(matrix.indices[start:end].tolist()) for start, end in bounds]
    listed: Sequence[Any] = list(y)
    for i, labels in enumerate(listed):
        if isinstance(labels, str) or not hasattr(labels, "__iter__"):
            raise DataError(f"y[{i}] is {labels!r}; a list of labels is needed: [{labels!r}]")
    return [set(_plain(labels)) for labels in listed]


def _plain(labels: Any) -> list[Any]:
    return [label.item() if isinstance(label, np.generic) else label for label in labels]


def _as_array(names: list[Any]) -> NDArray[Any]:
    """Return names as an array of their own kind, never cut off or converted."""
    array = np.empty(len(names), dtype=object)
    array[:] = names
    return array
