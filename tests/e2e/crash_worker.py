"""Train in processes that are killed, each at a point of its own, until one is let through.

    python crash_worker.py RUN POINT...

Each point is ``module:name:n``: the process kills itself when that function is called for the nth
time. The processes are forked before anything is computed, so that torch is imported once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback

from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.model.elias import EliasModel  # noqa: F401 - imported before the fork
from elias.training import trainer  # noqa: F401

CORPUS = {"n_points": 300, "n_labels": 40, "seed": 3}
CONFIG = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "stages.stage1.epochs": 2,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 3,
    "stages.stage1.batch_size": 64,
    "stages.stage2.batch_size": 64,
    "stages.stage2.index_every": 3,
    "stages.stage2.average_from": 0.4,
    "rerank.candidates": 20,
    "rerank.char_ngrams": [0, 0],
    "rerank.trees": 2,
    "eval.validation_size": 30,
    "checkpoint.minutes": 1e-9,
}
"""5 steps in an epoch."""


def call_before(point, action):
    """Call ``action`` before the nth call of a function."""
    module, path, count = point.split(":")
    owner = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(1)
        if len(calls) == int(count):
            action()
        return real(*args, **options)

    setattr(owner, name, counted)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(run, point):
    """Train in a process of its own; return what ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        if point:
            call_before(point, kill)
        train(synthetic_corpus(**CORPUS), EliasConfig().override(CONFIG), out=run, device="cpu")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    run, *points = sys.argv[1:]
    for point in [*points, None]:
        sys.stdout.write(f"{point} {attempt(run, point)}\n")
