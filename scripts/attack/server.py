"""Attack `elias serve` with bodies, headers, host names and connections: part of `make attack`.

    python scripts/attack/server.py FOLDER

It trains a small model, serves it, and checks after each attack that the server still answers.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from run import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BODY = 4 * 2**20
MAX_REFUSAL, MAX_HOLD = 0.1, 0.05
"""Seconds to refuse an invalid body, and for which any body may hold the event loop, on a quiet
core. On a busy machine they are multiplied by `slowness`."""
HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\n"
VALID = json.dumps({"inputs": ["cod quotas in the north sea"]}).encode()
KEY = "a-key-of-sixteen-characters"


def slowness() -> float:
    """Return the number of processes that share a core, 1 or more: by how much all take longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Server:
    """A server process."""

    def __init__(self, model: Path, *options: str, max_files: int = 1024) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elias", "serve", str(model), "--port", "0", *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files)),
        )
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self._find(r"on http://\S+:(\d+)")[1])
        self._find(r"worker \d+ is ready")

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line.decode(errors="replace"))

    def _find(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.log):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.05)
        raise RuntimeError("the server did not start: " + "".join(self.log[-5:]))

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            method = "GET" if body is None else "POST"
            connection.request(
                method, path, body, {"content-type": "application/json"} | (headers or {})
            )
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def connect(self, data: bytes = b"") -> socket.socket:
        """Return a connection on which some bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(data)
        return connection

    def works(self) -> bool:
        """Return whether a valid request is answered, by a server that was never restarted."""
        try:
            return self.process.poll() is None and self.ask("/predict", VALID)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def peak_mib(self) -> int:
        """Return the greatest resident memory that the process has had, from Linux's /proc."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()


class Health:
    """The greatest time that /health takes while a block runs."""

    def __init__(self, server: Server) -> None:
        self._server, self.seconds, self._end = server, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._end.wait(0.01):
            start = time.perf_counter()
            try:
                status = self._server.ask("/health")[0]
            except (OSError, http.client.HTTPException):
                status = 0
            seconds = time.perf_counter() - start if status == 200 else 99.0
            self.seconds = max(self.seconds, seconds)

    def take(self) -> float:
        """Return the greatest time since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def invalid_bodies() -> dict[str, bytes]:
    """Return bodies that are refused, each as large as the limit allows."""
    texts = b",".join([b'"' + b"a" * 60_000 + b'"'] * 60)
    return {
        "1.5 million numbers": b'{"inputs": [' + b"1," * 1_500_000 + b"1]}",
        "5,000 numbers": b'{"inputs": [' + b"1," * 5000 + b"1]}",
        "a million empty strings": b'{"inputs": [' + b'"",' * 1_000_000 + b'""]}',
        "a million empty lists": b'{"inputs": [' + b"[]," * 1_000_000 + b"[]]}",
        "250,000 unknown keys": b"{" + b",".join(b'"%d":1' % i for i in range(250_000)) + b"}",
        "90 unknown keys": json.dumps({str(i): i for i in range(90)}).encode(),
        "lists, four million deep": b"[" * MAX_BODY,
        "lists, 5,000 deep": b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        "objects, 90 deep": b'{"inputs": ' * 90 + b"1" + b"}" * 90,
        "a text of four million characters": b'{"inputs": ["' + b"a" * (MAX_BODY - 20) + b'"]}',
        "60 texts that are too long": b'{"inputs": [' + texts + b"]}",
        "two million escapes": b'{"inputs": ["' + b"\\n" * (MAX_BODY // 2 - 20) + b'"]}',
        "four million backslashes": b'{"inputs": ["' + b"\\" * (MAX_BODY - 20) + b'"]}',
        "four million quotes": b'"' * MAX_BODY,
        "four million spaces": b" " * MAX_BODY,
        "four million zero bytes": b"\0" * MAX_BODY,
        "UTF-16": ('{"inputs": [' + "1," * 500_000 + "1]}").encode("utf-16"),
        "bytes that are not UTF-8": b'{"inputs": ["' + b"\xff" * 20_000 + b'"]}',
        "a number of 9,000 digits": b'{"inputs": ["a"], "top_k": ' + b"9" * 9000 + b"}",
        "top_k of 1e308": b'{"inputs": ["a"], "top_k": 1e308}',
        "NaN": b'{"inputs": ["a"], "threshold": NaN}',
        "null": b"null",
        "nothing": b"",
        "no end": b'{"inputs": ["a"',
        "two values": b'{"inputs": ["a"]} {"inputs": ["a"]}',
        "duplicate keys": b'{"inputs": ["a"], "inputs": 3}',
        "a lone surrogate as a key": b'{"inputs": ["a"], "\\ud800": 1}',
        "a byte order mark": b"\xef\xbb\xbfnull",
        "one byte too many": b" " * (MAX_BODY + 1),
    }


def invalid_forms() -> dict[str, bytes]:
    """Return forms for the route of Annif that are refused."""
    return {
        "1.3 million escapes": b"text=" + b"%41" * 1_300_000,
        "a text of four million characters": b"text=" + b"a" * (MAX_BODY - 10),
        "four million fields": b"&" * MAX_BODY,
        "1,000 fields": b"text=a" + b"&b=c" * 1000,
        "a limit of 9,000 digits": b"text=a&limit=" + b"9" * 9000,
        "no text": b"limit=3",
        "bytes that are not ASCII": b"text=" + b"\xff" * 1000,
        "JSON": VALID,
    }


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Return valid bodies that are as large as the limits allow, and the route of each."""
    drawn = random.Random(time.time_ns())
    words = ["".join(drawn.choices("abcdefghij", k=4)) for _ in range(4000)]
    texts = {
        "words": " ".join(words),
        "one word": "a" * 20_000,
        "spaces": " " * 20_000,
        "Chinese": "漢" * 20_000,
        "combining accents": "a" + "\u0301" * 19_999,
    }
    bodies = {}
    for name, text in texts.items():
        for path, value in (
            ("/predict", {"inputs": [text] * 64, "top_k": 100}),
            ("/explain", {"inputs": [text] * 8, "top_k": 100, "paths": 20}),
            ("/explain", {"inputs": [text], "top_k": 5, "words": True}),
        ):
            body = json.dumps(value, ensure_ascii=False).encode()
            bodies[f"{len(value['inputs'])} texts of 20,000 characters: {name}"] = path, body
    return bodies


