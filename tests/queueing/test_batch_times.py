"""Fitted service times by hand: whole batches, and slots of a continuous engine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.estimation.speed.batch_times import (
    BatchTimes,
    batch_times,
    slot_times,
    wait_for_step,
)
from kendall.queueing.estimation.window.snapshot import (
    CENSORED,
    ENDED,
    FIELDS,
    WITHOUT_LENGTH,
    Snapshot,
)
from kendall.queueing.latency.law import LatencyModel

LAW = LatencyModel(
    k1=0.01, k2=0.1, k3=0.002, k4=0.02, kp=0.001, speed=1.7
)  # whose own speed is of no matter


def row(
    batch: int,
    at: float,
    free: float,
    tokens: int,
    *,
    size: int = 1,
    prompt: int = 0,
    ending: float = ENDED,
    server: int = 0,
) -> list[float]:
    return numbers(
        at - 0.5, at, free, free, batch, size, server, prompt, tokens, ending, 0, np.nan, 0
    )


def numbers(*known: float) -> list[float]:
    """A row whose last numbers are not known."""
    return [*known, *[np.nan] * (len(FIELDS) - len(known))]


def window(*rows: list[float]) -> Snapshot:
    assert all(len(each) == len(FIELDS) for each in rows)
    table = np.array(rows).reshape(-1, len(FIELDS))
    return Snapshot(
        policy="p", epoch=0, epoch_at=0.0, start=0.0, now=1e9, arrivals=np.empty(0), rows=table
    )


PAIR = (row(7, 1.0, 1.4, 3, size=2, prompt=10), row(7, 1.0, 1.5, 5, size=2, prompt=20))
SETUP = 0.01 * 2 + 0.1 + 0.001 * 30


@pytest.mark.parametrize(
    ("policy", "decoding"),
    [("capped:max_batch_size=8", (0.002 * 2 + 0.02) * 5), ("elastic", 0.002 * 8 + 0.02 * 5)],
)
def test_a_batch_takes_what_the_law_says_of_its_members(policy: str, decoding: float) -> None:
    found = batch_times(parse_policy(policy), window(*PAIR), LAW)
    assert found.count == 1
    assert (found.at[0], found.measured[0], found.size[0], found.longest[0]) == (1.0, 0.5, 2.0, 5.0)
    assert found.fitted[0] == pytest.approx(SETUP + decoding)
    assert found.decoding[0] == pytest.approx(decoding / (SETUP + decoding))
    assert found.ratio[0] == pytest.approx(0.5 / (SETUP + decoding))


def test_batches_stand_in_the_order_of_their_dispatch() -> None:
    found = batch_times(
        parse_policy("dynamic"),
        window(row(9, 1.0, 2.0, 3), row(2, 8.0, 9.5, 4), row(5, 4.0, 4.5, 5)),
        LAW,
    )
    assert found.at.tolist() == [1.0, 4.0, 8.0]
    assert found.measured.tolist() == [1.0, 0.5, 1.5]
    assert found.longest.tolist() == [3.0, 5.0, 4.0]
    assert found.part(found.at > 3).longest.tolist() == [5.0, 4.0]


@pytest.mark.parametrize(
    ("members", "counts"),
    [
        ((row(0, 1.0, 2.0, 3),), 1),
        ((row(0, 1.0, 2.0, 1),), 1),
        ((row(0, 1.0, 2.0, 3, ending=CENSORED),), 1),
        ((row(0, 1.0, 2.0, 3, ending=WITHOUT_LENGTH),), 0),
        ((row(0, 1.0, 2.0, 0),), 0),
        ((row(-1, 1.0, 2.0, 3),), 0),
        ((row(0, 1.0, math.nan, 3),), 0),
        ((row(0, 1.0, 1.0, 3),), 0),  # it took no time
        ((row(0, 1.0, 2.0, 3, size=2),), 0),  # one of two was cancelled, or is not over
        ((row(0, 1.0, 2.0, 3, size=2), row(0, 1.0, 2.0, 3, size=2)), 1),
        ((row(0, 1.0, 2.0, 3, size=2), row(0, 1.0, 2.0, 0, size=2)), 0),
        ((row(0, 1.0, 2.0, 3, size=2), row(0, 1.0, 2.0, 3, size=2, ending=WITHOUT_LENGTH)), 0),
        ((row(0, 1.0, 2.0, 3, size=2), row(0, 1.0, math.nan, 3, size=2)), 0),
        (
            (
                row(0, 1.0, 2.0, 3, size=2),
                numbers(0.5, 1.0, 2.0, math.nan, 0, 2, 0, 0, 3, CENSORED, 0, math.nan, 0),
            ),
            0,
        ),  # one was cancelled, with tokens
        ((), 0),
    ],
)
def test_only_batches_that_were_served_whole_count(
    members: tuple[list[float], ...], counts: int
) -> None:
    assert batch_times(parse_policy("dynamic"), window(*members), LAW).count == counts


SLOTS = LatencyModel(k1=0.01, k3=0.002, k4=0.02, kp=0.001, turnaround=0.05, speed=1.7)
ALONE, TWO = 0.002 + 0.02, 0.002 * 2 + 0.02  # seconds of a step


@pytest.mark.parametrize("pace", [1.0, 2.0, 0.5])
def test_requests_alone_on_a_continuous_engine_take_turnaround_admission_and_their_steps(
    pace: float,
) -> None:
    rows, expected = [], []
    for number, (tokens, prompt) in enumerate([(30, 0), (10, 40), (5, 7), (30, 0), (1, 100)]):
        expected.append(0.05 + 0.01 + 0.001 * prompt + tokens * ALONE)
        rows.append(
            row(number, 10.0 * number, 10.0 * number + pace * expected[-1], tokens, prompt=prompt)
        )
    (found,) = slot_times(window(*rows), SLOTS)
    assert found.at.tolist() == [10.0, 20.0, 30.0, 40.0], "the first may have met others"
    assert found.fitted == pytest.approx(expected[1:])
    assert found.ratio == pytest.approx([pace] * 4)
    assert found.decoding == pytest.approx(
        [tokens * ALONE / whole for tokens, whole in zip((10, 5, 30, 1), expected[1:], strict=True)]
    )


def test_two_that_share_a_continuous_engine_make_each_others_steps_longer() -> None:
    """B comes while A has some 60 of its 100 tokens, waits for half a step, stops A by its
    admission, and leaves first.
    """
    early = row(0, -100.0, -99.9, 1)
    came, left, end = 1.4, 2.6, 3.0
    (found,) = slot_times(
        window(early, row(1, 0.0, end, 100), row(2, came, left, 20, size=2, prompt=30)), SLOTS
    )
    assert found.at.tolist() == [0.0, came]
    stop = 0.01 + 0.001 * 30
    assert found.fitted[1] == pytest.approx(0.05 + ALONE / 2 + 20 * TWO + stop, rel=1e-6)
    pace = (end + left - came) / sum(_with_pace(1.0, came, left, end, stop))
    assert found.fitted.tolist() == pytest.approx(_with_pace(pace, came, left, end, stop))


def _with_pace(pace: float, came: float, left: float, end: float, stop: float) -> list[float]:
    """Of A and B: A's step is the harmonic mean over its stay, B enters after its turnaround and
    half a step.
    """
    first, second = 0.05 * pace, came + pace * (0.05 + ALONE / 2)
    alone, together = (second - first) + (end - left), left - second
    share = (alone / ALONE + together / TWO) / (end - first)
    return [0.05 + 100 / share + 0.01 + stop, 0.05 + ALONE / 2 + 20 * TWO + stop]


def test_servers_of_a_continuous_engine_do_not_share_their_slots() -> None:
    rows = [
        row(number, 10.0 * number, 10.0 * number + 1, 30, server=number % 2) for number in range(6)
    ]
    both = slot_times(window(*rows), SLOTS)
    assert [each.at.tolist() for each in both] == [[20.0, 40.0], [30.0, 50.0]]


@pytest.mark.parametrize("wrong", [{"ending": WITHOUT_LENGTH}, {"tokens": 0}, {"free": math.nan}])
def test_slots_of_answers_without_a_length_do_not_count(wrong: dict[str, float]) -> None:
    rows = [row(number, 10.0 * number, 10.0 * number + 1, 30) for number in range(3)]
    given = {"tokens": 30, "free": 31.0} | wrong
    (found,) = slot_times(window(*rows, row(3, 30.0, **given)), SLOTS)  # type: ignore[arg-type]
    assert found.at.tolist() == [10.0, 20.0]


def test_an_answer_that_a_limit_cut_has_a_length_of_its_slot() -> None:
    rows = [row(number, 10.0 * number, 10.0 * number + 1, 30, ending=CENSORED) for number in (1, 2)]
    (found,) = slot_times(window(row(0, 0.0, 1.0, 30), *rows), SLOTS)
    assert found.at.tolist() == [10.0, 20.0]


def test_who_comes_behind_an_end_waits_for_the_next_step_after_his_turnaround() -> None:
    """Steps of 22 ms from the last end on: 10 ms and a turnaround of 50 ms later six are left to
    the third of them.
    """
    start, ends, step = np.array([5.010, 5.030, 4.0]), np.array([5.0, 2.0]), np.full(3, 0.022)
    assert wait_for_step(start, ends, step, 0.05, 1.0) == pytest.approx([0.006, 0.011, 0.011])
    assert wait_for_step(start[:1], ends, step[:1], 0.05, 2.0) == pytest.approx(
        [3 * 0.022 - 0.055]
    )  # at half the pace 5 ms of a step
    assert wait_for_step(np.array([5.0]), ends, step[:1], 0.044, 1.0) == pytest.approx(
        [0.0], abs=1e-12
    )


def test_sequences_of_one_instant_do_not_wait_for_each_others_step() -> None:
    whole = SLOTS.turnaround + 2 * SLOTS.k1 + 20 * TWO
    rows = [row(number, 0.0, whole, 20, size=2) for number in (1, 2)]
    (found,) = slot_times(window(row(0, -100.0, -99.9, 1), *rows), SLOTS)
    assert found.fitted == pytest.approx([whole, whole])


def slots_of(count: int) -> BatchTimes:
    """The last one first; two at most in service."""
    number = np.arange(float(count))[::-1]
    return BatchTimes(
        number, number, 2 * number, np.where(number % 2, 2.0, 1.0), number + 1, number / 20
    )


def test_consecutive_slots_are_added_up_in_groups_of_four_times_the_company() -> None:
    each = slots_of(20)
    found = each.grouped()
    assert found.at.tolist() == [0.0, 8.0]
    assert found.measured.tolist() == [sum(range(8)), sum(range(8, 16))]
    assert found.fitted.tolist() == [2 * sum(range(8)), 2 * sum(range(8, 16))]
    assert found.size.tolist() == [1.5, 1.5]
    assert found.longest.tolist() == [4.5, 12.5]
    assert found.decoding == pytest.approx([3.5 / 20, 11.5 / 20])
    assert slots_of(7).grouped().count == 0
    assert slots_of(0).grouped().count == 0
    assert [slots_of(count).last_grouped_at for count in (20, 16, 8, 7, 0)] == [15, 15, 7, *NONE]


def test_fine_groups_are_as_large_as_leaves_enough_of_them() -> None:
    """One to four times the company."""
    found = slots_of(200).finely_grouped()
    assert found.at.tolist() == [8.0 * group for group in range(25)]
    counts = {
        count: slots_of(count).finely_grouped().count for count in (0, 1, 3, 40, 59, 60, 119, 120)
    }
    assert counts == {0: 0, 1: 1, 3: 1, 40: 20, 59: 29, 60: 20, 119: 23, 120: 20}


NONE = (-math.inf, -math.inf)
