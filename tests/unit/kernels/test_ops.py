"""The three places an operation can run in offer the same functions."""

import inspect

import pytest
import torch

from elias.kernels import cpu, ops, plain

OPERATIONS = [
    "adamw_rows",
    "bag_sum",
    "expand_beam",
    "label_logits",
    "log_probabilities",
    "path_log",
    "shortlist_bce",
]


def required(function):
    """Names of the parameters without default."""
    parameters = inspect.signature(function).parameters.values()
    return [part.name for part in parameters if part.default is part.empty]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_same_parameters_everywhere(name):
    gpu = pytest.importorskip("elias.kernels.gpu", reason="Triton is not installed")

    expected = required(getattr(cpu, name))

    assert required(getattr(plain, name)) == expected
    assert required(getattr(gpu, name)) == expected


def test_the_cpu_kernels_are_exactly_the_dispatched_operations():
    assert cpu.__all__ == OPERATIONS


class OnGpu:
    is_cuda = True


@pytest.mark.parametrize("triton", [True, False])
def test_a_gpu_runs_triton_kernels_where_it_can_and_plain_torch_elsewhere(triton, monkeypatch):
    gpu = pytest.importorskip("elias.kernels.gpu", reason="Triton is not installed")
    monkeypatch.setattr(ops, "has_triton", lambda: triton)

    assert ops._kernels(OnGpu()) is (gpu if triton else plain)
    assert ops._kernels(torch.zeros(1)) is cpu
