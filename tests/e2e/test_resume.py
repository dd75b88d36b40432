"""A run that is stopped, killed or damaged goes on and ends where it would have ended."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from e2e.commands import SOURCE, elias, start_elias
from e2e.crash_worker import CONFIG, CORPUS, call_before
from elias import Elias, EliasConfig, train
from elias.data.synthetic import synthetic_corpus, write_synthetic
from elias.errors import Interrupted, ModelError, RunError

STEP = "elias.training.optimizer:Optimizer.step"
SMALL = EliasConfig().override(CONFIG | {"checkpoint.minutes": 10.0})
EVERY_LABEL = SMALL.override({"stages.stage1.score_all": True, "eval.drop_unhelpful": True})
ENSEMBLE = SMALL.override({"ensemble.members": 2, "stages.stage1.epochs": 1})
ALL = EliasConfig().override(
    {key: value for key, value in CONFIG.items() if not key.startswith("stages")}
    | {"index.kind": "all", "stages.one-vs-all.epochs": 3, "stages.one-vs-all.batch_size": 64}
    | {"stages.one-vs-all.label_share": 0.5}
)


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(**CORPUS)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run of a configuration."""
    made = {}

    def make(config):
        if config not in made:
            made[config] = tmp_path_factory.mktemp("finished") / "run"
            train(corpus, config, out=made[config], device="cpu")
        return made[config]

    return make


def without_times(tree):
    if isinstance(tree, dict):
        timeless = {k: v for k, v in tree.items() if k not in ("seconds", "timings")}
        return {key: without_times(value) for key, value in timeless.items()}
    return [without_times(item) for item in tree] if isinstance(tree, list) else tree


def content(run):
    """All that a run is, but for what things took."""
    actual = {}
    for path in run.rglob("*"):
        if path.is_dir() or path.name == "train.log":
            continue
        name = path.relative_to(run).as_posix()
        if path.name == "metrics.jsonl":
            actual[name] = [
                without_times(json.loads(line)) for line in path.read_text().splitlines()
            ]
        elif path.name == "config.json":
            tree = without_times(json.loads(path.read_text()))
            tree.pop("checkpoint", None)
            tree.pop("sha256", None)  # it depends on the timings
            tree.get("config", {}).pop("checkpoint", None)
            for name_of_file in list(tree.get("files", {})):
                if name_of_file.endswith("config.json"):  # its checksum depends on the timings
                    del tree["files"][name_of_file]
            actual[name] = tree
        else:
            actual[name] = path.read_bytes()
    return actual


def stop(config, corpus, out, step, number=signal.SIGTERM, **options):
    """Train until a signal comes in a step; return what is said."""
    with pytest.MonkeyPatch.context() as patch:
        from elias.training.optimizer import Optimizer

        patch.setattr(Optimizer, "step", Optimizer.step)  # taken back with the patch
        call_before(f"{STEP}:{step}", lambda: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted) as caught:
            train(corpus, config, out=out, device="cpu", **options)
    assert caught.value.signal_number == number
    return str(caught.value)