def annif_path(server: Server) -> str:
    """Return the path of the route of Annif that suggests labels."""
    (project,) = json.loads(server.ask("/v1/projects")[2])["projects"]
    return f"/v1/projects/{project['project_id']}/suggest"


def attack_bodies(server: Server, results: Results) -> None:
    """Send invalid bodies and the largest valid ones, and measure what they hold up."""
    annif = annif_path(server)
    attacks = [
        (path, name, body)
        for name, body in invalid_bodies().items()
        for path in ("/predict", "/explain", f"{annif}-batch")
    ]
    attacks += [(annif, name, body) for name, body in invalid_forms().items()]
    before, failures, slowest, longest = server.peak_mib(), [], 0.0, 0.0
    with Health(server) as health:
        for path, name, body in attacks:
            start = time.perf_counter()
            status, _, content = server.ask(path, body)
            seconds, held = time.perf_counter() - start, health.take()
            slowest, longest = max(slowest, seconds), max(longest, held)
            is_error = re.fullmatch(rb'\{"error":".*","error_type":"\w+"\}', content)
            if status not in (413, 422) or not is_error or b"aaaa" in content:
                failures.append(f"{path} {name}: {status} {content[:100]!r}")
            if seconds > MAX_REFUSAL * slowness() or held > MAX_HOLD * slowness():
                took = f"{1000 * seconds:.0f} ms, /health waited {1000 * held:.0f} ms"
                failures.append(f"{path} {name}: {status} after {took}")
    growth = server.peak_mib() - before
    if growth > 150:
        failures.append(f"{growth} MiB more")
    results.add(
        "invalid request bodies",
        len(attacks),
        f"413 or 422 within {1000 * slowest:.0f} ms; /health within {1000 * longest:.0f} ms;"
        f" {growth} MiB of memory",
        failures,
    )

    failures, longest, attempts = [], 0.0, large_bodies()
    with Health(server) as health:
        for name, (path, body) in attempts.items():
            status, *_ = server.ask(path, body)
            held = health.take()
            longest = max(longest, held)
            if status not in (200, 503) or held > MAX_HOLD * slowness():
                failures.append(f"{path} {name}: {status}, /health waited {1000 * held:.0f} ms")
    outcome = f"200, or 503 after the timeout; /health within {1000 * longest:.0f} ms"
    results.add("the largest valid bodies", len(attempts), outcome, failures)


