"""A compact model: written by the command line, used by every other command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e.commands import elias
from e2e.servers import live
from elias.inference.predictor import Elias

TEXTS = ["red herring", "cod quota in the north sea"]


@pytest.fixture(scope="module")
def compact(run, tmp_path_factory):
    """A compact copy of the model of the run."""
    folder = tmp_path_factory.mktemp("compact") / "small"
    result = elias("export", run, folder, "--compact")
    assert result.code == 0, result.err
    assert "MB, written in" in result.err
    assert "not exported" not in result.err
    return folder


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_compact_model_has_all_components_and_nearly_the_same_probabilities(run, compact):
    model, small = (Elias.from_pretrained(one, device="cpu") for one in (run, compact))

    before, after = (one.predict(TEXTS, top_k=3) for one in (model, small))

    assert size(compact) < 0.7 * size(run / "model")
    assert small.components == model.components
    # a rounded score can fall on another step of the probabilities
    assert np.abs(after.probabilities - before.probabilities).mean() < 0.02
    assert elias("info", compact, "--verify").code == 0
    assert "8 bits (compact)" in elias("info", compact).out


def test_a_compact_model_is_edited_saved_exported_and_stays_compact(compact, tmp_path):
    small = Elias.from_pretrained(compact, device="cpu")

    renamed = small.rename_label(0, "kippers").save_pretrained(tmp_path / "renamed")
    large = small.save_pretrained(tmp_path / "large", compact=False)

    again = Elias.from_pretrained(renamed, device="cpu")
    assert again.label_names[0] == "kippers"
    assert size(renamed) == size(compact) < 0.7 * size(large)
    np.testing.assert_allclose(again.predict(TEXTS).scores, small.predict(TEXTS).scores, rtol=1e-5)
    same = Elias.from_pretrained(large, device="cpu").predict(TEXTS).scores
    np.testing.assert_array_equal(same, small.predict(TEXTS).scores)


def test_a_compact_model_is_exported_to_onnx(compact, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)

    assert elias("export", compact, tmp_path / "model.onnx").code == 0


def test_a_compact_model_is_served(compact):
    pytest.importorskip("fastapi")
    best = Elias.from_pretrained(compact, device="cpu").predict(TEXTS, top_k=1)[0].labels

    with live(compact) as served, served.client() as client:
        answer = client.post("/predict", json={"inputs": TEXTS, "top_k": 1})

    assert best[0] in json.dumps(answer.json())


def test_options_of_onnx_are_refused_with_compact(run, tmp_path):
    result = elias("export", run, tmp_path / "small", "--compact", "--int8")

    assert result.code == 2
    assert "leave them out with --compact" in result.err
    assert not (tmp_path / "small").exists()
