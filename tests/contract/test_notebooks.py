"""The notebooks of examples/ run, and show what they print."""

import json
import re
import runpy

import pytest

from contract.documents import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
scripts = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))


def without_numbers(text):
    """Blank numbers, and the spaces around them: another machine rounds differently."""
    return re.sub(r" *-?\d+(?:\.\d+)? *", " # ", text)


def test_there_are_two():
    assert len(NOTEBOOKS) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path, monkeypatch, tmp_path):
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # of the server that one of them starts
    notebook = json.loads(path.read_text(encoding="utf8"))

    outputs = scripts["outputs_of"](notebook)

    stored = scripts["stored_outputs"](notebook)
    assert [*map(without_numbers, outputs)] == [*map(without_numbers, stored)]
