"""Train on a corpus that does not fit in memory, and report the peak memory.

    python benchmarks/big_corpus.py --points 10000000 --labels 100000 --steps 300 --work FOLDER

Texts are generated into a JSONL file, streamed to disk, tokenized by worker processes and used for
some training steps (bag encoder, both stages). For each part, the script prints the time and the
peak resident memory so far of this process and of the largest worker (from getrusage, which
includes mapped file pages that the system may reclaim).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

WORDS_PER_TEXT = 8
CHUNK = 50_000


def generate(path: Path, n_points: int, n_labels: int, seed: int = 0) -> None:
    """Write random rows. Each label has its own words; other words are noise."""
    rng = np.random.default_rng(seed)
    n_words = max(1000, n_labels // 2)
    temporary = path.with_suffix(".part")
    with temporary.open("w", encoding="ascii") as out:
        for start in range(0, n_points, CHUNK):
            size = min(CHUNK, n_points - start)
            # a long tail: the square of a uniform number is more often small
            labels = (n_labels * rng.random((size, 3)) ** 2).astype(np.int64)
            own = (labels * 7919 + rng.integers(0, 3, (size, 3))) % n_words
            noise = (n_words * rng.random((size, WORDS_PER_TEXT - 3)) ** 3).astype(np.int64)
            words = np.concatenate([own, noise], axis=1).tolist()
            rows = [
                '{"text": "'
                + " ".join(f"w{word:x}" for word in text)
                + '", "labels": ["'
                + '", "'.join(f"l{label:x}" for label in named)
                + '"]}\n'
                for text, named in zip(words, labels.tolist(), strict=True)
            ]
            out.writelines(rows)
    temporary.rename(path)


def peak_mib() -> tuple[int, int]:
    """Return the peak resident memory of this process and of its largest child."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return own // 1024, child // 1024


def resident_mib() -> tuple[int, int]:
    """Return the current resident memory of anonymous pages and of mapped files."""
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem"):
            sizes[name] = int(value.split()[0]) // 1024
    return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]


class Watch(threading.Thread):
    """Sample the memory ten times a second; getrusage has no breakdown of the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.steps: dict[int, dict[str, int]] = {}
        """The most that was seen in each step that is under way."""

    def run(self) -> None:
        while True:
            anonymous, files = resident_mib()
            for most in list(self.steps.values()):
                most["anonymous"] = max(most["anonymous"], anonymous)
                most["files"] = max(most["files"], files)
                most["both"] = max(most["both"], anonymous + files)
            time.sleep(0.1)


WATCH = Watch()


@contextmanager
def measured_step(step: str, table: list[dict]):
    start = time.monotonic()
    most = {"anonymous": 0, "files": 0, "both": 0}
    WATCH.steps[id(most)] = most
    yield
    del WATCH.steps[id(most)]
    own, child = peak_mib()
    row = {
        "step": step,
        "seconds": round(time.monotonic() - start, 1),
        "peak_mib": own,
        "worker_peak_mib": child,
        "most_mib": most,
        "anonymous_mib": resident_mib()[0],
    }
    table.append(row)
    print(json.dumps(row), flush=True)


def tell_parts(table: list[dict]) -> dict:
    """Measure each part of training; return the folder of the largest split's tokens."""
    from elias.training import trainer
    from elias.training.run import Run

    longest: dict = {}
    tokenize, timed = trainer.cached_tokens, Run.timed

    def watched(split, encoder):
        with measured_step(f"tokenize {len(split):,} texts", table):
            tokens = tokenize(split, encoder)
        if len(split) > longest.get("n", 0):
            longest.update(n=len(split), tokens=tokens, labels=split.labels)
        return tokens

    @contextmanager
    def told_too(self, name):
        with measured_step(name, table), timed(self, name):
            yield

    trainer.cached_tokens, Run.timed = watched, told_too
    return longest


def config_for(args):
    from elias import EliasConfig

    return EliasConfig().override(
        {
            "data.on_disk": "on",
            "data.setup_points": args.setup_points,
            "encoder.dim": args.dim,
            "encoder.hidden_dim": args.dim,
            "encoder.char_ngrams": [0, 0],
            "stages.stage1.epochs": 1,
            "stages.stage2.epochs": 1,
            "stages.stage1.batch_size": args.batch_size,
            "stages.stage2.batch_size": args.batch_size,
            "eval.validation_size": 2000,
            "rerank.enabled": False,
        }
    )


def stop_after(n_steps: int) -> None:
    """Stop each epoch after a number of steps."""
    from itertools import islice

    from elias.training import stage

    whole = stage.StageLoop._batches
    stage.n_batches = lambda *_: n_steps
    stage.StageLoop._batches = lambda self, *args: islice(whole(self, *args), n_steps)


def reading_speed(tokens, labels, batch_size: int, n_batches: int) -> float:
    """Return how many batches per second the prefetch thread reads from disk."""
    from elias.text.batches import collate, positives_of, prefetch, shuffled_batches

    rows = shuffled_batches(tokens.lengths, batch_size, np.random.default_rng(1))
    made = ((collate(tokens, batch), positives_of(labels, batch)) for batch in rows)
    start = time.monotonic()
    for count, _ in enumerate(prefetch(made), start=1):
        if count == n_batches:
            break
    return n_batches / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--setup-points", type=int, default=500_000)
    parser.add_argument("--limit-mib", type=int, default=4096)
    parser.add_argument("--work", type=Path, required=True, help="Folder for data and cache.")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(args.work / "cache")
    table: list[dict] = []
    WATCH.start()
    data = args.work / f"texts-{args.points}-{args.labels}.jsonl"
    with measured_step("generate", table):
        if not data.exists():
            generate(data, args.points, args.labels)

    from elias import load_corpus, progress, train

    progress.enable(sys.stderr.isatty())
    with measured_step("read to disk", table):
        corpus = load_corpus(data, on_disk="on", test_size=5000)
    stop_after(args.steps)
    longest = tell_parts(table)
    with measured_step("train, all of it", table):
        model = train(corpus, config_for(args), device="cpu")
    with measured_step("read batches alone", table):
        speed = reading_speed(longest["tokens"], longest["labels"], args.batch_size, 1000)
    own, child = peak_mib()
    summary = {
        "points": args.points,
        "labels": corpus.n_labels,
        "data_mib": data.stat().st_size >> 20,
        "steps": 2 * args.steps,
        "timings": model.metadata["timings"],
        "metrics": {k: v["test"]["P@1"] for k, v in model.metadata["metrics"].items()},
        "batches_read_per_second": round(speed),
        "peak_mib": own,
        "worker_peak_mib": child,
        "within_limit": max(own, child) <= args.limit_mib,
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
