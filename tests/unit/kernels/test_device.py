import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

from elias import progress
from elias.errors import ConfigError, RunError
from elias.kernels import device
from elias.kernels.device import explain_out_of_memory, limit_threads, pick_device

ON_LINUX = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000 bytes. Error"
ON_WINDOWS = "DefaultCPUAllocator: not enough memory: you tried to allocate 40000000 bytes."


@pytest.fixture
def threads():
    """Set torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_the_kernels_get_as_many_threads_as_torch_has(threads, count):
    before = numba.get_num_threads()
    threads(count)

    with limit_threads():
        inside = numba.get_num_threads()

    assert inside == min(count, numba.config.NUMBA_NUM_THREADS)
    assert numba.get_num_threads() == before
    assert torch.get_num_threads() == count


def test_torch_keeps_its_number_of_threads_when_numba_starts():
    # in a new interpreter: numba starts once, and sets the threads of OpenMP, which torch uses too
    code = """
import torch
from elias.kernels.device import limit_threads
torch.set_num_threads(1)
with limit_threads():
    print(torch.get_num_threads())
print(torch.get_num_threads())
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["1", "1"]


def test_at_most_as_many_threads_are_set_as_numba_has(threads):
    threads(numba.config.NUMBA_NUM_THREADS + 3)

    with limit_threads():
        inside = numba.get_num_threads()

    assert inside == numba.config.NUMBA_NUM_THREADS
    assert torch.get_num_threads() == numba.config.NUMBA_NUM_THREADS + 3


def test_the_number_of_threads_comes_back_after_an_error(threads):
    before = numba.get_num_threads()
    threads(1)

    with pytest.raises(ValueError, match="boom"), limit_threads():
        raise ValueError("boom")

    assert numba.get_num_threads() == before


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 9.09 TiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.\nMore advice."),
        RuntimeError(ON_LINUX),
        RuntimeError(ON_WINDOWS),
    ],
    ids=["bare", "numpy", "cuda", "linux", "windows"],
)
@pytest.mark.parametrize(
    ("what", "remedy"),
    [("training", "stages.*.batch_size"), ("predicting", "one text")],
)
def test_running_out_of_memory_says_what_to_lower(error, what, remedy):
    with pytest.raises(RunError, match="out of memory") as caught, explain_out_of_memory(what):
        raise error

    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_the_out_of_memory_message_of_torch_on_the_cpu_is_recognised():
    with pytest.raises(RunError, match="out of memory"), explain_out_of_memory("training"):
        torch.empty(2**60, dtype=torch.uint8)


def test_an_array_too_large_for_numpy_is_explained():
    with pytest.raises(RunError, match="out of memory"), explain_out_of_memory("training"):
        np.empty(2**60, dtype=np.uint8)


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory("training"):
        raise RuntimeError("shapes do not match")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="unknown device 'tpu9'"):
        pick_device("tpu9")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu():
    with pytest.raises(ConfigError, match="use cpu or auto"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["mps", "meta", "xpu"])
def test_an_unsupported_device_is_refused(name):
    with pytest.raises(ConfigError, match="is not supported; use auto, cpu or cuda"):
        pick_device(name)


def test_a_gpu_past_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(ConfigError, match="this machine has 2 GPUs, counted from 0; use cuda:1"):
        pick_device("cuda:2")


def test_the_gpu_asked_for_is_where_kernels_are_launched(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


class Timer:
    """A timer that a test lets run out."""

    def __init__(self, interval, function, args):
        self.interval, self.run_out = interval, lambda: function(*args)
        self.started = self.cancelled = False

    def start(self):
        self.started = True

    def cancel(self):
        self.cancelled = True


def test_compiling_for_two_seconds_in_all_is_announced_once(monkeypatch, caplog):
    clock = iter([0.0, 1.5, 10.0, 13.0, 20.0, 29.0])
    monkeypatch.setattr(device.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(device.threading, "Timer", Timer)
    announcement, timers = device._Announcement(), []
    for _ in range(3):
        announcement.on_start(None)
        announcement.on_start(None)  # a loop that the first one calls
        timers.append(announcement.timer)
        announcement.on_end(None)
        assert not announcement.timer.cancelled
        announcement.on_end(None)
        assert announcement.timer.cancelled

    with caplog.at_level(progress.NOTE, "elias"):
        timers[1].run_out()

    assert [timer.started for timer in timers] == [True, True, False]
    assert [timer.interval for timer in timers[:2]] == [2.0, 0.5]
    assert caplog.messages == ["Compiling loops, in the first run only ..."]
