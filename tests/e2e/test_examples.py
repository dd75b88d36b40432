"""The programs in examples/ run as they are. `test_clusters` runs those for clusters."""

import runpy

import pytest

from contract.documents import ROOT

EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {*(ROOT / "examples").glob("*_batch.py")})


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(example), run_name="__main__")

    assert capsys.readouterr().out
