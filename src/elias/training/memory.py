"""Estimate the memory of a run and compare it with what the machine has.

The arithmetic follows what the code allocates; where a library allocates (a transformer's layers),
a measured number of bytes stands for it. `benchmarks/memory_check.py` holds it against peaks.

Notation: N points (S of them to set up from), L labels, C clusters, E edges each, D width of φ, B
points a step, K shortlist, Y labels of the point that has most, T tokens a text.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from elias.distributed import process_counts
from elias.errors import RunError
from elias.kernels.device import has_triton

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scipy.sparse import csr_matrix

    from elias.config import ResolvedConfig, StageConfig
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)


class Room(NamedTuple):
    """Bytes of memory."""

    total: int
    """What could ever be had."""
    free: int
    """What can be had now."""


def host_room() -> Room | None:
    """Return the memory of this machine, or of the container it seems to be; None if unknown."""
    found = _meminfo()
    if "MemTotal" not in found:
        return _by_sysconf()
    room = Room(found["MemTotal"], found.get("MemAvailable", found["MemTotal"]))
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    if limit is None or limit >= room.total:
        return room
    used = _number(Path("/sys/fs/cgroup/memory.current")) or 0
    return Room(limit, min(room.free, max(0, limit - used)))


def device_room(device: torch.device) -> Room | None:
    """Return the memory of a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Room(total, free + torch.cuda.memory_reserved(device))


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where that is not told."""
    return _table(Path("/proc/self/status")).get("VmRSS", 0)


def shared() -> int:
    """Return the bytes of those that other processes can share: mapped files; 0 if not told."""
    found = _table(Path("/proc/self/status"))
    return found.get("RssFile", 0) + found.get("RssShmem", 0)


def _meminfo() -> dict[str, int]:
    return _table(Path("/proc/meminfo"))


def _table(path: Path) -> dict[str, int]:
    """Return the lines ``name: number kB`` of a file in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    cells = (line.replace(":", " ").split() for line in lines)
    return {c[0]: int(c[1]) << 10 for c in cells if len(c) == 3 and c[2] == "kB"}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _by_sysconf() -> Room | None:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return Room(total, total)


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
    config: ResolvedConfig,
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
    config: ResolvedConfig,
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
    config: ResolvedConfig,
    stage: StageConfig,
    device: torch.device,
    by_kernels: bool,
) -> dict[str, int]:
    """Return what the steps of a stage take on their device."""
    index = config.index
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
    sizes: Sizes, config: ResolvedConfig, stage: StageConfig, device: torch.device
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
    sizes: Sizes, config: ResolvedConfig, stage: StageConfig, edges: int, by_kernels: bool
) -> int:
    index, dim = config.index, sizes.dim
    batch = min(stage.batch_size, sizes.n_points)
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


_DEVICE, _HOST = "GPU memory", "memory"
_LARGE_SHARE = 0.15
"""Of the whole; what is less is not worth a remedy."""


class Fit(NamedTuple):
    """What a run needs of one memory, and what there is."""

    where: str
    needed: int
    room: Room
    n_processes: int = 1
    """That take it together: those of this machine share its memory, and each has its own GPU."""

    @property
    def possible(self) -> bool:
        """Say whether it fits at all."""
        return self.needed <= self.room.total

    @property
    def free_now(self) -> bool:
        """Say whether it fits beside what else is in use now."""
        return self.needed <= self.room.free


def fits(expected: Expected, device: torch.device, held: int) -> list[Fit]:
    """Return how the run fits into the host's memory and the GPU's.

    What the processes of the run hold already is not free any more, but its own.
    """
    found = []
    on_host, on_device = host_room(), device_room(device)
    if on_device is not None:
        found.append(Fit(_DEVICE, expected.device_total, on_device))
    if on_host is not None:
        own = on_host._replace(free=on_host.free + held)
        found.append(Fit(_HOST, _on_host(expected), own, process_counts()[1]))
    return found


def _on_host(expected: Expected) -> int:
    """Return what all processes of this machine take; files they have mapped are there once."""
    more = process_counts()[1] - 1
    return expected.host_total + more * max(0, expected.host_total - shared())