def attack_with_random_bodies(server: Server, results: Results, n_bodies: int = 600) -> None:
    """Send bodies that are almost valid."""
    drawn, failures = random.Random(time.time_ns()), []
    inputs = {"inputs": ["a text", "é😀"], "top_k": 3}
    documents = [{"text": "a text", "document_id": "é😀"}, {"text": "another", "metadata": {}}]
    valid = {
        "/predict": {**inputs, "threshold": 0.5},
        "/explain": {**inputs, "paths": 2, "words": False},
        f"{annif_path(server)}-batch": {"documents": documents},
    }
    pieces = [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"1e999", b"-", b"null", b"\\ud800"]
    pieces += [b"\xf0\x9f", b"\0", b"true", b'"inputs"', b'"label"', b"NaN", b'""', b"0" * 5000]
    for _ in range(n_bodies):
        path = drawn.choice(list(valid))
        body = bytearray(json.dumps(valid[path]).encode())
        for _ in range(drawn.randint(1, 8)):
            start = drawn.randrange(len(body) + 1)
            body[start : start + drawn.randint(0, 5)] = drawn.choice(pieces) * drawn.choice((1, 9))
        status, *_ = server.ask(path, bytes(body))
        if status not in (200, 404, 413, 422):
            failures.append(f"{path} {bytes(body)!r}: {status}")
    results.add("random changes to a valid body", n_bodies, "200, 404, 413 or 422", failures)


def read_all(connection: socket.socket) -> bytes:
    """Return what arrives until the other side closes."""
    content = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(2**16):
            content += chunk
    return content


def attack_headers(server: Server, results: Results, timeout: float) -> None:
    """Send malformed, endless and slow headers."""
    failures = []
    malformed = {
        "no HTTP": b"hello\r\n\r\n",
        "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 5\r\n\r\nabc",
        "length and chunks": HEAD
        + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "a negative length": HEAD + b"content-length: -1\r\n\r\n",
        "a length of 10^30": HEAD + b"content-length: 1" + b"0" * 30 + b"\r\n\r\n",
        "a header without a name": HEAD + b": x\r\n\r\n",
        "a zero byte": HEAD + b"x: a\0b\r\n\r\n",
        "a bad chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        "an upgrade": b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-key: a\r\n\r\n",
        "100 KB of headers": b"GET / HTTP/1.1\r\nhost: localhost\r\n"
        + b"x: y\r\n" * 17_000
        + b"\r\n",
        "a URL of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "10,000 pipelined requests": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000,
    }
    for name, data in malformed.items():
        connection = server.connect()
        with connection, suppress(TimeoutError, ConnectionError):
            connection.sendall(data)
            connection.settimeout(timeout + 10)
            content = connection.recv(2**16)
            if re.match(rb"HTTP/1.1 5", content):
                failures.append(f"{name}: {content[:100]!r}")
        if not server.works():
            failures.append(f"{name}: the server does not answer any more")
    results.add("malformed headers", len(malformed), "refused or closed", failures)

    before, failures = server.peak_mib(), []
    endless = {
        "request line": b"GET /",
        "header name": b"GET / HTTP/1.1\r\n",
        "header value": b"GET / HTTP/1.1\r\nx: ",
        "trailer": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",
        "empty lines": b"",
    }
    for name, start in endless.items():
        n_sent, connection = 0, server.connect(start)
        with connection, suppress(ConnectionError):
            while n_sent < 600 * 2**20:
                n_sent += connection.send((b"\r\n" if name == "empty lines" else b"aa") * 2**18)
        if n_sent > 64 * 2**20:
            failures.append(f"endless {name}: {n_sent / 2**20:.0f} MiB were read")
    growth = server.peak_mib() - before
    if growth > 100 or not server.works():
        failures.append(f"{growth} MiB more")
    outcome = f"closed; {growth} MiB of memory"
    results.add("endless headers (up to 600 MB)", len(endless), outcome, failures)

    failures, connections = [], []
    for i in range(300):
        with suppress(OSError):
            connections.append(server.connect(b"" if i % 3 == 0 else HEAD[: 1 + i % len(HEAD)]))
    start = time.monotonic()
    with Health(server) as health:
        works = all(server.works() for _ in range(5))
    for connection in connections:
        with connection:
            connection.settimeout(max(0.1, start + timeout + 10 - time.monotonic()))
            try:
                read_all(connection)
            except TimeoutError:
                failures.append("a half-open connection was not closed")
    if not works:
        failures.append("valid requests were not answered")
    outcome = f"closed within {timeout:g} s, others are answered within {health.seconds:.1f} s"
    results.add("half-open connections", len(connections), outcome, failures)


