"""The window over watched servers, by hand: when a request was dispatched, whose clock is which,
where the window ends, who came late, and what each server had in service.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import pytest

from kendall.server.watch.fleet import Fleet, ServedRequest, WatchedReplica
from kendall.server.watch.spans import RequestSpan

CLOCK = 1_790_000_000  # Unix seconds that a server's clock shows at our instant 0


def span(
    name: str,
    arrived: float,
    whole: float,
    *,
    replica: str = "a",
    queued: float = 0.0,
    prefill: float = 0.1,
    decode: float = 0.9,
    outputs: int = 10,
    first_token: float = 0.65,
) -> RequestSpan:
    """Seconds of the server's clock, which is right."""
    return RequestSpan(
        request_id=name,
        replica=replica,
        started_ns=CLOCK * 10**9 + round(arrived * 1e9),
        queued=queued,
        prefill=prefill,
        decode=decode,
        first_token=first_token,
        whole=whole,
        prompt_tokens=20,
        output_tokens=outputs,
        max_tokens=50,
    )


def add(fleet: Fleet, came: float, *spans: RequestSpan) -> None:
    for each in spans:
        assert fleet.add(each, came) is None


def names(served: list[ServedRequest]) -> list[str | None]:
    return [each.record.client_request_id for each in served]


@pytest.mark.parametrize(
    ("changed", "dispatched", "started", "first", "first_token"),
    [
        # half a step of 0.1 s in the queue is a wait: it took its slot as the scheduler says
        ({"queued": 0.06}, 0.6, 0.6, 0.7, 0.65),
        ({"queued": 0.04}, 0.04, 0.6, 0.7, 0.65),
        # a step of two tokens is their one gap
        ({"queued": 0.46, "outputs": 2}, 0.6, 0.6, 0.7, 0.65),
        ({"queued": 0.44, "outputs": 2}, 0.44, 0.6, 0.7, 0.65),
        # without a gap it is the prefill
        ({"queued": 0.06, "outputs": 1, "decode": 0.0}, 1.5, 1.5, 1.6, 0.65),
        ({"queued": 0.04, "outputs": 1, "decode": 0.0}, 0.04, 1.5, 1.6, 0.65),
        # parts that are longer than the whole begin with the arrival, and a token has come by then
        ({"decode": 1.7, "first_token": 1.75}, 0.0, 0.0, 0.0, 1.6),
        ({"decode": 1.55, "queued": 0.01}, 0.0, 0.0, 0.05, 0.65),
    ],
)
def test_the_record_of_a_span(
    changed: dict[str, Any], dispatched: float, started: float, first: float, first_token: float
) -> None:
    """Its clock is ours: it came as it ended."""
    fleet = Fleet()
    add(fleet, 20.0, span("x", 18.4, 1.6, **changed))
    (found,), servers = fleet.advance(40.0)
    assert servers == 1
    instants = (found.arrived, found.started, found.first, found.last)
    assert instants == pytest.approx((18.4, 18.4 + started, 18.4 + first, 20.0))
    assert found.queued == changed.get("queued", 0.0)
    record = found.record
    assert (record.request_id, record.client_request_id) == ("x-0", "x")
    assert (record.outcome, record.server_id, record.batch_id) == ("completed", 0, None)
    tokens = record.prompt_tokens, record.output_tokens, record.max_output_tokens
    assert tokens == (20, changed.get("outputs", 10), 50)
    at = 18.4 + dispatched
    assert (
        record.arrived_at,
        record.dispatched_at,
        record.first_dispatched_at,
        record.first_token_at,
        record.last_token_at,
        record.released_at,
    ) == pytest.approx((18.4, at, at, 18.4 + first_token, 20.0, 20.0))
    parts = record.queueing_delay, record.service_time, record.sojourn_time
    assert parts == pytest.approx((dispatched, 1.6 - dispatched, 1.6))


