"""Systems that the tests do not run on, as far as Linux can imitate them."""

import os
import socket
import subprocess
import sys

import pytest

from contract.documents import ROOT


@pytest.mark.slow
def test_training_and_serving_need_nothing_that_windows_lacks(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "tests" / "contract" / "as_on_windows.py"

    done = subprocess.run(
        [sys.executable, script, tmp_path, str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
