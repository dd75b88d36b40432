"""A trained model knows probabilities: saved with it, used by Python and the command line."""

import json

import numpy as np
import pytest

from e2e.commands import elias
from elias import Elias, load_corpus
from elias.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def texts(corpus_folder):
    return load_corpus(corpus_folder).test.texts


def test_probabilities_do_not_change_the_order_of_labels(model, texts):
    actual = model.predict(texts, top_k=20)

    assert actual.probabilities.shape == actual.ids.shape
    assert (np.diff(actual.probabilities, axis=1) <= 0).all()
    assert (np.diff(actual.scores, axis=1) <= 0).all()


def test_a_part_of_a_model_has_no_probabilities(model, texts):
    actual = model.predict(texts, component=model.components[0])

    assert actual.probabilities is None
    with pytest.raises(ConfigError, match="scores of this component have no probabilities"):
        model.predict(texts, component=model.components[0], threshold="f1")


def test_a_threshold_makes_decisions_of_any_number_of_labels(model, texts):
    decided = model.predict(texts, threshold="f1")

    counts = [len(row) for row in decided]
    assert min(counts) < max(counts)
    first = int(model.keeps_best("f1"))  # the best label may stay below the threshold
    assert all((row.probabilities[first:] >= model.threshold("f1")).all() for row in decided)


def test_the_metadata_has_the_calibration_error(model):
    result = model.metadata["probabilities"]

    assert set(result["errors"]) == {"validation", "test"}
    errors = result["errors"]["validation"]
    assert errors["after"] < errors["before"]
    assert result["f1"]["threshold"] == model.threshold("f1")


def test_an_evaluation_has_the_calibration_error(run, model, corpus_folder):
    result = elias("evaluate", run, corpus_folder, "--json", "--device", "cpu")
    shown = elias("evaluate", run, corpus_folder, "--device", "cpu")
    part = elias("evaluate", run, corpus_folder, "--json", "--component", "stage2")

    measured = json.loads(result.out)
    known = model.metadata["probabilities"]["errors"]["test"]
    assert measured["ECE@5"] == pytest.approx(known["after"], abs=1e-3)
    assert measured["ECE@5 of scores"] == pytest.approx(known["before"], abs=1e-3)
    assert f"ECE@5 {known['after']:.2f}%" in shown.out
    assert not any(name.startswith("ECE") for name in json.loads(part.out))


def test_missing_probabilities_are_reported(model, tmp_path):
    folder = model.save_pretrained(tmp_path / "model")
    (folder / "probabilities.json").unlink()

    with pytest.raises(ModelError, match=r"probabilities\.json: missing"):
        Elias.from_pretrained(folder, device="cpu")


def test_the_command_line_decides_by_a_target(run, model, texts):
    result = elias(
        *("predict", run, "--threshold", "recall=0.3", "--device", "cpu"),
        stdin="\n".join(texts[:5]).encode(),
    )

    assert result.code == 0, result.err
    lines = [json.loads(line) for line in result.out.splitlines()]
    expected = model.predict(texts[:5], threshold="recall=0.3").to_dicts()
    assert [[label["id"] for label in line["labels"]] for line in lines] == [
        [label["id"] for label in row] for row in expected
    ]


def test_a_model_without_probabilities_is_read_and_can_be_given_some(
    run, model, corpus_folder, tmp_path
):
    without = Elias.from_pretrained(run, device="cpu")
    without.probabilities = None
    path = without.save_pretrained(tmp_path / "model")
    refused = elias("predict", path, "--threshold", "f1", "--device", "cpu", stdin=b"a text")

    result = elias("calibrate", path, corpus_folder, "--device", "cpu")
    on_test = elias("calibrate", path, corpus_folder, "--split", "test", "--device", "cpu")

    assert refused.code == 2
    assert "elias calibrate" in refused.err
    assert result.code == on_test.code == 0, result.err
    assert "the probabilities will be too high; use data that the model has not seen" in result.err
    assert "too high" not in on_test.err
    assert "best F1  " in result.out
    again = Elias.from_pretrained(path, device="cpu")
    # training fits them on cross-fitted scores, the command on those of the saved model
    assert again.probabilities is not None
    assert again.probabilities.values.max() >= model.probabilities.values.max() - 0.2
    assert "ECE@5 test" in elias("info", path).out