def attack_few_files(model: Path, results: Results) -> None:
    """Open more connections than the server has file descriptors."""
    failures = []
    with serving(model, "--timeout", "3", max_files=200) as server, ExitStack() as stack:
        for _ in range(300):
            with suppress(OSError):
                stack.enter_context(server.connect(HEAD[:-10]))
        n_answered = sum(server.works() for _ in range(10))
        if n_answered < 10:
            failures.append(f"{10 - n_answered} of 10 valid requests were not answered")
        if not any("closed" in line for line in server.log):
            time.sleep(2)
        if not any("connections" in line for line in server.log):
            failures.append("the log does not say so")
    outcome = "valid requests are answered; logged"
    results.add("300 half-open connections, 200 file descriptors", 300, outcome, failures)


def attack_slow_clients(server: Server, results: Results, timeout: float) -> None:
    """Send slow bodies, do not read answers, and disconnect at any point."""
    failures, large = [], json.dumps({"inputs": ["a"] * 64, "top_k": 40}).encode()
    head = HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with ExitStack() as stack:
        slow = [
            stack.enter_context(server.connect(head % 1000 + b'{"inputs": [')) for _ in range(50)
        ]
        for _ in range(30):
            stack.enter_context(server.connect((head % len(large) + large) * 20))  # nobody reads
        for i in range(100):
            server.connect((head % len(VALID) + VALID)[: i * 2]).close()
        # until the texts that nobody waits for are computed, the queue may be full (status 429)
        if not any(server.works() or time.sleep(0.5) for _ in range(40)):
            failures.append("a valid request was not answered within 20 s")
        for connection in slow:
            connection.settimeout(timeout + 10)
            if not read_all(connection).startswith(b"HTTP/1.1 408"):
                failures.append("a slow body did not get 408")
    results.add(
        "slow bodies, unread answers, disconnections", 180, "closed, others served", failures
    )


def attack_host_names(server: Server, results: Results) -> None:
    """Address a server on this machine as a web page could that has rebound its name."""
    failures, tried = [], 0
    hosts = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""]
    hosts += [
        "localhost@evil.example",
        "localhost,evil.example",
        "evil.example#localhost",
        "0.0.0.0",
    ]
    for host in hosts:
        for path, body in (("/predict", VALID), ("/info", None), ("/", None), ("/labels/0", None)):
            status, headers, content = server.ask(path, body, {"host": host})
            tried += 1
            if status != 421 or b"evil" in content or "location" in headers:
                failures.append(f"{path} with host {host!r}: {status}")
    for origin in ("http://evil.example", "https://evil.example:8000", "null"):
        status, *_ = server.ask("/predict", VALID, {"origin": origin})
        tried += 1
        if status != 403:
            failures.append(f"origin {origin}: {status}")
    for path in ("/predict/", "/docs/", "//evil.example/", "/labels/"):
        status, headers, _ = server.ask(path)
        tried += 1
        if status != 404 or "location" in headers:
            failures.append(f"{path}: {status} {headers.get('location')}")
    for path in ("/health", "/ready", "/metrics"):
        tried += 1
        if server.ask(path, headers={"host": "10.1.2.3"})[0] != 200:
            failures.append(f"{path}: a probe was refused")
    results.add("foreign host names, origins, redirects", tried, "421, 403 or 404", failures)


