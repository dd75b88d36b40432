import pytest

import elias.experiments
from elias.experiments import run_experiment


def test_the_old_name_of_run_experiment_warns():
    with pytest.warns(DeprecationWarning, match="run_experiment"):
        old = elias.experiments.carry_out

    assert old is run_experiment


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="no attribute 'carry_on'"):
        _ = elias.experiments.carry_on
