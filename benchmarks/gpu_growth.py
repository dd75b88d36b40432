"""Measure how a training step and a search without the encoder grow with L, at a fixed batch.

PYTHONPATH=src python3 benchmarks/gpu_growth.py --out results --quick
"""

import argparse
import math
import traceback

import torch
from gpu_setup import (
    DIM,
    STAGE,
    Results,
    Rows,
    Shape,
    attempt,
    free,
    gib,
    make_problem,
    median_ms,
    ms,
    ratio,
    stepper,
    table,
)
from naive_step import NaiveStep, naive_stepper

from elias.model.elias import SearchSizes
from elias.training.optimizer import Optimizer
from elias.training.stage import tensor_cores

SIZES = [10**4, 10**5, 10**6, 10**7]


def shape_of(n_labels, batch):
    """Return a shape with C = 2^⌈log2(L/100)⌉ and κ = 1000, at most half the labels."""
    n_clusters = 2 ** math.ceil(math.log2(n_labels / 100))
    return Shape(str(n_labels), n_labels, n_clusters, batch, 1, n_edges=min(1000, n_labels // 2))


def measure(n_labels, device, given):
    free()
    shape = shape_of(n_labels, given.batch)
    encoder = Rows(given.batch, DIM).to(device)
    model, batches = make_problem(shape, encoder, device, compact=given.storage == "compact")
    free()
    optimizer = Optimizer(model, STAGE)
    step = stepper(shape, model, optimizer, batches, captured=device.type == "cuda")
    answer = {"step_ms": median_ms(step, given.repeat), "peak_gib": gib()}
    embedding = torch.randn(given.batch, DIM, device=device)
    searched = SearchSizes(shape.beam_size, shape.shortlist_size)
    answer["rank_ms"] = median_ms(lambda i: model.rank(embedding, searched, 100), given.repeat)
    return answer


def naive_ms(n_labels, device, given):
    """Return ms of the naive step on the same data; None if it does not fit."""
    if given.no_naive or n_labels * DIM * 16 > 100 * 2**30:
        return None
    free()
    shape = shape_of(n_labels, given.batch)
    encoder = Rows(given.batch, DIM).to(device)
    model, batches = make_problem(shape, encoder, device, compact=False)
    step = naive_stepper(NaiveStep(shape, model), encoder, batches)
    return median_ms(step, max(5, given.repeat // 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--labels", nargs="+", type=int, default=SIZES)
    parser.add_argument("--storage", choices=["full", "compact"], default="compact")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="10 repeats")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: to test the script with few labels")
    given = parser.parse_args()
    if given.quick:
        given.repeat = 10
    device = torch.device(given.device)
    if device.type == "cpu":  # a CPU cannot train compact labels
        given.storage = "full"
    results, rows = Results(given.out, "gpu_growth"), []
    with tensor_cores():
        for n_labels in given.labels:
            try:
                entry = measure(n_labels, device, given)
                entry["naive_ms"] = attempt(lambda n=n_labels: naive_ms(n, device, given))
            except Exception as error:
                entry = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            results(str(n_labels), entry)
            first = results.entries[str(given.labels[0])].get("step_ms") or math.nan
            own = entry.get("step_ms")
            grown = "-" if own is None else f"{own / first:.2f}x"
            peak = ms(entry.get("peak_gib"))
            naive = entry.get("naive_ms")
            beside = (ms(naive), ratio(naive, own))
            rows.append((f"{n_labels:,}", ms(own), grown, ms(entry.get("rank_ms")), peak, *beside))
    header = ("labels", "step ms", "of the first", "rank ms", "peak GiB", "naive ms", "naive/it")
    table(f"growth at batch {given.batch}, {given.storage} storage, no encoder", header, rows)


if __name__ == "__main__":
    main()
