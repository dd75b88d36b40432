import threading

import numba
import pytest

from elias.kernels.threads import thread_map_progress


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
