"""A corpus in a model's own terms: labels matched by name, points as its training cut them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.loading import set_test_aside
from elias.data.stats import corpus_stats
from elias.errors import DataError
from elias.model.layout import DATA_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus, Split

logger = logging.getLogger(__name__)

_REMEDY = "evaluate on the corpus that the model was trained on"


def match_labels(corpus: Corpus, names: Sequence[str]) -> Corpus:
    """Return the corpus over the labels of a model, matched by name.

    Labels that the model does not know follow its own, so that they stay in the truth and count
    as missed. Where names repeat, the row is the id, and the labels must be the same.

    Raises:
        DataError: If the labels cannot be matched, or none is the model's.
    """
    theirs = list(corpus.label_names)
    if theirs == list(names):
        return corpus
    source = corpus.source or "corpus"
    if len(set(theirs)) < len(theirs) or len(set(names)) < len(names):
        difference = _first_difference(theirs, names)
        raise DataError(f"{source}: {difference}, and names that repeat match nothing; {_REMEDY}")
    known = set(names)
    unknown = [name for name in theirs if name not in known]
    if len(unknown) == len(theirs):
        raise DataError(
            f"{source}: none of its {len(theirs)} labels, such as {theirs[0]!r}, is one of the "
            f"model's {len(names)}, such as {names[0]!r}; {_REMEDY}"
        )
    if unknown:
        logger.warning(
            "%s: %d of its %d labels are not the model's, such as %r; they count as missed",
            *(source, len(unknown), len(theirs), unknown[0]),
        )
    together = [*names, *unknown]
    id_of = {name: position for position, name in enumerate(together)}
    new_ids = np.array([id_of[name] for name in theirs], dtype=np.int64)
    splits: dict[str, Split | None] = {
        name: _renumbered(split, new_ids, len(names), len(together))
        for name, split in corpus.splits.items()
    }
    return replace(corpus.with_splits(**splits), label_names=together, label_features=None)


def _first_difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(theirs) != len(ours):
        return f"has {len(theirs)} labels, the model {len(ours)}"
    pairs = enumerate(zip(theirs, ours, strict=True))
    place, (their, our) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"label {place} is {their!r}, in the model it is {our!r}"


def _renumbered(split: Split, new_ids: NDArray[np.int64], n_known: int, n_labels: int) -> Split:
    old = split.labels
    labels = csr_matrix((old.data, new_ids[old.indices], old.indptr), shape=(len(split), n_labels))
    labels.sort_indices()
    filters = split.filters
    if filters is not None:
        filters = np.stack([filters[:, 0], new_ids[filters[:, 1]]], axis=1)
        filters = filters[filters[:, 1] < n_known]  # others are never predicted
    return replace(split, labels=labels, filters=filters)


def n_points_of(facts: Mapping[str, Any]) -> int:
    """Return how many points the corpus of a run had, by what its model knows; 0 if nothing."""
    return sum(split["points"] for split in _recorded(facts).values())


def as_trained(corpus: Corpus, names: Sequence[str], facts: Mapping[str, Any]) -> Corpus | None:
    """Return a corpus without splits as the run that it was the data of had cut it.

    Args:
        corpus: All points, as training split.
        names: The model's labels.
        facts: What the model knows of its making.

    Returns:
        The corpus with the test points that the run set aside, if any; None where the run had other
        data, or data with splits.
    """
    recorded = _recorded(facts)
    splits = {"train", "test"} if "test" in recorded else {"train"}
    same = set(recorded) == splits and n_points_of(facts) == len(corpus.train)
    if not same or list(corpus.label_names) != list(names):
        return None
    n_test = recorded["test"]["points"] if "test" in recorded else 0
    settings = facts.get(DATA_SETTINGS, {})
    cut = set_test_aside(corpus, n_test, seed=settings.get("seed", 0))
    found = json.loads(json.dumps(corpus_stats(cut).to_dict()["splits"]))
    columns, trained_on = corpus.reading.get("text"), settings.get("text")
    if columns and trained_on and columns != trained_on:  # the texts differ, the points do not
        found, recorded = _without_texts(found), _without_texts(recorded)
    return cut if found == recorded else None


def _without_texts(splits: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of splits that do not depend on their texts."""
    return {
        name: {
            key: value for key, value in stats.items() if "text" not in key and "word" not in key
        }
        for name, stats in splits.items()
    }


def _recorded(facts: Mapping[str, Any]) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads(json.dumps(facts.get("data", {}).get("splits", {})))
    return splits
