"""Who decides whether a GPU runs Triton kernels, and who is told."""

import logging
from types import SimpleNamespace

import pytest

from elias.errors import ConfigError
from elias.kernels import device
from elias.kernels.device import has_triton, runs_triton

ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.delenv("ELIAS_KERNELS", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda _: object())
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
    monkeypatch.setattr(device, "find_spec", lambda _: None)

    with caplog.at_level(logging.WARNING):
        assert not any(runs_triton(ON_GPU) for _ in range(3))

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton is not installed" in caplog.text


def test_a_cpu_is_warned_of_nothing(monkeypatch, caplog):
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    monkeypatch.setenv("ELIAS_KERNELS", "torch")

    assert not runs_triton(ON_CPU)
    assert not caplog.records


@pytest.mark.parametrize("value", ["triton", "Torch", ""])
def test_an_unknown_value_is_refused_with_the_known_ones(monkeypatch, value):
    monkeypatch.setenv("ELIAS_KERNELS", value)

    with pytest.raises(ConfigError, match=f"ELIAS_KERNELS is '{value}'.* auto or torch"):
        runs_triton(ON_GPU)
