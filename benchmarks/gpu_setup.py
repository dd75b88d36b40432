"""Shared code of the GPU benchmarks: shapes, random models, timing, result files.

Without a GPU they run at the shape `TINY` in wall-clock time, so that tests can run them.
"""

import gc
import json
import statistics
import sys
import time
import traceback
import types
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


def stand_in_for_numba():
    """Let elias be imported without numba; the GPU calls none of its functions."""
    try:
        import numba  # noqa: F401
    except ImportError:
        fake = types.ModuleType("numba")
        fake.njit = lambda *args, **_: args[0] if args else lambda function: function
        fake.prange = range
        fake.get_num_threads = lambda: 1
        events = types.ModuleType("numba.core.event")
        events.Event = events.Listener = object
        events.register = lambda *_: None
        parts = {"numba": fake, "numba.core": types.ModuleType("numba.core")}
        sys.modules.update(parts | {events.__name__: events})


stand_in_for_numba()

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import BertConfig, BertModel

from elias.config import EliasConfig, EncoderConfig, StageConfig, fill_sizes
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.transformer import TransformerEncoder
from elias.text.batches import TokenBatch
from elias.training.cuda_graph_step import CudaGraphStep

SEED = 0  # seed of all random data, so that both steps and all runs have the same
DIM = 768


class Shape(NamedTuple):
    """Sizes of a training problem, and figures of the published program (SPEC §8; ms, GiB)."""

    name: str
    n_labels: int
    n_clusters: int
    batch: int
    n_tokens: int
    alpha: float = 10.0
    step_ms: float | None = None
    encoder_ms: float | None = None
    head_ms: float | None = None
    peak_gib: float | None = None
    predict_ms: float | None = None
    n_edges: int = 1000
    shortlist_size: int = 2000
    beam_size: int = 20
    train_clusters: int = 25
    n_positives: int = 5
    beta: float = 150.0
    dim: int = DIM
    layers: int = 12


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("131K", 131_073, 2048, 512, 32, 10.0, 68.9, 38.1, 23.8, 15.2, 0.0455),
        Shape("670K", 670_091, 8192, 256, 128, 10.0, 89.8, 60.9, 17.5, 25.0, 0.0859),
        Shape("2.8M", 2_812_281, 32_768, 64, 128, 20.0, 56.1, 38.1, 31.9, 46.7, 0.165),
        Shape("10M", 10_000_000, 131_072, 64, 128, 20.0),
    )
}
TINY = Shape(
    "tiny",
    500,
    16,
    4,
    8,
    n_edges=100,
    shortlist_size=32,
    beam_size=3,
    train_clusters=5,
    alpha=1.0,
    beta=10.0,
    dim=64,
    layers=1,
)
KNOWN = SHAPES | {TINY.name: TINY}
"""All shapes; the tiny one is used only if named."""


class Rows(TextEncoder):
    """A trivial encoder: φ is a row of a parameter."""

    def __init__(self, n_points, dim):
        super().__init__()
        self.dim = dim
        self.vectors = nn.Parameter(torch.randn(n_points, dim))

    def table_names(self):
        return set()

    def forward(self, batch):
        # a copy, as in other encoders: gradients may need it after the vectors change
        return self.vectors[: len(batch)].clone()

    capturable = True


