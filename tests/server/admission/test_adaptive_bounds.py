"""Each bound of overload protection at its border, on the parts alone."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kendall.policies import Request, Single, SpecError, Waiting, parse_policy
from kendall.queueing.control.wait_ahead import (
    BatchService,
    SlotService,
    Wait,
    WaitForFormation,
    batch_formation,
)
from kendall.queueing.measurement.record import Record
from kendall.server.admission.concurrency import AdaptiveLimit
from kendall.server.admission.control import Overload, adaptive_floor, first_token_level
from kendall.server.admission.objectives import AdmissionObjective
from kendall.server.admission.rejections import Rejections
from kendall.server.admission.service_seen import (
    HALF_LIFE,
    OLDER_GAP,
    Pauses,
    RecentMoments,
    ServiceSeen,
)
from kendall.server.admission.settings import DelayTarget, OverloadSettings
from kendall.server.admission.waits import Places
from kendall.server.http import descriptors
from kendall.server.http.api.checked_call import check_sequences
from kendall.server.http.descriptors import Room, descriptor_limit, raise_descriptor_limit
from kendall.server.runtime.errors import ApiError
from kendall.server.security import early_answer
from kendall.server.security.early_answer import RejectionResponse
from tests.server.admission.test_early_rejection import part, refuse
from tests.server.admission.test_parts import FakeBatch
from tests.server.admission.test_waits import BATCHES, SLOTS, batch, waits
from tests.virtual_time import run_virtual

# settings


def test_what_holds_unless_an_operator_says_otherwise() -> None:
    found = OverloadSettings()
    assert (found.max_num_queued_reqs, found.max_sequences_per_call, found.overload_status) == (
        8192,
        256,
        429,
    )
    assert (found.rate_limit_burst, found.sse_keep_alive_interval) == (10.0, 0.0)
    assert (found.queue_events, found.adaptive_concurrency, found.wait_estimates) == (
        False,
        False,
        True,
    )
    assert (early_answer.MOST_BYTES, early_answer.MOST_SECONDS, early_answer.LINGER) == (
        1 << 20,
        5.0,
        1.0,
    )
    assert (descriptors.KEPT, descriptors.OWN, descriptors.LOG_EVERY, descriptors.ENOUGH) == (
        64,
        16,
        10.0,
        65536,
    )


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"rate_limit": 0.1}, True),  # one request in the ten seconds of a burst
        ({"rate_limit": 0.099}, False),
        ({"rate_limit": 1.0, "rate_limit_burst": 1.0}, True),
        ({"rate_limit": 1.0, "rate_limit_burst": 0.99}, False),
        ({"sse_keep_alive_interval": 0.0}, True),
        ({"sse_keep_alive_interval": math.inf}, False),
        ({"max_num_queued_reqs": 1}, True),
        ({"overload_status": 503}, True),
        ({"overload_status": 430}, False),
        ({"slo": "p1_queueing_delay=1s"}, True),
        ({"slo": "p99_queueing_delay=soon"}, False),
    ],
)
def test_a_setting_is_taken_up_to_its_border(settings: dict[str, Any], fits: bool) -> None:
    if fits:
        OverloadSettings(**settings)
    else:
        with pytest.raises(SpecError, match="expected"):
            OverloadSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "most", "option"),
    [
        ({}, 256, "--max-sequences-per-call"),
        ({"max_sequences_per_call": 6}, 6, "--max-sequences-per-call"),
        ({"max_num_queued_reqs": 4}, 4, "--max-num-queued-reqs"),
        ({"max_num_queued_reqs": 256}, 256, "--max-sequences-per-call"),
        ({"max_num_queued_reqs": None, "max_sequences_per_call": 9}, 9, "--max-sequences-per-call"),
    ],
)
def test_a_call_may_have_as_many_sequences_as_the_lesser_bound_says(
    settings: dict[str, Any], most: int, option: str
) -> None:
    check_sequences(OverloadSettings(**settings), most, "n")
    with pytest.raises(ApiError) as refused:
        check_sequences(OverloadSettings(**settings), most + 1, "n")
    assert (refused.value.status, refused.value.param) == (400, "n")
    assert (
        f"got a call of {most + 1} sequences (prompts x n); expected at most {most} ({option} of "
        "this gateway)"
    ) in refused.value.message


# objectives


def test_an_objective_is_kept_at_its_bound() -> None:
    mean = AdmissionObjective(DelayTarget(2.0, None))
    assert [mean.kept(Wait(seconds)) for seconds in (1.99, 2.0, 2.01)] == [True, True, False]
    level = AdmissionObjective(DelayTarget(2.0, 0.9))
    assert [level.kept(Wait(seconds)) for seconds in (1.99, 2.0, 2.01)] == [True, True, False]
    exact = SimpleNamespace(mean=1.0, within=lambda _: 0.9, quantile=lambda level: 10 * level)
    assert level.kept(exact)
    assert not level.kept(SimpleNamespace(mean=1.0, within=lambda _: 0.899))  # type: ignore[arg-type]
    assert level.seconds_until_kept(exact) == pytest.approx(7.0)
    assert AdmissionObjective(DelayTarget(0.0, None)).seconds_until_kept(Wait(3.0)) == 3.0
    late = DelayTarget(0.5, None, "time_to_first_token")
    assert AdmissionObjective(late, Wait(0.51)).seconds_until_kept(Wait(3.0)) == math.inf


def test_a_refusal_says_what_was_predicted_and_what_is_kept() -> None:
    assert AdmissionObjective(DelayTarget(1.5, 0.9)).rejection(Wait(2.0)) == (
        "the predicted p90 of the queueing delay is 2 s; expected at most 1.5 s: retry later"
    )
    first = "time_to_first_token"
    own = AdmissionObjective(DelayTarget(1.0, 0.9, first), Wait(0.25), own=True)  # type: ignore[arg-type]
    assert own.param == "x-llm-d-slo-ttft-ms"
    assert AdmissionObjective(DelayTarget(1.5, 0.9)).param is None
    assert own.rejection(Wait(2.0)) == (
        "the predicted p90 of the time to first token is 2.25 s (mean 2 s in the queue, 0.25 s in "
        "service); expected at most 1 s: retry later, or allow more"
    )
    mean = AdmissionObjective(DelayTarget(1.0, None, first), Wait(0.25))  # type: ignore[arg-type]
    assert "the predicted mean of the time to first token is 2.25 s" in mean.rejection(Wait(2.0))
    slow = AdmissionObjective(DelayTarget(0.02, 0.99, "inter_token_latency"), Wait(0.03))
    assert slow.rejection(Wait(2.0)) == (
        "the predicted p99 of the inter-token latency is 0.03 s; expected at most 0.02 s: retry "
        "later"
    )


@pytest.mark.parametrize(
    ("objectives", "level"),
    [((), 0.9), ((DelayTarget(1.0, 0.5),), 0.5), ((DelayTarget(1.0, None),), 0.9)],
)
def test_a_calls_own_limit_is_kept_at_the_level_of_the_operators(
    objectives: tuple[DelayTarget, ...], level: float
) -> None:
    assert first_token_level(objectives) == level


# admission: what a rejection says


def overload(**batcher: Any) -> Any:
    """What the methods below read; `wait` tells the place that it was asked about, with those who
    join the queue.
    """
    asked = SimpleNamespace(
        wait=lambda place, joining: Wait(float(place + joining)),
        after=lambda _: Wait(0.25),
        until_gone=float,
    )
    gateway = SimpleNamespace(batcher=SimpleNamespace(**batcher, effective_max_batch_size=8))
    return SimpleNamespace(
        _gateway=gateway,
        waits=asked,
        _waits=asked,
        _objectives=(),
        _level=0.9,
        promised_places=0,
    )


@pytest.mark.parametrize(
    ("tokens", "queue", "bound", "place"),
    [
        (120, 2, 100, 0),  # 60 each: one leaves, 60 are below 100
        (120, 2, 61, 0),
        (120, 2, 60, 1),  # 60 are not below 60: two
        (120, 2, 1, 1),
        (50, 1, 10, 0),
        (90, 3, 31, 1),
        (90, 3, 30, 2),
    ],
)
def test_a_client_comes_back_when_so_many_prompts_have_left_that_the_rest_is_below_the_bound(
    tokens: int, queue: int, bound: int, place: int
) -> None:
    assert (
        Rejections.until_fewer_tokens(overload(waiting_tokens=tokens, queue_length=queue), bound)
        == place
    )


def test_who_is_refused_is_told_the_wait_of_one_who_joins_the_queue() -> None:
    """Behind seven, as the eighth."""
    of = overload(queue_length=7)
    gateway = SimpleNamespace(
        batcher=of._gateway.batcher,
        live=None,
        metrics=SimpleNamespace(
            registry=CollectorRegistry(),
            calls=SimpleNamespace(received=SimpleNamespace(count=lambda _: None)),
        ),
    )
    rejections = Rejections(gateway, OverloadSettings(), of._waits)  # type: ignore[arg-type]
    details = rejections.queue_full("slo", 1, "full", None).details
    assert details == {"queue_length": 7, "queue_position": 7, "predicted_wait_ms": 8000.0}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_adaptive_floor_is_twice_what_all_servers_take(servers: int) -> None:
    found = adaptive_floor(overload(capabilities=SimpleNamespace(servers=servers))._gateway)
    assert (found, type(found)) == (16 * servers, int)


def test_the_turn_goes_round_the_backlog() -> None:
    of = overload(unanswered=3)
    assert [Rejections.until_gone(of, 1.0) for _ in range(5)] == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert [Rejections.until_gone(of, 1.5) for _ in range(2)] == [4.0, 2.0]
    Rejections.admitted(of)
    assert Rejections.until_gone(of, 1.0) == 1.0, "nobody is sent to a place that was given away"
    idle = overload(unanswered=0)
    assert [Rejections.until_gone(idle, 2.0) for _ in range(3)] == [2.0, 2.0, 2.0]
    idle._waits = None
    assert Rejections.until_gone(idle, 2.0) is None


def test_a_calls_own_limit_stands_beside_the_operators() -> None:
    of = overload()
    target = DelayTarget(1.0, 0.9, "time_to_first_token")
    assert Overload._promise(of, 1.0) == AdmissionObjective(target, Wait(0.25), own=True)


@pytest.mark.parametrize(
    ("priority", "taken"), [(100, True), (-100, True), (101, False), (-101, False)]
)
def test_a_priority_is_at_most_a_hundred_either_way(priority: int, taken: bool) -> None:
    of = SimpleNamespace(
        settings=OverloadSettings(priority_aging=1.0),
        _gateway=SimpleNamespace(limits=SimpleNamespace(patience=None, policy=Single())),
        _reads_priorities=lambda: Overload._reads_priorities(of),  # type: ignore[arg-type]
    )
    if taken:
        Overload.deadlines_of(of, [], None, priority)  # type: ignore[arg-type]
    else:
        with pytest.raises(ApiError, match="expected -100 to 100"):
            Overload.deadlines_of(of, [], None, priority)  # type: ignore[arg-type]
    of.settings = OverloadSettings()
    Overload.deadlines_of(of, [], None, priority)  # type: ignore[arg-type]
    of._gateway.limits.policy = parse_policy("single:order=priority")
    with nullcontext() if taken else pytest.raises(ApiError, match="expected -100 to 100"):
        Overload.deadlines_of(of, [], None, priority)  # type: ignore[arg-type]


# the adaptive limit


def seen(*service_times: float, floor: int = 10) -> AdaptiveLimit:
    limit = AdaptiveLimit(lambda: floor, now=0.0)
    for seconds in service_times:
        limit.on_record(Record(request_id="a", outcome="completed", service_time=seconds))
    return limit


def dispatch(limit: AdaptiveLimit, at: float, delay: float) -> None:
    limit.on_dispatch(FakeBatch(at, delay))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("service", "at", "over"),
    [(0.01, 0.099, False), (0.01, 0.1, True), (0.25, 0.499, False), (0.25, 0.5, True)],
)
def test_a_window_of_the_adaptive_limit_is_two_services_and_a_tenth_of_a_second_at_least(
    service: float, at: float, over: bool
) -> None:
    limit = seen(service)
    limit.on_rejection()
    dispatch(limit, at, 0.0)
    assert limit.limit == (11 if over else 10)


def test_the_mean_service_follows_by_a_tenth() -> None:
    limit = seen(1.0, 2.0)
    assert limit.service_time == pytest.approx(1.1)
    limit.on_record(Record(request_id="a", outcome="abandoned"))
    assert limit.service_time == pytest.approx(1.1)


@pytest.mark.parametrize(("delay", "bound"), [(0.2499, 21), (0.25, 21), (0.2501, 18)])
def test_the_least_delay_of_a_window_is_held_against_a_service(delay: float, bound: int) -> None:
    """Of the youngest member of each batch, from 5 s on: ten windows raise the limit to 20."""
    limit = seen(0.25)
    for window in range(1, 11):
        limit.on_rejection()
        dispatch(limit, 0.5 * window, 0.0)
    assert limit.limit == 20
    limit.on_rejection()
    dispatch(limit, 5.125, 3.0)
    dispatch(limit, 5.25, delay)
    mixed = FakeBatch(5.5, 5.0)
    mixed.sequences += FakeBatch(5.5, 0.3).sequences
    limit.on_dispatch(mixed)  # type: ignore[arg-type]
    assert limit.limit == bound
    dispatch(limit, 5.9, 0.0)
    assert limit.limit == bound, "a new window from then on"
    dispatch(limit, 6.0, 0.0)
    assert limit.limit == bound, "no call was rejected in it"


# services seen


def test_recent_moments_by_hand() -> None:
    moments = RecentMoments(0.5)
    moments.add(2.0, 0.0)
    assert (moments.weight, moments.mean, moments.variance) == (1.0, 2.0, 0.0)
    moments.add(4.0, 0.0)
    assert (moments.weight, moments.mean) == (1.5, pytest.approx(2 + 2 / 1.5))
    assert moments.variance == pytest.approx((1 - 1 / 1.5) * 4 / 1.5)
    moments.add(4.0, HALF_LIFE)
    assert moments.weight == pytest.approx(1 + 0.5 * 1.5 * 0.5)
    assert moments.at == HALF_LIFE


@pytest.mark.parametrize(
    ("weight", "value", "count", "exceeded"),
    [
        (2.0, 2.01, 1, True),
        (1.99, 2.01, 1, False),  # before two observations nothing is usual
        (2.0, 2.0, 1, False),  # four times 0.5 s, and no more
        (2.0, 1.51, 9, False),
        (2.0, 2.01, 0, False),
    ],
)
def test_a_pause_is_four_times_the_usual(
    weight: float, value: float, count: int, exceeded: bool
) -> None:
    assert RecentMoments(0.95, weight=weight, mean=0.5).exceeded_by(value, count) == exceeded


@pytest.mark.parametrize(("count", "exceeded"), [(11, False), (12, True)])
def test_a_pause_costs_more_than_a_second(count: int, exceeded: bool) -> None:
    """Steps of 0.11 s in place of 0.02 s: eleven of them take 0.99 s more."""
    assert RecentMoments(0.95, weight=5.0, mean=0.02).exceeded_by(0.11, count) == exceeded


def test_a_service_teaches_its_first_token_and_its_steps() -> None:
    pauses = Pauses()
    assert not pauses.lengthened(10.0, 10.5, 11.3, 5, 11.3)
    assert (pauses.first_token.mean, pauses.token.mean) == (0.5, pytest.approx(0.2))
    assert not pauses.lengthened(20.0, 20.5, 20.5, 1, 20.5)
    assert pauses.token.weight == 1.0, "one token has no step"
    assert not pauses.lengthened(30.0, None, 31.0, 5, 31.0)
    assert pauses.first_token.at == 20.5
    assert not pauses.lengthened(40.0, 40.5, 40.9, 2, 40.9)
    assert pauses.token.mean == pytest.approx(0.2 + 0.2 / pauses.token.weight)


def served(seen: ServiceSeen, at: float, seconds: float, *, waits: bool = False) -> None:
    record = Record(
        request_id="r",
        outcome="completed",
        policy="",
        dispatched_at=at - seconds,
        service_time=seconds,
    )
    seen.on_record(record, at, somebody_waits=waits)


def test_what_passed_while_the_queue_was_held_is_no_gap() -> None:
    """A calibration of a minute between two departures: `begin_epoch` is called at its end."""
    held, found = ServiceSeen(), ServiceSeen()
    for seen in (held, found):
        for number in range(5):
            served(seen, 1.0 + number, 0.5, waits=True)
    throughput = found.slots(4).throughput  # type: ignore[union-attr]
    found.begin_epoch()
    for seen in (held, found):
        served(seen, 65.0, 0.5, waits=True)
    assert found.slots(4).throughput == pytest.approx(throughput)  # type: ignore[union-attr]
    assert held.slots(4).throughput < throughput / 3  # type: ignore[union-attr]
    served(found, 66.0, 0.5)
    assert found.slots(4).throughput == pytest.approx(throughput)  # type: ignore[union-attr]


def test_slots_serve_by_the_mean_of_their_services_and_its_variation() -> None:
    found = ServiceSeen()
    assert found.slots(4) is None
    served(found, 1.0, 1.0)
    served(found, 1.0, 3.0)
    slots, weight = found.slots(4), 1 + OLDER_GAP
    mean = 1 + 2 / weight
    assert slots is not None
    assert (slots.slots, slots.throughput) == (4, pytest.approx(4 / mean))
    assert slots.scv == pytest.approx((1 - 1 / weight) * 4 / weight / mean**2)
    assert slots.first_token == 0.0


def test_gaps_count_once_there_are_two_of_them() -> None:
    """One slot; departures 2 s apart while somebody waited."""
    found = ServiceSeen()
    for at, throughput in ((10.0, 2.0), (12.0, 2.0), (14.0, 0.5)):
        served(found, at, 0.5, waits=True)
        slots = found.slots(1)
        assert slots is not None
        assert slots.throughput == pytest.approx(throughput)
    other = Record(
        request_id="r", outcome="completed", policy="another", dispatched_at=0.0, service_time=100.0
    )
    found.on_record(other, 20.0, somebody_waits=True)
    again = found.slots(1)
    assert again is not None
    assert again.throughput == pytest.approx(0.5), "of another policy"


def test_batches_are_known_by_size_until_the_policy_changes() -> None:
    found = ServiceSeen()
    assert found.batches(4, 1) is None
    for at, size, took in ((0.0, 3, 0.2), (1.0, 1, 0.1), (2.0, 3, 0.4)):
        found.on_dispatch(batch("capped:max_batch_size=4", at, size=size))
        assert [(each.size, each.elapsed) for each in found.in_service(at + 0.05)] == [
            (size, pytest.approx(0.05))
        ]
        found.on_idle(0, at + took)
        assert found.in_service(at + took) == []
    known = found.batches(4, 2)
    assert known is not None
    assert (known.largest, known.servers, known.sizes) == (4, 2, (1, 3))
    weight = 1 + 0.95 * 0.5 ** (2.2 / HALF_LIFE)
    assert known.means == (pytest.approx(0.1), pytest.approx(0.2 + 0.2 / weight))
    assert known.variances == (0.0, pytest.approx((1 - 1 / weight) * 0.04 / weight))
    assert known.first_token == 0.0, "none was seen"
    assert found.batches(4, 2) is known
    assert found.batches(4, 1) is not known
    assert found.batches(5, 1).largest == 5  # type: ignore[union-attr]
    found.on_idle(7, 9.0)
    changed = batch("capped:max_batch_size=4", 9.0, size=1)
    changed.policy_text = "another"
    found.on_dispatch(changed)
    assert found.batches(4, 1) is None


# waits


def test_everything_is_gone_when_the_queue_and_the_slots_are() -> None:
    slots, _ = waits(ahead=SLOTS, in_service=4, queue_length=6)
    assert slots.until_idle() == pytest.approx((6 + 4) / 10.0)
    batches, gateway = waits(policy="capped:max_batch_size=2", ahead=BATCHES)
    batches.on_dispatch(batch("capped:max_batch_size=2", 0.0, size=2))
    gateway.batcher.unanswered = 4
    assert batches.until_idle() == pytest.approx(1.0)
    unknown, gateway = waits()
    gateway.batcher.unanswered = 4
    assert unknown.until_idle() is None


@pytest.mark.parametrize(
    ("place", "joining", "left", "full"),
    [
        (0, 0, 3.0, True),  # of three in batches of two
        (1, 0, 3.0, True),
        (2, 0, 5.0, False),
        (3, 0, 5.0, False),
        (2, 1, 5.0, True),
        (4, 0, 6.0, False),
    ],
)
def test_fixed_batching_waits_for_company_or_until_its_oldest_has_waited(
    place: int, joining: int, left: float, full: bool
) -> None:
    """The three have waited for 3, 2 and 1 s of 6 s."""
    queue = [
        Waiting(
            Request(id=str(index), arrived_at=7.0 + index, prompt_tokens=1, max_output_tokens=1)
        )
        for index in range(3)
    ]
    fixed = BatchService(largest=2, servers=1, sizes=(2,), means=(0.5,), variances=(0.0,))
    found, gateway = waits(policy="capped:max_batch_size=2", ahead=fixed, at=10.0, queue_length=3)
    gateway.batcher.policy = parse_policy("fixed:batch_size=2,max_wait=6")
    gateway.batcher.waiting = queue
    gateway.live_model = lambda: SimpleNamespace(
        activity=SimpleNamespace(sequence_rate=lambda: 0.5)
    )  # type: ignore[attr-defined]
    estimate = found._batch_wait(fixed, place, joining, 10.0)
    alone = fixed.wait(place, [])
    formation = batch_formation(place, 3 + joining, 2, 0.5, left)
    assert (formation is None) == full
    assert estimate.mean == pytest.approx(
        alone.mean if formation is None else _later(alone, formation)
    )
    gateway.batcher.queue_length, gateway.batcher.waiting = 2, queue[:2]
    first_of_its_batch = found._batch_wait(fixed, 2, 1, 10.0)
    formation = batch_formation(2, 3, 2, 0.5, 6.0)
    assert first_of_its_batch.mean == pytest.approx(_later(fixed.wait(2, []), formation))
    gateway.batcher.queue_length, gateway.batcher.waiting = 3, queue
    gateway.batcher.policy = parse_policy("fixed:batch_size=2")
    endless = found._batch_wait(fixed, place, joining, 10.0)
    formation = batch_formation(place, 3 + joining, 2, 0.5, math.inf)
    assert endless.mean == pytest.approx(
        alone.mean if formation is None else _later(alone, formation)
    )


def _later(wait: Any, other: Any) -> float:
    return float(WaitForFormation(wait, other).mean)


def test_slots_seen_are_those_of_all_servers() -> None:
    found, gateway = waits(in_service=4)
    gateway.batcher.capabilities.servers = 3
    found._seen._policy_text = "in force"
    found.on_record(
        Record(
            request_id="0",
            outcome="completed",
            policy="in force",
            dispatched_at=0.0,
            service_time=2.0,
        )
    )
    service = found.service()
    assert isinstance(service, SlotService)
    assert service.slots == 12
    assert found.wait(7, joining=0).mean == 0.0  # type: ignore[union-attr]
    assert found.wait(8, joining=0).mean > 0.0  # type: ignore[union-attr]


# room for connections


class Logged:
    """A room with its rejections by reason."""

    def __init__(self, **limits: Any) -> None:
        self.registry = CollectorRegistry()
        self.room = Room(self.registry, **limits)

    def refused(self, reason: str) -> float | None:
        return self.registry.get_sample_value(
            "kendall_refused_connections_total", {"reason": reason}
        )

    @property
    def open(self) -> float | None:
        return self.registry.get_sample_value("kendall_connections")


CLIENT = ("10.0.0.1", 5)


@pytest.mark.parametrize(
    ("descriptor", "place"),
    [
        (0, "any"),
        (935, "any"),
        (936, "probes"),
        (983, "probes"),
        (984, "descriptors"),
        (1000, "descriptors"),
    ],
)
def test_of_a_thousand_descriptors_the_last_64_are_for_probes_and_the_last_16_for_nobody(
    descriptor: int, place: str
) -> None:
    async def main() -> None:
        of = Logged(limit=1000)
        assert of.refused("descriptors") == of.refused("address") == 0.0
        assert of.room.enter(descriptor, CLIENT) == place
        assert of.refused("descriptors") == (place != "any")
        assert of.open == 1.0
        of.room.leave(CLIENT)
        assert of.open == 0.0

    run_virtual(main())


def test_an_address_has_so_many_connections_at_once() -> None:
    async def main() -> None:
        of = Logged(most_per_address=2, limit=1000)
        assert [of.room.enter(5, CLIENT) for _ in range(3)] == ["any", "any", "address"]
        assert of.room.enter(5, ("10.0.0.2", 5)) == "any"
        assert [of.room.enter(5, None) for _ in range(3)] == ["any"] * 3
        of.room.leave(CLIENT)
        assert of.room.enter(5, CLIENT) == "address", "two are left, and this one"
        for left in (2, 1):
            of.room.leave(CLIENT)
            assert of.room._of_address[CLIENT[0]] == left
        assert [of.room.enter(5, CLIENT) for _ in range(2)] == ["any", "address"]
        for _ in range(2):
            of.room.leave(CLIENT)
        assert of.room.enter(5, CLIENT) == "any"
        for _ in range(2):
            of.room.leave(CLIENT)
        assert dict(of.room._of_address) == {"10.0.0.2": 1}
        assert of.refused("address") == 3.0

    run_virtual(main())


def test_refused_connections_are_logged_every_ten_seconds_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of = Logged(limit=1000)
        for seconds in (0.0, 1.0, 8.9, 0.1):
            await asyncio.sleep(seconds)
            of.room.enter(999, CLIENT)

    run_virtual(main())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "refused 1 connection",
        "refused 3 connections",
    ]
    assert (
        "1 are open, near the limit of 1000 open files (ulimit -n)"
        in caplog.records[0].getMessage()
    )


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("address", b"HTTP/1.1 429 Too Many Requests"),
        ("descriptors", b"HTTP/1.1 503 Service Unavailable"),
    ],
)
def test_a_refused_connection_gets_one_whole_answer(place: Any, line: bytes) -> None:
    head, _, body = Room(CollectorRegistry(), limit=1000).rejection(place).partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    assert first == line
    named = dict(header.split(b": ") for header in headers)
    assert (named[b"connection"], named[b"content-length"]) == (b"close", b"%d" % len(body))
    assert json.loads(body)["error"]["code"] == "too_many_connections"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The soft and hard limit on open files, and what was asked for."""
    found: dict[str, Any] = {"soft": 1024, "hard": 4096, "asked": []}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (found["soft"], found["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: found["asked"].append(pair))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("soft", "hard", "asked"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 10**6, (65536, 10**6)),
        (1024, resource.RLIM_INFINITY, (65536, resource.RLIM_INFINITY)),
        (4096, 4096, None),
        (65536, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_soft_limit_on_open_files_is_raised_to_the_hard_one(
    limits: dict[str, Any], soft: int, hard: int, asked: Any
) -> None:
    limits |= {"soft": soft, "hard": hard}
    raise_descriptor_limit()
    assert limits["asked"] == ([] if asked is None else [asked])
    assert descriptor_limit() == (math.inf if soft == resource.RLIM_INFINITY else soft)


def test_a_limit_that_cannot_be_raised_is_told(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_it(*_: object) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(resource, "setrlimit", refuse_it)
    raise_descriptor_limit()
    assert (
        "cannot raise the limit on open files above 1024 (not permitted): enough for 1024 "
        "connections"
    ) in caplog.text


def test_a_connection_for_probes_answers_them_and_closes() -> None:
    async def main() -> None:
        asked: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["path"])
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"connection", b"keep-alive"), (b"a", b"b")],
                }
            )

        probed = Room(CollectorRegistry(), limit=1000).probes_only(app)
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/metrics", 200),
            ("/v1/models", 503),
        ):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            await probed({"type": "http", "path": path, "headers": []}, receive, send)
            assert sent[0]["status"] == status
            assert [value for name, value in sent[0]["headers"] if name == b"connection"] == [
                b"close"
            ]
        assert asked == ["/health", "/ready", "/metrics"]

    run_virtual(main())


