"""Predict: tokenize, search, rerank, merge members."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse

from elias.data.splits import sample_points
from elias.data.storage import DiskTexts, is_mapped
from elias.distributed.data_parallel import all_gather_rows, rank_sharded
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import ConfigError, DataError, did_you_mean
from elias.kernels.device import explain_out_of_memory, is_out_of_memory, limit_threads
from elias.model.batch_inference import BATCH_SIZE, Ranked, embed_all, rank_all
from elias.model.elias import SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.recorded_search import give_up_graphs
from elias.predictions import PADDING_SCORE, Predictions
from elias.rerank.reranker import Candidates, Reranker
from elias.text.parallel_tokenize import write_tokens
from elias.text.tokens import Tokens, cached, unit_tokens
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from elias.config import EliasConfig
    from elias.data.corpus import Split
    from elias.inference.explain import Judge
    from elias.inference.predictor import Elias
    from elias.model.elias import EliasModel
    from elias.model.encoder import TextEncoder
    from elias.rerank.probabilities import Probabilities
    from elias.rerank.reranker import RankedScores


logger = logging.getLogger(__name__)

SETUP_POINTS = 1_000_000
"""How many points that is where the corpus is on disk and the configuration does not say."""


def input_of(split: Split, encoder: TextEncoder) -> Sequence[str] | csr_matrix:
    """Return what the encoder reads of a split: its texts, or its features."""
    given = split.features if encoder.reads_features else split.texts
    if given is None:
        wanted = "features" if encoder.reads_features else "texts"
        raise DataError(f"the model reads {wanted}, and the corpus has none")
    return given


def feature_tokens(features: csr_matrix, encoder: TextEncoder) -> Tokens:
    """Return given features as tokens, each point scaled to length 1."""
    if not encoder.reads_features:
        raise DataError("this model reads text; give it a list of texts")
    if features.shape[1] != encoder.n_features:
        raise DataError(
            f"the features have {features.shape[1]} columns, the model reads {encoder.n_features}"
        )
    return unit_tokens(features) if is_mapped(features) else Tokens.from_csr(unit_rows(features))


def cached_tokens(split: Split, encoder: TextEncoder) -> Tokens:
    """Return a split's tokens, from the cache where they are there."""
    given = input_of(split, encoder)
    if issparse(given):
        return feature_tokens(given, encoder)
    featurizer = encoder.featurizer if isinstance(encoder, BagEncoder) else None

    def write(texts: DiskTexts, folder: Path) -> None:
        write_tokens(texts, folder, encoder.tokenise, featurizer)

    return cached(encoder.fingerprint, given, encoder.tokenise, write)


def setup_rows(split: Split, config: EliasConfig) -> NDArray[np.int64] | None:
    """Return the points that what comes before training is computed from; None: all of them."""
    size = config.data.setup_points or (SETUP_POINTS if split.on_disk else len(split))
    if size >= len(split):
        return None
    return sample_points(split.labels, size, config.seed)


def bag_of_words(split: Split) -> csr_matrix:
    """Return bow(x)/‖·‖ of each point for ψ (Eq. 14): given features, else tf-idf of words."""
    if split.features is not None:
        return unit_rows(split.features)
    assert split.texts is not None
    words = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    return words.transform(split.texts)


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
    with limit_threads(1 if few else None), explain_out_of_memory("predicting"):
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
        return rank_sharded(model, tokens, sizes, depth, batch_size=batch_size, blocked=blocked)
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
            hint = "" if known else did_you_mean(label, label_names)
        else:
            known = [int(label)] if 0 <= label < len(label_names) else []
            hint = f"; ids go from 0 to {len(label_names) - 1}"
        if not known:
            raise DataError(f"the model has no label {label!r}{hint}")
        ids.extend(known)
    return ids


RERANK, CALIBRATE, NAMES = "rerank", "calibrate", "names"
"""Components of a ranker: p·q, its mixture with T, and with a T that is told about names."""

_FAINT = np.float32(1e-20)  # far below any score that says something, far above the next
_FAINTER = np.float32(1e-25)


_AT_A_TIME = 8192  # points whose features are held at once


class Found(NamedTuple):
    """What a search found for points, and what a ranker reads of them."""

    ranked: Predictions
    given: Sequence[str] | csr_matrix
    """Texts, or the features they came as."""
    embedding: NDArray[np.float32] | None = None
    """φ(x) of each, for a ranker that reads it."""

    def parts(self, size: int) -> Iterator[Found]:
        """Yield the points so many at a time."""
        for start in range(0, len(self.ranked), size):
            rows = slice(start, start + size)
            embedding = None if self.embedding is None else self.embedding[rows]
            ranked = replace(
                self.ranked, ids=self.ranked.ids[rows], scores=self.ranked.scores[rows]
            )
            yield Found(ranked, self.given[rows], embedding)

    def candidates(self, count: int) -> Candidates:
        """Return the best labels of each point, so many, for the ranker."""
        best = self.ranked.top(count)
        return Candidates(self.given, best.ids, best.scores, self.embedding)


def check_rerank(config: EliasConfig) -> None:
    """Refuse a ranker that is to read what the encoder does not have."""
    if config.rerank.embedding == "first" and config.encoder.kind == "bag":
        raise ConfigError(
            "rerank.embedding='first' is φ before training, which a bag encoder starts at random; "
            "use 'none' or 'encoder', or a transformer"
        )


