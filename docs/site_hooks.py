"""Hooks that mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files outside the site by their text."""
    depth = page.file.src_uri.count("/")

    def text_only(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return _LINK.sub(text_only, markdown)


class Examples(griffe.Extension):
    """Show the ``Example:`` section of a docstring as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section to the name that the parser knows."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.M)
