import numpy as np
from scipy.sparse import csr_matrix

from elias.estimator import _label_matrix


def test_a_label_matrix_is_not_changed_in_place():
    y = csr_matrix(np.array([[2, 0], [0, 3]], dtype=np.float32))

    matrix, classes = _label_matrix(y)

    assert y.data.tolist() == [2, 3]
    assert matrix.data.tolist() == [1, 1]
    assert classes.tolist() == [0, 1]
