"""HTTP connections with limits that uvicorn does not have.

The limits cover the time and the size of the headers, the number of connections, and clients that
do not read their responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from elias.serve.prometheus import ServerMetrics
from elias.serve.schemas import raw_response
from elias.serve.settings import MAX_HEADER_BYTES, Limits

logger = logging.getLogger(__name__)

_RESERVED_FILES = 64
"""Number of file descriptors that are reserved for the model, the log and the metrics."""
_LOG_SECONDS = 1.0


class Connections:
    """The limits of a worker's connections, and the connections that wait for a request."""

    def __init__(self, limits: Limits, metrics: ServerMetrics) -> None:
        self.timeout = limits.timeout
        self.max_open = limits.max_connections
        with suppress(ImportError):  # Windows has no such limit
            import resource

            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self.max_open = min(self.max_open, max(1, files - _RESERVED_FILES))
        self.waiting: dict[LimitedProtocol, None] = {}
        self._metrics = metrics
        self._closed: Counter[str] = Counter()

    def count(self, status: int, reason: str) -> None:
        """Count a connection that is closed by a limit. Log at most one line per second."""
        self._metrics.requests.labels("other", str(status)).inc()
        if not self._closed:
            asyncio.get_running_loop().call_later(_LOG_SECONDS, self._log)
        self._closed[reason] += 1

    def _log(self) -> None:
        for reason, count in self._closed.items():
            logger.warning("closed %d connections: %s", count, reason)
        self._closed.clear()


class LimitedProtocol(HttpToolsProtocol):
    """The HTTP protocol of uvicorn, with limits. A connection that exceeds a limit is closed.

    A connection waits until the headers of a request are complete, and again after the response. If
    it waits longer than the timeout, it is closed. If there are too many connections, the one that
    has waited longest is closed, so that idle connections cannot block others.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = connections
        self._timer: asyncio.TimerHandle | None = None
        self._n_pending = 0
        """Number of bytes received since the last complete headers or part of a body."""
        self._n_unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close another if there are too many."""
        super().connection_made(transport)
        self._start_waiting()
        if len(self.connections) > self._limits.max_open:
            oldest = next(iter(self._limits.waiting))  # this connection if all others are in use
            oldest._close(503, f"more than {self._limits.max_open} are open")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for requests of a closed connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and close the connection if the headers are too large."""
        self._n_pending += len(data)
        super().data_received(data)
        if self._n_pending > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._close(431, f"headers larger than {MAX_HEADER_BYTES:,} bytes")

    def send_400_response(self, msg: str) -> None:
        """Reject a request that is not HTTP."""
        self._limits.count(400, "a request is not HTTP")
        super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._n_pending = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a part of the request's body."""
        self._n_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of the request's body."""
        self._n_pending = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start waiting for the next request, unless it has already arrived."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._n_unsent = self.transport.get_write_buffer_size()
            self._start_waiting()

    def shutdown(self) -> None:
        """Close the connection if it has no request. A new connection gets status 503 first."""
        if self.cycle is None:
            self.transport.write(  # type: ignore[unreachable]
                raw_response(503, "the server is shutting down")
            )
        super().shutdown()

    def _start_waiting(self) -> None:
        self._stop_waiting()
        self._limits.waiting[self] = None
        self._timer = self.loop.call_later(self._limits.timeout, self._on_timeout)

    def _stop_waiting(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        n_unsent = self.transport.get_write_buffer_size()
        if 0 < n_unsent < self._n_unsent:  # a slow client, which still reads
            self._n_unsent = n_unsent
            self._start_waiting()
        elif n_unsent:
            self._close(408, f"an answer was not read for {self._limits.timeout:g} s")
        elif self._n_pending:
            self._close(408, f"headers did not arrive within {self._limits.timeout:g} s")
        else:
            self.transport.close()

    def _close(self, status: int, reason: str) -> None:
        """Close the connection. If part of a request has arrived, send an error response first."""
        self._limits.count(status, reason)
        self._stop_waiting()
        if self.cycle is None or (self.cycle.response_complete and self._n_pending):
            self.transport.write(raw_response(status, f"the connection is closed: {reason}"))
            self.transport.close()
        else:
            self.transport.abort()
