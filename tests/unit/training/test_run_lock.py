import os
import subprocess
import sys

import pytest

from elias.errors import RunError
from elias.training.run import LOCK_FILE, check_unlocked, locked

HOLD = """
import sys
from pathlib import Path
from elias.training.run import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_the_process_id_of_the_first(tmp_path):
    with locked(tmp_path):
        for refused in (lambda: locked(tmp_path).__enter__(), lambda: check_unlocked(tmp_path)):
            with pytest.raises(RunError, match=f"process {os.getpid()}"):
                refused()


def test_the_lock_is_released_when_the_run_ends(tmp_path):
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()

    check_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_without_a_holder_is_ignored(tmp_path):
    (tmp_path / LOCK_FILE).write_text("1\n")

    check_unlocked(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_a_killed_process_releases_its_lock(tmp_path):
    source = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"process {process.pid}"):
            check_unlocked(tmp_path)
        process.kill()

    with locked(tmp_path):
        pass
