"""The first run compiles each loop once, and those of later steps in a second process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elias.training import numba_cache

SOURCE = Path(numba_cache.__file__).parents[2]

COUNT = """
import json, sys
from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.training.numba_cache import _SMALL

corpus = synthetic_corpus(n_points=600, n_labels=90)
model = train(corpus, EliasConfig().override({**_SMALL, "index.kind": "graph"}), device="cpu")
model.predict(["any text"])
model.predict(corpus.train.texts, top_k=3)
loops = {}
for name, module in list(sys.modules.items()):
    if name.startswith("elias."):
        for loop in vars(module).values():
            if hasattr(loop, "py_func"):
                loops[f"{loop.__module__}.{loop.__name__}"] = loop
signatures = {name: [str(each) for each in loop.signatures] for name, loop in loops.items()}
misses = [name for name, loop in loops.items() if sum(loop.stats.cache_misses.values())]
print(json.dumps({"signatures": signatures, "misses": misses}))
"""


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout


@pytest.mark.slow
def test_each_loop_is_compiled_for_one_type_and_before_a_run_needs_it():
    run("-m", numba_cache.__name__)

    counted = json.loads(run("-c", COUNT))

    used = {name: found for name, found in counted["signatures"].items() if found}
    assert "elias.kernels.cpu.search._rank_rows" in used
    assert "elias.rerank.solver._fit_labels" in used
    assert {name: found for name, found in used.items() if len(found) > 1} == {}
    assert counted["misses"] == []


@pytest.fixture
def started(monkeypatch):
    """The commands that were started, none of which runs."""
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(numba_cache.atexit, "register", lambda *_: None)
    return commands


def loop_with_cache(folder):
    def loop():
        pass

    return SimpleNamespace(py_func=loop, stats=SimpleNamespace(cache_path=str(folder)))


def test_a_second_process_compiles_if_the_cache_is_empty(monkeypatch, tmp_path, started):
    monkeypatch.setattr(numba_cache, "last_compiled", loop_with_cache(tmp_path / "none"))

    numba_cache.compile_in_background()

    assert started == [[sys.executable, "-m", "elias.training.numba_cache"]]


def test_nothing_is_started_if_the_loops_are_compiled(monkeypatch, tmp_path, started):
    last = loop_with_cache(tmp_path)
    line = last.py_func.__code__.co_firstlineno
    (tmp_path / f"calibration.loop-{line}.py311.nbi").touch()
    monkeypatch.setattr(numba_cache, "last_compiled", last)

    numba_cache.compile_in_background()

    assert started == []