# a rejection that overtakes its body


@pytest.mark.parametrize(("size", "keeps"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_a_body_of_a_mebibyte_is_read_for_the_sake_of_the_connection(
    size: int, keeps: bool
) -> None:
    sent, _, took = run_virtual(
        refuse([part(1, more=True), None], [(b"content-length", b"%d" % size)])
    )
    assert (b"connection" not in dict(sent[0]["headers"]), took) == (keeps, 5.0 if keeps else 1.0)


@pytest.mark.parametrize("length", [b"-1", b"x", b""])
def test_a_length_that_is_none_is_not_believed(length: bytes) -> None:
    sent, _, _ = run_virtual(refuse([part(1, more=False)], [(b"content-length", length)]))
    assert dict(sent[0]["headers"])[b"connection"] == b"close"


def test_a_message_without_more_is_the_end_of_a_body() -> None:
    _, read, took = run_virtual(refuse([{"type": "http.request"}], [(b"content-length", b"1")]))
    assert (read, took) == ([0, 0, 1], 0.0)
    assert "x-request-id" not in RejectionResponse(ApiError(429, "queue_full", "no")).headers


# places in the queue


def test_places_are_told_once_a_second_to_those_who_listen() -> None:
    async def main() -> None:
        requests = [
            Waiting(Request(id=name, arrived_at=0.0, prompt_tokens=1, max_output_tokens=1))
            for name in "abc"
        ]
        gateway: Any = SimpleNamespace(batcher=SimpleNamespace(waiting=requests))

        def wait(place: int, *, joining: int, request: Request) -> Wait | None:
            assert joining == 0, "all stand in the queue already"
            assert request is requests[place].request
            return None if place == 0 else Wait(2.0 * place)

        waits_of: Any = SimpleNamespace(wait=wait)
        for known in (waits_of, None):
            places, told, began = (
                Places(gateway, known),
                list[tuple[Any, ...]](),
                asyncio.get_running_loop().time(),
            )

            def tell(
                name: str,
                place: int,
                wait: float | None,
                told: list[Any] = told,
                began: float = began,
            ) -> None:
                told.append(
                    (name, place, wait, round(asyncio.get_running_loop().time() - began, 6))
                )

            for name in "ac":
                places.listen(name, partial(tell, name))
            await asyncio.sleep(0.999)
            assert told == []
            await asyncio.sleep(1.5)
            third = None if known is None else 4.0
            assert told == [
                (name, place, wait, at)
                for at in (1.0, 2.0)
                for name, place, wait in (("a", 0, None), ("c", 2, third))
            ]
            places.forget("a")
            assert places._timer is not None
            places.forget("c")
            assert places._timer is None
            places.forget("c")
            await asyncio.sleep(3.0)
            assert len(told) == 4

    run_virtual(main())


@pytest.mark.parametrize(("policy", "every"), [("single", True), ("single:order=spjf", False)])
def test_under_an_order_of_service_the_first_hundred_are_told_their_waits(
    policy: str, every: bool
) -> None:
    """And nobody looks at the queue once nobody listens."""
    looks = 0

    class Queue:
        @property
        def waiting(self) -> list[Waiting]:
            nonlocal looks
            looks += 1
            return [
                Waiting(Request(id=str(i), arrived_at=0.0, prompt_tokens=1, max_output_tokens=1))
                for i in range(102)
            ]

    async def main() -> None:
        queue: Any = Queue()
        queue.policy = parse_policy(policy)
        told: list[tuple[int, float | None]] = []
        gateway: Any = SimpleNamespace(batcher=queue)
        known: Any = SimpleNamespace(wait=lambda *_, **__: Wait(1.0))
        places = Places(gateway, known)
        for name in ("99", "100"):
            places.listen(name, lambda place, wait: told.append((place, wait)))
        await asyncio.sleep(1.5)
        assert told == [(99, 1.0), (100, 1.0 if every else None)]
        for name in ("99", "100"):
            places.forget(name)
        await asyncio.sleep(5.0)
        assert looks == 1

    run_virtual(main())