def attack_keys(model: Path, folder: Path, results: Results) -> None:
    """Send wrong API keys."""
    file = folder / "keys"
    file.write_text(KEY)
    failures, tried = [], 0
    tries = [
        "",
        KEY[:-1],
        KEY + "x",
        KEY.upper(),
        "Bearer",
        f"Bearer  {KEY}x",
        f"Basic {KEY}",
        "x" * 9999,
    ]
    with serving(model, "--api-key-file", str(file)) as server:
        for path in ("/predict", "/explain", "/info", "/labels?q=a", "/metrics", "/openapi.json"):
            for key in tries:
                for name in ("authorization", "x-api-key"):
                    tried += 1
                    body = VALID if path in ("/predict", "/explain") else None
                    status, *_ = server.ask(path, body, {name: key})
                    if status != 401:
                        failures.append(f"{path} with {name}: {key[:40]!r}: {status}")
        if server.ask("/predict", VALID, {"x-api-key": KEY})[0] != 200:
            failures.append("the right key was refused")
    results.add("wrong API keys", tried, "401", failures)


def attack_shutdown(model: Path, results: Results) -> None:
    """Connect while several workers shut down."""
    failures, statuses = [], []
    with serving(model, "--workers", "2", "--timeout", "4") as server, ExitStack() as stack:
        for _ in range(8):  # requests that the workers wait for
            stack.enter_context(server.connect(HEAD + b"content-length: 9\r\n\r\n"))
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:
            start = time.monotonic()
            try:
                statuses.append(server.ask("/ready")[0])
            except TimeoutError:
                failures.append("a connection was not answered")
            except (OSError, http.client.HTTPException):  # closed when the last worker has ended
                time.sleep(0.05)
            if time.monotonic() - start > 3:
                failures.append(f"an answer took {time.monotonic() - start:.1f} s")
        if server.process.returncode != 0:
            failures.append(f"exit code {server.process.returncode}")
    if 503 not in statuses or not set(statuses) <= {200, 503}:
        failures.append(f"statuses {set(statuses)}")
    results.add("connections during shutdown", len(statuses), "503, at once", failures)


@contextmanager
def serving(model: Path, *options: str, max_files: int = 1024) -> Iterator[Server]:
    """Serve a model while the block runs."""
    server = Server(model, *options, max_files=max_files)
    try:
        yield server
    finally:
        server.close()


def train(folder: Path) -> Path:
    """Train a small model."""
    run, data = folder / "run", folder / "data"
    command = [sys.executable, "-m", "elias", "-q"]
    subprocess.run(
        [*command, "data", "synthetic", str(data), "--points", "300", "--labels", "40"], check=True
    )
    subprocess.run(
        [*command, "train", str(data), "--out", str(run), "--set", "encoder.dim=16"],
        check=True,
    )
    return run


def main() -> None:
    """Run all attacks."""
    folder = Path(sys.argv[1])
    results = Results(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model, timeout = train(folder), 5.0
    with serving(model, "--device", "cpu", "--timeout", f"{timeout:g}") as server:
        server.works()
        attack_bodies(server, results)
        attack_with_random_bodies(server, results)
        attack_host_names(server, results)
        attack_headers(server, results, timeout)
        attack_slow_clients(server, results, timeout)
        bugs = [line for line in server.log if "request" in line and " at" in line]
        n_requests = sum(line.startswith("{") for line in server.log)
        outcome = f"no traceback in the log; {server.peak_mib()} MiB at most"
        results.add("all requests to this server", n_requests, outcome, bugs[:5])
    attack_few_files(model, results)
    attack_keys(model, folder, results)
    attack_shutdown(model, results)


if __name__ == "__main__":
    main()
