"""The parts on their own: settings, what a call may ask, token buckets, the adaptive limit,
moments that forget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kendall.policies import SpecError
from kendall.queueing.control.wait_ahead import Wait
from kendall.queueing.measurement.record import Record
from kendall.server.admission.buckets import MAX_KEYS, RateLimits, TokenBucket
from kendall.server.admission.concurrency import AdaptiveLimit
from kendall.server.admission.objectives import AdmissionObjective
from kendall.server.admission.rejections import Rejections
from kendall.server.admission.request_deadlines import NO_DEADLINES, request_deadlines_of
from kendall.server.admission.service_seen import HALF_LIFE, RecentMoments, ServiceSeen
from kendall.server.admission.settings import DelayTarget, OverloadSettings, delay_target
from kendall.server.admission.waits import Waits
from kendall.server.runtime.errors import ApiError


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("p99_queueing_delay=2s", DelayTarget(2.0, 0.99)),
        ("p99.9_queueing_delay = 2", DelayTarget(2.0, 0.999)),
        ("p50_queueing_delay=250ms", DelayTarget(0.25, 0.5)),
        ("mean_queueing_delay=1e-1s", DelayTarget(0.1, None)),
        ("p95_sojourn_time<=3s", DelayTarget(3.0, 0.95, "sojourn_time")),
        ("p90_ttft<500ms", DelayTarget(0.5, 0.9, "time_to_first_token")),
        ("mean_itl=20ms", DelayTarget(0.02, None, "inter_token_latency")),
        ("p99.99_service_time=9s", DelayTarget(9.0, 0.9999, "service_time")),
    ],
)
def test_an_slo_is_a_level_and_seconds(text: str, target: DelayTarget) -> None:
    found = delay_target(text)
    assert found.seconds == pytest.approx(target.seconds)
    assert found.level == (None if target.level is None else pytest.approx(target.level))
    assert found.quantity == target.quantity


@pytest.mark.parametrize(
    "text",
    [
        "p99_send_lateness=2s",
        "p99_queueing_delay",
        "p0_queueing_delay=1s",
        "p99_queueing_delay=0s",
        "p99_queueing_delay=1e999s",
        "2s",
    ],
)
def test_an_slo_that_cannot_be_admitted_by_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(SpecError, match="expected"):
        OverloadSettings(slo=text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"overload_status": 500},
        {"max_num_queued_reqs": 0},
        {"max_sequences_per_call": 0},
        {"rate_limit": -1.0},
        {"rate_limit": 0.01},  # with the default burst not even one request
        {"priority_aging": float("inf")},
        {"sse_keep_alive_interval": -1.0},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_at_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="got"):
        OverloadSettings(**wrong)


def test_nothing_but_the_queue_is_bounded_until_something_is_named() -> None:
    assert OverloadSettings().bounded
    unbounded: dict[str, Any] = {"max_num_queued_reqs": None}
    assert not OverloadSettings(**unbounded, queue_events=True, priority_aging=5.0).bounded
    for name, value in {
        "max_num_queued_reqs": 5,
        "max_num_queued_tokens": 5,
        "slo": "p90_queueing_delay=1s",
        "rate_limit": 1.0,
        "adaptive_concurrency": True,
    }.items():
        assert OverloadSettings(**(unbounded | {name: value})).bounded, name


@pytest.mark.parametrize(
    ("headers", "body", "default", "patience"),
    [
        ([], None, None, None),
        ([], None, 9.0, 9.0),
        ([], 2.0, 9.0, 2.0),
        ([], 20.0, 9.0, 9.0),  # not more than the server's
        ([(b"x-llm-d-inference-ttl", b"1500ms")], None, 9.0, 1.5),
        ([(b"x-llm-d-inference-ttl", b"1m30s")], None, None, 90.0),
        ([(b"x-llm-d-inference-ttl", b"3")], 2.0, None, 2.0),
        ([(b"x-llm-d-inference-ttl", b"100ns")], None, None, 1e-7),
        ([(b"x-llm-d-inference-ttl", b"500us")], None, None, 5e-4),
        ([(b"x-llm-d-inference-ttl", b"500\xb5s")], None, None, 5e-4),  # a header is latin-1
        ([(b"x-llm-d-inference-ttl", b"20ms")], None, None, 0.02),
        ([(b"x-llm-d-inference-ttl", b"2h")], None, None, 7200.0),
        ([(b"x-llm-d-inference-ttl", b"2h")], None, 60.0, 60.0),
        ([(b"x-llm-d-inference-ttl", b"9s"), (b"x-llm-d-inference-ttl", b"4s")], 6.0, None, 4.0),
    ],
)
def test_patience_is_the_least_that_anybody_named(
    headers: Any, body: float | None, default: float | None, patience: float | None
) -> None:
    assert request_deadlines_of(headers, body, default).patience == (
        None if patience is None else pytest.approx(patience)
    )


def test_a_call_that_asks_nothing_costs_nothing() -> None:
    assert request_deadlines_of([(b"host", b"x")], None, None) is NO_DEADLINES
    asked = request_deadlines_of([(b"x-llm-d-slo-ttft-ms", b"250")], None, None)
    assert (asked.patience, asked.first_token) == (None, pytest.approx(0.25))


@pytest.mark.parametrize("value", [b"", b"soon", b"-1s", b"0", b"5 s x", b"nan", b"inf"])
@pytest.mark.parametrize("name", [b"x-llm-d-inference-ttl", b"x-llm-d-slo-ttft-ms"])
def test_a_header_that_cannot_be_read_is_one_clear_error(name: bytes, value: bytes) -> None:
    with pytest.raises(ApiError, match="expected") as refused:
        request_deadlines_of([(name, value)], None, None)
    assert (refused.value.status, refused.value.param) == (400, name.decode())


def test_of_a_header_that_cannot_be_read_eighty_characters_are_said() -> None:
    with pytest.raises(ApiError) as refused:
        request_deadlines_of([(b"x-llm-d-slo-ttft-ms", b"x " * 99)], None, None)
    assert f"got x-llm-d-slo-ttft-ms: '{'x ' * 40}'; expected" in refused.value.message


def test_a_bucket_lets_the_burst_through_and_then_the_rate() -> None:
    bucket = TokenBucket(rate=2.0, size=4.0, level=4.0, at=0.0)
    bucket.take(4.0, 0.0)
    assert bucket.seconds_until(1.0, 0.0) == pytest.approx(0.5)
    assert bucket.seconds_until(1.0, 0.5) == 0.0
    bucket.take(5.0, 0.5)  # below zero
    assert bucket.seconds_until(1.0, 0.5) == pytest.approx(2.5)
    assert bucket.seconds_until(100.0, 1000.0) == 0.0, "no more than its size is ever asked of it"


def test_keys_are_limited_apart_and_answers_are_paid_for_afterwards() -> None:
    rates = RateLimits(requests=None, tokens=10.0, burst=1.0)
    assert rates.seconds_until("a", 0.0) == 0.0
    rates.admitted("a", "a-0", prompt_tokens=4, now=0.0)
    rates.answered("a-0", output_tokens=26, now=0.0)
    rates.answered("a-0", output_tokens=26, now=0.0)  # once only
    assert rates.seconds_until("a", 0.0) == pytest.approx(2.1)
    assert rates.seconds_until("b", 0.0) == 0.0


def test_the_longer_of_both_waits_counts_and_a_rejected_call_takes_nothing() -> None:
    """Two requests and ten tokens a second, three seconds of which are forgiven."""
    rates = RateLimits(requests=2.0, tokens=10.0, burst=3.0)
    assert rates.seconds_until("k", 0.0, 6) == 0.0
    assert rates.seconds_until("k", 0.0, 60) == 0.0, "no more than the burst is asked"
    for number in range(3):
        rates.admitted("k", str(number), 10, 0.0)
    assert rates.seconds_until("k", 0.0, 3) == pytest.approx(0.1), "one token"
    assert rates.seconds_until("k", 0.0, 4) == pytest.approx(0.5)
    rates.spend("k", 0.0)
    assert rates.seconds_until("k", 0.0, 3) == pytest.approx(0.5)
    rates.answered("0", 20, 1.0)
    assert rates.seconds_until("k", 1.0, 3) == pytest.approx(1.1)
    assert rates.seconds_until("k", 9.0, 6) == 0.0
    free = RateLimits(requests=None, tokens=None, burst=3.0)
    free.admitted("k", "0", 10, 0.0)
    free.spend("k", 0.0)
    free.answered("0", 20, 0.0)
    assert free.seconds_until("k", 0.0, 99) == 0.0


def test_the_rate_holds_in_the_long_run() -> None:
    rates, sent = RateLimits(requests=5.0, tokens=None, burst=2.0), 0
    for step in range(10_000):
        now = step / 100
        if rates.seconds_until("k", now) == 0.0:
            rates.admitted("k", str(step), 1, now)
            sent += 1
    assert sent == pytest.approx(5 * 100 + 10, abs=1)


def test_buckets_are_bounded_in_number() -> None:
    rates = RateLimits(requests=1.0, tokens=1.0, burst=1.0)
    for index in range(MAX_KEYS + 100):
        rates.seconds_until(str(index), 0.0)
    assert len(rates._buckets) == MAX_KEYS
    rates.seconds_until("100", 0.0)  # the oldest of those that are kept: it is the newest now
    rates.seconds_until("new", 0.0)
    assert ("100" in rates._buckets, "101" in rates._buckets) == (True, False)


@dataclass
class FakeBatch:
    """What the adaptive limit reads of a batch."""

    dispatched_at: float
    delay: float
    sequences: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = SimpleNamespace(arrived_at=self.dispatched_at - self.delay)
        self.sequences = [SimpleNamespace(engine_request=SimpleNamespace(request=request))]


def test_the_adaptive_limit_falls_under_a_standing_delay_and_creeps_up_without_one() -> None:
    limit = AdaptiveLimit(lambda: 10, now=0.0)
    limit.on_record(Record(request_id="a", outcome="completed", service_time=0.05))
    assert limit.limit == 10
    for window in range(1, 41):
        limit.on_rejection()
        limit.on_dispatch(FakeBatch(window * 0.2, 0.01))  # type: ignore[arg-type]
    assert limit.limit == 50
    for window in range(41, 44):
        limit.on_dispatch(FakeBatch(window * 0.2, 0.3))  # type: ignore[arg-type]
    assert limit.limit == int(50 * 0.9**3)
    for window in range(44, 100):
        limit.on_dispatch(FakeBatch(window * 0.2, 0.3))  # type: ignore[arg-type]
    assert limit.limit == 10, "never below what policy and engine can use"
    for window in range(100, 110):
        limit.on_dispatch(FakeBatch(window * 0.2, 0.01))  # type: ignore[arg-type]
    assert limit.limit == 10, "a limit that nobody meets does not grow"


def test_a_limit_that_nobody_has_met_yet_does_not_grow_either() -> None:
    limit = AdaptiveLimit(lambda: 10, now=0.0)
    limit.on_record(Record(request_id="a", outcome="completed", service_time=0.05))
    limit.on_dispatch(FakeBatch(0.2, 0.01))  # type: ignore[arg-type]
    assert limit.limit == 10


def of_batch(at: float, *delays: float) -> Any:
    """A batch of several."""
    batch = FakeBatch(at, 0.0)
    batch.sequences = [FakeBatch(at, delay).sequences[0] for delay in delays]
    return batch


@pytest.mark.parametrize(("service", "window"), [(0.2, 0.4), (0.04, 0.1)])
def test_a_window_of_two_service_times_ends_with_the_first_dispatch_behind_it(
    service: float, window: float
) -> None:
    limit = AdaptiveLimit(lambda: 10, now=0.0)
    limit.on_dispatch(of_batch(window, 0.0))
    limit.on_rejection()
    limit.on_record(Record(request_id="a", outcome="completed", service_time=service))
    limit.on_dispatch(of_batch(0.99 * window, 0.0))
    assert limit.limit == 10
    limit.on_dispatch(of_batch(window, 0.0))
    assert limit.limit == 11
    limit.on_rejection()
    limit.on_dispatch(of_batch(1.99 * window, 0.0))
    assert limit.limit == 11, "a window begins where the one before has ended"
    limit.on_dispatch(of_batch(2.01 * window, 0.0))
    assert limit.limit == 12


@pytest.mark.parametrize(("least", "limit"), [(0.5, 11), (0.51, 10)])
def test_a_queue_stands_where_the_youngest_of_every_batch_waited_for_a_service(
    least: float, limit: int
) -> None:
    """Of three batches in the window, one that waited less is enough."""
    adaptive = AdaptiveLimit(lambda: 10, now=0.0)
    adaptive.on_record(Record(request_id="a", outcome="completed", service_time=0.5))
    adaptive.on_rejection()
    for at, youngest in ((0.5, 3.0), (0.9, least), (1.0, 2.0)):
        adaptive.on_dispatch(of_batch(at, 9.0, youngest, 8.0))
    assert adaptive.limit == limit


def test_the_service_time_of_the_limit_follows_the_newest_by_a_tenth() -> None:
    limit = AdaptiveLimit(lambda: 10, now=0.0)
    for seconds in (1.0, 2.0, None, 2.0):
        limit.on_record(Record(request_id="a", outcome="completed", service_time=seconds))
    assert limit.service_time == pytest.approx(1.0 + 0.1 + 0.09)


def test_the_floor_is_looked_up_at_each_use() -> None:
    floor = 10
    limit = AdaptiveLimit(lambda: floor, now=0.0)
    limit.on_record(Record(request_id="a", outcome="completed", service_time=0.05))
    limit.on_dispatch(of_batch(0.2, 9.0))
    floor = 4
    assert limit.limit == 10
    limit.on_dispatch(of_batch(0.4, 9.0))
    assert limit.limit == 9
    floor = 20
    assert limit.limit == 20


P90 = DelayTarget(2.0, 0.9, "time_to_first_token")


@pytest.mark.parametrize(
    ("objective", "wait", "kept", "until"),
    [
        (AdmissionObjective(DelayTarget(1.0, None)), Wait(1.0, 0.5), True, 0.0),
        (AdmissionObjective(DelayTarget(1.0, None)), Wait(1.25, 0.5), False, 0.25),
        (AdmissionObjective(DelayTarget(1.0, 0.9)), Wait(1.0), True, 0.0),
        (AdmissionObjective(DelayTarget(1.0, 0.9)), Wait(1.5), False, 0.5),
        # exponential: its 90th percentile is ln 10 times its mean
        (
            AdmissionObjective(DelayTarget(1.0, 0.9)),
            Wait(0.5, 0.25),
            False,
            0.5 * math.log(10) - 1,
        ),
        (AdmissionObjective(DelayTarget(1.0, 0.9)), Wait(0.4, 0.16), True, 0.0),
        # what follows the wait is part of it
        (AdmissionObjective(P90, Wait(0.5)), Wait(1.5), True, 0.0),
        (AdmissionObjective(P90, Wait(0.5)), Wait(1.75), False, 0.25),
        (AdmissionObjective(P90, Wait(2.5)), Wait(0.0), False, math.inf),
        # or is all of it
        (AdmissionObjective(DelayTarget(1.0, None, "service_time"), Wait(1.0)), Wait(9.0), True, 0),
        (
            AdmissionObjective(DelayTarget(1.0, None, "service_time"), Wait(1.5)),
            Wait(0.0),
            False,
            math.inf,
        ),
    ],
)
def test_an_objective_is_kept_by_the_wait_and_what_follows_it(
    objective: AdmissionObjective, wait: Wait, kept: bool, until: float
) -> None:
    assert objective.kept(wait) is kept
    assert objective.seconds_until_kept(wait) == pytest.approx(until)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (
            AdmissionObjective(DelayTarget(1.0, None)),
            (
                "the predicted mean of the queueing delay is 1.5 s; expected at most 1 s: retry "
                "later"
            ),
        ),
        (
            AdmissionObjective(DelayTarget(1.0, 0.999)),
            (
                "the predicted p99.9 of the queueing delay is 1.5 s; expected at most 1 s: retry "
                "later"
            ),
        ),
        (
            AdmissionObjective(P90, Wait(0.75), own=True),
            (
                "the predicted p90 of the time to first token is 2.25 s (mean 1.5 s in the queue, "
                "0.75 s in service); expected at most 2 s: retry later, or allow more"
            ),
        ),
        (
            AdmissionObjective(DelayTarget(1.0, None, "sojourn_time"), Wait(0.75)),
            (
                "the predicted mean of the sojourn time is 2.25 s (mean 1.5 s in the queue, 0.75 s "
                "in service); expected at most 1 s: retry later"
            ),
        ),
        (
            AdmissionObjective(DelayTarget(0.5, None, "service_time"), Wait(0.75)),
            (
                "the predicted mean of the service time is 0.75 s; expected at most 0.5 s: retry "
                "later"
            ),
        ),
    ],
)
def test_a_missed_objective_says_what_was_predicted_of_what(
    objective: AdmissionObjective, said: str
) -> None:
    assert objective.rejection(Wait(1.5)) == said
    assert objective.param == ("x-llm-d-slo-ttft-ms" if objective.own else None)


class NotedWaits:
    """Keeps the places that were asked for."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def wait(self, place: int, joining: int) -> SimpleNamespace:
        assert joining == 0
        self.places.append(place)
        return SimpleNamespace(mean=1.5)

    def until_gone(self, count: int) -> float:
        self.places.append(count)
        return 2.5


