"""Compare estimated with measured memory.

    python benchmarks/memory_check.py                    # CPU: whole runs, each in a process
    PYTHONPATH=src python3 benchmarks/memory_check.py --device cuda    # steps of BERT-base's shape

On a CPU, trains on a generated corpus, with checkpoints, and compares the peak of the process
(getrusage) with the estimate that `elias.training.memory` made at the start. On a GPU, runs some
steps with random weights and compares torch.cuda.max_memory_allocated. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

CPU_SHAPES = {
    # name: points, labels, changes to the configuration
    "wide labels": (3_000, 100_000, {"encoder.dim": 256}),
    "narrow labels": (4_000, 300_000, {"encoder.dim": 64}),
    "many edges": (3_000, 50_000, {"encoder.dim": 64, "index.edges_per_cluster": 12_000}),
    "large batch": (6_000, 20_000, {"encoder.dim": 128, "batch_size": 2048}),
    "long vocabulary": (20_000, 2_000, {"encoder.dim": 256, "encoder.char_ngrams": [3, 5]}),
    "one-vs-all": (2_000, 100_000, {"encoder.dim": 256, "index.kind": "all"}),
}


def generated(n_points: int, n_labels: int):
    """Return a corpus whose points have three labels each."""
    import numpy as np
    from scipy.sparse import csr_matrix

    from elias.data.corpus import Corpus, Split

    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, n_labels, (n_points, 3)), axis=1)
    ids[:, 0] = np.arange(n_points) % n_labels
    labels = csr_matrix(
        (np.ones(3 * n_points, np.float32), ids.ravel(), np.arange(n_points + 1) * 3),
        shape=(n_points, n_labels),
    )
    labels.sum_duplicates()
    labels.data[:] = 1
    words = rng.integers(0, 30_000, (n_points, 10))
    texts = [" ".join(f"word{word:x}" for word in row) for row in words.tolist()]
    names = [str(i) for i in range(n_labels)]
    return Corpus(train=Split(labels=labels, texts=texts), label_names=names)


def run_on_cpu(name: str, out: str) -> None:
    """Train one shape in this process, and print the estimate and the peak."""
    from elias import EliasConfig, train
    from elias.training import trainer

    n_points, n_labels, given = CPU_SHAPES[name]
    changes = {"encoder.char_ngrams": [0, 0], "encoder.hidden_dim": 256, **given}
    batch_size = changes.pop("batch_size", 256)
    config = EliasConfig().override({"index.kind": changes.pop("index.kind", "graph")})
    for stage in config.stages:
        changes[f"stages.{stage.name}.epochs"] = 1
        changes[f"stages.{stage.name}.batch_size"] = batch_size
    config = config.override(
        {
            **changes,
            "eval.validation_size": 200,
            "eval.hold_out": "random",
            "rerank.enabled": False,
            "checkpoint.minutes": 1e-9,
        }
    )
    results = []

    def watched(*args, **options):
        results.append(whole(*args, **options))
        return results[-1]

    whole, trainer.estimate_memory = trainer.estimate_memory, watched
    train(generated(n_points, n_labels), config, out=out, device="cpu")
    expected = dict(results[0].on_host)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"expected": expected, "peak": peak}))


def check_cpu(chosen: list[str]) -> list[dict]:
    """Run each shape in a separate process."""
    import tempfile

    rows = []
    for name in chosen or CPU_SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", name, "--out", f"{folder}/run"]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            raise SystemExit(1)
        results = json.loads(done.stdout.splitlines()[-1])
        parts = {key: value for key, value in results["expected"].items() if value}
        rows.append(row := memory_row(name, sum(parts.values()), results["peak"]))
        print(json.dumps({**row, "parts": {k: v >> 20 for k, v in parts.items()}}), flush=True)
    return rows


def memory_row(name: str, expected: int, peak: int) -> dict:
    return {
        "shape": name,
        "expected_mib": expected >> 20,
        "peak_mib": peak >> 20,
        "error": f"{100 * (expected / peak - 1):+.1f}%",
    }


def check_gpu(args: argparse.Namespace) -> list[dict]:
    """Run some steps of each shape of SPEC §8 and compare the peak GPU memory."""
    import gc
    from itertools import product

    from gpu_setup import SHAPES, STAGE, bert_base, make_batches, make_model, stepper  # isort: skip
    import torch

    from elias.config import EliasConfig
    from elias.training.memory import Sizes, step_memory
    from elias.training.optimizer import Optimizer

    device, compiled, rows = torch.device("cuda"), args.compile, []
    for name, storage in product(args.shape or ["131K", "670K", "2.8M"], args.storage):
        shape = SHAPES[name]
        gc.collect()
        torch.cuda.empty_cache()
        encoder = bert_base(shape.n_tokens, device, compiled)
        model = make_model(shape, encoder, device, compact=storage == "compact")
        batches = make_batches(shape, model, device)
        if args.captured:  # graphs of two shapes
            shorter = shape._replace(n_tokens=shape.n_tokens - 8)
            batches += make_batches(shorter, model, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model.train()
        optimizer = Optimizer(model, STAGE)
        step = stepper(shape, model, optimizer, batches, captured=args.captured)
        for i in range(len(batches)):
            step(i)
        torch.cuda.synchronize()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        sizes = Sizes(
            n_points=shape.batch,
            n_setup=1,
            n_labels=shape.n_labels,
            n_entries=shape.n_positives,
            most_labels=shape.n_positives,
            dim=encoder.dim,
            dense_weights=sum(p.numel() for p in encoder.parameters()),
            longest_text=shape.n_tokens,
            layers=12,
            width=768,
        )
        config = (
            EliasConfig()
            .override(
                {
                    "encoder.model": "minilm",
                    "encoder.compile": compiled,
                    "index.n_clusters": shape.n_clusters,
                    "index.edges_per_cluster": shape.n_edges,
                    "index.shortlist_size": shape.shortlist_size,
                    "index.train_shortlist": shape.shortlist_size,
                    "index.beam_size": shape.beam_size,
                    "index.label_storage": storage,
                    "stages.stage2.batch_size": shape.batch,
                    "stages.stage2.average_from": STAGE.average_from,
                }
            )
            .resolve(shape.batch, shape.n_labels)
        )
        parts = step_memory(sizes, config, config.stages[1], device)
        row = memory_row(f"{name} {storage}", sum(parts.values()), peak)
        rows.append(row | {"reserved_mib": reserved >> 20})
        print(json.dumps({**rows[-1], "parts": {k: v >> 20 for k, v in parts.items()}}), flush=True)
        del encoder, model, batches, optimizer, step
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--compile", default="off", choices=["off", "on"])
    parser.add_argument("--storage", nargs="+", default=["compact"], choices=["full", "compact"])
    parser.add_argument("--captured", action="store_true", help="steps as CUDA graphs")
    parser.add_argument("--child", help="(internal)")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.child:
        run_on_cpu(args.child, args.out)
        return
    rows = check_gpu(args) if args.device == "cuda" else check_cpu(args.shape)
    header = ["shape", "expected, MiB", "peak, MiB", "error", "held by torch, MiB"][: len(rows[0])]
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
