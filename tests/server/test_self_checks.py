"""Self-checks: they hold while everything is counted right, and each one breaks on its own kind
of miscount.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import numpy as np
import pytest

from kendall.policies import Policy, Request, parse_policy
from kendall.queueing.estimation.assumptions.checks import SelfCheck
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.live import self_checks
from kendall.server.live.activity import BusyTime
from kendall.server.live.self_checks import WIDTH, SelfChecks
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState
from tests.server.harness import Immediate, engine_request_of
from tests.virtual_time import VirtualTimeLoop, run_virtual

LAW = LatencyModel(k1=0.001, k2=0.004, k3=0.0001, k4=0.001)
STRETCH = 1.0  # seconds of virtual time


class Delayed(Observer):
    """The gateway's process loses the CPU between two of the batcher's own steps, now and then."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._steps = itertools.count(1)

    def on_arrival(self, sequence: SequenceState) -> None:
        self._stand()

    def on_dispatch(self, batch: Batch) -> None:
        self._stand()

    def on_idle(self, server_id: int, at: float) -> None:
        self._stand()

    def on_settle(self, sequence: SequenceState) -> None:
        self._stand()

    def on_record(self, record: Record) -> None:
        self._stand()

    def _stand(self) -> None:
        if next(self._steps) % 7 == 0 and isinstance(self._loop, VirtualTimeLoop):
            self._loop.stand(self._seconds)


class Watched(Observer):
    """The observer as the live model feeds it, with one fault of a kind."""

    def __init__(self, fault: str | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.busy = BusyTime(60.0)
        self.checks = SelfChecks(self._loop.time(), self.busy)
        self._fault = fault
        self._numbers = itertools.count()

    def on_arrival(self, sequence: SequenceState) -> None:
        self.checks.on_arrival(sequence.engine_request.request.arrived_at, self._loop.time())

    def on_dispatch(self, batch: Batch) -> None:
        self.busy.begin(batch.server_id, batch.dispatched_at)

    def on_idle(self, server_id: int, at: float) -> None:
        self.busy.end(server_id, at)

    def on_settle(self, sequence: SequenceState) -> None:
        self.checks.on_settle(sequence, self._loop.time())

    def on_record(self, record: Record) -> None:
        number = next(self._numbers)
        if self._fault == "lost record" and number == 40:
            return
        if (
            self._fault == "late release"
            and record.released_at is not None
            and record.arrived_at is not None
        ):
            record = msgspec.structs.replace(record, released_at=record.released_at + 0.05)
        if self._fault == "long service" and record.server_free_at is not None:
            record = msgspec.structs.replace(record, server_free_at=record.server_free_at + 0.02)
        self.checks.on_record(record, self._loop.time())


async def watched(
    policy: Policy, fault: str | None, servers: int = 1, delay: float = 0.0
) -> list[SelfCheck]:
    """Poisson arrivals for some stretches, some cancelled; the checks of all stretches."""
    loop = asyncio.get_running_loop()
    engine = EmulatedEngine(LAW, servers=servers)
    capabilities = await engine.start()
    observer = Watched(fault)
    batcher = Batcher(
        engine, capabilities, policy, [Delayed(delay), observer] if delay else [observer]
    )
    rng = np.random.default_rng(5)
    found: list[SelfCheck] = []

    def arrive(number: int) -> None:
        request = Request(
            id=str(number), arrived_at=loop.time(), prompt_tokens=4, max_output_tokens=64
        )
        consumer = Immediate()
        (consumer.sequence,) = batcher.submit(
            [engine_request_of(request, int(rng.integers(1, 40)))], [consumer]
        )
        if number % 17 == 0:
            loop.call_later(0.03, consumer.sequence.cancel)

    instants = np.cumsum(rng.exponential(1 / 40, 200))
    for number, at in enumerate(instants):
        loop.call_at(loop.time() + float(at), arrive, number)
    for _ in range(6):
        await asyncio.sleep(STRETCH)
        found += observer.checks.judge(
            loop.time(), batcher.unanswered_sequences(), batcher.queue_length, capabilities.servers
        )
    return found


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        "single",
        "dynamic",
        "fixed:batch_size=3",
        "elastic:max_batch_size=4",
        "continuous:max_batch_size=4",
    ],
)
def test_all_hold_whatever_the_policy_and_with_cancellations(text: str, servers: int) -> None:
    """Six stretches under load, edges, cancellations and idle time included."""
    found = run_virtual(watched(parse_policy(text), None, servers))
    assert len(found) == 18
    assert [check for check in found if not check.holds] == []
    assert max(check.measured for check in found if check.name == "little") > 0.3


@pytest.mark.parametrize(
    "text",
    ["dynamic", "fixed:batch_size=3", "elastic:max_batch_size=4", "continuous:max_batch_size=4"],
)
def test_all_hold_where_the_process_loses_the_cpu_between_two_steps(text: str) -> None:
    """20 ms, 40 times the slack of an event, between an instant that a record has and the step
    that counts it.
    """
    found = run_virtual(watched(parse_policy(text), None, delay=0.02))
    assert [check for check in found if not check.holds] == []


@pytest.mark.parametrize(
    ("fault", "broken"),
    [("lost record", "conservation"), ("late release", "little"), ("long service", "utilisation")],
)
def test_each_breaks_on_its_own_kind_of_miscount(fault: str, broken: str) -> None:
    """A record that is lost, an answer said to have left later than it did, a service said to
    have lasted longer.
    """
    found = run_virtual(watched(parse_policy("capped:max_batch_size=4"), fault))
    assert broken in {check.name for check in found if not check.holds}


def test_where_nobody_looks_little_is_kept_and_the_laws_hold_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway without predictions; a stretch that nobody judged is left out."""
    most = 7
    held: list[int] = []

    def record(checks: SelfChecks, record: Record, now: float) -> None:
        on_record(checks, record, now)
        held.append(len(checks._stays) // WIDTH)

    on_record = SelfChecks.on_record
    monkeypatch.setattr(SelfChecks, "on_record", record)
    monkeypatch.setattr(self_checks, "MOST", most)
    found = run_virtual(watched(parse_policy("capped:max_batch_size=4"), None))
    assert max(held) == most
    assert [check for check in found if not check.holds] == []
