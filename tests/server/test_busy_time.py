"""How busy the servers were is the plain sum over their intervals, at a cost that does not grow
with their number: it is asked for on the event loop, once a second and with every scrape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import numpy as np
import pytest

from kendall.server.live.activity import Activity, BusyTime

KEPT = 60.0


def stretches(seed: int, servers: int, seconds: float) -> list[tuple[float, float, int]]:
    """Begin, end and server of busy intervals, by their ends."""
    rng = np.random.default_rng(seed)
    found = []
    for server in range(servers):
        instants = np.cumsum(rng.exponential(0.3, round(2 * seconds / 0.3))).tolist()
        found += [(*pair, server) for pair in list(pairwise(instants))[::2] if pair[1] < seconds]
    return sorted(found, key=lambda each: each[1])


def by_hand(
    closed: list[tuple[float, float, int]], start: float, now: float, servers: int
) -> float:
    kept = [each for each in closed if now - KEPT <= each[1]]
    seconds = sum(max(0.0, min(end, now) - max(begin, start)) for begin, end, _ in kept)
    return seconds / (now - start) / servers


@pytest.mark.parametrize("servers", [1, 3])
def test_it_is_the_sum_over_the_intervals(servers: int) -> None:
    closed = stretches(servers, servers, 100.0)
    busy, done = BusyTime(KEPT), 0
    for now in np.linspace(1.0, 100.0, 60):
        while done < len(closed) and closed[done][1] <= now:
            begin, end, server = closed[done]
            busy.begin(server, begin)
            busy.begin(server, begin + 1e-3)  # another dispatch to a server that is busy
            busy.end(server, end)
            done += 1
        for span in (0.1, 5.0, KEPT):
            start = max(0.0, now - span)
            expected = by_hand(closed[:done], start, now, servers)
            assert busy.fraction(start, now, servers) == pytest.approx(expected, abs=1e-9)


def test_the_open_interval_counts_up_to_now() -> None:
    busy = BusyTime(KEPT)
    busy.begin(0, 1.0)
    busy.end(0, 2.0)
    busy.begin(0, 4.0)
    assert busy.fraction(0.0, 5.0, 1) == pytest.approx(2 / 5)
    assert busy.fraction(4.5, 5.0, 2) == pytest.approx(1 / 2)
    assert busy.fraction(1.5, 3.5, 1) == pytest.approx(0.5 / 2)


def test_a_server_that_serves_no_more_is_forgotten() -> None:
    busy = BusyTime(KEPT)
    for server in range(100):
        busy.begin(server, 1.0)
        busy.end(server, 2.0)
    assert busy.fraction(0.0, 10.0, 100) == pytest.approx(0.1)
    assert busy.fraction(50.0, 100.0, 100) == 0.0
    assert not busy._servers
    busy.end(3, 101.0)  # of one that never began


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that it takes: a measure that no other process changes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()  # of who measures the tests
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_its_cost_does_not_grow_with_the_intervals() -> None:
    costs = []
    for number in (100, 100_000):
        busy = BusyTime(KEPT)
        for at in np.linspace(0.0, KEPT, number, endpoint=False).tolist():
            busy.begin(0, at)
            busy.end(0, at + KEPT / number / 2)
        costs.append(lines_of(lambda busy=busy: busy.fraction(0.0, KEPT, 1)))  # type: ignore[misc]
    assert costs[1] == costs[0]


def test_rates_and_utilisation_of_the_last_minute() -> None:
    """Since the start while that is less; a call counts once, however many sequences it asks
    for.
    """
    now, servers = 100.0, [0, 1]
    activity = Activity(lambda: now, lambda: servers, 0.0)
    assert (activity.arrival_rate(), activity.utilisation()) == (0.0, 0.0)
    for at, begins in ((101.0, True), (101.0, False), (104.0, True)):
        activity.recent.saw(at, begins_call=begins)
    activity.busy.begin(0, 101.0)
    activity.busy.end(0, 105.0)
    now = 110.0
    rates = activity.arrival_rate(), activity.sequence_rate()
    assert rates == pytest.approx((2 / 10, 3 / 10))
    assert [activity.since(at) for at in (0.0, 101.0, 102.0)] == [(2, 10.0), (2, 9.0), (1, 8.0)]
    assert activity.utilisation() == pytest.approx(0.2)
    assert [activity.utilisation_of(server) for server in (0, 1)] == pytest.approx([0.4, 0.0])
    now = 162.0
    rates = activity.arrival_rate(), activity.sequence_rate()
    assert rates == pytest.approx((1 / 60, 1 / 60))
    assert [activity.since(at) for at in (0.0, 200.0)] == [(1, 60.0), (0, 0.0)]
    assert activity.utilisation_of(0) == pytest.approx(3 / 60)
    servers.remove(1)
    assert activity.utilisation() == pytest.approx(3 / 60)
    servers.clear()
    assert activity.utilisation() == 0.0


def test_rates_of_more_arrivals_than_are_kept_without_a_look_at_their_age() -> None:
    activity = Activity(lambda: 0.0, lambda: [0], 0.0)
    for number in range(5000):
        activity.recent.saw(number / 50, begins_call=number % 2 == 0)
    assert activity.recent.call_rate(100.0) == pytest.approx(25.0)
    assert activity.recent.sequence_rate(100.0) == pytest.approx(50.0)


def test_busy_intervals_are_kept_for_as_long_as_is_asked_for() -> None:
    """A minute at least."""
    for kept, known in ((10.0, 60.0), (80.0, 80.0)):
        activity = Activity(lambda: 0.0, lambda: [0], kept)
        activity.busy.begin(0, 0.0)
        activity.busy.end(0, 1.0)
        assert activity.busy.fraction(0.0, known + 1, 1) == pytest.approx(1 / (known + 1))
        assert activity.busy.fraction(0.0, known + 1.5, 1) == 0.0
