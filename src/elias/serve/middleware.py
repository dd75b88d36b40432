"""Middleware around all routes, which checks requests before they are parsed, and logs them.

The checks cover the host name, the API key, the queue, the size and structure of the body, and the
time to receive it. The log has one line of JSON per request. It contains texts only if
`ServeSettings.log_texts` is set.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import random
import re
import time
import traceback
from collections.abc import Container
from contextlib import suppress
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elias.errors import escape_controls
from elias.serve.backend import Backend
from elias.serve.prometheus import ServerMetrics
from elias.serve.schemas import NOT_JSON, RequestError, error_response
from elias.serve.settings import MAX_HEADER_BYTES, Limits

access = logging.getLogger("elias.access")
LOG_FIELDS = "elias.log_fields"
"""Key in the ASGI scope of a request. Its value is a dictionary of extra fields for the log."""
_MONITORED_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that monitoring polls every few seconds, by any host name. They are not logged."""
_HOST = re.compile(r"(?:(https?)://)?(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?")
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

_QUEUED_PATHS = frozenset({"/predict", "/explain"})
_FORM_PATH = re.compile(r"/v1/projects/[^/]+/suggest")
"""Path of the route whose body is a form instead of JSON."""
_SECONDS_TO_DISCARD = 1.0
_MAX_BODIES = 64
"""Number of bodies of the largest size that may be read at the same time."""
_LARGE_BODY = 64 * 2**10
"""Body size in bytes from which the check runs on a thread, to keep the event loop free."""
_EXTRA_STRINGS = 1000
"""Number of strings allowed besides the texts, such as keys and the ids of Annif's documents."""
_BYTES_OUTSIDE = 8 * 2**10
"""Bytes allowed outside JSON strings, in addition to `_BYTES_PER_STRING` for each string."""
_BYTES_PER_STRING = 16
_BYTES_PER_CHARACTER = 12
"""Maximum bytes of a character in JSON (``\\ud83d\\ude00``) and in a form (``%F0%9F%98%80``)."""


class AccessLogMiddleware:
    """Middleware that logs, counts and times requests, and turns exceptions into status 500.

    The traceback of an unexpected exception is logged. HEAD is handled as GET on every route,
    because uptime monitors and load balancers often send it. The HTTP server removes the body.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Container[str]) -> None:
        """Wrap an application. ``paths`` are the path patterns of its routes."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and log it when it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = dict(scope["headers"]).get(b"x-request-id", b"")
        if not _VALID_ID.fullmatch(request_id):
            request_id = f"{random.getrandbits(64):016x}".encode()
        method = scope["method"]
        # Copy the scope, because the HTTP server must still see HEAD.
        scope = {**scope, LOG_FIELDS: {}, "method": "GET" if method == "HEAD" else method}
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # Do not log the message of the exception, because it may quote a text.
            frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            name = type(error).__name__
            access.error("request %s: %s at\n%s", request_id.decode(), name, frames)
            if not status:
                response = error_response(500, "internal error; see the server log for details")
                await response(scope, receive, send_with_id)
        seconds = time.perf_counter() - start
        # Use the pattern of the route, because there are too many different paths for metrics.
        path = str(scope["path"])
        route = getattr(scope.get("route"), "path", path if path in self._paths else "other")
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        if route in _MONITORED_PATHS and status in (200, 503):
            return
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 2),
            "client": scope["client"][0] if scope.get("client") else None,
            "id": request_id.decode(),
            "pid": os.getpid(),
            **scope[LOG_FIELDS],
        }
        access.info("%s", escape_controls(json.dumps(fields, ensure_ascii=False)))


