"""Classes for ranked labels: `Predictions`, `Ranking` and `Candidates`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elias.errors import DataError
from elias.labels import LabelTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray
    from scipy import sparse


PADDING_SCORE = -np.inf


@dataclass(frozen=True, slots=True)
class Ranking:
    """The labels predicted for one point, best first, without padding."""

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    labels: list[str]
    """Names of the labels, or their ids as strings if there are no names."""
    probabilities: NDArray[np.float32] | None = None
    """Probability that each label is relevant, or None if the model has no probabilities."""

    def __len__(self) -> int:
        """Return the number of labels."""
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The labels that the search proposes for n points, at most k for each, best first.

    They are the input of the reranker. A row with fewer than k labels is padded with id L and
    score -inf.
    """

    ids: NDArray[np.int64]
    """(n, k) label ids."""
    scores: NDArray[np.float32]
    """(n, k) score p of each label."""
    embedding: NDArray[np.float32] | None = None
    """(n, D) embeddings φ(x) if the ranker or added labels use them, else None."""

    def take(
        self, rows: NDArray[np.bool_] | slice = slice(None), k: int | None = None
    ) -> Candidates:
        """Return the best ``k`` candidates of some points, given by a mask or a slice."""
        embedding = None if self.embedding is None else self.embedding[rows]
        return Candidates(self.ids[rows, :k], self.scores[rows, :k], embedding)


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Ranked labels for n points, at most k for each.

    Each row is sorted by descending score; ties are sorted by label id. A row with fewer than k
    labels is padded with id ``n_labels`` and score -inf.

    >>> predictions = Predictions.from_scores([[3, 0]], [[0.2, 0.9]], n_labels=4)
    >>> predictions[0].ids.tolist()
    [0, 3]
    """

    ids: NDArray[np.int64]
    """(n, k) label ids."""
    scores: NDArray[np.float32]
    """(n, k) scores."""
    n_labels: int
    """L, the number of labels. It is also the id of padding."""
    label_names: Sequence[str] | None = None
    """Names of the L labels (a `LabelTable` if they have ids), or None if they have no names."""
    probabilities: NDArray[np.float32] | None = None
    """(n, k) probability that each label is relevant, or None. Each row is descending."""

    def __post_init__(self) -> None:
        """Check that the shapes of the arrays are consistent."""
        if self.ids.ndim != 2 or self.ids.shape != self.scores.shape:
            raise DataError(
                f"predictions: ids {self.ids.shape} and scores {self.scores.shape} must be two "
                "arrays of the same shape (points, labels per point)"
            )
        if self.probabilities is not None and self.probabilities.shape != self.ids.shape:
            raise DataError(
                f"predictions: ids have shape {self.ids.shape}, but probabilities have shape "
                f"{self.probabilities.shape}; give one probability for each id"
            )
        if self.label_names is not None and len(self.label_names) != self.n_labels:
            raise DataError(
                f"predictions: {len(self.label_names)} label names for {self.n_labels} labels; "
                "give one name for each label"
            )

    @classmethod
    def from_scores(
        cls,
        ids: ArrayLike,
        scores: ArrayLike,
        n_labels: int,
        label_names: Sequence[str] | None = None,
    ) -> Predictions:
        """Build predictions from label ids and scores in any order. Id ``n_labels`` is padding."""
        id_array = np.asarray(ids, dtype=np.int64)
        score_array = np.asarray(scores, dtype=np.float32)
        unsorted = cls(id_array, score_array, n_labels, label_names)
        _check_values(id_array, score_array, n_labels)
        padded = id_array == n_labels
        order = np.lexsort((id_array, -score_array, padded), axis=-1)
        return replace(
            unsorted,
            ids=np.take_along_axis(id_array, order, axis=1),
            scores=np.take_along_axis(np.where(padded, PADDING_SCORE, score_array), order, axis=1),
        )

    @classmethod
    def from_csr(
        cls,
        matrix: sparse.csr_matrix,
        k: int | None = None,
        label_names: Sequence[str] | None = None,
    ) -> Predictions:
        """Build predictions from the ``k`` largest entries of each row of an (n, L) matrix."""
        from scipy import sparse

        entries = sparse.csr_matrix(matrix).tocoo()  # keeps duplicates, to report them
        return from_entries(entries.row, entries.col, entries.data, entries.shape, k, label_names)

    @classmethod
    def stack(cls, parts: Sequence[Predictions]) -> Predictions:
        """Concatenate predictions for different points, for example of successive batches."""
        first = _common(parts)
        width = max(part.ids.shape[1] for part in parts)
        wide = [part._widen(width) for part in parts]
        known = [part.probabilities for part in wide if part.probabilities is not None]
        return replace(
            first,
            ids=np.concatenate([part.ids for part in wide]),
            scores=np.concatenate([part.scores for part in wide]),
            probabilities=np.concatenate(known) if len(known) == len(wide) else None,
        )

    @classmethod
    def merge(
        cls,
        parts: Sequence[Predictions],
        *,
        how: Literal["mean", "max"] = "mean",
        k: int | None = None,
    ) -> Predictions:
        """Combine the scores of several predictions for the same points.

        Args:
            parts: Predictions of several models.
            how: ``mean`` averages the scores of a label and counts a missing label as 0; ``max``
                takes the highest score.
            k: Maximum number of labels for each point. None keeps all labels.
        """
        first = _common(parts)
        if len({len(part) for part in parts}) > 1:
            sizes = [len(part) for part in parts]
            problem = f"predictions to merge have different numbers of points: {sizes}"
            raise DataError(f"{problem}; merge predictions for the same points")
        ids = np.concatenate([part.ids for part in parts], axis=1)
        rows, columns = np.nonzero(ids < first.n_labels)
        scores = np.concatenate([part.scores for part in parts], axis=1)[rows, columns]
        keys, inverse = np.unique(rows * first.n_labels + ids[rows, columns], return_inverse=True)
        if how == "mean":
            joined = np.bincount(inverse, weights=scores, minlength=len(keys)) / len(parts)
        else:
            joined = np.full(len(keys), -np.inf)
            np.maximum.at(joined, inverse, scores)
        rows, ids = np.divmod(keys, first.n_labels)
        shape = (len(first), first.n_labels)
        return from_entries(rows, ids, joined, shape, k, first.label_names)

    def __repr__(self) -> str:
        """Return a short description with the sizes only."""
        n_points, k = self.ids.shape
        return f"Predictions(n={n_points}, k={k}, n_labels={self.n_labels})"

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Ranking:
        """Return the ranked labels of one point."""
        count = int((self.ids[row] < self.n_labels).sum())
        ids, scores = self.ids[row, :count], self.scores[row, :count]
        names = [self.name(label_id) for label_id in ids.tolist()]
        probabilities = None if self.probabilities is None else self.probabilities[row, :count]
        return Ranking(ids, scores, names, probabilities)

    def __iter__(self) -> Iterator[Ranking]:
        """Yield the ranked labels of each point."""
        return (self[row] for row in range(len(self)))

    def name(self, label_id: int) -> str:
        """Return the name of a label, or its id if there are no names."""
        return str(label_id) if self.label_names is None else self.label_names[label_id]

    @property
    def has_uris(self) -> bool:
        """Return whether the labels have ids in the user's vocabulary."""
        return isinstance(self.label_names, LabelTable) and self.label_names.ids is not None

    def uri(self, label_id: int) -> str | None:
        """Return the id or URI of a label in the user's vocabulary, or None if it has none."""
        names = self.label_names
        return names.id(label_id) if isinstance(names, LabelTable) else None

    def take(self, rows: NDArray[np.int64]) -> Predictions:
        """Return the predictions of the points ``rows``."""
        return self._map(lambda array, _: array[rows])

    def top(self, k: int) -> Predictions:
        """Return the best ``k`` labels of each point."""
        return self._map(lambda array, _: array[:, :k])

    def among(self, label_names: Sequence[str]) -> Predictions:
        """Return the same predictions, but for a longer list of labels.

        ``label_names`` must start with the labels of these predictions.

        >>> Predictions.from_scores([[1]], [[0.9]], n_labels=2).among(["a", "b", "c"])
        Predictions(n=1, k=1, n_labels=3)
        """
        n_labels, width = len(label_names), self.ids.shape[1]
        if n_labels == self.n_labels:
            return replace(self, label_names=label_names)
        ids = np.where(self.ids == self.n_labels, n_labels, self.ids)
        longer = replace(self, ids=ids, n_labels=n_labels, label_names=label_names)
        # if each row ranks all labels, make room for the new labels, too
        return longer._widen(n_labels if width == self.n_labels else width)

    def threshold(
        self,
        lowest: float,
        *,
        keep_best: bool = False,
        by_label: Mapping[int, float] | None = None,
    ) -> Predictions:
        """Keep only labels with a probability of at least ``lowest``.

        If there are no probabilities, compare the scores with ``lowest``. If ``keep_best``, also
        keep the best label of each point. ``by_label`` maps label ids to their own thresholds,
        which replace ``lowest``.

        >>> Predictions.from_scores([[1, 0]], [[0.9, 0.2]], n_labels=2).threshold(0.5)[0].ids
        array([1])
        """
        values = self.scores if self.probabilities is None else self.probabilities
        mask = values >= lowest
        if by_label:
            thresholds = np.full(self.n_labels + 1, lowest)
            thresholds[list(by_label)] = list(by_label.values())
            mask = values >= thresholds[self.ids]
        if keep_best:
            mask[:, :1] = True
        width = 1 + int(np.flatnonzero(mask.any(axis=0)).max(initial=0))
        return self.top(width)._keep(mask[:, :width])

    def best_by(self, weights: Mapping[int, float]) -> Predictions:
        """Keep only the best label of each point, by the product of its score and its weight.

        ``weights`` maps label ids to weights. All other labels have weight 1.

        >>> Predictions.from_scores([[1, 0]], [[0.9, 0.2]], n_labels=2).best_by({0: 5.0})[0].ids
        array([0])
        """
        factors = np.ones(self.n_labels + 1)
        factors[list(weights)] = list(weights.values())
        best = np.argsort(-self.scores * factors[self.ids], axis=1, kind="stable")[:, :1]
        return self._map(lambda array, _: np.take_along_axis(array, best, axis=1))

    def drop(self, pairs: NDArray[np.int64]) -> Predictions:
        """Remove the given (point, label) pairs, an (M, 2) array such as the filters of a split."""
        pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        limits = np.array([len(self), self.n_labels])
        if ((pairs < 0) | (pairs >= limits)).any():
            bad = pairs[((pairs < 0) | (pairs >= limits)).any(axis=1)][0].tolist()
            raise DataError(
                f"filter pair {bad} is out of range for {len(self)} points and {self.n_labels} "
                "labels; check that the filters belong to this split"
            )
        width = self.n_labels + 1  # ids range from 0 to n_labels, which is padding
        keys = np.arange(len(self))[:, None] * width + self.ids
        return self._keep(~np.isin(keys, pairs[:, 0] * width + pairs[:, 1]))

    def to_csr(self) -> sparse.csr_matrix:
        """Return the scores as an (n, L) CSR matrix. Scores of 0 are stored, too."""
        from scipy import sparse

        mask = self.ids < self.n_labels
        ends = np.concatenate([[0], mask.sum(axis=1).cumsum()])
        parts = (self.scores[mask], self.ids[mask], ends)
        matrix = sparse.csr_matrix(parts, shape=(len(self), self.n_labels))
        matrix.sort_indices()
        return matrix

    def to_dicts(self) -> list[list[dict[str, Any]]]:
        """Return a list of dictionaries for each point, ready for JSON.

        Each dictionary has the keys ``id``, ``label`` and ``score``, also ``uri`` if the label
        table has ids, and ``probability`` if the predictions have probabilities.
        """
        rankings: list[list[dict[str, Any]]] = []
        scores, probabilities = self.scores.tolist(), self.probabilities
        chances = None if probabilities is None else probabilities.tolist()
        counts = (self.ids < self.n_labels).sum(axis=1).tolist()
        for row, all_ids in enumerate(self.ids.tolist()):
            ids = all_ids[: counts[row]]
            columns = {"id": ids, "label": map(self.name, ids), "score": scores[row]}
            if self.has_uris:
                columns["uri"] = map(self.uri, ids)
            if chances is not None:
                columns["probability"] = chances[row]
            values = zip(*columns.values(), strict=False)
            rankings.append([dict(zip(columns, value, strict=True)) for value in values])
        return rankings

    def _keep(self, mask: NDArray[np.bool_]) -> Predictions:
        """Keep the labels where ``mask`` is True, and move padding to the end of each row."""
        order = np.argsort(~mask | (self.ids == self.n_labels), axis=1, kind="stable")

        def keep(array: NDArray[Any], padding: float) -> NDArray[Any]:
            masked = np.where(mask, array, np.asarray(padding, dtype=array.dtype))
            return np.take_along_axis(masked, order, axis=1)

        return self._map(keep)

    def _map(self, function: Callable[[NDArray[Any], float], NDArray[Any]]) -> Predictions:
        """Return predictions with ``function(array, padding)`` applied to each array."""
        probabilities = self.probabilities
        return replace(
            self,
            ids=function(self.ids, self.n_labels),
            scores=function(self.scores, PADDING_SCORE),
            probabilities=None if probabilities is None else function(probabilities, 0),
        )

    def _widen(self, width: int) -> Predictions:
        """Pad each row to ``width`` labels."""
        shape = ((0, 0), (0, width - self.ids.shape[1]))
        return self._map(lambda array, padding: np.pad(array, shape, constant_values=padding))


