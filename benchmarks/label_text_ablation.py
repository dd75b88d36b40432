"""Compare training without label texts, with them as training points, with stage 0, and with both.

    PYTHONPATH=src python3 benchmarks/label_text_ablation.py data/mesh-titles --out RUNS/ablation

Prints a table of test metrics, after the last stage and with all components: means over the seeds.
Test points whose labels are all filtered do not count. Finished runs in ``--out`` are not trained
again, so the same command continues an interrupted one. ``--set`` is as in ``elias train``.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from cpu_setup import write_json

from elias import Elias, evaluate, load_corpus

ROWS = {
    "no label texts": {"label_text_weight": 0, "label_contrast": "false"},
    "label points": {"label_contrast": "false"},
    "stage 0": {"label_text_weight": 0, "label_contrast": "true"},
    "both": {"label_contrast": "true"},
}
METRICS = ("P@1", "P@3", "P@5", "PSP@5", "R@10", "R@100")


def train(data: Path, row: str, seed: int, args: argparse.Namespace) -> Path:
    """Return the folder of a run, trained unless it is finished."""
    run = args.out / data.name / f"{row.replace(' ', '-')}-{seed}"
    if not (run / "model").exists():
        changes = [f"loss.{key}={value}" for key, value in ROWS[row].items()]
        changes += [f"seed={seed}", *args.set]
        command = [sys.executable, "-m", "elias", "-q", "train", str(data), "--out", str(run)]
        command += ["--device", args.device, *(f"--set={change}" for change in changes)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at the same time")
    args = parser.parse_args()
    tasks = [(data, row, seed) for data in args.corpora for row in ROWS for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = dict(zip(tasks, pool.map(lambda task: train(*task, args), tasks), strict=True))
    print(f"| corpus | label texts | | {' | '.join(METRICS)} |")
    print(f"| --- | --- | --- |{' --- |' * len(METRICS)}")
    results = []
    for data in args.corpora:
        corpus = load_corpus(data)
        for row in ROWS:
            of_seeds = []
            for seed in args.seeds:
                model = Elias.from_pretrained(runs[data, row, seed], device=args.device)
                parts = {"last stage": model.components[0], "all": model.components[-1]}
                ranked = model.predict_components(corpus.test, list({*parts.values()}))
                metrics = {
                    part: evaluate(ranked[component], corpus, empty="drop")
                    for part, component in parts.items()
                }
                of_seeds.append(metrics)
                result = {"corpus": data.name, "label texts": row, "seed": seed, "test": metrics}
                results.append(result | {"timings": model.metadata["timings"]})
            for part in of_seeds[0]:
                means = (np.mean([m[part][name] for m in of_seeds]) for name in METRICS)
                values = " | ".join(f"{mean:.2f}" for mean in means)
                print(f"| {data.name} | {row} | {part} | {values} |", flush=True)
    write_json(args.out, "label_text_ablation.json", results)


if __name__ == "__main__":
    main()
