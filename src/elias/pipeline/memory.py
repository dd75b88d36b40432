"""How much memory a run will take, from its sizes, before it takes it.

The arithmetic follows what the code allocates; where a library allocates (a transformer's layers),
a measured number of bytes stands for it. `benchmarks/memory_check.py` holds it against peaks.

Notation: N points (S of them to set up from), L labels, C clusters, E edges each, D width of φ, B
points a step, K shortlist, Y labels of the point that has most, T tokens a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from elias.kernels.device import has_triton

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, StageConfig
    from elias.data.tokens import Tokens
    from elias.model.encoder import TextEncoder

SO_FAR = "program and corpus, so far"
FLOAT, INT = 4, 8
_MOMENTS = 2 * FLOAT
_LAYER_BYTES = {"float32": 66, "bfloat16": 41}
"""Bytes kept for backward by a transformer's layer, a token and dimension."""
_LAYER_BYTES_COMPILED = {"float32": 50, "bfloat16": 37}
_SLOT_BYTES = 180
"""Bytes in work for each slot of the shortlists: labels, paths, logits, scores, gradients."""
_SLOT_BYTES_KERNELS = 40
_PATH_BYTES_KERNELS = 24
"""Bytes the search kernels hold for each path listed."""
_SEARCH_TABLES = 2 << 30
"""The most that the search kernels take for the place of each label, a point in work."""
_SEARCHED_AT_ONCE = 264
"""Points in work on a GPU, at most, as `triton_search.expand_beam` has it."""
_CLUSTER_BYTES = 5 * FLOAT
"""Bytes for each cluster's score of a point: logits, scores, ranks, gradients."""
_POSITIVE_BYTES = 12 * INT
_EDGE_BYTES = 6 * FLOAT + 2
"""Bytes in work for each edge on a CPU: its score on the way forward and back, and masks."""
_SEARCH_BYTES = 6 * FLOAT
"""Bytes for each label in the memory of a thread that searches (see `compiled.expand_beam`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What decides how much memory a run takes, beside its configuration."""

    n_points: int
    n_setup: int
    n_labels: int
    n_entries: int
    """Labels of all points together."""
    most_labels: int
    """Y."""
    dim: int
    dense_weights: int
    """Weights of the encoder that every step moves."""
    table_rows: int = 0
    """Rows of D weights of which a step moves few: the bag's vectors."""
    tokens_per_text: float = 0.0
    longest_text: int = 0
    """T, where texts are padded: a transformer's."""
    layers: int = 0
    width: int = 0
    """Of a transformer's layers."""
    bow_per_text: float = 0.0
    """Distinct words of a text, for clusters."""
    n_threads: int = 1
    n_processes: int = 1


