"""What waits is computed together, in order, and never more than the queue may hold."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from elias.serve.batching import Batcher
from elias.serve.errors import RequestError
from elias.serve.metrics import Metrics


@dataclass(frozen=True)
class Texts:
    texts: tuple[str, ...]
    kind: str = "predict"

    @property
    def size(self):
        return len(self.texts)


class Machine:
    """Computes when it is let; keeps what it was given together."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, jobs):
        self.may_go.wait(10)
        self.batches.append([job.texts for job in jobs])
        if any("poison" in job.texts for job in jobs):
            raise ValueError("poison")
        return [[text.upper() for text in job.texts] for job in jobs]


def run(scenario, *, max_batch=4, max_queue=6):
    """Run a scenario with a batcher that was started, and return its machine."""
    machine = Machine()

    async def whole():
        with ThreadPoolExecutor(1) as thread:
            batcher = Batcher(
                machine, thread, max_batch=max_batch, max_queue=max_queue, metrics=Metrics()
            )
            batcher.start()
            try:
                await scenario(batcher, machine)
            finally:
                machine.may_go.set()
                await batcher.close()

    asyncio.run(whole())
    return machine


async def held(batcher, machine):
    """Have one job computed that does not come to an end yet."""
    machine.may_go.clear()
    first = asyncio.create_task(batcher.submit(Texts(("first",))))
    while batcher.depth or not first.done():
        await asyncio.sleep(0.001)
        if batcher.depth == 0:
            break
    return first


def test_what_comes_in_while_a_batch_is_computed_is_the_next_batch():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        others = [asyncio.create_task(batcher.submit(Texts((str(i),)))) for i in range(3)]
        await asyncio.sleep(0)
        machine.may_go.set()
        assert await first == ["FIRST"]
        assert [await other for other in others] == [["0"], ["1"], ["2"]]

    machine = run(scenario)

    assert machine.batches == [[("first",)], [("0",), ("1",), ("2",)]]


def test_a_batch_holds_no_more_than_it_may_unless_one_job_does():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        asks = [Texts(("a", "b", "c")), Texts(("d", "e")), Texts(("f",))]
        others = [asyncio.create_task(batcher.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, *others)

    machine = run(scenario, max_batch=2)

    assert machine.batches[1:] == [[("a", "b", "c")], [("d", "e")], [("f",)]]


def test_jobs_of_two_kinds_are_not_computed_together():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        asks = [Texts(("a",)), Texts(("b",), "explain"), Texts(("c",))]
        others = [asyncio.create_task(batcher.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, *others)

    machine = run(scenario)

    assert machine.batches[1:] == [[("a",)], [("b",)], [("c",)]]


def test_what_would_exceed_the_queue_is_refused_with_a_time_to_come_back():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        waiting = asyncio.create_task(batcher.submit(Texts(("a",) * 5)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            await batcher.submit(Texts(("b", "c")))
        assert int(refused.value.headers["Retry-After"]) >= 1
        last = asyncio.create_task(batcher.submit(Texts(("d",))))
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, waiting, last)

    run(scenario)


def test_what_nobody_waits_for_any_more_is_not_computed():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        gone = asyncio.create_task(batcher.submit(Texts(("gone",))))
        stays = asyncio.create_task(batcher.submit(Texts(("stays",))))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        machine.may_go.set()
        await asyncio.gather(first, stays)
        assert batcher.depth == 0

    machine = run(scenario)

    assert machine.batches == [[("first",)], [("stays",)]]


def test_one_job_that_fails_does_not_spoil_the_others():
    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        asks = [Texts(("a",)), Texts(("poison",)), Texts(("b",))]
        others = [asyncio.create_task(batcher.submit(ask)) for ask in asks]
        await asyncio.sleep(0)
        machine.may_go.set()
        await first
        a, poison, b = await asyncio.gather(*others, return_exceptions=True)
        assert (a, b) == (["A"], ["B"])
        assert isinstance(poison, ValueError)

    run(scenario)


def test_closing_computes_what_was_accepted():
    answers = []

    async def scenario(batcher, machine):
        first = await held(batcher, machine)
        second = asyncio.create_task(batcher.submit(Texts(("second",))))
        await asyncio.sleep(0)
        threading.Timer(0.05, machine.may_go.set).start()
        await batcher.close()
        answers.extend([await first, await second])

    run(scenario)

    assert answers == [["FIRST"], ["SECOND"]]
