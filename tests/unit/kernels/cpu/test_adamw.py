"""A loop just compiled and the same loop from numba's cache."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib
import torch
from elias.kernels import adamw_rows
from elias.kernels.adamw_state import AdamWRates, History, RowState

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
print(hashlib.sha256(weight.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_an_update_has_the_same_bits_just_compiled_and_from_the_cache(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]

    bits = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]

    assert len(bits[0].strip()) == 64
    assert bits[0] == bits[1]
