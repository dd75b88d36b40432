"""The demo, on a small generated corpus."""

import json

import pytest

from e2e.commands import elias
from elias.cli import demo as demo_command
from elias.config import EliasConfig

SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "stages.stage1.epochs": 1,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 2,
}


@pytest.fixture(autouse=True)
def small_demo(monkeypatch):
    monkeypatch.setattr(demo_command, "SYNTHETIC", {"n_points": 300, "n_labels": 100})
    monkeypatch.setattr(demo_command, "_config", lambda: EliasConfig().override(SMALL))


def demo(folder, *options):
    return elias("demo", "--synthetic", "--out", folder / "demo", *options)


def shown(result):
    """What is shown whether the model was trained just now or before."""
    lines = result.out.splitlines()
    remaining = [line for line in lines if not line.startswith(("Total time", "  corpus"))]
    return [" ".join(line.split()) for line in remaining]


def test_the_demo_shows_stages_texts_times_and_what_to_type_next(tmp_path):
    result = demo(tmp_path)

    words = ["stage1", "stage2", "P@1", "PSP@5", "R@100", "true", "predicted", "elias predict"]
    assert result.code == 0
    assert all(word in result.out for word in words)
    assert result.out.count("predicted  ") == 5
    assert f"Model saved in {tmp_path / 'demo' / 'model'}" in result.out
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "synthetic-300x100"}


def test_a_second_demo_shows_the_same_without_training(tmp_path):
    first = demo(tmp_path)
    log = (tmp_path / "demo" / "train.log").read_bytes()

    second = demo(tmp_path)

    assert second.code == 0
    assert "is finished; showing its results" in second.err
    assert shown(second) == shown(first)
    assert (tmp_path / "demo" / "train.log").read_bytes() == log


def test_an_unfinished_demo_starts_over(tmp_path):
    first = demo(tmp_path)
    (tmp_path / "demo" / "model").rename(tmp_path / "gone")

    second = demo(tmp_path)

    assert second.code == 0
    assert first.out.splitlines()[:5] == second.out.splitlines()[:5]
    assert (tmp_path / "demo" / "model").is_dir()


def test_a_demo_does_not_replace_another_run(tmp_path, monkeypatch):
    demo(tmp_path)
    monkeypatch.setattr(demo_command, "_config", lambda: EliasConfig(seed=5).override(SMALL))

    refused = demo(tmp_path)
    replaced = demo(tmp_path, "--overwrite")

    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    assert refused.code == 2
    assert "holds a finished run" in refused.err
    assert replaced.code == 0
    assert config["seed"] == 5
