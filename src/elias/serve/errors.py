"""Error responses: an HTTP status, and a JSON body with a one-line message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elias.errors import EliasError
from elias.serve.schemas import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request


ERROR_TYPES = {
    401: "Unauthorized",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "Timeout",
    413: "Validation",
    422: "Validation",
    429: "Overloaded",
    500: "Backend",
    503: "Unhealthy",
}
"""The ``error_type`` of each HTTP status; uses the names of Text Embeddings Inference if any."""

NOT_JSON = "the body is not JSON"
INTERNAL_ERROR = "internal error; the server's log has the details"

_MAX_LENGTH = 400
_DESCRIPTIONS = {
    401: "Missing or wrong key",
    404: "Not found",
    408: "The request took too long to arrive",
    413: "Too large",
    422: "Invalid request",
    429: "Overloaded; retry after the seconds in Retry-After",
    503: "Not ready, or too late",
}


class RequestError(HTTPException):
    """A request that cannot be answered: status, message and headers of the response."""


def error_schemas(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries for the errors of a route."""
    return {
        status: {"model": Failure, "description": _DESCRIPTIONS[status]}
        for status in sorted(statuses)
    }


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response for an error; the message becomes one line of limited length."""
    line = " ".join(message.split())
    if len(line) > _MAX_LENGTH:
        line = f"{line[: _MAX_LENGTH - 1]}…"
    line = line.encode("utf8", "replace").decode("utf8")
    body = {"error": line, "error_type": ERROR_TYPES.get(status, "Backend")}
    return JSONResponse(body, status, headers=dict(headers or {}))


def add_exception_handlers(api: FastAPI) -> None:
    """Return all errors of an application in the same JSON format."""
    for kind in (HTTPException, RequestValidationError, EliasError, Exception):
        api.add_exception_handler(kind, _handle_exception)


async def _handle_exception(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        if error.status_code == 400:  # from FastAPI, for a body that is not even text
            return error_response(422, NOT_JSON)
        return error_response(error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return error_response(422, "; ".join(map(_describe, error.errors())))
    if isinstance(error, EliasError):
        return error_response(422, str(error))
    return error_response(500, INTERNAL_ERROR)  # raised again and logged after the response


def _describe(error: Mapping[str, Any]) -> str:
    """Describe a validation error without the invalid value, which may be a private text."""
    if error["type"] == "json_invalid":
        return NOT_JSON
    field = ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path"))
    return f"{field}: {error['msg']}" if field else str(error["msg"])
