"""Run a document from top to bottom in an empty folder, as a reader would.

A block with a ``title`` is a file of that name. Python, ``sh`` and ``console`` blocks are run. A
``console`` block has commands after ``$`` and their output, in which ``…`` matches anything. Above
a block, ``<!-- run: COMMAND -->`` runs a command before it, and ``<!-- not run: REASON -->`` means
that it is only parsed.

Starting an interpreter takes seconds, so all documents share one (`document_server.py`): the
``elias`` of the shell passes its arguments, streams and folder to it. Only ``elias serve`` gets a
process of its own, in the background on a free port, until the document ends. There is no network:
``elias data demo`` generates a small corpus, ``pip`` only checks that the extra exists,
``tiny-encoder FOLDER`` makes a transformer of a few hundred weights, and after ``hub-stand-in`` the
hub is a server of the tests.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RUN = ("python", "sh", "console")
"""Languages of blocks that run unless a mark says why not."""
SHOWN_URL = "http://127.0.0.1:8000"

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|not run): (?P<text>[^\n]*) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the mark above it."""

    language: str
    body: str
    title: str | None
    first: str | None
    """A command to run before it."""
    reason: str | None
    """Why it is not run."""

    @property
    def runs(self):
        return self.language in RUN and self.reason is None and self.title is None


def blocks_of(document):
    for match in BLOCK.finditer(document.read_text(encoding="utf8")):
        marked = {match["mark"]: match["text"]}
        yield Block(
            match["language"],
            match["body"],
            match["title"],
            marked.get("run"),
            marked.get("not run"),
        )


@contextmanager
def shared_interpreter():
    """Start the interpreter that all documents share, and yield its address."""
    with tempfile.TemporaryDirectory(prefix="elias-docs-") as folder:  # a short name: a socket
        address = str(Path(folder) / "ask")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        environment["OMP_WAIT_POLICY"] = "passive"
        process = subprocess.Popen(
            [sys.executable, str(HERE / "document_server.py"), address],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "ready\n"
            yield address
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


class Sandbox:
    """A folder in which a document is run; ``elias`` is the one of this source tree."""

    def __init__(self, folder, address):
        self.folder = folder / "here"
        self.folder.mkdir()
        tools = folder / "tools"
        tools.mkdir()
        for name in ("elias", "python", "pip", "tiny-encoder", "hub-stand-in"):
            tool = tools / name
            ask = f'exec "{sys.executable}" -SE "{HERE / "document_client.py"}" {name} "$@"'
            tool.write_text(f"#!/bin/sh\n{ask}\n")
            tool.chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = folder / "server.pid"
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "ASK_ADDRESS": address,
            "ASK_PORT": str(self.port),
            "ASK_SERVER": str(self.server),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.server.exists():
            with suppress(ProcessLookupError):
                os.kill(int(self.server.read_text()), signal.SIGTERM)

    def run(self, *command, stdin=""):
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf8",
            check=False,
            timeout=600,  # rather than wait for ever for something that waits for input
        )

    def must_run(self, *command, stdin=""):
        done = self.run(*command, stdin=stdin)
        assert done.returncode == 0, done.stdout

    def shell(self, script):
        self.must_run("bash", "-euo", "pipefail", "-c", self.local(script))

    def local(self, text):
        """Return a command with the address that a document shows turned into the real one."""
        return text.replace(SHOWN_URL, f"http://127.0.0.1:{self.port}")

    def run_block(self, block):
        if block.first:
            self.shell(block.first)
        if block.title is not None:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf8", newline="\n")
        elif not block.runs:
            return
        elif block.language == "python":
            self.must_run("python", "-", stdin=self.local(block.body))
        elif block.language == "console":
            self.converse(block.body)
        else:
            self.shell(block.body)

    def converse(self, body):
        for exchange in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, answer = exchange.partition("\n")
            output = self.run("bash", "-c", self.local(command)).stdout
            expected = ".*".join(map(re.escape, answer.split("…")))
            difference = f"$ {command}\n{output}\ninstead of\n{answer}"
            assert re.fullmatch(expected, output, re.DOTALL), difference
