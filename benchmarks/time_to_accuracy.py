"""Measure the training time to a given validation P@1, on any corpus with any configuration.

    PYTHONPATH=src python3 benchmarks/time_to_accuracy.py data/wordnet-related --device cuda \
        --config scripts/reproduce/wordnet-related-minilm.toml --targets 40 44 45 --out RESULTS
    PYTHONPATH=src python3 benchmarks/time_to_accuracy.py --run runs/mesh --out RESULTS

With --run and a finished run nothing is trained.

The time covers clusters, edges and epochs, with the validation after each epoch, as recorded in
the run's ``metrics.jsonl``. Loading, the encoder and tokenization come before and are reported
separately. Without --targets, some shares of the best value are used. Test points are used only in
the report that training writes of each stage.
"""

import argparse
import json
import platform
import tempfile
import tomllib
from pathlib import Path

import torch
from cpu_setup import write_json

from elias import EliasConfig, load_corpus, train

SHARES = (0.8, 0.9, 0.95, 0.99, 1.0)
PREPARATION = ("encoder", "tokens")


def read_events(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def curve_of(events, metric):
    """Return the epochs with the training seconds at their end, and the preparation seconds."""
    stages = {event["stage"] for event in events if event["event"] == "epoch"}
    trained, prepared, curve = 0.0, 0.0, []
    for event in events:
        if event["event"] == "time" and event["step"] in PREPARATION:
            prepared += event["seconds"]
        elif event["event"] == "time" and event["step"] in ("clusters", "edges"):
            trained += event["seconds"]
        elif event["event"] == "epoch":
            trained += event["seconds"]
            point = {"stage": event["stage"], "epoch": event["epoch"], "seconds": trained}
            if metric in event["validation"]:
                curve.append({**point, metric: event["validation"][metric]})
    if not stages:
        raise SystemExit("the run has no epochs: give a folder that `elias train` wrote")
    if not curve:
        raise SystemExit(f"no epoch has a validation {metric}: see eval.validation_size")
    return curve, prepared


def reached(curve, metric, targets):
    """Return the first epoch that reaches each target; None if none does."""
    best = max(point[metric] for point in curve)
    wanted = targets or [round(share * best, 4) for share in SHARES]
    return [
        {"target": target, **next((p for p in curve if p[metric] >= target), {"seconds": None})}
        for target in wanted
    ]


def override_of(text):
    key, _, value = text.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def train_run(given, folder):
    config = EliasConfig.from_file(given.config) if given.config else EliasConfig()
    # the ranker runs after the last epoch, so it does not change these times
    settings = {"rerank.enabled": False}
    config = config.override(settings | dict(map(override_of, given.set)))
    train(load_corpus(given.corpus), config, out=folder, device=given.device, overwrite=True)


def show(curve, rows, prepared, metric):
    print(f"{'validation ' + metric:>16s}  {'seconds':>8s}  {'ratio':>6s}  reached in")
    whole = curve[-1]["seconds"]
    for row in rows:
        if row["seconds"] is None:
            print(f"{row['target']:16.2f}  {'-':>8s}  {'-':>6s}  no epoch")
            continue
        share = row["seconds"] / whole
        where = f"{row['stage']} epoch {row['epoch']} ({row[metric]:.2f})"
        print(f"{row['target']:16.2f}  {row['seconds']:8.1f}  {share:5.0%}   {where}")
    print(f"all epochs: {whole:.1f} s to {curve[-1][metric]:.2f}; before them {prepared:.1f} s")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", nargs="?", help="folder of the corpus to train on")
    parser.add_argument("--config", type=Path, help="a TOML file")
    parser.add_argument("--set", action="append", default=[], help="setting=value, as in train")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--metric", default="P@1")
    parser.add_argument("--targets", type=float, nargs="*", help="P@1 in percent")
    parser.add_argument("--run", type=Path, help="read this run, or train into this folder")
    parser.add_argument("--out", type=Path, help="folder for time_to_accuracy.json")
    given = parser.parse_args()
    if given.corpus is None and given.run is None:
        parser.error("give a corpus to train on, or --run with what was trained before")
    with tempfile.TemporaryDirectory() as spare:
        folder = given.run or Path(spare) / "run"
        if given.corpus is not None:
            train_run(given, folder)
        curve, prepared = curve_of(read_events(folder), given.metric)
    rows = reached(curve, given.metric, given.targets)
    show(curve, rows, prepared, given.metric)
    machine = {"torch": torch.__version__, "python": platform.python_version()}
    if given.corpus is not None:
        machine |= {"device": given.device, "threads": torch.get_num_threads()}
        if given.device.startswith("cuda"):
            machine["gpu"] = torch.cuda.get_device_name()
    results = {
        "corpus": given.corpus,
        "config": given.config and given.config.name,
        "set": given.set,
        "metric": given.metric,
        "machine": machine,
        "preparation_s": round(prepared, 2),
        "reached": rows,
        "curve": curve,
    }
    write_json(given.out, "time_to_accuracy.json", results)


if __name__ == "__main__":
    main()
