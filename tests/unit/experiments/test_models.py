import pytest

from elias.config import EliasConfig, preset_names
from elias.experiments.models import one_vs_all


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
