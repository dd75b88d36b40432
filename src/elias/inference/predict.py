"""The prediction pipeline: text → tokens → search → rerank → `Predictions`.

`predict` runs the whole pipeline. `predict_member`, `tokenize`, `search` and `rank_candidates`
are its steps, in order of execution; helpers follow. Each member of an ensemble searches once, and
the predictions of all its components are derived from the candidates of that search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse

from elias.data.storage import DiskTexts, is_mapped
from elias.distributed.data_parallel import all_gather_rows, rank_sharded
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import DataError, check_strings
from elias.kernels.device import explain_out_of_memory, is_out_of_memory, limit_threads
from elias.model.batch_inference import (
    BATCH_SIZE,
    SEARCH_GRAPHS,
    embed_all,
    rank_all,
    rank_few,
    rank_in_threads,
)
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder, TextEncoder
from elias.predictions import PADDING_SCORE, Candidates, Predictions
from elias.rerank.calibration import MIXTURES
from elias.rerank.reranker import RERANK
from elias.text.tokens import Tokens, cached, unit_tokens
from elias.text.vectorizer import unit_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elias.config import ResolvedIndex
    from elias.data.corpus import Split
    from elias.distributed import World
    from elias.inference.predictor import Elias
    from elias.rerank.sparse_ranker import Array, Inputs

    TokensOf: TypeAlias = Callable[[Elias], Tokens]

logger = logging.getLogger(__name__)

Ranked = TypeVar("Ranked", Candidates, Predictions)

ENSEMBLE = "ensemble"
"""Name of the component that averages the scores of the members of an ensemble."""
MERGED_LABELS = 100
"""Minimum number of labels per member that an ensemble averages, even if ``top_k`` is lower."""
MAX_RANKED_CHOICES = 10_000
"""Maximum size of the shortlist if it is enlarged to hold all labels given by ``only``."""
_RANKER_SCORE_POWER = 2.5
"""Exponent, found by measurement: a ranker score q is approximately the probability of relevance to
the power of this number."""
_TIE_BREAK = 1e-6  # keeps the order of added labels with the same score
FEW_TEXTS, FEW_TOKENS = 32, 64
"""Maximum number of texts (bag encoder) or tokens (transformer) that a single thread searches.

With so little work, several threads are slower than one if another process uses a core.
"""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a prediction."""

    top_k: int
    """Number of labels per text."""
    batch_size: int = BATCH_SIZE
    blocked: torch.Tensor | None = None
    """(L,) mask that is True for labels that must not be predicted."""
    embed: bool = False
    """Also return the embeddings φ(x). `search` ignores this with CUDA graphs or a sharded W_L."""
    every_cluster: bool = False
    """Search all clusters instead of a beam. This is used if ``only`` limits the labels."""
    room_for_added: bool = False
    """Return up to ``top_k`` added labels besides the ``top_k`` others. An ensemble needs this: a
    label that added ones displace in one member would have a lower mean score."""


