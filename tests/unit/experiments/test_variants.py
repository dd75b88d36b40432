import pytest

from elias.config import ONE_VS_ALL_STAGES, EliasConfig, preset_names
from elias.experiments.variants import one_vs_all


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_twin_with_the_same_encoder_and_no_graph(name):
    config = EliasConfig.preset(name)

    twin = one_vs_all(config)

    (stage,) = twin.stages
    assert (twin.encoder, twin.eval, twin.seed) == (config.encoder, config.eval, config.seed)
    assert twin.loss.reduction == "sum"
    assert (stage.encoder_lr, stage.batch_size) == (
        config.stages[0].encoder_lr,
        config.stages[0].batch_size,
    )
    assert stage.label_lr == ONE_VS_ALL_STAGES[0].label_lr
    assert stage.epochs == sum(stage.epochs for stage in config.stages)
    assert twin.resolve(1000, 50).index.shortlist_size == 50


def test_a_twin_is_its_own_twin():
    twin = one_vs_all(EliasConfig.preset("mesh-titles"))

    assert one_vs_all(twin) == twin
