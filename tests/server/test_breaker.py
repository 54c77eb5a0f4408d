"""The circuit breaker of one server, state by state."""

from __future__ import annotations

import math

import pytest

from kendall.server.engines.http.breaker import Breaker

# in a row; seconds
FAILURES, FIRST_PAUSE, LONGEST_PAUSE = 2, 0.5, 8.0


def opened(at: float = 10.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.fail(at)
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.fail(1.0)
    assert breaker.closed
    breaker.succeed(probed=False)
    for _ in range(FAILURES - 1):
        breaker.fail(2.0)
    assert breaker.closed, "the answer between them ended the row"
    breaker.fail(3.0)
    assert (breaker.state, breaker.due) == ("open", 3.0 + FIRST_PAUSE)


def test_half_open_it_closes_with_a_probe_that_is_answered() -> None:
    breaker = opened()
    breaker.succeed(probed=True)
    assert breaker.state == "open", "an answer to an older probe closes nothing"
    breaker.probe()
    assert breaker.state == "half-open"
    breaker.succeed(probed=False)
    assert breaker.state == "half-open", "nor does the end of an old answer"
    breaker.succeed(probed=True)
    assert breaker.closed
    breaker.probe()
    assert breaker.closed


def test_each_probe_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker, pauses = opened(0.0), []
    for _ in range(6):
        pauses.append(breaker.due)
        breaker.probe()
        breaker.fail(0.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    breaker.probe()
    breaker.succeed(probed=True)
    for _ in range(FAILURES):
        breaker.fail(20.0)
    assert breaker.due == 20.5, "a server that came back starts with the first pause again"


def test_a_failure_while_it_is_open_changes_nothing() -> None:
    breaker = opened(10.0)
    breaker.fail(10.2)
    assert (breaker.state, breaker.due) == ("open", 10.5)


@pytest.mark.parametrize(("asked", "pause"), [(0.0, 0.5), (3.0, 3.0), (60.0, 8.0)])
def test_a_busy_server_is_left_alone_as_long_as_it_asks(asked: float, pause: float) -> None:
    breaker = Breaker()
    breaker.trip(10.0, asked)
    assert (breaker.state, breaker.due) == ("open", 10.0 + pause)
    breaker.trip(11.0, 8.0)
    assert breaker.due == 10.0 + pause, "once"
    breaker.probe()
    breaker.succeed(probed=True)
    assert breaker.closed


def test_a_server_that_is_busy_or_put_aside_is_not_lost() -> None:
    busy, aside, failing = Breaker(), Breaker(), opened()
    busy.trip(1.0, 0.1)
    aside.put_aside(1.0, 3.0)
    assert [each.lost for each in (busy, aside, failing)] == [False, False, True]
    assert (busy.due, aside.due) == (1.0 + FIRST_PAUSE, 4.0)


def test_a_server_that_is_given_up_is_lost_and_gets_no_more_than_a_probe_at_once() -> None:
    breaker = Breaker()
    breaker.trip(1.0, 8.0)
    breaker.give_up(2.0)
    assert (breaker.state, breaker.lost, breaker.due) == ("open", True, 2.5)
    breaker.give_up(2.2)
    assert breaker.due == 2.5, "it was lost already"
    breaker.probe()
    breaker.succeed(probed=True)
    breaker.give_up(4.0)
    assert (breaker.lost, breaker.failures, breaker.due) == (True, 2, 4.5)
    breaker.fail(4.1)
    breaker.give_up(4.2)
    assert breaker.failures == 3, "the row goes on"


def test_one_that_fails_its_probe_is_lost_though_it_was_busy_or_put_aside() -> None:
    for begin in (Breaker.trip, Breaker.put_aside):
        breaker = Breaker()
        begin(breaker, 1.0, 3.0)
        begin(breaker, 2.0, 3.0)
        assert (breaker.due, breaker.lost) == (4.0, False), "once"
        breaker.probe()
        breaker.put_aside(4.0, 9.0)
        breaker.trip(4.0, 9.0)
        assert (breaker.state, breaker.lost) == ("half-open", False)
        breaker.fail(5.0)
        assert (breaker.state, breaker.lost, breaker.due) == ("open", True, 6.0)


def test_only_one_that_is_put_aside_is_recalled() -> None:
    aside, busy, new = Breaker(), Breaker(), Breaker()
    aside.put_aside(1.0, 60.0)
    busy.trip(1.0, 8.0)
    for breaker in (aside, busy, new):
        breaker.recall(3.0)
    assert (aside.due, busy.due, new.due) == (3.0, 9.0, -math.inf)
    aside.probe()
    aside.recall(4.0)
    assert aside.due == 3.0, "it is probed already"
    aside.succeed(probed=True)
    busy.probe()
    busy.succeed(probed=True)
    assert (aside.aside, busy.busy) == (False, False)