@pytest.mark.parametrize(("queue_length", "place"), [(3, 2), (2, 1), (1, 0), (0, 0)])
def test_whose_patience_ran_out_would_come_back_to_a_queue_without_it(
    queue_length: int, place: int
) -> None:
    waits = NotedWaits()
    gateway: Any = SimpleNamespace(
        metrics=SimpleNamespace(registry=CollectorRegistry()),
        batcher=SimpleNamespace(queue_length=queue_length),
    )
    rejections = Rejections(gateway, OverloadSettings(), cast(Waits, waits))
    assert rejections.failure("queue_timeout", "its patience ran out").retry_after == 1.5
    assert waits.places == [place]


def rejections(
    waits: Any, settings: OverloadSettings | None = None, **batcher: int
) -> tuple[Rejections, CollectorRegistry]:
    """Before a queue of these numbers."""
    registry = CollectorRegistry()
    gateway: Any = SimpleNamespace(
        metrics=SimpleNamespace(registry=registry), batcher=SimpleNamespace(**batcher), live=None
    )
    return Rejections(gateway, settings or OverloadSettings(), waits), registry


def test_those_who_are_rejected_are_sent_to_places_one_behind_the_other() -> None:
    """There are as many turns as unanswered requests; an admission ends the promises."""
    waits = NotedWaits()
    found, _ = rejections(waits, unanswered=3)
    assert [found.until_gone(count) for count in (1, 1, 0.5, 1, 2)] == [2.5] * 5
    assert waits.places == [1, 2, 3, 1, 3]
    found.admitted()
    found.until_gone(1)
    assert waits.places[-1] == 1
    assert rejections(None, unanswered=0)[0].until_gone(1) is None


