"""Measure time and memory of one-vs-all labels alone: random φ and positives, no encoder.

python benchmarks/one_vs_all_step.py --labels 2812281 --dim 768 --batch 128 --storage compact
python benchmarks/one_vs_all_step.py --labels 8484 --dim 256 --batch 256 --storage full --device cpu
"""

import argparse
import resource
import time

import torch
from torch import nn

from elias.config import EliasConfig, IndexConfig, fill_sizes
from elias.model.elias import SearchSizes
from elias.model.encoder import TextEncoder
from elias.model.one_vs_all import OneVsAll
from elias.text.batches import TokenBatch
from elias.training.optimizer import Optimizer
from elias.training.stage import tensor_cores


class Rows(TextEncoder):
    """A trivial encoder: φ is a row of a parameter."""

    def __init__(self, n_points, dim):
        super().__init__()
        self.dim = dim
        self.vectors = nn.Parameter(torch.randn(n_points, dim))

    def table_names(self):
        return set()

    def forward(self, batch):
        return self.vectors[batch.ids]


def timed(repeat, device, work):
    """Return a median in ms: wall time on a GPU, on a CPU also the time of all threads."""
    for _ in range(3):  # warm up
        work()
    walls, totals = [], []
    for _ in range(repeat):
        start, start_of_all = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        walls.append(1000 * (time.perf_counter() - start))
        totals.append(1000 * (time.process_time() - start_of_all))
    wall = f"{sorted(walls)[repeat // 2]:.1f} ms"
    if device.type == "cuda":
        return wall
    return f"{wall} (fastest {min(walls):.1f}), {sorted(totals)[repeat // 2]:.1f} CPU-ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("labels", 100_000), ("dim", 768), ("batch", 128), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--storage", choices=["full", "compact"], default="compact")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(given.device)
    model = OneVsAll(Rows(given.batch, given.dim), given.labels)
    if given.storage == "compact":
        model.compact()
    model.to(device)
    config = fill_sizes(EliasConfig(index=IndexConfig(kind="all")), 1000, given.labels)
    optimizer = Optimizer(model, config.stages[0])
    ids = torch.arange(given.batch, device=device)
    tokens = TokenBatch(ids=ids, offsets=torch.arange(given.batch + 1, device=device), longest=1)
    positives = torch.randint(given.labels, (given.batch, 20), device=device).sort(dim=1).values

    def step():
        update = optimizer.label_update(1.0)
        embedding = model.encoder(tokens)
        model.all_losses(embedding, positives, mean=False, update=update).total.backward()
        optimizer.step(1.0)

    with tensor_cores():
        training = timed(given.repeat, device, step)
    embedding = model.encoder.vectors.detach()
    sizes = SearchSizes(1, given.labels)
    ranking = timed(given.repeat, device, lambda: model.rank(embedding, sizes, 100))
    peak = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(f"training {training} per step")
    print(f"ranking {ranking} for {given.batch} points")
    print(f"peak {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
