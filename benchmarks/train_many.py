"""Run `elias train` several times, some at a time, and collect the metrics of all runs in a file.

    PYTHONPATH=src python3 benchmarks/train_many.py benchmarks/gpu_runs.toml --jobs 2 --threads 8 \
        --runs runs/rows --out runs/rows.jsonl --until 560 --only wordnet mesh
    PYTHONPATH=src python3 benchmarks/train_many.py --run mesh data/mesh-titles index.beta=75 \
        --seeds 0 1 2 --device cpu --jobs 8 --threads 2 --runs runs/rows --out runs/rows.jsonl

A TOML file has a table for each run: ``data``, and optionally ``set`` (KEY=VALUE strings),
``options`` of `elias train`, ``seeds``, ``limit`` (seconds), ``program`` (instead of
``-m elias``) and ``filtered``: a corpus with the same labels and a filter of test pairs, on which
the model is evaluated, too, without test points whose labels are all filtered. ``[defaults]``
holds for all of them, with its ``set`` before those of a run.

When a run ends, --out gets a line for each of its components, with metrics of held-out and test
points, and one for the run. Runs that finished according to --out are skipped; others are resumed
if their folder is still there. A run over its limit gets SIGTERM, to write a checkpoint. No run
starts after --until seconds, and all are stopped then. At the end, a Markdown table of all runs in
--out is printed: means over seeds, with the spread of test P@1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import NamedTuple

GRACE = 25.0  # seconds to write a checkpoint after SIGTERM
FILTERED = "filtered.jsonl"
METRICS = ("P@1", "P@3", "P@5", "PSP@5", "R@10", "R@100")
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Run(NamedTuple):
    """A training run of one seed."""

    name: str
    seed: int
    data: str
    set: list[str]
    options: tuple[str, ...] = ()
    limit: float = 600.0
    program: tuple[str, ...] = ("-m", "elias")
    filtered: str = ""

    def __str__(self):
        return f"{self.name}-{self.seed}"


def runs_of(given):
    """Return the runs of the file and of the command line, one for each seed."""
    tables = tomllib.loads(given.file.read_text(encoding="utf8")) if given.file else {}
    defaults = {"set": [], "seeds": [0], **tables.pop("defaults", {})}
    for name, data, *settings in given.run:
        tables[name] = {"data": data, "set": settings}
    runs = []
    for name in given.only or tables:
        table = {**defaults, **tables[name]}
        table["set"] = [*defaults["set"], *tables[name].get("set", [])]
        seeds = table.pop("seeds")
        runs += [Run(name, seed, **table) for seed in given.seeds or seeds]
    return runs


def read_lines(path):
    lines = path.read_text(encoding="utf8").split("\n") if path.is_file() else [""]
    return [json.loads(line) for line in lines[:-1]]  # the last one is empty or was cut


def rows_of(run, folder, ending):
    """Return a row for each component in a run's events, and one for the whole run."""
    events = defaultdict(list)
    for event in read_lines(folder / "metrics.jsonl"):
        events[event["event"]].append(event)
    times = {event["step"]: event["seconds"] for event in events["time"]}
    about = {"run": run.name, "seed": run.seed, "data": run.data, "set": run.set}
    about["options"] = run.options
    rows = []
    for event in events["stage"]:
        if "member" not in event:  # of an ensemble, only the whole
            metrics = {"held_out": event.get("validation"), "test": event.get("test")}
            row = {**about, "component": event["stage"], **metrics}
            rows.append({**row, "seconds": times.get(event["stage"])})
    for name, test in read_lines(folder / FILTERED):
        row = {**about, "component": f"{name}, filtered", "held_out": None, "test": test}
        rows.append({**row, "seconds": None})
    epochs = sum(event["seconds"] for event in events["epoch"])
    return [*rows, {**about, "times": times, "epochs_s": epochs, **ending}]


