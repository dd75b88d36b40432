"""Which points of a corpus a model is trained on, and which it is validated on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from elias.data.splits import hold_out
from elias.errors import ConfigError

if TYPE_CHECKING:
    from elias.config import EliasConfig
    from elias.data.corpus import Corpus, Split

logger = logging.getLogger(__name__)


def validation_split(corpus: Corpus, config: EliasConfig) -> tuple[Split, Split | None]:
    """Return the points to train on and those to validate on, as `train` takes them.

    The corpus's own splits where it has a validation split; else points held out of the training
    split, the same for the same (resolved) configuration; None where none are held out.
    """
    if corpus.validation is not None:
        return corpus.train, corpus.validation
    size = config.eval.validation_size
    assert size is not None
    if size == 0:
        return corpus.train, None
    train = corpus.train
    if 2 * size > len(train):
        raise ConfigError(
            f"eval.validation_size is {size}, more than half of the {len(train)} training "
            "points; lower it, or set it to none to have it derived"
        )
    train_rows, held_rows = hold_out(
        train.labels, size, config.seed, covered=config.eval.hold_out == "covered"
    )
    if len(held_rows) == 0:
        logger.warning("no point can be held out: each has a label found nowhere else")
        return train, None
    if len(held_rows) < size:
        logger.warning(
            "%d points held out for validation instead of %d: the others have a label found "
            "nowhere else",
            len(held_rows),
            size,
        )
    return train.take(train_rows), train.take(held_rows)
