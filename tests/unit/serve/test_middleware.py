"""A body is checked before it is parsed: too many values are refused, and valid requests pass."""

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elias.serve import middleware
from elias.serve.backend import Backend
from elias.serve.middleware import RequestCheckMiddleware, check_structure
from elias.serve.schemas import ExplainRequest, PredictRequest, RequestError
from elias.serve.settings import Limits, ServeSettings

LIMITS = Limits(max_inputs=8)
HOSTILE = {
    "numbers": b'{"inputs": [' + b"1," * 100_000 + b"1]}",
    "empty strings": b'{"inputs": [' + b'"",' * 100_000 + b'""]}',
    "empty lists": b'{"inputs": [' + b"[]," * 100_000 + b"[]]}",
    "unknown keys": b"{" + b",".join(b'"%d": 1' % i for i in range(50_000)) + b"}",
    "nesting": b'{"inputs": ' + b"[" * 100_000,
    "a long text": b'{"inputs": ["' + b"a" * 240_001 + b'"]}',
    "digits": b'{"inputs": ["a"], "threshold": 0.' + b"1" * 100_000 + b"}",
    "numbers after an escaped quote": b'{"inputs": ["\\""' + b",1" * 100_000 + b"]}",
    "numbers after an escaped backslash": b'{"inputs": ["\\\\"' + b",1" * 100_000 + b"]}",
}


def status_of(body):
    """Return the status that a body is refused with, or None."""
    try:
        check_structure(body, LIMITS)
    except RequestError as error:
        return error.status_code
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(name):
    assert status_of(HOSTILE[name]) == 413


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_numbers_cannot_hide_in_another_encoding(encoding):
    body = ('{"inputs": [' + "1," * 20_000 + "1]}").encode(encoding)

    assert status_of(body) == 422


@given(
    texts=st.lists(st.text() | st.text(alphabet='"\\,[]{}/n '), max_size=LIMITS.max_inputs),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 2, 8]),
)
def test_every_valid_request_passes(texts, is_ascii, indent):
    request = {"inputs": texts, "top_k": 5, "threshold": "precision=0.8"}
    body = json.dumps(request, ensure_ascii=is_ascii, indent=indent)

    assert status_of(body.encode("utf8", "surrogatepass")) is None


@pytest.mark.parametrize("character", ["\U0001f41f", "a", '"', "\\", "\n"])
def test_a_text_of_the_greatest_length_passes(character):
    request = {"inputs": [character * LIMITS.max_text]}

    assert status_of(json.dumps(request).encode()) is None


class Recorder:
    """An application that counts the requests that reach it."""

    def __init__(self):
        self.n_requests = 0

    async def __call__(self, scope, receive, send):
        del scope, receive, send
        self.n_requests += 1


def send_body(body, tmp_path, *, path="/predict", headers=(), **settings):
    """Return the status of a request that is sent through the checks, and whether it passed."""
    app, sent = Recorder(), []
    checked = RequestCheckMiddleware(
        app, Backend(ServeSettings(model=tmp_path, limits=LIMITS, **settings)), open_paths=()
    )

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers) or [(b"host", b"localhost:8000")],
    }
    asyncio.run(checked(scope, receive, send))
    return (sent[0]["status"] if sent else None), app.n_requests


@pytest.mark.parametrize("name", HOSTILE)
def test_a_refused_body_never_reaches_the_parser(name, tmp_path):
    assert send_body(HOSTILE[name], tmp_path) == (413, 0)


def test_a_large_body_is_checked_off_the_event_loop(tmp_path, monkeypatch):
    threads = []

    def check(body, limits):
        threads.append(threading.current_thread())
        return check_structure(body, limits)

    monkeypatch.setattr(middleware, "check_structure", check)
    small = send_body(b'{"inputs": ["a"]}', tmp_path)
    large = send_body(b'{"inputs": ["' + b"a" * 200_000 + b'"]}', tmp_path)

    assert small == large == (None, 1)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


