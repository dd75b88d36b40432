"""How a request fails: a status, and a body that says why in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elias.errors import EliasError
from elias.serve.backend import NotRanked, NotReady
from elias.serve.batching import Overloaded
from elias.serve.schemas import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request


KINDS = {
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
"""The ``error_type`` of a status; names of Text Embeddings Inference where it has one."""

NOT_JSON = "the body is not JSON"
OUR_BUG = "an error of the server's own; its log says more"

_LONGEST = 400
_MEANINGS = {
    401: "No key, or a wrong one",
    404: "There is no such thing",
    408: "The request took too long to arrive",
    413: "Too large",
    422: "Not understood",
    429: "Overloaded; Retry-After says when to come back",
    503: "Not ready, or too late",
}


class Refused(HTTPException):
    """A request that is answered with a failure."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers=dict(headers or {}))


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return how a route may fail, for OpenAPI."""
    return {
        status: {"model": Failure, "description": _MEANINGS[status]} for status in sorted(statuses)
    }


def failure(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer of a request that fails."""
    line = " ".join(message.split())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST - 1]}…"
    line = line.encode("utf8", "replace").decode("utf8")
    body = {"error": line, "error_type": KINDS.get(status, "Backend")}
    return JSONResponse(body, status, headers=dict(headers or {}))


def answer_failures(app: FastAPI) -> None:
    """Have every failure answered in the same shape."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI's for a body that is not even text
        return failure(422, NOT_JSON)
    return failure(error.status_code, str(error.detail), error.headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return failure(422, "; ".join(map(_told, error.errors())))


async def _overloaded(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Overloaded)
    return failure(429, str(error), {"Retry-After": str(error.retry_after)})


async def _not_ready(_: Request, error: Exception) -> JSONResponse:
    return failure(503, str(error), {"Retry-After": "1"})


async def _not_ranked(_: Request, error: Exception) -> JSONResponse:
    return failure(404, str(error))


async def _mistaken(_: Request, error: Exception) -> JSONResponse:
    return failure(422, str(error))


async def _broken(_: Request, error: Exception) -> JSONResponse:
    del error  # raised again once this is sent, and logged then
    return failure(500, OUR_BUG)


_HANDLERS = {
    HTTPException: _refused,
    RequestValidationError: _invalid,
    Overloaded: _overloaded,
    NotReady: _not_ready,
    NotRanked: _not_ranked,
    EliasError: _mistaken,
    Exception: _broken,
}


def _told(error: Mapping[str, Any]) -> str:
    """Return one complaint of pydantic's; the value is left out, for it may be a text."""
    place = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    message = str(error["msg"])
    if error["type"] == "json_invalid":
        return NOT_JSON
    return f"{'.'.join(place)}: {message}" if place else message