def predict(
    model: Elias,
    inputs: Inputs,
    components: Sequence[str],
    options: SearchOptions,
    tokens_of: TokensOf | None = None,
    searched: dict[EliasModel, Candidates] | None = None,
) -> dict[str, Predictions]:
    """Return the predictions of the given components, with one search per member.

    If W_L is sharded, all processes must call this function. Each process predicts its share of the
    texts, and every process returns the predictions of all texts.

    Args:
        model: The model.
        inputs: Texts, or feature vectors for a model that was trained on features.
        components: Names from `Elias.components`.
        options: Options of the search.
        tokens_of: Function that returns the tokens of all inputs for a member. None tokenizes
            ``inputs``.
        searched: Dictionary to which the candidates of each member are added.
    """
    labels, own_tokens = model.model.labels, tokens_of
    n_points = len(inputs) if isinstance(inputs, Sequence) else int(inputs.shape[0])
    if isinstance(labels, ShardedRows):
        world, rows = labels.world, labels.world.share(n_points)
        if isinstance(inputs, DiskTexts):
            inputs = inputs.take(np.arange(n_points)[rows])
        else:
            inputs = inputs[rows]
        if tokens_of is not None:  # rank 0 writes the cache before other ranks read it

            def own_tokens(member: Elias) -> Tokens:
                return world.rank0_first(partial(tokens_of, member)).part(rows)

    if ENSEMBLE in components:
        wide = replace(options, top_k=max(options.top_k, MERGED_LABELS), room_for_added=True)
        names = [model.last_alone, *(name for name in components if name != ENSEMBLE)]
        predictions = predict_member(model, inputs, names, wide, own_tokens, searched)
        last = [predictions[model.last_alone]]
        for other in model.others:
            name = other.last_alone
            last.append(predict_member(other, inputs, [name], wide, own_tokens, searched)[name])
        predictions = {name: ranked.top(options.top_k) for name, ranked in predictions.items()}
        predictions[ENSEMBLE] = Predictions.merge(last, k=options.top_k)
    else:
        predictions = predict_member(model, inputs, components, options, own_tokens, searched)

    results = {}
    for name in components:
        result = predictions[name]
        if isinstance(labels, ShardedRows):
            result = _gathered(result, labels.world, n_points, model.n_labels)
        if name == model.components[-1] and (learned := model.probabilities) is not None:
            result = replace(result, probabilities=learned.of(result.scores))
        results[name] = result
    return results


def predict_member(
    member: Elias,
    inputs: Inputs,
    components: Sequence[str],
    options: SearchOptions,
    tokens_of: TokensOf | None,
    searched: dict[EliasModel, Candidates] | None = None,
) -> dict[str, Predictions]:
    """Return the predictions of one member of an ensemble, or of a single model.

    The candidates of its search, with φ(x) if it was needed, are added to ``searched``.
    """
    tokens = tokenize(inputs, member.model.encoder) if tokens_of is None else tokens_of(member)
    index, rerank = member.config.index, member.config.rerank
    reranks = not set(components) <= {member.components[0]}
    top_k = max(options.top_k, rerank.candidates) if reranks else options.top_k
    by_ranker = reranks and rerank.embedding == "encoder"
    embed = options.embed or by_ranker or member.added is not None
    candidates = search(member.model, tokens, index, replace(options, top_k=top_k, embed=embed))
    if embed:
        candidates = add_embedding(candidates, member.model.encoder, tokens)
    if searched is not None:
        searched[member.model] = candidates
    for_ranker = ranker_candidates(member, candidates, tokens) if reranks else candidates
    ranked = rank_candidates(
        member, for_ranker, inputs, components, options.top_k, blocked=options.blocked
    )
    if member.added is None:
        return ranked
    assert candidates.embedding is not None
    return join_added(member, ranked, inputs, options, candidates.embedding)


def tokenize(inputs: Inputs, encoder: TextEncoder) -> Tokens:
    """Convert texts, or feature vectors scaled to length 1, to tokens of an encoder.

    Raises:
        DataError: If the model was trained on texts and the inputs are features, or vice versa.
    """
    if issparse(inputs):
        features = inputs if isinstance(inputs, csr_matrix) else csr_matrix(inputs)
        if not encoder.reads_features:
            raise DataError("this model was trained on texts; pass a list of texts")
        if features.shape[1] != encoder.n_features:
            raise DataError(
                f"the features have {features.shape[1]} columns, but the model expects "
                f"{encoder.n_features}; pass the features that the model was trained on"
            )
        mapped = is_mapped(features)
        return unit_tokens(features) if mapped else Tokens.from_csr(unit_rows(features))
    check_strings("texts", inputs)
    if encoder.reads_features:
        raise DataError(
            "this model was trained on feature vectors; pass a CSR matrix instead of texts"
        )
    return encoder.tokenize(inputs)


