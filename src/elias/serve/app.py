"""The application: routes over a backend, behind the guard and the access log."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

import elias
from elias.inference.predictor import TOP_K
from elias.serve.access_log import Observed, note
from elias.serve.backend import Backend, ExplainQuestion, PredictQuestion
from elias.serve.errors import Refused, answer_failures, documented
from elias.serve.metrics import CONTENT_TYPE, Measures
from elias.serve.middleware import Guard
from elias.serve.page import page_routes
from elias.serve.routes import browsing_routes
from elias.serve.schemas import (
    Decisions,
    Examples,
    ExplainRequest,
    Info,
    PredictRequest,
    ScoredLabel,
    ServedLimits,
    Status,
    Why,
)
from elias.serve.settings import MOST_EXPLAINED, MOST_LABELS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elias.rerank.probabilities import Probabilities
    from elias.serve.backend import Answer, Question
    from elias.serve.settings import Limits, ServeSettings


_DESCRIPTION = (
    "Ranked labels for texts, and why they were found. Every failure is "
    '`{"error", "error_type"}`. Where the server has a key, send it as '
    "`Authorization: Bearer KEY` or `X-API-Key: KEY`."
)


@dataclass(frozen=True)
class Application:
    """An ASGI application, and the backend behind it."""

    asgi: ASGIApp
    backend: Backend
    api: FastAPI


class _Headed:
    """Answers HEAD like GET without a body, on every route, and none of them in the specification.

    FastAPI does not, and probes of uptime monitors and load balancers often ask so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        asked = {**scope, "method": "GET"}  # a copy: the server below must know it is HEAD
        try:
            await self._app(asked, receive, without_body)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # for the log


def create_app(settings: ServeSettings, *, load: bool = True) -> Application:
    """Return the application; the model is read when it starts, unless ``load`` is off."""
    measures = Measures(settings.metrics_folder)
    backend = Backend(settings, measures)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        backend.start()
        if load:
            await backend.load()
        yield
        await backend.close()

    api = FastAPI(
        title="ELIAS",
        version=elias.__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's own page takes its script from another server
        redoc_url=None,
        lifespan=lifespan,
    )
    answer_failures(api)
    _model_routes(api, backend)
    _state_routes(api, backend)
    browsing_routes(api, backend)
    page_routes(api)
    _tell_limits(api, settings)
    paths = frozenset(route.path for route in api.routes if isinstance(route, APIRoute))
    guarded = Guard(_Headed(api), settings, backend.full_for)
    return Application(Observed(guarded, measures, paths), backend, api)


def _model_routes(api: FastAPI, backend: Backend) -> None:
    limits = backend.settings.limits
    failures = documented(401, 408, 413, 422, 429, 503)

    @api.post(
        "/predict",
        responses=failures,
        response_model_exclude_none=True,
        tags=["labels of texts"],
    )
    async def predict(asked: PredictRequest, request: Request) -> list[list[ScoredLabel]]:
        """Rank the labels that fit each text, best first."""
        _check(asked.inputs, limits, limits.max_inputs)
        _note_texts(request, asked.inputs, backend.settings)
        usual = TOP_K if asked.threshold is None else MOST_LABELS
        question = PredictQuestion(asked.inputs, asked.top_k or usual, asked.threshold)
        return await _answered(backend, question, request)

    @api.post("/explain", responses=failures | documented(404), tags=["labels of texts"])
    async def explain(asked: ExplainRequest, request: Request) -> list[Why]:
        """Tell why each text gets its labels: the clusters on the way, the factors of a score."""
        _check(asked.inputs, limits, min(MOST_EXPLAINED, limits.max_inputs))
        _note_texts(request, asked.inputs, backend.settings)
        if asked.label is not None and asked.label >= backend.served.model.n_labels:
            raise Refused(404, f"there is no label {asked.label}")
        question = ExplainQuestion(asked.inputs, asked.top_k, asked.paths, asked.label)
        return await _answered(backend, question, request)


def _check(texts: Sequence[str], limits: Limits, most: int) -> None:
    if len(texts) > most:
        raise Refused(413, f"inputs: {len(texts)} texts, where {most} are the most at a time")
    for i, text in enumerate(texts):
        if len(text) > limits.max_text:
            raise Refused(
                413,
                f"inputs.{i}: {len(text):,} characters, where {limits.max_text:,} are the most; "
                "shorten the text, its beginning says most",
            )


