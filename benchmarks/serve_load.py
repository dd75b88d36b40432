"""Load on a server from a process of its own: throughput, latency, refusals, memory.

    elias serve MODEL --port 8000 &
    python benchmarks/serve_load.py http://127.0.0.1:8000 --texts FILE --seconds 10 --out load.json

Each client asks again as soon as it is answered. A client that is told 429 waits for no Retry-After
here (a hundredth of a second, not to spin), so that overload stays overload.
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

import httpx

WORDS = (
    "treatment of children with chronic infection effect on the growth of cells in culture "
    "a study of blood pressure after surgery in rats and the role of calcium in the liver"
).split()


def some_texts(path: Path | None) -> list[str]:
    if path is not None:
        return [line for line in path.read_text(encoding="utf8").splitlines() if line][:5000]
    drawn = random.Random(0)
    return [" ".join(drawn.choices(WORDS, k=12)) for _ in range(2000)]


def resident_mib(pids: list[int]) -> float:
    """Return the memory that processes hold, as Linux tells it."""
    pages = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/statm")
        if status.exists():
            pages += int(status.read_text().split()[1])
    return pages * 4096 / 2**20


def family(pid: int | None) -> list[int]:
    if pid is None:
        return []
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [pid, *map(int, found.stdout.split())]


class Round:
    """What came back while so many clients asked."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()

    async def client(self, http: httpx.AsyncClient, texts: list[str], end: float, size: int):
        drawn = random.Random(id(self) + len(self.seconds))
        while time.monotonic() < end:
            body = {"inputs": drawn.choices(texts, k=size), "top_k": 5}
            start = time.perf_counter()
            try:
                answer = await http.post("/predict", json=body)
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
                continue
            self.statuses[str(answer.status_code)] += 1
            if answer.status_code == 200:
                self.seconds.append(time.perf_counter() - start)
            elif answer.status_code == 429:
                await asyncio.sleep(0.01)

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
    pids = family(options.pid)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=60, limits=limits) as http:
        info = (await http.get("/info")).json()
        for clients in options.clients:
            current = Round()
            start = time.monotonic()
            end = start + options.seconds
            asking = [
                asyncio.create_task(current.client(http, texts, end, options.inputs))
                for _ in range(clients)
            ]
            while time.monotonic() < end:
                if pids:
                    memory.append([round(time.time(), 1), round(resident_mib(pids), 1)])
                await asyncio.sleep(min(5.0, options.seconds / 4))
            await asyncio.gather(*asking)
            told = current.summary(clients, time.monotonic() - start)
            print(json.dumps(told), flush=True)
            rounds.append(told)
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
    parser.add_argument("--texts", type=Path, help="one text per line; else drawn at random")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--inputs", type=int, default=1, help="texts in a request")
    parser.add_argument("--pid", type=int, help="the server's, to watch its memory")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    found = asyncio.run(load(options))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
