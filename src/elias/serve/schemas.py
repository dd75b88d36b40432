"""Request and response bodies of the routes, as the OpenAPI file shows them, and error responses.

An error response has an HTTP status, and a JSON body with a message of one line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from elias.errors import EliasError, did_you_mean
from elias.inference.explain import ExplainedLabel
from elias.serve.settings import MAX_LABELS

_LONGEST_NAME = 50  # characters of an unknown name that a message shows


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return an unknown name in quotes, with the most similar known name, or all known names."""
    name = name[:_LONGEST_NAME]
    return repr(name) + (did_you_mean(name, known) or f"; use one of: {', '.join(known)}")


# Python's JSON parser accepts NaN and reads 1e999 as infinity, but a request must not have them.
class _Request(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, body: Any) -> Any:
        """Report the first unknown key only, because there may be thousands."""
        for key in body if isinstance(body, dict) else ():
            if key not in cls.model_fields:
                described = {"key": suggest_name(key, cls.model_fields)}
                raise PydanticCustomError("unknown_key", "unknown key {key}", described)
        return body


def _whole(value: Any) -> Any:
    """Convert a whole float to an int, because 5.0 and 5 are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Must follow the bounds in an annotation. Otherwise the OpenAPI file has no bounds.
Whole = BeforeValidator(_whole)
Target = Annotated[
    str, Field(pattern=r"^(f1|per-label|(precision|recall)=(0(\.[0-9]{1,9})?|1(\.0{1,9})?))$")
]
_OneOrMore = str | Annotated[list[str], Field(min_length=1)]
Inputs = Annotated[
    list[str],
    FailFast(),
    Field(min_length=1, description="A list of texts, or a single text; the answer is a list."),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=_OneOrMore,
    ),
]
TopK = Annotated[int, Field(ge=1, le=MAX_LABELS, description="Maximum labels per text."), Whole]


class PredictRequest(
    _Request,
    json_schema_extra={
        "examples": [{"inputs": ["cod quotas in the north sea"], "top_k": 5, "threshold": 0.3}]
    },
):
    """Texts to label."""

    inputs: Inputs
    top_k: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_LABELS,
            description="Maximum labels per text. The default is 5, or 100 with a threshold.",
        ),
        Whole,
    ] = None
    threshold: Annotated[
        float | Target | None,
        Field(
            description="Minimum probability of a label, or minimum score if the model has no "
            "probabilities. Alternatively, the target on held-out points for which a threshold "
            "is chosen: f1, per-label, precision=0.8 or recall=0.6."
        ),
    ] = None


class ExplainRequest(
    _Request,
    json_schema_extra={"examples": [{"inputs": ["cod quotas in the north sea"], "paths": 3}]},
):
    """Texts whose labels to explain."""

    inputs: Inputs
    top_k: TopK = 5
    paths: Annotated[int, Field(ge=1, le=20, description="Maximum clusters per label."), Whole] = 3
    label: Annotated[
        int | None, Field(ge=0, description="Explain only the label with this id."), Whole
    ] = None
    words: Annotated[
        bool,
        Field(
            description="Also measure the effect of each word, by leaving it out; one text only."
        ),
    ] = False


class _Response(BaseModel, extra="forbid"): ...


class _Label(_Response):
    id: int
    label: str
    uri: Annotated[
        str | None, Field(description="Id or URI of the label in its vocabulary, if known.")
    ] = None


class ScoredLabel(_Label):
    """A label and its score."""

    score: float
    probability: Annotated[
        float | None, Field(description="Probability that the label is relevant, if known.")
    ] = None


class NamedCluster(_Response):
    """A cluster, described by its strongest labels."""

    id: int
    labels: list[str]


class Why(_Response):
    """The labels of a text, and the clusters that lead to them in one ensemble member."""

    member: int
    labels: list[ExplainedLabel]
    clusters: list[NamedCluster]


class LabelHit(_Label):
    """A label and its number of training points, if known."""

    frequency: int | None


class LabelList(_Response):
    """Labels found by name."""

    labels: list[LabelHit]


class LabelEdge(_Label):
    """An edge from a cluster to a label."""

    edge_score: float


class ClusterEdge(NamedCluster):
    """An edge from a label to a cluster, which is described by its strongest labels."""

    edge_score: float


class LabelPage(LabelHit):
    """A label and its clusters, strongest edge first."""

    synonyms: list[str]
    description: str | None
    member: int
    n_clusters: int
    clusters: list[ClusterEdge]


class ClusterPage(_Response):
    """A cluster and its labels, strongest edge first."""

    id: int
    member: int
    n_labels: int
    labels: list[LabelEdge]


class Decisions(_Response):
    """Precision and recall at each threshold, on held-out points."""

    thresholds: list[float]
    precision: list[float]
    recall: list[float]
    f1: Annotated[float, Field(description="Threshold with the best F1.")]


class ServedLimits(_Response):
    """Limits of a request."""

    max_inputs: int
    max_text: int
    max_body: int
    max_top_k: int


class Info(_Response):
    """The served model and its limits."""

    version: str
    model: str
    loaded_at: float
    n_labels: int
    n_clusters: int
    n_members: int
    encoder: str
    components: list[str]
    metrics: dict[str, float]
    decisions: Decisions | None
    limits: ServedLimits


class Examples(_Response):
    """Example texts."""

    examples: list[str]


class Status(_Response):
    """State of the server."""

    status: Literal["ok", "ready"]


class Failure(_Response):
    """An error."""

    error: str
    error_type: str


NOT_JSON = "the body is not valid JSON; send JSON in UTF-8"

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

The names are those of Text Embeddings Inference, if it has a name for the error.
"""

HANDLED = (HTTPException, RequestValidationError, EliasError)
"""Exceptions that `handle_exception` converts. Any other exception is an internal error (500)."""


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
