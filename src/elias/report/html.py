"""Render the template of the report, and build the elements of its SVG plots.

The page is also well-formed XML, so that a test can parse it strictly.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Mapping


_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render(values: Mapping[str, Any], template: str = "report.html.j2") -> str:
    """Render a template as a self-contained page without scripts, fonts or images."""
    environment = Environment(
        loader=PackageLoader("elias", "report"),
        autoescape=True,
        finalize=text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fmt": format, "number": number, "seconds": seconds}
    return environment.get_template(template).render(values)


def text(value: object) -> Markup:
    """Escape a value for use in markup. Markup itself is returned unchanged.

    Characters that XML does not allow are replaced by U+FFFD.

    >>> print(text("a < b"), text(Markup("<b>bold</b>")))
    a &lt; b <b>bold</b>
    """
    return value if isinstance(value, Markup) else escape(_NOT_XML.sub("\ufffd", str(value)))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element with its children as markup.

    Children may be lists. Children and attributes that are None are skipped.

    Underscores in attribute names become hyphens, because ``stroke-width`` cannot be a Python name.
    Floats are rounded to two decimals.

    >>> print(element("text", "1 < 2", None, stroke_width=2.0, opacity=None))
    <text stroke-width="2">1 &lt; 2</text>
    """
    pairs = "".join(
        f' {key.replace("_", "-")}="{text(_two_decimals(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{_join(children)}</{name}>")


def _join(parts: object) -> str:
    if isinstance(parts, list | tuple):
        return "".join(map(_join, parts))
    return "" if parts is None else text(parts)


def _two_decimals(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits, or as a whole number if it is large.

    >>> number(1234567.0), number(0.12345), number(0.12345, 4), number(float("nan"))
    ('1,234,567', '0.123', '0.1235', '–')
    """
    if not math.isfinite(value):
        return "–"
    is_whole = abs(value) >= 1000 or value == int(value)
    return f"{value:,.0f}" if is_whole else f"{value:,.{digits}g}"


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
