"""The suite fails if tests go missing, even if all that are left pass."""

import subprocess
import sys
from pathlib import Path


def test_a_suite_with_too_few_tests_fails():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1"]

    done = subprocess.run(
        [*command, "--floors", "tests,page", "tests/unit/test_errors.py"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "page: 0 tests passed, not 22 or more" in done.stdout
    assert "tests: " in done.stdout