@pytest.mark.parametrize(("bound", "place"), [(100, 0), (96, 0), (91, 0), (90, 1), (51, 4), (1, 9)])
def test_so_many_prompts_of_the_mean_length_leave_until_there_is_room(
    bound: int, place: int
) -> None:
    """Ten that wait with 100 tokens: below 91 two of them have to be gone."""
    waits = NotedWaits()
    found, _ = rejections(waits, waiting_tokens=100, queue_length=10)
    assert found.until_fewer_tokens(bound) == 1.5
    assert waits.places == [place]
    without, _ = rejections(None, waiting_tokens=100, queue_length=10)
    assert without.until_fewer_tokens(bound) is None


@pytest.mark.parametrize(
    ("after", "wait", "retry", "predicted"),
    [
        (1.5, 0.0123456, 1.5, {"predicted_wait_ms": 12.346}),
        (None, None, None, {}),
        (math.inf, math.inf, None, {}),
    ],
)
def test_a_rejection_says_what_is_known_of_the_queue(
    after: float | None, wait: float | None, retry: float | None, predicted: dict[str, float]
) -> None:
    for shown in (True, False):
        settings = OverloadSettings(overload_status=503, wait_estimates=shown)
        found, _ = rejections(None, settings, queue_length=7)
        error = found.error("queue_full", "full", after, place=4, wait=wait, param="n")
        assert (error.status, error.code, error.message) == (503, "queue_full", "full")
        assert (error.param, error.retry_after) == ("n", retry)
        place = {"queue_length": 7, "queue_position": 4}
        assert error.details == place | (predicted if shown else {})
    assert found.error("queue_full", "full", None).details == {"queue_length": 7}