def sizes_of(
    encoder: TextEncoder,
    labels: csr_matrix,
    tokens: Tokens,
    n_setup: int,
    bow_per_text: float,
    config: EliasConfig,
    n_processes: int = 1,
) -> Sizes:
    """Return the sizes of a run on points with these labels; ``tokens`` may be of some of them."""
    tables = encoder.table_names()
    named = dict(encoder.named_parameters())
    settings = getattr(getattr(encoder, "transformer", None), "config", None)
    counts = labels.indptr[1:] - labels.indptr[:-1]
    return Sizes(
        n_points=labels.shape[0],
        n_setup=n_setup,
        n_labels=labels.shape[1],
        n_entries=labels.nnz,
        most_labels=int(counts.max(initial=1)),
        dim=encoder.dim,
        dense_weights=sum(p.numel() for name, p in named.items() if name not in tables),
        table_rows=sum(len(named[name]) for name in tables),
        tokens_per_text=len(tokens.ids) / max(1, len(tokens)),
        longest_text=0 if settings is None else config.encoder.max_length,
        layers=0 if settings is None else int(getattr(settings, "num_hidden_layers", 0)),
        width=0 if settings is None else int(settings.hidden_size),
        bow_per_text=bow_per_text,
        n_threads=torch.get_num_threads(),
        n_processes=n_processes,
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes that a run is going to take, by what they are for."""

    device: Mapping[str, int]
    """On the device that trains; empty where that is the CPU."""
    host: Mapping[str, int]

    @property
    def device_total(self) -> int:
        """Return the peak on the device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Return the peak of the process's own memory."""
        return sum(self.host.values())


def expected_memory(
    sizes: Sizes,
    config: EliasConfig,
    device: torch.device,
    *,
    resident: int = 0,
    keeps_checkpoints: bool = True,
    validates: bool = True,
) -> Expected:
    """Return what a run takes at its peak.

    Args:
        sizes: Of the data and the encoder.
        config: Resolved.
        device: Where it trains.
        resident: What the process holds already: interpreter, libraries, corpus, encoder.
        keeps_checkpoints: Whether there is a run folder.
        validates: Whether points are held out, so that the best epoch's weights are kept.
    """
    by_kernels = device.type == "cuda" and has_triton()
    stages = [_stage(sizes, config, stage, device, by_kernels) for stage in config.stages]
    steps = max(stages, key=lambda parts: sum(parts.values()))
    weights = steps["label weights"] + steps["other weights"] + steps["edges"]
    kept = weights if validates else 0
    state = weights + steps["optimizer"] + steps["averaged weights"] + kept
    copy = state if keeps_checkpoints and config.checkpoint.keep > 0 else 0
    host = {
        SO_FAR: resident,
        "words of the points to set up from": round(sizes.n_setup * sizes.bow_per_text * 8),
        "the encoder's first weights": _encoder_bytes(sizes),
    }
    if config.rerank.enabled and config.rerank.embedding == "first":
        host["the encoder before training, for the ranker"] = _encoder_bytes(sizes)
    setup = _setup(sizes) + steps["label weights"] + steps["other weights"] + steps["edges"]
    if device.type == "cpu":
        training = {**steps, "best epoch": kept, "checkpoint on its way": copy}
        training["other weights"] -= _encoder_bytes(sizes)  # resident already
        return Expected({}, host | _larger(training, {"setting up": setup}))
    training = {"best epoch": kept, "checkpoint on its way": copy}
    return Expected(steps, host | _larger(training, {"setting up": setup}))


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return max(one, other, key=lambda parts: sum(parts.values()))


def _encoder_bytes(sizes: Sizes) -> int:
    return FLOAT * (sizes.dense_weights + sizes.table_rows * sizes.dim)


def _setup(sizes: Sizes) -> int:
    """Return what φ of the points and the directions of the labels take (`training.starts`)."""
    return sizes.n_setup * sizes.dim * 4 * FLOAT + sizes.n_labels * sizes.dim * 4 * FLOAT


def _stage(
    sizes: Sizes,
    config: EliasConfig,
    stage: StageConfig,
    device: torch.device,
    by_kernels: bool,
) -> dict[str, int]:
    """Return what the steps of a stage take on their device."""
    index = config.index
    assert index.n_clusters is not None
    assert index.edges_per_cluster is not None
    clusters, dim = index.n_clusters, sizes.dim
    labels = -(-sizes.n_labels // sizes.n_processes)  # rows of W_L are dealt to the processes
    width = index.edges_per_cluster if stage.learn_graph else -(-sizes.n_labels // clusters)
    edges = clusters * width
    compact = index.label_storage == "compact"
    dense = sizes.dense_weights + clusters * (dim + 1)
    on_cpu = device.type == "cpu"
    label_weights = labels * dim * (2 if compact else FLOAT) + labels * FLOAT
    others = dense + sizes.table_rows * dim
    moments = _MOMENTS * dense + sizes.table_rows * (dim * _MOMENTS + (INT if on_cpu else 0))
    if compact:
        moments += labels * (dim * 2 + 4 * FLOAT)
    else:
        moments += labels * (dim + 1) * _MOMENTS + labels * (2 * INT if on_cpu else FLOAT)
    if stage.learn_graph:
        moments += edges * (_MOMENTS + (FLOAT if by_kernels else 0))
    gradients = FLOAT * (dense if on_cpu else dense + sizes.table_rows * dim)
    if sizes.layers and not on_cpu:
        gradients += FLOAT * sizes.dense_weights  # of a step, and where CUDA graphs leave them
    if stage.learn_graph and not by_kernels:
        gradients += FLOAT * edges
    averaged = others * FLOAT + labels * (dim + 1) * FLOAT if stage.average_from < 1 else 0
    return {
        "label weights": label_weights,
        "other weights": FLOAT * others,
        "edges": edges * (INT + FLOAT),
        "optimizer": moments,
        "gradients": gradients,
        "averaged weights": averaged,
        "activations of the encoder": _encoder_activations(sizes, config, stage, device),
        "activations of the index": _index_activations(sizes, config, stage, edges, by_kernels),
    }


def _encoder_activations(
    sizes: Sizes, config: EliasConfig, stage: StageConfig, device: torch.device
) -> int:
    batch = min(stage.batch_size, sizes.n_points)
    if not sizes.layers:
        hidden = config.encoder.hidden_dim
        tokens = round(batch * sizes.tokens_per_text)
        rows = min(sizes.table_rows, tokens) * sizes.dim * FLOAT  # the gradient of touched vectors
        return rows + tokens * 5 * INT + batch * FLOAT * (8 * sizes.dim + 4 * hidden)
    encoder = config.encoder
    half = encoder.precision == "bfloat16" or (
        encoder.precision == "auto" and device.type == "cuda"
    )
    kind = "bfloat16" if half else "float32"
    compiled = encoder.compile != "off" and device.type == "cuda"
    each = (_LAYER_BYTES_COMPILED if compiled else _LAYER_BYTES)[kind]
    tokens = batch * sizes.longest_text
    per_layer = tokens * sizes.width * each
    if encoder.gradient_checkpointing:
        kept = tokens * sizes.width * (2 if half else FLOAT)
        return per_layer + sizes.layers * kept
    cast = (
        2 * sizes.dense_weights if half else 0
    )  # autocast keeps the weights of a step in bfloat16
    return sizes.layers * per_layer + cast


def _index_activations(
    sizes: Sizes, config: EliasConfig, stage: StageConfig, edges: int, by_kernels: bool
) -> int:
    index, dim = config.index, sizes.dim
    batch = min(stage.batch_size, sizes.n_points)
    assert index.n_clusters is not None
    assert index.train_clusters is not None
    assert index.train_shortlist is not None
    if index.kind == "all":  # in chunks of labels
        return batch * min(sizes.n_labels, 1 << 15) * 4 * FLOAT + (1 << 15) * dim * 2 * FLOAT
    slots = batch * index.train_shortlist
    beam = min(max(index.train_clusters, sizes.most_labels), index.n_clusters)
    work = batch * index.n_clusters * _CLUSTER_BYTES + batch * sizes.most_labels * _POSITIVE_BYTES
    if by_kernels:
        width = edges // index.n_clusters
        paths = batch * beam * width
        numbered = beam * width + 4 * index.train_shortlist  # as `triton_search.expand_beam` has it
        entry = 2 if numbered <= 1 << 16 else 4
        tables = min(_SEARCH_TABLES, min(batch, _SEARCHED_AT_ONCE) * sizes.n_labels * entry)
        listed = slots * _SLOT_BYTES_KERNELS + paths * _PATH_BYTES_KERNELS
        return work + listed + tables + edges * FLOAT
    touched = min(sizes.n_labels, slots) * dim * FLOAT
    searched = sizes.n_labels * (sizes.n_threads * _SEARCH_BYTES + INT)
    edge_work = edges * (_EDGE_BYTES if stage.learn_graph else FLOAT + 1)
    return work + slots * _SLOT_BYTES + touched + searched + edge_work
