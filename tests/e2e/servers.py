"""A server on a thread of the tests' own process, and one in processes of its own."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from e2e.commands import start_elias
from elias.serve.backend import Backend
from elias.serve.server import bind, url_of, uvicorn_config
from elias.serve.settings import Limits, ServeSettings


@dataclass
class Live:
    """A server that runs."""

    url: str
    backend: Backend
    loop: asyncio.AbstractEventLoop

    def client(self, **options):
        """Return a client of it."""
        return httpx.Client(base_url=self.url, timeout=30, **options)


@contextmanager
def live(model, *, load=True, limits=None, **settings):
    """Serve a model on a thread until the block ends."""
    import uvicorn

    backend = Backend(
        ServeSettings(model=model, device="cpu", limits=limits or Limits(), **settings)
    )
    server = uvicorn.Server(uvicorn_config(backend))
    started = threading.Event()
    loops = []

    async def serve(sock):
        loops.append(asyncio.get_running_loop())
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if load:
            await backend.load()
        started.set()
        await serving

    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        thread = threading.Thread(target=lambda: asyncio.run(serve(sock)))
        thread.start()
        assert started.wait(60)
        try:
            yield Live(url, backend, loops[0])
        finally:
            server.should_exit = True
            thread.join(30)


class Process:
    """``elias serve`` in a process of its own; what it logs is read as it comes."""

    def __init__(self, *args):
        self.process = start_elias("serve", *args, stdout=subprocess.DEVNULL)
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.find(r"on (http://\S+)")[1]

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.decode())

    def find(self, pattern, seconds=60.0):
        """Return the first match in the log, waiting for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no {pattern} in {self.lines}")

    def requests(self):
        """Return the access log."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def metric(self, name):
        """Return a number that Prometheus would see, or None."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        url_match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return None if url_match is None else float(url_match[1])

    def wait_for(self, condition, seconds=60.0):
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.05)
        raise AssertionError("it did not come about: " + "".join(self.lines[-5:]))

    def wait_until_ready(self, workers=1):
        """Wait until so many workers have a model."""
        self.wait_for(lambda: self.metric("elias_workers") == workers)

    def end(self, number=signal.SIGTERM):
        """End it, and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(5)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join(5)
        self.process.stderr.close()
