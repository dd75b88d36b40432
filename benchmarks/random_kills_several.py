"""Train in several processes, and kill a random one at random moments, again and again.

PYTHONPATH=src:tests python benchmarks/random_kills_several.py FOLDER --seconds 200

After each kill, the others must end by themselves, with an error that names the killed process,
unless it died before all had joined or after they had left. The run then resumes with another
number of processes, and must end with the metrics and the files of an uninterrupted one.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

os.environ["NUMBA_THREADING_LAYER"] = "workqueue"  # the only layer that survives a fork

import torch

from e2e.crash_worker import CONFIG, CORPUS
from e2e.train_worker import free_port
from elias import EliasConfig
from elias.data.synthetic import synthetic_corpus
from elias.distributed import joined
from elias.training.train import train_together

MOST_KILLS = 5  # per run; after that none is killed
LONGER = {
    "stages.stage1.epochs": 4,
    "stages.stage2.epochs": 6,
    "stages.stage2.average_from": 1.0,
    "rerank.calibrate": False,  # with 30 points, rounding changes the trees
}
FAILED = 3
MEETING = 20.0  # seconds; torchrun would not wait for a process that dies before all have joined
LONGEST_END = 90.0


def start(out, size, corpus):
    """Train in separate processes; return their ids and error files."""
    port, ids, errors = free_port(), [], []
    for rank in range(size):
        errors.append(out.with_name(f"{out.name}-{rank}.error"))
        errors[-1].unlink(missing_ok=True)
        ids.append(os.fork())
        if ids[-1]:
            continue
        code = FAILED
        try:
            torch.set_num_threads(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            with joined("cpu", timeout=MEETING) as world:
                train_together(world, EliasConfig().override(CONFIG | LONGER), corpus, out=out)
            code = 0
        except BaseException as error:
            errors[-1].write_text(str(error))
        finally:
            os._exit(code)
    return ids, errors


def ended(ids):
    """Wait for all processes; return their exit codes and the time of the last."""
    began, codes = time.monotonic(), {}
    while len(codes) < len(ids):
        for number in ids:
            if number not in codes:
                ended, status = os.waitpid(number, os.WNOHANG)
                if ended:
                    codes[number] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > LONGEST_END:
            for number in ids:
                if number not in codes:
                    os.kill(number, signal.SIGKILL)
            raise SystemExit(f"after {LONGEST_END} s some had not ended: {codes}")
        time.sleep(0.02)
    return [codes[number] for number in ids], time.monotonic() - began


def content(run):
    """Return the metrics of a finished run and the names of its files."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "epoch"]
    tests = [line["test"]["nDCG@5"] for line in lines if line["event"] == "stage"]
    files = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())
    return losses, tests, files


def same(ours, theirs):
    losses = zip(ours[0], theirs[0], strict=True)
    near = all(abs(a - b) < 1e-3 * abs(b) for a, b in losses)
    tests = all(abs(a - b) < 0.5 for a, b in zip(ours[1], theirs[1], strict=True))
    return near and tests and ours[2] == theirs[2]


def killed_often(out, corpus, longest, rng):
    """Train until the model is written; return the outcome of each kill and the longest end."""
    outcomes, slowest = Counter(), 0.0
    for n_kills in range(MOST_KILLS + 1):
        size = rng.choice([1, 2, 3, 4])
        ids, errors = start(out, size, corpus)
        victim = None
        if n_kills < MOST_KILLS:
            time.sleep(rng.uniform(0.05, longest))
            victim = rng.randrange(size)
            os.kill(ids[victim], signal.SIGKILL)
        codes, seconds = ended(ids)
        if victim is not None and codes[victim] == -signal.SIGKILL:
            logs = [path.read_text() for path in errors if path.exists()]
            named = any(text.startswith(f"rank {victim} ") for text in logs)
            outcomes["named" if named else "alone" if size == 1 else "not met, or parted"] += 1
            slowest = max(slowest, seconds)
        elif any(codes):
            logs = [path.read_text() for path in errors if path.exists()]
            raise SystemExit(f"{out}: ended with {codes}: {logs}")
        if (out / "model").exists():
            return outcomes, slowest
    raise SystemExit(f"{out}: was not killed, but has no model")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds before a kill")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True)
    torch.set_num_threads(1)
    corpus = synthetic_corpus(**CORPUS)
    with_kernels = EliasConfig().override(CONFIG | {"rerank.enabled": False})
    from elias import train

    train(corpus, with_kernels, device="cpu")  # load all kernels before the forks
    codes, _ = ended(start(chosen.folder / "whole", 1, corpus)[0])
    if any(codes):
        raise SystemExit("the uninterrupted run failed")
    wanted = content(chosen.folder / "whole")
    rng, end, runs, different = random.Random(0), time.monotonic() + chosen.seconds, 0, []
    outcomes, slowest = Counter(), 0.0
    while time.monotonic() < end:
        out = chosen.folder / f"run-{runs}"
        came, seconds = killed_often(out, corpus, chosen.longest, rng)
        runs, outcomes, slowest = runs + 1, outcomes + came, max(slowest, seconds)
        if not same(content(out), wanted):
            different.append(out.name)
    print(f"{runs} runs, {sum(outcomes.values())} kills {dict(outcomes)},", end=" ")
    print(
        f"the others ended within {slowest:.1f} s, {len(different)} with a different result",
        *different,
    )


if __name__ == "__main__":
    main()
