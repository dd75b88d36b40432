"""Every example in a docstring runs and prints what it says."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def modules_with_examples():
    paths = sorted((SOURCE / "elias").rglob("*.py"))
    actual = [path for path in paths if ">>> " in path.read_text(encoding="utf8")]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in actual]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)

    assert result.attempted > 0
    assert result.failed == 0
