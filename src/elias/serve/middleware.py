"""What a request must pass before it is read: the key, the size of its body, the time it takes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from contextlib import suppress
from typing import TYPE_CHECKING

from elias.serve.errors import NOT_JSON, failure
from elias.serve.page import PATHS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastapi.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.serve.settings import Limits, ServeSettings


OPEN = PATHS | {"/health", "/ready"}
"""Paths that need no key: they tell nothing of the model."""
COMPUTED = frozenset({"/predict", "/explain"})
"""Paths whose answers are waited for in the queue."""
_SECONDS_TO_DISCARD = 1.0
_LARGE = 64 * 2**10
"""Bytes of a body from which on it is checked on a thread, so that other requests go on."""
_MORE_STRINGS = 64
_BYTES_OUTSIDE = 8 * 2**10
_BYTES_PER_STRING = 16
"""Bytes outside of strings (punctuation, numbers, indentation): so many, and more per string."""
_BYTES_PER_CHARACTER = 12
"""The most that JSON takes: two escapes, as in ``\\ud83d\\ude00``."""


class Keys:
    """The keys that open a server, compared in a time that tells nothing about them."""

    def __init__(self, keys: Sequence[str]) -> None:
        # digests are of one length, so not even that of a key shows
        self._digests = [_digest(key.encode()) for key in keys]

    def fits(self, given: bytes) -> bool:
        """Say whether this is one of the keys; all are compared, whichever it is."""
        digest = _digest(given)
        found = False
        for own in self._digests:
            found |= hmac.compare_digest(digest, own)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def given_key(scope: Scope) -> bytes:
    """Return the key that a request brings, as a bearer token or in X-API-Key."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key", b""))


class Guard:
    """Lets a request through once it is known to be allowed, and its body to be small enough."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, is_full: Callable[[], int | None]
    ) -> None:
        """Guard an application; ``is_full`` says after how many seconds there is room again."""
        self._app = app
        self._is_full = is_full
        self._keys = Keys(settings.keys) if settings.keys else None
        self._limits = settings.limits
        self._max_body = settings.limits.max_body
        self._timeout = settings.limits.timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keys and scope["path"] not in OPEN and not self._keys.fits(given_key(scope)):
            told = "a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY"
            refused = failure(401, told, {"WWW-Authenticate": "Bearer"})
            await refused(scope, receive, send)
            return
        if scope["path"] in COMPUTED and (seconds := self._is_full()) is not None:
            # before anything is read: refusing must cost next to nothing
            told = f"the queue is full; try again in {seconds} s"
            await failure(429, told, {"Retry-After": str(seconds)})(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._body(scope, receive)
        except TimeoutError:
            told = f"the request did not arrive within {self._timeout:g} s"
            await failure(408, told, {"Connection": "close"})(scope, receive, send)
            return
        if body is None:
            await self._discard(receive)
            told = f"the body is larger than {self._max_body:,} bytes; send fewer texts at a time"
            await failure(413, told, {"Connection": "close"})(scope, receive, send)
            return
        if len(body) < _LARGE:
            problem = check_structure(body, self._limits)
        else:
            problem = await asyncio.to_thread(check_structure, body, self._limits)
        if problem is not None:
            await problem(scope, receive, send)
            return
        await self._app(scope, _again(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the whole body, or None if it is too large, of which no more is read."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body:
                return None
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Let a client send a little more: one that is cut off while it writes reads no answer."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_DISCARD):
                while size < self._max_body:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def check_structure(body: bytes, limits: Limits) -> JSONResponse | None:
    """Return the failure of a body that has too many JSON values to parse, or None.

    A valid request is a flat object: a few keys and numbers, and a limited number of texts.
    Parsing millions of values holds the interpreter for seconds, so this check counts strings and
    the bytes between them first. It takes time linear in the body, whatever the body holds.
    """
    if b"\0" in body:  # UTF-16 or UTF-32, in which the bytes below mean something else
        return failure(422, NOT_JSON)
    # the routes have a better message for somewhat too many texts
    most = 2 * limits.max_inputs + _MORE_STRINGS
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    parts = body.split(b'"', 2 * most + 1)  # outside a string, inside one, outside again, ...
    if len(parts) > 2 * most + 1:
        told = f"more than {most:,} strings, where {limits.max_inputs:,} texts are the most"
        return failure(413, f"{told} at a time")
    if max(map(len, parts[1::2]), default=0) > _BYTES_PER_CHARACTER * limits.max_text:
        told = f"a text of more than {limits.max_text:,} characters, which are the most"
        return failure(413, f"{told}; shorten the text, its beginning says most")
    outside = _BYTES_OUTSIDE + most * _BYTES_PER_STRING
    if sum(map(len, parts[::2])) > outside:
        told = f'more than {outside:,} bytes outside of strings; send {{"inputs": ["a text"]}}'
        return failure(413, told)
    return None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, and then whatever comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
