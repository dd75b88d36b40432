"""An interpreter with all imports done that runs the requests of `document_client.py`.

python document_server.py SOCKET
"""

import ast
import gc
import logging
import os
import socket
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

import sklearn.isotonic  # noqa: F401 - here and below: slow to import, so once for all
import torch._dynamo  # noqa: F401

import elias.training.train  # noqa: F401
from elias.cli.app import main as elias_command

sys.path.append(str(Path(__file__).parents[1]))  # for the encoder of the tests, tiny_bert
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def received(connection):
    """Return a request and the streams that came with it."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length, data = int.from_bytes(head, "big"), b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return ast.literal_eval(data.decode()), streams


def take_over(streams):
    """Make the streams of who asks those of this process, unread and unwritten."""
    for number, ((name, mode), stream) in enumerate(zip(STREAMS, streams, strict=True)):
        os.dup2(stream, number)
        os.close(stream)
        opened = open(number, mode, encoding="utf8", closefd=False)  # noqa: SIM115 - a stream
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    sys.stderr.reconfigure(line_buffering=True)


def done(request):
    """Do what was asked, and return the exit code."""
    with warnings.catch_warnings():
        try:
            if "code" in request:
                warnings.simplefilter("error")
                exec(compile(request["code"], "<block>", "exec"), {"__name__": "__main__"})
            else:
                sys.argv = ["elias", *request["arguments"]]
                elias_command()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            logging.getLogger().handlers.clear()  # of an example that sets up logging
    return 0


def main(address):
    nothing = os.open(os.devnull, os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        gc.freeze()  # what was imported stays, and need not be looked through for every request
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listening.accept()
            with connection:
                request, streams = received(connection)
                os.environ.clear()
                os.environ.update(request["environment"])
                os.chdir(request["folder"])
                take_over(streams)
                code = done(request)
                for stream in (sys.stdout, sys.stderr):
                    with suppress(BrokenPipeError):  # as `head` leaves it
                        stream.flush()
                take_over([os.dup(nothing) for _ in STREAMS])
                gc.collect()
                connection.sendall(str(code).encode())


if __name__ == "__main__":
    main(sys.argv[1])
