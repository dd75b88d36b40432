"""A transformer that reads long texts in windows, from training to prediction."""

import json
import logging
import os
import signal

import numpy as np
import pytest
import torch

from e2e.commands import elias
from e2e.crash_worker import call_before
from elias import Elias, EliasConfig, train
from elias.data.corpus import resolve_config
from elias.errors import Interrupted, ModelError
from elias.training.dry_run import estimate_run
from tiny_bert import corpus_of_long_texts, save_tiny_bert, windows_config


@pytest.fixture(scope="module")
def corpus():
    return corpus_of_long_texts()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    bert = save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")
    return EliasConfig().override(windows_config(bert))


@pytest.fixture(scope="module")
def run(corpus, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(corpus, config, out=folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def model(run):
    return Elias.from_pretrained(run / "model", device="cpu")


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "epoch"]


def test_words_after_the_first_window_are_learned(model, run):
    assert (
        model.metadata["metrics"]["one-vs-all"]["test"]["P@1"] > 70
    )  # the first window alone reaches 45
    assert losses(run)[-1] < losses(run)[0] / 2


def test_truncated_texts_are_counted_and_a_number_of_windows_is_suggested(corpus, config, caplog):
    shorter = {"encoder.windows": 1, "stages.one-vs-all.epochs": 1}
    with caplog.at_level(logging.WARNING, logger="elias"):
        model = train(corpus, config.override(shorter), device="cpu")

    assert "80 of 80 train texts are longer than 6 tokens and were truncated" in caplog.text
    assert "set encoder.windows=3 to read 95% of the training texts in full" in caplog.text
    ranked = model.predict(corpus.test.texts, top_k=5)
    assert len({tuple(one.labels) for one in ranked}) == 1  # all begin with the same words


def test_a_loaded_model_predicts_texts_as_one_by_one(model, corpus):
    texts = corpus.test.texts[:12]
    together = model.predict(texts, top_k=3)
    alone = [model.predict([text], top_k=3)[0] for text in texts]

    for one, other in zip(together, alone, strict=True):
        assert one.labels == other.labels
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)


def test_words_of_later_windows_are_explained(model):
    text = "in the in the in the in the cod"
    label = model.explain([text], top_k=1, words=True)[0].labels[0]

    assert label.label == "cod"
    effects = {word.start: word.effect for word in label.words}
    assert effects[text.index("cod")] > 0


def test_commands_read_the_windows(run, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("in the in the in the in the sea\n")
    predicted = elias("predict", run, file, "--top-k", "1", "--device", "cpu")
    described = elias("info", run)

    assert (predicted.code, described.code) == (0, 0)
    assert "sea" in predicted.out
    assert "5 × 6 tokens" in described.out


def test_an_interrupted_run_ends_with_the_same_model(run, corpus, config, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        from elias.training.optimizer import Optimizer

        patch.setattr(Optimizer, "step", Optimizer.step)  # taken back with the patch
        step = "elias.training.optimizer:Optimizer.step:33"
        call_before(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(corpus, config, out=tmp_path / "run", device="cpu")
    again = train(corpus, config, out=tmp_path / "run", device="cpu")

    expected = Elias.from_pretrained(run / "model", device="cpu").model.state_dict()
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_export_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match=r"in 5 windows cannot be exported.*encoder\.windows=1"):
        model.export_onnx(tmp_path / "model.onnx")


def test_windows_count_in_the_memory_estimate(corpus, config):
    whole, cut = (
        estimate_run(resolve_config(each, corpus), corpus, torch.device("cpu"))
        for each in (config, config.override({"encoder.windows": 1}))
    )

    assert (whole.memory.sizes.longest_text, cut.memory.sizes.longest_text) == (18, 6)
    assert whole.memory.on_host["encoder activations"] > cut.memory.on_host["encoder activations"]
    assert whole.epoch_seconds["one-vs-all"] > 0
