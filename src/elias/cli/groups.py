"""Groups of points or labels that ``elias evaluate --by`` measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import elias
from elias.cli import console
from elias.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


_N_GROUPS = 10
_MIN_SIZE = 10


def find(
    name: str,
    corpus: elias.Corpus,
    split: str,
    model: elias.Elias,
    frequencies: NDArray[np.int64] | None,
) -> list[str] | dict[str, list[int]]:
    """Return the group of each point (a list), or the labels of each group (a dictionary).

    Args:
        name: ``frequency`` for groups of labels by their number of training points; ``broader`` for
            groups of labels with the same broader label; a file of label sets; or a column of the
            table, for groups of points.
        corpus: The corpus, with the label ids of the model.
        split: Name of the split that is evaluated.
        model: The model.
        frequencies: Number of training points of each label, if known.
    """
    from elias.data.load import read_column
    from elias.metrics import frequency_groups

    if name == "frequency":
        if frequencies is None:
            raise DataError(f"{corpus.source}: --by frequency needs the training data of the model")
        return frequency_groups(frequencies)
    if name == "broader":
        check_broader(model)
        narrower = model.label_table.broader_matrix().T.tocsr()
        groups: dict[str, list[int]] = {}
        for label, name in enumerate(model.label_table):
            labels = narrower.indices[narrower.indptr[label] : narrower.indptr[label + 1]]
            if len(labels):
                groups.setdefault(name, []).extend(labels.tolist())
        return groups
    if Path(name).is_file():
        return _label_sets(Path(name), model)
    return read_column(corpus, split, name)


def check_broader(model: elias.Elias) -> None:
    """Raise `DataError` if a model does not know broader labels."""
    if model.label_table.broader is None:
        raise DataError(
            "the model does not know which labels are broader; train it with --label-table and a "
            "vocabulary that has broader labels"
        )


def _label_sets(path: Path, model: elias.Elias) -> dict[str, list[int]]:
    """Read a table of labels (ids or names) and their sets, in its first two columns."""
    from elias.data.load import detect_file
    from elias.data.readers.table import KINDS, column_names, iter_rows

    kind = detect_file(path)
    columns = column_names(path, kind)[:2] if kind in KINDS else []
    if len(columns) < 2:
        raise DataError(f"{path}: give a table with two columns, label and set")
    pairs = [
        [str(cell or "").strip() for cell in cells]
        for _, cells in iter_rows(path, kind, columns, ())
    ]
    matches = model.label_table.match([label for label, _ in pairs])
    sets: dict[str, list[int]] = {}
    for (_, name), label in zip(pairs, matches, strict=True):
        if label is not None:
            sets.setdefault(name, []).append(label)
    if not sets:
        raise DataError(f"{path}: none of its labels, such as {pairs[0][0]!r}, is one of the model")
    if None in matches:
        console.note(f"{path}: {matches.count(None):,} labels are not labels of the model")
    return sets


def measure(
    groups: list[str] | dict[str, list[int]],
    predictions: elias.Predictions,
    truth: csr_matrix,
    ks: list[int],
    assigned: elias.Predictions | None,
) -> list[dict[str, Any]]:
    """Return the metrics of each group, weakest first."""
    from elias.metrics import metrics_by_labels, metrics_by_points

    if isinstance(groups, list):
        return metrics_by_points(predictions, truth, groups, (ks[0], ks[-1]), assigned)
    return metrics_by_labels(predictions, truth, groups, ks[-1], assigned)


def table(name: str, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    """Return the title and the table of the weakest groups."""
    if not rows:
        return f"groups by {name}:", "  none has a label of these points"
    large = [row for row in rows if row.get("points", row.get("pairs", 0)) >= _MIN_SIZE] or rows
    shown = large[:_N_GROUPS]
    size = "points" if "points" in rows[0] else "true pairs"
    title = f"weakest groups by {name} ({len(shown)} of {len(rows)}"
    title += ")" if len(large) == len(rows) else f"; at least {_MIN_SIZE} {size})"
    cells = [
        [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in shown
    ]
    return f"{title}:", console.columns(list(rows[0]), cells)
