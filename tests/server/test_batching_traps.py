"""Traps that other batchers fell into, between the queue and the engine. Which test is for which
trap: tests/test_traps.py.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.policies import Fixed, Request, parse_policy
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import SequenceState
from tests.server.asgi import LAW, Call, completion, running
from tests.server.harness import (
    Collector,
    Immediate,
    engine_request_of,
    replay,
    submitted,
)
from tests.virtual_time import run_virtual

FAST = LatencyModel(k1=1e-6, k2=1e-6, k3=1e-6, k4=1e-6)
BOUNDED = {
    "single": 1,
    "dynamic": 5,  # the engine's own bound, here and below
    "fixed:batch_size=3": 3,
    "capped:max_batch_size=4": 4,
    "capped:max_batch_size=64": 5,
    "elastic": 5,
    "continuous:max_batch_size=2": 2,
    "continuous:max_batch_size=64": 5,
}


def request(name: str, at: float, **fields: float) -> Request:
    return Request(id=name, arrived_at=at, prompt_tokens=4, max_output_tokens=200, **fields)  # type: ignore[arg-type]


class Engine(EmulatedEngine):
    """Counts what it holds, as an engine that had a queue of its own would."""

    most = 0

    def dispatch(
        self, server_id: int, requests: Sequence, *, padded: bool, joining: bool
    ) -> Sequence:  # type: ignore[type-arg]
        streams = super().dispatch(server_id, requests, padded=padded, joining=joining)
        self.most = max(self.most, sum(len(server._answers) for server in self._servers))
        return streams


@pytest.mark.parametrize(("policy", "bound"), BOUNDED.items())
def test_the_backlog_waits_here_and_never_in_the_engine(policy: str, bound: int) -> None:
    """Places are counted here, at the instant of the dispatch: figures scraped from an engine
    are old, and let it fill up.
    """

    async def main() -> None:
        engine = Engine(parse_law(LAW), max_num_seqs=5)
        batcher = Batcher(engine, await engine.start(), parse_policy(policy))
        loop = asyncio.get_running_loop()
        rng = np.random.default_rng(1)
        for index in range(60):
            consumer = Immediate()
            (consumer.sequence,) = batcher.submit(
                [engine_request_of(request(f"r{index}", loop.time()), int(rng.integers(1, 9)))],
                [consumer],
            )
            await asyncio.sleep(float(rng.exponential(0.001)))
        assert batcher.queue_length > 10
        batcher.close()
        await batcher.answered()
        assert engine.most == bound

    run_virtual(main())


def test_a_place_is_held_until_the_last_token_of_its_stream() -> None:
    """Freed with the first byte or with the headers, places would be given out twice."""

    async def main() -> None:
        async with running("single") as (app, gateway):
            first, second = (
                Call(app, "POST", "/v1/completions", completion(max_tokens=20, stream=True))
                for _ in range(2)
            )
            while not first.whole:
                assert second.status is None
                assert gateway.batcher.in_service <= 1
                await asyncio.sleep(0.0005)
            await second.task
            assert first.chunks
            assert second.whole

    run_virtual(main())


@pytest.mark.parametrize(
    "policy", ["capped:max_batch_size=4", "fixed:batch_size=4", "elastic:max_batch_size=4"]
)
def test_batches_fill_while_a_backlog_waits(policy: str) -> None:
    """A limit on calls in front of the queue would keep the batcher short of members."""
    jobs = [(request(f"r{index}", 1.0), 5) for index in range(40)]
    records = run_virtual(replay(parse_policy(policy), jobs, parse_law(LAW)))
    batches = sorted(Counter(record.dispatched_at for record in records).items())
    sizes = [size for _, size in batches]
    assert sizes == (
        [4] * 10 if policy.startswith("fixed") else [1, *[4] * 9, 3]
    )  # the others do not wait for batch mates at the beginning


def test_a_full_batch_leaves_at_once_and_a_partial_one_when_its_oldest_has_waited() -> None:
    """Not held until the longest wait although it is full, and no timer that runs from the
    loop's own turn.
    """
    jobs = [
        (request(name, at), 1)
        for name, at in (
            ("a", 10.0),
            ("b", 10.4),
            ("c", 20.0),
            ("d", 20.1),
            ("e", 20.15),
            ("f", 30.0),
        )
    ]
    records = run_virtual(replay(Fixed(batch_size=3, max_wait=0.5), jobs, FAST))
    at = {record.request_id: record.dispatched_at for record in records}
    assert (at["a"], at["b"]) == (10.5, 10.5)
    assert (at["c"], at["d"], at["e"]) == (20.15, 20.15, 20.15)
    assert at["f"] == pytest.approx(30.0, abs=1e-6), "the end of the trace waits for nobody"


@pytest.mark.parametrize(
    "policy",
    ["fixed:batch_size=3,max_wait=1", "capped:max_batch_size=3", "continuous:max_batch_size=3"],
)
def test_members_that_leave_before_the_dispatch_neither_fill_nor_wedge_a_batch(policy: str) -> None:
    async def main() -> None:
        engine, collector = EmulatedEngine(parse_law(LAW)), Collector()
        batcher = Batcher(engine, await engine.start(), parse_policy(policy), [collector])
        for index in range(200):
            consumers = [Immediate() for _ in range(4)]
            for number, consumer in enumerate(consumers):
                asked = request(f"{index}.{number}", asyncio.get_running_loop().time())
                (consumer.sequence,) = batcher.submit([engine_request_of(asked, 3)], [consumer])
                if number % 2 == 0:  # whether it waits or is served already
                    consumer.sequence.cancel()
            await batcher.answered()
        outcomes = Counter(record.outcome for record in collector.records)
        assert outcomes == {"cancelled": 400, "completed": 400}
        assert (batcher.queue_length, batcher.in_service, batcher.waiting_tokens) == (0, 0, 0)

    run_virtual(main())


def test_the_second_engine_that_dies_of_a_request_alone_is_counted_as_the_second() -> None:
    async def main() -> None:
        engine, collector = EmulatedEngine(parse_law(LAW)), Collector()
        batcher = Batcher(engine, await engine.start(), parse_policy("single"), [collector])
        (consumer,) = submitted(batcher, [engine_request_of(request("deadly", 0.0), 200)])
        await asyncio.sleep(0.02)
        assert batcher.recovery.interrupt("gone", 3) is None
        await engine.stop()
        batcher.recovery.resume(await engine.start())
        await asyncio.sleep(0.02)
        assert batcher.recovery.interrupt("gone", 3) is consumer.sequence
        (record,) = collector.records
        assert (record.outcome, record.interruptions) == ("failed", 2)

    run_virtual(main())


class Tally(Observer):
    """Counts outcomes and keeps nothing."""

    def __init__(self) -> None:
        self.arrived = 0
        self.outcomes: Counter[str] = Counter()

    def on_arrival(self, sequence: SequenceState) -> None:
        self.arrived += 1

    def on_record(self, record: Record) -> None:
        self.outcomes[record.outcome] += 1


@pytest.mark.parametrize("requests", [4_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_counter_drifts(requests: int) -> None:
    """Patience that runs out, clients that leave the queue or the engine, switches of policy:
    the counts stay those of what is there.
    """

    async def main() -> None:
        engine, tally, rng = EmulatedEngine(FAST), Tally(), np.random.default_rng(7)
        batcher = Batcher(engine, await engine.start(), parse_policy("single"), [tally])
        loop, policies = asyncio.get_running_loop(), [parse_policy(text) for text in BOUNDED]
        for index in range(requests):
            now = loop.time()
            patience = math.inf if index % 3 else float(rng.exponential(2e-5))
            consumer = Immediate()
            asked = request(f"r{index}", now, deadline=now + patience)
            (consumer.sequence,) = batcher.submit(
                [engine_request_of(asked, 1 + index % 4)], [consumer]
            )
            if index % 5 == 0:
                loop.call_later(float(rng.exponential(2e-5)), consumer.sequence.cancel)
            if index % 500 == 0:
                batcher.switch(policies[index // 500 % len(policies)])
            if index % 4 == 0:
                await asyncio.sleep(float(rng.exponential(4e-5)))
            if index % 1000 == 0:
                _recount(batcher, tally)
        batcher.close()
        await batcher.answered()
        await asyncio.sleep(1.0)
        _recount(batcher, tally)
        assert sum(tally.outcomes.values()) == tally.arrived == requests
        assert (
            min(tally.outcomes[outcome] for outcome in ("completed", "abandoned", "cancelled"))
            > requests / 100
        )
        assert (
            batcher.unanswered,
            batcher.queue_length,
            batcher.in_service,
            batcher.waiting_tokens,
        ) == (0, 0, 0, 0)
        assert not batcher._expiries
        assert not any(server._answers for server in engine._servers)

    run_virtual(main())


def _recount(batcher: Batcher, tally: Tally) -> None:
    """The counts against what is really there."""
    waiting = list(batcher.waiting)
    assert batcher.queue_length == len(waiting)
    assert batcher.waiting_tokens == sum(item.request.prompt_tokens for item in waiting)
    assert batcher.unanswered >= len(waiting)
    assert batcher.in_service == sum(len(server) for server in batcher.running())
    assert len(batcher._expiries) <= len(waiting), "a timer is forgotten with its request"
    assert (
        0
        <= tally.arrived - sum(tally.outcomes.values()) - batcher.unanswered
        <= batcher.capabilities.max_num_seqs
    )