def test_a_clock_is_set_by_the_quickest_span_of_six_seconds() -> None:
    """Two seconds and half a second until they came: the clock is half a second late from then on,
    and the law knows from a third one that 0.4 of them were an export's.
    """
    fleet = Fleet()
    add(fleet, 12.0, span("slow", 6.0, 4.0))
    add(fleet, 15.0, span("quick", 12.0, 2.5))
    assert fleet.advance(17.9) == ([], 1)
    assert (fleet.end, fleet.known) == (-math.inf, 0)
    found, _ = fleet.advance(18.0)  # the quick one ended at 15.0, the longest stay is 4 seconds
    assert (names(found), fleet.end, fleet.known) == (["slow"], pytest.approx(11.0), 1)
    assert found[0].arrived == pytest.approx(6.5)
    add(fleet, 19.0, span("quicker", 17.9, 1.0))
    found, _ = fleet.advance(26.0)  # what ended six seconds ago is here
    assert (names(found), fleet.end, fleet.known) == (["quick"], pytest.approx(16.0), 2)
    assert fleet.advance(26.0) == ([], 1)
    assert (fleet.begin, fleet.longest()) == pytest.approx((6.0, 4.0))
    assert names(list(fleet.since(7.0))) == ["quick"]
    assert names(list(fleet.since(6.4))) == ["slow", "quick"]
    ended = [fleet.ended_between(start, 15.1) for start in (10.4, 10.6)]  # at 10.5, 15 and 19.4
    assert ended == [2, 1]
    times = fleet.served_times()
    assert times.arrived == pytest.approx([6.1, 12.1])
    assert times.started == pytest.approx([9.1, 13.6])
    assert times.first == pytest.approx([9.2, 13.7])
    assert times.last == pytest.approx([10.1, 14.6])
    assert times.held == pytest.approx([4.0, 2.5])
    columns = (times.queued, times.prompts, times.outputs, times.server)
    assert [each.tolist() for each in columns] == [[0, 0], [20, 20], [10, 10], [0, 0]]


@pytest.mark.parametrize(("late", "shifts"), [(0.6, (0.5, 0.0)), (0.7, (0.0, 0.0))])
def test_clocks_that_seem_to_differ_by_no_more_than_half_a_second_are_one(
    late: float, shifts: tuple[float, float]
) -> None:
    """Spans of the one server come `late`, those of the other 0.1 seconds after their ends."""
    fleet = Fleet()
    add(fleet, 20 + late, span("x", 18.0, 2.0))
    add(fleet, 20.1, span("y", 18.5, 1.5, replica="b"))
    fleet.advance(50.0)
    times = fleet.served_times()
    arrived = dict(zip(times.server.tolist(), times.arrived.tolist(), strict=True))
    assert arrived == pytest.approx({0: 18 + late - shifts[0], 1: 18.6 - shifts[1]})


def test_a_span_that_comes_late_is_told_of_once() -> None:
    fleet = Fleet()
    add(fleet, 20.0, span("first", 18.0, 2.0), span("last", 19.5, 0.5))
    assert names(fleet.advance(40.0)[0]) == ["first", "last"]
    assert fleet.end == pytest.approx(40 - 6 - 2)
    add(fleet, 41.0, span("late", 19.0, 1.0), span("later", 18.5, 1.5), span("new", 40.0, 1.0))
    found, _ = fleet.advance(41.0)
    assert names(found) == ["late", "later"]
    assert fleet.known == 4
    assert names(list(fleet.since(0.0))) == ["first", "later", "late", "last"]
    # they took 21 seconds, so that what ended 31.5 seconds ago is here: the window ends no earlier
    assert fleet.end == pytest.approx(39.0)  # by the newest end
    assert fleet.advance(60.0)[0] == []
    assert names(fleet.advance(80.0)[0]) == ["new"]
    assert fleet.end == pytest.approx(80 - 1.5 * 21 - 2)


def test_the_window_ends_two_minutes_ago_at_most_for_a_long_stay() -> None:
    fleet = Fleet()
    add(fleet, 1000.0, span("long", 500.0, 500.0))
    fleet.advance(1010.0)
    assert fleet.end == pytest.approx(1004 - 120)


def test_spans_from_before_the_first_export_are_not_used() -> None:
    """What a server kept until somebody listened is a part of what it served."""
    fleet = Fleet()
    add(fleet, 100.0, span("now", 99.0, 1.0), span("kept", 93.0, 0.9), span("near", 93.0, 1.1))
    assert names(fleet.advance(120.0)[0]) == ["near", "now"]
    assert fleet.early == 1


def test_a_server_that_sends_nothing_is_gone_unless_all_do() -> None:
    fleet = Fleet()
    for second in range(40):
        add(fleet, second + 0.5, span(f"x{second}", second, 0.5))
        if second < 5:
            add(fleet, second + 0.5, span(f"y{second}", second, 0.5, replica="b"))
    assert fleet.advance(34.0)[1] == 2  # 29.5 seconds after its last one
    assert fleet.known_until(34.0) == pytest.approx(28.0)  # of the other one 39.5
    assert fleet.advance(35.0)[1] == 1
    assert fleet.known_until(35.0) == pytest.approx(39.5)
    assert [each.gone for each in fleet.replicas.values()] == [False, True]
    add(fleet, 36.5, span("y36", 36, 0.5, replica="b"))
    assert fleet.known_until(36.5) == pytest.approx(36.5)
    assert fleet.advance(200.0)[1] == 2  # nobody sends requests
    assert not any(each.gone for each in fleet.replicas.values())


