"""``elias serve`` as operators run it: signals, several workers, a death, a reload under load."""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from e2e.commands import start_elias
from e2e.servers import Process
from elias import Elias

LOCAL = ("--port", "0", "--device", "cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
READY = re.compile(r"worker (\d+) is ready")


class Load:
    """Asks again and again from several threads, and keeps what it was answered.

    With a little rest in between: a new worker has to start on the same cores.
    """

    def __init__(self, url, threads=3, *, keep_alive=True):
        self._limits = httpx.Limits(max_keepalive_connections=None if keep_alive else 0)
        self.statuses = []
        self.errors = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(threads)]

    def _ask(self, url):
        with httpx.Client(base_url=url, timeout=30, limits=self._limits) as client:
            while not self._end.is_set():
                try:
                    answer = client.post("/predict", json={"inputs": ["a text", "another"]})
                    self.statuses.append(answer.status_code)
                except httpx.HTTPError as error:
                    self.errors.append(error)
                time.sleep(0.03)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join(40)

    def wait_for(self, count):
        """Wait for so many more answers."""
        wanted, end = len(self.statuses) + count, time.monotonic() + 60
        while len(self.statuses) < wanted:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """A model in a folder of its own, to be replaced."""
    folder = tmp_path_factory.mktemp("served") / "model"
    Elias.from_pretrained(run, device="cpu").save_pretrained(folder)
    return folder


def test_a_worker_alone_reloads_under_load_and_ends_with_all_answered(saved):
    with Process(saved, *LOCAL) as server:
        server.wait_until_ready()
        with Load(server.url) as load:
            load.wait_for(20)
            model = Elias.from_pretrained(saved, device="cpu")
            model.add_labels([{"name": "red herring"}]).save_pretrained(saved, overwrite=True)
            server.process.send_signal(signal.SIGHUP)
            server.wait_for(lambda: server.metric('elias_reloads_total{outcome="success"}') == 1)
            load.wait_for(20)
            hits = httpx.get(f"{server.url}/labels", params={"q": "red herring"}).json()["labels"]
            model.save_pretrained(saved, overwrite=True)  # as the other tests expect it
            assert not load.errors
            assert set(load.statuses) == {200}
            answered = len(load.statuses)
            code = server.end()
        logged = [line for line in server.requests() if line["route"] == "/predict"]

    assert code == 0
    assert [hit["id"] for hit in hits] == [model.n_labels]
    assert set(load.statuses) <= {200, 503}
    # whatever was accepted was answered: the client saw every line of the log
    assert len(logged) == len(load.statuses) >= answered
    assert all(isinstance(error, httpx.TransportError) for error in load.errors)


def test_several_workers_count_together_and_dead_ones_are_replaced(saved, monkeypatch):
    """One server for all: it takes seconds to start, and so does every worker."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from serve_load import workers_of

    away = saved.with_name("away")
    with Process(saved, *LOCAL, "--workers", "2") as server:
        server.wait_until_ready(workers=2)
        server.wait_for(lambda: len(ready_workers(server)) == 2)
        children, ready = workers_of(server.process.pid), ready_workers(server)
        with (
            Load(server.url, threads=4) as load,
            Load(server.url, threads=1, keep_alive=False) as others,
        ):
            load.wait_for(30)
            os.kill(server.requests()[-1]["pid"], signal.SIGKILL)
            server.find("died .code -9.; replacing it")
            server.wait_until_ready(workers=2)
            load.wait_for(30)
        counted = server.metric('elias_requests_total{route="/predict",status="200"}')
        text = httpx.get(f"{server.url}/metrics").text

        saved.rename(away)
        try:
            kill_newest(server, 3)
            server.find("the other workers continue, and a new one starts in 2 s")
            failed = server.metric('elias_reloads_total{outcome="failure"}')
            answer = httpx.post(f"{server.url}/predict", json={"inputs": ["a text"]}, timeout=30)
        finally:
            away.rename(saved)

        kill_newest(server, 4)
        server.find("replacing it in 2 s")
        server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        health, is_ready = (httpx.get(f"{server.url}{path}") for path in ("/health", "/ready"))
        server.wait_until_ready(workers=2)
        server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        code = server.end()

    # the benchmarks take the children of the server for its workers
    if sys.platform == "linux":
        assert len(children) == 2
        assert set(children) == set(ready)
    # the new worker accepts no connection before it has loaded the model
    assert set(load.statuses) == set(others.statuses) == {200}
    # only connections of the worker that was killed may break, each of them once
    n_errors = len(load.errors) + len(others.errors)
    assert n_errors <= 5
    n_answered = len(load.statuses) + len(others.statuses)
    assert counted == pytest.approx(n_answered, abs=n_errors)
    depth = re.findall(r"^elias_queue_depth.*$", text, re.MULTILINE)
    assert depth == ["elias_queue_depth 0.0"]
    # a replacement that cannot read the model leaves the others alone
    assert answer.status_code == 200
    assert failed >= 2
    # the third death in a short time is reported until all are ready
    assert "3 workers have died within 5 minutes" in health.json()["error"]
    assert is_ready.status_code == 200
    assert code == 0


def ready_workers(server):
    """Return the process ids of all workers that were ever ready."""
    return [int(match[1]) for line in list(server.lines) if (match := READY.search(line))]


def kill_newest(server, count):
    """Kill the worker that was the last of so many to be ready."""
    server.wait_for(lambda: len(ready_workers(server)) == count)
    os.kill(ready_workers(server)[-1], signal.SIGKILL)


def test_connections_during_the_shutdown_of_several_workers_get_503(saved):
    with Process(saved, *LOCAL, "--workers", "2", "--timeout", "4") as server:
        server.wait_until_ready(workers=2)
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /predict HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9\r\n\r\n"
        with ExitStack() as stack:
            for _ in range(8):  # requests that do not arrive, which the workers wait for
                held = stack.enter_context(socket.create_connection((host, int(port))))
                held.sendall(head.encode())
            server.process.send_signal(signal.SIGTERM)
            answer = None
            while answer is None or answer.status_code == 200:
                answer = httpx.get(f"{server.url}/ready", timeout=3)
        code = server.process.wait(30)

    assert answer.status_code == 503
    assert answer.json()["error"] == "the server is shutting down"
    assert code == 0


def test_a_model_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    process = start_elias("serve", folder, *LOCAL, "--workers", "2")

    _, result = process.communicate(timeout=60)

    assert process.returncode == 2
    errors = [line for line in result.decode().splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {folder}: has no config.json; give the folder of a saved model"]
