"""Loops just compiled and the same loops from numba's cache compute the same bits."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib
import numpy as np
import torch
from scipy.sparse import csr_matrix
from elias.kernels import adamw_rows
from elias.kernels.adamw_state import AdamWRates, History, RowState
from elias.rerank.solver import fit_label_classifiers, group_pairs

torch.manual_seed(0)
weight = torch.randn(50, 64)
state = RowState(torch.zeros(50, 64), torch.zeros(50, 64), torch.zeros(50, dtype=torch.int64))
history = History()
for step in range(1, 6):
    history.add(AdamWRates(1e-3 / step, 0.9, 0.999, 1e-8, 0.01))
    if step in (3, 4):
        continue
    rows = torch.arange(step % 2, 50, 2)
    gradient = torch.randn(len(rows), 64)
    adamw_rows(weight, state, rows, gradient, history)
print("update", hashlib.sha256(weight.numpy().tobytes()).hexdigest())

rng = np.random.default_rng(0)
sparse = csr_matrix(rng.random((200, 50)) * (rng.random((200, 50)) < 0.3), dtype=np.float32)
dense = rng.standard_normal((200, 37)).astype(np.float32)
candidates = rng.permuted(np.tile(np.arange(20), (200, 1)), axis=1)[:, :8]
labels = csr_matrix(rng.random((200, 20)) < 0.1, dtype=np.float32)
groups = group_pairs(candidates, labels)
weights, biases, _ = fit_label_classifiers(sparse, dense, groups)
print("ranker", hashlib.sha256(weights.data.tobytes() + biases.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_compiled_and_cached_loops_compute_the_same_bits(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]

    compiled, cached = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )

    assert [len(line) for line in compiled.splitlines()] == [64 + len("update ")] * 2
    assert compiled == cached