class RequestCheckMiddleware:
    """Middleware that forwards a request if its key is valid and its body is within the limits."""

    def __init__(self, app: ASGIApp, backend: Backend, open_paths: Container[str]) -> None:
        """Wrap an application. ``open_paths`` are the paths that require no API key."""
        self._app = app
        self._backend = backend
        self._open_paths = open_paths
        self._limits = backend.settings.limits
        self._n_reading = 0
        # Digests have the same length, so comparing them does not reveal the length of a key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in backend.settings.keys]

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
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_again() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, receive_again, send)

    async def _check(self, scope: Scope, receive: Receive) -> bytes:
        """Check a request and return its body.

        Raises:
            RequestError: If a check fails.
        """
        headers, limits = dict(scope["headers"]), self._limits
        n_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if n_bytes + len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEADER_BYTES:
            raise RequestError(431, f"headers larger than {MAX_HEADER_BYTES:,} bytes; shorten them")
        if scope["path"] not in _MONITORED_PATHS:
            self._check_host(scope["headers"])
        if self._digests and scope["path"] not in self._open_paths and not self._has_key(headers):
            message = "an API key is required; send Authorization: Bearer KEY or X-API-Key: KEY"
            raise RequestError(401, message, {"WWW-Authenticate": "Bearer"})
        if scope["path"] in _QUEUED_PATHS:
            self._backend.check_queue()  # before the body is read, so that refusing is cheap
        announced = headers.get(b"content-length", b"0")
        is_large = announced.isdigit() and int(announced) > limits.max_body
        body = b""
        try:
            async with asyncio.timeout(limits.timeout):
                if not is_large:
                    body = await self._read(receive)
        except TimeoutError:
            message = f"the request did not arrive within {limits.timeout:g} s; send it again"
            raise RequestError(408, message, {"Connection": "close"}) from None
        if is_large or len(body) > limits.max_body:
            # Keep reading for a moment: some clients read a response only after sending the body.
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_TO_DISCARD):
                    await self._read(receive)
            problem = f"the body is larger than {limits.max_body:,} bytes"
            message = f"{problem}; send fewer texts per request"
            raise RequestError(413, message, {"Connection": "close"})
        if _FORM_PATH.fullmatch(scope["path"]):  # not JSON
            if len(body) > _BYTES_OUTSIDE + _BYTES_PER_CHARACTER * limits.max_text:
                raise RequestError(413, _too_long(limits))
        elif len(body) < _LARGE_BODY:
            check_structure(body, limits)
        else:
            await asyncio.to_thread(check_structure, body, limits)
        return body

    async def _read(self, receive: Receive) -> bytes:
        """Read a body until it ends, the client disconnects, or it is larger than ``max_body``.

        Raises:
            RequestError: If the body is large, and all bodies that are being read take too much
                memory (429).
        """
        body, more, max_body = bytearray(), True, self._limits.max_body
        try:
            while more and len(body) <= max_body:
                if len(body) > _LARGE_BODY and self._n_reading > _MAX_BODIES * max_body:
                    message = "too many large requests arrive at the same time; try again in 1 s"
                    raise RequestError(429, message, {"Retry-After": "1", "Connection": "close"})
                chunk = await receive()
                body += chunk.get("body", b"")
                self._n_reading += len(chunk.get("body", b""))
                more = chunk.get("more_body", False)
        finally:
            self._n_reading -= len(body)
        return bytes(body)

    def _check_host(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise a `RequestError` if the host name or the origin of a request is not allowed."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_served(hosts[0]):
            raise RequestError(421, "unknown host name; add it with --host-name NAME")
        origin = dict(headers).get(b"origin", b"")
        is_page = origin.startswith((b"http", b"null"))
        is_allowed = origin.decode("latin1") in self._backend.settings.allow_origins
        if is_page and not is_allowed and not self._is_served(origin):
            message = "the web page is on another host; allow it with --allow-origin URL"
            raise RequestError(403, message)

    def _is_served(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host.decode("latin1").lower())
        return match is not None and self._backend.settings.is_served(match[2] or match[3])

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether a request has a valid API key. The comparison takes constant time."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _too_long(limits: Limits) -> str:
    return f"a text is longer than {limits.max_text:,} characters; shorten it"


def check_structure(body: bytes, limits: Limits) -> None:
    """Reject a body with far more JSON values than a valid request has.

    A valid request is a flat object: a few keys and numbers, and a limited number of texts.
    Parsing millions of values blocks the interpreter for seconds, so this check first counts the
    strings and the bytes between them. It always takes time linear in the size of the body.

    Raises:
        RequestError: If the body has too many values (413) or is not UTF-8 (422).
    """
    if b"\0" in body:  # UTF-16 or UTF-32; the code below expects UTF-8
        raise RequestError(422, NOT_JSON)
    # Allow twice as many, because the routes have a better message for a few texts too many.
    max_strings = 2 * limits.max_inputs + _EXTRA_STRINGS
    max_outside = _BYTES_OUTSIDE + max_strings * _BYTES_PER_STRING
    body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    parts = body.split(b'"', 2 * max_strings + 1)  # outside a string, inside one, outside again, …
    if len(parts) > 2 * max_strings + 1:
        problem = f"more than {max_strings:,} strings; send at most {limits.max_inputs:,} texts"
        raise RequestError(413, f"{problem} per request")
    if max(map(len, parts[1::2]), default=0) > _BYTES_PER_CHARACTER * limits.max_text:
        raise RequestError(413, _too_long(limits))
    if sum(map(len, parts[::2])) > max_outside:
        problem = f"more than {max_outside:,} bytes outside of strings"
        raise RequestError(413, f'{problem}; send {{"inputs": ["a text"]}}')