def rerank(reranker: Reranker, found: Found, count: int, component: str) -> Predictions:
    """Return the labels found in the order that a component of the ranker gives the best.

    Labels past the ``count`` best stay below them, in the order they had.
    """
    ranked = found.ranked
    best = ranked.scores[:, :count]
    parts = [_scores(reranker, part, count, component) for part in found.parts(_AT_A_TIME)]
    # Where nothing is left of the score, p decides; the rest follows, fainter still.
    scores = np.concatenate([best[:0], *parts]) + _FAINT * (1 + best)
    joined = np.concatenate([scores, _FAINTER * ranked.scores[:, count:]], axis=1)
    joined[ranked.ids >= ranked.n_labels] = PADDING_SCORE
    return Predictions.from_scores(ranked.ids, joined, ranked.n_labels, ranked.label_names)


def _scores(reranker: Reranker, found: Found, count: int, component: str) -> NDArray[np.float32]:
    said = reranker.score(found.candidates(count), named=component == NAMES)
    return said.product if component == RERANK else said.final


ENSEMBLE = "ensemble"
"""The component that is the mean of several models."""


def answer(
    model: Elias, asked: Question, component: str, tokens_of: Callable[[Elias, slice], Tokens]
) -> Predictions:
    """Return what one component says, with probabilities where they are known.

    ``tokens_of`` gives the tokens of some of the texts asked about as a member's encoder reads
    them. Where W_L is shared out all processes ask, each answers for its share of the texts, and
    all get the answers of all.
    """
    rows = model.model.labels
    if isinstance(rows, ShardedRows):
        world, n_points = rows.world, asked.n_points
        own = world.share(n_points)
        found = _scored(model, asked.part(own), component, lambda member: tokens_of(member, own))
        found = replace(
            found,
            ids=all_gather_rows(world, found.ids, n_points, model.n_labels),
            scores=all_gather_rows(world, found.scores, n_points, PADDING_SCORE),
        )
    else:
        found = _scored(model, asked, component, lambda member: tokens_of(member, slice(None)))
    known = known_probabilities(model, component)
    return found if known is None else replace(found, probabilities=known.of(found.scores))


def known_probabilities(model: Elias, component: str) -> Probabilities | None:
    """Return what is known of the scores of a component: of those of the last one."""
    return model.probabilities if component == model.components[-1] else None


def _scored(
    model: Elias, asked: Question, component: str, tokens_of: Callable[[Elias], Tokens]
) -> Predictions:
    """Return what one component says, an ensemble being the mean of its members."""
    if component != ENSEMBLE:
        return _alone(model, asked, component, tokens_of(model))
    parts = [
        _alone(member, asked.deep(), member.components[-1], tokens_of(member))
        for member in model.members
    ]
    return Predictions.merge(parts, k=asked.top_k)


def _alone(model: Elias, asked: Question, component: str, tokens: Tokens) -> Predictions:
    """Search, and rank the best of what is found anew as far as the component says."""
    reranker = model.reranker if component in (RERANK, CALIBRATE, NAMES) else None
    count = model.config.rerank.candidates
    depth = asked.top_k if reranker is None else max(asked.top_k, count)
    ranked = search(model.model, tokens, asked, model.sizes, depth)
    predictions = Predictions(ranked.ids, ranked.scores, model.n_labels, model.label_names)
    if reranker is None or not len(predictions):
        return predictions.top(asked.top_k)
    found = found_by(model, predictions, asked.given, tokens)
    return rerank(reranker, found, count, component).top(asked.top_k)


def found_by(
    model: Elias, ranked: Predictions, given: Sequence[str] | csr_matrix, tokens: Tokens
) -> Found:
    """Return what was found with all that a ranker of the model's configuration reads."""
    embedding = None
    if model.config.rerank.embedding != "none":
        embedding = embed_all(model.first_encoder or model.model.encoder, tokens)
    return Found(ranked, given, embedding)


def judge_of(model: Elias, texts: Sequence[str] | csr_matrix, tokens: Tokens) -> Judge | None:
    """Return what asks the ranker about labels of these texts, if there is one."""
    reranker = model.reranker
    if reranker is None:
        return None

    def judge(ids: NDArray[np.int64], p: NDArray[np.float32]) -> RankedScores:
        ranked = Predictions(ids, p, model.n_labels)
        found = found_by(model, ranked, texts, tokens)
        return reranker.score(found.candidates(ids.shape[1]))

    return judge


def tokens_of(texts: Sequence[str] | csr_matrix, model: Elias) -> Tokens:
    """Return texts, or features, as a model's encoder reads them.

    Raises:
        DataError: If they are not what the model was trained on.
    """
    encoder = model.model.encoder
    if issparse(texts):
        return feature_tokens(csr_matrix(texts), encoder)
    if isinstance(texts, str):
        raise DataError("predict takes a list of texts; wrap the text in a list: [text]")
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"texts[{i}] is {type(text).__name__}, not a string")
    if encoder.reads_features:
        raise DataError("this model was trained on features; give it their CSR matrix")
    return encoder.tokenise(texts)
