from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from typer.testing import CliRunner

from elias.cli.app import app
from elias.cli.options import ConfigOptions
from elias.cli.train import _suggest_encoder, describe_times, next_commands
from elias.config import EliasConfig
from elias.data import Corpus, Split


@pytest.mark.parametrize(
    ("options", "encoder", "is_suggested"),
    [
        ({}, "bag", True),
        ({"preset": "best"}, "bag", True),
        ({"encoder": "bag"}, "bag", False),
        ({"config_file": Path("mine.toml")}, "bag", False),
        ({"changes": ["encoder.model=minilm"]}, "user/model", False),
    ],
)
def test_a_pretrained_encoder_is_suggested_unless_one_was_chosen(
    options, encoder, is_suggested, monkeypatch
):
    notes = []
    monkeypatch.setattr("elias.cli.console.note", notes.append)
    config = EliasConfig().with_encoder(encoder).override({"encoder.pooling": "mean"})

    _suggest_encoder(
        ConfigOptions(**options), config.override({"encoder.max_length": 32}).resolve(1000, 50)
    )

    assert ["--encoder minilm" in note for note in notes] == [True] * is_suggested


def test_the_help_fits_on_one_screen():
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80"})

    assert len(result.stdout.splitlines()) <= 40


@pytest.mark.parametrize(
    ("texts", "shown"), [(["", " ", "cod quota", "wine"], "'cod quota'"), ([""], "'a text'")]
)
def test_the_commands_to_try_next_have_the_first_text_that_is_not_empty(texts, shown):
    points = Split(labels=csr_matrix(np.ones((len(texts), 1))), texts=texts)

    commands = next_commands(Path("run"), Corpus(train=points, test=points, label_names=["a"]))

    assert commands[0] == f"echo {shown} | elias predict run"


def test_the_end_of_a_run_says_where_the_time_went():
    steps = {"tokens": 0.4, "stage1": 60.0, "stage2": 30.0}

    assert describe_times(steps, 95.4) == "1 min 35 s: stage1 1 min 0 s, stage2 30.0 s, other 5.0 s"
    assert describe_times({"tokens": 0.4}, 0.9) == "0.9 s"
    assert "other" not in describe_times(steps, 20.0)  # resumed: earlier steps count, too
