"""Kill training at random moments, damage its checkpoints and fill its disk; then resume it.

    PYTHONPATH=src:tests python scripts/attack/kills.py FOLDER [--seconds 150]

The runs train an ensemble of two members with ranker, calibration and probabilities. Every run must
end with the same files and records as an uninterrupted one, bit for bit.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections import Counter
from pathlib import Path

# One thread, so that a process can be forked after everything is compiled. Before torch and numba.
os.environ |= {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1"}
os.environ |= {"OMP_NUM_THREADS": "1"}

from run import Results

from e2e.crash_worker import CONFIG, CORPUS
from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.errors import EliasError, Interrupted

MOST_KILLS = 6  # per run; after that it is not killed
LEAST_KILLS = 60
SIGNALLED = 3
USER_ERROR = 2
DISK = 1 << 20  # bytes of the largest full disk, a little less than a run needs
SETTINGS = CONFIG | {"ensemble.members": 2}


def work(out):
    train(synthetic_corpus(**CORPUS), EliasConfig().override(SETTINGS), out=out, device="cpu")


def start(out, limit=None):
    """Train in a forked process; return its id. ``limit`` is the largest file it can write."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        work(out)
        code = 0
    except Interrupted:
        code = SIGNALLED
    except EliasError as error:
        code = USER_ERROR if "\n" not in str(error) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def without_times(tree):
    """Return a tree of JSON without durations, and without checksums of files that hold some."""
    if isinstance(tree, dict):
        skipped = [
            key for key in tree if key in ("seconds", "timings") or key.startswith("members/")
        ]
        return {key: without_times(tree[key]) for key in tree if key not in skipped}
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
            results[name].pop("sha256", None)  # it depends on the durations
        else:
            results[name] = path.read_bytes()
    return results


def phase(run):
    """Return what a killed run had done last, by its records."""
    if (run / "model").exists():
        return "saving"
    if not (run / "metrics.jsonl").exists():
        return "start"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    stages = [event["stage"] for event in events if event.get("stage")]
    member = 2 if (run / "checkpoints" / "member-0").exists() else 1
    return f"member {member} {stages[-1] if stages else 'initialisation'}"


def kills(results, folder, wanted, seconds, rng, end):
    """Kill runs again and again; each must be finished by the next processes."""
    n_kills, runs, failures, phases = 0, 0, [], Counter()
    while time.monotonic() < end or n_kills < LEAST_KILLS:
        out, runs = folder / f"kill-{runs}", runs + 1
        for attempt in range(MOST_KILLS + 1):
            child = start(out)
            if attempt < MOST_KILLS:
                time.sleep(rng.uniform(0.02, seconds))
                sent = signal.SIGKILL if rng.random() < 0.75 else signal.SIGTERM
                os.kill(child, sent)  # a process that has ended must be reaped
            code = ended(child)
            if code in (-signal.SIGKILL, -signal.SIGTERM, SIGNALLED):
                n_kills += 1
                phases[phase(out)] += 1
            elif code:
                failures.append(f"{out.name}: ended with {code}")
                break
            if code == 0 or (out / "model").exists():
                break
        if not failures and content(out) != wanted:
            failures.append(f"{out.name}: another model than without kills")
        shutil.rmtree(out)
    spread = ", ".join(f"{name} {count}" for name, count in sorted(phases.items()))
    outcome = f"{runs} runs resumed to the same model, bit for bit; killed after: {spread}"
    results.add("`kill -9` and SIGTERM while training", n_kills, outcome, failures)


def stopped(out, seconds, rng):
    """Kill a run that has a checkpoint; return False if it was finished before that."""
    while True:
        child = start(out)
        time.sleep(rng.uniform(0.2, 0.8) * seconds)
        os.kill(child, signal.SIGKILL)
        ended(child)
        if (out / "model").exists():
            return False
        if any((out / "checkpoints").glob("[0-9]*/*")):
            return True


def damaged_checkpoints(results, folder, wanted, seconds, rng, end):
    """Damage a file of the checkpoints; the run goes on from an older one, or starts over."""
    tried, failures = 0, []
    while time.monotonic() < end or tried < 10:
        out = folder / f"damage-{tried}"
        if stopped(out, seconds, rng):
            files = [path for path in (out / "checkpoints").rglob("*") if path.is_file()]
            how = damage(rng.choice(files), rng)
            code = ended(start(out))
            if code or content(out) != wanted:
                failures.append(f"{how}: ended with {code}, or with another model")
            tried += 1
        shutil.rmtree(out)
    outcome = "resumed from an older checkpoint, or started over, with a warning; the same model"
    results.add("Damaged checkpoints", tried, outcome, failures)


def damage(path, rng):
    """Damage a file, and return how."""
    raw = bytearray(path.read_bytes())
    how = rng.choice(["flipped bit", "cut short", "removed", "emptied", "random bytes"])
    if how == "removed":
        path.unlink()
    elif how == "flipped bit" and raw:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
    elif how == "random bytes" and raw:
        position = rng.randrange(len(raw))
        raw[position : position + 16] = rng.randbytes(16)
        path.write_bytes(raw)
    else:
        path.write_bytes(raw[: len(raw) // 2 if how == "cut short" else 0])
    return f"{path.name} {how}"


def full_disk(results, folder, wanted, rng, end):
    """Train where files cannot grow, and on a full disk; then with enough space."""
    tried, failures, outcomes = 0, [], Counter()
    disk = folder / "disk"
    disk.mkdir()
    kinds = ["limit", "tmpfs"] if mounted(disk, DISK) else ["limit"]
    while time.monotonic() < end or tried < 8:
        kind = kinds[tried % len(kinds)]
        out = (disk if kind == "tmpfs" else folder) / f"full-{tried}"
        size = int(2 ** rng.uniform(12, 20))
        if kind == "tmpfs":
            mounted(disk, size, "remount,")
        code = ended(start(out, size if kind == "limit" else None))
        whole = (out / "model").exists()
        if kind == "tmpfs":
            mounted(disk, 64 * DISK, "remount,")
        if code not in (0, USER_ERROR):
            failures.append(f"{kind} of {size} bytes: ended with {code}")
        elif not whole and ended(start(out)):
            failures.append(f"{kind} of {size} bytes: cannot be resumed")
        elif content(out) != wanted:
            failures.append(f"{kind} of {size} bytes: another model")
        outcomes["finished" if whole else "stopped in one line"] += 1
        tried += 1
        shutil.rmtree(out, ignore_errors=True)
    if "tmpfs" in kinds:
        subprocess.run(["umount", disk], check=False)
    spread = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    outcome = f"{spread}; with space again, the same model"
    results.add("Full disk while training (file size limit, tmpfs)", tried, outcome, failures)


def mounted(folder, size, mode=""):
    """Mount or resize a disk in memory; return whether that worked."""
    command = ["mount", "-t", "tmpfs", "-o", f"{mode}size={size}", "tmpfs", folder]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    chosen = parser.parse_args()
    results, folder, rng = Results(chosen.folder), chosen.folder, random.Random()
    began = time.monotonic()
    work(folder / "first")  # compiles everything
    wanted = content(folder / "first")
    start_of_second = time.monotonic()
    if ended(start(folder / "second")) or content(folder / "second") != wanted:
        raise SystemExit("two undisturbed runs differ")
    seconds = time.monotonic() - start_of_second
    for share, attack in ((0.6, kills), (0.8, damaged_checkpoints), (1.0, full_disk)):
        end = began + share * chosen.seconds
        timed = () if attack is full_disk else (seconds,)
        attack(results, folder, wanted, *timed, rng, end)


if __name__ == "__main__":
    main()
