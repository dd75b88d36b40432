"""Attack ELIAS and print what came of it, within ten minutes: `make attack`.

    PYTHONPATH=src:tests python scripts/attack/run.py [--docs] [--minutes 10]

Each part is a script of its own, `PART.py FOLDER`, that records its results with `Results`. The
table is printed and written to runs/attack.md; with ``--docs``, into docs/reference/attacks.md.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = {"files": 0.3, "kills": 0.33, "server": 0.35}
"""Parts, and the share of the time after which each is stopped."""
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "attacks.md"
TABLE_START, TABLE_END = "<!-- table of make attack -->\n", "<!-- end of the table -->\n"


class Results:
    """The results of a part, one row per attack. They are written as JSON after each row."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self._rows = []

    def add(self, attack, tried, outcome, failures=()):
        """Record an attack: how often it was tried, what happened, and each time it succeeded."""
        self._rows.append([attack, tried, outcome, list(failures)])
        self._file.write_text(json.dumps(self._rows), encoding="utf8")
        print(f"{attack}: {tried} tried, {len(failures)} failed; {outcome}", flush=True)
        for failure in failures:
            print(f"  FAILED: {failure}", flush=True)


def run_part(name, limit, folder):
    """Run a part in a session of its own, so that all its processes can be stopped."""
    command = [sys.executable, "-W", "ignore", HERE / f"{name}.py", folder]
    cache = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    part = subprocess.Popen(command, env={**os.environ, **cache}, start_new_session=True)
    try:
        code = part.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)
        part.wait()
        subprocess.run(["umount", "-l", folder / "disk"], capture_output=True, check=False)
        code = f"not within {limit:.0f} seconds"
    file = folder / "results.json"
    rows = json.loads(file.read_text(encoding="utf8")) if file.exists() else []
    return rows if code == 0 else [*rows, [f"({name}.py)", 1, "", [f"did not finish: {code}"]]]


def table(rows):
    lines = ["| attack | tried | got through | outcome |", "| --- | ---: | ---: | --- |"]
    for attack, tried, outcome, failures in rows:
        attack = attack[:1].upper() + attack[1:]
        lines.append(f"| {attack} | {tried:,} | {len(failures)} | {outcome} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--minutes", type=float, default=10, help="more on a busy machine")
    chosen = parser.parse_args()
    rows, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in [chosen.only] if chosen.only else PARTS:
            limit = 60 * chosen.minutes * PARTS[name]
            rows += run_part(name, limit, Path(folder) / name)
    shown = table(rows)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - begin:.0f} seconds"
    print(f"\n{shown}\n{seconds}, {used.ru_utime + used.ru_stime:.0f} of processor time")
    out = HERE.parents[1] / "runs" / "attack.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(shown, encoding="utf8")
    if chosen.docs:
        before, _, rest = PAGE.read_text(encoding="utf8").partition(TABLE_START)
        after = rest.partition(TABLE_END)[2]
        PAGE.write_text(f"{before}{TABLE_START}\n{shown}\n{TABLE_END}{after}", encoding="utf8")
    return any(failures for *_, failures in rows)


if __name__ == "__main__":
    sys.exit(main())
