"""Find groups of points that must stay together when points are held out.

The points of a group are near-duplicates, or have the same value in a group column.
"""

from __future__ import annotations

import logging
import unicodedata
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus

    Ids = NDArray[np.int64]


logger = logging.getLogger(__name__)

NEAR_DUPLICATES, NO_GROUPS = "near-duplicates", "none"
"""Special values of ``group=``; any other value is a column name. Models of older versions lack the
setting ``group``, and ``none`` is then used."""
ALONE = 0
"""Key of a point that belongs to no group, because its text or cell is empty: ``hash("")``."""
_CHUNK = 1 << 13


class _Letters(dict[int, int]):
    """Table for `str.translate`: keep letters and combining marks, replace the rest by spaces.

    An entry is computed when its character first occurs.
    """

    def __missing__(self, code: int) -> int:
        self[code] = code if unicodedata.category(chr(code))[0] in "LM" else ord(" ")
        return self[code]


_LETTERS = _Letters()


def normal_form(text: str) -> str:
    """Return the words of a text, casefolded, without digits, punctuation or extra white space.

    A text without letters is returned unchanged, except for white space around it.
    """
    return " ".join(text.casefold().translate(_LETTERS).split()) or text.strip()


def text_keys(texts: Sequence[str]) -> Ids:
    """Return a 64-bit key for each text (N,). Near-duplicates have the same key.

    Near-duplicates are texts with the same normal form. The key of an empty text is `ALONE`. Texts
    on disk are read in chunks. Keys differ between processes.
    """
    keys = np.empty(len(texts), dtype=np.int64)
    with progress("Finding near-duplicates", total=len(texts)) as advance:
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            keys[start : start + len(chunk)] = [hash(normal_form(text)) for text in chunk]
            advance(len(chunk))
    return keys


def cell_keys(cells: Sequence[object]) -> Ids:
    """Return a key for each cell of a group column (N,). Cells with equal text have equal keys."""
    plain = ("" if cell is None or cell != cell else str(cell).strip() for cell in cells)
    return np.fromiter(map(hash, plain), np.int64, len(cells))


def first_members(keys: Ids) -> Ids:
    """Return, for each point, the index of the first point in its group (N,).

    Points with equal keys form a group. A point with the key `ALONE` is its own group.
    """
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return np.where(keys == ALONE, np.arange(len(keys)), first[inverse])


def count_groups(keys: Ids) -> tuple[int, int]:
    """Return the number of groups of at least two points, and the number of points in them."""
    sizes = np.unique(keys[keys != ALONE], return_counts=True)[1]
    return int((sizes > 1).sum()), int(sizes[sizes > 1].sum())


def count_repeats(keys: Ids, train_keys: Ids) -> int:
    """Return the number of points that have the same key as a training point."""
    return int((np.isin(keys, train_keys) & (keys != ALONE)).sum())


def shared_groups(corpus: Corpus) -> str | None:
    """Describe how many groups are in both training and test split. Return None if none are."""
    of_train, of_test = corpus.train.groups, None if corpus.test is None else corpus.test.groups
    if of_train is None or of_test is None:
        return None
    train, test = (set(np.unique(keys).tolist()) - {ALONE} for keys in (of_train, of_test))
    shared, n_groups = len(train & test), len(train | test)
    if not shared:
        return None
    return f"{shared:,} of {n_groups:,} groups are in the training and the test split"


def training_groups(corpus: Corpus) -> Ids | None:
    """Return the first row of each training point's group (N,), or None if there are no groups.

    If the corpus was read with a group column, this column defines the groups. A warning is
    logged if the test split shares groups with the training split. Otherwise near-duplicate texts
    form groups, with three exceptions:

    - There are no groups if ``corpus.reading["group"]`` is not `NEAR_DUPLICATES`.
    - There are no groups if the share of test texts with a near-duplicate in the training split is
      more than half of the share of training texts with a near-duplicate in it. The test points
      were then probably drawn without regard to near-duplicates, so validation points are drawn in
      the same way.
    - If more than a twentieth of the points, and more than 8, have the same normal form, their
      texts probably differ in numbers (``item 12``). Of these, only identical texts form a group.
    """
    train = corpus.train
    if train.groups is not None:
        groups = first_members(np.asarray(train.groups))
        if shared := shared_groups(corpus):
            logger.warning(
                "%s: held-out points, which share no group with the training points, are harder "
                "than the test points",
                shared,
            )
    elif corpus.reading.get("group") == NEAR_DUPLICATES and train.texts is not None:
        keys = text_keys(train.texts)
        common = _common_keys(keys)
        _split_common_groups(keys, train.texts, common)
        if corpus.test is not None and corpus.test.texts is not None:
            test_keys = text_keys(corpus.test.texts)
            _split_common_groups(test_keys, corpus.test.texts, common)
            share = count_repeats(test_keys, keys) / len(corpus.test)
            if share > count_groups(keys)[1] / len(keys) / 2:
                logger.info(
                    "%.1f%% of the test texts have a near-duplicate in the training split, so "
                    "points are held out without keeping near-duplicates together",
                    100 * share,
                )
                return None
        groups = first_members(keys)
    else:
        return None
    if (groups == np.arange(len(groups))).all():
        return None
    if not groups.any():
        logger.warning("all %d points are one group, so points are split at random", len(groups))
        return None
    return groups


def _common_keys(keys: Ids) -> Ids:
    """Return the keys of groups that are too large to consist of near-duplicates."""
    unique, sizes = np.unique(keys[keys != ALONE], return_counts=True)
    return unique[sizes > max(min(8, len(keys) // 2), len(keys) // 20)]


def _split_common_groups(keys: Ids, texts: Sequence[str], common: Ids) -> None:
    """Replace each of the ``common`` keys, in place, by a key that only identical texts share."""
    is_common = np.isin(keys, common)
    if is_common.any():
        keys[is_common] = [hash(text.strip()) for text in compress(texts, is_common)]
