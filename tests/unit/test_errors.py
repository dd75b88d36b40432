import time

import pytest

from elias.errors import ConfigError, DataError, EliasError, ModelError, RunError, nearest


@pytest.mark.parametrize("error", [ConfigError, DataError, ModelError, RunError])
def test_every_error_is_an_elias_error(error):
    assert issubclass(error, EliasError)


def test_nearest_names_the_closest_known_name():
    assert nearest("bta", ["alpha", "beta"]) == "; did you mean 'beta'?"


def test_nearest_says_nothing_when_nothing_is_close():
    assert nearest("zzz", ["alpha", "beta"]) == ""


def test_nearest_looks_among_the_likely_ones_of_a_million_names():
    names = [f"label {i}" for i in range(1_000_000)] + ["Zebrafish"]

    begin = time.process_time()
    hint = nearest("zebrafsh", names)

    assert hint == "; did you mean 'Zebrafish'?"
    assert time.process_time() - begin < 2
