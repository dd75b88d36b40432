"""Build the HTML of the report.

The page is also well-formed XML, so that a test can parse it strictly.
"""

from __future__ import annotations

import math
import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID_ELEMENTS = {"br", "col", "hr", "img", "link", "meta", "wbr"}


class Markup(str):
    """A string of markup, inserted without escaping; all other strings are escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escape a value for use in markup; markup is returned unchanged.

    Characters that XML does not allow become a replacement character.

    >>> print(text("a < b"), text(Markup("<b>bold</b>")))
    a &lt; b <b>bold</b>
    """
    if isinstance(value, Markup):
        return value
    return Markup(escape(_NOT_XML.sub("\ufffd", str(value)), quote=True))


def join(parts: object) -> Markup:
    """Concatenate nested lists of values; None adds nothing."""
    if isinstance(parts, list | tuple):
        return Markup("".join(map(join, parts)))
    return Markup("") if parts is None else text(parts)


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element with its children, which may be lists; None adds nothing.

    Underscores in attribute names become hyphens, and a trailing one is dropped, because
    ``stroke-width`` and ``class`` cannot be Python names. Floats are rounded to two decimals.

    >>> print(element("p", "1 < 2", element("br"), class_="wide", id=None))
    <p class="wide">1 &lt; 2<br/></p>
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_two_decimals(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID_ELEMENTS:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{join(children)}</{name}>")


def _two_decimals(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def page(title: str, header: object, sections: Sequence[Markup]) -> str:
    """Return a complete page that loads nothing: no script, no font, no image."""
    css = palette() + (files("elias.report") / "report.css").read_text(encoding="utf8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(css)),
    )
    body = element("body", element("header", header), element("main", list(sections)))
    root = element("html", head, "\n", body, lang="en", xmlns="http://www.w3.org/1999/xhtml")
    return f"<!DOCTYPE html>\n{root}\n"


def palette() -> str:
    """Return the CSS of the colours, which the server's web page uses too."""
    return (files("elias.report") / "palette.css").read_text(encoding="utf8")


def section(key: str, title: str, *content: object) -> Markup:
    """Return a section under a heading that links can point to."""
    heading = element("h2", title, id=f"{key}-title")
    return element("section", heading, "\n", content, id=key, aria_labelledby=f"{key}-title")


def grid(figures: Sequence[Markup]) -> Markup:
    """Return figures side by side, as many in a row as fit."""
    return element("div", list(figures), class_="figures")


def details(summary: str, *content: object) -> Markup:
    """Return collapsed content that a click on the summary expands."""
    return element("details", element("summary", summary), content)


def note(*content: object) -> Markup:
    """Return a paragraph of less prominent text."""
    return element("p", content, class_="soft")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str | None = None,
    wide: bool = False,
) -> Markup:
    """Return a table whose first column names the rows.

    Args:
        header: Names of the columns.
        rows: Cells of each row; a cell that is a ``td`` element is inserted unchanged.
        caption: Text above the table.
        wide: Wrap long cells.
    """
    body = [
        element("tr", element("th", name, scope="row"), list(map(_cell, cells)), "\n")
        for name, *cells in rows
    ]
    content = element(
        "table",
        None if caption is None else element("caption", caption),
        element("thead", element("tr", [element("th", name, scope="col") for name in header])),
        element("tbody", body),
        class_="wide" if wide else None,
    )
    # tables wider than the screen scroll on their own; tabindex makes that work by keyboard
    return element("div", content, class_="scroll", tabindex=0)


def _cell(value: object) -> Markup:
    if isinstance(value, Markup) and value.startswith("<td"):
        return value
    return element("td", number(value) if isinstance(value, float) else value)


def cards(values: Mapping[str, str]) -> Markup:
    """Return key figures as a row of cards."""
    pairs = [element("div", element("dt", k), element("dd", v)) for k, v in values.items()]
    return element("dl", pairs, class_="cards")


def number(value: float) -> str:
    """Format a number with three significant digits or as a whole number.

    >>> number(1234567.0), number(0.12345), number(float("nan"))
    ('1,234,567', '0.123', '–')
    """
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:,.3g}"


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(3.21), seconds(75.2), seconds(7320)
    ('3.2 s', '1 min 15 s', '2 h 2 min')
    """
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
