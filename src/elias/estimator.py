"""`EliasClassifier`: a scikit-learn estimator for ELIAS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse
from sklearn.base import BaseEstimator
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.utils.validation import check_is_fitted

from elias.config import EliasConfig
from elias.data.corpus import Corpus, Split
from elias.data.readers.files import sanitize
from elias.errors import DataError, check_strings
from elias.inference.predictor import Elias
from elias.metrics import EVALUATED
from elias.predictions import Predictions
from elias.training.train import train

_SETTINGS = {
    "dim": "encoder.dim",
    "n_clusters": "index.n_clusters",
    "beam_size": "index.beam_size",
    "rerank": "rerank.enabled",
    "members": "ensemble.members",
    "validation_size": "eval.validation_size",
    "random_state": "seed",
}
"""Configuration keys, by the name of the estimator parameter that sets them."""


class EliasClassifier(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Multi-label classifier for texts with very many labels.

    Args:
        encoder: ``bag`` learns a vector for each word and n-gram. ``minilm``, a folder or the name
            of a model on the Hugging Face hub selects a transformer, as ``elias train --encoder``
            does.
        epochs: Maximum number of epochs of each stage. None uses the value of the preset, or the
            default of the encoder.
        dim: Embedding dimension of the ``bag`` encoder.
        n_clusters: C, the number of label clusters. None chooses it from the size of the data.
        beam_size: b, the number of clusters searched for each text. None chooses it from the size
            of the data.
        rerank: Whether to train the sparse ranker. None decides by the size of the data.
        members: Number of models in the ensemble, whose scores are averaged.
        validation_size: Number of training points to hold out for choosing the best epoch,
            calibration and thresholds. None chooses it from the size of the data; 0 holds out none.
        threshold: Decision rule of `predict`: a probability, ``"f1"``, ``"precision=0.8"`` or
            ``"recall=0.6"``. If the model has no probabilities, a number is compared with the
            scores, and the other rules predict the best label.
        preset: Name of a preset. ``elias presets`` lists them.
        settings: Additional configuration keys, such as ``{"index.alpha": 20}``. They override the
            other parameters.
        device: ``auto``, ``cpu`` or ``cuda``. ``auto`` uses a GPU if there is one.
        random_state: Random seed.

    Attributes:
        classes_: The labels, in the order of the columns that `predict` returns.
        model_: The trained `Elias` model, for example to call ``model_.explain``.

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
        """Train on labelled texts or feature vectors.

        Args:
            X: N texts as a list, array, Series or frame of one column, or an (N, D) feature
                matrix, dense or sparse.
            y: A list of labels for each text, or an (N, L) matrix of zeros and ones, dense or
                sparse, or a frame of zeros and ones whose columns are the labels. Labels are names
                or other hashable values that can be sorted.
        """
        inputs = _inputs(X)
        labels, classes = _label_matrix(y)
        texts, features = (inputs, None) if isinstance(inputs, list) else (None, inputs)
        n_points = len(inputs) if isinstance(inputs, list) else inputs.shape[0]
        _check_lengths(n_points, labels.shape[0])
        corpus = Corpus(
            train=Split(labels=labels, texts=texts, features=features),
            label_names=[str(name) for name in classes],
        )
        self.model_ = train(corpus, self.config(), device=self.device)
        self.classes_ = classes
        return self

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        classes: Iterable[Any] | None = None,
    ) -> EliasClassifier:
        """Add new labels, with their texts as examples, without training again.

        The first call is the same as `fit`. Later calls do not change known labels. They use texts
        only as examples of new labels (`Elias.add_labels`).

        Args:
            X: Texts, as for `fit`.
            y: The known and new labels of each text, as for `fit`.
            classes: All labels. Labels without texts are added by their names alone.
        """
        if not hasattr(self, "model_"):
            self.fit(X, y)
            X, y = [], []  # noqa: N806
        texts, sets = _inputs(X), _label_sets(y)
        if not isinstance(texts, list):
            raise DataError("partial_fit needs texts, but X has features; give X as texts")
        _check_lengths(len(texts), len(sets))
        if isinstance(classes, str):
            raise DataError(f"classes is {classes!r}; give a list of labels: [{classes!r}]")
        known = set(self.classes_.tolist())
        every = _sorted_labels(known.union(*sets, [] if classes is None else classes))
        new = [label for label in every if label not in known]
        if not new:
            return self
        examples = {
            str(label): [text for text, labels in zip(texts, sets, strict=True) if label in labels]
            for label in new
        }
        self.model_ = self.model_.add_labels(list(examples), examples)
        self.classes_ = np.array([*self.classes_, *new], dtype=object)
        return self

    def config(self) -> EliasConfig:
        """Return the configuration that results from the estimator's parameters."""
        start = EliasConfig() if self.preset is None else EliasConfig.preset(self.preset)
        defaults = EliasClassifier().get_params()
        changes: dict[str, Any] = {}
        if self.encoder != "bag":
            start = start.with_encoder(self.encoder)
        for name, key in _SETTINGS.items():
            value = getattr(self, name)
            # a parameter left at its default does not override the preset
            if value is not None and (self.preset is None or value != defaults[name]):
                changes[key] = value
        if self.epochs is not None:
            changes |= {f"stages.{stage.name}.epochs": self.epochs for stage in start.stages}
        return start.override(changes | dict(self.settings or {}))

    def predict(self, X: Any) -> csr_matrix:  # noqa: N803
        """Return the predicted labels as an (N, L) 0/1 matrix, with ``classes_`` as columns."""
        check_is_fitted(self)
        if self.model_.probabilities is None and isinstance(self.threshold, str):
            predictions = self._predict(X, 1)
        else:
            predictions = self.model_.assign(self._predict(X, EVALUATED), self.threshold)
        matrix = predictions.to_csr()
        matrix.data = np.ones(len(matrix.data), dtype=np.int8)
        return matrix

    def predict_proba(self, X: Any) -> csr_matrix:  # noqa: N803
        """Return the probabilities of the best 100 labels of each text as an (N, L) CSR matrix.

        If the model has no probabilities, return its scores, clipped to [0, 1].
        """
        check_is_fitted(self)
        matrix = self._predict(X, EVALUATED).to_csr()
        learned = self.model_.probabilities
        matrix.data = np.clip(matrix.data, 0, 1) if learned is None else learned.of(matrix.data)
        return matrix

    def predict_topk(self, X: Any, k: int = 5) -> list[list[Any]]:  # noqa: N803
        """Return the ``k`` best labels of each text, best first."""
        check_is_fitted(self)
        return [self.classes_[row.ids].tolist() for row in self._predict(X, k)]

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Return P@1: the share of texts whose best predicted label is correct."""
        best = self.predict_topk(X, k=1)
        truth = _label_sets(y)
        _check_lengths(len(best), len(truth))
        hits = [bool(top) and top[0] in labels for top, labels in zip(best, truth, strict=True)]
        return float(np.mean(hits)) if hits else 0.0

    def _predict(self, inputs: Any, k: int) -> Predictions:
        return self.model_.predict(_inputs(inputs), top_k=k)

    def __sklearn_tags__(self) -> Any:
        """Return the scikit-learn tags of a multi-label text classifier."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.sparse = True
        tags.input_tags.one_d_array = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        tags.target_tags.one_d_labels = False
        tags.non_deterministic = False
        return tags


