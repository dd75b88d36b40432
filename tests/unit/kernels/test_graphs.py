import pytest
import torch

from elias.kernels.graphs import Recorded


def record(work):
    """Stand in for a CUDA graph: do the work again, and leave the result in the same memory."""
    found = work()
    return lambda: found.copy_(work()), found


def doubled(values, *, negated):
    return values * (-2 if negated else 2)


def test_work_is_recorded_once_for_each_shape_and_option():
    recordings = []
    recorded = Recorded(doubled, lambda work: recordings.append(1) or record(work))

    for values, negated in [([1.0], False), ([5.0], False), ([5.0], True), ([1.0, 2.0], False)]:
        found = recorded(torch.tensor(values), negated=negated)
        assert found.tolist() == doubled(torch.tensor(values), negated=negated).tolist()

    assert len(recordings) == 3


def test_what_was_found_is_overwritten_by_the_next_call():
    recorded = Recorded(doubled, record)

    first = recorded(torch.ones(2), negated=False)
    recorded(torch.full((2,), 4.0), negated=False)

    assert first.tolist() == [8.0, 8.0]


def test_other_shapes_than_the_first_sixteen_run_as_they_are():
    recorded = Recorded(doubled, record)
    for width in range(16):
        recorded(torch.ones(width), negated=False)

    once, again = (recorded(torch.full((20,), x), negated=False) for x in (1.0, 2.0))

    assert once.tolist() == [2.0] * 20  # memory of its own, not overwritten
    assert again.tolist() == [4.0] * 20


def test_where_nothing_can_be_recorded_the_work_is_done_all_the_same(caplog):
    def broken(_):
        raise RuntimeError("no graphs here\nstack of the driver")

    recorded = Recorded(doubled, broken)

    for _ in range(2):
        assert recorded(torch.ones(1), negated=True).tolist() == [-2.0]
    assert caplog.text.count("no graphs here") == 1
    assert "stack of the driver" not in caplog.text


def test_too_little_memory_is_not_hidden():
    def greedy(_):
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        Recorded(doubled, greedy)(torch.ones(1), negated=False)
