"""Hooks that mkdocs calls while it builds the site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook of `examples/`."""
    to_markdown = runpy.run_path(str(_ROOT / "scripts" / "notebooks.py"))["to_markdown"]
    for path in sorted((_ROOT / "examples").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=to_markdown(path)))
    return files


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
