"""Test the parameters of `elias experiment sweep` and their default values."""

import copy

import pytest

from elias import EliasConfig
from elias.config import first_difference, model_settings
from elias.errors import ConfigError
from elias.experiments.sweep import PARAMETERS, find_parameter

N_LABELS = 8_484


@pytest.fixture
def config():
    sizes = {"n_clusters": 128, "edges_per_cluster": 663, "beam_size": 20, "shortlist_size": 1000}
    sizes |= {"alpha": 10.0, "beta": 99.0}
    changes = {f"index.{name}": size for name, size in sizes.items()}
    return EliasConfig().override(changes).resolve(20_000, N_LABELS)  # λ is 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lambda", [0, 0.2, 0.5, 1, 2, 5]),
        ("kappa", [133, 332, 663, 1326]),  # a tenth of 663 would not reach every label
        ("alpha", [1, 3, 10, 30, 100]),
        ("beta", [9.9, 29.7, 99, 297, 990]),
        ("beam", [1, 2, 5, 10, 20, 40, 80]),
        ("shortlist", [100, 250, 500, 1000, 2000, 4000]),
    ],
)
def test_default_values_lie_around_that_of_the_configuration(name, values, config):
    parameter = PARAMETERS[name]

    actual = parameter.defaults(config, N_LABELS)

    assert actual == values
    assert parameter.read(config) in actual


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_a_changed_configuration_has_the_value_and_fits_the_data(name, config):
    parameter = PARAMETERS[name]

    for value in parameter.defaults(config, N_LABELS):
        changed = parameter.change(config, value, N_LABELS)

        assert parameter.read(changed) == value
        if parameter.trained:
            assert parameter.read(changed.resolve(20_000, N_LABELS)) == value


def test_without_a_shortlist_loss_its_weight_is_swept_around_one(config):
    without = PARAMETERS["lambda"].change(config, 0.0, N_LABELS)

    assert PARAMETERS["lambda"].defaults(without, N_LABELS) == [0, 0.2, 0.5, 1, 2, 5]


def test_an_unknown_parameter_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'gamma' .*lambda, kappa, alpha, beta, beam, shortlist"):
        find_parameter("gamma")


def test_the_first_difference_names_stages_and_missing_keys():
    ours, theirs = EliasConfig().to_dict(), EliasConfig().to_dict()
    theirs["stages"][1]["epochs"] = 99
    shorter = {**ours, "stages": ours["stages"][:1]}

    assert first_difference(ours, ours) == ""
    assert first_difference(ours, theirs) == "stages.stage2.epochs is None instead of 99"
    assert first_difference(ours, shorter) == "stages is stage1, stage2 instead of stage1"
    assert first_difference({"a": 1, "b": 2}, {"a": 1}) == "b is 2 instead of not set"


def test_an_older_configuration_gets_the_defaults_of_its_time():
    ours = EliasConfig().to_dict()
    before = copy.deepcopy(ours)
    for key in ("loss", "names"):
        del before["rerank"][key]
    for stage in before["stages"]:
        stage["max_grad_norm"] = 0.0
    as_then = EliasConfig().override({"rerank.names": False}).to_dict()

    differs = first_difference(model_settings(ours), model_settings(before))

    assert differs == "rerank.names is True instead of False"
    assert first_difference(model_settings(as_then), model_settings(before)) == ""
    for tree in (ours, before):
        tree["rerank"]["enabled"] = False
    assert model_settings(ours) == model_settings(before)