def from_entries(
    rows: NDArray[Any],
    ids: NDArray[Any],
    scores: NDArray[Any],
    shape: tuple[int, int],
    k: int | None,
    label_names: Sequence[str] | None,
) -> Predictions:
    """Build predictions from the best ``k`` labels of each point.

    Entry i says that point ``rows[i]`` has label ``ids[i]`` with score ``scores[i]``. Entries may
    be in any order. If ``k`` is None, keep all labels.
    """
    n_points, n_labels = shape
    scores = scores.astype(np.float32)
    order = np.lexsort((ids, -scores, rows))
    rows, ids, scores = rows[order], ids[order], scores[order]
    counts = np.bincount(rows, minlength=n_points)
    column = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    width = int(counts.max(initial=0)) if k is None else k
    mask = column < width
    grid = np.full((n_points, width), n_labels, dtype=np.int64)
    score_grid = np.full((n_points, width), PADDING_SCORE, dtype=np.float32)
    grid[rows[mask], column[mask]] = ids[mask]
    score_grid[rows[mask], column[mask]] = scores[mask]
    _check_values(grid, score_grid, n_labels)
    return Predictions(grid, score_grid, n_labels, label_names)


def _check_values(ids: NDArray[np.int64], scores: NDArray[np.float32], n_labels: int) -> None:
    """Raise `DataError` if an id is outside 0..L, a score is NaN, or a row repeats a label."""
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() > n_labels:
        bad = ids[(ids < 0) | (ids > n_labels)][0]
        problem = f"label id {bad} is outside 0..{n_labels - 1}"
        raise DataError(f"predictions: {problem}; correct it, or use {n_labels} for padding")
    if np.isnan(scores).any():
        row = int(np.isnan(scores).any(axis=1).argmax())
        raise DataError(f"predictions: point {row} has a score of NaN; replace it with a number")
    in_order = np.sort(ids, axis=1)
    repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < n_labels)
    if repeated.any():
        row = int(repeated.any(axis=1).argmax())
        label = in_order[row, 1:][repeated[row]][0]
        problem = f"point {row} has label {label} more than once"
        raise DataError(f"predictions: {problem}; give each label of a point once")


def _common(parts: Sequence[Predictions]) -> Predictions:
    """Return the first predictions. Raise `DataError` if the numbers of labels differ."""
    if not parts:
        raise DataError("no predictions to combine; give at least one")
    sizes = sorted({part.n_labels for part in parts})
    if len(sizes) > 1:
        problem = f"predictions to combine have different numbers of labels: {sizes}"
        raise DataError(f"{problem}; combine predictions for the same labels")
    return parts[0]