def _check_lengths(n_texts: int, n_label_lists: int) -> None:
    if n_texts != n_label_lists:
        raise DataError(
            f"X has {n_texts} texts, but y has labels for {n_label_lists}; give one list of labels "
            "for each text"
        )


def _inputs(texts: Any) -> list[str] | csr_matrix:
    """Return the input as a list of sanitized texts or as a CSR feature matrix."""
    if isinstance(texts, str):
        raise DataError("X is a single text; put it in a list: [text]")
    if _is_matrix(texts):
        return csr_matrix(texts, dtype=np.float32)
    if getattr(texts, "ndim", 1) == 2:  # an array or a data frame
        values = texts.to_numpy() if hasattr(texts, "to_numpy") else texts
        if _is_matrix(values):
            return csr_matrix(values, dtype=np.float32)
        if values.shape[1] != 1:
            columns = ", ".join(map(repr, getattr(texts, "columns", range(values.shape[1]))))
            raise DataError(f"X has {values.shape[1]} columns ({columns}); choose one text column")
        texts = values[:, 0]
    texts = list(texts)
    check_strings("X", texts)
    return sanitize(list(map(str, texts)))[0]  # as for texts read from files


def _is_matrix(values: Any) -> bool:
    """Return whether ``values`` is a numeric matrix, dense or sparse."""
    return issparse(values) or (
        isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.kind in "fiub"
    )


def _label_matrix(y: Any) -> tuple[csr_matrix, NDArray[Any]]:
    """Return the labels as an (N, L) matrix, and the label of each column."""
    if y is None:
        raise DataError("y is missing; give a list of labels for each text, or an (N, L) matrix")
    values = y.to_numpy() if hasattr(y, "columns") else y
    if _is_matrix(values):
        matrix = csr_matrix(values, dtype=np.float32, copy=True)
        matrix.eliminate_zeros()
        matrix.data[:] = 1
        matrix.sort_indices()
        return matrix, np.array(getattr(y, "columns", range(matrix.shape[1])))
    sets = _label_sets(y)
    binarizer = MultiLabelBinarizer(sparse_output=True)
    _sorted_labels(set().union(*sets))  # raises an error if they cannot be sorted
    matrix = csr_matrix(binarizer.fit_transform(sets), dtype=np.float32)
    if not matrix.nnz:
        raise DataError("no text has a label; check y")
    matrix.sort_indices()
    return matrix, binarizer.classes_


def _sorted_labels(labels: set[Any]) -> list[Any]:
    try:
        return sorted(labels)
    except TypeError as error:
        raise DataError(f"labels cannot be sorted ({error}); use strings only") from error


def _label_sets(y: Any) -> list[set[Any]]:
    """Return the set of labels of each text."""
    values = y.to_numpy() if hasattr(y, "columns") else y
    if _is_matrix(values):
        matrix, classes = _label_matrix(y)
        return [set(classes[row.indices].tolist()) for row in matrix]
    if getattr(values, "ndim", 1) == 2 and values.shape[1] == 1:  # one column of lists
        values = values[:, 0]
    rows: Sequence[Any] = list(values)
    for i, labels in enumerate(rows):
        if isinstance(labels, str) or not hasattr(labels, "__iter__"):
            raise DataError(f"y[{i}] is {labels!r}; give a list of labels: [{labels!r}]")
    return [
        {label.item() if isinstance(label, np.generic) else label for label in labels}
        for labels in rows
    ]