def test_moments_are_weighted_by_what_came_since_and_by_age() -> None:
    """Beside a weighted mean and variance of all of them."""
    rng = np.random.default_rng(1)
    values, instants = rng.exponential(2.0, 30), np.cumsum(rng.exponential(20.0, 30))
    moments = RecentMoments(0.9)
    for value, at in zip(values, instants, strict=True):
        moments.add(value, at)
    weights = 0.9 ** np.arange(29, -1, -1) * 0.5 ** ((instants[-1] - instants) / HALF_LIFE)
    mean = np.average(values, weights=weights)
    assert moments.weight == pytest.approx(weights.sum())
    assert moments.mean == pytest.approx(mean)
    assert moments.variance == pytest.approx(np.average((values - mean) ** 2, weights=weights))


@pytest.mark.parametrize(
    ("mean", "value", "count", "pause"),
    [
        (0.1, 1.2, 1, True),
        (0.1, 1.05, 1, False),  # less than a second
        (0.1, 0.45, 3, True),  # three times 0.35 s
        (0.1, 0.45, 2, False),
        (1.0, 4.1, 1, True),
        (1.0, 3.9, 1, False),  # less than four times as long
    ],
)
def test_a_pause_is_four_times_as_long_and_costs_a_second(
    mean: float, value: float, count: int, pause: bool
) -> None:
    moments = RecentMoments(0.95)
    moments.add(mean, 0.0)
    assert not moments.exceeded_by(99.0), "one says nothing of what is usual"
    moments.add(mean, 0.0)
    assert not moments.exceeded_by(99.0), "nor two, of which the first counts less"
    moments.add(mean, 0.0)
    assert moments.exceeded_by(value, count) is pause


