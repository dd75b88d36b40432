"""The ASGI application: API routes and pages on a backend, wrapped in middleware."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

import elias
from elias.serve.access_log import AccessLogMiddleware
from elias.serve.backend import Backend
from elias.serve.errors import add_exception_handlers
from elias.serve.metrics import Metrics
from elias.serve.middleware import HeadMiddleware, RequestCheckMiddleware
from elias.serve.page import add_page_routes
from elias.serve.routes import add_routes
from elias.serve.settings import MAX_EXPLAINED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from elias.serve.settings import ServeSettings


_DESCRIPTION = (
    "Ranked labels for texts, with explanations. Every error has the form "
    '`{"error", "error_type"}`. If the server requires a key, send it as '
    "`Authorization: Bearer KEY` or `X-API-Key: KEY`."
)


@dataclass(frozen=True)
class Application:
    """An ASGI application with its backend."""

    asgi: ASGIApp
    backend: Backend
    api: FastAPI


def create_app(settings: ServeSettings, *, load: bool = True) -> Application:
    """Return the application; it loads the model at startup if ``load`` is true."""
    metrics = Metrics(settings.metrics_folder)
    backend = Backend(settings, metrics)

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
        docs_url=None,  # FastAPI's page loads its script from another server
        redoc_url=None,
        lifespan=lifespan,
    )
    add_exception_handlers(api)
    add_routes(api, backend)
    add_page_routes(api)
    _add_limits_to_openapi(api, settings)
    paths = frozenset(route.path for route in api.routes if isinstance(route, APIRoute))
    checked = RequestCheckMiddleware(HeadMiddleware(api), settings, backend.check_queue)
    return Application(AccessLogMiddleware(checked, metrics, paths), backend, api)


def _add_limits_to_openapi(api: FastAPI, settings: ServeSettings) -> None:
    """Add this server's limits, and whether it requires a key, to its OpenAPI file."""
    generate = api.openapi
    limits = settings.limits

    def openapi() -> dict[str, Any]:
        tree = generate()
        for name, max_inputs in (
            ("PredictRequest", limits.max_inputs),
            ("ExplainRequest", min(MAX_EXPLAINED, limits.max_inputs)),
        ):
            inputs = tree["components"]["schemas"][name]["properties"]["inputs"]
            inputs["maxItems"] = max_inputs
            inputs["items"]["maxLength"] = limits.max_text
        if settings.keys:
            tree["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            tree["security"] = [{"key": []}]
        return tree

    api.openapi = openapi  # type: ignore[method-assign]
