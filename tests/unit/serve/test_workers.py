"""Workers that die: when another is started, what is told meanwhile, and when it is given up."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from elias.errors import RunError
from elias.serve import workers
from elias.serve.settings import ServeSettings


@dataclass
class Dead:
    """A process that has ended."""

    exitcode: int = -9
    pid: int = 7


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    return workers._Supervisor(None, ServeSettings(model=Path("m"), workers=2))


def worker(*, is_ready=False):
    return workers._Worker(Dead(), None, is_ready=is_ready)


def die(parent, clock, seconds=0.0):
    """Let a worker die after some time; return how long the next one is waited for."""
    clock.now += seconds
    parent._handle_exit(worker())
    return parent._next_start - clock.now


def test_each_death_is_waited_for_longer_and_that_is_forgotten(parent, clock):
    assert [die(parent, clock) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert die(parent, clock, seconds=301) == 0


def test_many_deaths_are_told_until_all_workers_are_ready(parent, clock):
    settings = parent._settings
    die(parent, clock)
    die(parent, clock)
    assert settings.health_error() is None

    die(parent, clock)

    assert (
        settings.health_error() == "3 workers have died within 5 minutes; others are being started"
    )
    parent._workers = [worker(is_ready=True), worker()]
    parent._update_health()
    assert settings.health_error() is not None
    parent._workers[1].is_ready = True
    parent._update_health()
    assert settings.health_error() is None


def test_ten_deaths_in_five_minutes_end_the_server(parent, clock):
    for _ in range(9):
        die(parent, clock, seconds=20)

    with pytest.raises(RunError, match=r"10 workers have died within 5 minutes .* code -9"):
        die(parent, clock, seconds=20)


def test_they_do_not_while_another_worker_serves(parent, clock):
    parent._workers = [worker(is_ready=True)]

    assert [die(parent, clock) for _ in range(12)][-1] == 30


def test_deaths_that_are_far_apart_end_nothing(parent, clock):
    assert all(die(parent, clock, seconds=90) <= 4 for _ in range(30))


def test_a_single_worker_is_always_healthy():
    assert ServeSettings(model=Path("m")).health_error() is None
