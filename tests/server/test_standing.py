"""When a server whose calls fail is put aside, and how it comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.server.engines.http.standing import (
    FEW,
    FIRST_ASIDE,
    FORGOTTEN,
    LONGEST_ASIDE,
    ROW,
    ServerStanding,
    share_of,
)


def after(*outcomes: bool) -> ServerStanding:
    """With these good and failed calls."""
    standing = ServerStanding()
    for good in outcomes:
        if good:
            standing.succeed()
        else:
            standing.fail()
    return standing


def test_failures_in_a_row_are_enough() -> None:
    assert not after(*[True] * 40, *[False] * 2).fails
    assert after(*[True] * 40, *[False] * 3).fails
    assert not after(*[True] * 40, *[False] * 3, True).fails, "a good answer ends the row"


@pytest.mark.parametrize(("every", "fails"), [(2, True), (4, True), (8, True), (20, False)])
def test_so_is_a_share_of_the_calls_lately(every: int, fails: bool) -> None:
    standing = after(*[number % every > 0 for number in range(1, 200)])
    assert standing.fails is fails
    assert standing.share == pytest.approx(1 / every, abs=0.03)


def weighed(*outcomes: bool) -> tuple[float, float]:
    """Good and failed calls, each with 1 - 1/50 of the weight of the next."""
    good, bad = (
        sum(0.98**age for age, each in enumerate(reversed(outcomes)) if each is kind)
        for kind in (True, False)
    )
    return good, bad


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=120))
def test_shares_and_bounds_are_those_of_the_weighed_calls(outcomes: list[bool]) -> None:
    standing, (good, bad) = after(*outcomes), weighed(*outcomes)
    share = bad / (good + bad) if outcomes else 0.0
    row = len(list(itertools.takewhile(lambda each: not each, reversed(outcomes))))
    assert standing.share == pytest.approx(share)
    if min(abs(bad - 2.5), abs(share - 0.1)) > 1e-6:
        assert standing.fails == (row >= 3 or (bad > 2.5 and share > 0.1))
    if min(abs(bad - 1.5), abs(share - 0.05)) > 1e-6:
        assert standing.breaks_off == (row >= 2 or (bad > 1.5 and share > 0.05))
    assert standing.refusals == 0


def test_what_was_long_ago_counts_no_more() -> None:
    assert not after(*[False] * 10, *[True] * 150).fails


def test_the_share_of_several_is_that_of_their_calls() -> None:
    assert share_of([after(True, True, True), after(False)]) == pytest.approx(1 / 4, abs=0.02)
    assert share_of([]) == share_of([ServerStanding()]) == 0


def test_answers_are_held_from_the_second_failure_on_until_it_is_long_ago() -> None:
    assert not after(False).breaks_off
    assert after(*[True] * 200, *[False] * ROW).breaks_off
    assert after(*[False] * ROW, True).breaks_off
    assert after(*[True] * 30, False, *[True] * 4, False, True).breaks_off
    assert not after(*[False] * ROW, *[True] * 20).breaks_off
    assert not after(*[number % 40 > 0 for number in range(1, 200)]).breaks_off


def test_it_comes_back_with_one_call_and_then_twice_as_many() -> None:
    standing, rooms = after(*[False] * FEW), []
    standing.put_aside(0.0)
    while standing.room is not None:
        rooms.append(standing.room)
        assert standing.breaks_off
        standing.succeed()
        standing.widen(5.0, 24)
    assert rooms == [1, 2, 4, 8, 16]
    assert standing.breaks_off, "its failures are not long ago"


def test_one_failure_on_trial_is_enough_and_the_pauses_double() -> None:
    standing, pauses, now = after(*[False] * FEW), [], 0.0
    for _ in range(10):
        pauses.append(standing.put_aside(now))
        now += pauses[-1]
        assert not standing.fails
        standing.fail()
        assert standing.fails
    assert pauses[:3] == [FIRST_ASIDE, 2 * FIRST_ASIDE, 4 * FIRST_ASIDE]
    assert pauses[-1] == LONGEST_ASIDE == 300.0


@pytest.mark.parametrize(("well", "pause"), [(1.0, 2.0), (FORGOTTEN + 0.1, 1.0)])
def test_a_server_that_was_well_for_long_begins_anew(well: float, pause: float) -> None:
    standing = ServerStanding()
    standing.put_aside(0.0)
    standing.widen(FIRST_ASIDE, 2)
    assert standing.room is None
    assert standing.put_aside((1 + well) * FIRST_ASIDE) == pause * FIRST_ASIDE


def test_one_that_is_exonerated_is_as_new() -> None:
    standing = after(*[False] * FEW)
    standing.put_aside(0.0)
    standing.exonerate()
    assert (standing.share, standing.room, standing.fails, standing.breaks_off) == (
        *(0.0, None, False, False),
    )
    assert standing.put_aside(1.0) == FIRST_ASIDE == 5.0


def test_a_good_answer_ends_the_row_of_refusals() -> None:
    standing = ServerStanding()
    standing.refusals = 2
    standing.succeed()
    assert standing.refusals == 0


def test_on_trial_no_pause_is_forgotten_however_long_it_lasts() -> None:
    standing = ServerStanding()
    assert [standing.put_aside(at) for at in (0.0, 1000.0)] == [5.0, 10.0]
    standing.widen(1010.0, 3)
    assert (standing.room, standing.row) == (2, 0)
    standing.widen(1011.0, 3)
    assert standing.room is None
    assert standing.put_aside(1011.0 + 4 * 10.0) == 20.0, "not longer than four pauses"
    standing.widen(2000.0, 2)
    assert standing.put_aside(2000.0 + 4 * 20.0 + 0.1) == 5.0
