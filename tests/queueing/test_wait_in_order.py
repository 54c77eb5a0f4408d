"""Waits under an order of service: by hand, against each other, and against simulated queues."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.queueing.control import wait_in_order as module
from kendall.queueing.control.predicted_lengths import ALIKE, KEPT, PredictedLengths
from kendall.queueing.control.wait_ahead import Pace, Wait
from kendall.queueing.control.wait_in_order import (
    OvertakingArrivals,
    PlaceInOrder,
    RandomDraws,
    SampledWait,
)

PACE = Pace(0.5, 0.25)
NOBODY = OvertakingArrivals(rate=1.0, sampled=(), pace=PACE)


def numbers() -> RandomDraws:
    return RandomDraws(np.random.default_rng(1))


def standing(
    *ahead: float, slots: int = 1, left: Sequence[float] = (1.0,), rank: float = 10.0
) -> PlaceInOrder:
    """Certain services."""
    return PlaceInOrder(
        rank=rank,
        slots=slots,
        left=[(each,) for each in left],
        ahead=[(place, (seconds,)) for place, seconds in enumerate(ahead)],
    )


def test_a_pace_is_a_setup_and_a_step_for_each_token() -> None:
    assert PACE.seconds(6) == 2.0


def test_without_overtaking_one_slot_does_what_is_left_and_what_is_ahead() -> None:
    for found in (
        standing(2.0, 3.0).by_work(NOBODY),
        standing(2.0, 3.0).sampled(NOBODY, numbers()),
    ):
        assert found.mean == 6.0
        assert found.within(6.0) == 1
        assert found.within(5.99) == 0
        assert found.quantile(0.5) == 6.0


def test_each_slot_takes_the_next_when_it_is_free() -> None:
    """Left 1, 2 and 4: 5 begins at 1, 1 at 2, 2 at 3; then slots are free at 4, 5 and 6."""
    found = standing(5.0, 1.0, 2.0, slots=3, left=(2.0, 1.0, 4.0)).sampled(NOBODY, numbers())
    assert found == SampledWait((4.0,))


def test_a_slot_that_nobody_has_is_free_at_once() -> None:
    assert standing(slots=2, left=(3.0,)).sampled(NOBODY, numbers()).mean == 0.0
    assert standing(7.0, slots=2, left=(3.0,)).sampled(NOBODY, numbers()).mean == 3.0


@pytest.mark.parametrize(("rank", "factor"), [(10.0, 4.0), (4.0, 1 / 0.875), (1.0, 1.0)])
def test_those_who_rank_before_it_lengthen_the_wait_by_their_load(
    rank: float, factor: float
) -> None:
    """At 1/s and 0.5 to 1 s of service: loads 0.75 of all, 0.125 of those that rank below 4 (a
    quarter of all, 0.5 s each), none below 1.
    """
    sampled = [(1.0, 0.0), (4.0, 0.0), (5.0, 2.0), (6.0, 2.0)]
    arrivals = OvertakingArrivals(rate=1.0, sampled=sampled, pace=PACE)
    assert standing(2.0, rank=rank).by_work(arrivals).mean == pytest.approx(3 * factor)


def test_on_several_slots_each_has_its_share_of_the_load() -> None:
    arrivals = OvertakingArrivals(rate=1.0, sampled=[(1.0, 2.0)], pace=PACE)
    work = standing(2.0, slots=4, left=(1.0, 1.0, 1.0, 1.0))
    assert work.by_work(arrivals).mean == pytest.approx(1.5 / 0.75)


def test_more_of_those_who_overtake_than_can_be_served_take_for_ever() -> None:
    arrivals = OvertakingArrivals(rate=1.0, sampled=[(1.0, 2.0)], pace=PACE)
    assert standing(2.0).by_work(arrivals).mean == math.inf
    assert standing(200.0, slots=1).sampled(arrivals, numbers()).mean == math.inf


def test_where_ranks_age_they_overtake_for_a_while() -> None:
    """One rank, 2 before its own, so for 2 s: load 0.5 in them. Work 3: W = 3 + 0.5 x 2; work 0.5:
    W = 0.5 / (1 - 0.5).
    """
    arrivals = OvertakingArrivals(rate=0.5, sampled=[(8.0, 2.0)], pace=PACE, moves=1.0)
    assert standing(2.0).by_work(arrivals).mean == pytest.approx(4.0)
    assert standing(left=(0.5,)).by_work(arrivals).mean == pytest.approx(1.0)
    assert standing(left=(0.9999,)).by_work(arrivals).mean == pytest.approx(2 * 0.9999)
    overloaded = OvertakingArrivals(rate=2.0, sampled=[(8.0, 2.0)], pace=PACE, moves=1.0)
    assert standing(2.0).by_work(overloaded).mean == pytest.approx(7.0)


def test_of_several_ranks_the_last_stop_overtaking_first() -> None:
    """1 s and 4 s before its own, 1 s of service each at a load of 0.25 each; work 3: the first
    for 1 s, the second for all of W = (3 + 0.25) / 0.75 > 4, so 4 s: 3 + 0.25 + 1.
    """
    arrivals = OvertakingArrivals(rate=0.5, sampled=[(6.0, 2.0), (9.0, 2.0)], pace=PACE, moves=1.0)
    assert standing(2.0).by_work(arrivals).mean == pytest.approx(4.25)
    assert standing(left=(1.5,)).by_work(arrivals).mean == pytest.approx(1.75 / 0.75)


@pytest.mark.parametrize("moves", [0.0, 1.0])
def test_futures_have_the_mean_and_the_spread_of_one_slot(
    moves: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FUTURES", 20_000)
    sampled = [(4.0, 0.0), (5.0, 2.0), (8.0, 1.0), (11.0, 3.0)]
    arrivals = OvertakingArrivals(rate=0.8, sampled=sampled, pace=PACE, moves=moves)
    of = standing(2.0, 3.0)
    expected, found = of.by_work(arrivals), of.sampled(arrivals, numbers())
    assert found.mean == pytest.approx(expected.mean, rel=0.02)
    if not moves:
        assert np.var(found.values) == pytest.approx(expected.variance, rel=0.1)


def test_what_waits_behind_many_arrivals_goes_by_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = OvertakingArrivals(rate=0.8, sampled=[(1.0, 2.0)], pace=PACE)
    means = []
    for most, count in ((100, 4000), (5, 4000)):
        monkeypatch.setattr(module, "ARRIVALS", most)
        monkeypatch.setattr(module, "FUTURES", count)
        means.append(standing(2.0, 3.0).sampled(arrivals, numbers()).mean)
    assert means == pytest.approx([30.0, 30.0], rel=0.05)


def test_the_work_is_known_with_its_variance() -> None:
    of = PlaceInOrder(
        rank=1.0, slots=2, left=[(1.0, 3.0), (4.0,)], ahead=[(0.0, (2.0, 4.0))], before=5.0
    )
    assert of.work == Wait(5.0 + (2 + 4 + 3) / 2, 2 / 4)


def test_one_slot_and_a_long_queue_go_by_their_work_others_by_futures() -> None:
    arrivals = OvertakingArrivals(rate=0.1, sampled=[(1.0, 2.0)], pace=PACE)
    assert isinstance(standing(2.0).wait(arrivals, numbers()), Wait)
    several = standing(2.0, slots=2, left=(1.0, 1.0))
    found = several.wait(arrivals, numbers())
    assert isinstance(found, SampledWait)
    assert len(found.values) == module.FUTURES
    deep = PlaceInOrder(rank=1.0, slots=2, left=several.left, ahead=several.ahead, before=9.0)
    assert isinstance(deep.wait(arrivals, numbers()), Wait)


def test_a_drawn_wait_has_a_distribution() -> None:
    found = SampledWait((1.0, 2.0, 3.0, 6.0))
    assert found.mean == 3.0
    assert [found.within(x) for x in (0.9, 1.0, 5.0, 6.0)] == [0, 0.25, 0.75, 1]
    assert [found.quantile(level) for level in (0.0, 0.25, 0.26, 0.75, 0.9, 1.0)] == [
        1,
        1,
        2,
        3,
        6,
        6,
    ]


def test_random_numbers_are_drawn_as_often_as_needed() -> None:
    some = numbers()
    gaps = [some.gap(4.0) for _ in range(10_000)]
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    picked = [some.below(3) for _ in range(10_000)]
    assert np.bincount(picked) / 10_000 == pytest.approx([1 / 3] * 3, abs=0.02)
    assert some.one_of((5.0,)) == 5.0


# lengths


def test_predictions_are_taken_for_true_until_one_was_wrong() -> None:
    lengths = PredictedLengths()
    assert lengths.left(10.0) == (10.0,)
    assert lengths.left(10.0, 4) == (6.0,)
    assert lengths.left(10.0, 12) == (1.0,), "it goes on"
    lengths.add(1000.0, 1009)
    assert lengths.left(10.0) == (10.0,), "less than one in a hundred is none"
    lengths.add(1000.0, 1011)
    assert sorted(lengths.left(1000.0)) == pytest.approx([1009, 1011])


def test_an_error_is_that_of_the_predictions_nearest() -> None:
    lengths = PredictedLengths()
    for _ in range(100):
        lengths.add(10.0, 20)
        lengths.add(200.0, 100)
    assert set(lengths.left(10.0)) == {20.0}
    assert set(lengths.left(5.0)) == {10.0}
    assert set(lengths.left(300.0)) == {150.0}
    assert len(lengths.left(10.0)) == ALIKE
    assert lengths.left(300.0, 149) == [1.0] * ALIKE


def test_of_equal_predictions_those_in_the_middle_tell() -> None:
    lengths = PredictedLengths()
    for actual in [10] * 40 + [30] * 40:
        lengths.add(20.0, actual)
    assert sorted(set(lengths.left(20.0))) == [10.0, 30.0]


def test_one_longer_than_all_like_it_goes_on_as_the_longer_ones_do() -> None:
    lengths = PredictedLengths()
    for actual in (10, 20, 50):
        lengths.add(10.0, actual)
    assert lengths.left(2.0, 15) == [5.0, 35.0]
    assert lengths.left(2.0, 20) == [30.0]
    assert lengths.left(2.0, 50) == (1.0,)


def test_of_many_longer_ones_about_thirty_tell() -> None:
    """Every fourth of a hundred."""
    lengths = PredictedLengths()
    for number in range(100):
        lengths.add(1000.0, 1001 + number)
    for _ in range(40):
        lengths.add(10.0, 10)
    assert lengths.left(10.0, 500) == list(range(501, 601, 4))


def test_old_errors_are_forgotten() -> None:
    lengths = PredictedLengths()
    lengths.add(10.0, 20)
    for place in range(KEPT - 1):
        lengths.add(float(1 + place % 50), 1 + place % 50)
    assert len(lengths.left(10.0)) > 1
    lengths.add(7.0, 7)
    assert lengths.left(10.0) == (10.0,)
