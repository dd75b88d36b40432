"""Ranking metrics at any k: P, nDCG, their propensity-scored forms PSP and PSnDCG, and recall R.

`f1_metrics` measures labels assigned by a threshold.

Each metric is a ratio of two sums over points. Points are processed in chunks to limit memory use.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import sparse

from elias.config.schema import PROPENSITY
from elias.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.config import EvalConfig
    from elias.data.corpus import Corpus, Split
    from elias.predictions import Predictions

    Array = NDArray[np.float64]

logger = logging.getLogger(__name__)

Empty = Literal["zero", "drop"]

KS = (1, 3, 5)
"""Default values of k for all metrics except R."""
RECALL_KS = (10, 20, 100)
"""Default values of k for R."""
REPORTED = [
    *(f"{name}@{k}" for name in ("P", "nDCG", "PSP") for k in KS),
    *(f"R@{k}" for k in RECALL_KS),
]
"""Names of the metrics in the reports of training and experiments."""
EVALUATED = 100  # number of labels ranked for metrics, enough for R@100
SLOTS_PER_CHUNK = 4_000_000  # predicted labels compared at a time


class Metrics(dict[str, float]):
    """A dictionary from metric names, such as ``"PSP@3"``, to values in percent.

    >>> print(Metrics({"P@1": 71.0, "P@5": 40.93, "micro-recall": 52.5, "micro-F1": 50.1}))
    P       @1    71.00   @5    40.93
    micro   recall 52.50   F1 50.10
    """

    def __str__(self) -> str:
        """Return a table with one line for each kind of metric."""
        lines: dict[str, list[str]] = {}
        for name, value in self.items():
            kind, _, k = name.partition("@")
            average, _, rest = name.partition("-")  # such as micro-F1
            cell = f"{rest} {value:.2f}" if rest else f"@{k:<4}{value:6.2f}"
            lines.setdefault(average if rest else kind, []).append(cell)
        width = max(map(len, lines), default=0)
        return "\n".join(f"{kind:<{width}}   {'   '.join(row)}" for kind, row in lines.items())


def evaluate(
    predictions: Predictions,
    corpus: Corpus,
    *,
    split: str = "test",
    ks: Sequence[int] = KS,
    recall_ks: Sequence[int] = RECALL_KS,
    a: float = PROPENSITY[0],
    b: float = PROPENSITY[1],
    empty: Empty = "zero",
) -> Metrics:
    """Compute metrics of the predictions for a split of the corpus.

    Args:
        predictions: One row for each point of the split.
        corpus: The corpus that provides true labels, filters and training frequencies.
        split: Name of the split that the predictions are for.
        ks: Values of k for P, nDCG, PSP and PSnDCG.
        recall_ks: Values of k for R.
        a: Constant A of the propensity model.
        b: Constant B of the propensity model.
        empty: Treatment of points without true labels in P and nDCG. ``zero`` counts them as 0;
            ``drop`` leaves them out.

    Example:
        Predict the five most frequent labels for every text:

        >>> import numpy as np
        >>> from elias import evaluate
        >>> from elias.data.synthetic import synthetic_corpus
        >>> from elias.predictions import Predictions
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> frequencies = corpus.label_frequencies()
        >>> most = np.argsort(-frequencies, kind="stable")[:5]
        >>> shape = (len(corpus.test), 5)
        >>> predictions = Predictions.from_scores(
        ...     np.broadcast_to(most, shape), np.broadcast_to(frequencies[most], shape), n_labels=30
        ... )
        >>> print(evaluate(predictions, corpus, recall_ks=[5]))
        P        @1    48.00   @3    35.11   @5    27.47
        nDCG     @1    48.00   @3    42.78   @5    46.65
        PSP      @1    30.85   @3    32.60   @5    39.00
        PSnDCG   @1    30.85   @3    31.78   @5    36.04
        R        @5    50.76
    """
    points = corpus.split(split)
    _check_shapes(predictions, points.labels)
    if points.filters is not None:
        predictions = predictions.drop(points.filters)
    weights = inverse_propensities(corpus.label_frequencies(), len(corpus.train), a, b)
    names = [f"{kind}@{k}" for kind in ("P", "nDCG", "PSP", "PSnDCG") for k in ks]
    names += [f"R@{k}" for k in recall_ks]
    return score(predictions, points.labels, weights, names, empty=empty)


def inverse_propensities(
    frequencies: NDArray[np.int64],
    n_points: int,
    a: float = PROPENSITY[0],
    b: float = PROPENSITY[1],
) -> Array:
    """Return the weight of each label, which is larger for rare labels.

    w_ℓ = 1 + C·(n_ℓ + B)^(-A), where C = (ln N - 1)·(B + 1)^A.
    """
    # if N < e, C would be negative, and rare labels would have lower weights than frequent ones
    c = max(np.log(max(n_points, 1)) - 1, 0) * (b + 1) ** a
    weights: Array = 1 + c * (frequencies.astype(np.float64) + b) ** -a
    return weights


def score(
    predictions: Predictions,
    truth: sparse.csr_matrix,
    inverse_propensity: Array | None,
    names: Sequence[str],
    *,
    empty: Empty = "zero",
) -> Metrics:
    """Compute the named metrics in percent.

    Args:
        predictions: One row for each point. A missing prediction counts as a miss.
        truth: (n, L) true labels.
        inverse_propensity: (L,) label weights, required for PSP and PSnDCG.
        names: Names such as ``"P@7"``: P, nDCG, PSP, PSnDCG or R at any k.
        empty: Treatment of points without true labels in P and nDCG. ``zero`` counts them as 0;
            ``drop`` leaves them out.
    """
    wanted = [_parse(name) for name in names]
    _check_shapes(predictions, truth)
    width = max((k for _, k in wanted), default=1)
    if (n_predicted := predictions.ids.shape[1]) < min(width, predictions.n_labels):
        logger.warning(
            "points have at most %d predicted labels; missing ranks up to %d count as misses",
            n_predicted,
            width,
        )
    best_width = max((k for kind, k in wanted if kind.startswith("PS")), default=0)
    assert inverse_propensity is not None or not best_width, "PSP and PSnDCG need propensities"
    weights = np.ones(predictions.n_labels) if inverse_propensity is None else inverse_propensity
    totals = np.zeros((len(wanted), 2))
    for chunk in _chunks(predictions, truth, width, empty):
        gains = _Gains(chunk, weights, width, best_width)
        totals += np.array([KINDS[kind](gains, k) for kind, k in wanted])
    sums, limits = totals.T
    values = np.divide(sums, limits, out=np.zeros(len(wanted)), where=limits > 0)
    return Metrics(zip(names, (100 * values).tolist(), strict=True))


def label_deciles(frequencies: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each label's frequency decile (L,): 0 for the most frequent labels, 9 for the rarest.

    >>> label_deciles(np.array([1, 9, 5]))
    array([6, 0, 3])
    """
    n_labels = len(frequencies)
    decile = np.empty(n_labels, dtype=np.int64)
    decile[np.argsort(-frequencies, kind="stable")] = np.arange(n_labels) * 10 // n_labels
    return decile


