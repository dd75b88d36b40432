"""Train and serve without what Windows lacks. `test_platforms.py` runs this script.

This is a simulation: it takes names away, and leaves the file system and the processes of Linux.
"""

import asyncio
import importlib
import json
import mmap
import os
import pkgutil
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

for name in ("resource", "fcntl", "termios", "pwd", "grp", "triton", "uvloop"):
    sys.modules[name] = None  # importing it raises ImportError
for module, names in {
    signal: ("SIGHUP", "SIGPIPE", "SIGUSR1", "SIGALRM"),  # torch for Linux needs SIGKILL
    os: ("fork", "sched_getaffinity", "sysconf", "posix_fallocate", "getuid", "geteuid"),
    mmap: ("MADV_DONTNEED",),
}.items():
    for name in names:
        delattr(module, name)


def refuse(*_):
    raise NotImplementedError


for loop in (asyncio.SelectorEventLoop, asyncio.unix_events._UnixSelectorEventLoop):
    loop.add_signal_handler = loop.add_reader = refuse


def import_all():
    import elias

    for module in pkgutil.walk_packages(elias.__path__, "elias."):
        if not module.name.startswith("elias.kernels.gpu") and "__main__" not in module.name:
            importlib.import_module(module.name)


def serve(model):
    from elias.errors import ConfigError
    from elias.serve.server import serve
    from elias.serve.settings import ServeSettings

    def ask():
        try:
            for _ in range(300):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
                        answers.append(answer.status)
                    break
                except OSError:
                    time.sleep(0.1)
            body = json.dumps({"inputs": ["a text"], "top_k": 2}).encode()
            header = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body, header)
            with urllib.request.urlopen(request) as answer:
                answers.append(len(json.load(answer)[0]))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    answers = []
    port = int(sys.argv[2])
    threading.Thread(target=ask).start()
    serve(ServeSettings(model=model, port=port))
    assert answers == [200, 2], answers
    with pytest.raises(ConfigError, match="--workers"):
        serve(ServeSettings(model=model, port=port, workers=2))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    import_all()
    from elias import EliasConfig, train

    epochs = {"stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
    settings = {"encoder.dim": 8, "index.kind": "graph", **epochs}
    labels = [["fish"], ["wine"], ["oil"], ["law"], ["sea"], ["coal"], ["bread"], ["milk"]] * 4
    texts = [f"text about {label}" for (label,) in labels]
    train(texts=texts, labels=labels, config=EliasConfig().override(settings), out=folder / "run")
    serve(folder / "run")
