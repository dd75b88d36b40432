"""Estimate the memory of a run and compare it with the memory of the machine.

The formulas follow the allocations of the code. For allocations of libraries, such as the layers of
a transformer, measured constants are used. `benchmarks/memory_check.py` compares the estimate with
measured peaks.

Notation: N points (S of them for initialisation), L labels, C clusters with E edges each, D width
of φ, B points per step, K shortlist, Y largest number of labels of a point, T tokens per text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, ResolvedConfig, ResolvedStage
from elias.config.pretrained import pretrained_sizes
from elias.config.resolve import MIN_BATCH_SIZE
from elias.data.corpus import Corpus
from elias.distributed import process_counts
from elias.errors import RunError
from elias.kernels import has_triton
from elias.model.encoder import TextEncoder
from elias.text.tokens import Tokens
from elias.training.label_texts import NEIGHBOURS

logger = logging.getLogger(__name__)

FLOAT, INT = 4, 8
_MOMENTS = 2 * FLOAT
_LAYER_BYTES = {"float32": 66, "bfloat16": 41}
"""Bytes per token and dimension that a transformer layer keeps for the backward pass."""
_LAYER_BYTES_COMPILED = {"float32": 50, "bfloat16": 37}
_SLOT_BYTES = 180
"""Bytes per slot of a point's shortlist: label, path, logit, scores and gradients."""
_SLOT_BYTES_KERNELS = 40
_PATH_BYTES_KERNELS = 24
"""Bytes that the search kernels use for each path."""
_SEARCH_TABLES = 2 << 30
"""Maximum bytes of the search kernels' tables, which have one entry per label and point."""
_SEARCHED_AT_ONCE = 264
"""Largest number of points that a GPU searches at once, see `elias.kernels.gpu.search`."""
_CLUSTER_BYTES = 5 * FLOAT
"""Bytes per cluster and point: logit, score, rank and gradient."""
_POSITIVE_BYTES = 12 * INT
_EDGE_BYTES = 6 * FLOAT + 2
"""Bytes per edge in a step on a CPU: scores, gradients and masks."""
_SEARCH_BYTES = 6 * FLOAT
"""Bytes per label that a search thread uses, see `elias.kernels.cpu.search`."""
_ALL_CHUNK = 1 << 15
"""Number of labels that one-vs-all scores at a time."""
_LARGE_SHARE = 0.15
"""Suggest remedies for purposes that use more than this share of the memory."""

PROCESS = "program and corpus"
_BEST, _CHECKPOINT, _INITIALISATION = "best epoch", "checkpoint being written", "initialisation"
_ENCODER_WORK, _INDEX_WORK = "encoder activations", "index activations"


class Capacity(NamedTuple):
    """Total and free bytes of the host or of a GPU."""

    total: int
    free: int


def host_capacity() -> Capacity | None:
    """Return the memory of this machine or of its container, or None if it is unknown."""
    info = _read_kilobytes(Path("/proc/meminfo"))
    if "MemTotal" not in info:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
        return Capacity(total, total)
    capacity = Capacity(info["MemTotal"], info.get("MemAvailable", info["MemTotal"]))
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    if limit is None or limit >= capacity.total:
        return capacity
    used = _read_number(Path("/sys/fs/cgroup/memory.current")) or 0
    return Capacity(limit, min(capacity.free, max(0, limit - used)))


