"""Waiting jobs are computed together, small ones soon, and the queue is bounded."""

import asyncio
import threading
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elias.serve.backend import Backend, Job
from elias.serve.schemas import RequestError
from elias.serve.settings import Limits, ServeSettings


def texts(*texts, kind="predict"):
    return Job(kind, texts, top_k=5)


class Machine:
    """Computes when it is let; keeps what it was given together."""

    batch_overhead = 0.0

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()
        self.may_go.set()

    def compute(self, jobs):
        self.may_go.wait(10)
        self.batches.append([job.texts for job in jobs])
        if any("poison" in job.texts for job in jobs):
            raise ValueError("poison")
        return [[text.upper() for text in job.texts] for job in jobs]


def run(scenario, *, max_batch=4, max_queue=6, batch_seconds=1e9):
    """Run a scenario with a backend that computes with a machine, and return the machine."""
    machine = Machine()
    limits = Limits(max_inputs=1, max_batch=max_batch, max_queue=max_queue)

    async def whole():
        backend = Backend(ServeSettings(model="m", limits=limits))
        backend._served = machine
        async with backend.running():
            try:
                await scenario(backend, machine)
            finally:
                machine.may_go.set()

    with patch("elias.serve.backend._BATCH_SECONDS", batch_seconds):
        asyncio.run(whole())
    return machine


async def held(backend, machine):
    """Start a job that runs until ``machine.may_go`` is set."""
    machine.may_go.clear()
    first = asyncio.create_task(backend.submit(texts("first")))
    while backend.depth or not first.done():
        await asyncio.sleep(0.001)
        if backend.depth == 0:
            break
    return first


def test_jobs_that_arrive_during_a_batch_form_the_next_batch():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        others = [asyncio.create_task(backend.submit(texts(str(i)))) for i in range(3)]
        await asyncio.sleep(0)
        machine.may_go.set()
        assert await first == ["FIRST"]
        assert [await other for other in others] == [["0"], ["1"], ["2"]]

    machine = run(scenario)

    assert machine.batches == [[("first",)], [("0",), ("1",), ("2",)]]


async def submit_all(backend, machine, jobs):
    """Submit jobs while another is computed, and return their results."""
    first = await held(backend, machine)
    tasks = [asyncio.create_task(backend.submit(job)) for job in jobs]
    await asyncio.sleep(0)
    machine.may_go.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_large_job_is_cut_up_and_a_small_one_does_not_wait_for_it():
    async def scenario(backend, machine):
        jobs = [texts(*"abcdefghi"), texts(*"klmno"), texts("z")]
        assert await submit_all(backend, machine, jobs) == [[*"ABCDEFGHI"], [*"KLMNO"], ["Z"]]

    machine = run(scenario, max_batch=4, max_queue=20)

    assert machine.batches[1:] == [
        [("a", "b"), ("z",), ("k",)],
        [("c", "d"), ("l", "m")],
        [("e", "f"), ("n", "o")],
        [("g", "h", "i")],
    ]


def test_half_of_each_batch_is_for_the_oldest_job_so_that_it_does_not_starve():
    async def scenario(backend, machine):
        singles = [texts(str(i)) for i in range(6)]
        await submit_all(backend, machine, [texts(*"abcd"), *singles])

    machine = run(scenario, max_batch=4, max_queue=20)

    assert machine.batches[1:3] == [[("a", "b"), ("0",), ("1",)], [("c", "d"), ("2",), ("3",)]]


@settings(max_examples=50, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["predict", "explain"]))),
    max_batch=st.integers(1, 5),
)
def test_every_job_gets_the_results_of_its_own_texts(jobs, max_batch):
    jobs = [
        texts(*(f"{number}-{i}" for i in range(size)), kind=kind)
        for number, (size, kind) in enumerate(jobs)
    ]

    async def scenario(backend, machine):
        results = await submit_all(backend, machine, jobs)
        assert results == [[text.upper() for text in job.texts] for job in jobs]
        assert backend.depth == 0

    machine = run(scenario, max_batch=max_batch, max_queue=10_000)

    assert max(sum(map(len, batch)) for batch in machine.batches) <= max_batch


def test_the_parts_of_a_job_are_computed_by_one_model_even_if_it_is_replaced():
    class NewMachine(Machine):
        def compute(self, jobs):
            return [[f"new {text}" for text in row] for row in super().compute(jobs)]

    async def scenario(backend, machine):
        machine.may_go.clear()
        job = asyncio.create_task(backend.submit(texts(*"abcdefgh")))
        while backend.depth != 6:
            await asyncio.sleep(0.001)
        backend._served = NewMachine()
        machine.may_go.set()
        assert await job == [f"new {text}" for text in "ABCDEFGH"]
        assert backend.depth == 0

    machine = run(scenario, max_batch=2, max_queue=20)

    assert machine.batches == [[("a", "b")]]


def test_slow_texts_make_small_batches():
    async def scenario(backend, machine):
        backend._seconds_per_text["predict"] = 0.02
        await submit_all(backend, machine, [texts(*"abcdefgh")])

    machine = run(scenario, max_batch=32, max_queue=40, batch_seconds=0.04)

    assert [len(batch[0]) for batch in machine.batches[1:]] == [4, 4]


def test_jobs_of_two_kinds_take_turns():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        asks = [texts("a"), texts("b", kind="explain"), texts("c")]
        others = [asyncio.create_task(backend.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, *others)

    machine = run(scenario)

    assert machine.batches[1:] == [[("b",)], [("a",), ("c",)]]


def test_a_full_queue_refuses_with_retry_after():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        waiting = asyncio.create_task(backend.submit(texts(*["a"] * 5)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            await backend.submit(texts("b", "c"))
        assert int(refused.value.headers["Retry-After"]) >= 1
        last = asyncio.create_task(backend.submit(texts("d")))
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, waiting, last)

    run(scenario)


def test_cancelled_jobs_are_not_computed():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        gone = asyncio.create_task(backend.submit(texts("gone")))
        stays = asyncio.create_task(backend.submit(texts("stays")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, stays)
        assert backend.depth == 0

    machine = run(scenario)

    assert machine.batches == [[("first",)], [("stays",)]]


def test_one_job_that_fails_does_not_spoil_the_others():
    async def scenario(backend, machine):
        jobs = [texts("a"), texts("poison", *"cdefg"), texts("b")]
        a, poison, b = await submit_all(backend, machine, jobs)
        assert (a, b) == (["A"], ["B"])
        assert isinstance(poison, ValueError)
        while backend._queue:
            await asyncio.sleep(0.001)
        assert backend.depth == 0

    run(scenario, max_queue=10)


def test_closing_computes_what_was_accepted():
    tasks = []

    async def scenario(backend, machine):
        tasks.append(await held(backend, machine))
        tasks.append(asyncio.create_task(backend.submit(texts("second"))))
        await asyncio.sleep(0)

    run(scenario)

    assert [task.result() for task in tasks] == [["FIRST"], ["SECOND"]]
