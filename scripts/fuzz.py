"""Run the property-based and fuzz tests with fresh seeds, round after round: `make fuzz`.

    python scripts/fuzz.py --minutes 20

A failure prints the seed. The failing examples are kept in .hypothesis/examples, and the next run
tries them first. Copy one into a test with `@example` when you fix it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")


def main() -> int:
    """Run rounds until the time is over. Return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20)
    end = time.monotonic() + 60 * parser.parse_args().minutes
    tests = sorted(str(p) for p in ROOT.glob("tests/*/**/test_*.py") if "@given" in p.read_text())
    n_rounds = 0
    while (left := end - time.monotonic()) > 0:
        seed = secrets.randbelow(2**32)
        command = [sys.executable, *PYTEST, "-m", "hypothesis", f"--hypothesis-seed={seed}", *tests]
        try:
            environment = {**os.environ, "ELIAS_FUZZ": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            break
        if done.returncode:
            sys.stderr.write(f"failed with seed {seed}: {' '.join(command)}\n")
            return 1
        n_rounds += 1
    sys.stdout.write(f"{n_rounds} whole rounds over {len(tests)} files, no failure\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
