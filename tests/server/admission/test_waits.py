"""Where a predicted wait comes from: the live model where it knows the law, the services seen
where not.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kendall.policies import parse_policy
from kendall.policies.text import policy_batch_size
from kendall.queueing.control.wait_ahead import (
    BatchFormation,
    BatchService,
    SlotService,
    Wait,
    WaitForFormation,
)
from kendall.queueing.measurement.record import Record
from kendall.server.admission.waits import Waits

SLOTS = SlotService(slots=4, throughput=10.0, scv=0.5, first_token=0.02)
BATCHES = BatchService(
    largest=2, servers=1, sizes=(1, 2), means=(0.3, 0.5), variances=(0.0, 0.0), first_token=0.04
)


@dataclass
class FakeGateway:
    """What waits read of a gateway: its clock, its queue, its engine's bounds and its live
    model.
    """

    policy: str = "continuous:max_batch_size=4"
    at: float = 0.0
    ahead: Any = None
    queue_length: int = 0
    in_service: int = 0
    live: Any = None
    metrics: Any = field(default_factory=lambda: SimpleNamespace(registry=CollectorRegistry()))

    def __post_init__(self) -> None:
        self.live = SimpleNamespace(ahead=self.ahead)
        policy: Any = parse_policy(self.policy)
        self.batcher = SimpleNamespace(
            policy=policy,
            effective_max_batch_size=policy_batch_size(policy),
            queue_length=self.queue_length,
            in_service=self.in_service,
            capabilities=SimpleNamespace(servers=1),
        )

    def now(self) -> float:
        return self.at

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


def waits(**about: Any) -> tuple[Waits, FakeGateway]:
    gateway = FakeGateway(**about)
    return Waits(gateway), gateway  # type: ignore[arg-type]


def saw(of: Waits, *services: float, first_token: float = 0.01) -> None:
    """Requests that were served for so many seconds, under the policy in force."""
    of._seen._policy_text = "in force"
    for index, seconds in enumerate(services):
        record = Record(
            request_id=str(index),
            outcome="completed",
            policy="in force",
            dispatched_at=0.0,
            first_token_at=first_token,
            service_time=seconds,
        )
        of.on_record(record)


def batch(
    policy: str, at: float, *, size: int, arrived_at: float = 0.0, estimate: float | None = None
) -> Any:
    """What waits read of a dispatch."""
    engine_request = SimpleNamespace(request=SimpleNamespace(arrived_at=arrived_at))
    untouched = {
        "interruptions": 0,
        "preemptions": 0,
        "at": SimpleNamespace(first_token=None),
        "stop_detector": SimpleNamespace(output_tokens=0),
    }
    sequence = SimpleNamespace(
        engine_request=engine_request,
        wait_estimate=None if estimate is None else (0, estimate),
        **untouched,
    )
    return SimpleNamespace(
        policy=parse_policy(policy),
        policy_text="in force",
        server_id=0,
        dispatched_at=at,
        sequences=[sequence] * size,
    )


@pytest.mark.parametrize("served", [(), (9.0, 9.0, 9.0)])
def test_slots_wait_by_the_live_model_whatever_was_seen(served: tuple[float, ...]) -> None:
    found, _ = waits(ahead=SLOTS, in_service=4)
    saw(found, *served)
    for place in (0, 1, 5):
        estimate = found.wait(place, joining=0)
        assert estimate == SLOTS.wait(place, 4)
        assert estimate.mean > 0.05
    assert found.service() is SLOTS
    assert found.first_token() == (
        0.01 if served else 0.02
    )  # what was seen of it goes before the model
    assert found.until_gone(3) == pytest.approx(0.3)


def test_an_estimate_is_good_for_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same question: thousands arrive at one instant."""
    found, gateway = waits(ahead=SLOTS, in_service=4)
    asked: list[float] = []

    def service() -> SlotService:
        asked.append(gateway.at)
        return SLOTS

    monkeypatch.setattr(found, "service", service)
    for gateway.at in (5.0, 5.0, 5.0009, 5.0011, 5.002, 5.0022):
        assert found.wait(3, joining=0) == SLOTS.wait(3, 4)
    assert asked == [5.0, 5.0011, 5.0022]
    found.wait(4, joining=0)
    assert asked == [5.0, 5.0011, 5.0022, 5.0022], "another question"


