"""Set up every test: checked shape annotations, fixed seeds and no network."""

from __future__ import annotations

import os

# Before torch is imported: threads that spin while they wait slow down a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    # a worker has a core of its own: more threads would only wait for those of other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before triton is imported: its kernels run in its interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import json
import logging
import random
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase
from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"  # fail at once rather than retry a network that is closed

# Modules of plain torch only: numba and triton must compile the function itself, not its checker.
install_import_hook(["elias.model", "elias.training"], "beartype.beartype")

# A shared machine can stall any single example, and a failure must come back on the next run.
settings.register_profile("elias", deadline=None, derandomize=True, max_examples=50)
# `make fuzz`: other examples each time; those that fail are kept in .hypothesis and tried first.
EXAMPLES = DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples")
settings.register_profile("fuzz", deadline=None, database=EXAMPLES, print_blob=True)
settings.load_profile("fuzz" if "ELIAS_FUZZ" in os.environ else "elias")

FLOORS = json.loads((Path(__file__).parent / "floor.json").read_text(encoding="utf8"))
"""The fewest tests of the whole suite that must pass: those of the web page, and all others.

Tests that stop being collected, or skip themselves, would otherwise go unnoticed. Raise the floors
when tests are added. They are a little lower than the counts because some machines have no Triton.
"""
PAGE_TESTS = "tests/e2e/test_page.py"


def pytest_addoption(parser):
    names = ",".join(FLOORS)
    parser.addoption("--floors", default="", help=f"check that enough tests passed: {names}")


def too_few(passed, floors):
    """Return a line for each floor that the ids of the passed tests do not reach.

    >>> too_few([PAGE_TESTS + "::test_a"], "page")
    ['page: 1 tests passed, not 22 or more (tests/floor.json)']
    """
    n_page = sum(name.startswith(PAGE_TESTS) for name in passed)
    counts = {"page": n_page, "tests": len(passed) - n_page}
    return [
        f"{name}: {counts[name]} tests passed, not {FLOORS[name]} or more (tests/floor.json)"
        for name in filter(None, floors.split(","))
        if counts[name] < FLOORS[name]
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        passed = [report.nodeid for report in reporter.stats.get("passed", [])]
        for line in too_few(passed, session.config.getoption("--floors")):
            reporter.write_line(line, red=True)
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


LONG = (
    "tests/contract/test_docs.py",
    "tests/e2e/test_processes.py",
    "tests/e2e/test_predict_processes.py",
    "tests/e2e/test_serve_processes.py",
    "tests/e2e/test_resume.py",
    "tests/e2e/test_cli.py",
    "tests/e2e/test_page.py",
    "tests/e2e/test_examples.py",
    "tests/contract/test_notebooks.py",
)
"""Files that take longest. They start first: a worker runs whole files, and the others would wait
for the last one."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(LONG)}

    def rank(item):
        file = item.nodeid.partition("::")[0]
        short = file.startswith(("tests/unit/", "tests/properties/"))
        return order.get(file, len(LONG) + short)

    items.sort(key=rank)


LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "", None}


@pytest.fixture(autouse=True, scope="session")
def closed_sockets():
    """Let a test connect to this machine only."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in LOCAL_HOSTS:
            raise OSError(f"tests use no network, but one connects to {address}")
        return connect(self, address)

    def guarded_getaddrinfo(host, *args, **kwargs):
        if host not in LOCAL_HOSTS:
            raise socket.gaierror(f"tests use no network, but one looks up {host!r}")
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Start every test with the loggers and signal handlers of a new process.

    Commands and servers set them up, in a test or in the fixture of a module, and tests come in
    any order.
    """
    ours = logging.getLogger("elias")
    ours.setLevel(logging.NOTSET)
    ours.handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def seeds():
    """Start every test from the same random state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for code under test that uses the global state
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
