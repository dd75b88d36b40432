"""The commands ``elias``, ``python`` and ``pip`` of the shell in which a document is run.

It imports little, so that it starts at once; see `documents.py`.
"""

import os
import socket
import sys

TINY_DEMO = ["--points", "300", "--labels", "60"]
"""Options of the corpus that replaces the demo corpus, which needs a network."""
DERIVED = [
    *("index.n_clusters", "index.edges_per_cluster", "index.beam_size", "index.shortlist_size"),
    "index.train_shortlist",
    *("index.beta", "eval.validation_size"),
]
"""Sizes in the preset of the demo corpus that the small one is too small for."""
HUB = """
import os, pytest
from e2e.hub_server import go_online, log_in, stand_in

started, patch = stand_in(), pytest.MonkeyPatch()
_, address = started.__enter__()
go_online.until_the_end = started  # it stops when nothing refers to it
go_online(patch, address, os.environ["XDG_CACHE_HOME"])
log_in(patch)
"""
"""Python code that makes the shared interpreter use a server of the tests as the hub."""


def ask(request):
    """Send a request to the shared interpreter, with the streams of this process."""
    here = os.getcwd()  # noqa: PTH109 - pathlib is slow to import
    request |= {"folder": here, "environment": dict(os.environ)}
    data = repr(request).encode()
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(os.environ["ASK_ADDRESS"])
        socket.send_fds(there, [len(data).to_bytes(8, "big")], [0, 1, 2])
        there.sendall(data)
        answer = there.recv(16)
    return int(answer) if answer else 1


def serve(arguments):
    """Start a server in the background and wait until it answers."""
    import subprocess
    import time
    import urllib.error
    import urllib.request
    from pathlib import Path

    port, note = os.environ["ASK_PORT"], Path(os.environ["ASK_SERVER"])
    command = [sys.executable, "-m", "elias", *arguments, "--port", port]
    with Path(f"{note}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    note.write_text(str(process.pid))
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return 0
    sys.stderr.write(Path(f"{note}.log").read_text())
    return process.returncode


def install(arguments):
    """Install nothing, but check that the project and the extras exist."""
    import re
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for argument in arguments[1:]:
        match = re.fullmatch(rf"(?:\.|{project['name']})(?:\[([\w,]+)\])?", argument)
        if match is None:
            sys.exit(f"pip {argument}: not this project")
        for extra in filter(None, (match[1] or "").split(",")):
            if extra not in project["optional-dependencies"]:
                sys.exit(f"pip {argument}: pyproject.toml has no extra {extra}")
    return 0


def main(name, arguments):
    if name == "pip":
        return install(arguments)
    if name == "hub-stand-in":
        return ask({"code": HUB})
    if name == "tiny-encoder":
        return ask(
            {"code": f"from tiny_bert import save_tiny_bert; save_tiny_bert({arguments[0]!r})"}
        )
    if name == "python":
        assert arguments == ["-"], "documents give Python as blocks"
        return ask({"code": sys.stdin.read()})
    if arguments[:1] == ["serve"]:
        return serve(arguments)
    if arguments[:2] == ["data", "demo"]:
        arguments = ["data", "synthetic", *arguments[2:], *TINY_DEMO]
    if "train" in arguments[:2] and "--dry-run" not in arguments:
        arguments = [*arguments, "--set=rerank.trees=2"]
        if "mesh-titles" in arguments:
            smaller = [f"--set={key}=none" for key in DERIVED]
            arguments = [*arguments, *smaller, "--set=encoder.dim=32"]
    return ask({"arguments": arguments})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
