"""A trained model with fewer edges in its learned graph (Table 9)."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass

from elias.errors import ConfigError
from elias.model.pruning import edges_above, pruned_graph, strongest_edges_of, with_graph
from elias.pipeline.deciding import PROBABILITIES
from elias.pipeline.predictor import Elias

PRUNED = "pruned"
"""The key of a model's facts that says how it was pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCount:
    """How many edges pruning left, over all members."""

    before: int
    after: int
    for_labels: int
    """Those of them that are weak, and stay because their label has no other."""

    @property
    def removed(self) -> float:
        """Return the share of the edges that went."""
        return 1 - self.after / max(self.before, 1)


def prune_edges(
    model: Elias, *, threshold: float | None = None, top_k: int | None = None
) -> tuple[Elias, EdgeCount]:
    """Return the model without its weak edges, and how many went; the given one stays as it is.

    What is left scores what it scored, and every label keeps its strongest edge. Of an ensemble,
    all members are pruned. Metrics of the given model are not those of the new one, so ``facts``
    goes without them.

    Args:
        model: A model with a learned graph.
        threshold: Keep edges with ŝ_{c,ℓ} (Eq. 5) of at least this.
        top_k: Keep this many edges of each cluster, the strongest.

    Raises:
        ConfigError: If not just one of both is given, or the model has no learned graph.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> from elias.pipeline import prune_edges
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "stages.stage2.epochs": 3})
        >>> model = train(config, corpus)
        >>> pruned, edges = prune_edges(model, threshold=0.5)
        >>> edges.after < edges.before, len(pruned.predict(corpus.test.texts))
        (True, 75)
    """
    if (threshold is None) == (top_k is None):
        raise ConfigError("pruning takes a threshold or a top_k, and not both")
    pruned = [_pruned(member, threshold, top_k) for member in model.members]
    edges = EdgeCount(
        before=sum(count.before for _, count in pruned),
        after=sum(count.after for _, count in pruned),
        for_labels=sum(count.for_labels for _, count in pruned),
    )
    first, *others = (member for member, _ in pruned)
    whole = copy(model)
    whole.model = first.model
    whole.facts = first.facts | {PRUNED: first.facts[PRUNED] | asdict(edges)}
    whole.others = tuple(others)
    return whole, edges


def _pruned(member: Elias, threshold: float | None, top_k: int | None) -> tuple[Elias, EdgeCount]:
    graph = member.model.graph
    if threshold is not None:
        strong, by = edges_above(graph, threshold), {"threshold": threshold}
    else:
        assert top_k is not None
        strong, by = strongest_edges_of(graph, top_k), {"top_k": top_k}
    left = pruned_graph(graph, strong)
    edges = EdgeCount(
        before=graph.n_edges, after=left.n_edges, for_labels=left.n_edges - int(strong.sum())
    )
    pruned = copy(member)
    pruned.model = with_graph(member.model, left)
    measured = ("metrics", PROBABILITIES)
    pruned.facts = {name: fact for name, fact in member.facts.items() if name not in measured}
    pruned.facts[PRUNED] = by | asdict(edges)
    return pruned, edges
