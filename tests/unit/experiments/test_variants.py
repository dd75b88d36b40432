import pytest

from elias.config import EliasConfig, preset_names
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError
from elias.experiments.runner import Setting
from elias.experiments.variants import Models, one_vs_all


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_one_vs_all_variant_with_the_same_encoder_and_no_graph(name):
    config = EliasConfig.preset(name)

    variant = one_vs_all(config)

    (stage,) = variant.stages
    assert (variant.encoder, variant.eval, variant.seed) == (
        config.encoder,
        config.eval,
        config.seed,
    )
    assert variant.loss.reduction == "sum"
    assert (stage.encoder_lr, stage.batch_size) == (
        config.stages[0].encoder_lr,
        config.stages[0].batch_size,
    )
    assert stage.label_lr is None
    epochs = [stage.epochs for stage in config.stages]
    assert stage.epochs == (None if None in epochs else sum(epochs))
    assert variant.resolve(1000, 50).index.shortlist_size == 50


def test_one_vs_all_of_one_vs_all_changes_nothing():
    variant = one_vs_all(EliasConfig.preset("fast"))

    assert one_vs_all(variant) == variant


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, "stage2, rerank, calibrate"),
        ({"rerank.calibrate": False}, "stage2, rerank"),
        ({"eval.validation_size": 19}, "stage2, rerank"),
        ({"index.kind": "all"}, "one-vs-all, rerank, calibrate"),
    ],
)
def test_the_components_of_a_model_are_known_before_training(changes, known, tmp_path):
    check_components(changes, known, tmp_path, n_labels=210)


@pytest.mark.parametrize("changes", [{}, {"rerank.candidates": 20}])
def test_a_ranker_that_scores_every_label_is_not_calibrated(changes, tmp_path):
    check_components({"index.kind": "all"} | changes, "one-vs-all, rerank", tmp_path, n_labels=30)


def check_components(changes, known, folder, n_labels):
    """Check which components an experiment expects of a model."""
    config = EliasConfig().override({"rerank.names": False, **changes})
    setting = Setting.of(config, synthetic_corpus(n_points=300, n_labels=n_labels), folder)

    with pytest.raises(ConfigError, match=rf"will not have this component \(use one of: {known}\)"):
        Models(setting).component("none")
