"""Log each request as one line of JSON, and count it in the metrics.

The line has the texts of the request only if `ServeSettings.log_texts` is set.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from elias.serve.errors import INTERNAL_ERROR, error_response

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.serve.metrics import Metrics


access = logging.getLogger("elias.access")
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_FIELDS = "elias.log_fields"
_NOT_LOGGED = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are not logged, because monitoring polls them every few seconds."""


class AccessLogMiddleware:
    """Log, count and time requests; answer unexpected exceptions with 500 and log the traceback."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Container[str]) -> None:
        """Wrap an application; ``paths`` are the path patterns of its routes."""
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
            request_id = secrets.token_hex(8).encode()
        scope[_FIELDS] = {}
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
            # Leave out the message: it may quote a text.
            frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            name = type(error).__name__
            access.error("request %s: %s at\n%s", request_id.decode(), name, frames)
            if not status:
                await error_response(500, INTERNAL_ERROR)(scope, receive, send_with_id)
        seconds = time.perf_counter() - start
        # Log the route's pattern, not the path: there are too many paths.
        path = str(scope["path"])
        route = getattr(scope.get("route"), "path", path if path in self._paths else "other")
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        if route in _NOT_LOGGED and status in (200, 503):
            return
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 2),
            "client": scope["client"][0] if scope.get("client") else None,
            "id": request_id.decode(),
            "pid": os.getpid(),
            **scope[_FIELDS],
        }
        access.info("%s", json.dumps(fields, ensure_ascii=False))


def add_log_fields(scope: Mapping[str, Any], **fields: Any) -> None:
    """Add fields to the log line of a request."""
    scope[_FIELDS].update(fields)
