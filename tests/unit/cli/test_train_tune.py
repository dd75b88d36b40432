"""Durations, and what `elias tune` prints."""

import pytest

from e2e.commands import elias
from elias.cli.train import parse_duration
from elias.data.synthetic import write_synthetic
from elias.errors import ConfigError

pytestmark = pytest.mark.slow

TINY = (
    *("--device", "cpu", "--set", "encoder.dim=8", "--set", "encoder.hidden_dim=8"),
    *("--set", "stages.stage1.epochs=1", "--set", "stages.stage2.epochs=1"),
    *("--set", "rerank.trees=2"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "tiny", n_points=200, n_labels=40)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("1h30m", 5400), ("45m", 2700), ("90s", 90)]
)
def test_a_time_is_given_in_hours_minutes_and_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "1.5h", "0s", "30m1h", "an hour"])
def test_any_other_time_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--time .*e.g. 1h30m"):
        parse_duration(text)


def test_the_best_configuration_can_be_trained(data, tmp_path):
    out = tmp_path / "study"

    tuned = elias("tune", data, "--out", out, "--trials", 2, *TINY)
    assert tuned.code == 0, tuned.err
    trained = elias(
        *("train", data, "--out", tmp_path / "run", "--config", out / "best.toml"),
        *("--device", "cpu", "--set", "rerank.enabled=false"),
    )

    assert tuned.out.strip() == str(out / "best.toml")
    assert "trial 1: " in tuned.err
    assert trained.code == 0, trained.err


def test_a_mistake_is_one_line_and_exit_code_2(data, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text("encoder.dropot = { range = [0.1, 0.5] }", encoding="utf8")

    result = elias("tune", data, "--out", tmp_path / "study", "--space", space, *TINY)

    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {space}: encoder.dropot: unknown key")
    assert not (tmp_path / "study").exists()