def search(
    model: EliasModel, tokens: Tokens, index: ResolvedIndex, options: SearchOptions
) -> Candidates:
    """Return the best labels of each text. ``index`` sets the sizes of the beam and the shortlist.

    If memory runs out, release CUDA graphs first, then halve the batch size until a batch fits. If
    W_L is sharded, each process passes its own texts.
    """
    sizes = SearchSizes(index.beam_size, index.shortlist_size)
    batch_size, blocked = options.batch_size, options.blocked
    if blocked is not None:
        if options.every_cluster:
            n_choices = min(int((~blocked).sum()), MAX_RANKED_CHOICES)
            sizes = SearchSizes(model.graph.n_clusters, max(sizes.shortlist_size, n_choices))
        blocked = blocked[: model.n_labels].to(model.labels.weight.device)
    encoder, weight = model.encoder, model.labels.weight
    few = len(tokens.ids) <= FEW_TOKENS
    if isinstance(encoder, BagEncoder):
        few = len(tokens.offsets) <= FEW_TEXTS + 1
        if few and model.labels.whole and weight.is_cpu and not model.training:
            with limit_threads(1):
                candidates = rank_few(model, encoder, tokens, sizes, options.top_k, blocked)
            return candidates if options.embed else replace(candidates, embedding=None)
    ranks: Callable[..., Candidates] = rank_sharded
    if model.labels.whole:
        by_thread = weight.is_cpu and not few and not encoder.uses_numba
        ranks = partial(rank_in_threads if by_thread else rank_all, embed=options.embed)
    with limit_threads(1 if few else None):
        while True:
            try:
                return ranks(
                    model, tokens, sizes, options.top_k, batch_size=batch_size, blocked=blocked
                )
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if model.labels.whole and SEARCH_GRAPHS.release():
                    logger.warning("out of memory: continuing without CUDA graphs for predictions")
                    continue
                # if W_L is sharded, all processes must use the same batch size
                if batch_size == 1 or not model.labels.whole:
                    with explain_out_of_memory("predicting"):
                        raise
                batch_size //= 2
                logger.warning("out of memory: continuing with %d texts at a time", batch_size)


def rank_candidates(
    model: Elias,
    candidates: Candidates,
    inputs: Inputs,
    components: Sequence[str],
    top_k: int,
    psi: csr_matrix | None = None,
    blocked: torch.Tensor | None = None,
) -> dict[str, Predictions]:
    """Return the predictions of several components of a model from the same candidates.

    ``psi`` holds the ranker's features of the inputs. They are computed if ``psi`` is None.
    """
    n_labels, count = model.model.graph.n_labels, model.config.rerank.candidates
    # with added labels, `join_added` sets the names
    names = model.label_names if len(model.label_names) == n_labels else None
    stage = model.components[0]
    predictions, reranked = {}, list(dict.fromkeys(components))
    if stage in components:
        reranked.remove(stage)
        ids, scores = candidates.ids[:, :top_k], candidates.scores[:, :top_k]
        predictions[stage] = Predictions(ids, scores, n_labels, names)
    if reranked:
        assert model.reranker is not None
        predictions |= model.reranker.rerank(
            candidates,
            inputs,
            reranked,
            count=count,
            width=top_k,
            label_names=names,
            psi=psi,
            blocked=None if blocked is None else blocked.cpu().numpy(),
        )
    return predictions


def add_embedding(candidates: Candidates, encoder: TextEncoder, tokens: Tokens) -> Candidates:
    """Return the candidates with embeddings φ(x), which are computed if the search gave none."""
    if candidates.embedding is not None:
        return candidates
    return replace(candidates, embedding=embed_all(encoder, tokens))


def ranker_candidates(member: Elias, candidates: Candidates, tokens: Tokens) -> Candidates:
    """Return the candidates with the embeddings that the ranker of a member was trained on."""
    if member.first_encoder is None:
        return candidates
    return replace(candidates, embedding=embed_all(member.first_encoder, tokens))