def _note_texts(request: Request, texts: Sequence[str], settings: ServeSettings) -> None:
    note(request.scope, inputs=len(texts), characters=sum(map(len, texts)))
    if settings.log_texts:
        note(request.scope, texts=list(texts))


async def _answered(backend: Backend, question: Question, request: Request) -> Answer:
    """Wait for the answer, but no longer than a request may take or its client waits."""
    asking = asyncio.ensure_future(backend.ask(question))
    gone = asyncio.ensure_future(_disconnected(request))
    timeout = backend.settings.limits.timeout
    try:
        await asyncio.wait({asking, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        if gone.done():
            raise Refused(408, "the client has gone")  # for the log: nobody reads it
        retry = {"Retry-After": str(backend.retry_after)}
        raise Refused(503, f"no answer within {timeout:g} s; try again later", retry)
    finally:
        asking.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _state_routes(api: FastAPI, backend: Backend) -> None:
    @api.get("/health", responses=documented(503), tags=["state"])
    async def health() -> Status:
        """Say that the process is alive, and that no workers beside it keep dying."""
        ailment = backend.settings.ailment()
        if ailment is not None:
            raise Refused(503, ailment, {"Retry-After": "30"})
        return Status(status="ok")

    @api.get("/ready", responses=documented(503), tags=["state"])
    async def ready() -> Status:
        """Say whether requests will be answered: the model is read, and nothing shuts down."""
        if not backend.is_ready:
            raise Refused(503, "the model is still being read", {"Retry-After": "1"})
        return Status(status="ready")

    @api.get("/info", responses=documented(401, 503), tags=["state"])
    async def info() -> Info:
        """Tell what is served, and how much may be asked at a time."""
        return _info(backend)

    @api.get("/examples", responses=documented(401, 503), tags=["state"])
    async def examples() -> Examples:
        """Return a few texts to try."""
        return Examples(examples=backend.served.examples)

    @api.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **documented(401)},
        tags=["state"],
    )
    def metrics() -> Response:
        """Return counts and times for Prometheus, those of all workers together."""
        return Response(backend.measures.exposition(), media_type=CONTENT_TYPE)


def _info(backend: Backend) -> Info:
    served, limits = backend.served, backend.settings.limits
    model = served.model
    metrics = model.metadata.get("metrics", {})
    last: dict[str, Any] = list(metrics.values())[-1] if metrics else {}
    measured = last.get("test") or last.get("validation") or {}
    return Info(
        version=elias.__version__,
        model=backend.settings.name,
        loaded_at=served.loaded_at,
        n_labels=model.n_labels,
        n_clusters=model.model.graph.n_clusters,
        n_members=len(served.members),
        encoder=model.config.encoder.kind,
        components=list(model.components),
        metrics={name: value for name, value in measured.items() if value is not None},
        decisions=_decisions(model.probabilities),
        limits=ServedLimits(
            max_inputs=limits.max_inputs,
            max_text=limits.max_text,
            max_body=limits.max_body,
            max_top_k=MOST_LABELS,
        ),
    )


def _decisions(probabilities: Probabilities | None) -> Decisions | None:
    if probabilities is None:
        return None
    return Decisions(
        thresholds=probabilities.thresholds.tolist(),
        precision=probabilities.precision.round(4).tolist(),
        recall=probabilities.recall.round(4).tolist(),
        f1=probabilities.threshold("f1"),
    )


def _tell_limits(api: FastAPI, settings: ServeSettings) -> None:
    """Have the specification say what this server's limits are, and whether it has a key."""
    made = api.openapi
    limits = settings.limits

    def openapi() -> dict[str, Any]:
        tree = made()
        schemas = tree["components"]["schemas"]
        for name, most in (
            ("PredictRequest", limits.max_inputs),
            ("ExplainRequest", min(MOST_EXPLAINED, limits.max_inputs)),
        ):
            inputs = schemas[name]["properties"]["inputs"]
            inputs["maxItems"] = most
            inputs["items"]["maxLength"] = limits.max_text
        if settings.keys:
            tree["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            tree["security"] = [{"key": []}]
        return tree

    api.openapi = openapi  # type: ignore[method-assign]
