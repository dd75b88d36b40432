"""The demo, on a small generated corpus."""

import json
import shlex
import shutil

import httpx
import pytest

from e2e.commands import elias
from e2e.servers import Process
from elias.cli import demo as demo_command
from elias.config import EliasConfig

SMALL = {
    "index.kind": "graph",
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "stages.stage1.epochs": 1,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 2,
    "rerank.trees": 2,
}


@pytest.fixture(autouse=True, scope="module")
def small_demo():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_command, "SYNTHETIC", {"n_points": 300, "n_labels": 100})
        patch.setattr(demo_command, "EliasConfig", lambda: EliasConfig().override(SMALL))
        yield


def demo(folder, *options):
    return elias("demo", "--synthetic", "--out", folder / "demo", *options)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a finished demo, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo(folder)


@pytest.fixture
def folder(first, tmp_path):
    """A copy of the folder of the finished demo."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def shown(result):
    """Return the lines that do not depend on whether the model was just trained."""
    lines = result.out.splitlines()
    remaining = [line for line in lines if not line.startswith(("Total time", "  corpus"))]
    return [" ".join(line.split()) for line in remaining]


def test_the_demo_shows_stages_texts_times_and_what_to_type_next(first):
    folder, result = first

    words = ["stage1", "stage2", "P@1", "PSP@5", "R@20", "true", "predicted", "elias predict"]
    assert result.code == 0
    assert all(word in result.out for word in words)
    assert result.out.count("predicted  ") == 5
    assert f"Model saved in {folder / 'demo' / 'model'}" in result.out
    assert {path.name for path in folder.iterdir()} == {"demo", "synthetic-300x100"}


def test_a_second_demo_shows_the_same_without_training(first):
    folder, result = first
    log = (folder / "demo" / "train.log").read_bytes()

    second = demo(folder)

    assert second.code == 0
    assert "is finished; showing its results" in second.err
    assert shown(second) == shown(result)
    assert (folder / "demo" / "train.log").read_bytes() == log


def test_an_unfinished_demo_starts_over(first, folder):
    shutil.rmtree(folder / "demo" / "model")

    second = demo(folder)

    assert second.code == 0
    assert first[1].out.splitlines()[:5] == second.out.splitlines()[:5]
    assert (folder / "demo" / "model").is_dir()


def test_a_demo_does_not_replace_another_run(folder, monkeypatch):
    monkeypatch.setattr(demo_command, "EliasConfig", lambda: EliasConfig(seed=5).override(SMALL))

    refused = demo(folder)
    replaced = demo(folder, "--overwrite")

    config = json.loads((folder / "demo" / "config.json").read_text())
    assert refused.code == 2
    assert "holds a finished run" in refused.err
    assert replaced.code == 0
    assert config["seed"] == 5


def test_the_commands_that_the_demo_suggests_work_as_they_are(first):
    lines = first[1].out.partition("Commands to try next:\n")[2].splitlines()
    tried = []
    for line in lines:
        *echo, command = line.strip().split(" | ")
        program, name, *words = shlex.split(command)
        tried.append((program, name))
        if name == "serve":
            with Process(*words, "--port", "0") as server:
                server.wait_until_ready()
                assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        else:
            texts = " ".join(shlex.split(echo[0])[1:]) if echo else ""
            result = elias(name, *words, stdin=f"{texts}\n".encode())
            assert (result.code, bool(result.out)) == (0, True), result.err

    names = ["predict", "explain", "serve", "evaluate", "report", "info"]
    assert tried == [("elias", name) for name in names]
