import gzip
import json

import numpy as np
import pytest
from scipy import sparse

from elias.errors import DataError
from elias.inference.prediction_io import read_predictions
from elias.predictions import Predictions

NAMES = ["ant", "bee", "cat", "dog"]


@pytest.fixture
def predictions():
    """Two points over four labels; the second has one label only."""
    ids = [[3, 0, 1], [2, 4, 4]]
    scores = [[0.2, 0.9, 0.5], [0.25, 0.0, 0.0]]
    return Predictions.from_scores(ids, scores, n_labels=4, label_names=NAMES)


def as_lists(predictions):
    return [list(zip(row.ids.tolist(), row.scores.tolist(), strict=True)) for row in predictions]


def test_rows_are_sorted_by_score_and_padding_comes_last(predictions):
    assert predictions.ids.tolist() == [[0, 1, 3], [2, 4, 4]]
    assert predictions.scores[1].tolist() == [0.25, -np.inf, -np.inf]
    assert predictions.scores.dtype == np.float32


def test_ties_are_broken_by_label_id():
    predictions = Predictions.from_scores([[3, 1, 2]], [[0.5, 0.5, 0.5]], n_labels=4)

    assert predictions.ids.tolist() == [[1, 2, 3]]


def test_padding_stays_last_below_negative_scores():
    predictions = Predictions.from_scores([[4, 1]], [[0.0, -3.0]], n_labels=4)

    assert predictions.ids.tolist() == [[1, 4]]


def test_a_row_is_a_ranking_with_names_and_without_padding(predictions):
    row = predictions[1]

    assert (row.ids.tolist(), row.scores.tolist(), row.labels) == ([2], [0.25], ["cat"])
    assert len(row) == 1


def test_labels_without_names_are_named_by_their_ids():
    predictions = Predictions.from_scores([[3]], [[0.5]], n_labels=4)

    assert predictions[0].labels == ["3"]


def test_predictions_show_their_sizes_only(predictions):
    assert repr(predictions) == "Predictions(n=2, k=3, n_labels=4)"


def test_predictions_have_a_length_and_can_be_walked(predictions):
    assert len(predictions) == 2
    assert [row.labels for row in predictions] == [["ant", "bee", "dog"], ["cat"]]


def test_dicts_are_ready_for_json(predictions):
    dicts = predictions.to_dicts()

    assert json.loads(json.dumps(dicts))[1] == [{"id": 2, "label": "cat", "score": 0.25}]


def test_top_keeps_the_best_labels(predictions):
    assert predictions.top(1).ids.tolist() == [[0], [2]]
    assert predictions.top(9).ids.shape == (2, 3)


def test_among_more_labels_the_same_are_predicted(predictions):
    wider = predictions.among([*NAMES, "eel", "fox"])

    assert as_lists(wider) == as_lists(predictions)
    assert wider.ids[1].tolist() == [2, 6, 6]
    assert wider[0].labels == predictions[0].labels


def test_a_full_ranking_stays_full_among_more_labels():
    full = Predictions.from_scores([[1, 0]], [[0.2, 0.9]], n_labels=2)

    assert full.among(["ant", "bee", "cat"]).ids.tolist() == [[0, 1, 3]]


def test_a_threshold_keeps_scores_at_or_above_it(predictions):
    assert [row.labels for row in predictions.threshold(0.5)] == [["ant", "bee"], []]


def test_dropped_pairs_leave_no_gap(predictions):
    dropped = predictions.drop(np.array([[0, 0], [1, 3]]))

    assert dropped.ids.tolist() == [[1, 3, 4], [2, 4, 4]]


def test_a_pair_to_drop_outside_the_points_is_refused(predictions):
    with pytest.raises(
        DataError, match=r"filter pair \[2, 0\] is out of range for 2 points and 4 labels"
    ):
        predictions.drop(np.array([[0, 0], [2, 0]]))


def test_dropping_nothing_changes_nothing(predictions):
    dropped = predictions.drop(np.empty((0, 2), dtype=np.int64))

    assert as_lists(dropped) == as_lists(predictions)


def test_some_points_can_be_taken(predictions):
    assert predictions.take(np.array([1])).ids.tolist() == [[2, 4, 4]]


def test_a_score_of_zero_survives_csr():
    predictions = Predictions.from_scores([[1, 0]], [[0.0, 0.5]], n_labels=3)

    matrix = predictions.to_csr()

    assert matrix.shape == (1, 3)
    assert as_lists(Predictions.from_csr(matrix)) == [[(0, 0.5), (1, 0.0)]]


def test_csr_is_cut_to_the_best_k():
    matrix = sparse.csr_matrix(np.array([[0.1, 0.3, 0.2], [0.0, 0.0, 0.7]]))

    predictions = Predictions.from_csr(matrix, k=2)

    assert predictions.ids.tolist() == [[1, 2], [2, 3]]


def test_batches_of_different_width_stack(predictions):
    stacked = Predictions.stack([predictions.top(1), predictions])

    assert stacked.ids.tolist() == [[0, 4, 4], [2, 4, 4], [0, 1, 3], [2, 4, 4]]
    assert stacked.label_names is NAMES


def test_the_mean_counts_a_missing_label_as_zero():
    one = Predictions.from_scores([[0, 1]], [[1.0, 0.5]], n_labels=3)
    two = Predictions.from_scores([[1, 2]], [[0.75, 0.25]], n_labels=3)

    merged = Predictions.merge([one, two])

    assert as_lists(merged) == [[(1, 0.625), (0, 0.5), (2, 0.125)]]