def test_recent_moments_follow_a_change() -> None:
    moments = RecentMoments(0.9)
    for _ in range(50):
        moments.add(1.0, 0.0)
        moments.add(3.0, 0.0)
    assert moments.mean == pytest.approx(2.0, abs=0.1)
    assert moments.variance == pytest.approx(1.0, rel=0.1)
    for _ in range(100):
        moments.add(10.0, 0.0)
    assert moments.mean == pytest.approx(10.0, abs=0.01)
    assert moments.variance == pytest.approx(0.0, abs=0.05)


def test_answers_that_end_together_do_not_make_slots_look_fast() -> None:
    """Eight slots of one second that keep step: eight departures a second, whatever the gaps
    within a step were.
    """
    seen = ServiceSeen()
    for index in range(8):
        record = Record(
            request_id=str(index),
            outcome="completed",
            policy="",
            dispatched_at=0.0,
            service_time=1.0,
        )
        seen.on_record(record, 1.0 + index * 1e-5, somebody_waits=True)
    slots = seen.slots(8)
    assert slots is not None
    assert slots.throughput == pytest.approx(8.0)
    record = Record(
        request_id="later", outcome="completed", policy="", dispatched_at=1.0, service_time=1.0
    )
    seen.on_record(record, 9.0, somebody_waits=True)
    slower = seen.slots(8)
    assert slower is not None
    assert slower.throughput == pytest.approx(1.0, rel=0.05), "gaps that are longer count"
