"""Load a server while clients fail, workers are killed and the model is reloaded.

    python benchmarks/serve_faults.py MODEL --seconds 600 --out faults.json

Valid requests have 1 or 64 texts. Other clients send invalid bodies, disconnect at any point, send
slowly or use a wrong host name. The exit code is 1 if a valid request gets a status other than 200
and 429, if one is lost on a connection whose worker was not killed, if the resident memory grows by
more than a tenth, or if the server does not exit with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

from serve_load import Client, resident_mib, some_texts, workers_of

HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
WARM_UP = 2
"""Reloads before memory is compared: at first, each leaves some behind that the next uses."""


class Load:
    """Valid and failing clients of a server, and the answers they received."""

    def __init__(self, url: str, texts: list[str], seconds: float) -> None:
        self.url, self.texts = url, texts
        self.end = time.monotonic() + seconds
        self.statuses: dict[str, Counter[str]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.errors: list[float] = []
        self.kills: list[tuple[float, float]] = []
        """When each worker was killed, and when it was gone."""

    async def send_valid(self, group: str, size: int, pause: float, seed: int) -> None:
        """Send valid requests of ``size`` texts, one after the other."""
        drawn, client = random.Random(seed), Client(self.url)
        statuses = self.statuses.setdefault(group, Counter())
        times = self.seconds.setdefault(group, [])
        while time.monotonic() < self.end:
            body = json.dumps({"inputs": drawn.choices(self.texts, k=size)}).encode()
            start = time.monotonic()
            try:
                status = await client.predict(body)
            except (OSError, asyncio.IncompleteReadError) as error:
                statuses[type(error).__name__] += 1
                self.errors.append(time.monotonic())
                client.close()
                await asyncio.sleep(0.1)
                continue
            statuses[str(status)] += 1
            times.append(time.monotonic() - start)
            await asyncio.sleep(pause)
        client.close()

    async def send_faults(self, seed: int) -> None:
        """Send requests that are invalid, incomplete or not waited for."""
        drawn, statuses = random.Random(seed), self.statuses.setdefault("faults", Counter())
        body = json.dumps({"inputs": self.texts[:8]}).encode()
        valid = HEAD % len(body) + body
        many = b'{"inputs": [' + b"1," * 500_000 + b"1]}"
        faults = [
            HEAD % 7 + b"invalid",
            HEAD % len(many) + many,
            HEAD % 10**9 + b"a" * 1000,
            b"\x16\x03\x01 no HTTP\r\n\r\n",
            b"GET /labels/999999999999 HTTP/1.1\r\nhost: localhost\r\n\r\n",
            valid.replace(b"localhost", b"evil.example"),
            b"x" * 200_000,
        ]
        address = self.url.removeprefix("http://").split(":")
        while time.monotonic() < self.end:
            try:
                reader, writer = await asyncio.open_connection(*address)
                if drawn.random() < 0.5:
                    writer.write(drawn.choice(faults))
                    answer = await asyncio.wait_for(reader.readline(), 30)
                    statuses[answer[9:12].decode() or "closed"] += 1
                else:  # disconnect in the middle, or while the answer is computed
                    writer.write(valid[: drawn.choice((len(valid), drawn.randrange(len(valid))))])
                    await asyncio.sleep(drawn.random() / 20)
                    statuses["left"] += 1
                writer.close()
            except OSError as error:
                statuses[type(error).__name__] += 1
            await asyncio.sleep(0.02)

    def unexplained(self) -> int:
        """Return the number of lost requests that no kill explains."""
        return sum(
            not any(start <= error <= end + 1 for start, end in self.kills) for error in self.errors
        )


def n_ready(url: str) -> int:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        match = re.search(rb"^elias_workers ([\d.]+)", answer.read(), re.MULTILINE)
    return int(float(match[1])) if match else 0


async def trouble(load: Load, pid: int, options: argparse.Namespace) -> list[float]:
    """Kill workers and reload the model at random times; return the memory over time."""
    drawn, memory, n_reloads = random.Random(0), [], 0
    next_kill = time.monotonic() + options.kill_every
    next_reload = time.monotonic() + options.reload_every
    while time.monotonic() < load.end:
        await asyncio.sleep(2)
        if time.monotonic() > next_reload:
            os.kill(pid, signal.SIGHUP)
            n_reloads += 1
            next_reload = time.monotonic() + options.reload_every
        try:
            are_ready = await asyncio.to_thread(n_ready, load.url) == options.workers
        except OSError:  # the worker that was asked has just been killed
            continue
        if not are_ready:
            continue
        workers = workers_of(pid)
        if n_reloads >= WARM_UP:
            memory.append(round(resident_mib([pid, *workers]), 1))
        if time.monotonic() > next_kill:
            start = time.monotonic()
            worker = drawn.choice(workers)
            os.kill(worker, signal.SIGKILL)
            while Path(f"/proc/{worker}").exists():  # its threads may hold connections for a while
                await asyncio.sleep(0.05)
            load.kills.append((start, time.monotonic()))
            next_kill = time.monotonic() + options.kill_every
    return memory


async def run(process: subprocess.Popen[bytes], url: str, options: argparse.Namespace) -> dict:
    load = Load(url, some_texts(options.texts), options.seconds)
    clients = [load.send_valid("1 text", 1, 0.05, seed) for seed in range(4)]
    clients += [load.send_valid("64 texts", 64, 0.0, 10 + seed) for seed in range(options.large)]
    clients += [load.send_faults(20 + seed) for seed in range(4)]
    memory, *_ = await asyncio.gather(trouble(load, process.pid, options), *clients)
    memory = memory or [float("nan")]
    third = max(1, len(memory) // 3)
    first, last = (statistics.median(part) for part in (memory[:third], memory[-third:]))
    answered = {group: sorted(seconds) for group, seconds in load.seconds.items()}
    with urlopen(f"{url}/metrics") as answer:
        metrics = answer.read().decode()
    server_errors = re.findall(r'elias_requests_total\{[^}]*status="500"\} ([\d.]+)', metrics)
    return {
        "seconds": options.seconds,
        "kills": len(load.kills),
        "reloads": sum(map(float, re.findall(r"elias_reloads_total\{\S+ ([\d.]+)", metrics))),
        "status_500": sum(map(float, server_errors)),
        "statuses": {group: dict(counts) for group, counts in load.statuses.items()},
        "p50_ms": {group: round(1000 * statistics.median(one)) for group, one in answered.items()},
        "p99_ms": {
            group: round(1000 * one[int(0.99 * len(one))]) for group, one in answered.items()
        },
        "lost": len(load.errors),
        "lost_without_a_kill": load.unexplained(),
        "seconds_to_die": max((end - start for start, end in load.kills), default=0.0),
        "memory_mib": {"first_third": first, "last_third": last, "all": memory},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of the load")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--large", type=int, default=2, help="clients that send 64 texts")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--reload-every", type=float, default=15.0, help="between two reloads")
    parser.add_argument("--texts", type=Path, help="file with one text per line")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    log = Path(f"{options.out or 'serve_faults'}.log")
    with log.open("wb") as file:
        command = [sys.executable, "-m", "elias", "serve", options.model, "--port", "0"]
        command += ["--workers", str(options.workers), "--timeout", "60"]  # overload is no fault
        process = subprocess.Popen(command, stderr=file)
        try:
            while not (match := re.search(r"on (http://\S+)", log.read_text(encoding="utf8"))):
                time.sleep(0.1)
            while log.read_text(encoding="utf8").count("is ready") < options.workers:
                if process.poll() is not None:
                    raise SystemExit(log.read_text(encoding="utf8"))
                time.sleep(0.1)
            results = asyncio.run(run(process, match[1], options))
        finally:
            process.terminate()
            code = process.wait(90)
    results["exit_code"] = code
    statuses = set().union(*(results["statuses"][group] for group in ("1 text", "64 texts")))
    statuses = {status for status in statuses if status.isdigit()}
    memory = results["memory_mib"]
    results["passed"] = (
        statuses <= {"200", "429"}
        and not results["status_500"]
        and not results["lost_without_a_kill"]
        and memory["last_third"] < 1.1 * memory["first_third"]
        and code == 0
    )
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    return 0 if results["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
