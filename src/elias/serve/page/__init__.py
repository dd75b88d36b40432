"""The pages at ``/`` and ``/docs``: static files in this folder, without external resources."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import Response

from elias.report.html import palette

if TYPE_CHECKING:
    from fastapi import FastAPI

_NAMES = ("page.css", "page.js", "docs.js", "api.js", "dom.js", "graph.js", "panel.js")
_FILES = {"/": "index.html", "/docs": "docs.html"} | {f"/page/{name}": name for name in _NAMES}
PATHS = frozenset(_FILES)
"""URL paths of the files. The files contain no information about the model."""

_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # Load nothing from other servers, and do not allow other pages to frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page_routes(api: FastAPI) -> None:
    """Add a route for each file; read each file only once."""
    for path, name in _FILES.items():
        content = (files("elias.serve.page") / name).read_bytes()
        if name.endswith(".css"):
            content = palette().encode() + content
        _add_file(api, path, content, _MEDIA_TYPES[name.rpartition(".")[2]])


def _add_file(api: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def get_file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    api.add_api_route(path, get_file, include_in_schema=False)
