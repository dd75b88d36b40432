"""What is asked of a model, and the search that answers it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.data.disk import DiskTexts
from elias.distributed.sharing import rank_shared
from elias.errors import DataError, nearest
from elias.model.elias import SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.inference import BATCH_SIZE, Ranked, rank_all
from elias.model.ranking import give_up_graphs
from elias.pipeline.resources import is_out_of_memory, memory_explained, threads_shared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scipy.sparse import csr_matrix

    from elias.data.tokens import Tokens
    from elias.model.elias import EliasModel

logger = logging.getLogger(__name__)

ALL_OF_FEW = 10_000
"""Labels chosen among that are all scored, whatever the shortlist holds."""
FEW_TEXTS = 16
"""Texts that a bag encoder and its search are done with before other threads have started."""
AVERAGED = 100
"""Labels of each member that are averaged in an ensemble, if no more are asked for."""


@dataclass(frozen=True, slots=True)
class Question:
    """Texts, and what is wanted of them."""

    given: Sequence[str] | csr_matrix
    """Texts, or features for a model that reads those."""
    top_k: int
    batch_size: int = BATCH_SIZE
    blocked: torch.Tensor | None = None
    """(L,) labels that must not be found."""
    only_some: bool = False
    """Whether ``blocked`` leaves a choice of labels, for which every cluster is searched."""

    @property
    def n_points(self) -> int:
        """Return how many texts there are."""
        return len(self.given) if isinstance(self.given, Sequence) else int(self.given.shape[0])

    def part(self, rows: slice) -> Question:
        """Return the question about some of the texts; those on disk stay there."""
        if isinstance(self.given, DiskTexts):
            return replace(self, given=self.given.take(np.arange(len(self.given))[rows]))
        return replace(self, given=self.given[rows])

    def deep(self) -> Question:
        """Return the question as the members of an ensemble are asked it."""
        return replace(self, top_k=max(self.top_k, AVERAGED))


def search(
    model: EliasModel, tokens: Tokens, asked: Question, sizes: SearchSizes, depth: int
) -> Ranked:
    """Return the ``depth`` best labels of each text, slots without one scoring -inf."""
    if asked.only_some:
        assert asked.blocked is not None
        n_wanted = min(int((~asked.blocked).sum()), ALL_OF_FEW)
        shortlist = max(sizes.shortlist_size, n_wanted)
        sizes = SearchSizes(model.graph.n_clusters, shortlist)
    few = len(tokens) <= FEW_TEXTS and isinstance(model.encoder, BagEncoder)
    with threads_shared(1 if few else None), memory_explained("predicting"):
        ranked = _rank_in_halves(model, tokens, asked, sizes, depth)
    scores = np.where(ranked.ids < model.n_labels, ranked.scores, -np.inf).astype(np.float32)
    return Ranked(ranked.ids, scores)


def _rank_in_halves(
    model: EliasModel, tokens: Tokens, asked: Question, sizes: SearchSizes, depth: int
) -> Ranked:
    """Rank; where memory is short without CUDA graphs, then with half the texts at a time."""
    batch_size = asked.batch_size
    blocked = asked.blocked
    if blocked is not None:
        blocked = blocked.to(model.labels.weight.device)
    if not model.labels.whole:  # one process cannot take fewer texts at a time than the others
        return rank_shared(model, tokens, sizes, depth, batch_size=batch_size, blocked=blocked)
    while True:
        try:
            return rank_all(model, tokens, sizes, depth, batch_size=batch_size, blocked=blocked)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if give_up_graphs():
                logger.warning("out of memory: going on without the CUDA graphs of predictions")
                continue
            if batch_size == 1:
                raise
            batch_size //= 2
            logger.warning("out of memory: going on with %d texts at a time", batch_size)


def blocked_labels(
    only: Iterable[int | str] | None,
    without: Iterable[int | str] | None,
    label_names: Sequence[str],
) -> torch.Tensor | None:
    """Return which labels must not be found (L,), or None where all may."""
    if only is None and without is None:
        return None
    blocked = np.zeros(len(label_names), dtype=bool)
    if only is not None:
        blocked[:] = True
        blocked[label_ids(only, label_names)] = False
    if without is not None:
        blocked[label_ids(without, label_names)] = True
    return torch.from_numpy(blocked)


def label_ids(labels: Iterable[int | str], label_names: Sequence[str]) -> list[int]:
    """Return the ids of labels given as ids or names; a name may stand for several."""
    if isinstance(labels, str):
        raise DataError(f"labels must be a list; wrap it: [{labels!r}]")
    wanted = list(labels)
    by_name: dict[str, list[int]] = {name: [] for name in wanted if isinstance(name, str)}
    if by_name:
        for i, name in enumerate(label_names):
            if name in by_name:
                by_name[name].append(i)
    ids: list[int] = []
    for label in wanted:
        if isinstance(label, str):
            known = by_name[label]
            hint = "" if known else nearest(label, label_names)
        else:
            known = [int(label)] if 0 <= label < len(label_names) else []
            hint = f"; ids go from 0 to {len(label_names) - 1}"
        if not known:
            raise DataError(f"the model has no label {label!r}{hint}")
        ids.extend(known)
    return ids