@pytest.fixture(scope="module")
def stopped_run(corpus, tmp_path_factory):
    """A run stopped twice: in stage 2 it has two checkpoints."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    stop(SMALL, corpus, run, 12)
    stop(SMALL, corpus, run, 2)
    return run


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of the stopped run, to be resumed or damaged."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


# bit for bit


@pytest.mark.parametrize(
    ("config", "steps", "message"),
    [
        (SMALL, [1], "stage1 epoch 1 step 1"),
        (SMALL, [5], "stage1 epoch 1 step 5"),  # the last of an epoch, not yet validated
        (SMALL, [8], "stage1 epoch 2 step 3"),
        (SMALL, [12], "stage2 epoch 1 step 3"),  # at the next update of the index (`index_every`)
        (SMALL, [18, 2, 1], "stage2 epoch 3 step 5"),  # the weights are averaged; three stops
        (ALL, [7], "one-vs-all epoch 2 step 2"),
        (EVERY_LABEL, [7], "stage1 epoch 2 step 2"),
        (EVERY_LABEL, [12], "stage2 epoch 1 step 3"),
        (ENSEMBLE, [9, 24], "stage2 epoch 3 step 2"),  # in the first member, then in the second
    ],
    ids=[
        "first",
        "end of epoch",
        "stage1",
        "window",
        "average",
        "all",
        "every",
        "graph",
        "ensemble",
    ],
)
def test_a_resumed_run_gives_the_model_of_an_uninterrupted_one(
    corpus, finished, tmp_path, caplog, config, steps, message
):
    stops = [stop(config, corpus, tmp_path / "run", step) for step in steps]

    with caplog.at_level(logging.INFO):
        train(corpus, config, out=tmp_path / "run", device="cpu")

    assert stops[-1] == f"stopped after {message}"
    assert f"resumed {message}" in caplog.text
    assert content(tmp_path / "run") == content(finished(config))


def test_a_finished_member_is_not_trained_again(corpus, tmp_path, monkeypatch):
    stop(ENSEMBLE, corpus, tmp_path / "run", 25)
    stages = []
    from elias.training.stage import StageLoop

    real = StageLoop.run
    monkeypatch.setattr(
        StageLoop, "run", lambda self: (stages.append(self.config.ensemble), real(self))[1]
    )

    train(corpus, ENSEMBLE, out=tmp_path / "run", device="cpu")

    assert {ensemble.first_member for ensemble in stages} == {1}


def test_checkpoints_do_not_change_the_run(corpus, finished, tmp_path):
    often = SMALL.override({"checkpoint.minutes": 1e-9})

    train(corpus, often, out=tmp_path / "often", device="cpu")
    train(corpus, SMALL.override({"checkpoint.minutes": 0}), out=tmp_path / "none", device="cpu")

    assert content(tmp_path / "often") == content(finished(SMALL))
    assert content(tmp_path / "none") == content(finished(SMALL))


def test_the_log_has_both_parts_of_a_resumed_run(stopped, corpus):
    train(corpus, SMALL, out=stopped, device="cpu")

    log = (stopped / "train.log").read_text()
    assert log.index("stage1 epoch 1: loss") < log.index("resumed stage2 epoch 2 step 1")


# what is refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": 4}, r"another configuration \(seed is 4 instead of 0\)"),
        ({"stages.stage2.epochs": 9}, r"stages.stage2.epochs is 9 instead of 3"),
    ],
)
def test_another_configuration_is_refused_and_the_difference_named(
    stopped, corpus, changes, problem
):
    before = content(stopped)

    with pytest.raises(RunError, match=problem):
        train(corpus, SMALL.override(changes), out=stopped, device="cpu")

    assert content(stopped) == before


def test_another_corpus_is_refused(stopped):
    other = synthetic_corpus(**CORPUS | {"seed": 4})

    with pytest.raises(RunError, match="another corpus"):
        train(other, SMALL, out=stopped, device="cpu")

    assert list((stopped / "checkpoints").iterdir())


def test_how_often_checkpoints_are_written_may_change(stopped, corpus, finished):
    train(corpus, SMALL.override({"checkpoint.minutes": 1}), out=stopped, device="cpu")

    assert content(stopped) == content(finished(SMALL))


def test_overwrite_starts_over(stopped, corpus, finished, caplog):
    with caplog.at_level(logging.INFO):
        train(corpus, SMALL, out=stopped, device="cpu", overwrite=True)

    assert "resumed" not in caplog.text
    assert content(stopped) == content(finished(SMALL))


def test_a_run_that_replaces_another_resumes_without_overwrite(corpus, finished, tmp_path):
    out, other = tmp_path / "run", SMALL.override({"seed": 1})
    shutil.copytree(finished(SMALL), out)

    stop(other, corpus, out, 7, overwrite=True)
    aside = (out / ".replaced" / "model").is_dir()
    train(corpus, other, out=out, device="cpu")

    assert aside
    assert not (out / ".replaced").exists()
    assert content(out) == content(finished(other))


def test_a_finished_run_is_restored_if_its_replacement_is_abandoned(corpus, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished(SMALL), out)

    stop(SMALL.override({"seed": 1}), corpus, out, 7, overwrite=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elias.training.initialization.build_encoder", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(corpus, SMALL, out=out, device="cpu", overwrite=True)

    assert content(out) == content(finished(SMALL))


def test_a_run_resumes_only_with_the_same_initial_model(corpus, finished, tmp_path):
    start = Elias.from_pretrained(finished(SMALL), device="cpu")
    other = Elias.from_pretrained(finished(SMALL.override({"seed": 1})), device="cpu")
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(corpus, SMALL, out=whole, device="cpu", init_from=start)

    stop(SMALL, corpus, out, 7, init_from=start)
    for wrong in (other, None):
        with pytest.raises(RunError, match="another model to start from"):
            train(corpus, SMALL, out=out, device="cpu", init_from=wrong)
    train(corpus, SMALL, out=out, device="cpu", init_from=start)

    assert content(out) == content(whole)


def test_a_run_with_new_labels_resumes(corpus, finished, tmp_path):
    start = Elias.from_pretrained(finished(SMALL), device="cpu")
    start = start.remove_labels([2, 5])
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(corpus, SMALL, out=whole, device="cpu", init_from=start)

    stop(SMALL, corpus, out, 7, init_from=start)
    train(corpus, SMALL, out=out, device="cpu", init_from=start)

    assert content(out) == content(whole)


def test_a_second_run_in_the_folder_is_refused(corpus, tmp_path, monkeypatch):
    refused = []

    def second():
        with pytest.raises(RunError, match="a run is active here") as caught:
            train(corpus, SMALL, out=tmp_path / "run", device="cpu", overwrite=True)
        refused.append(caught)

    from elias.training.optimizer import Optimizer

    monkeypatch.setattr(Optimizer, "step", Optimizer.step)
    call_before(f"{STEP}:3", second)
    train(corpus, SMALL, out=tmp_path / "run", device="cpu")

    assert len(refused) == 1
    assert (tmp_path / "run" / "model").is_dir()


# what is damaged


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped(stopped, corpus, finished, caplog, name):
    newest = max((stopped / "checkpoints").iterdir())
    flipped = bytearray((newest / name).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (newest / name).write_bytes(flipped)

    with caplog.at_level(logging.INFO):
        train(corpus, SMALL, out=stopped, device="cpu")

    assert f"checkpoint {newest}" in caplog.text
    assert "resumed stage2 epoch 1 step 3" in caplog.text
    assert content(stopped) == content(finished(SMALL))


def test_a_run_without_an_intact_checkpoint_starts_over(stopped, corpus, finished, caplog):
    for saved in (stopped / "checkpoints").iterdir():
        (saved / "state.json").unlink()

    train(corpus, SMALL, out=stopped, device="cpu")

    assert "no checkpoint can be used, so the run starts over" in caplog.text
    assert content(stopped) == content(finished(SMALL))


def test_a_loss_that_is_not_finite_names_the_batch_and_keeps_the_checkpoint_before(
    corpus, finished, tmp_path, monkeypatch, caplog
):
    from elias.model.elias import EliasModel

    real, calls = EliasModel.losses, []

    def spoiled(self, *args, **options):
        calls.append(1)
        actual = real(self, *args, **options)
        return actual._replace(total=actual.total * float("nan")) if len(calls) == 13 else actual

    often, run = SMALL.override({"checkpoint.minutes": 1e-9}), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(EliasModel, "losses", spoiled)
        named = r"stage2 epoch 1 step 3: the loss is nan for the training points 7, 116, .* and 54"
        with pytest.raises(RunError, match=named):
            train(corpus, often, out=run, device="cpu")
    with caplog.at_level(logging.INFO):
        train(corpus, often, out=run, device="cpu")

    assert "resumed" in caplog.text
    assert content(run) == content(finished(SMALL))


def test_a_diverged_run_exits_2_and_resumes_with_a_lower_learning_rate(tmp_path):
    data = write_synthetic(tmp_path / "data", n_points=200, n_labels=40)
    settings = ("encoder.dim=16", "encoder.hidden_dim=16", "rerank.enabled=false")
    options = [f"--set={setting}" for setting in settings]
    command = ["train", data, "--out", tmp_path / "run", "--device", "cpu", *options]

    diverged = elias(*command, "--set=stages.stage2.bag_lr=1e20")
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    resumed = elias(*command, "--set=stages.stage2.bag_lr=1e-3")

    errors = [line for line in diverged.err.splitlines() if line.startswith("error: ")]
    assert diverged.code == 2
    assert diverged.out == ""
    assert len(errors) == 1
    assert diverged.err.count("training points") == 1
    assert errors[0].startswith("error: stage2 epoch 1 step 2: the loss is nan ")
    assert "lower stages.stage2.bag_lr (now 1e+20)" in errors[0]
    assert "model" not in left
    assert resumed.code == 0, resumed.err
    assert "run: resumes with other learning rates (stages.stage2.bag_lr is 0.001" in resumed.err
    assert "resumed after stage1" in resumed.err
    Elias.from_pretrained(tmp_path / "run" / "model")


def test_a_full_disk_while_saving_is_reported_in_one_line_and_leaves_no_partial_files(
    corpus, finished, tmp_path, monkeypatch
):
    from safetensors import SafetensorError

    from elias.persistence import manifest

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "save_file", full)
        with pytest.raises(ModelError, match=r"model: cannot be written: .*No space left"):
            train(corpus, SMALL, out=tmp_path / "run", device="cpu")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    train(corpus, SMALL, out=tmp_path / "run", device="cpu")

    assert left == {"config.json", "metrics.jsonl", "train.log", "partition.npy", "checkpoints"}
    assert content(tmp_path / "run") == content(finished(SMALL))


def test_a_model_that_does_not_fit_on_the_disk_leaves_no_files(finished, tmp_path):
    model = Elias.from_pretrained(finished(SMALL), device="cpu")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        with pytest.raises(ModelError, match="copy: cannot be written"):
            model.save_pretrained(tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_checkpoints_are_written_does_not_stop_training(
    corpus, finished, tmp_path, monkeypatch, caplog
):
    from elias.training import checkpoint

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)

    train(corpus, SMALL, out=tmp_path / "run", device="cpu")

    assert "training continues" in caplog.text
    assert content(tmp_path / "run") == content(finished(SMALL))


# the command line, and processes that are killed


def test_sigterm_saves_a_checkpoint_and_the_same_command_resumes(tmp_path):
    data = write_synthetic(tmp_path / "data", n_points=300, n_labels=40)
    out = tmp_path / "run"
    settings = {"encoder.dim": 16, "encoder.hidden_dim": 16, "stages.stage1.batch_size": 4}
    short = {"index.kind": "graph", "stages.stage1.epochs": 400, "stages.stage2.epochs": 1}
    options = [f"--set={key}={value}" for key, value in {**settings, **short}.items()]
    command = ["train", data, "--out", out, "--device", "cpu", *options]
    process = start_elias(*command, "--set=checkpoint.minutes=1e-9", stdout=subprocess.PIPE)
    while not list(out.glob("checkpoints/0*")):
        assert process.poll() is None, process.stderr.read().decode()

    process.send_signal(signal.SIGTERM)
    printed, message = process.communicate(timeout=60)

    *_, last = message.decode().splitlines()
    assert process.returncode == 143
    assert printed == b""
    assert last.startswith(f"interrupted: {out}/model was not written: stopped after stage1 epoch")
    assert last.endswith("; run the same command again to resume from the last checkpoint")
    refused = elias(*command, "--set=seed=3")
    assert refused.code == 2
    assert "another configuration (seed is 3 instead of 0)" in refused.err


POINTS = {
    "tokenizing": "elias.text.tokens:_store:2",
    "clustering": "elias.training.initialization:balanced_clusters:1",
    "stage 1": f"{STEP}:7",
    "edges": "elias.training.initialization:strongest_edges:1",
    "stage 2": f"{STEP}:8",
    "a checkpoint": "elias.training.checkpoint:write_manifest:2",
    "ranker": "elias.rerank.reranker:SparseRanker.fit:1",
    "saving": "elias.persistence.manifest:write_model_manifest:1",
    "the last rename": "elias.data.atomic:_exchange:1",
}


def test_a_run_killed_at_every_point_gives_the_same_model(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(folder / "cache")}

    result = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("crash_worker.py"),
            folder / "run",
            *POINTS.values(),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    codes = [line.split()[1] for line in result.stdout.splitlines()]
    assert codes == [*["-9"] * len(POINTS), "0"], result.stdout + result.stderr
    assert content(folder / "run") == content(finished(SMALL))
    assert Elias.from_pretrained(folder / "run", device="cpu").model.n_labels == CORPUS["n_labels"]
    assert not [path for path in (folder / "run").iterdir() if path.name.startswith(".")]


def test_nothing_in_a_checkpoint_is_pickled(stopped):
    names = {path.name for path in (stopped / "checkpoints").rglob("*") if path.is_file()}

    assert names == {"state.json", "state.safetensors", "manifest.json"}


def test_training_restores_the_random_state_of_torch(corpus):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)

    train(corpus, SMALL, device="cpu")

    assert torch.rand(1) == expected
