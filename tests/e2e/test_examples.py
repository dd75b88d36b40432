"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_twice_from_any_folder(path, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", str(path)]

    done = [
        subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        for _ in range(2)
    ]

    assert [run.returncode for run in done] == [0, 0], done[0].stderr + done[1].stderr
    assert done[0].stdout.split()[:2] == ["P", "@1"]
    assert done[0].stdout == done[1].stdout