class Job:
    """A run that is being trained."""

    def __init__(self, run, given):
        self.run, self.folder = run, given.runs / str(run)
        self.log = given.runs / f"{run}.log"
        device = ["--device", given.device]
        command = [*run.program, "train", run.data, "--out", str(self.folder), *device]
        command += [*run.options, *(f"--set={each}" for each in [*run.set, f"seed={run.seed}"])]
        self.commands = [] if (self.folder / "model").exists() else [command]
        if run.filtered:
            evaluation = [str(self.folder), run.filtered, *device]
            self.commands.append([__file__, "--evaluate", *evaluation])
        self.commands = self.commands or [["-c", ""]]  # only its metrics are missing
        self.threads = dict.fromkeys(THREADS, str(given.threads)) if given.threads else {}
        self.start, self.stopped = time.monotonic(), None
        self.run_next()

    def run_next(self):
        """Start the next command."""
        command = [sys.executable, *self.commands.pop(0)]
        with self.log.open("a", encoding="utf8") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(command, env={**os.environ, **self.threads}, **streams)

    def has_ended(self):
        """Return whether the last command has ended, or one has failed."""
        if self.process.poll() == 0 and self.commands and self.stopped is None:
            self.run_next()
        return self.process.poll() is not None

    def stop(self):
        """Ask the run to write a checkpoint; end it and its workers if that takes too long."""
        if self.stopped is None:
            self.stopped = time.monotonic()
            self.process.terminate()
        elif time.monotonic() > self.stopped + GRACE:
            os.killpg(self.process.pid, signal.SIGKILL)

    def ending(self):
        """Return how the run ended, and its seconds."""
        code = self.process.returncode
        status = "stopped" if self.stopped else "failed"
        if not code and not self.commands:
            status = "finished"
        ending = {"status": status, "wall_s": round(time.monotonic() - self.start, 1)}
        if status == "failed":
            text = self.log.read_text(encoding="utf8", errors="replace")
            ending |= {"exit_code": code, "error": text[-500:]}
        return ending


def train_all(runs, given):
    """Train the runs, ``--jobs`` at a time, and write their rows."""
    end = time.monotonic() + given.until
    waiting, jobs = list(runs), []
    try:
        while jobs or (waiting and time.monotonic() < end):
            while waiting and len(jobs) < given.jobs and time.monotonic() < end:
                jobs.append(Job(waiting.pop(0), given))
            time.sleep(0.2)
            for job in jobs:
                if job.has_ended():
                    ending = job.ending()
                    rows = rows_of(job.run, job.folder, ending)
                    with given.out.open("a", encoding="utf8") as out:
                        out.writelines(json.dumps(row) + "\n" for row in rows)
                    print(f"# {job.run}: {ending}", file=sys.stderr, flush=True)
                elif time.monotonic() > min(end, job.start + job.run.limit):
                    job.stop()
            jobs = [job for job in jobs if job.process.returncode is None]
    finally:
        for job in jobs:
            os.killpg(job.process.pid, signal.SIGKILL)
    print("# not started:", *waiting, file=sys.stderr)


def evaluate_filtered(run, data, device):
    """Write the metrics of a model on test points that have labels after filtering."""
    from elias import Elias, evaluate, load_corpus

    model, corpus = Elias.from_pretrained(run, device=device), load_corpus(data)
    ranked = model.predict_components(corpus.test, model.components)
    metrics = {name: evaluate(each, corpus, empty="drop") for name, each in ranked.items()}
    lines = (json.dumps([name, dict(values)]) + "\n" for name, values in metrics.items())
    (run / FILTERED).write_text("".join(lines), encoding="utf8")


def markdown(lines):
    """Return a table of the components of all runs."""
    latest = {(line["run"], line["seed"], line.get("component")): line for line in lines}
    groups = defaultdict(list)
    for (name, _, component), line in latest.items():
        if component:
            groups[name, component].append(line)
    header = ["run", "component", "seeds", "held-out P@1", *METRICS, "spread of P@1", "s"]
    table = [header, ["---"] * len(header)]
    for about, group in groups.items():
        columns = [[row["test"][name] for row in group if row["test"]] for name in METRICS]
        columns.insert(0, [row["held_out"]["P@1"] for row in group if row["held_out"]])
        columns.append([max(columns[1], default=0) - min(columns[1], default=0)])
        columns.append([row["seconds"] for row in group if row["seconds"]])
        cells = [f"{mean(values):.2f}" if values else "" for values in columns]
        table.append([*about, str(len(group)), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="a TOML file of runs")
    parser.add_argument("--run", nargs="+", action="append", default=[], metavar="NAME DATA SET")
    parser.add_argument("--only", nargs="+", help="names of the runs to train, in this order")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those of the runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, help="threads of each run")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--runs", type=Path, help="folder of the run folders")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--evaluate", nargs=2, help=argparse.SUPPRESS)  # a run on filtered data
    given = parser.parse_args()
    if given.evaluate:
        evaluate_filtered(Path(given.evaluate[0]), given.evaluate[1], given.device)
        return
    if not given.runs or not given.out:
        parser.error("--runs and --out are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its runs end, too
    given.runs.mkdir(parents=True, exist_ok=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(given.out)
    over = [(line["run"], line["seed"]) for line in lines if line.get("status") == "finished"]
    train_all([run for run in runs_of(given) if (run.name, run.seed) not in over], given)
    print(markdown(read_lines(given.out)))


if __name__ == "__main__":
    main()
