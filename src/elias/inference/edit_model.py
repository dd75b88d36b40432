"""Edit a trained model without training: its labels, and the edges of its graph (Table 9).

Every function returns a new `Elias` and does not change the given one. Added labels are not part of
the index (`elias.rerank.added_labels` scores them), so that the scores of all other labels do not
change. Removing and merging labels changes the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, identity, vstack

from elias.data.corpus import Corpus, Split
from elias.errors import ConfigError, DataError, ModelError, check_strings
from elias.labels import LabelTable
from elias.model.elias import EliasModel, LinearRows
from elias.model.graph import edges_above, pruned_graph, relabel_graph, strongest_edges_of
from elias.model.one_vs_all import OneVsAll
from elias.rerank.added_labels import AddedLabels, label_vectors
from elias.rerank.calibration import LabelNames
from elias.rerank.probabilities import PROBABILITIES
from elias.rerank.sparse_ranker import SparseRanker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elias.inference.predictor import Elias
    from elias.rerank.reranker import Reranker

PRUNED = "pruned"
"""Metadata key under which a pruned model stores the pruning rule and the edge counts."""


def add_labels(
    elias: Elias, table: LabelTable, examples: Sequence[str], example_labels: csr_matrix
) -> Elias:
    """Return a model with additional labels. See `Elias.add_labels`."""
    if elias.model.encoder.reads_features:
        raise ModelError(
            "labels cannot be added, because the model was trained on features; train it on texts"
        )
    if not elias.model.labels.whole:
        raise ModelError(
            "labels cannot be added to a model divided among processes; load it in one process"
        )
    _check_names(table)
    known = elias.label_table.match(table)
    repeated = [label for label, match in enumerate(known) if match is not None]
    if repeated:
        first = table.id(repeated[0]) or table[repeated[0]]
        raise DataError(
            f"the model already has {len(repeated)} of the {len(table)} labels, such as "
            f"{first!r}; remove them, or pass skip_known=True (--skip-known); different labels of "
            "the same name need ids, or other names"
        )
    keys = Counter(key or name for name, key, *_ in table.rows())
    twice = next((key for key, count in keys.items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"the label {twice!r} is given twice; give each label once; different labels of the "
            "same name need ids, or other names"
        )
    labels = elias.label_table + table
    ids = np.arange(elias.n_labels, len(labels))

    def add(member: Elias) -> Elias:
        parts = label_vectors(member.model, elias.label_table, table, examples, example_labels)
        added = AddedLabels(ids, *parts)
        if member.added is not None:
            added = member.added + added
        return copy_with(member, label_names=labels, added=added)

    return _each_member(elias, add)


def _check_names(names: Sequence[str]) -> None:
    check_strings("names", names)
    empty = next((name for name in names if not name.strip()), None)
    if empty is not None:
        raise DataError(
            f"the name {empty!r} is empty; give the label a name with at least one character that "
            "is not a space"
        )


def example_texts(
    table: LabelTable, examples: Corpus | Split | Mapping[str, Sequence[str]] | None
) -> tuple[list[str], csr_matrix]:
    """Return the example texts of new labels, and the new labels of each text (N, A).

    Raises:
        DataError: If the examples have no text, or no label of the table.
    """
    if examples is None:
        return [], csr_matrix((0, len(table)), dtype=np.float32)
    if isinstance(examples, Mapping):
        for name, of_label in examples.items():
            if isinstance(of_label, str):
                raise DataError(
                    f"the examples of {name!r} are a single text; put it in a list: [text]"
                )
            check_strings(f"examples[{name!r}]", of_label)
        pairs = [(name, text) for name, texts in examples.items() for text in texts]
        columns = table.match([name for name, _ in pairs])
        unknown = next(
            (name for (name, _), column in zip(pairs, columns, strict=True) if column is None), None
        )
        if unknown is not None:
            raise DataError(
                f"the examples name {unknown!r}, which is not a label of the table; add it to the "
                "table, or remove its examples"
            )
        labels = csr_matrix(
            (np.ones(len(pairs), np.float32), (np.arange(len(pairs)), columns)),
            shape=(len(pairs), len(table)),
        )
        return [text for _, text in pairs], labels
    if not isinstance(examples, Corpus | Split):
        raise DataError(
            f"the examples are {type(examples).__name__}; give a corpus (elias.load_corpus), or a "
            "dictionary from names of labels to lists of texts"
        )
    splits = [examples] if isinstance(examples, Split) else list(examples.splits.values())
    if isinstance(examples, Corpus):
        matches = table.match(examples.label_names)
        known = [label for label, match in enumerate(matches) if match is not None]
        if not known:
            raise DataError(
                f"{examples.source or 'examples'}: no example has one of the new labels, such as "
                f"{table[0]!r}; the examples have labels such as {examples.label_names[0]!r}; "
                "label them with the ids or names of the new labels"
            )
        columns = [matches[label] for label in known]
        select = csr_matrix(
            (np.ones(len(known), np.float32), (known, columns)),
            shape=(examples.n_labels, len(table)),
        )
    else:
        select = identity(len(table), dtype=np.float32, format="csr")
    texts: list[str] = []
    parts = []
    for split in splits:
        if split.texts is None:
            raise DataError("the examples have features instead of texts; give examples with texts")
        labels = csr_matrix(split.labels @ select)
        rows = np.flatnonzero(np.diff(labels.indptr))
        texts += (split.texts[row] for row in rows.tolist())
        parts.append(labels[rows])
    return texts, vstack(parts, format="csr")


def rename_label(elias: Elias, label: int, name: str) -> Elias:
    """Return a model in which a label has another name. The old name becomes a synonym."""
    _check_names([name])
    rows: list[Any] = list(elias.label_table.rows())
    old_name, key, synonyms, *rest = rows[label]
    for other, (other_name, other_key, *_) in enumerate(rows):
        has_own_id = key and other_key and key != other_key
        if other != label and other_name == name and not has_own_id:
            raise DataError(
                f"label {other} is already called {name!r}; merge the two labels, or choose "
                "another name"
            )
    others = tuple(dict.fromkeys(s for s in (*synonyms, old_name) if s != name))
    rows[label] = (name, key, others, *rest)
    labels = LabelTable.from_rows(rows)
    return _each_member(elias, lambda member: copy_with(member, label_names=labels))


def remove_labels(elias: Elias, labels: Sequence[int]) -> Elias:
    """Return a model without some labels. The remaining labels are renumbered."""
    keep = np.ones(elias.n_labels, dtype=bool)
    keep[list(labels)] = False
    if not keep[: elias.model.n_labels].any():
        raise ModelError(
            "none of the labels that the model was trained on would remain; keep one of them"
        )
    new_ids = np.where(keep, np.cumsum(keep) - 1, -1)
    table = elias.label_table.take(np.flatnonzero(keep).tolist())
    return _each_member(elias, lambda member: _relabel(member, new_ids, table))


def merge_labels(elias: Elias, label: int, into: int) -> Elias:
    """Return a model in which ``label`` is merged into ``into``, which keeps its name."""
    if label == into:
        raise DataError(
            f"the label {elias.label_names[label]!r} cannot be merged with itself; give two labels"
        )
    rows: list[Any] = list(elias.label_table.rows())
    name, key, synonyms, *rest = rows[into]
    others = (*synonyms, rows[label][0], *rows[label][2])
    others = tuple(dict.fromkeys(synonym for synonym in others if synonym != name))
    # if only one of the two labels is in the index, the merged label gets its position
    stays, goes = sorted((label, into)) if into >= elias.model.n_labels else (into, label)
    rows[stays] = (name, key, others, *rest)
    del rows[goes]
    table = LabelTable.from_rows(rows)
    new_ids = np.arange(elias.n_labels) - (np.arange(elias.n_labels) > goes)
    new_ids[goes] = new_ids[stays]
    return _each_member(elias, lambda member: _relabel(member, new_ids, table))


def _each_member(elias: Elias, edit: Any) -> Elias:
    """Apply the same edit to every member of an ensemble."""
    edited: Elias = edit(elias)
    edited.others = tuple(map(edit, elias.others))
    return edited


def copy_with(elias: Elias, **parts: Any) -> Elias:
    """Return a copy of the model in which ``parts`` replace the attributes of the same names.

    The copy has no metrics, because the metrics of the original model do not apply to it.
    """
    edited = copy(elias)
    for name, part in parts.items():
        setattr(edited, name, part)
    if edited.added is not None:
        edited.added = edited.added.named(edited.label_table, edited.model, edited.reranker)
    measured = ("metrics", PROBABILITIES)
    edited.metadata = {k: value for k, value in elias.metadata.items() if k not in measured}
    edited.folder = None
    return edited


def _relabel(elias: Elias, new_ids: NDArray[np.int64], table: LabelTable) -> Elias:
    """Return a model in which label i has the id ``new_ids[i]``; -1 removes the label.

    Labels with the same new id are merged: their classifiers are averaged, weighted by
    frequency, and the weights of their edges are added.
    """
    if not elias.model.labels.whole:
        raise ModelError(
            "labels of a model divided among processes cannot be edited; load it in one process"
        )
    n_old = elias.model.n_labels
    old_ids, reranker = new_ids[:n_old], elias.reranker
    n_new = int(old_ids.max()) + 1
    weights = np.ones(n_old) if reranker is None else 1.0 + reranker.frequencies
    remaining = np.flatnonzero(old_ids >= 0)
    shares = weights / np.bincount(old_ids[remaining], weights[remaining], n_new)[old_ids]
    mixing = csr_matrix((shares[remaining], (old_ids[remaining], remaining)), shape=(n_new, n_old))
    return copy_with(
        elias,
        model=_relabel_model(elias.model, old_ids, mixing),
        reranker=None if reranker is None else _relabel_ranker(reranker, old_ids, mixing),
        added=None if elias.added is None else elias.added.relabel(new_ids),
        label_names=table,
    )


@torch.no_grad()
def _relabel_model(model: EliasModel, new_ids: NDArray[np.int64], mixing: csr_matrix) -> EliasModel:
    n_labels, device = mixing.shape[0], model.labels.weight.device
    weight, bias = (
        torch.from_numpy((mixing @ tensor.float().cpu().numpy()).astype(np.float32)).to(device)
        for tensor in (model.labels.weight.detach(), model.labels.bias.detach())
    )
    with torch.device("meta"):
        rows = LinearRows(n_labels, weight.shape[1])
    rows.weight = torch.nn.Parameter(weight.to(model.labels.weight.dtype))
    rows.bias = torch.nn.Parameter(bias.to(model.labels.bias.dtype))
    if isinstance(model, OneVsAll):
        edited: EliasModel = OneVsAll(model.encoder, n_labels, rows).to(device)
    else:
        graph = relabel_graph(model.graph, torch.from_numpy(new_ids), n_labels)
        with torch.device("meta"):
            edited = EliasModel(model.encoder, graph, model.alpha, rows)
    edited.clusters = model.clusters
    return edited.train(model.training)


def _relabel_ranker(reranker: Reranker, new_ids: NDArray[np.int64], mixing: csr_matrix) -> Reranker:
    remains, n_labels = new_ids >= 0, mixing.shape[0]
    ranker = reranker.ranker
    shares = mixing.astype(np.float32)
    weights = csr_matrix(ranker.weights @ shares.T)
    dense_weights = csr_matrix(shares @ ranker.dense_weights)
    weights.sort_indices()
    dense_weights.sort_indices()
    biases = np.asarray(mixing @ ranker.biases, dtype=np.float32)
    counts = np.bincount(new_ids[remains], reranker.frequencies[remains], n_labels).astype(np.int64)
    names = reranker.names
    if names is not None:  # a merged label keeps the name of its most frequent part
        main = np.asarray(mixing.argmax(axis=1)).ravel()
        ones = np.ones(len(names.columns), dtype=np.int8)
        shape = (len(new_ids), reranker.features.n_features)
        rows = csr_matrix((ones, names.columns, names.starts), shape=shape)[main]
        starts, columns = rows.indptr.astype(np.int64), rows.indices.astype(np.uint32)
        names = LabelNames(starts, columns, names.idf)
    return replace(
        reranker,
        ranker=SparseRanker(weights, dense_weights, biases),
        frequencies=counts,
        names=names,
        cross_fitted=(),
    )


# --- edges ---


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCount:
    """Number of edges before and after pruning, summed over all members."""

    before: int
    after: int
    for_labels: int
    """Number of edges that were kept only because each is the strongest edge of its label."""

    @property
    def removed(self) -> float:
        """Return the fraction of edges that were removed."""
        return 1 - self.after / max(self.before, 1)


def prune_edges(
    model: Elias, *, threshold: float | None = None, top_k: int | None = None
) -> tuple[Elias, EdgeCount]:
    """Return a copy of the model without its weak edges, and the edge counts.

    The remaining edges keep their scores, and every label keeps its strongest edge. All members of
    an ensemble are pruned. The ``metadata`` of the copy contains no metrics, because the metrics of
    the original model do not apply to it.

    Args:
        model: A model with a learned graph.
        threshold: Keep edges whose score ŝ_{c,ℓ} (Eq. 5) is at least this value.
        top_k: Keep the ``top_k`` strongest edges of each cluster.

    Raises:
        ConfigError: If both or neither of ``threshold`` and ``top_k`` are given, or the model has
            no learned graph.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> from elias import prune_edges
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
        >>> model = train(corpus, config)
        >>> pruned, edges = prune_edges(model, threshold=0.5)
        >>> edges.after < edges.before, len(pruned.predict(corpus.test.texts))
        (True, 75)
    """
    if (threshold is None) == (top_k is None):
        raise ConfigError("give either threshold or top_k to prune edges")
    counts: list[EdgeCount] = []

    def prune(member: Elias) -> Elias:
        whole, graph = member.model, member.model.graph
        if threshold is not None:
            strong, rule = edges_above(graph, threshold), {"threshold": threshold}
        else:
            assert top_k is not None
            strong, rule = strongest_edges_of(graph, top_k), {"top_k": top_k}
        remaining = pruned_graph(graph, strong)
        after = remaining.n_edges
        count = EdgeCount(before=graph.n_edges, after=after, for_labels=after - int(strong.sum()))
        counts.append(count)
        with torch.device("meta"):  # the new classifiers are replaced below
            new = EliasModel(whole.encoder, remaining, whole.alpha)
        new.clusters, new.labels, new.training = whole.clusters, whole.labels, whole.training
        pruned = copy_with(member, model=new)
        pruned.metadata[PRUNED] = rule | asdict(count)
        return pruned

    pruned = _each_member(model, prune)
    names = ("before", "after", "for_labels")
    total = EdgeCount(**{name: sum(getattr(count, name) for count in counts) for name in names})
    pruned.metadata[PRUNED] |= asdict(total)
    return pruned, total
