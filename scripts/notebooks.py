"""Run the notebooks of `examples/` and store their outputs in them.

    python scripts/notebooks.py [NOTEBOOK ...]

The code cells are plain Python, so Jupyter is not needed to run them. The tests run them with
`outputs_of` and compare the outputs, all but the numbers. The site shows them with `to_markdown`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def outputs_of(notebook: dict[str, Any]) -> list[str]:
    """Run the code cells in order. Return what each prints, and the value of its last line.

    Files are written to a temporary folder, which becomes the current one meanwhile.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            for cell in _code_cells(notebook):
                outputs.append(_run("".join(cell["source"]), names))
        finally:
            os.chdir(before)
    return outputs


def stored_outputs(notebook: dict[str, Any]) -> list[str]:
    """Return the outputs in a notebook, one text for each code cell."""
    return [
        "".join(line for output in cell["outputs"] for line in output["text"])
        for cell in _code_cells(notebook)
    ]


def to_markdown(path: Path) -> str:
    """Return a notebook as a page."""
    parts = [f"Notebook: `examples/{path.name}`"]
    for cell in json.loads(path.read_text(encoding="utf8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell["outputs"]]
    parts[:2] = parts[1::-1]  # the title first
    return "\n\n".join(parts) + "\n"


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run(source: str, names: dict[str, Any]) -> str:
    tree = ast.parse(source)
    last = tree.body[-1]
    is_value = isinstance(last, ast.Expr)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(tree.body[: -1 if is_value else None], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    return printed.getvalue()


def main() -> None:
    """Run the notebooks that are named, or all, and write their outputs."""
    for path in map(Path, sys.argv[1:] or sorted(EXAMPLES.glob("*.ipynb"))):
        notebook = json.loads(path.read_text(encoding="utf8"))
        for number, (cell, text) in enumerate(
            zip(_code_cells(notebook), outputs_of(notebook), strict=True), start=1
        ):
            lines = text.splitlines(keepends=True)
            output = {"name": "stdout", "output_type": "stream", "text": lines}
            cell.update(execution_count=number, outputs=[output] if lines else [])
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf8", newline="\n")


if __name__ == "__main__":
    main()
