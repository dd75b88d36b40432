"""Kill training at random moments again and again, and resume it until it is finished.

PYTHONPATH=src:tests python benchmarks/random_kills.py FOLDER --seconds 200

Every run must end with the same files and records as an uninterrupted one.
"""

import argparse
import json
import os
import random
import signal
import time
import traceback
from pathlib import Path

from e2e.crash_worker import CONFIG, CORPUS
from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus

MOST_KILLS = 6  # per run; after that it is not killed
LONGER = {"stages.stage1.epochs": 4, "stages.stage2.epochs": 6}


def start(out):
    """Train in a separate process, forked before anything is computed; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        config = EliasConfig().override(CONFIG | LONGER)
        train(synthetic_corpus(**CORPUS), config, out=out, device="cpu")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def without_times(tree):
    if isinstance(tree, dict):
        timeless = {k: v for k, v in tree.items() if k not in ("seconds", "timings")}
        return {key: without_times(value) for key, value in timeless.items()}
    return [without_times(item) for item in tree] if isinstance(tree, list) else tree


def content(run):
    """Return the content of a finished run, except for its log and durations."""
    results = {}
    for path in [run / "metrics.jsonl", *(p for p in (run / "model").rglob("*") if p.is_file())]:
        name = path.relative_to(run).as_posix()
        if path.suffix == ".jsonl":
            lines = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
            # the time of saving is logged after the model is written: a kill may lose it
            results[name] = [line for line in lines if line.get("step") != "save"]
        elif path.name == "config.json":
            results[name] = without_times(json.loads(path.read_text()))
        else:
            results[name] = path.read_bytes()
    return results


def killed_often(out, longest, rng):
    """Train until the model is written; return the number of kills."""
    for n_kills in range(MOST_KILLS + 1):
        child = start(out)
        if n_kills < MOST_KILLS:
            time.sleep(rng.uniform(0.05, longest))
            os.kill(child, signal.SIGKILL)  # a process that has ended must be reaped
        code = ended(child)
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"{out}: ended with {code}")
        if (out / "model").exists():
            return n_kills + (code != 0)
    raise SystemExit(f"{out}: was not killed, but has no model")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds before a kill")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True)
    if ended(start(chosen.folder / "whole")):
        raise SystemExit("the uninterrupted run failed")
    wanted = content(chosen.folder / "whole")
    rng, end, kills, different = random.Random(0), time.monotonic() + chosen.seconds, [], []
    while time.monotonic() < end:
        out = chosen.folder / f"run-{len(kills)}"
        kills.append(killed_often(out, chosen.longest, rng))
        if content(out) != wanted:
            different.append(out.name)
    print(
        f"{len(kills)} runs, {sum(kills)} kills, {len(different)} with a different result",
        *different,
    )


if __name__ == "__main__":
    main()