KEY = "a-key-of-sixteen-characters"
LOOPBACK = {"host": "127.0.0.1"}
NAMED = {"host": "0.0.0.0", "host_names": ("labels.example.org",)}
WITH_KEY = {"host": "0.0.0.0", "keys": (KEY,)}


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        (LOOPBACK, "127.0.0.1:8000", None),
        (LOOPBACK, "LocalHost", None),
        (LOOPBACK, "elias.localhost:8000", None),
        (LOOPBACK, "[::1]:8000", None),
        (LOOPBACK, "evil.example", 421),
        (LOOPBACK, "localhost.evil.example", 421),
        (LOOPBACK, "localhost@evil.example", 421),
        (LOOPBACK, "10.0.0.1", 421),
        (LOOPBACK, "", 421),
        (LOOPBACK, "localhost evil", 421),
        (LOOPBACK | {"host_names": ("labels.example.org",)}, "labels.example.org:8000", None),
        (NAMED, "Labels.Example.org", None),
        (NAMED, "127.0.0.1:8000", None),
        (NAMED, "evil.example", 421),
        (WITH_KEY, "labels.example.org", None),
        (WITH_KEY | NAMED, "evil.example", 421),
    ],
)
def test_requests_to_unknown_host_names_are_refused(settings, host, status, tmp_path):
    headers = [(b"host", host.encode()), (b"x-api-key", KEY.encode())]

    answer = send_body(b'{"inputs": ["a"]}', tmp_path, headers=headers, **settings)

    assert answer == (status, 0 if status else 1)


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"evil.example"]])
def test_a_request_must_have_one_host_name(hosts, tmp_path):
    headers = [(b"accept", b"*/*"), *((b"host", host) for host in hosts)]

    assert send_body(b"", tmp_path, headers=headers) == (421, 0)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_monitoring_may_use_any_host_name(path, tmp_path):
    headers = [(b"host", b"10.1.2.3:8000")]

    assert send_body(b"", tmp_path, path=path, headers=headers) == (None, 1)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"http://localhost:8000", None),
        (b"https://labels.example.org", None),
        (b"chrome-extension://abcdef", None),
        (b"http://evil.example", 403),
        (b"null", 403),
    ],
)
def test_requests_of_web_pages_from_other_hosts_are_refused(origin, status, tmp_path):
    headers = [(b"host", b"localhost:8000"), (b"origin", origin)]

    assert send_body(b"", tmp_path, headers=headers, **NAMED)[0] == status


def test_an_allowed_origin_may_use_the_server(tmp_path):
    pages = {"allow_origins": ("https://library.example",)}
    headers = [(b"host", b"localhost:8000"), (b"origin", b"https://library.example")]
    other = [(b"host", b"localhost:8000"), (b"origin", b"https://library.example:444")]

    assert send_body(b"", tmp_path, headers=headers, **pages)[0] is None
    assert send_body(b"", tmp_path, headers=other, **pages)[0] == 403


def test_headers_that_arrive_at_once_are_limited_too(tmp_path):
    headers = [(b"host", b"localhost"), *((b"x-%d" % i, b"a" * 1000) for i in range(66))]

    assert send_body(b"", tmp_path, headers=headers) == (431, 0)


def test_large_bodies_that_arrive_together_are_refused_where_they_take_too_much_memory(tmp_path):
    limits = Limits(max_body=100_000)
    checked = RequestCheckMiddleware(
        Recorder(), Backend(ServeSettings(model=tmp_path, limits=limits)), open_paths=()
    )

    async def read(size):
        chunks = iter([{"body": b"a" * size, "more_body": True}])

        async def receive():
            return next(chunks, None) or await asyncio.sleep(60)

        await checked._read(receive)

    async def main():
        tasks = [asyncio.create_task(read(size)) for size in [99_000] * 64 + [1000] * 10 + [99_000]]
        refused, reading = await asyncio.wait(tasks, timeout=10, return_when="FIRST_COMPLETED")
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return [tasks.index(task) for task in refused if task.exception().status_code == 429]

    assert asyncio.run(main()) == [74]
    assert checked._n_reading == 0


@pytest.mark.parametrize("kind", [PredictRequest, ExplainRequest])
@pytest.mark.parametrize(
    "body", [{"inputs": [1] * 5000}, {str(i): 1 for i in range(5000)}, {"inputs": ["a", *[1] * 50]}]
)
def test_validation_stops_at_the_first_error(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)

    assert refused.value.error_count() == 1
