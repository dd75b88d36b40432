"""Predict in several processes, forked from one with all imports done, and record the results.

    python predict_worker.py FOLDER

`tests/e2e/test_predict_processes.py` reads the results from ``FOLDER/results.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

# first: it sets what numba and Triton read when they are imported
from e2e.train_worker import ALL, BASE, spawn

# isort: split

import torch

from e2e.commands import elias
from e2e.crash_worker import call_before
from elias import train
from elias.data.synthetic import synthetic_corpus
from elias.inference import predict

N_LABELS = 41  # no multiple of the processes
SHORT = {"stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
RANKED = BASE.override({**SHORT, "rerank.enabled": True})
FORMS = ("jsonl", "csv", "tsv.gz", "parquet", "txt")


def models(folder):
    """A model with a ranker, an ensemble, and one-vs-all with fewer labels than processes."""
    corpus = synthetic_corpus(n_points=300, n_labels=N_LABELS, seed=3)
    few = synthetic_corpus(n_points=60, n_labels=3, seed=3)
    train(corpus, RANKED, device="cpu").save_pretrained(folder / "ranked")
    both = RANKED.override({"ensemble.members": 2})
    train(corpus, both, device="cpu").save_pretrained(folder / "ensemble")
    train(few, ALL, device="cpu").save_pretrained(folder / "all")
    return corpus.test.texts


def command(*args, stdin=b""):
    result = elias("predict", *args, "--device", "cpu", stdin=stdin)
    return {"code": result.code, "out": result.out, "err": result.err}


def alone_and_together(sizes, *args, stdin=b""):
    """Return the output of a single process, and that of several launched together."""

    def work(_):
        return command(*args, stdin=stdin)

    return [command(*args, stdin=stdin), *(spawn(size, work) for size in sizes)]


def written(folder, table, form):
    """Write a file with one process and with three; return what each of them said."""
    options = ("--keep", "key") if form != "txt" else ()
    common = (folder / "ranked", table, *options, "--chunk-size", "4", "--out")
    alone = command(*common, folder / f"alone.{form}")
    return [alone, *spawn(3, lambda _: command(*common, folder / f"several.{form}"))]


def interrupted(folder, table):
    """Kill a process in the third chunk; go on with another number of them."""
    common = (folder / "ranked", table, "--chunk-size", "4", "--out", folder / "killed.jsonl")

    def work(rank):
        if rank == 1:
            point = "elias.inference.predictor:Elias.predict:3"
            call_before(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return command(*common)

    return [spawn(3, work), spawn(2, lambda _: command(*common))]


def one_without_its_file(folder, lines):
    """Give each process a file of labels of its own, which the second does not have."""
    (folder / "only-0").write_text("1\n2\n")
    return spawn(2, lambda i: command(folder / "ranked", lines, "--only", f"@{folder}/only-{i}"))


def shares(folder, lines):
    """Return for each process its number of texts and its number of rows of W_L."""

    def work(_):
        seen = []
        real = predict.rank_sharded

        def noted(model, tokens, *args, **options):
            seen.append([len(tokens), len(model.labels.weight)])
            return real(model, tokens, *args, **options)

        predict.rank_sharded = noted
        return {**command(folder / "ranked", lines), "seen": seen}

    return spawn(4, work)


def main(folder):
    torch.set_num_threads(1)
    texts = models(folder)[:11]
    lines, table, empty = (folder / name for name in ("lines.txt", "table.csv", "empty.txt"))
    lines.write_text("".join(f"{text}\n" for text in texts))
    table.write_text("key,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    empty.write_text("")
    ranked = folder / "ranked"
    results = {
        "sizes": alone_and_together([1, 2, 4], ranked, lines, "-k", "7"),
        "ensemble": alone_and_together([2], folder / "ensemble", lines),
        "all": alone_and_together([4], folder / "all", lines),
        "only": alone_and_together([4], ranked, lines, "--only", "4", "--only", "9"),
        "all only": alone_and_together([4], folder / "all", lines, "--only", "2"),
        "without": alone_and_together([2], ranked, lines, "--without", "4", "--threshold", "0.1"),
        "component": alone_and_together([2], ranked, lines, "--component", "stage2"),
        "stdin": alone_and_together([2], ranked, stdin=lines.read_bytes()),
        "few": alone_and_together([4], ranked, stdin="\n".join(texts[:2]).encode()),
        "nothing": alone_and_together([2], ranked),
        "files": {form: written(folder, table, form) for form in FORMS},
        "empty": spawn(2, lambda _: command(ranked, empty, "--out", folder / "empty.jsonl")),
        "taken": spawn(2, lambda _: command(ranked, table, "--out", folder / "alone.jsonl")),
        "killed": interrupted(folder, table),
        "missing": one_without_its_file(folder, lines),
    }
    results["shares"] = shares(folder, lines)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
