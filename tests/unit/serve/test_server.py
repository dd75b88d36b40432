"""A process that serves, and workers that die: when another is started, when it is given up."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from elias import progress
from elias.errors import RunError
from elias.serve import server
from elias.serve.settings import ServeSettings


def test_batches_show_no_progress_bars(tmp_path, monkeypatch):
    shown = []

    async def serve(*_):
        with progress.progress("Searching", 3) as advance:
            advance()
        shown.append(progress._state["enabled"])

    monkeypatch.setattr(server, "_serve", serve)
    monkeypatch.setattr(server, "_set_up_logging", lambda: None)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    progress.enable()
    try:
        with socket.socket() as sock:
            server._serve_on(sock, ServeSettings(model=tmp_path))
        after = progress._state["enabled"]
    finally:
        progress.enable(False)

    assert shown == [False]
    assert after


@pytest.mark.parametrize(("workers", "threads"), [(2, 3), (4, 1), (9, 1)])
def test_workers_share_the_cores_they_may_use(monkeypatch, workers, threads):
    import torch

    taken = []
    monkeypatch.setattr(server.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(server.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)

    server._limit_threads(workers)

    assert taken == [threads]


@dataclass
class Dead:
    """A process that has ended, unless it is said to be alive."""

    exitcode: int = -9
    pid: int = 7

    def is_alive(self):
        return self.pid != 7


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
def parent(tmp_path):
    return server._Supervisor(None, ServeSettings(model=Path("m"), workers=2), tmp_path)


def worker(parent, pid, *, is_ready=True):
    """Return another worker of the parent."""
    if is_ready:
        (parent._folder / f"ready-{pid}").touch()
    return Dead(pid=pid)


def die(parent, clock, seconds=0.0):
    """Let a worker die after some time; return how long the next one is waited for."""
    clock.now += seconds
    parent._handle_exit(Dead())
    return parent._next_start - clock.now


def test_the_restart_delay_grows_with_each_death_and_is_reset(parent, clock):
    assert [die(parent, clock) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert die(parent, clock, seconds=301) == 0


def test_the_server_is_unhealthy_after_many_deaths_until_all_workers_are_ready(parent, clock):
    settings = parent._settings
    die(parent, clock)
    die(parent, clock)
    assert settings.health_error() is None

    die(parent, clock)

    assert (
        settings.health_error() == "3 workers have died within 5 minutes; others are being started"
    )
    parent._workers = [worker(parent, 8), worker(parent, 9, is_ready=False)]
    parent._reap_workers()
    assert settings.health_error() is not None
    worker(parent, 9)
    parent._reap_workers()
    assert settings.health_error() is None


def test_ten_deaths_in_five_minutes_end_the_server(parent, clock):
    for _ in range(9):
        die(parent, clock, seconds=20)

    with pytest.raises(RunError, match=r"10 workers have died within 5 minutes .* code -9"):
        die(parent, clock, seconds=20)


def test_many_deaths_do_not_end_the_server_while_a_worker_serves(parent, clock):
    parent._workers = [worker(parent, 8)]

    assert [die(parent, clock) for _ in range(12)][-1] == 30


def test_deaths_that_are_far_apart_do_not_end_the_server(parent, clock):
    assert all(die(parent, clock, seconds=90) <= 4 for _ in range(30))


def test_a_single_worker_is_always_healthy():
    assert ServeSettings(model=Path("m")).health_error() is None


def test_a_model_that_cannot_be_read_ends_the_server_unless_it_could_be_before(parent, clock):
    def fail():
        (parent._folder / "error-7").write_text("m: has no config.json")
        return die(parent, clock)

    with pytest.raises(RunError, match=r"m: has no config\.json"):
        fail()

    parent._was_ready = True
    assert [fail() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
