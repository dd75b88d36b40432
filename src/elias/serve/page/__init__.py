"""The page at ``/`` and the one at ``/docs``: files of this folder, and nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import Response

from elias.report.page import palette

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI

_NAMES = {"/": "index.html", "/docs": "docs.html"} | {
    f"/page/{name}": name
    for name in (*("page.css", "page.js", "docs.js", "api.js", "dom.js", "graph.js", "panel.js"),)
}
PATHS = frozenset(_NAMES)
"""Where the files are found; none tells anything of a model."""

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # nothing but what this server gives may be loaded, and nothing may frame the page
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(api: FastAPI) -> None:
    """Serve the files, which are read once."""
    for path, name in _NAMES.items():
        content = (files("elias.serve.page") / name).read_bytes()
        if name.endswith(".css"):
            content = palette().encode() + content
        giver = _giver(content, _KINDS[name.rpartition(".")[2]])
        api.add_api_route(path, giver, include_in_schema=False)


def _giver(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return give