@pytest.mark.parametrize(
    ("requests", "last_came", "after"),
    [(11, 100.0, 200.0), (2, 10.0, 200.0), (1, 10.0, 200.0), (11, 10.0, 30.0)],
)
def test_a_server_is_silent_after_twenty_gaps_and_thirty_seconds(
    requests: int, last_came: float, after: float
) -> None:
    replica = WatchedReplica("a", 0, 0, 0, 0.0, requests=requests, last_came=last_came)
    assert not replica.silent(last_came + after)
    assert replica.silent(last_came + after + 0.1)


@pytest.mark.parametrize(
    ("delays", "ended", "known"),
    [([], 5.0, 94.0), ([1.0, 3.9], 5.0, 94.0), ([8.0, 1.0], 5.0, 88.0), ([8.0], 99.0, 99.0)],
)
def test_until_when_all_that_ended_is_known(
    delays: list[float], ended: float, known: float
) -> None:
    replica = WatchedReplica("a", 0, 0, 0, 0.0, last_ended=ended, delays=deque(delays))
    assert replica.known_until(100.0) == known


def test_a_clock_is_another_one_after_ten_spans_in_turn_that_agree() -> None:
    """Within a minute of each other, and more than that from the clock before."""
    second = 10**9
    replica = WatchedReplica("a", 0, 7, 7, 1.0, settled=True)
    assert replica.follows(7 + 60 * second, 2.0)
    other, agreeing = 7 + 60 * second + 1, 7 + 120 * second + 1
    assert not any(replica.follows(other, 2.0) for _ in range(9))
    assert replica.follows(7, 2.0)  # one of the clock itself: the others were strays
    assert not any(replica.follows(each, 2.0) for each in [other] * 9)
    assert not any(replica.follows(each, 2.0) for each in [agreeing + 1, other] * 9)
    assert not replica.follows(agreeing + 1, 2.0)
    assert not any(replica.follows(each, 2.0) for each in [agreeing, other] * 4)
    assert (replica.offset_ns, replica.settled, replica.since) == (7, True, 1.0)
    assert replica.follows(agreeing, 4.0)
    assert (replica.offset_ns, replica.least_ns, replica.others) == (agreeing, agreeing, 0)
    assert (replica.settled, replica.since) == (False, 4.0)


def test_what_each_server_had_in_service() -> None:
    """Against a count over all requests, of those that arrived after some instant."""
    rng, fleet = np.random.default_rng(1), Fleet()
    arrived, stays = rng.uniform(0, 60, 300), rng.exponential(0.8, 300) + 0.3
    for row in np.argsort(arrived + stays):
        at, stay, replica = arrived[row], stays[row], "ab"[row % 2]
        made = span(f"{row}", at, stay, replica=replica, queued=0.6 * stay, decode=0.1)
        add(fleet, at + stay, made)
    fleet.advance(100.0)
    whole = [each.record for each in fleet.since(-math.inf)]
    assert len(whole) == 300
    asked = fleet.since(30.0)
    expected = [
        sum(
            other.server_id == own.server_id
            and other.dispatched_at <= own.dispatched_at < other.released_at
            for other in whole
        )
        for own in whole[-len(asked) :]
    ]
    assert max(expected) > 2
    assert fleet.in_service(asked) == expected
    assert fleet.in_service([]) == []


def test_a_slot_that_is_free_at_that_instant_is_not_in_service() -> None:
    """A request without a duration is alone with itself."""
    fleet = Fleet()
    add(fleet, 20.0, span("x", 19.0, 1.0), span("y", 20.0, 0.0))
    fleet.advance(60.0)
    assert fleet.in_service(fleet.since(0.0)) == [1, 1]


def test_replicas_without_spans_are_not_there() -> None:
    fleet = Fleet()
    assert fleet.advance(5.0) == ([], 1)
    assert (fleet.begin, fleet.longest(), fleet.known_until(5.0)) == (-6.0, 0.0, -math.inf)
    assert fleet.served_times().arrived.size == 0
