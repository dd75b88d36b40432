import weakref

import pytest
import torch

from elias.kernels.cuda_graphs import CapturedFunction


def record(work):
    """Stand in for a CUDA graph: do the work again, and leave the result in the same memory."""
    output = work()
    return lambda: output.copy_(work()), output


def doubled(values, *, negated):
    return values * (-2 if negated else 2)


def test_a_recurring_shape_and_option_is_captured():
    recordings = []
    recorded = CapturedFunction(doubled, lambda work: recordings.append(1) or record(work))
    calls = [([1.0], False), ([5.0], True), ([1.0, 2.0], False)]

    for values, negated in [*calls, *calls[:2], *calls[:2]]:
        output = recorded(torch.tensor(values), negated=negated)
        assert output.tolist() == doubled(torch.tensor(values), negated=negated).tolist()

    assert len(recordings) == 2


def test_a_shape_runs_eagerly_min_calls_times_before_it_is_captured():
    recordings = []
    recorded = CapturedFunction(
        doubled, lambda work: recordings.append(1) or record(work), min_calls=3
    )

    counts = []
    for width in (1, 2, 1, 1, 1, 2, 1):
        recorded(torch.ones(width), negated=False)
        counts.append(len(recordings))

    assert counts == [0, 0, 0, 0, 1, 1, 1]


def test_the_result_is_overwritten_by_the_next_call():
    recorded = CapturedFunction(doubled, record)
    recorded(torch.ones(2), negated=False)

    first = recorded(torch.ones(2), negated=False)
    recorded(torch.full((2,), 4.0), negated=False)

    assert first.tolist() == [8.0, 8.0]


def test_shapes_beyond_the_limit_run_eagerly(caplog):
    caplog.set_level("INFO", logger="elias")
    recordings = []
    recorded = CapturedFunction(
        doubled, lambda work: recordings.append(1) or record(work), max_graphs=2
    )

    for width in [1, 1, 2, 2, 3, 3, 3, 1]:
        output = recorded(torch.full((width,), 3.0), negated=False)
        assert output.tolist() == [6.0] * width

    assert len(recordings) == 2
    assert caplog.text.count("reached the limit of 2 CUDA graphs") == 1


def test_captured_graphs_can_be_released():
    recorded = CapturedFunction(doubled, record)
    for _ in range(2):
        output = recorded(torch.ones(1), negated=False)
    output_of_graph = weakref.ref(output)

    assert recorded.has_graphs
    recorded.release()
    del output

    assert output_of_graph() is None
    assert recorded.disabled
    assert not recorded.has_graphs
    assert recorded(torch.ones(1), negated=False).tolist() == [2.0]


def test_the_function_runs_eagerly_if_capturing_fails(caplog):
    def broken(_):
        raise RuntimeError("no graphs here\nstack of the driver")

    recorded = CapturedFunction(doubled, broken)

    for _ in range(3):
        assert recorded(torch.ones(1), negated=True).tolist() == [-2.0]
    assert caplog.text.count("no graphs here") == 1
    assert "stack of the driver" not in caplog.text


def test_too_little_memory_for_a_graph_is_not_an_error(caplog):
    def greedy(_):
        raise torch.OutOfMemoryError("too much")

    recorded = CapturedFunction(doubled, greedy)

    for _ in range(2):
        assert recorded(torch.ones(1), negated=False).tolist() == [2.0]
    assert "too much" in caplog.text


def test_graphs_are_released_if_an_eager_call_runs_out_of_memory(caplog):
    asked = []

    def scarce(values, *, negated):
        asked.append(len(recorded._graphs))
        if recorded._graphs and len(values) > 1:
            raise torch.OutOfMemoryError("the graphs have it all")
        return doubled(values, negated=negated)

    recorded = CapturedFunction(scarce, record)
    for _ in range(2):
        recorded(torch.ones(1), negated=False)

    for _ in range(3):
        assert recorded(torch.ones(2), negated=False).tolist() == [2.0, 2.0]
        assert recorded.run_eagerly(torch.ones(3), negated=True).tolist() == [-2.0] * 3

    assert asked[3:] == [1, 0, 0, 0, 0, 0, 0]
    assert caplog.text.count("continuing without them") == 1


def test_too_little_memory_without_graphs_is_an_error():
    def greedy(_, **__):
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        CapturedFunction(greedy, record)(torch.ones(1), negated=False)
