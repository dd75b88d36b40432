"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl, and cannot stop a run."""

import sys
import types

import pytest

from elias.config import EliasConfig
from elias.errors import ConfigError, RunError
from elias.training import loggers
from elias.training.loggers import check_loggers, event_numbers, open_loggers
from elias.training.run import LOG_FILE, open_run

EPOCH = {
    "stage": "stage1",
    "epoch": 1,
    "loss": 0.5,
    "seconds": 2,
    "validation": {"P@1": 61.5, "nDCG@5": 40.0},
}


def configured(**tracking):
    return EliasConfig().override({f"tracking.{key}": value for key, value in tracking.items()})


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensorboard_reads_what_was_recorded(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(tmp_path / "run", configured(tensorboard=True), overwrite=False) as run:
        run.record("epoch", **EPOCH)
        run.record("epoch", **EPOCH | {"epoch": 2, "loss": 0.25})
        run.record("stage", stage="stage1", test={"P@1": 70.0})

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("stage1/loss")] == [(1, 0.5), (2, 0.25)]
    assert [e.value for e in events.Scalars("stage1/validation/P_at_1")] == [61.5, 61.5]
    assert [e.value for e in events.Scalars("stage1/test/P_at_1")] == [70.0]


class StandIn(types.ModuleType):
    """A wandb that remembers what it was told."""

    def __init__(self, fails=False):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")
        self.fails = fails
        self.begun = {}
        self.logged = []
        self.finished = False

    def init(self, **given):
        self.begun = given
        return self

    def log(self, numbers):
        if self.fails:
            raise OSError("no network")
        self.logged.append(numbers)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def test_wandb_gets_the_configuration_and_the_numbers(tmp_path, wandb):
    config = configured(wandb="labels")

    with open_run(tmp_path / "run", config, overwrite=False) as run:
        run.record("time", step="tokens", seconds=1.5)
        run.record("epoch", **EPOCH)

    assert wandb.begun["project"] == "labels"
    assert wandb.begun["config"] == config.to_dict()
    assert wandb.begun["dir"] == str((tmp_path / "run").resolve())
    assert wandb.logged[0] == {"seconds/tokens": 1.5, "epoch": 0}
    assert wandb.logged[1]["stage1/validation/P@1"] == 61.5
    assert wandb.logged[1]["epoch"] == 1
    assert wandb.finished


def test_a_resumed_run_keeps_its_wandb_run(tmp_path, wandb):
    ids = []
    for folder in ("run", "run", "other"):
        open_loggers(configured(wandb="labels"), tmp_path / folder).close()
        ids.append((wandb.begun["id"], wandb.begun["resume"]))

    assert ids[0] == ids[1]
    assert ids[0][1] == "allow"
    assert ids[2] != ids[0]


def test_steps_continue_in_a_resumed_run(tmp_path, wandb):
    with open_run(tmp_path / "first", configured(), overwrite=False) as run:
        run.record("epoch", **EPOCH)
        run.record("epoch", **EPOCH | {"epoch": 2})
        state = run.state()

    with open_run(tmp_path / "run", configured(wandb="labels"), overwrite=False) as run:
        run.restore(state)
        run.record("epoch", **EPOCH | {"epoch": 3})

    assert [numbers["epoch"] for numbers in wandb.logged] == [3]


def test_an_overwritten_run_gets_a_new_wandb_run(tmp_path, wandb):
    ids = []
    for _ in range(2):
        with open_run(tmp_path / "run", configured(wandb="labels"), overwrite=True) as run:
            run.record("epoch", **EPOCH)
        ids.append(wandb.begun["id"])

    assert ids[0] != ids[1]


def test_a_logger_that_cannot_start_is_disabled_and_the_run_continues(
    tmp_path, wandb, monkeypatch, caplog
):
    def refuse(**_):
        raise OSError("no api key\nrun wandb login")

    monkeypatch.setattr(wandb, "init", refuse)

    with open_run(tmp_path / "run", configured(wandb="labels"), overwrite=False) as run:
        run.record("epoch", **EPOCH)

    messages = [line.getMessage() for line in caplog.records if "is disabled" in line.getMessage()]
    assert messages == ["Wandb is disabled: no api key run wandb login"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_logger_that_fails_is_disabled_and_the_run_continues(tmp_path, wandb, caplog):
    wandb.fails = True

    with open_run(tmp_path / "run", configured(wandb="labels"), overwrite=False) as run:
        run.record("epoch", **EPOCH)
        run.record("epoch", **EPOCH)

    assert caplog.text.count("Wandb is disabled from now on: no network") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("name", "value"), [("tensorboard", True), ("wandb", "labels")])
def test_a_missing_package_is_reported_before_any_work(monkeypatch, name, value):
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=rf"pip install 'elias-xmc\[{name}\]'"):
        check_loggers(configured(**{name: value}).tracking)


def test_an_empty_project_is_refused():
    with pytest.raises(ConfigError, match=r"tracking\.wandb must name a project"):
        configured(wandb=" ")


def test_events_without_numbers_are_skipped():
    assert event_numbers({"event": "probabilities", "ece": 0.1}) == {}
    assert event_numbers({"event": "data", "source": "x", "labels": 3}) == {"data/labels": 3.0}
    named = event_numbers({"event": "epoch", "member": 2, "stage": "s", "loss": 1})
    assert named == {"member 2/s/loss": 1.0}


def test_the_log_says_how_a_run_began_and_ended(tmp_path):
    with open_run(tmp_path / "run", EliasConfig(), overwrite=False) as run:
        run.record("epoch", **EPOCH)

    begun, ended = (tmp_path / "run" / LOG_FILE).read_text().splitlines()
    assert "started in" in begun
    assert "elias-xmc" in begun
    assert "finished after" in ended


def test_the_log_says_why_a_run_stopped(tmp_path):
    def fail():
        with open_run(tmp_path / "run", EliasConfig(), overwrite=False) as run:
            run.record("epoch", **EPOCH)
            raise RunError("the loss is nan")

    with pytest.raises(RunError):
        fail()

    text = (tmp_path / "run" / LOG_FILE).read_text()
    assert "ERROR" in text
    assert "RunError: the loss is nan" in text
