"""Slots with hyperexponential times, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.queueing.models.slots.two_phases import Phases, delay_ratio, fitted


def moments(phases: Phases) -> list[float]:
    parts = ((phases.chance, phases.long), (1 - phases.chance, phases.short))
    return [
        factor * sum(chance * mean**power for chance, mean in parts)
        for power, factor in ((1, 1.0), (2, 2.0), (3, 6.0), (4, 24.0))
    ]


@given(st.floats(1.001, 50.0), st.floats(1.01, 20.0))
def test_two_phases_have_the_moments_that_are_asked_for(scv: float, spread: float) -> None:
    third = 1.5 * (1 + scv) ** 2 * spread
    phases = fitted(scv, third)
    assert 0 < phases.chance < 1
    assert phases.long > 1 > phases.short > 0
    assert moments(phases)[:3] == pytest.approx([1.0, 1 + scv, third], rel=1e-6)
    assert phases.fourth == pytest.approx(moments(phases)[3])


def test_a_third_moment_below_that_of_any_mixture_counts_as_the_least() -> None:
    assert fitted(4.0, 10.0) == fitted(4.0, 1.5 * 25)
    assert moments(fitted(4.0, 10.0))[:3] == pytest.approx([1.0, 5.0, 37.5], rel=2e-3)


@pytest.mark.parametrize("third", [60.0, 200.0])
@pytest.mark.parametrize("load", [0.2, 0.9])
def test_one_slot_is_mg1(load: float, third: float) -> None:
    """(1 + C^2) / 2, whatever the third moment."""
    assert delay_ratio(load / 2.5, [2.5], fitted(4.0, third)) == pytest.approx(2.5)


def test_near_exponential_times_delay_as_exponential_ones() -> None:
    assert delay_ratio(3.0, [1.0, 1.1, 1.2, 1.25], fitted(1.001, 6.01)) == pytest.approx(
        1.0, abs=2e-3
    )


def by_hand(rate: float, stays: list[float], phases: Phases, most: int = 600) -> float:
    """The mean delay of the chain cut at `most` requests."""
    slots = len(stays)
    states = [(n, j) for n in range(most + 1) for j in range(min(n, slots) + 1)]
    place = {state: index for index, state in enumerate(states)}
    generator = np.zeros((len(states), len(states)))

    def moves(n: int, j: int, to: tuple[int, int], speed: float) -> None:
        if speed and to in place:
            generator[place[n, j], place[to]] += speed
            generator[place[n, j], place[n, j]] -= speed

    p = phases.chance
    for n, j in states:
        taken = min(n, slots)
        if n < slots:
            moves(n, j, (n + 1, j + 1), rate * p)
            moves(n, j, (n + 1, j), rate * (1 - p))
        else:
            moves(n, j, (n + 1, j), rate)
        if n:
            mean = stays[taken - 1]
            long, short = j / (phases.long * mean), (taken - j) / (phases.short * mean)
            if n > slots:
                moves(n, j, (n - 1, j), long * p + short * (1 - p))
                moves(n, j, (n - 1, j - 1), long * (1 - p))
                moves(n, j, (n - 1, j + 1), short * p)
            else:
                moves(n, j, (n - 1, j - 1), long)
                moves(n, j, (n - 1, j), short)
    system = generator.T.copy()
    system[-1] = 1.0
    chances = np.linalg.solve(system, np.append(np.zeros(len(states) - 1), 1.0))
    waiting = sum(
        chance * max(n - slots, 0) for (n, _), chance in zip(states, chances, strict=True)
    )
    return float(waiting) / rate


@pytest.mark.parametrize(
    ("stays", "load"),
    [
        ([1.0, 1.3], 0.5),
        ([1.0, 1.3], 0.8),
        ([0.7, 0.8, 0.9, 1.2], 0.3),
        ([0.7, 0.8, 0.9, 1.2], 0.7),
    ],
)
def test_the_chain_is_the_one_written_out(stays: list[float], load: float) -> None:
    rate, phases = load * len(stays) / stays[-1], fitted(3.0, 40.0)
    exponential = by_hand(rate, stays, Phases(0.5, 1.0, 1.0), 200)
    expected = by_hand(rate, stays, phases, 300) / exponential
    assert delay_ratio(rate, stays, phases) == pytest.approx(expected, rel=1e-6)


def test_in_heavy_traffic_only_two_moments_matter() -> None:
    stays = [1.0] * 8
    ratios = [delay_ratio(0.9995 * 8, stays, fitted(4.0, third)) for third in (40.0, 400.0)]
    assert ratios == pytest.approx([2.5, 2.5], rel=0.03)
    lighter = [delay_ratio(0.7 * 8, stays, fitted(4.0, third)) for third in (40.0, 100.0, 400.0)]
    assert all(more > less for more, less in itertools.pairwise(lighter)), (
        "a few long ones leave the other slots free"
    )


def test_where_nobody_waits_nothing_is_computed() -> None:
    assert delay_ratio(1.0, [1.0] * 64, fitted(4.0, 100.0)) == 1.0


def test_the_least_levels_do_not_matter() -> None:
    """Of 120 slots at load 0.95 those below about 60 are left out: as one more or fewer slots."""
    ratios = [
        delay_ratio(0.95 * slots, [1.0] * slots, fitted(4.0, 100.0)) for slots in (118, 120, 122)
    ]
    assert ratios[1] == pytest.approx((ratios[0] + ratios[2]) / 2, rel=1e-4)
    assert ratios[0] > ratios[1] > ratios[2] > 1