def recall_by_decile(
    predictions: Predictions, truth: sparse.csr_matrix, frequencies: NDArray[np.int64], k: int
) -> Array:
    """Return the contribution of each label decile to R@k in percent (10,), see Fig. 5.

    The first decile has the most frequent labels. The contributions add up to R@k.
    """
    _check_shapes(predictions, truth)
    decile = label_deciles(frequencies)
    contribution = np.zeros(10)
    n_points = 0
    for chunk in _chunks(predictions, truth, k, "drop"):
        rows, columns = np.nonzero(chunk.hits)
        share = 1 / chunk.n_true[rows]
        contribution += np.bincount(decile[chunk.ids[rows, columns]], share, minlength=10)
        n_points += len(chunk.n_true)
    return 100 * contribution / max(n_points, 1)


def per_label(
    predictions: Predictions,
    truth: sparse.csr_matrix,
    frequencies: NDArray[np.int64] | None,
    k: int = 5,
    assigned: Predictions | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a dictionary of counts, precision and recall for each label.

    A value is None if it is unknown, or if its denominator is zero.

    Args:
        predictions: One row for each point.
        truth: (n, L) true labels.
        frequencies: (L,) number of training points of each label, or None if unknown.
        k: Number of top predictions of each point to count.
        assigned: The predictions above a threshold. If given, their precision, recall and F1 are
            added.
    """
    n_labels = predictions.n_labels
    counts = _label_counts(predictions, truth, k)
    n_train = [None] * n_labels if frequencies is None else frequencies.tolist()
    at_threshold = counts[1:] if assigned is None else _label_counts(assigned, truth)[1:]
    columns = zip(n_train, *counts.tolist(), *at_threshold.tolist(), strict=True)
    for label_id, (train, test, predicted, hits, n_assigned, n_right) in enumerate(columns):
        row = {
            "id": label_id,
            "label": predictions.name(label_id),
            "train_count": train,
            "test_count": test,
            f"predicted@{k}": predicted,
            f"hits@{k}": hits,
            f"precision@{k}": hits / predicted if predicted else None,
            f"recall@{k}": hits / test if test else None,
        }
        if assigned is not None:
            row |= {
                "assigned": n_assigned,
                "hits": n_right,
                "precision": n_right / n_assigned if n_assigned else None,
                "recall": n_right / test if test else None,
                "f1": 2 * n_right / (n_assigned + test) if n_assigned + test else None,
            }
        yield row


def f1_metrics(assigned: Predictions, truth: sparse.csr_matrix) -> dict[str, float]:
    """Return micro- and macro-averaged precision, recall and F1 in percent.

    Micro averages count all (point, label) pairs together. Macro averages are the mean over the
    labels that are true or assigned for at least one point. A division by zero counts as 0, as in
    scikit-learn.

    Args:
        assigned: The labels assigned to each point, such as ``predictions.threshold(0.3)``.
        truth: (n, L) true labels.

    >>> from elias.predictions import Predictions
    >>> predictions = Predictions.from_scores([[0, 1], [1, 0]], [[0.9, 0.4], [0.8, 0.1]], 2)
    >>> metrics = f1_metrics(predictions.threshold(0.3), sparse.csr_matrix([[1, 0], [1, 1]]))
    >>> round(metrics["micro-recall"], 1)
    66.7
    """
    counts = _label_counts(assigned, truth)
    occurring = counts[:, counts[:2].any(axis=0)]
    metrics = {}
    for kind, kind_counts in ("micro", counts.sum(axis=1, keepdims=True)), ("macro", occurring):
        n_true, n_assigned, hits = kind_counts
        ratios = {
            "precision": hits / np.maximum(n_assigned, 1),
            "recall": hits / np.maximum(n_true, 1),
            "F1": 2 * hits / np.maximum(n_true + n_assigned, 1),
        }
        for name, ratio in ratios.items():
            metrics[f"{kind}-{name}"] = 100 * float(ratio.mean()) if ratio.size else 0.0
    return metrics


def metrics_by_points(
    predictions: Predictions,
    truth: sparse.csr_matrix,
    groups: Sequence[str],
    ks: Sequence[int] = (1, 5),
    assigned: Predictions | None = None,
) -> list[dict[str, Any]]:
    """Return the metrics of each group of points. The group with the lowest nDCG is first.

    Args:
        predictions: One row for each point.
        truth: (n, L) true labels.
        groups: (n,) name of the group of each point.
        ks: Values of k for P and nDCG.
        assigned: The predictions above a threshold. If given, their micro-averaged F1 is added.
    """
    _check_shapes(predictions, truth)
    names, codes = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))
    wanted = [f"{kind}@{k}" for kind in ("P", "nDCG") for k in ks]
    results = []
    for name, points in zip(names.tolist(), np.split(order, ends[:-1]), strict=True):
        group_truth = truth[points]
        row: dict[str, Any] = {"group": name, "points": len(points)}
        row |= score(predictions.take(points), group_truth, None, wanted)
        if assigned is not None:
            row["F1"] = f1_metrics(assigned.take(points), group_truth)["micro-F1"]
        results.append(row)
    return sorted(results, key=lambda row: (row[wanted[-1]], row["group"]))


MIN_GROUP = 10
"""Minimum number of points, or of true (point, label) pairs, in a group listed as weak."""


def large_groups(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the groups with at least `MIN_GROUP` points or true pairs.

    If all groups are smaller, return all of them.
    """
    return [row for row in rows if row.get("points", row.get("pairs", 0)) >= MIN_GROUP] or rows


def metrics_by_labels(
    predictions: Predictions,
    truth: sparse.csr_matrix,
    groups: Mapping[str, Sequence[int]],
    k: int = 5,
    assigned: Predictions | None = None,
) -> list[dict[str, Any]]:
    """Return the metrics of each group of labels. The group with the lowest R@k is first.

    ``pairs`` is the number of true (point, label) pairs of a group. R@k is the share of these pairs
    that are among the best k predictions. Groups without a true pair are left out.

    Args:
        predictions: One row for each point.
        truth: (n, L) true labels.
        groups: Label ids of each group, by name. A label may be in several groups.
        k: Number of top predictions of each point to count.
        assigned: The predictions above a threshold. If given, their micro-averaged precision,
            recall and F1 are added.
    """
    ranked = _label_counts(predictions, truth, k)
    at_threshold = None if assigned is None else _label_counts(assigned, truth)
    results = []
    for name, labels in groups.items():
        n_true, _, hits = ranked[:, labels].sum(axis=1).tolist()
        if not n_true:
            continue
        row = {"group": name, "labels": len(labels), "pairs": n_true, f"R@{k}": 100 * hits / n_true}
        if at_threshold is not None:
            _, n_assigned, right = at_threshold[:, labels].sum(axis=1).tolist()
            row |= {
                "precision": 100 * right / max(n_assigned, 1),
                "recall": 100 * right / n_true,
                "F1": 200 * right / (n_assigned + n_true),
            }
        results.append(row)
    return sorted(results, key=lambda row: (row[f"R@{k}"], row["group"]))


FREQUENCY_BINS = {"0": 0, "1": 1, "2 to 5": 5, "6 to 20": 20, "21 to 100": 100}
"""Name of each frequency group, and the maximum number of training points of its labels."""


def frequency_groups(frequencies: NDArray[np.int64]) -> dict[str, list[int]]:
    """Group labels by their number of training points. Return the label ids of each group.

    >>> frequency_groups(np.array([0, 3, 4000]))
    {'0': [0], '2 to 5': [1], 'over 100': [2]}
    """
    names = [*FREQUENCY_BINS, f"over {max(FREQUENCY_BINS.values())}"]
    codes = np.searchsorted(list(FREQUENCY_BINS.values()), frequencies)
    groups = {name: np.flatnonzero(codes == code).tolist() for code, name in enumerate(names)}
    return {name: labels for name, labels in groups.items() if labels}


def hierarchy_metrics(
    predictions: Predictions,
    truth: sparse.csr_matrix,
    broader: sparse.csr_matrix,
    ks: Sequence[int] = KS,
) -> Metrics:
    """Return precision, recall and F1 at k, with credit for predicting a broader or narrower label.

    The predicted and the true labels of each point are extended by all labels that are broader than
    one of them. hP is the share of the extended predictions that are in the extended true labels.
    hR is the share of the extended true labels that are in the extended predictions. Both count the
    pairs of all points together. hF is the harmonic mean of hP and hR (Kiritchenko et al. 2006).
    ``near`` is the share of wrong predictions that are directly broader or narrower than a true
    label. All values are in percent.

    Args:
        predictions: One row for each point.
        truth: (n, L) true labels.
        broader: (L, L) matrix with entry (i, j) if label j is broader than label i, see
            `LabelTable.broader_matrix`.
        ks: Values of k.

    >>> from elias.predictions import Predictions
    >>> broader = sparse.csr_matrix([[0, 0, 0], [1, 0, 0], [1, 0, 0]])  # 1 and 2 are kinds of 0
    >>> predictions = Predictions.from_scores([[2]], [[0.9]], n_labels=3)
    >>> metrics = hierarchy_metrics(predictions, sparse.csr_matrix([[0, 1, 0]]), broader, ks=[1])
    >>> metrics["hP@1"], metrics["near@1"]
    (50.0, 0.0)
    """
    _check_shapes(predictions, truth)
    n_labels = predictions.n_labels
    steps = sparse.csr_matrix(broader, dtype=bool)
    closure = sparse.identity(n_labels, dtype=bool, format="csr") + steps
    while (wider := closure @ closure).nnz > closure.nnz:
        closure = wider
    true = sparse.csr_matrix(truth, dtype=bool)
    true_extended, near_true = true @ closure, true @ (steps + steps.T)
    values = {}
    for k in ks:
        scores = predictions.top(k).to_csr()
        scores.data[:] = 1  # a score may be 0
        predicted = scores.astype(bool)
        extended = predicted @ closure
        shared = extended.multiply(true_extended).nnz
        wrong = predicted > predicted.multiply(true)
        n_predicted, n_true = extended.nnz, true_extended.nnz
        values["hP", k] = shared / max(n_predicted, 1)
        values["hR", k] = shared / max(n_true, 1)
        values["hF", k] = 2 * shared / max(n_predicted + n_true, 1)
        values["near", k] = wrong.multiply(near_true).nnz / max(wrong.nnz, 1)
    names = ((kind, k) for kind in ("hP", "hR", "hF", "near") for k in ks)
    return Metrics({f"{kind}@{k}": 100 * values[kind, k] for kind, k in names})


def _label_counts(
    predictions: Predictions, truth: sparse.csr_matrix, k: int | None = None
) -> NDArray[np.int64]:
    """Return the number of true, predicted and correctly predicted points of each label (3, L)."""
    _check_shapes(predictions, truth)
    n_labels = predictions.n_labels
    counts = np.zeros((3, n_labels + 1), dtype=np.int64)  # the last column counts padding
    for chunk in _chunks(predictions, truth, k or predictions.ids.shape[1], "zero"):
        for row, ids in enumerate((chunk.true_ids, chunk.ids.ravel(), chunk.ids[chunk.hits])):
            counts[row] += np.bincount(ids, minlength=n_labels + 1)
    return counts[:, :-1]


class _Chunk:
    """A chunk of points: their top predictions, the hits among them, and their true labels."""

    def __init__(self, ids: NDArray[np.int64], truth: sparse.csr_matrix) -> None:
        self.ids = ids
        self.n_true = np.diff(truth.indptr).astype(np.int64)
        self.true_rows = np.repeat(np.arange(len(ids)), self.n_true)
        self.true_ids = truth.indices.astype(np.int64)
        # look up each predicted (point, label) pair in the sorted true pairs by binary search
        width = truth.shape[1] + 1  # ids range from 0 to n_labels, which is padding
        true_keys = self.true_rows * width + self.true_ids
        keys = np.arange(len(ids))[:, None] * width + ids
        self.hits = np.append(true_keys, -1)[np.searchsorted(true_keys, keys)] == keys


def _chunks(
    predictions: Predictions, truth: sparse.csr_matrix, width: int, empty: Empty
) -> Iterator[_Chunk]:
    truth = sparse.csr_matrix(truth)
    if not truth.has_canonical_format:
        truth = truth.copy()
        truth.sum_duplicates()
    if empty == "drop":
        rows = np.flatnonzero(np.diff(truth.indptr))
        if len(rows) < len(predictions):
            predictions, truth = predictions.take(rows), truth[rows]
    ids = predictions.ids[:, :width]
    step = max(1, SLOTS_PER_CHUNK // max(ids.shape[1], 1))
    for start in range(0, len(ids), step):
        yield _Chunk(ids[start : start + step], truth[start : start + step])


class _Gains:
    """Gains of a chunk of points, from which all metrics are computed.

    r is the rank of a prediction, and w the inverse propensity of a label.
    """

    def __init__(self, chunk: _Chunk, weights: Array, width: int, best_width: int) -> None:
        self.n_true = chunk.n_true
        self.hits = chunk.hits.astype(np.float64)  # (R, k) for the largest k
        self.weighted = self.hits * np.append(weights, 0.0)[chunk.ids]
        # the largest w among the true labels Y_i of each point, descending, padded with zeros
        values, rows, n_true = weights[chunk.true_ids], chunk.true_rows, chunk.n_true
        column = np.arange(len(values)) - np.repeat(n_true.cumsum() - n_true, n_true)
        mask = column < best_width
        self.best = np.zeros((len(n_true), best_width))
        self.best[rows[mask], column[mask]] = values[np.lexsort((-values, rows))][mask]
        self.discounts = 1 / np.log2(np.arange(2, width + 2))  # 1/log2(r + 1)
        self._ideal = np.append(0.0, self.discounts.cumsum())

    def discounted(self, gains: Array, k: int) -> Array:
        """Return the discounted gain of each point (R,), divided by that of a perfect ranking.

        The gain at rank r is divided by log2(r + 1). A perfect ranking has gains of 1 for the first
        min(k, |Y_i|) ranks.
        """
        ideal = self._ideal[np.minimum(k, self.n_true)]
        sums: Array = gains[:, :k] @ self.discounts[: gains[:, :k].shape[1]]
        shares: Array = np.divide(sums, ideal, out=np.zeros_like(sums), where=ideal > 0)
        return shares


KINDS: dict[str, Callable[[_Gains, int], tuple[float, float]]] = {
    "P": lambda g, k: (g.hits[:, :k].sum() / k, len(g.hits)),
    "nDCG": lambda g, k: (g.discounted(g.hits, k).sum(), len(g.hits)),
    "PSP": lambda g, k: (g.weighted[:, :k].sum(), g.best[:, :k].sum()),
    "PSnDCG": lambda g, k: (g.discounted(g.weighted, k).sum(), g.discounted(g.best, k).sum()),
    "R": lambda g, k: (
        (g.hits[:, :k].sum(axis=1) / np.maximum(g.n_true, 1)).sum(),
        int(np.count_nonzero(g.n_true)),
    ),
}
"""Functions that return the numerator and the denominator of each kind of metric at k."""


def metric_names(names: Iterable[str]) -> list[str]:
    """Return metric names after checking that `score` can compute them.

    Raises:
        ConfigError: If a metric is unknown.
    """
    return [f"{kind}@{k}" for kind, k in map(_parse, names)]


def _parse(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z]+)@([1-9][0-9]*)", name)
    if match is None or match[1] not in KINDS:
        kinds = ", ".join(f"{kind}@k" for kind in KINDS)
        raise ConfigError(f"unknown metric {name!r}; use one of {kinds}")
    return match[1], int(match[2])


def _check_shapes(predictions: Predictions, truth: sparse.csr_matrix) -> None:
    if truth.shape != (len(predictions), predictions.n_labels):
        n_points, n_labels = truth.shape
        raise DataError(
            f"predictions have {len(predictions)} points and {predictions.n_labels} labels, but "
            f"true labels have {n_points} points and {n_labels} labels; they must be the same"
        )
    if len(predictions) == 0:
        raise DataError("there are no points to evaluate; give at least one")


def depends_on_ranking(name: str, n_labels: int) -> bool:
    """Return whether the metric can differ between two rankings of all ``n_labels`` labels.

    >>> [depends_on_ranking(name, 3) for name in ("P@1", "P@3", "nDCG@5", "R@100")]
    [True, False, True, False]
    """
    kind, k = _parse(name)
    return k < n_labels or kind.endswith("nDCG")


def measure(
    settings: EvalConfig, predictions: Predictions, split: Split, corpus: Corpus, names: list[str]
) -> dict[str, float]:
    """Compute metrics in percent with the propensity constants of the configuration."""
    constants = settings.propensity
    weights = inverse_propensities(corpus.label_frequencies(), len(corpus.train), *constants)
    measured = score(predictions, split.labels, weights, names)
    return {name: round(value, 4) for name, value in measured.items()}


def rounded(timings: Mapping[str, float]) -> dict[str, float]:
    """Return timings rounded to 0.01 s, for the metadata of a model."""
    return {name: round(value, 2) for name, value in timings.items()}