def refuse_what_cannot_fit(
    expected: Expected,
    sizes: Sizes,
    config: ResolvedConfig,
    device: torch.device,
    *,
    resident: int,
    ignore: bool,
) -> None:
    """Refuse a run that needs more memory than there is; warn where others use too much of it.

    Raises:
        RunError: On one line, with what to change; unless it is to be ignored.
    """
    others = (process_counts()[1] - 1) * max(0, resident - shared())
    found = fits(expected, device, resident + others)
    for fit in found:
        needed, total = gib(fit.needed), gib(fit.room.total)
        if fit.possible and fit.free_now:
            continue
        told = remedies(expected, sizes, config, device, found)
        advice = "; ".join(told) or "use a larger machine"
        if fit.possible:
            logger.warning(
                "the run is going to take about %s of %s, of which %s is free now",
                needed,
                fit.where,
                gib(fit.room.free),
            )
        elif ignore:
            logger.warning("the run needs %s of %s, and there is %s", needed, fit.where, total)
        else:
            raise RunError(
                f"the run needs about {needed} of {fit.where}, and there is {total}; {advice}; "
                "or pass --ignore-memory to try it all the same"
            )


def remedies(
    expected: Expected,
    sizes: Sizes,
    config: ResolvedConfig,
    device: torch.device,
    found_room: Sequence[Fit] = (),
) -> list[str]:
    """Return what to change, what helps most first; a batch is to fit into ``found_room``."""
    parts = dict(expected.device or expected.host)
    total = sum(parts.values())
    large = {name for name, size in parts.items() if size > _LARGE_SHARE * total}
    found = []
    batch = max(stage.batch_size for stage in config.stages)
    if sizes.most_labels > 10 * max(1, sizes.n_entries // max(1, sizes.n_points)) + 1000:
        found.append(
            f"drop or split the point with {sizes.most_labels:,} labels, which its batches are "
            "padded to"
        )
    if large & {"label weights", "optimizer", "best epoch", "checkpoint on its way", "setting up"}:
        found += _narrower(sizes, config, device)
    if "activations of the encoder" in large and sizes.layers:
        if not config.encoder.gradient_checkpointing:
            found.append("set encoder.gradient_checkpointing=true")
        if config.encoder.precision == "float32":
            found.append("set encoder.precision=bfloat16")
    if large & {"activations of the encoder", "activations of the index"} and batch > 1:
        smaller = _batch_that_fits(expected, sizes, config, device, found_room)
        found.append(f"lower stages.*.batch_size from {batch} to {smaller}")
    if large & {SO_FAR, "setting up"} and config.data.on_disk != "on":
        found.append("set data.on_disk=on and data.setup_points")
    return found


def _batch_that_fits(
    expected: Expected,
    sizes: Sizes,
    config: ResolvedConfig,
    device: torch.device,
    found: Sequence[Fit],
) -> int:
    """Return the largest batch, by halves, with which the run fits; half if none is enough."""
    rooms = {fit.where: min(fit.room) for fit in found}
    largest = max(stage.batch_size for stage in config.stages)
    half = batch = max(1, min(largest, sizes.n_points) // 2)
    while rooms and batch >= 1:
        stages = tuple(replace(s, batch_size=min(s.batch_size, batch)) for s in config.stages)
        smaller = expected_memory(
            sizes,
            replace(config, stages=stages),
            device,
            resident=expected.host.get(SO_FAR, 0),
            keeps_checkpoints=expected.host.get("checkpoint on its way", 0) > 0,
            validates=expected.host.get("best epoch", 0) > 0,
        )
        needed = {_DEVICE: smaller.device_total, _HOST: _on_host(smaller)}
        if all(needed[where] <= room for where, room in rooms.items()):
            return batch
        batch //= 2
    return half


def _narrower(sizes: Sizes, config: ResolvedConfig, device: torch.device) -> list[str]:
    found = []
    key = "encoder.bottleneck" if sizes.layers else "encoder.dim"
    if sizes.dim > 64:
        found.append(f"set {key}={sizes.dim // 2}")
    compact = config.index.label_storage == "compact"
    if not compact and (device.type == "cuda" or config.index.kind == "all"):
        found.append("set index.label_storage=compact (bfloat16)")
    found.append("share the labels among more processes (torchrun)")
    return found


def gib(n_bytes: int) -> str:
    """Return bytes for people.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 100 << 20 else f"{n_bytes / 2**20:.0f} MiB"