def test_batches_wait_by_the_live_model_whatever_was_seen() -> None:
    policy = "capped:max_batch_size=2"
    found, gateway = waits(policy=policy, ahead=BATCHES)
    found.on_dispatch(batch(policy, 0.0, size=2))
    gateway.at = 7.0
    found.on_idle(0, 7.0)  # seven seconds for a batch of two: the live model says 0.5
    found.on_dispatch(batch(policy, 7.0, size=2))
    gateway.at = 7.1
    assert [found.wait(place, joining=0).mean for place in (0, 1, 2, 4)] == pytest.approx(
        [0.4, 0.4, 0.9, 1.4]
    )  # type: ignore[union-attr]
    assert found.first_token() == 0.04
    assert found.until_gone(4) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("arrived", "place", "joining", "most", "missing", "left"),
    [
        ((98.0,), 0, 0, ",max_wait=5s", 1, 3.0),  # the oldest of its batch has waited 2 s of 5
        ((98.0, 98.0, 99.0), 2, 0, ",max_wait=5s", 1, 4.0),
        ((98.0, 98.0), 2, 1, ",max_wait=5s", 1, 5.0),  # it will be the oldest
        ((), 0, 1, ",max_wait=5s", 1, 5.0),
        ((98.0,), 0, 0, "", 1, math.inf),
        ((98.0, 98.0), 1, 0, ",max_wait=5s", 0, 0),  # its batch is full
        ((98.0, 98.0), 2, 2, ",max_wait=5s", 0, 0),
    ],
)
def test_a_fixed_batch_waits_until_it_is_full_or_its_oldest_has_waited_long_enough(
    arrived: tuple[float, ...], place: int, joining: int, most: str, missing: int, left: float
) -> None:
    found, gateway = waits(
        policy=f"fixed:batch_size=2{most}", ahead=BATCHES, at=100.0, queue_length=len(arrived)
    )
    gateway.batcher.waiting = [
        SimpleNamespace(request=SimpleNamespace(arrived_at=at)) for at in arrived
    ]
    gateway.live_model = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        activity=SimpleNamespace(sequence_rate=lambda: 0.5)
    )
    server = BATCHES.wait(place, [])
    formed = WaitForFormation(server, BatchFormation(missing, 0.5, left)) if missing else server
    assert found.wait(place, joining=joining) == formed


def test_until_everything_has_left_is_one_full_set_of_slots_behind_the_queue() -> None:
    found, _ = waits(ahead=SLOTS, queue_length=6)
    assert found.until_idle() == pytest.approx((6 + 4) / 10.0)
    batches, gateway = waits(policy="capped:max_batch_size=2", ahead=BATCHES)
    gateway.batcher.unanswered = 3
    assert batches.until_idle() == pytest.approx(BATCHES.until_gone(3, []))


def test_what_follows_the_wait_is_what_was_seen_of_it() -> None:
    """Three services of 2, 2 and 5 s, each with its first token after 10 ms."""
    found, _ = waits(ahead=SLOTS)
    assert found.after("queueing_delay") == Wait(0.0)
    assert found.after("time_to_first_token") == Wait(0.02)
    assert found.after("service_time") is None
    saw(found, 2.0, 2.0, 5.0)
    weights = (0.99**2, 0.99, 1.0)
    mean = (2 * sum(weights[:2]) + 5) / sum(weights)
    variance = ((2 - mean) ** 2 * sum(weights[:2]) + (5 - mean) ** 2) / sum(weights)
    service = found.after("service_time")
    assert service is not None
    assert (service.mean, service.variance) == (pytest.approx(mean), pytest.approx(variance))
    assert found.after("time_to_first_token") == Wait(pytest.approx(0.01))
    assert found.after("sojourn_time") is None, "no end of an answer was seen"


def test_without_a_live_model_waits_come_from_the_services_seen() -> None:
    found, gateway = waits(in_service=4)
    saw(found, 2.0, 2.0, 2.0)
    service = found.service()
    assert isinstance(service, SlotService)
    assert (service.slots, service.throughput) == (4, pytest.approx(2.0))
    assert found.wait(0, joining=0) == service.wait(0, 4)
    assert found.first_token() == pytest.approx(0.01)
    gateway.live = None  # an engine that is still starting
    assert found.wait(1, joining=0) == service.wait(1, 4)


def test_before_anything_is_known_nothing_is_told() -> None:
    found, _ = waits()
    assert found.wait(0, joining=0) is None, "not even that a slot is free"
    assert found.service() is None
    assert found.until_gone(1) is None
    assert found.first_token() == 0.0
    full, gateway = waits()
    gateway.live = None
    assert full.wait(0, joining=0) is None


@pytest.mark.parametrize("known", ["live", "seen"])
def test_a_request_waits_from_the_place_on_at_which_no_slot_is_free(known: str) -> None:
    """Two of four slots are taken: the third to come is the first to wait."""
    found, _ = waits(ahead=SLOTS if known == "live" else None, in_service=2)
    if known == "seen":
        saw(found, 2.0)
    estimates = [found.wait(place, joining=0) for place in range(4)]
    assert [each.mean == 0.0 for each in estimates if each is not None] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("served", [(), (2.0,)])
def test_a_slot_is_free_by_the_engines_bound_where_the_live_model_still_has_another(
    served: tuple[float, ...],
) -> None:
    """Its law is of two slots, both taken; the engine has four."""
    found, _ = waits(ahead=SlotService(slots=2, throughput=10.0), in_service=2)
    saw(found, *served)
    estimates = [found.wait(place, joining=0) for place in range(3)]
    assert [each.mean == 0.0 for each in estimates if each is not None] == [True, True, False]


