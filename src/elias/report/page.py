"""HTML building blocks of the report.

What comes out is well-formed XML too, so that a test can read it strictly.
"""

from __future__ import annotations

import math
import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


def page(title: str, header: object, sections: Sequence[Markup]) -> str:
    """Return a page that needs nothing beside itself: no script, no font, no picture."""
    style = palette() + (files("elias.report") / "report.css").read_text(encoding="utf8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", element("header", header), element("main", list(sections)))
    whole = element("html", head, "\n", body, lang="en", xmlns="http://www.w3.org/1999/xhtml")
    return f"<!DOCTYPE html>\n{whole}\n"


def palette() -> str:
    """Return the colours, which a server's page has too."""
    return (files("elias.report") / "palette.css").read_text(encoding="utf8")


def section(key: str, title: str, *content: object) -> Markup:
    """Return a section with a heading that can be linked to."""
    heading = element("h2", title, id=f"{key}-title")
    return element("section", heading, "\n", list(content), id=key, aria_labelledby=f"{key}-title")


def figure(
    key: str, title: str, plot: Markup, caption: object, numbers: Markup | None = None
) -> Markup:
    """Return a plot with what it says; its numbers can be unfolded."""
    below = element("figcaption", caption, "" if numbers is None else details("Numbers", numbers))
    return element("figure", element("h3", title), plot, below, "\n", id=key)


def grid(figures: Sequence[Markup]) -> Markup:
    """Return figures side by side, as many as there is room for."""
    return element("div", list(figures), class_="figures")


def details(summary: str, *content: object) -> Markup:
    """Return something that shows when its summary is clicked."""
    return element("details", element("summary", summary), list(content))


def paragraph(*content: object, soft: bool = False) -> Markup:
    """Return a paragraph."""
    return element("p", list(content), class_="soft" if soft else None)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str | None = None,
    wide: bool = False,
) -> Markup:
    """Return a table whose first column names the rows; ``wide`` cells hold text that wraps.

    A cell may be an element ``td`` already.
    """
    head = element("tr", [element("th", name, scope="col") for name in header])
    body = [
        element("tr", element("th", name, scope="row"), list(map(_cell, cells)), "\n")
        for name, *cells in rows
    ]
    whole = element(
        "table",
        None if caption is None else element("caption", caption),
        element("thead", head),
        element("tbody", body),
        class_="wide" if wide else None,
    )
    # what is wider than a phone scrolls by itself, and by keyboard too
    return element("div", whole, class_="scroll", tabindex=0)


def _cell(value: object) -> Markup:
    if isinstance(value, Markup) and value.startswith("<td"):
        return value
    return element("td", number(value) if isinstance(value, float) else value)


def best_cells(values: Sequence[float | None], highest: Sequence[float | None]) -> list[Markup]:
    """Return percentages as cells, bold where they are the highest of their column."""
    return [
        element("td", "" if v is None else f"{v:.2f}", class_="best" if v == best else None)
        for v, best in zip(values, highest, strict=True)
    ]


def cards(facts: Mapping[str, str]) -> Markup:
    """Return a few figures to begin with."""
    pairs = [element("div", element("dt", k), element("dd", v)) for k, v in facts.items()]
    return element("dl", pairs, class_="cards")


def number(value: float) -> str:
    """Return a number as people read it.

    >>> number(1234567.0), number(0.12345), number(float("nan"))
    ('1,234,567', '0.123', '–')
    """
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.3g}"


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> percent(0.7516), percent(1.0)
    ('75.2%', '100%')
    """
    return f"{100 * share:.3g}%" if math.isfinite(share) else "–"


def seconds(value: float) -> str:
    """Return a time as people say it.

    >>> seconds(3.21), seconds(75.2), seconds(7320)
    ('3.2 s', '1 min 15 s', '2 h 2 min')
    """
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def lines(*parts: object) -> Markup:
    """Return the parts one below the other."""
    return join([part for one in parts for part in (one, "\n")])
