"""Waits told under an order of service come true in the mean, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kendall.policies import Request, Running, Waiting, parse_policy
from kendall.queueing.control.service_ahead import service_ahead
from kendall.queueing.control.wait_ahead import BatchService, Pace, SlotService
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.server.admission import waits_in_order
from kendall.server.admission.waits import Waits
from kendall.server.admission.waits_in_order import is_estimated
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState
from tests.server.harness import engine_request_of, submitted
from tests.virtual_time import run_virtual

LAW = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,turnaround=0.0015"
LENGTHS, LIMIT = "lognormal:mu=3.178,sigma=1", 200


@dataclass
class Host:
    """What waits read of a gateway; whether the live model knows the law."""

    ahead: Any
    rate: float
    batcher: Any = None
    at: float = 0.0
    metrics: Any = field(default_factory=lambda: SimpleNamespace(registry=CollectorRegistry()))
    now: Callable[[], float] = field(
        default_factory=lambda: asyncio.get_running_loop().time,
    )

    @property
    def live(self) -> Any:
        activity = SimpleNamespace(sequence_rate=lambda: self.rate)
        return SimpleNamespace(ahead=self.ahead, activity=activity)

    def live_model(self) -> Any:
        return self.live

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


@dataclass
class Feed(Observer):
    """Tells waits what happens, as admission does."""

    waits: Waits

    def on_arrival(self, sequence: SequenceState) -> None:
        self.waits.joined(sequence.engine_request.request)
        self.waits.on_arrival(sequence)

    def on_dispatch(self, batch: Batch) -> None:
        self.waits.on_dispatch(batch)

    def on_idle(self, server_id: int, at: float) -> None:
        self.waits.on_idle(server_id, at)

    def on_record(self, record: Record) -> None:
        self.waits.on_record(record)


async def account(
    policy: str, load: float, predictor: str, count: int, *, live: bool = True
) -> tuple[float, float]:
    """Seconds observed and predicted of a run."""
    model = Queue.read(
        policy, LENGTHS, LAW, max_output_tokens=LIMIT, max_num_seqs=64, predictor=predictor
    )
    rate = load * model.largest_stable_rate
    jobs, _ = draw_jobs(model, rate, count, np.random.SeedSequence(7))
    host = Host(service_ahead(model) if live else None, rate)
    waits = Waits(host)  # type: ignore[arg-type]
    engine = EmulatedEngine(parse_law(LAW), max_num_seqs=64)
    host.batcher = Batcher(engine, await engine.start(), parse_policy(policy), [Feed(waits)])
    loop = asyncio.get_running_loop()
    for job in jobs:
        requests = [engine_request_of(job.request, job.output_tokens)]
        loop.call_at(job.request.arrived_at, submitted, host.batcher, requests)
    await asyncio.sleep(jobs[-1].request.arrived_at)
    await host.batcher.answered()
    observed, predicted = (
        host.counted(f"kendall_wait_{name}_seconds_total") for name in ("observed", "predicted")
    )
    return observed, predicted


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("load", [0.6, 0.8])
@pytest.mark.parametrize("predictor", ["exact", "lognormal:sigma=0.5", "exponential"])
@pytest.mark.parametrize("base", ["continuous:max_batch_size=4", "single"])
@pytest.mark.parametrize("order", ["spjf", "spjf,aging=0.002", "threshold,threshold=30"])
def test_waits_come_true_within_five_per_cent(
    base: str, order: str, predictor: str, load: float
) -> None:
    policy = f"{base}{',' if ':' in base else ':'}order={order}"
    observed, predicted = run_virtual(account(policy, load, predictor, 20_000))
    assert observed == pytest.approx(predicted, rel=0.05)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("policy", "predictor", "live"),
    [
        ("continuous:max_batch_size=4,order=spjf", "exact", True),
        ("continuous:max_batch_size=4,order=spjf,aging=0.002", "lognormal:sigma=0.5", False),
        ("single:order=threshold,threshold=30", "exact", False),
        ("single:order=edf", "none", True),
    ],
)
def test_waits_come_true_in_a_short_run(policy: str, predictor: str, *, live: bool) -> None:
    observed, predicted = run_virtual(account(policy, 0.7, predictor, 1200, live=live))
    assert observed > 2
    assert observed == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize(
    ("policy", "estimated"),
    [
        ("single:order=spjf", True),
        ("continuous:max_batch_size=2,order=ljf", True),
        ("continuous:max_batch_size=2,order=edf", True),
        ("single:order=hrrn", False),
        ("continuous:max_batch_size=2,order=sprpt", False),
        ("single:order=fb", False),
        ("capped:max_batch_size=2,order=spjf", False),
        ("dynamic:order=binned,bins=2", False),
    ],
)
def test_under_which_orders_waits_are_estimated(policy: str, *, estimated: bool) -> None:
    assert is_estimated(parse_policy(policy)) is estimated


def test_a_long_request_waits_for_those_ahead_and_those_who_will_overtake() -> None:
    """Two tokens a service ahead, ten its own; the pace is one second a token, half of which is
    over. Half of those who come, one in 10 s, take 2 s: W = (1.5 + 2) / (1 - 0.1).
    """
    waits, host = asked("single:order=spjf", running=[(2, 0)], waiting=[2, 10])
    host.rate = 0.1
    sample(waits, [2, 10])
    found = waits.wait(1, joining=0, request=request(10))
    assert found is not None
    assert found.mean == pytest.approx((2 + 2) / (1 - 0.1))
    made, _ = asked("single:order=spjf", running=[(2, 1)], waiting=[2, 10])
    assert made.wait(1, joining=0, request=request(10)).mean == pytest.approx(0.5 + 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(("at", "left"), [(0.0, 8.0), (1.0, 7.0), (3.0, 5.0), (9.0, 5.0)])
def test_what_is_over_of_a_prefill_is_not_waited_for(at: float, left: float) -> None:
    """Three seconds before the first of five tokens."""
    waits, host = asked("single:order=spjf", [(5, 0)], [2], Pace(3.0, 1.0))
    host.at = at
    found = waits.wait(0, joining=0, request=request(2))
    assert found is not None
    assert found.mean == pytest.approx(left)


def test_under_first_come_first_served_nothing_is_kept_of_what_arrived() -> None:
    waits, host = asked("single:order=spjf", [(5, 0)], [2])
    host.rate = 0.1
    sample(waits, [1, 2, 3])
    spjf = host.batcher.policy
    host.batcher.policy = parse_policy("single")
    sample(waits, [1, 2, 3])
    assert not waits._in_order._arrived
    host.batcher.policy = spjf
    assert waits.wait(0, joining=0, request=request(10)).mean == pytest.approx(5)  # type: ignore[union-attr]
    sample(waits, [4])
    assert waits.wait(0, joining=0, request=request(10)).mean == pytest.approx(5 / (1 - 0.1 * 4))  # type: ignore[union-attr]


def test_a_request_that_ranks_first_waits_for_the_slot_alone() -> None:
    waits, host = asked("single:order=spjf", running=[(5, 0)], waiting=[2, 10])
    host.rate = 0.1
    sample(waits, [2, 10])
    assert waits.wait(0, joining=0, request=request(2)).mean == 5.0  # type: ignore[union-attr]


def test_a_free_slot_is_no_wait() -> None:
    waits, _ = asked("continuous:max_batch_size=2,order=spjf", running=[(5, 0)], waiting=[3, 4])
    assert waits.wait(0, joining=0, request=request(3)).mean == 0.0  # type: ignore[union-attr]
    assert waits.wait(1, joining=0, request=request(4)).mean == 3.0  # type: ignore[union-attr]


def test_without_the_request_its_place_says_nothing_and_without_a_pace_neither() -> None:
    waits, host = asked("single:order=spjf", running=[(5, 0)], waiting=[2])
    assert waits.wait(0, joining=0) is None
    host.ahead = BatchService(largest=1, servers=1, sizes=(1,), means=(1.0,), variances=(0.0,))
    assert waits.wait(0, joining=0, request=request(2)) is None
    host.ahead = None
    assert waits.wait(0, joining=0, request=request(2)) is None, "nothing was served"


def test_of_a_long_queue_some_stand_for_all() -> None:
    """100 of 1 to 100 tokens before it: 5050 seconds of work and the 5 of the slot."""
    lengths = list(range(1, 102))
    waits, _ = asked("single:order=spjf", running=[(5, 0)], waiting=lengths)
    found = waits.wait(100, joining=0, request=request(101))
    assert found is not None
    assert found.mean == pytest.approx(5055, rel=0.02)
    slots, _ = asked(
        "continuous:max_batch_size=2,order=spjf", running=[(5, 0), (5, 0)], waiting=lengths
    )
    assert slots.wait(100, joining=0, request=request(101)).mean == pytest.approx(
        5060 / 2, rel=0.02
    )  # type: ignore[union-attr]


def test_a_switch_of_order_ranks_what_came_before_anew_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits_in_order, "SAMPLED", 3)
    waits, host = asked("single:order=spjf", running=[(5, 0)], waiting=[2])
    host.rate = 0.1
    sample(waits, [1, 2, 3, 10])
    assert waits.wait(0, joining=0, request=request(10)).mean == pytest.approx(
        5 / (1 - 0.1 * 5 / 3)
    )  # type: ignore[union-attr]
    host.batcher.policy = parse_policy("single:order=ljf")
    assert waits.wait(0, joining=0, request=request(2)).mean == pytest.approx(
        5 / (1 - 0.1 * 13 / 3)
    )  # type: ignore[union-attr]
    sample(waits, [4])
    assert waits.wait(0, joining=0, request=request(3)).mean == pytest.approx(
        5 / (1 - 0.1 * 14 / 3)
    )  # type: ignore[union-attr]


def test_with_aging_and_deadlines_later_ones_overtake_less() -> None:
    """A sampled request of 2 tokens overtakes one of 10 for 0.5 s x 8 = 4 s; its own rank is from
    the instant at which it arrived.
    """
    waits, host = asked("single:order=spjf,aging=0.5", running=[(6, 0)], waiting=[10])
    host.rate = 0.1
    sample(waits, [2])
    found = waits.wait(0, joining=0, request=request(10))
    assert found is not None
    assert found.mean == pytest.approx(6 + 4 * 0.2)
    host.at = 3.0
    assert waits.wait(0, joining=0, request=request(10)).mean == pytest.approx(6 + 1 * 0.2)  # type: ignore[union-attr]


def test_predictions_that_came_false_count_as_they_came() -> None:
    waits, _ = asked("single:order=spjf", running=[(4, 0)], waiting=[3])
    for _ in range(40):
        waits.on_record(record(predicted=4.0, tokens=8))
    waits.on_record(record(predicted=4.0, tokens=100, outcome="cancelled"))
    assert waits.wait(0, joining=0, request=request(3)).mean == 8.0  # type: ignore[union-attr]
    beyond, _ = asked("single:order=spjf", running=[(4, 0)], waiting=[3])
    for _ in range(40):
        beyond.on_record(record(predicted=400.0, tokens=200))  # as long as its limit lets it be
    assert beyond.wait(0, joining=0, request=request(3)).mean == 4.0  # type: ignore[union-attr]
    unpredicted, _ = asked("single:order=spjf", running=[(4, 0)], waiting=[3])
    for _ in range(40):
        unpredicted.on_record(record(predicted=None, tokens=50))
    assert unpredicted.wait(0, joining=0, request=request(3)).mean == 1.0  # type: ignore[union-attr]


def test_an_arrival_keeps_the_length_that_was_drawn_for_it() -> None:
    """Half of the predictions of 4 tokens meant 2, the others 8."""
    waits, host = asked("single:order=spjf", running=[(5, 0)], waiting=[2])
    host.rate = 0.1
    for tokens in (2, 8) * 20:
        waits.on_record(record(predicted=4.0, tokens=tokens))
    sample(waits, [4.0] * 50)
    asked_thrice = {waits.wait(0, joining=0, request=request(9)).mean for _ in range(3)}  # type: ignore[union-attr]
    assert len(asked_thrice) == 1


def test_only_the_first_dispatch_of_a_preempted_request_is_compared() -> None:
    waits, host = asked("single:order=spjf", running=[], waiting=[])
    sequence = SimpleNamespace(
        engine_request=SimpleNamespace(request=request(3)),
        wait_estimate=(0, 1.0),
        preemptions=0,
        interruptions=0,
    )
    batch = SimpleNamespace(
        policy=host.batcher.policy,
        policy_text="",
        server_id=0,
        dispatched_at=2.0,
        sequences=[sequence],
    )
    waits.on_dispatch(batch)  # type: ignore[arg-type]
    sequence.preemptions = 1
    waits.on_dispatch(batch)  # type: ignore[arg-type]
    assert host.counted("kendall_wait_observed_seconds_total") == 2.0


def request(tokens: float, at: float = 0.0) -> Request:
    return Request(
        id=str(tokens),
        arrived_at=at,
        prompt_tokens=1,
        max_output_tokens=200,
        predicted_output_tokens=tokens,
    )


def record(predicted: float | None, tokens: int, outcome: Any = "completed") -> Record:
    return Record(
        request_id="r",
        outcome=outcome,
        predicted_output_tokens=predicted,
        max_output_tokens=200,
        output_tokens=tokens,
    )


def sample(waits: Waits, lengths: list[float]) -> None:
    """Arrivals of these predicted lengths, at the instant 0."""
    for tokens in lengths:
        waits.joined(request(tokens))


def asked(
    policy: str,
    running: list[tuple[float, int]],
    waiting: list[float],
    pace: Pace = Pace(0.0, 1.0),  # noqa: B008 - frozen
) -> tuple[Waits, Host]:
    """A gateway at a pace of one second a token, with requests of these predicted lengths (and
    tokens made) in service and in the queue.
    """
    parsed: Any = parse_policy(policy)
    size = getattr(parsed, "max_batch_size", None) or 1
    ahead = (
        SlotService(slots=size, throughput=1.0, pace=pace)
        if parsed.joins_running
        else BatchService(
            largest=1, servers=1, sizes=(1,), means=(1.0,), variances=(0.0,), pace=pace
        )
    )
    served = [Running(request(tokens), 0.0, made) for tokens, made in running]
    batcher = SimpleNamespace(
        policy=parsed,
        effective_max_batch_size=size,
        capabilities=SimpleNamespace(servers=1),
        running=lambda: [served],
        waiting=[Waiting(request(tokens)) for tokens in waiting],
        in_service=len(served),
        queue_length=len(waiting),
    )
    host = Host(ahead, 0.0, batcher, now=lambda: host.at)
    return Waits(host), host  # type: ignore[arg-type]
