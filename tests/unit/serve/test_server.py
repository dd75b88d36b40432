"""A process that serves."""

import socket

import pytest

pytest.importorskip("uvicorn")

from elias import progress
from elias.serve import server
from elias.serve.settings import ServeSettings


def test_no_bar_of_a_batch_stands_between_the_lines_of_the_log(tmp_path, monkeypatch):
    shown = []

    async def serve(*_):
        with progress.progress("Searching", 3) as advance:
            advance()
        shown.append(progress._state["enabled"])

    monkeypatch.setattr(server, "_serve", serve)
    monkeypatch.setattr(server, "_set_up_logging", lambda: None)
    progress.enable()
    try:
        with socket.socket() as sock:
            server.serve_on(sock, ServeSettings(model=tmp_path))
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
