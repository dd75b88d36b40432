"""Error responses, which have an HTTP status and a JSON body with a one-line message."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elias.errors import EliasError
from elias.serve.schemas import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Request


NOT_JSON = "the body is not JSON"

_MAX_LENGTH = 400
_ERRORS = {
    401: ("Unauthorized", "Missing or invalid API key"),
    403: ("Forbidden", "Sent by a web page of another host"),
    404: ("NotFound", "Not found"),
    405: ("MethodNotAllowed", "Method not allowed"),
    408: ("Timeout", "The request did not arrive within the timeout"),
    413: ("Validation", "Request too large"),
    421: ("Misdirected", "Unknown host name"),
    422: ("Validation", "Invalid request"),
    429: ("Overloaded", "Overloaded; retry after the seconds in Retry-After"),
    431: ("Validation", "Headers too large"),
    500: ("Backend", "Internal error"),
    503: ("Unhealthy", "Not ready, or no result within the timeout"),
}
"""The ``error_type`` and the description of each HTTP status.

The names are those of Text Embeddings Inference, where it has one.
"""

HANDLED = (HTTPException, RequestValidationError, EliasError)
"""Exceptions that `handle_exception` converts. Any other becomes an internal error (500)."""


class RequestError(HTTPException):
    """An error response to a request, with a status, a message and headers."""


def error_schemas(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries for the errors of a route."""
    return {status: {"model": Failure, "description": _ERRORS[status][1]} for status in statuses}


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error response with a message of one line. A long message is shortened."""
    line = " ".join(message.split())
    if len(line) > _MAX_LENGTH:
        line = f"{line[: _MAX_LENGTH - 1]}…"
    line = line.encode("utf8", "replace").decode("utf8")
    body = {"error": line, "error_type": _ERRORS.get(status, _ERRORS[500])[0]}
    return JSONResponse(body, status, headers)


def raw_response(status: int, message: str) -> bytes:
    """Return an error response as bytes, to send before a connection is closed."""
    response = error_response(status, message, {"Connection": "close"})
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return line + headers + b"\r\n" + bytes(response.body)


async def handle_exception(_: Request, error: Exception) -> JSONResponse:
    """Return the error response for an exception whose type is in `HANDLED`."""
    if isinstance(error, RequestValidationError):
        return error_response(422, "; ".join(map(_describe, error.errors())))
    if not isinstance(error, HTTPException):
        return error_response(422, str(error))
    if error.status_code == 400:  # raised by FastAPI for a body that is not text
        return error_response(422, NOT_JSON)
    return error_response(error.status_code, str(error.detail), error.headers)


def _describe(error: Mapping[str, Any]) -> str:
    """Describe a validation error. Leave out the invalid value, which may be a private text."""
    if error["type"] == "json_invalid":
        return NOT_JSON
    if isinstance(error["input"], bytes):  # FastAPI parses JSON only if the header names it
        return "the body is not sent as JSON; send the header content-type: application/json"
    field = ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path"))
    return f"{field}: {error['msg']}" if field else str(error["msg"])
