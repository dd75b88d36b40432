"""The examples for Ray and Spark, in local mode, label as ``elias predict`` does."""

import importlib.util
import os
import subprocess
import sys

import pandas as pd
import pytest

from contract.documents import ROOT
from e2e.commands import SOURCE, elias


@pytest.mark.slow
@pytest.mark.parametrize(("library", "example"), [("ray", "ray_batch"), ("pyspark", "spark_batch")])
def test_a_cluster_labels_as_elias_predict_does(library, example, run, corpus_folder, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    lines = (corpus_folder / "raw" / "tst_X.txt").read_text(encoding="utf8").splitlines()
    table = pd.DataFrame({"id": range(len(lines)), "text": lines})
    table.to_parquet(tmp_path / "texts.parquet")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYSPARK_PYTHON": sys.executable}

    program = [sys.executable, ROOT / "examples" / f"{example}.py", run, "texts.parquet", "labels"]
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    files = ("--text", "text", "--keep", "id", "--out", tmp_path / "expected.parquet")
    assert elias("predict", run, tmp_path / "texts.parquet", *files, "--device", "cpu").code == 0
    actual = pd.read_parquet(tmp_path / "labels").sort_values("id")
    expected = pd.read_parquet(tmp_path / "expected.parquet")
    for column in ("labels", "scores"):
        assert list(map(list, actual[column])) == list(map(list, expected[column]))