def bert_base(n_tokens, device, compiled="off", *, layers=12, width=DIM, dropout=0.1):
    """Return an encoder of BERT-base's shape with random weights."""
    config = EncoderConfig(
        model="bert-base",
        max_length=n_tokens,
        pooling="cls",
        compile=compiled,
        dropout=0.5 if dropout else 0.0,
    )
    settings = BertConfig(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    transformer = BertModel(settings, add_pooling_layer=False)
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    encoder = TransformerEncoder(config, transformer, tokenizer).to(device)
    encoder.prepare(torch.device(device))
    return encoder


def text_encoder(shape, device, compiled="off"):
    """Return the encoder of a shape, with the same weights each time."""
    torch.manual_seed(SEED)
    return bert_base(shape.n_tokens, device, compiled, layers=shape.layers, width=shape.dim)


def make_problem(shape, encoder, device, *, compact):
    """Return a model and its batches, the same each time except for the storage of W_L."""
    torch.manual_seed(SEED)
    model = make_model(shape, encoder, device, compact=compact)
    return model, make_batches(shape, model, device)


def fingerprint(model, batches):
    """Return numbers that identify the graph, clusters and batches."""
    parts = [model.graph.edge_labels, model.graph.edge_logits, model.clusters.weight]
    for batch in batches:
        parts += [batch.tokens.ids, batch.positives, batch.parents]
    return [part.detach().sum().item() for part in parts]


def make_model(shape, encoder, device, *, compact):
    """Return a model with a learned graph of random edges."""
    with torch.device(device):
        edges = torch.randint(shape.n_labels, (shape.n_clusters, shape.n_edges))
        logits = torch.randn(shape.n_clusters, shape.n_edges)
        graph = LabelGraph(edges, shape.n_labels, shape.beta, edge_logits=logits)
        model = EliasModel(encoder, graph, shape.alpha)
    if compact:
        model.compact()
    return model.to(device)


class Batch(NamedTuple):
    tokens: TokenBatch
    positives: torch.Tensor
    parents: torch.Tensor


def make_batches(shape, model, device, n=4):
    """Return different batches of full-length texts, so that caches are not warm."""
    parents = torch.cat(
        [model.graph.strongest_parents(), torch.tensor([shape.n_clusters], device=device)]
    )
    vocabulary = 30_522
    batches = []
    for _ in range(n):
        n_tokens = shape.batch * shape.n_tokens
        tokens = TokenBatch(
            ids=torch.randint(1000, vocabulary, (n_tokens,), device=device),
            offsets=torch.arange(shape.batch + 1, device=device) * shape.n_tokens,
            longest=shape.n_tokens,
        )
        size = (shape.batch, shape.n_positives)
        positives = torch.randint(shape.n_labels, size, device=device).sort(dim=1).values
        batches.append(Batch(tokens, positives, parents[positives]))
    return batches


def stepper(shape, model, optimizer, batches, *, captured):
    """Return a function that runs step i, with a CUDA graph or with single launches."""
    sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)
    options = {"shortlist_weight": 0.05, "mean": False, "gradients": optimizer.gradients}

    def launched(i):
        tokens, *labels = batches[i % len(batches)]
        embedding = model.encoder(tokens).float()
        model.losses(embedding, *labels, sizes, **options).total.backward()
        optimizer.step(1.0)

    if not captured:
        return launched
    graphs = CudaGraphStep(
        model,
        optimizer.gradients,
        lambda *batch: model.losses(*batch, sizes, **options),
        accumulates=False,
        batch_size=shape.batch,
    )

    def replayed(i):
        batch = batches[i % len(batches)]
        graphs(*batch)
        optimizer.step(1.0)

    return replayed


_STAGE = StageConfig(
    name="stage2",
    learn_graph=True,
    encoder_lr=1e-5,
    cluster_lr=1e-4,
    label_lr=1e-3,
    edge_lr=1e-2,
    index_every=1,
    average_from=1.0,
)
STAGE = fill_sizes(EliasConfig(stages=(_STAGE,)), n_points=1000, n_labels=1000).stages[0]


class WallClock:
    """Replace a CUDA event where there is no GPU."""

    def __init__(self):
        self._seconds = time.perf_counter()

    def elapsed_time(self, later):
        return 1000 * (later._seconds - self._seconds)


def instant():
    """Return a timestamp of the device."""
    if not torch.cuda.is_available():
        return WallClock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait():
    """Wait until the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(work, repeat=20, warm=3):
    """Return the median time of ``work(i)`` on the device."""
    for i in range(warm):
        work(i)
    wait()
    spans = []
    for i in range(repeat):
        start = instant()
        work(i)
        spans.append((start, instant()))
    wait()
    return statistics.median(start.elapsed_time(end) for start, end in spans)


class Marks:
    """Record timestamps between the parts of a step; return the median time of each part."""

    def __init__(self):
        self._steps = []

    def begin(self):
        self._steps.append([])
        self("")

    def __call__(self, part):
        self._steps[-1].append((part, instant()))

    def medians(self, skip=3):
        wait()
        times = {}
        for step in self._steps[skip:]:
            for (_, before), (part, after) in pairwise(step):
                times.setdefault(part, []).append(before.elapsed_time(after))
        return {part: statistics.median(all_) for part, all_ in times.items()}


def attempt(work):
    """Return the result of ``work()``; None if it fails, so that the rest still runs."""
    try:
        return work()
    except Exception:
        traceback.print_exc()
        return None


class Results:
    """A JSON file that is complete after every entry."""

    def __init__(self, folder, name):
        self._path = Path(folder) / f"{name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.entries = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }

    def __call__(self, key, value):
        self.entries[key] = value
        text = json.dumps(self.entries, indent=1, default=float)
        self._path.write_text(text + "\n", encoding="utf8")
        print(f"# {key}: {json.dumps(value, default=lambda x: round(float(x), 4))}", flush=True)

    def attempt(self, key, work):
        """Record the result of ``work()``, or its error, so that the rest still runs."""
        try:
            self(key, work())
        except Exception as error:
            self(key, {"error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        free()


def table(title, header, rows):
    """Print one table."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def ms(value):
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def ratio(theirs, ours):
    return "-" if theirs is None or not ours else f"{theirs / ours:.2f}x"


def gib():
    """Return the peak GPU memory since `free`; None without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def free():
    """Release unused memory and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
