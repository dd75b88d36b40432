"""`Elias`: which labels and texts it accepts, on a model that was not trained: it still ranks."""

import numpy as np
import pytest

from elias import Elias
from elias.distributed import SingleProcess
from elias.errors import DataError, ModelError
from elias.predictions import Ranking
from untrained_model import NAMES, TEXTS, predicted_ids, untrained_model


@pytest.fixture(scope="module")
def model():
    return untrained_model()


@pytest.mark.parametrize(
    "few", [["label 3", "label 30"], [3, 30], ["label 3", 30], np.array([3, 30])]
)
def test_only_ranks_just_the_labels_named_wherever_they_are(model, few):
    predictions = model.predict(TEXTS, top_k=10, only=few)

    assert predicted_ids(predictions) == [{3, 30}] * 3


@pytest.mark.parametrize("by", ["name", "id"])
def test_without_excludes_labels_and_others_are_ranked_instead(model, by):
    best = {int(ranking.ids[0]) for ranking in model.predict(TEXTS, top_k=1)}
    excluded = [NAMES[i] for i in best] if by == "name" else best

    predictions = model.predict(TEXTS, top_k=3, without=excluded)

    assert all(not best & ranking and len(ranking) == 3 for ranking in predicted_ids(predictions))


def test_only_and_without_together_leave_the_difference(model):
    predictions = model.predict(TEXTS, top_k=5, only=["label 3", 4, 5], without=[4])

    assert predicted_ids(predictions) == [{3, 5}] * 3


def test_a_name_that_two_labels_share_stands_for_both(model):
    assert model.label_ids(["twin", 0]) == [38, 39, 0]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("lable 7", "no label 'lable 7'; did you mean 'label 7'"),
        ("zzz", "no label 'zzz'; check the spelling"),
        (40, "no label 40; ids go from 0 to 39"),
        (-1, "no label -1"),
    ],
)
def test_an_unknown_label_is_refused_with_the_nearest_name(model, label, problem):
    with pytest.raises(DataError, match=problem):
        model.predict(TEXTS, only=[label])


def test_a_bare_label_is_refused(model):
    with pytest.raises(DataError, match="wrap a name in a list"):
        model.predict(TEXTS, only="label 3")


def test_many_label_names_are_looked_up_in_as_many_passes_as_one(model):
    passes = []

    class Names(list):
        def __iter__(self):
            passes[-1] += 1
            return super().__iter__()

    named = Elias(model.model, model.config, Names(NAMES))
    for count in (1, 38):
        passes.append(0)
        assert named.label_ids(NAMES[:count]) == list(range(count))

    assert passes[0] == passes[1] > 0


def test_a_single_text_gives_one_ranking(model):
    ranking = model.predict("red cod", top_k=3)
    (expected,) = model.predict(["red cod"], top_k=3)

    assert isinstance(ranking, Ranking)
    assert ranking.labels == expected.labels
    assert ranking.scores.tolist() == expected.scores.tolist()
    assert len(model.predict("red cod", threshold=2.0)) == 0


def test_no_texts_give_no_rankings(model):
    assert len(model.predict([])) == 0


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("top_k", 2.5), ("batch_size", 0)])
def test_sizes_must_be_whole_and_positive(model, name, value):
    with pytest.raises(DataError, match=f"{name} must be a whole number"):
        model.predict(["a"], **{name: value})


def test_an_unfinished_run_is_reported_as_unfinished(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")

    with pytest.raises(ModelError, match="not finished"):
        Elias.from_pretrained(tmp_path)


def test_a_model_is_loaded_by_a_single_process(model, tmp_path):
    config = model.config.override({"encoder.dim": 8, "encoder.hidden_dim": 8})
    saved = Elias(model.model, config.resolve(len(TEXTS), 40), NAMES)
    folder = saved.save_pretrained(tmp_path / "model")

    loaded = Elias.from_pretrained(folder, device="cpu", world=SingleProcess())

    assert loaded.predict(TEXTS).ids.tolist() == model.predict(TEXTS).ids.tolist()
