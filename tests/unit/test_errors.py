import pytest

from elias.errors import ConfigError, DataError, EliasError, ModelError, RunError, did_you_mean


@pytest.mark.parametrize("error", [ConfigError, DataError, ModelError, RunError])
def test_every_error_is_an_elias_error(error):
    assert issubclass(error, EliasError)


def test_did_you_mean_names_the_closest_known_name():
    assert did_you_mean("bta", ["alpha", "beta"]) == "; did you mean 'beta'?"


def test_did_you_mean_is_empty_if_no_name_is_close():
    assert did_you_mean("zzz", ["alpha", "beta"]) == ""


def test_did_you_mean_compares_only_similar_ones_of_a_million_names(monkeypatch):
    names = [f"label {i}" for i in range(1_000_000)] + ["Zebrafish"]

    compared = []
    monkeypatch.setattr(
        "elias.errors.get_close_matches", lambda _, names, n: compared.extend(names) or names[:n]
    )

    hint = did_you_mean("zebrafsh", names)

    assert hint == "; did you mean 'Zebrafish'?"
    assert len(compared) == 100
    assert compared[0] == "zebrafish"


@pytest.mark.parametrize("wrong", ["oncology", "Neoplasm", "Braest Neoplasms", "BREAST NEOPLASMS"])
def test_did_you_mean_finds_close_names_among_many(wrong):
    names = [f"Syndrome {i}" for i in range(6000)] + ["Breast Neoplasms", "Neoplasms", "Oncologie"]

    assert did_you_mean(wrong, names)


def test_a_long_message_keeps_its_beginning_and_its_end():
    message = str(ConfigError(f"unknown key {'[' * 5000!r}; remove it"))

    assert len(message) < 1000
    assert message.startswith("unknown key '[[[")
    assert message.endswith("[[['; remove it")
