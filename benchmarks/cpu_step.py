"""Measure the parts of a training step on a CPU, and of a naive step in plain torch.

    python benchmarks/cpu_step.py --out RESULTS            # 8,484 and 100,000 labels

Random weights and data, bag encoder. The naive step is `naive_step.py`, written from the
description of the published program in SPEC §8. Times are the median CPU time of the process over
several steps; other programs disturb it less than wall-clock time.
"""

import argparse
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import torch
from cpu_setup import write_json
from naive_step import NaiveStep

from elias.config import EliasConfig, EncoderConfig, StageConfig, fill_sizes
from elias.kernels import shortlist_bce
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph
from elias.model.losses import shortlist_loss
from elias.text.batches import TokenBatch
from elias.training.optimizer import Optimizer

DIM = 256
WORDS = 20_000
PARTS = ("encoder", "search", "classifier", "loss", "backward", "update")


class Shape(NamedTuple):
    """Sizes of a training problem."""

    name: str
    n_labels: int
    n_clusters: int
    n_edges: int
    shortlist_size: int
    train_clusters: int
    batch: int
    alpha: float = 10.0
    beta: float = 120.0
    n_positives: int = 10
    n_tokens: int = 90


SHAPES = (
    Shape("8K", 8_484, 256, 400, 3000, 45, 256, alpha=40.0),
    Shape("100K", 100_000, 1024, 1000, 2000, 25, 256),
)
TINY = Shape("tiny", 300, 16, 40, 50, 5, 8)


class Batch(NamedTuple):
    tokens: TokenBatch
    positives: torch.Tensor
    parents: torch.Tensor


def make_model(shape, rng):
    config = EncoderConfig(dim=DIM)
    encoder = BagEncoder(config, None, WORDS)
    edges = np.stack(
        [rng.choice(shape.n_labels, shape.n_edges, replace=False) for _ in range(shape.n_clusters)]
    )
    logits = torch.randn(edges.shape)
    graph = LabelGraph(torch.from_numpy(edges), shape.n_labels, shape.beta, edge_logits=logits)
    return EliasModel(encoder, graph, shape.alpha)


def make_batch(shape, rng, parent_of):
    n = shape.batch * shape.n_tokens
    # a skewed word frequency, as in text; the words of a text are sorted and unique
    ids = np.sort((WORDS * rng.random((shape.batch, shape.n_tokens)) ** 3).astype(np.int64), axis=1)
    tokens = TokenBatch(
        ids=torch.from_numpy(ids.reshape(-1)),
        offsets=torch.arange(shape.batch + 1) * shape.n_tokens,
        longest=shape.n_tokens,
        weights=torch.rand(n),
    )
    positives = np.sort(rng.integers(0, shape.n_labels, (shape.batch, shape.n_positives)), axis=1)
    positives = torch.from_numpy(positives)
    return Batch(tokens, positives, parent_of[positives])


class Clock:
    """CPU time by part."""

    def __init__(self):
        self.spent = defaultdict(list)

    @contextmanager
    def part(self, name):
        start = time.process_time()
        yield
        self.spent[name].append(1000 * (time.process_time() - start))

    def medians(self):
        return {name: statistics.median(times[2:]) for name, times in self.spent.items()}


def our_step(model, optimizer, shape, batch, clock):
    model.train()
    with clock.part("encoder"):
        embedding = model.encoder(batch.tokens).float()
    with clock.part("search"):
        cluster_log = model.unsaturated_log(embedding)
        beam = model.training_beam(cluster_log, batch.parents, shape.train_clusters)
        paths = model.search(cluster_log, beam, shape.shortlist_size, batch.positives)
    with clock.part("classifier"):
        logits = model.labels.logits(embedding, paths.labels)
    with clock.part("loss"):
        loss = shortlist_bce(
            logits, paths.log_scores, paths.labels, batch.positives, model.n_labels
        )
        loss = loss / shape.batch
        loss = loss + shortlist_loss(paths.positive_log, paths.reached) / shape.batch
    with clock.part("backward"):
        loss.backward()
    with clock.part("update"):
        optimizer.step(1.0)


def naive_step(model, naive, encoder_optimizer, batch, clock):
    with clock.part("encoder"):
        embedding = model.encoder(batch.tokens).float()
    with clock.part("search"):
        paths = naive.search(embedding, batch.parents)
    with clock.part("classifier"):
        logits = naive.classify(embedding, paths[2])
    with clock.part("loss"):
        loss = naive.loss(paths, logits, batch.positives)
    with clock.part("backward"):
        loss.backward()
    with clock.part("update"):
        naive.update()
        encoder_optimizer.step()
        encoder_optimizer.zero_grad(set_to_none=True)


def measure(shape, repeat, with_naive):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = make_model(shape, rng)
    parents = torch.cat([model.graph.strongest_parents(), torch.tensor([shape.n_clusters])])
    batches = [make_batch(shape, rng, parents) for _ in range(4)]
    stages = (StageConfig(name="stage2", learn_graph=True, index_every=1),)
    config = fill_sizes(EliasConfig(stages=stages), n_points=1000, n_labels=shape.n_labels)
    optimizer = Optimizer(model, config.stages[0])
    ours, theirs = Clock(), Clock()
    for i in range(repeat + 2):
        our_step(model, optimizer, shape, batches[i % 4], ours)
    medians = {"ours": ours.medians()}
    if with_naive:
        naive = NaiveStep(shape, model)
        dense = {n: p for n, p in model.encoder.named_parameters() if n != "vectors"}
        encoder_optimizer = torch.optim.AdamW(dense.values(), lr=1e-3)
        model.encoder.vectors.requires_grad_(False)
        for i in range(max(1, repeat // 4) + 2):
            naive_step(model, naive, encoder_optimizer, batches[i % 4], theirs)
        medians["naive"] = theirs.medians()
    return medians


def show(shape, medians):
    print(
        f"\n{shape.name}: {shape.n_labels:,} labels, batch {shape.batch}, ms of CPU time per step"
    )
    for part in (*PARTS, "all"):
        times = {
            who: sum(spent.values()) if part == "all" else spent[part]
            for who, spent in medians.items()
        }
        line = f"  {part:12s}" + "".join(f"  {who} {ms:9.1f}" for who, ms in times.items())
        if "naive" in times:
            line += f"  ({times['naive'] / max(times['ours'], 1e-3):.1f}x)"
        print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--out", type=Path, help="folder for cpu_step.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    numba.set_num_threads(given.threads)
    measure(TINY, 2, with_naive=False)  # compile first
    results = {}
    for shape in SHAPES:
        if shape.name in given.shapes:
            results[shape.name] = measure(shape, given.repeat, not given.no_naive)
            show(shape, results[shape.name])
            document = {"threads": given.threads, "cpu_ms_a_step": results}
            write_json(given.out, "cpu_step.json", document)


if __name__ == "__main__":
    main()