def test_every_server_has_its_slots() -> None:
    found, gateway = waits(ahead=SLOTS, in_service=6)
    gateway.batcher.capabilities.servers = 2
    estimates = [found.wait(place, joining=0) for place in range(3)]
    assert [each.mean == 0.0 for each in estimates if each is not None] == [True, True, False]


def test_batches_are_never_told_of_a_free_slot() -> None:
    found, _ = waits(policy="capped:max_batch_size=2", ahead=BATCHES, in_service=1)
    found.on_dispatch(batch("capped:max_batch_size=2", 0.0, size=1))
    estimate = found.wait(0, joining=0)
    assert estimate is not None
    assert estimate.mean == pytest.approx(0.3)


@pytest.mark.parametrize(("waiting", "throughput"), [(0, 8.0), (1, 0.5)])
def test_only_gaps_between_departures_while_somebody_waited_say_how_fast_full_slots_are(
    waiting: int, throughput: float
) -> None:
    """Two seconds between two departures: with an empty queue the engine had nothing to do."""
    found, gateway = waits(queue_length=waiting, in_service=4)
    saw(found, 0.5)
    for gateway.at in (2.0, 4.0, 6.0):
        saw(found, 0.5)
    service = found.service()
    assert isinstance(service, SlotService)
    assert service.throughput == pytest.approx(throughput)


def test_an_answer_is_given_again_for_a_millisecond_until_something_begins_or_ends() -> None:
    policy = "capped:max_batch_size=2"
    found, gateway = waits(policy=policy, ahead=BATCHES)
    found.on_dispatch(batch(policy, 0.0, size=2))
    first = found.wait(0, joining=0)
    gateway.at = 0.0009
    assert found.wait(0, joining=0) is first
    assert found.wait(2, joining=0) is not first, "another question"
    first = found.wait(0, joining=0)
    gateway.at = 0.0021
    later = found.wait(0, joining=0)
    assert later is not first
    found.on_idle(0, 0.0021)
    assert found.wait(0, joining=0).mean == 0.0  # type: ignore[union-attr]
    found.on_dispatch(batch(policy, 0.0021, size=2))
    assert found.wait(0, joining=0).mean == pytest.approx(0.5)  # type: ignore[union-attr]
    gateway.live.ahead = dataclasses.replace(BATCHES, means=(0.3, 0.8))
    found.begin_epoch()
    assert found.wait(0, joining=0).mean == pytest.approx(0.8)  # type: ignore[union-attr]


@pytest.mark.parametrize(("delay", "bound"), [(0.15, "0.2"), (0.95, "1.0"), (4.0, "5.0")])
def test_a_ratio_counts_from_the_next_bound_on(delay: float, bound: str) -> None:
    """Of a delay to a predicted wait of 1 s."""
    found, gateway = waits(policy="capped:max_batch_size=2")
    found.on_dispatch(batch("capped:max_batch_size=2", delay, size=1, estimate=1.0))
    (ratios,) = [
        metric
        for metric in gateway.metrics.registry.collect()
        if metric.name == "kendall_wait_observed_over_predicted"
    ]
    counted = [
        sample.labels["le"]
        for sample in ratios.samples
        if sample.name.endswith("_bucket") and sample.value == 1
    ]
    assert counted[0] == bound
    ends = "0.1 0.2 0.33 0.5 0.67 0.8 0.9 1.0 1.1 1.25 1.5 2.0 3.0 5.0 10.0 +Inf"
    assert {
        sample.labels["le"] for sample in ratios.samples if sample.name.endswith("_bucket")
    } == set(ends.split())


def test_the_account_adds_up_what_was_told_and_what_came() -> None:
    """Two were told 0.2 s and waited 0.3 s, one 0.5 ms and waited 0.5 s; one was told nothing;
    one neither told nor waited 1 ms; one was told and waited 1 ms, and no more.
    """
    found, gateway = waits(policy="capped:max_batch_size=2")
    found.on_dispatch(batch("capped:max_batch_size=2", 1.3, size=2, arrived_at=1.0, estimate=0.2))
    found.on_dispatch(batch("capped:max_batch_size=2", 2.0, size=1, arrived_at=1.0))
    found.on_dispatch(
        batch("capped:max_batch_size=2", 3.0, size=1, arrived_at=2.9995, estimate=0.0009)
    )
    found.on_dispatch(
        batch("capped:max_batch_size=2", 5.0, size=1, arrived_at=4.5, estimate=0.0005)
    )
    found.on_dispatch(
        batch("capped:max_batch_size=2", 0.001, size=1, arrived_at=0.0, estimate=0.001)
    )
    assert gateway.counted("kendall_wait_predicted_seconds_total") == pytest.approx(0.4005)
    assert gateway.counted("kendall_wait_observed_seconds_total") == pytest.approx(1.1)
    assert gateway.counted("kendall_wait_observed_over_predicted_count") == 3
    assert gateway.counted("kendall_wait_observed_over_predicted_sum") == pytest.approx(
        2 * 1.5 + 500
    )
