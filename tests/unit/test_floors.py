"""The suite fails if tests go missing, even if all that are left pass."""

import os
import subprocess
import sys
from pathlib import Path

FILE = "tests/contract/test_release.py"  # small and quick


def test_a_suite_with_too_few_tests_fails():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]

    done = subprocess.run(
        [*command, "-p", "xdist", "-n", "1", "--floors", "tests,page", FILE],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "page: 0 tests passed, not 22 or more" in done.stdout
    assert "tests: " in done.stdout
