"""What a request must pass before it is read: the key, the size of its body, the time it takes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from contextlib import suppress
from typing import TYPE_CHECKING

from elias.serve.failures import failure
from elias.serve.page import PATHS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.serve.settings import ServeSettings

OPEN = PATHS | {"/health", "/ready"}
"""Paths that need no key: they tell nothing of the model."""
COMPUTED = frozenset({"/predict", "/explain"})
"""Paths whose answers are waited for in the queue."""
_SECONDS_TO_DISCARD = 1.0


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
