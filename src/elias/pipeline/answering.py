"""From a question to an answer: search, rank anew, average over members, say how probable it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scipy.sparse import csr_matrix, issparse

from elias.distributed.rows import SharedRows
from elias.distributed.sharing import rows_of_all
from elias.errors import DataError
from elias.model.inference import embed_all
from elias.pipeline.inputs import feature_tokens
from elias.pipeline.questions import search
from elias.pipeline.reranking import CALIBRATE, NAMES, RERANK, Found, rerank
from elias.predictions import PADDING_SCORE, Predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from elias.data.tokens import Tokens
    from elias.pipeline.explaining import Judge
    from elias.pipeline.predictor import Elias
    from elias.pipeline.questions import Question
    from elias.rerank.probabilities import Probabilities
    from elias.rerank.reranker import RankedScores

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
    if isinstance(rows, SharedRows):
        world, n_points = rows.world, asked.n_points
        own = world.share(n_points)
        found = _scored(model, asked.part(own), component, lambda member: tokens_of(member, own))
        found = replace(
            found,
            ids=rows_of_all(world, found.ids, n_points, model.n_labels),
            scores=rows_of_all(world, found.scores, n_points, PADDING_SCORE),
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
