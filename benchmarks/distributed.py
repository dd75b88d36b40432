"""Measure memory, traffic and time of a training step in 1, 2 and 4 processes.

OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/distributed.py --out distributed.json

Prints the expected values next to the measured ones. The corpus is random, because the cost of a
step does not depend on the texts. Memory is the peak above the level just before the model is
built. The processes share the cores of the machine, so times show the cost of communication, not
the speed-up of more machines.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path

os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")  # the only layer that survives a fork

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, EncoderConfig, IndexConfig, StageConfig
from elias.distributed import SingleProcess, joined
from elias.distributed.sharded_linear import ShardedRows
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph, partition_edges
from elias.text.tokens import Tokens
from elias.training.stage import Points, StageLoop

N_FEATURES, WORDS, POSITIVES, WARM = 20_000, 20, 4, 3
KINDS = {
    "φ and label ids": "embeddings and labels",
    "scores": "scores",
    "gradients by score": "gradients by score",
    "gradients by φ": "gradients by embedding",
    "dense gradients": "gradients of shared parameters",
    "rows of words": "gradients of rows",
}


def numbers(chosen):
    """Return enough random points for the steps."""
    rng = np.random.default_rng(0)
    n_points = chosen.batch * (chosen.steps + WARM)
    ids = rng.integers(0, N_FEATURES, (n_points, WORDS)).astype(np.int32)
    offsets = np.arange(n_points + 1, dtype=np.int64) * WORDS
    weights = np.full(ids.size, WORDS**-0.5, dtype=np.float32)
    labels = rng.integers(0, chosen.labels, (n_points, POSITIVES))
    matrix = csr_matrix(
        (
            np.ones(labels.size, np.float32),
            labels.reshape(-1),
            np.arange(n_points + 1) * POSITIVES,
        ),
        shape=(n_points, chosen.labels),
    )
    matrix.sum_duplicates()
    return Points(Tokens(offsets, ids.reshape(-1), weights), matrix)


def configuration(chosen):
    index = IndexConfig(
        n_clusters=chosen.clusters,
        edges_per_cluster=-(-chosen.labels // chosen.clusters),
        beam_size=20,
        shortlist_size=chosen.shortlist,
        train_shortlist=chosen.shortlist,
        beta=10.0,
    )
    stage = StageConfig(
        name="step",
        epochs=1,
        batch_size=chosen.batch,
        learn_graph=True,
        index_every=1,
        average_from=1.0,
    )
    return EliasConfig(index=index, stages=(stage,)).resolve(chosen.batch, chosen.labels)


def model_of(chosen, world):
    torch.manual_seed(0)
    encoder = EncoderConfig(dim=chosen.dim, hidden_dim=2 * chosen.dim)
    edges = partition_edges(torch.arange(chosen.labels) % chosen.clusters, chosen.clusters)
    graph = LabelGraph(edges, chosen.labels, 10.0, edge_logits=torch.zeros(edges.shape))
    rows = ShardedRows(world, chosen.labels, chosen.dim) if world.shards_labels else None
    return EliasModel(BagEncoder(encoder, None, N_FEATURES), graph, 10.0, rows)


def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status: has no {name}")


def measured(chosen, world):
    """Run the training steps; return the measurements of one process."""
    points, config = numbers(chosen), configuration(chosen)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmRSS")
    model = model_of(chosen, world)
    times, seen = [], []

    def keep(*_):
        times.append(time.perf_counter())
        if len(times) == WARM:
            seen.append(dict(world.received))

    loop = StageLoop(
        model=model,
        stage=config.stages[0],
        config=config,
        points=points,
        rng=np.random.default_rng(0),
        validate=None,
        report=lambda _: None,
        keep=keep,
        world=world,
    )
    loop.run()
    received = {
        shown: (world.received[kind] - seen[0].get(kind, 0)) / chosen.steps
        for shown, kind in KINDS.items()
    }
    return {
        "peak": memory("VmHWM") - before,
        "seconds": (times[-1] - times[WARM - 1]) / chosen.steps,
        "received": received,
        "dense": sum(p.numel() for p in model.parameters())
        - sum(p.numel() for p in model.labels.parameters())
        - model.encoder.vectors.numel(),
        "vectors": model.encoder.vectors.numel(),
    }


def run(chosen, size):
    """Return the measurements of ``size`` processes; 0 runs one process without a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    readers = []
    for rank in range(max(1, size)):
        reader, writer = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                if size:
                    with joined("cpu") as world:
                        result = measured(chosen, world)
                else:
                    result = measured(chosen, SingleProcess())
                os.write(writer, json.dumps(result).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(os.fdopen(reader, "rb"))
    reports = [json.loads(reader.read()) for reader in readers]
    for _ in readers:
        os.wait()
    return reports


def on_paper(chosen, size, result):
    """Return the expected memory and received bytes of a process in a step."""
    others = (size - 1) / size if size else 0.0
    batch, dim, wide = chosen.batch, chosen.dim, chosen.shortlist
    own = -(-chosen.labels // max(1, size))
    graph = chosen.clusters * -(-chosen.labels // chosen.clusters)
    touched = (
        1 - (1 - wide / chosen.labels) ** batch
    )  # share of the labels, if all were equally likely
    return {
        "gradient of the rows touched": 4 * own * touched * (dim + 1),
        "W_L and its moments": own * (3 * 4 * (dim + 1) + 2 * 8),
        "words and their moments": 3 * 4 * result["vectors"] + 8 * N_FEATURES,
        "the rest and its moments": 4 * 4 * result["dense"] + 8 * graph,
        "received": {
            "φ and label ids": 4 * batch * (dim + wide) * others,
            "scores": 4 * batch * wide * others,
            "gradients by score": 4 * batch * wide * others,
            "gradients by φ": 4 * batch * dim * others,
            "dense gradients": 8 * result["dense"] * others,
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (
        ("labels", 400_000),
        ("clusters", 4096),
        ("dim", 256),
        ("shortlist", 1000),
        ("batch", 256),
        ("steps", 12),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measured(
        argparse.Namespace(**{**vars(chosen), "labels": 4096, "steps": 1}), SingleProcess()
    )  # compile first
    rows = []
    for size in chosen.sizes:
        reports = run(chosen, size)
        paper = on_paper(chosen, size, reports[0])
        rows.append({"processes": size, "said": reports, "paper": paper})
        peaks = ", ".join(f"{result['peak'] / 2**20:.0f}" for result in reports)
        held = sum(v for v in paper.values() if not isinstance(v, dict)) / 2**20
        print(
            f"{size} processes: peak {peaks} MiB (paper {held:.0f}); {reports[0]['seconds']:.2f} s"
        )
        for kind, value in reports[0]["received"].items():
            wanted = paper["received"].get(kind)
            shown = "" if wanted is None else f" (paper {wanted / 1e6:.3f})"
            print(f"    {kind}: {value / 1e6:.3f} MB{shown}")
    if chosen.out:
        about = {key: value for key, value in vars(chosen).items() if key != "out"}
        chosen.out.write_text(json.dumps({"chosen": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
