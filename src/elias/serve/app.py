"""The ASGI application with its API routes, pages and middleware."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

import elias
from elias.serve.annif import add_annif_routes
from elias.serve.backend import Backend
from elias.serve.middleware import AccessLogMiddleware, RequestCheckMiddleware
from elias.serve.routes import add_routes
from elias.serve.schemas import HANDLED, handle_exception
from elias.serve.settings import MAX_EXPLAINED, ServeSettings

_DESCRIPTION = (
    "Ranked labels for texts, with explanations. Every error has the form "
    '`{"error", "error_type"}`. If the server requires a key, send it as '
    "`Authorization: Bearer KEY` or `X-API-Key: KEY`."
)
_PAGE_NAMES = ("page.css", "page.js", "docs.js", "api.js", "dom.js", "graph.js", "panel.js")
_PAGES = {"/": "index.html", "/docs": "docs.html"} | {f"/page/{name}": name for name in _PAGE_NAMES}
"""File in the folder ``page`` for each URL path. The files reveal nothing about the model."""
_OPEN_PATHS = frozenset({*_PAGES, "/health", "/ready"})
"""Paths that require no API key, because they reveal nothing about the model."""
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE_HEADERS = {
    # Load nothing from other servers, and do not allow other pages to frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(backend: Backend) -> FastAPI:
    """Return the application that serves a backend."""
    api = FastAPI(
        title="ELIAS",
        version=elias.__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's page loads its script from another server
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the host name of the request
        lifespan=backend.running,
        exception_handlers=dict.fromkeys(HANDLED, handle_exception),
    )
    add_routes(api, backend)
    add_annif_routes(api, backend)
    _add_page_routes(api)
    _add_limits_to_openapi(api, backend.settings)
    paths = frozenset(route.path for route in api.routes if isinstance(route, APIRoute))
    api.add_middleware(RequestCheckMiddleware, backend, _OPEN_PATHS)
    # Add this after the checks, so that it is around them and pages can read their errors, too.
    if backend.settings.allow_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=backend.settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    api.add_middleware(AccessLogMiddleware, backend.metrics, paths)
    return api


def _add_page_routes(api: FastAPI) -> None:
    """Add the pages at ``/`` and ``/docs``. They are static files without external resources."""
    contents = {
        path: (files("elias.serve") / "page" / _PAGES[path]).read_bytes() for path in _PAGES
    }
    palette = files("elias.report") / "palette.css"  # the colours of the report
    contents["/page/page.css"] = palette.read_bytes() + contents["/page/page.css"]

    async def get_file(request: Request) -> Response:
        path = request.scope["route"].path
        media_type = _MEDIA_TYPES[_PAGES[path].rpartition(".")[2]]
        return Response(contents[path], media_type=media_type, headers=_PAGE_HEADERS)

    for path in _PAGES:
        api.add_api_route(path, get_file, include_in_schema=False)


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
            text, texts = inputs["anyOf"]
            texts["maxItems"] = max_inputs
            text["maxLength"] = texts["items"]["maxLength"] = limits.max_text
        if settings.keys:
            tree["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            tree["security"] = [{"key": []}]
        return tree

    api.openapi = openapi  # type: ignore[method-assign]
