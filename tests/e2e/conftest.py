"""A small corpus, and a run trained on it by the command line."""

from __future__ import annotations

import pytest

from e2e.commands import SMALL, elias
from elias import Elias
from elias.data.synthetic import write_synthetic


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Keep tokenized texts out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """A generated corpus of 400 training points, 100 test points and 120 labels."""
    return write_synthetic(tmp_path_factory.mktemp("data") / "corpus", n_points=400, n_labels=120)


@pytest.fixture(scope="session")
def trained(corpus_folder, tmp_path_factory):
    """A finished run on the corpus, and what its training said."""
    run = tmp_path_factory.mktemp("runs") / "run"
    return run, elias("train", corpus_folder, "--out", run, *SMALL)


@pytest.fixture(scope="session")
def run(trained):
    """The folder of a finished run."""
    folder, result = trained
    assert result.code == 0, result.err
    return folder


@pytest.fixture(scope="session")
def model(run):
    """The model of the run, for tests that do not change it."""
    return Elias.from_pretrained(run, device="cpu")


@pytest.fixture(scope="session")
def texts(corpus_folder):
    """Three test points of the corpus."""
    return (corpus_folder / "raw" / "tst_X.txt").read_text(encoding="utf8").splitlines()[:3]
