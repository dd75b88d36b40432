"""Test which implementation of an operation is chosen for a device."""

import inspect
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from elias import kernels
from elias.errors import ConfigError
from elias.kernels import cpu, has_triton, plain, runs_triton

OPERATIONS = [
    "adamw_dense",
    "bag_sum",
    "every_label_bce",
    "expand_beam",
    "label_logits",
    "log_probabilities",
    "path_log",
    "shortlist_bce",
]


def required(function):
    """Names of the parameters without default."""
    if inspect.ismethod(function):  # `apply` of an autograd function, called without its context
        function = partial(function.__self__.forward, None)
    parameters = inspect.signature(function).parameters.values()
    return [part.name for part in parameters if part.default is part.empty]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_same_parameters_everywhere(name):
    gpu = pytest.importorskip("elias.kernels.gpu", reason="Triton is not installed")

    expected = required(getattr(cpu, name))

    assert required(getattr(plain, name)) == expected
    assert required(getattr(gpu, name)) == expected


ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.delenv("ELIAS_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


@pytest.mark.parametrize("value", [None, "auto"])
def test_triton_runs_on_a_gpu_where_it_is_installed(monkeypatch, caplog, value):
    if value is not None:
        monkeypatch.setenv("ELIAS_KERNELS", value)

    assert runs_triton(ON_GPU)
    assert not runs_triton(ON_CPU)
    assert not caplog.records


def test_the_environment_turns_triton_off(monkeypatch, caplog):
    monkeypatch.setenv("ELIAS_KERNELS", "torch")

    with caplog.at_level(logging.WARNING):
        assert not runs_triton(ON_GPU)

    assert "ELIAS_KERNELS is torch" in caplog.text


def test_a_gpu_without_triton_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)

    with caplog.at_level(logging.WARNING):
        assert not any(runs_triton(ON_GPU) for _ in range(3))

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton is not installed" in caplog.text


def test_a_cpu_is_warned_of_nothing(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    monkeypatch.setenv("ELIAS_KERNELS", "torch")

    assert not runs_triton(ON_CPU)
    assert not caplog.records


@pytest.mark.parametrize("value", ["triton", "Torch", ""])
def test_an_unknown_value_is_refused_with_the_known_ones(monkeypatch, value):
    monkeypatch.setenv("ELIAS_KERNELS", value)

    with pytest.raises(ConfigError, match=f"ELIAS_KERNELS is '{value}'.* auto or torch"):
        runs_triton(ON_GPU)


@pytest.mark.parametrize("triton", [True, False])
def test_a_gpu_runs_triton_kernels_where_it_can_and_plain_torch_elsewhere(triton, monkeypatch):
    gpu = pytest.importorskip("elias.kernels.gpu", reason="Triton is not installed")
    monkeypatch.setattr(kernels, "has_triton", lambda: triton)

    assert kernels._kernels(ON_GPU) is (gpu if triton else plain)
    assert kernels._kernels(ON_CPU) is cpu


def test_a_gpu_runs_plain_torch_for_gradients_that_triton_kernels_do_not_compute():
    gpu = pytest.importorskip("elias.kernels.gpu", reason="Triton is not installed")

    assert kernels._kernels(ON_GPU, by_autograd=True) is plain
    assert kernels._kernels(ON_CPU, by_autograd=True) is cpu
    with torch.no_grad():
        assert kernels._kernels(ON_GPU, by_autograd=True) is gpu
