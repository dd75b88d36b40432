"""Check requests before parsing: API key, queue, body size and structure, receive timeout."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from contextlib import suppress
from typing import TYPE_CHECKING

from elias.serve.errors import NOT_JSON, RequestError, error_response
from elias.serve.page import PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.serve.settings import Limits, ServeSettings


OPEN_PATHS = PATHS | {"/health", "/ready"}
"""Paths that need no key: they reveal nothing about the model."""
QUEUED_PATHS = frozenset({"/predict", "/explain"})
_SECONDS_TO_DISCARD = 1.0
_LARGE_BODY = 64 * 2**10
"""Body size in bytes from which the check runs on a thread, to keep the event loop free."""
_EXTRA_STRINGS = 64
_BYTES_OUTSIDE = 8 * 2**10
"""Bytes allowed outside JSON strings, in addition to `_BYTES_PER_STRING` for each string."""
_BYTES_PER_STRING = 16
_BYTES_PER_CHARACTER = 12
"""Longest JSON encoding of a character in bytes: two escapes, as in ``\\ud83d\\ude00``."""


class HeadMiddleware:
    """Answer HEAD on every route like GET, without the body; do not list HEAD in OpenAPI.

    FastAPI does not answer HEAD, which uptime monitors and load balancers often send.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request; turn HEAD into GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        get_scope = {**scope, "method": "GET"}  # a copy: the server must still see HEAD
        try:
            await self._app(get_scope, receive, send_without_body)
        finally:
            if "route" in get_scope:
                scope["route"] = get_scope["route"]  # for the access log


class RequestCheckMiddleware:
    """Forward a request if its key is valid and its body is within the limits."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, check_queue: Callable[[], None]
    ) -> None:
        """Wrap an application; ``check_queue`` raises `RequestError` if the queue is full."""
        self._app = app
        self._check_queue = check_queue
        self._limits = settings.limits
        # Digests have the same length, so comparing them does not reveal the length of a key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or answer with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._check(scope, receive)
        except RequestError as error:
            response = error_response(error.status_code, error.detail, error.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _check(self, scope: Scope, receive: Receive) -> bytes:
        """Check a request and return its body.

        Raises:
            RequestError: If a check fails.
        """
        if self._digests and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            message = "a key is required: Authorization: Bearer KEY, or X-API-Key: KEY"
            raise RequestError(401, message, {"WWW-Authenticate": "Bearer"})
        if scope["path"] in QUEUED_PATHS:
            self._check_queue()  # before anything is read: refusing must cost next to nothing
        timeout, max_body = self._limits.timeout, self._limits.max_body
        try:
            async with asyncio.timeout(timeout):
                body = await self._read_body(scope, receive)
        except TimeoutError:
            message = f"the request did not arrive within {timeout:g} s"
            raise RequestError(408, message, {"Connection": "close"}) from None
        if body is None:
            await self._discard_body(receive)
            message = f"the body is larger than {max_body:,} bytes; send fewer texts per request"
            raise RequestError(413, message, {"Connection": "close"})
        if len(body) < _LARGE_BODY:
            check_structure(body, self._limits)
        else:
            await asyncio.to_thread(check_structure, body, self._limits)
        return body

    def _has_key(self, scope: Scope) -> bool:
        """Return whether a request has a valid key; the comparison takes constant time."""
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read and return the body, or stop and return None once it is too large."""
        max_body = self._limits.max_body
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > max_body:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part = message.get("body", b"")
            size += len(part)
            if size > max_body:
                return None
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _discard_body(self, receive: Receive) -> None:
        """Read and discard the rest of a refused body, up to a limit of size and time.

        A client whose connection is closed while it sends does not read the error response.
        """
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_DISCARD):
                while more and size < self._limits.max_body:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)


def check_structure(body: bytes, limits: Limits) -> None:
    """Refuse a body that has too many JSON values to parse.

    A valid request is a flat object: a few keys and numbers, and a limited number of texts.
    Parsing millions of values blocks the interpreter for seconds, so this check first counts the
    strings and the bytes between them. It always takes time linear in the size of the body.

    Raises:
        RequestError: If the body has too many values (413) or is not UTF-8 (422).
    """
    if b"\0" in body:  # UTF-16 or UTF-32, in which the bytes below mean something else
        raise RequestError(422, NOT_JSON)
    # Twice as many: the routes have a better message for somewhat too many texts.
    max_strings = 2 * limits.max_inputs + _EXTRA_STRINGS
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    parts = body.split(b'"', 2 * max_strings + 1)  # outside a string, inside one, outside again, …
    if len(parts) > 2 * max_strings + 1:
        raise RequestError(
            413,
            f"more than {max_strings:,} strings; at most {limits.max_inputs:,} texts per request",
        )
    if max(map(len, parts[1::2]), default=0) > _BYTES_PER_CHARACTER * limits.max_text:
        raise RequestError(413, f"a text is longer than {limits.max_text:,} characters; shorten it")
    max_outside = _BYTES_OUTSIDE + max_strings * _BYTES_PER_STRING
    if sum(map(len, parts[::2])) > max_outside:
        raise RequestError(
            413,
            f'more than {max_outside:,} bytes outside of strings; send {{"inputs": ["a text"]}}',
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that first returns a body already read, then new messages."""
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
