"""What waits is computed together, in order, and never more than the queue may hold."""

import asyncio
import threading

import pytest

from elias.serve.backend import Backend, Job
from elias.serve.errors import RequestError
from elias.serve.settings import Limits, ServeSettings


def texts(*texts, kind="predict"):
    return Job(kind, texts, top_k=5)


class Machine:
    """Computes when it is let; keeps what it was given together."""

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


def run(scenario, *, max_batch=4, max_queue=6):
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

    asyncio.run(whole())
    return machine


async def held(backend, machine):
    """Have one job computed that does not come to an end yet."""
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


def test_a_batch_is_at_most_max_batch_unless_one_job_is_larger():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        asks = [texts("a", "b", "c"), texts("d", "e"), texts("f")]
        others = [asyncio.create_task(backend.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, *others)

    machine = run(scenario, max_batch=2)

    assert machine.batches[1:] == [[("a", "b", "c")], [("d", "e")], [("f",)]]


def test_jobs_of_two_kinds_are_not_computed_together():
    async def scenario(backend, machine):
        first = await held(backend, machine)
        asks = [texts("a"), texts("b", kind="explain"), texts("c")]
        others = [asyncio.create_task(backend.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, *others)

    machine = run(scenario)

    assert machine.batches[1:] == [[("a",)], [("b",)], [("c",)]]


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
        first = await held(backend, machine)
        asks = [texts("a"), texts("poison"), texts("b")]
        others = [asyncio.create_task(backend.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await first
        a, poison, b = await asyncio.gather(*others, return_exceptions=True)
        assert (a, b) == (["A"], ["B"])
        assert isinstance(poison, ValueError)

    run(scenario)


def test_closing_computes_what_was_accepted():
    tasks = []

    async def scenario(backend, machine):
        tasks.append(await held(backend, machine))
        tasks.append(asyncio.create_task(backend.submit(texts("second"))))
        await asyncio.sleep(0)

    run(scenario)

    assert [task.result() for task in tasks] == [["FIRST"], ["SECOND"]]
