"""Load a server from a separate process: throughput, latency, refusals, memory.

    elias serve MODEL --port 8000 &
    python benchmarks/serve_load.py http://127.0.0.1:8000 --texts FILE --seconds 10 --out load.json

Uses a minimal HTTP/1.1 client, because a general one costs more than the server. Each client keeps
a connection and sends the next request as soon as it has a response. After a 429 it waits a tenth
of a second instead of Retry-After, so that the server stays overloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

SENTENCES = (
    "treatment of children with chronic infection effect on the growth of cells in culture "
    "a study of blood pressure after surgery in rats and the role of calcium in the liver"
)


def some_texts(path: Path | None) -> list[str]:
    if path is not None:
        return [line for line in path.read_text(encoding="utf8").splitlines() if line][:5000]
    drawn = random.Random(0)
    return [" ".join(drawn.choices(SENTENCES.split(), k=12)) for _ in range(2000)]


def resident_mib(pids: list[int]) -> float:
    """Return the resident memory of processes, from Linux's /proc."""
    pages = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/statm")
        if status.exists():
            pages += int(status.read_text().split()[1])
    return pages * 4096 / 2**20


def workers_of(pid: int) -> list[int]:
    """Return the children of a server with several workers. On Linux, it has no others."""
    results = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(child) for child in results.stdout.split()]


class Client:
    """One connection, reopened whenever it is closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def predict(self, body: bytes) -> int:
        """Return the status of an answer that was read to its end."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        try:
            writer.write(
                b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
            await reader.readexactly(int(headers[b"content-length"]))
            if headers.get(b"connection") == b"close":
                self.close()
            return int(lines[0].split()[1])
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Round:
    """Responses of one round with a number of clients."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()

    async def ask(self, url: str, texts: list[str], end: float, size: int, seed: int) -> None:
        drawn, client = random.Random(seed), Client(url)
        while time.monotonic() < end:
            body = json.dumps({"inputs": drawn.choices(texts, k=size), "top_k": 5}).encode()
            start = time.perf_counter()
            try:
                status = await client.predict(body)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.statuses[type(error).__name__] += 1
                await asyncio.sleep(0.01)
                continue
            self.statuses[str(status)] += 1
            if status == 200:
                self.seconds.append(time.perf_counter() - start)
            elif status == 429:
                await asyncio.sleep(0.1)
        client.close()

    def summary(self, clients: int, took: float) -> dict[str, object]:
        ordered = sorted(self.seconds) or [float("nan")]

        def at(share: float) -> float:
            return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1)

        return {
            "clients": clients,
            "per_second": round(len(self.seconds) / took, 1),
            "p50_ms": at(0.5),
            "p95_ms": at(0.95),
            "p99_ms": at(0.99),
            "statuses": dict(self.statuses),
        }


async def load(options: argparse.Namespace) -> dict[str, object]:
    texts = some_texts(options.texts)
    rounds, memory = [], []
    pids = [options.pid, *workers_of(options.pid)] if options.pid else []
    with urlopen(f"{options.url}/info") as answer:
        info = json.load(answer)
    for clients in options.clients:
        current = Round()
        start = time.monotonic()
        end = start + options.seconds
        asking = [
            asyncio.create_task(current.ask(options.url, texts, end, options.inputs, seed))
            for seed in range(clients)
        ]
        while time.monotonic() < end:
            if pids:
                memory.append([round(time.time(), 1), round(resident_mib(pids), 1)])
            await asyncio.sleep(min(5.0, options.seconds / 4))
        await asyncio.gather(*asking)
        result = current.summary(clients, time.monotonic() - start)
        print(json.dumps(result), flush=True)
        rounds.append(result)
    return {
        "model": {key: info[key] for key in ("model", "n_labels", "n_members", "encoder")},
        "inputs_per_request": options.inputs,
        "seconds_per_round": options.seconds,
        "rounds": rounds,
        "memory_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument(
        "--texts", type=Path, help="file with one text per line; default: random texts"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each round")
    parser.add_argument("--inputs", type=int, default=1, help="texts per request")
    parser.add_argument("--pid", type=int, help="process id of the server, to record its memory")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    results = asyncio.run(load(options))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
