import threading
import time

import numba
import numpy as np
import pytest
import torch

from elias.kernels.threads import over_ranges, thread_map, thread_map_progress


def test_results_come_in_the_order_of_the_items():
    items = [[i] for i in range(50)]

    squares = thread_map_progress(lambda item, _: item[0] ** 2, items, dict, "squaring", 50)

    assert list(squares) == [i * i for i in range(50)]


def test_nothing_to_do_gives_nothing():
    assert list(thread_map_progress(lambda item, _: item, [], dict, "resting", 0)) == []


def test_each_thread_has_its_own_scratch_memory():
    made, clashes = [], []

    def memory():
        made.append(threading.Lock())
        return made[-1]

    def work(item, lock):
        if not lock.acquire(blocking=False):
            clashes.append(item)
        threading.Event().wait(0.001)
        lock.release()

    list(thread_map_progress(work, [[i] for i in range(40)], memory, "working", 40))

    assert not clashes
    assert 1 <= len(made) <= numba.get_num_threads()


def test_an_error_is_raised_and_later_items_are_not_started():
    begun = []

    def work(item, _):
        begun.append(item)
        threading.Event().wait(0.002)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(thread_map_progress(work, [[i] for i in range(200)], dict, "failing", 200))

    assert len(begun) < 200


def test_torch_uses_one_thread_in_each_thread():
    before = torch.get_num_threads()

    counts = list(thread_map(lambda *_: torch.get_num_threads(), range(8), dict))

    if numba.get_num_threads() > 1:
        assert set(counts) == {1}
    assert torch.get_num_threads() == before


def test_calls_may_be_nested():
    def count(n, _):
        return sum(thread_map(lambda i, _: i, range(n), dict))

    assert list(thread_map(count, range(20), dict)) == [n * (n - 1) // 2 for n in range(20)]


def test_ranges_cover_every_number_once():
    visited = np.zeros(101, dtype=int)

    def visit(begin, end):
        visited[begin:end] += 1

    over_ranges(visit, 101)
    over_ranges(visit, 0)

    assert (visited == 1).all()


def test_an_interrupt_waits_for_items_that_have_started():
    finished = []

    def work(item, _):
        if item == 0:
            raise KeyboardInterrupt
        time.sleep(0.1)
        finished.append(item)

    with pytest.raises(KeyboardInterrupt):
        list(thread_map(work, [0, 1], lambda: None))
    n_finished = len(finished)
    time.sleep(0.2)

    assert len(finished) == n_finished
