"""Shared code of the CPU benchmarks: time and memory of a part, tables, result files."""

import json
import os
import threading
import time
from contextlib import contextmanager

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_gib():
    with open("/proc/self/statm") as file:  # noqa: PTH123 - a pseudo file, read often
        return int(file.read().split()[1]) * PAGE / 2**30


class Parts:
    """Measure parts one after the other and store the results."""

    def __init__(self):
        self.rows = []

    @contextmanager
    def timed(self, name, **facts):
        """Measure the time of a part and the memory of the process while it runs."""
        peak, over = [resident_gib()], threading.Event()

        def look():
            while not over.wait(0.02):
                peak[0] = max(peak[0], resident_gib())

        watcher = threading.Thread(target=look)
        before, wall, cpu = resident_gib(), time.perf_counter(), time.process_time()
        watcher.start()
        try:
            yield facts
        finally:
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            over.set()
            watcher.join()
            peak[0] = max(peak[0], resident_gib())
        row = {
            "part": name,
            "wall_s": round(wall, 3),
            "cpu_s": round(cpu, 3),
            "before_gib": round(before, 3),
            "peak_gib": round(peak[0], 3),
            **facts,
        }
        self.rows.append(row)
        print(
            f"{name:24s} {wall:9.2f} s {cpu:9.2f} s CPU  memory {before:6.2f} -> {peak[0]:6.2f} GiB"
            + "".join(f"  {key} {value:,}" for key, value in facts.items()),
            flush=True,
        )


def write_json(folder, name, results):
    """Write ``found`` to a file in the folder, if a folder is given."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(results, indent=1))
