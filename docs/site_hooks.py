"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep the words of a link to a file of the repository, which is no part of the site."""
    return _OUTSIDE.sub(r"\1", markdown)


class Examples(griffe.Extension):
    """Has an ``Example:`` of a docstring shown as the code that it is."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section to what the parser knows."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.M)
