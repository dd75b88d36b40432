"""Files written by older versions load, and give the same results."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from e2e.commands import elias
from elias import Elias, OnnxModel

FIXTURES = Path(__file__).parents[1] / "fixtures"


def predicted(model):
    """Return the predictions of a model as the recorded ones of version 0.1."""
    texts = (FIXTURES / "run-0.1/corpus/raw/tst_X.txt").read_text(encoding="utf8").splitlines()
    return model.predict(texts, top_k=3).to_dicts()


def assert_as_recorded(rankings, name="model-0.1"):
    lines = (FIXTURES / f"{name}-predictions.jsonl").read_text(encoding="utf8").splitlines()
    recorded = [json.loads(line)["labels"] for line in lines]
    for field in ("id", "label"):
        assert [[each[field] for each in row] for row in rankings] == [
            [each[field] for each in row] for row in recorded
        ]
    for field in ("score", "probability"):
        np.testing.assert_allclose(
            [each[field] for row in rankings for each in row],
            [each[field] for row in recorded for each in row],
            rtol=1e-5,
        )


def test_a_model_saved_by_0_1_loads_and_predicts_the_same():
    model = Elias.from_pretrained(FIXTURES / "model-0.1", device="cpu")

    rankings = predicted(model)

    assert model.components == ("stage2", "rerank", "calibrate", "names")
    assert model.data_settings == model.metadata["data_settings"]
    assert_as_recorded(rankings)


def test_a_model_saved_by_0_1_is_saved_again_in_the_current_format(tmp_path):
    model = Elias.from_pretrained(FIXTURES / "model-0.1", device="cpu")

    again = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    manifest = json.loads((tmp_path / "model/config.json").read_text(encoding="utf8"))
    assert manifest["format_version"] == 3
    assert again.metadata == model.metadata
    assert_as_recorded(predicted(again))


@pytest.mark.parametrize("name", ["model-0.2", "model-0.2-compact"])
def test_a_model_saved_by_0_2_loads_with_its_labels_and_predicts_the_same(name):
    model = Elias.from_pretrained(FIXTURES / name, device="cpu")

    rankings = predicted(model)

    assert model.components == ("stage2", "rerank", "calibrate", "names")
    added = model.label_table.match(["u:1", "red herring"])
    assert added == [16, 16]
    assert_as_recorded(rankings, name)


def test_the_old_name_of_metadata_warns():
    model = Elias.from_pretrained(FIXTURES / "model-0.1", device="cpu")

    with pytest.warns(DeprecationWarning, match=r"Elias\.metadata"):
        assert model.facts is model.metadata


def test_a_run_interrupted_in_0_1_resumes_and_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path,
):
    folder = shutil.copytree(FIXTURES / "run-0.1", tmp_path / "fixtures")

    result = elias(
        *("-q", "train", folder / "corpus", "--out", folder / "run", "--device", "cpu"),
        *("--config", folder / "run" / "config.json"),  # the defaults have changed since
    )

    assert result.code == 0, result.err
    assert ": resumed stage2 epoch " in (folder / "run" / "train.log").read_text(encoding="utf8")
    weights = load_file(folder / "run" / "model" / "model.safetensors")
    expected = load_file(folder / "expected-model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_exported_model_of_0_1_predicts_as_the_model_it_was_exported_from():
    pytest.importorskip("onnxruntime")
    texts = (FIXTURES / "run-0.1/corpus/raw/tst_X.txt").read_text(encoding="utf8").splitlines()
    model = Elias.from_pretrained(FIXTURES / "model-0.1", device="cpu")
    expected = model.predict(texts, top_k=3, component="stage2")

    predictions = OnnxModel(FIXTURES / "model-0.1.onnx").predict(texts, top_k=3)

    np.testing.assert_array_equal(predictions.ids, expected.ids)
    np.testing.assert_allclose(predictions.scores, expected.scores, rtol=1e-4)
