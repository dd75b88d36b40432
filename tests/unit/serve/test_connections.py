"""Connections are closed that are slow, too large or too many, and all others are answered."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from elias.serve import connections
from elias.serve.connections import Connections, LimitedProtocol
from elias.serve.prometheus import ServerMetrics
from elias.serve.settings import MAX_HEADER_BYTES, Limits

REQUEST = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = 4 * 2**20


class App:
    """Answers with its path, or with a large body, or when it is let."""

    def __init__(self):
        self.may_go = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/wait":
            await self.may_go.wait()
        body = b"a" * LARGE if scope["path"] == "/large" else scope["path"].encode()
        if scope["method"] == "POST":
            while (await receive()).get("more_body"):
                pass
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(**limits):
    """Serve an app on a free port."""
    app = App()
    connections = Connections(Limits(**{"timeout": 0.2} | limits), ServerMetrics())
    config = uvicorn.Config(
        app,
        http=lambda **options: LimitedProtocol(connections, **options),
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    server.config.load()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server._serve([sock]))
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            yield app, sock.getsockname()[1]
        finally:
            app.may_go.set()
            server.should_exit = server.force_exit = True
            await task


OPEN = []


async def connect(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    OPEN.append(writer)
    writer.write(data)
    return reader, writer


async def close_all():
    while OPEN:
        writer = OPEN.pop()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(port, data):
    """Return everything that is answered on a connection until it is closed."""
    reader, _ = await connect(port, data)
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 20)
    return b""


def run(scenario, **limits):
    async def main():
        async with serving(**limits) as (app, port):
            try:
                return await asyncio.wait_for(scenario(app, port), 30)
            finally:
                await close_all()

    return asyncio.run(main())


def is_answer(content, status):
    return content.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("start", [b"G", b"GET / HTT", b"GET / HTTP/1.1\r\nhost: localhost\r\nx:"])
def test_headers_that_do_not_arrive_in_time_get_408(start):
    async def scenario(_, port):
        return await answer(port, start)

    assert is_answer(run(scenario), 408)


def test_a_connection_without_a_request_is_closed():
    async def scenario(_, port):
        return await answer(port, b"")

    assert run(scenario) == b""


@pytest.mark.parametrize("piece", [b"\r\n", b"x: y\r\n"])
def test_a_client_cannot_gain_time_by_sending_slowly(piece):
    async def scenario(_, port):
        reader, writer = await connect(port, b"" if piece == b"\r\n" else REQUEST[:-2])
        while not reader.at_eof():
            writer.write(piece)
            with suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(1000), 0.02)
                break

    run(scenario)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nx:",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx:",
    ],
)
def test_endless_headers_and_trailers_are_cut_off(start):
    async def scenario(_, port):
        reader, writer = await connect(port, start)
        n_sent = 0
        with suppress(ConnectionError):
            while n_sent < 100 * MAX_HEADER_BYTES and not reader.at_eof():
                writer.write(b"a" * 10_000)
                await writer.drain()
                n_sent += 10_000
        return n_sent

    assert run(scenario, timeout=20.0) < 100 * MAX_HEADER_BYTES


def test_what_is_not_http_gets_400_and_is_logged_together(caplog, monkeypatch):
    monkeypatch.setattr(connections, "_LOG_SECONDS", 0.2)

    async def scenario(_, port):
        contents = [await answer(port, b"no HTTP\r\n\r\n") for _ in range(3)]
        await asyncio.sleep(0.4)
        return contents

    with caplog.at_level(logging.WARNING, "elias.serve.connections"):
        assert all(is_answer(content, 400) for content in run(scenario))
    messages = [message for message in caplog.messages if "closed" in message]
    assert sum(int(message.split()[1]) for message in messages) == 3


def test_headers_that_are_too_large_get_431(caplog, monkeypatch):
    monkeypatch.setattr(connections, "_LOG_SECONDS", 0.01)

    async def scenario(_, port):
        content = await answer(port, b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEADER_BYTES)
        await asyncio.sleep(0.05)
        return content

    with caplog.at_level(logging.WARNING, "elias.serve.connections"):
        assert is_answer(run(scenario), 431)
    assert caplog.messages == ["closed 1 connections: headers larger than 65,536 bytes"]


def test_a_connection_is_kept_for_later_and_for_pipelined_requests():
    async def scenario(_, port):
        reader, writer = await connect(port)
        contents = []
        for requests in ([b"a"], [b"b", b"c", b"d"], [b"e"], [b"f"]):
            writer.write(b"".join(REQUEST % path for path in requests))
            for _ in requests:
                head = await reader.readuntil(b"\r\n\r\n")
                contents.append((head.split()[1], await reader.readexactly(2)))
            await asyncio.sleep(0.3)  # in all longer than the timeout
        return contents

    assert run(scenario, timeout=1.0) == [(b"200", b"/%c" % path) for path in b"abcdef"]


def test_a_request_may_take_longer_than_its_headers():
    async def scenario(app, port):
        task = asyncio.create_task(answer(port, REQUEST % b"wait"))
        await asyncio.sleep(0.5)
        app.may_go.set()
        return await task

    assert is_answer(run(scenario), 200)


def test_idle_and_half_open_connections_give_way_to_new_ones():
    async def scenario(_, port):
        for start in [b"", b"GET / HT"] * 10:
            await connect(port, start)
        reader, _ = await connect(port, REQUEST % b"new")
        return await reader.readuntil(b"\r\n\r\n")

    assert is_answer(run(scenario, timeout=20.0, max_connections=4), 200)


def test_a_new_connection_gets_503_while_all_others_are_in_use():
    async def scenario(app, port):
        busy = [asyncio.create_task(answer(port, REQUEST % b"wait")) for _ in range(4)]
        while True:
            content = await answer(port, REQUEST % b"new")
            if content.startswith(b"HTTP/1.1 503"):
                break
        app.may_go.set()
        return await asyncio.gather(*busy)

    contents = run(scenario, timeout=1.0, max_connections=4)

    assert all(is_answer(content, 200) for content in contents)


def test_a_client_that_does_not_read_is_disconnected():
    async def scenario(_, port):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with sock:
            await loop.sock_sendall(sock, REQUEST % b"large")
            await asyncio.sleep(0.7)
            n_read = 0
            with suppress(ConnectionError):
                while chunk := await loop.sock_recv(sock, 2**20):
                    n_read += len(chunk)
        return n_read

    assert run(scenario) < LARGE


def test_the_number_of_connections_leaves_file_descriptors_for_the_model(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (200, 200))

    assert Connections(Limits(), ServerMetrics()).max_open == 136
    assert Connections(Limits(max_connections=20), ServerMetrics()).max_open == 20