def test_the_maximum_keeps_the_best_score_and_the_best_k():
    one = Predictions.from_scores([[0, 1]], [[1.0, 0.5]], n_labels=3)
    two = Predictions.from_scores([[1, 2]], [[0.75, 0.25]], n_labels=3)

    merged = Predictions.merge([one, two], how="max", k=2)

    assert as_lists(merged) == [[(0, 1.0), (1, 0.75)]]


def test_predictions_for_other_points_or_labels_do_not_merge(predictions):
    with pytest.raises(DataError, match="different numbers of points"):
        Predictions.merge([predictions, predictions.take(np.array([0]))])
    with pytest.raises(DataError, match="different numbers of labels"):
        Predictions.merge([predictions, Predictions.from_scores([[0]], [[1.0]], n_labels=9)])
    with pytest.raises(DataError, match="no predictions to combine"):
        Predictions.merge([])


@pytest.mark.parametrize(
    ("ids", "scores", "message"),
    [
        ([[5]], [[0.1]], "label id 5 is outside 0..3"),
        ([[-1]], [[0.1]], "label id -1 is outside 0..3"),
        ([[0], [1]], [[0.1], [np.nan]], "point 1 has a score of NaN"),
        ([[0, 0]], [[0.1, 0.2]], "point 0 has label 0 more than once"),
        ([[0, 1]], [[0.1]], "must be two arrays of the same shape"),
    ],
)
def test_impossible_predictions_are_refused(ids, scores, message):
    with pytest.raises(DataError) as caught:
        Predictions.from_scores(ids, scores, n_labels=4)

    assert message in str(caught.value)


def test_names_for_other_labels_are_refused():
    with pytest.raises(DataError, match="4 label names for 3 labels"):
        Predictions.from_scores([[0]], [[0.1]], n_labels=3, label_names=NAMES)


def test_no_points_at_all_are_predictions_too():
    empty = Predictions.from_csr(sparse.csr_matrix((0, 4)))

    assert len(empty) == 0
    assert empty.to_csr().shape == (0, 4)


EXPECTED = [[(0, 0.5), (3, 0.25)], [], [(2, 1.0)]]


def write(path, text):
    path.write_text(text, encoding="utf8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a\u2028b", "labels": [{"id": 3, "label": "dog", "score": 0.25},'
        ' {"id": 0, "score": 0.5}]}\n{"labels": []}\n{"labels": [{"id": 2, "score": 1}]}\n',
        "3:0.25 0:0.5\n\n2:1\n",
        "3 4\n0:.5 3:.25\n\n2:1e0\n",
    ],
    ids=["json lines", "text", "text with header"],
)
def test_predictions_are_read_from_lines(tmp_path, text):
    path = write(tmp_path / "predictions", text)
    zipped = tmp_path / "predictions.gz"
    zipped.write_bytes(gzip.compress(text.encode(), mtime=0))

    assert as_lists(read_predictions(path, n_labels=4)) == EXPECTED
    assert as_lists(read_predictions(zipped, n_labels=4)) == EXPECTED


def test_predictions_are_read_from_a_sparse_matrix(tmp_path):
    matrix = sparse.csr_matrix(np.array([[0.5, 0, 0, 0.25], [0, 0, 0, 0], [0, 0, 1, 0]]))
    sparse.save_npz(tmp_path / "scores.npz", matrix)

    predictions = read_predictions(tmp_path / "scores.npz", n_labels=4, label_names=NAMES)

    assert as_lists(predictions) == EXPECTED
    assert predictions[2].labels == ["cat"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": empty; expected one line of predictions for each point"),
        ("0:0.5\n1;3\n", ":2: expected id:score, not '1;3'"),
        ("0:0.5\n1\n", ":2: expected id:score, not '1'"),
        ("0:0.5\n4:0.5\n", ":2: label id 4 is outside 0..3"),
        ("0:0.5\n1:nan\n", ":2: the score of label 1 is NaN"),
        ("0:0.5 0:0.6\n", ":1: label 0 occurs more than once"),
        ("3 4\n0:0.5\n", ":1: says 3 points, but 1 lines follow"),
        ('{"labels": []}\n{"labels": 3}\n', ':2: expected {"labels": [{"id": 3, "score": 0.5}'),
        ('{"labels": []}\n{"labels"\n', ':2: expected {"labels": [{"id": 3, "score": 0.5}'),
        ('{"labels": [{"id": 9, "score": 1}]}\n', ":1: label id 9 is outside 0..3"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, text, message):
    path = write(tmp_path / "predictions", text)

    with pytest.raises(DataError) as caught:
        read_predictions(path, n_labels=4)

    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"PK\x03\x04", "not a scipy sparse matrix"),
        (gzip.compress(b"0:0.5\n", mtime=0)[:-4], "cannot be read"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "predictions"
    path.write_bytes(content)

    with pytest.raises(DataError) as caught:
        read_predictions(path, n_labels=4)

    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_matrix_for_other_labels_is_refused(tmp_path):
    sparse.save_npz(tmp_path / "scores.npz", sparse.csr_matrix((2, 5)))

    with pytest.raises(DataError, match=r"scores\.npz: 5 columns, but the corpus has 4 labels"):
        read_predictions(tmp_path / "scores.npz", n_labels=4)
