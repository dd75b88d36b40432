"""What is told of each request: a line of JSON without its texts, and numbers for Prometheus."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from elias.serve.errors import OUR_BUG, failure

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.serve.metrics import Measures


access = logging.getLogger("elias.access")
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines, so not told."""


class Observed:
    """Counts, times and logs what passes; answers for a bug, whose traceback goes to the log."""

    def __init__(self, app: ASGIApp, measures: Measures, paths: Container[str]) -> None:
        """Observe an application with these paths."""
        self._app = app
        self._paths = paths
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and tell of it when it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = _request_id(scope)
        told: dict[str, Any] = {}
        scope["elias.told"] = told
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            _tell_bug(error, request_id)
            if not status:
                await failure(500, OUR_BUG)(scope, receive, noted)
        seconds = time.perf_counter() - start
        route = self._route(scope)
        self._measures.requests.labels(route, str(status)).inc()
        self._measures.seconds.labels(route).observe(seconds)
        if route in _QUIET and status in (200, 503):
            return
        _tell(scope, route, status, seconds, request_id, told)

    def _route(self, scope: Scope) -> str:
        """Return the route's pattern, since paths are without number; also of what is refused."""
        path = str(scope["path"])
        return getattr(scope.get("route"), "path", path if path in self._paths else "other")


def note(scope: Mapping[str, Any], **facts: Any) -> None:
    """Have the line about a request say more."""
    scope["elias.told"].update(facts)


def _request_id(scope: Scope) -> bytes:
    given = bytes(dict(scope["headers"]).get(b"x-request-id", b""))
    return given if _SANE_ID.fullmatch(given) else secrets.token_hex(8).encode()


def _tell(
    scope: Scope, route: str, status: int, seconds: float, request_id: bytes, told: dict[str, Any]
) -> None:
    client = scope.get("client")
    facts = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "method": scope["method"],
        "route": route,
        "status": status,
        "ms": round(1000 * seconds, 2),
        "client": client[0] if client else None,
        "id": request_id.decode(),
        "pid": os.getpid(),
        **told,
    }
    access.info("%s", json.dumps(facts, ensure_ascii=False))


def _tell_bug(error: Exception, request_id: bytes) -> None:
    """Log where it happened; the message is left out, since it may quote a text."""
    places = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    access.error("request %s: %s at\n%s", request_id.decode(), type(error).__name__, places)


class PlainLines(logging.Handler):
    """Writes lines to stderr as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        try:
            sys.stderr.write(f"{record.getMessage()}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
