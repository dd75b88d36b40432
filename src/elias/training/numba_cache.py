"""Compile all loops into numba's cache by training a tiny model: ``python -m`` this module.

The first run after an installation starts this module in a second process. While the run reads its
data and trains, the second process compiles the loops that the run needs later, on another core.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

from elias.rerank.calibration import _mean_value as last_compiled

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "rerank.candidates": 20,  # fewer than the 40 labels, so that some are not reranked
    "eval.drop_unhelpful": False,  # keep all components, so that their loops are compiled
    "rerank.trees": 2,
}


def compile_in_background() -> None:
    """Start a process that compiles all loops, unless numba's cache has them.

    The process is stopped when this process ends.
    """
    if _is_compiled():
        return
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
    )
    atexit.register(_stop, process)


def _is_compiled() -> bool:
    if not hasattr(last_compiled, "py_func"):  # NUMBA_DISABLE_JIT
        return True
    code = last_compiled.py_func.__code__
    pattern = f"*.{code.co_name}-{code.co_firstlineno}.*.nbi"
    return any(Path(str(last_compiled.stats.cache_path)).glob(pattern))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _compile_all() -> None:
    import numpy as np

    from elias import EliasConfig, train
    from elias.data.synthetic import synthetic_corpus
    from elias.training.contrastive import near_groups

    # Begin with the loop that takes longest. The run compiles the loops before it meanwhile.
    near_groups(np.eye(32, dtype=np.float32), seed=0)
    corpus = synthetic_corpus(n_points=200, n_labels=40)
    config = EliasConfig().override({**_SMALL, "index.kind": "graph"})
    train(corpus, config, device="cpu").predict(["any text"])


if __name__ == "__main__":
    _compile_all()
