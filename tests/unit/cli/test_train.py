from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from typer.testing import CliRunner

from elias.cli.app import app
from elias.cli.options import ConfigOptions
from elias.cli.train import describe_times, next_commands, show_plan
from elias.config import EliasConfig
from elias.config.resolve import MAX_SCORED_LABELS
from elias.data import Corpus, Split


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"preset": "best"}, False),
        ({"encoder": "bag"}, True),
        ({"config_file": Path("mine.toml")}, True),
    ],
)
def test_an_option_or_a_file_chooses_the_encoder(options, expected):
    assert ConfigOptions(**options).chooses_encoder == expected


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


@pytest.mark.parametrize(("n_more", "shown"), [(0, False), (1, True)])
def test_the_plan_says_whether_stage_0_compares_texts_with_texts(n_more, shown, capsys):
    n_labels = MAX_SCORED_LABELS + n_more
    points = Split(labels=csr_matrix(np.ones((1, n_labels))), texts=["cod quota"])
    names = [str(label) for label in range(n_labels)]
    corpus, config = Corpus(train=points, test=None, label_names=names), EliasConfig()

    show_plan(config, config.resolve(1, n_labels), corpus)

    plan = " ".join(capsys.readouterr().err.split())
    assert "stage 0 trains the encoder to compare texts with label texts" in plan
    assert ("other texts of the label" in plan) == shown


def test_the_plan_says_at_most_1_epoch(capsys):
    points = Split(labels=csr_matrix(np.ones((1, 2))), texts=["cod quota"])
    config = EliasConfig().override({"stages.stage1.epochs": 1})

    corpus = Corpus(train=points, test=None, label_names=["a", "b"])
    show_plan(config, config.resolve(1, 2), corpus)

    assert "at most 1 epoch in" in " ".join(capsys.readouterr().err.split())
