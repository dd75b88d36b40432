"""A process that works alone offers all that several processes share."""

import numpy as np
import pytest
import torch

from elias.distributed import SingleProcess
from elias.distributed.world import World

TENSOR = torch.arange(6.0).reshape(3, 2)
ARRAY = np.arange(6).reshape(3, 2)

CALLS = {
    "has_lost_process": ((), False),
    "share": ((5,), slice(0, 5)),
    "max_share": ((5,), 5),
    "all_reduce": ((TENSOR,), TENSOR),
    "all_gather": ((TENSOR,), TENSOR),
    "reduce_scatter": ((TENSOR,), TENSOR),
    "broadcast_tensors": (([TENSOR],), None),
    "broadcast": (("a value",), "a value"),
    "sum_array": ((ARRAY,), ARRAY),
    "gather_rows": ((ARRAY,), ARRAY),
    "check_same": (({"corpus": "1f"},), None),
    "run_on_rank0": ((lambda: 7,), 7),
    "broadcast_from_rank0": ((lambda: 7,), 7),
    "rank0_first": ((lambda: 7,), 7),
    "leave": ((), None),
}
"""Arguments and result of each method."""


@pytest.mark.parametrize("method", CALLS)
def test_a_single_process_returns_what_was_passed_in(method):
    arguments, expected = CALLS[method]

    result = getattr(SingleProcess(), method)(*arguments)

    assert np.array_equal(result, expected)


def test_the_maximum_over_a_single_process_is_its_own():
    assert SingleProcess().max_async([3, 1])() == [3, 1]


def test_every_public_method_of_a_world_is_called_above():
    methods = {name for name, part in vars(World).items() if callable(part) and name[0] != "_"}

    assert methods == {*CALLS, "max_async"}
