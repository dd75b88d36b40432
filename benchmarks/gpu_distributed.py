"""Compare the training step of one process under NCCL with that of a plain process, on one GPU.

PYTHONPATH=src python3 benchmarks/gpu_distributed.py --shapes minilm 131K --out results

Random weights and texts of 8 to 32 tokens. Prints the time of a step and the losses of each run,
checks that captured and eager runs of several processes agree, and how much of the traffic runs
beside the encoder. NCCL sends nothing with one process, so copies of the same gradients stand in
for the traffic there. With --gloo, two processes that share the GPU train, too; they send through
the host, so their time means nothing.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import MethodType

import numpy as np
import torch
import torch.distributed as dist
from gpu_setup import SHAPES, TINY, make_model, text_encoder
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, IndexConfig, StageConfig
from elias.distributed import SingleProcess, joined
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import EliasError
from elias.text.tokens import Tokens
from elias.training.sharded_step import ShardedStep
from elias.training.stage import Points, StageLoop

KNOWN = SHAPES | {"tiny": TINY, "minilm": SHAPES["131K"]._replace(dim=384, layers=6)}
MODES = ("eager", "captured", "compiled")
STEPS, EPOCHS = 24, 4  # the last epochs are timed
N_WARM = 2
LINK = 350e9  # assumed bytes per second between 8 GPUs, see docs/explanation/scaling.md
COPY = 3.5e12  # assumed bytes per second that a copy on the GPU reads and writes


def points_of(shape):
    rng = np.random.default_rng(0)
    n_points = shape.batch * STEPS
    lengths = rng.integers(min(8, shape.n_tokens - 1), shape.n_tokens, n_points)
    offsets = np.concatenate([[0], lengths.cumsum()])
    ids = rng.integers(1000, 30_522, offsets[-1]).astype(np.int32)
    rows = np.repeat(np.arange(n_points), shape.n_positives)
    columns = rng.integers(0, shape.n_labels, len(rows))
    ones = np.ones(len(rows), np.float32)
    labels = csr_matrix((ones, (rows, columns)), shape=(n_points, shape.n_labels))
    return Points(Tokens(offsets, ids), labels)


def train(shape, mode, world):
    """Train, and return the loss of each epoch and the time of a step in ms."""
    device = world.device
    compiled = "on" if mode == "compiled" else "off"
    model = make_model(shape, text_encoder(shape, device, compiled), device, compact=False)
    model.encoder.capturable = mode != "eager"
    if world.shards_labels:
        model.labels = ShardedRows.of(world, model.labels).to(device)
    index = IndexConfig(
        n_clusters=shape.n_clusters,
        edges_per_cluster=shape.n_edges,
        beam_size=shape.beam_size,
        shortlist_size=shape.shortlist_size,
        train_shortlist=shape.shortlist_size,
        beta=shape.beta,
        alpha=shape.alpha,
    )
    stage = StageConfig(
        name="step",
        epochs=EPOCHS,
        batch_size=shape.batch,
        learn_graph=True,
        index_every=1,
        average_from=1.0,
        encoder_lr=1e-5,
    )
    points = points_of(shape)
    config = EliasConfig(index=index, stages=(stage,))
    config = config.resolve(len(points.tokens), shape.n_labels)
    losses, times = [], []

    def report(epoch):
        losses.append(epoch.loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    loop = StageLoop(
        model=model,
        stage=config.stages[0],
        config=config,
        points=points,
        rng=np.random.default_rng(0),
        validate=None,
        report=report,
        world=world,
    )
    loop.run()
    step = 1000 * (times[-1] - times[N_WARM - 1]) / (STEPS * (EPOCHS - N_WARM))
    return {"losses": losses, "ms": step}


def guarded(name, work):
    """Return the result of a measurement, or its error."""
    torch.cuda.empty_cache()
    try:
        result = work()
    except EliasError as error:
        result = {"error": str(error)}
    except Exception as error:  # the other measurements are still worth something
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(name, result, flush=True)
    return result


def standing_in(world):
    """Let each sum take as long as among 8 GPUs, by copies of its numbers on this GPU."""
    real = world.all_reduce

    def all_reduce(_, tensor, purpose=""):
        repeats = math.ceil(2 * 7 / 8 / LINK * COPY / 2)
        other = torch.empty_like(tensor)
        for _ in range(repeats):
            other.copy_(tensor)
        return real(tensor, purpose)

    world.all_reduce = MethodType(all_reduce, world)


def overlap(events, threads):
    """Return the ms of copies on other streams than the busiest one, and those beside it."""
    streams = {}
    for event in events:
        if event.get("cat") in threads and "dur" in event:
            span = event["ts"], event["ts"] + event["dur"]
            streams.setdefault(event["args"].get("stream"), []).append(span)
    if len(streams) < 2:
        return 0.0, 0.0
    busy = {name: sum(end - start for start, end in spans) for name, spans in streams.items()}
    main = max(busy, key=busy.get)
    moments = sorted(
        (moment, change)
        for name, spans in streams.items()
        for start, end in spans
        for moment, change in ((start, (name == main, 1)), (end, (name == main, -1)))
    )
    total = beside = 0.0
    running, last = {True: 0, False: 0}, moments[0][0]
    for moment, (is_main, change) in moments:
        total += (moment - last) * (running[False] > 0)
        beside += (moment - last) * (running[False] > 0 and running[True] > 0)
        running[is_main] += change
        last = moment
    return total / 1000, beside / 1000


def traced(shape, world, path):
    """Train with stand-ins for traffic; return how much of them runs beside other kernels."""
    real, profiles = ShardedStep.__call__, []
    calls = 0

    def call(self, *args):
        nonlocal calls
        calls += 1
        if calls == STEPS * N_WARM:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            profiles.append(torch.profiler.profile(activities=activities))
            torch.cuda.synchronize()
            profiles[0].start()
        if calls == STEPS * N_WARM + 4:
            torch.cuda.synchronize()
            profiles[0].stop()
        return real(self, *args)

    ShardedStep.__call__ = call
    try:
        train(shape, "captured", world)
    finally:
        ShardedStep.__call__ = real
    profiles[0].export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    total, beside = overlap(events, ("kernel", "gpu_memcpy", "gpu_memset"))
    return {"ms of sums in a step": total / 4, "beside other kernels": beside / 4}


def measured(shape, world, name):
    """Return the measurements of this process in all modes."""
    rows = {}
    for mode in modes_of(world.device):
        rows[f"{name}, {mode}"] = guarded(f"{name}, {mode}", lambda m=mode: train(shape, m, world))
    return rows


def under_nccl(shape, out):
    """Return the measurements of one process in a group."""
    port = os.environ.get("MASTER_PORT", "29571")
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with joined("auto") as world:
        rows = measured(shape, world, "NCCL")
        if world.device.type == "cuda":
            standing_in(world)
            name = "NCCL, captured, with stand-ins beside the encoder"
            rows[name] = guarded(name, lambda: train(shape, "captured", world))
            trace = guarded("trace", lambda: traced(shape, world, out / f"{shape.name}.trace.json"))
            ShardedStep._beside = lambda *_: nullcontext()
            name = "NCCL, captured, with stand-ins after the encoder"
            rows[name] = guarded(name, lambda: train(shape, "captured", world))
            rows["trace"] = trace
    return rows


def modes_of(device):
    return MODES if device.type == "cuda" else MODES[:1]


def through_host():
    """Let gloo send tensors of a GPU through the host."""

    def wrap(operation):
        def run(*tensors, **options):
            if not tensors[0].is_cuda:
                return operation(*tensors, **options)
            copies = [tensor.cpu() for tensor in tensors]
            operation(*copies, **options)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            return None

        return run

    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
        if hasattr(dist, name):
            setattr(dist, name, wrap(getattr(dist, name)))
    start = dist.init_process_group
    dist.init_process_group = lambda _, **options: start("gloo", **options)


def one_of_two(shape):
    """Train as one of two processes on this GPU, and print the results."""
    through_host()
    with joined("auto") as world:
        for mode in modes_of(world.device):
            result = train(shape, mode, world)
            if world.is_rank0:
                print(json.dumps([mode, result["losses"]]), flush=True)


def two_processes(shape_name):
    """Return the losses of two processes, by mode."""
    ids = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29573",
        }
        command = [sys.executable, __file__, "--one-of-two", shape_name]
        ids.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    text, _ = (process.communicate()[0] for process in ids)  # of rank 0, and nothing
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    return {f"two processes, {mode}": {"losses": losses} for mode, losses in lines}


def print_table(name, rows):
    """Print the runs of a shape, and the largest difference from the losses of the eager run."""
    print(f"\n{name:52}{'step, ms':>9}  {'loss of the last epoch':>22}  {'difference':>10}")
    for row, result in rows.items():
        if row == "trace" or "losses" not in result:
            continue
        reference = rows.get("plain, eager" if row.startswith("plain") else "NCCL, eager", {})
        expected = reference.get("losses", result["losses"])
        worst = max(abs(a / b - 1) for a, b in zip(result["losses"], expected, strict=True))
        limit = 1e-2 if "compiled" in row else 2e-3
        verdict = "" if worst < limit else f"  DIFFERS by more than {limit}"
        shown = f"{result['ms']:9.2f}" if "ms" in result else " " * 9
        print(f"{row:52}{shown}  {result['losses'][-1]:22.5f}  {worst:10.1e}{verdict}")
    for row, result in rows.items():
        if "error" in result:
            print(f"{row:52}FAILED: {result['error']}")
    if "error" not in rows.get("trace", {"error": 1}):
        total, beside = rows["trace"].values()
        print(f"trace: sums take {total:.2f} ms of a step, {beside:.2f} beside other kernels")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=KNOWN, default=["minilm"])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--gloo", action="store_true", help="train in two processes, too")
    parser.add_argument("--one-of-two", choices=KNOWN, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one_of_two:
        one_of_two(KNOWN[chosen.one_of_two])
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables = {}
    for name in chosen.shapes:
        tables[name] = rows = measured(KNOWN[name], SingleProcess(device), "plain")
        rows.update(under_nccl(KNOWN[name], chosen.out))
        if chosen.gloo:
            rows.update(two_processes(name))
        (chosen.out / "gpu_distributed.json").write_text(json.dumps(tables, indent=1) + "\n")
    for name, rows in tables.items():
        print_table(name, rows)


if __name__ == "__main__":
    main()
