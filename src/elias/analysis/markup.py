"""HTML and SVG as text in which nothing is markup unless it was made so here.

What comes out is well-formed XML too, so that a test can read it strictly.
"""

from __future__ import annotations

import re
from html import escape

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = {"br", "col", "hr", "img", "link", "meta", "wbr"}


class Markup(str):
    """Text that is markup already; any other text is escaped before it becomes a part of some."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a value as text to be shown; markup stays what it is.

    Characters that no XML document may hold show as a replacement character.

    >>> print(text("a < b"), text(Markup("<b>bold</b>")))
    a &lt; b <b>bold</b>
    """
    if isinstance(value, Markup):
        return value
    return Markup(escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True))


def join(parts: object) -> Markup:
    """Return several values, one after the other, as one piece."""
    if isinstance(parts, list | tuple):
        return Markup("".join(map(join, parts)))
    return Markup("") if parts is None else text(parts)


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element with its children, which may be lists; None stands for nothing.

    A trailing underscore of an attribute is dropped and the others become hyphens, since
    ``class`` and ``stroke-width`` are no names in Python.

    >>> print(element("p", "1 < 2", element("br"), class_="wide", id=None))
    <p class="wide">1 &lt; 2<br/></p>
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def _shown(value: object) -> object:
    """Return a coordinate with two decimals at most: more are seen by nobody."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return value
