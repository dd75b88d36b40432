import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.errors import DataError
from elias.estimator import _inputs, _label_matrix, _label_sets


def test_a_label_matrix_is_not_changed_in_place():
    y = csr_matrix(np.array([[2, 0], [0, 3]], dtype=np.float32))

    matrix, classes = _label_matrix(y)

    assert y.data.tolist() == [2, 3]
    assert matrix.data.tolist() == [1, 1]
    assert classes.tolist() == [0, 1]


def test_frames_of_texts_features_and_indicators_are_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", "b"], "x": [1, 0], "y": [1, 1]}, index=[5, 6])

    matrix, classes = _label_matrix(frame[["x", "y"]])

    assert _inputs(frame[["text"]]) == ["a", "b"]
    assert _inputs(frame[["x", "y"]]).toarray().tolist() == [[1, 1], [0, 1]]
    assert matrix.toarray().tolist() == [[1, 1], [0, 1]]
    assert classes.tolist() == ["x", "y"]
    assert _label_sets(frame[["x", "y"]]) == [{"x", "y"}, {"y"}]
    with pytest.raises(DataError, match=r"X has 2 columns \('text', 'x'\); choose one text column"):
        _inputs(frame[["text", "x"]])