def join_added(
    member: Elias,
    ranked: dict[str, Predictions],
    inputs: Inputs,
    options: SearchOptions,
    embedding: NDArray[np.float32],
    best_added: dict[bool, tuple[Array, Array]] | None = None,
) -> dict[str, Predictions]:
    """Merge the labels that were added to a member into the predictions of each component.

    The scores of other labels do not change. The first component scores added labels only by the
    similarity of embeddings, the others also by their names. ``embedding`` holds φ(x) of the texts.
    ``best_added`` keeps the best added labels, with and without names, for further calls.
    """
    best_added = {} if best_added is None else best_added
    blocked = None if options.blocked is None else options.blocked.cpu().numpy()
    assert member.added is not None
    stage, joined = member.components[0], {}
    for name, predictions in ranked.items():
        by_name = name != stage and isinstance(inputs, Sequence)
        if by_name not in best_added:
            texts = inputs if by_name else None
            best_added[by_name] = member.added.best(embedding, texts, options.top_k, blocked)
        ids, probabilities = best_added[by_name]
        known = predictions.among(member.label_names)
        ids = np.where(ids < 0, known.n_labels, ids)
        best = replace(known, ids=ids, scores=_as_scores(member, probabilities, name))
        width = known.ids.shape[1] + ids.shape[1]
        if not options.room_for_added:
            width = min(options.top_k, width)
        if width == known.ids.shape[1] and not (best.scores >= known.scores[:, -1:]).any():
            joined[name] = known  # no added label is good enough
        else:
            joined[name] = Predictions.merge([known, best], how="max", k=width)
    return joined


def _as_scores(member: Elias, probabilities: Array, component: str) -> Array:
    """Convert probabilities of added labels to the scale of a component's scores."""
    reranker, learned = member.reranker, member.probabilities
    if learned is not None and component == member.components[-1]:
        scores = np.interp(probabilities, learned.values, learned.scores)
        scores += _TIE_BREAK * probabilities
    elif reranker is None or component == member.components[0]:
        scores = probabilities
    else:
        power = 1 + _RANKER_SCORE_POWER * min(1, reranker.sharpness)
        product = probabilities**power  # about p·q^γ
        of_trees, of_product = (0, 1) if component == RERANK else MIXTURES[reranker.mixture]
        scores = of_trees * probabilities + of_product * product
    return scores.astype(np.float32)


def search_share(
    model: EliasModel, tokens: Tokens, index: ResolvedIndex, options: SearchOptions
) -> Candidates:
    """Return the best labels of each text, as `search` does, but for all texts on every process.

    If W_L is sharded, each process searches its share of the texts. The results are then gathered.
    """
    labels, n_points = model.labels, len(tokens)
    if not isinstance(labels, ShardedRows):
        return search(model, tokens, index, options)
    candidates = search(model, tokens.part(labels.world.share(n_points)), index, options)
    return _gathered(candidates, labels.world, n_points, model.n_labels)


def _gathered(ranked: Ranked, world: World, n_points: int, n_labels: int) -> Ranked:
    """Gather the labels and scores of all points from all processes."""
    ids = all_gather_rows(world, ranked.ids, n_points, n_labels)
    scores = all_gather_rows(world, ranked.scores, n_points, PADDING_SCORE)
    return replace(ranked, ids=ids, scores=scores)


def split_inputs(split: Split, encoder: TextEncoder) -> Inputs:
    """Return the texts or the features of a split, whichever the encoder reads."""
    inputs = split.features if encoder.reads_features else split.texts
    if inputs is None:
        wanted = "features" if encoder.reads_features else "texts"
        raise DataError(
            f"the model needs {wanted}, but the corpus has none; give a corpus with {wanted}"
        )
    return inputs


def cached_tokens(split: Split, encoder: TextEncoder) -> Tokens:
    """Return the tokens of a split, from the cache on disk if possible."""
    inputs = split_inputs(split, encoder)
    if issparse(inputs):
        return tokenize(inputs, encoder)
    featurizer = encoder.featurizer if isinstance(encoder, BagEncoder) else None
    return cached(
        encoder.fingerprint, inputs, encoder.tokenize, featurizer, n_ids=encoder.n_features
    )