def device_capacity(device: torch.device) -> Capacity | None:
    """Return the memory of a GPU, or None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Capacity(total, free + torch.cuda.memory_reserved(device))


def resident_bytes() -> int:
    """Return the memory that this process uses, or 0 if it is unknown."""
    return _read_kilobytes(Path("/proc/self/status")).get("VmRSS", 0)


def shared_bytes() -> int:
    """Return the part of `resident_bytes` that processes share, such as mapped files."""
    status = _read_kilobytes(Path("/proc/self/status"))
    return status.get("RssFile", 0) + status.get("RssShmem", 0)


def _read_kilobytes(path: Path) -> dict[str, int]:
    """Return the numbers in the lines ``name: number kB`` of a file, in bytes, by name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    cells = (line.replace(":", " ").split() for line in lines)
    return {c[0]: int(c[1]) << 10 for c in cells if len(c) == 3 and c[2] == "kB"}


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the data and the encoder that determine the memory of a run."""

    n_points: int
    n_setup: int
    """S: number of points used for initialisation."""
    n_labels: int
    n_entries: int
    """Number of (point, label) pairs."""
    most_labels: int
    """Y: largest number of labels of a point."""
    dim: int
    dense_weights: int
    """Number of encoder weights that every step updates."""
    table_rows: int = 0
    """Rows of tables with sparse gradients, such as the word vectors of a bag of words."""
    tokens_per_text: float = 0.0
    longest_text: int = 0
    """T: padded length of the texts of a transformer; 0 for a bag of words."""
    layers: int = 0
    width: int = 0
    """Width of a transformer's layers."""
    words_per_text: float = 0.0
    """Mean number of distinct words of a text."""
    n_label_points: int = 0
    """Number of label texts trained on in an epoch."""
    tokens_per_label_text: float = 0.0
    resident: int = 0
    """Bytes that the process already uses: interpreter, libraries, corpus, encoder."""
    keeps_checkpoints: bool = True
    """Whether the run has a folder, in which checkpoints are written."""
    validates: bool = True
    """Whether points are held out. The weights of the best epoch are then kept."""
    n_threads: int = field(default_factory=torch.get_num_threads)
    n_processes: int = field(default_factory=lambda: process_counts()[0])

    @classmethod
    def measure(
        cls,
        encoder: TextEncoder,
        labels: csr_matrix,
        tokens: Tokens,
        config: ResolvedConfig,
        n_setup: int,
        words_per_text: float,
        n_label_points: int,
        label_tokens: Tokens | None,
        **run: bool,
    ) -> Sizes:
        """Return the sizes of a run on points with ``labels``.

        ``tokens`` and ``label_tokens`` may cover only a sample of the texts and label texts.
        ``run`` has the fields ``keeps_checkpoints`` and ``validates``.
        """
        tables, window = encoder.table_names(), config.encoder.max_length
        parameters = dict(encoder.named_parameters())
        transformer = getattr(getattr(encoder, "transformer", None), "config", None)
        longest = int(tokens.lengths.max(initial=1))  # rounded up to whole windows below
        return cls(
            n_points=labels.shape[0],
            n_setup=n_setup,
            n_labels=labels.shape[1],
            n_entries=labels.nnz,
            most_labels=_most_labels(labels, has_label_texts=n_label_points > 0),
            dim=encoder.dim,
            dense_weights=sum(p.numel() for name, p in parameters.items() if name not in tables),
            table_rows=sum(len(parameters[name]) for name in tables),
            tokens_per_text=_tokens_per_text(tokens),
            longest_text=0 if transformer is None else -(-longest // window) * window,
            layers=int(getattr(transformer, "num_hidden_layers", 0)),
            width=0 if transformer is None else int(transformer.hidden_size),
            words_per_text=words_per_text,
            n_label_points=n_label_points,
            tokens_per_label_text=_tokens_per_text(label_tokens),
            resident=resident_bytes(),
            **run,
        )

    @classmethod
    def expected(cls, config: ResolvedConfig, corpus: Corpus) -> Sizes | None:
        """Return the sizes of a run before its transformer is loaded; None if they are unknown.

        Every text counts as long as the longest one that the encoder reads.
        """
        encoder, labels = config.encoder, corpus.train.labels
        transformer = pretrained_sizes(encoder.model)
        if transformer is None:
            return None
        length = encoder.max_length * encoder.windows
        return cls(
            n_points=labels.shape[0],
            n_setup=labels.shape[0],
            n_labels=labels.shape[1],
            n_entries=labels.nnz,
            most_labels=_most_labels(labels, has_label_texts=True),
            dim=encoder.bottleneck or transformer.width,
            dense_weights=transformer.weights,
            tokens_per_text=float(length),
            longest_text=length,
            layers=transformer.layers,
            width=transformer.width,
        )

    @property
    def encoder_bytes(self) -> int:
        """Return the bytes of the encoder's weights."""
        return FLOAT * (self.dense_weights + self.table_rows * self.dim)


def _most_labels(labels: csr_matrix, *, has_label_texts: bool) -> int:
    """Return the largest number of labels of a point or of a label text."""
    return int(np.diff(labels.indptr).max(initial=1 + NEIGHBOURS * has_label_texts))


def _tokens_per_text(tokens: Tokens | None) -> float:
    return 0.0 if tokens is None else len(tokens.ids) / max(1, len(tokens))


class MemoryCheck(NamedTuple):
    """The memory that a run needs on the host or a GPU, and the capacity there."""

    memory: str
    needed: int
    capacity: Capacity
    n_processes: int = 1
    """Number of processes that share this memory. GPU memory is not shared."""

    @property
    def possible(self) -> bool:
        """Return whether the run fits into the total memory."""
        return self.needed <= self.capacity.total

    @property
    def free_now(self) -> bool:
        """Return whether the run fits into the memory that is free now, and into the total."""
        return self.needed <= min(self.capacity)


_DEVICE, _HOST = "GPU memory", "memory"


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated peak memory of a run, in bytes by purpose."""

    sizes: Sizes
    config: ResolvedConfig
    device: torch.device
    on_host: Mapping[str, int]
    on_device: Mapping[str, int]
    """Bytes on the GPU that trains; empty when training on a CPU."""

    @property
    def host_total(self) -> int:
        """Return the peak host memory of this process."""
        return sum(self.on_host.values())

    @property
    def device_total(self) -> int:
        """Return the peak GPU memory."""
        return sum(self.on_device.values())

    @property
    def machine_total(self) -> int:
        """Return the peak host memory of all processes of this machine. Shared pages count once."""
        return _total_of(process_counts()[1], self.host_total)

    def fits(self, n_running: int = 1) -> list[MemoryCheck]:
        """Compare the memory that the run needs with the memory of the machine and of the GPU.

        Memory already in use by the ``n_running`` processes of this run counts as free.
        """
        fits = []
        host, device = host_capacity(), device_capacity(self.device)
        if device is not None:
            fits.append(MemoryCheck(_DEVICE, self.device_total, device))
        if host is not None:
            used = _total_of(n_running, self.on_host.get(PROCESS, 0))
            host = host._replace(free=host.free + used)
            fits.append(MemoryCheck(_HOST, self.machine_total, host, process_counts()[1]))
        return fits

    def check(self, *, ignore: bool = False) -> None:
        """Raise if the run needs more than the total memory; warn if it needs more than is free.

        Raises:
            RunError: If the run cannot fit and ``ignore`` is not set. It names settings to change.
        """
        fits = self.fits(process_counts()[1])
        for fit in fits:
            needed, (total, free) = gib(fit.needed), map(gib, fit.capacity)
            if fit.free_now:
                continue
            if fit.possible:
                text = "the run needs about %s of %s, of which %s is free now"
                logger.warning(text, needed, fit.memory, free)
            elif ignore:
                text = "the run needs about %s of %s, but there is only %s"
                logger.warning(text, needed, fit.memory, total)
            else:
                advice = "; ".join(self.remedies(fits)) or "use a larger machine"
                raise RunError(
                    f"the run needs about {needed} of {fit.memory}, but there is only {total}; "
                    f"{advice}; or pass ignore_memory=True to try it anyway"
                )

    def remedies(self, fits: Sequence[MemoryCheck] = ()) -> list[str]:
        """Return suggestions for reducing the memory, the most effective first.

        The suggested batch size fits the capacities in ``fits``.
        """
        sizes, config = self.sizes, self.config
        parts = dict(self.on_device or self.on_host)
        total = sum(parts.values())
        large = {name for name, size in parts.items() if size > _LARGE_SHARE * total}
        remedies = []
        if sizes.most_labels > 10 * max(1, sizes.n_entries // max(1, sizes.n_points)) + 1000:
            remedies.append(
                f"drop or split the point with {sizes.most_labels:,} labels, because all points "
                "of its batches are padded to this number"
            )
        if large & {"label weights", "optimizer", _BEST, _CHECKPOINT, _INITIALISATION}:
            if sizes.dim > 64:
                key = "encoder.bottleneck" if sizes.layers else "encoder.dim"
                remedies.append(f"set {key}={sizes.dim // 2}")
            has_compact = self.device.type == "cuda" or config.index.kind == "all"
            if has_compact and config.index.label_storage != "compact":
                remedies.append("set index.label_storage=compact (bfloat16)")
            remedies.append("split the labels over more processes (torchrun)")
        if _ENCODER_WORK in large and sizes.layers:
            if not config.encoder.gradient_checkpointing:
                remedies.append("set encoder.gradient_checkpointing=true")
            if config.encoder.precision == "float32":
                remedies.append("set encoder.precision=bfloat16")
        batch = max(stage.batch_size for stage in config.stages)
        if large & {_ENCODER_WORK, _INDEX_WORK} and batch > 1:
            smaller = self._fitting_batch(fits)
            remedies.append(f"lower stages.*.batch_size from {batch} to {smaller}")
        if large & {PROCESS, _INITIALISATION} and config.data.on_disk != "on":
            remedies.append("set data.on_disk=on and data.setup_points")
        return remedies

    def _fitting_batch(self, fits: Sequence[MemoryCheck]) -> int:
        """Return the batch size, halved until the run fits, or halved once if it never fits."""
        stages = self.config.stages
        largest = max(stage.batch_size for stage in stages)
        half = batch = max(1, min(largest, self.sizes.n_points) // 2)
        while fits and batch >= 1:
            capped = tuple(replace(s, batch_size=min(s.batch_size, batch)) for s in stages)
            config = replace(self.config, stages=capped)
            smaller = estimate_memory(self.sizes, config, self.device)
            needed = {_DEVICE: smaller.device_total, _HOST: smaller.machine_total}
            if all(fit._replace(needed=needed[fit.memory]).free_now for fit in fits):
                return batch
            batch //= 2
        return half


def fit_batches(
    config: EliasConfig, resolved: ResolvedConfig, corpus: Corpus, device: torch.device
) -> ResolvedConfig:
    """Return the configuration with smaller batches if a transformer does not fit into the memory.

    Batch sizes that are given in ``config`` are not changed, and no batch is made smaller than
    `MIN_BATCH_SIZE`. The total memory of the machine counts, and not what this process or others
    take now, so that an interrupted run has the same batches when it resumes, and all processes
    have the same. The batches of a bag encoder hardly take memory.
    """
    sizes = Sizes.expected(resolved, corpus) if resolved.encoder.kind == "transformer" else None
    if sizes is None:
        return resolved
    index = replace(config.index, kind=resolved.index.kind)  # it decides the stages
    derived = [stage.batch_size is None for stage in replace(config, index=index).stages]

    def fits(candidate: ResolvedConfig) -> bool:
        estimate = estimate_memory(sizes, candidate, device)
        return all(check.possible for check in estimate.fits(process_counts()[1]))

    fitting = resolved
    while not fits(fitting):
        largest = max(
            (s.batch_size for s, d in zip(fitting.stages, derived, strict=True) if d), default=0
        )
        if largest <= MIN_BATCH_SIZE:
            return resolved  # the batch alone does not help; the run reports all remedies
        half = tuple(
            replace(s, batch_size=min(s.batch_size, largest // 2)) if d else s
            for s, d in zip(fitting.stages, derived, strict=True)
        )
        fitting = replace(fitting, stages=half)
    return fitting


def _total_of(n_processes: int, n_bytes: int) -> int:
    """Return the total memory of processes with ``n_bytes`` each. Shared pages count once."""
    return n_bytes + (n_processes - 1) * max(0, n_bytes - shared_bytes())


def estimate_memory(sizes: Sizes, config: ResolvedConfig, device: torch.device) -> MemoryEstimate:
    """Return the peak memory of a run that trains on the device."""
    stages = (step_memory(sizes, config, stage, device) for stage in config.stages)
    steps = max(stages, key=lambda parts: sum(parts.values()))
    weights = steps["label weights"] + steps["other weights"] + steps["edges"]
    best = weights if sizes.validates else 0
    state = weights + steps["optimizer"] + steps["averaged weights"] + best
    writes_checkpoints = sizes.keeps_checkpoints and config.checkpoint.minutes > 0
    training = {_BEST: best, _CHECKPOINT: state if writes_checkpoints else 0}
    if device.type == "cpu":
        encoder_resident = steps["other weights"] - sizes.encoder_bytes
        training = {**steps, "other weights": encoder_resident, **training}
    # φ of the points and the directions of the labels, see `elias.training.initialization`
    directions = 4 * FLOAT * sizes.dim * (sizes.n_setup + sizes.n_labels)
    initialisation = {_INITIALISATION: directions + weights}
    host = {
        PROCESS: sizes.resident,
        "bags of words for clustering": round(sizes.n_setup * sizes.words_per_text * 8),
        "copy of the initial encoder": sizes.encoder_bytes,
    }
    if sizes.n_label_points:
        numbers = sizes.tokens_per_label_text + 1 + NEIGHBOURS  # tokens and targets
        host["label texts"] = round(2 * sizes.n_label_points * numbers * (FLOAT + FLOAT))
    if config.rerank.enabled and config.rerank.embedding == "first":
        host["initial encoder for the ranker"] = sizes.encoder_bytes
    is_training = sum(training.values()) >= sum(initialisation.values())
    host |= training if is_training else initialisation
    return MemoryEstimate(sizes, config, device, host, {} if device.type == "cpu" else steps)


def step_memory(
    sizes: Sizes, config: ResolvedConfig, stage: ResolvedStage, device: torch.device
) -> dict[str, int]:
    """Return the bytes that a training step uses on the training device, by purpose."""
    index, dim = config.index, sizes.dim
    on_cpu, compact = device.type == "cpu", index.label_storage == "compact"
    by_kernels = not on_cpu and has_triton()
    labels = -(-sizes.n_labels // sizes.n_processes)  # rows of W_L are split over the processes
    n_clusters = 1 if stage.score_all else index.n_clusters
    width = index.edges_per_cluster if stage.learn_graph else -(-sizes.n_labels // n_clusters)
    edges = n_clusters * width
    dense = sizes.dense_weights + n_clusters * (dim + 1)
    tables = sizes.table_rows * dim
    moments = _MOMENTS * (dense + tables) + (INT * sizes.table_rows if on_cpu else 0)
    if compact:
        moments += labels * (dim * 2 + 4 * FLOAT)
    else:
        moments += labels * ((dim + 1) * _MOMENTS + (2 * INT if on_cpu else FLOAT))
    if stage.learn_graph:
        moments += edges * (_MOMENTS + (FLOAT if by_kernels else 0))
    gradients = FLOAT * (dense if on_cpu else dense + tables)
    if sizes.layers and not on_cpu:
        gradients += FLOAT * sizes.dense_weights  # a second copy, written by CUDA graphs
    if stage.learn_graph and not by_kernels:
        gradients += FLOAT * edges
    averages = stage.average_from < 1
    return {
        "label weights": labels * (dim * (2 if compact else FLOAT) + FLOAT),
        "other weights": FLOAT * (dense + tables),
        "edges": edges * (INT + FLOAT),
        "optimizer": moments,
        "gradients": gradients,
        "averaged weights": FLOAT * (dense + tables + labels * (dim + 1)) if averages else 0,
        _ENCODER_WORK: _encoder_activations(sizes, config, stage, device),
        _INDEX_WORK: _index_activations(sizes, config, stage, edges, by_kernels),
    }


def _encoder_activations(
    sizes: Sizes, config: ResolvedConfig, stage: ResolvedStage, device: torch.device
) -> int:
    encoder, batch = config.encoder, min(stage.batch_size, sizes.n_points)
    if not sizes.layers:
        tokens = round(batch * sizes.tokens_per_text)
        rows = min(sizes.table_rows, tokens) * sizes.dim * FLOAT  # gradient of touched vectors
        return rows + tokens * 5 * INT + batch * FLOAT * (8 * sizes.dim + 4 * encoder.hidden_dim)
    on_gpu = device.type == "cuda"
    half = encoder.precision == "bfloat16" or (encoder.precision == "auto" and on_gpu)
    compiled = encoder.compile != "off" and on_gpu
    layer_bytes = _LAYER_BYTES_COMPILED if compiled else _LAYER_BYTES
    numbers = batch * sizes.longest_text * sizes.width
    per_layer = numbers * layer_bytes["bfloat16" if half else "float32"]
    if encoder.gradient_checkpointing:
        return per_layer + sizes.layers * numbers * (2 if half else FLOAT)
    # autocast keeps a copy of the weights in bfloat16 during a step
    return sizes.layers * per_layer + (2 * sizes.dense_weights if half else 0)


def _index_activations(
    sizes: Sizes, config: ResolvedConfig, stage: ResolvedStage, edges: int, by_kernels: bool
) -> int:
    index, dim = config.index, sizes.dim
    batch = min(stage.batch_size, sizes.n_points)
    if stage.score_all:
        return FLOAT * (batch * min(sizes.n_labels, _ALL_CHUNK) * 4 + _ALL_CHUNK * dim * 2)
    slots = batch * index.train_shortlist
    beam = min(max(index.train_clusters, sizes.most_labels), index.n_clusters)
    work = batch * index.n_clusters * _CLUSTER_BYTES + batch * sizes.most_labels * _POSITIVE_BYTES
    if by_kernels:
        paths = beam * (edges // index.n_clusters)  # per point
        entry = 2 if paths + 4 * index.train_shortlist <= 1 << 16 else 4
        tables = min(_SEARCH_TABLES, min(batch, _SEARCHED_AT_ONCE) * sizes.n_labels * entry)
        listed = slots * _SLOT_BYTES_KERNELS + batch * paths * _PATH_BYTES_KERNELS
        return work + listed + tables + edges * FLOAT
    touched = min(sizes.n_labels, slots) * dim * FLOAT
    searched = sizes.n_labels * (sizes.n_threads * _SEARCH_BYTES + INT)
    edge_work = edges * (_EDGE_BYTES if stage.learn_graph else FLOAT + 1)
    return work + slots * _SLOT_BYTES + touched + searched + edge_work


def gib(n_bytes: int) -> str:
    """Format a number of bytes in GiB or MiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 100 << 20 else f"{n_bytes / 2**20:.0f} MiB"
