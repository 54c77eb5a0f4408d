"""The speed of a machine along a run, by hand and by small steps of time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kendall.queueing.latency.speed_path import (
    SpeedPath,
    block_begins,
    path_of_batches,
    path_of_slots,
)

# two seconds at half the pace, four at twice the pace
PATH = SpeedPath(np.array([1.0, 3.0, 7.0]), np.array([2.0, 0.5]), outside=4.0)


@pytest.mark.parametrize(
    ("at", "clock"),
    [(0.0, -0.25), (1.0, 0.0), (2.0, 0.5), (3.0, 1.0), (5.0, 5.0), (7.0, 9.0), (9.0, 9.5)],
)
def test_the_laws_clock_is_the_integral_of_one_over_the_speed(at: float, clock: float) -> None:
    assert PATH.to_clock(np.array([at])) == pytest.approx([clock])
    assert PATH.to_run(np.array([clock])) == pytest.approx([at])


@pytest.mark.parametrize(("power", "speeds"), [(1.0, [6.0, 0.25]), (2.0, [18.0, 0.125])])
def test_each_speed_is_corrected_by_what_began_in_its_time(
    power: float, speeds: list[float]
) -> None:
    """Three times and half as long as modelled; what began outside counts in the nearest piece."""
    at = np.array([0.5, 1.0, 2.9, 3.0, 6.9, 7.0, 8.0])
    measured = np.array([1.0, 2.0, 6.0, 0.5, 0.5, 0.5, 0.5])
    modelled = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    found = PATH.corrected(at, measured, modelled, power)
    assert found.speed == pytest.approx(speeds)
    assert (found.at is PATH.at, found.outside) == (True, 4.0)


@pytest.mark.parametrize(("took", "modelled"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_speed_of_which_one_side_is_unknown_stays(took: float, modelled: float) -> None:
    at = np.array([2.0, 5.0])
    found = PATH.corrected(at, np.array([took, 3.0]), np.array([modelled, 2.0]))
    assert found.speed == pytest.approx([2.0, 0.75])


def test_between_batches_the_speed_is_that_of_the_run() -> None:
    """The third begins before the second has ended, the last one ends before its predecessor."""
    begun, ended = np.array([0.0, 2.0, 2.5, 6.0, 6.5]), np.array([1.0, 3.0, 4.0, 8.0, 7.0])
    found = path_of_batches(begun, ended, np.array([2.0, 3.0, 4.0, 5.0, 6.0]), 1.5)
    assert found.at.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]
    assert found.speed.tolist() == [2.0, 1.5, 3.0, 4.0, 1.5, 5.0]
    assert found.outside == 1.5


@pytest.mark.parametrize(
    ("count", "span", "begins"),
    [(2, 3, [0]), (3, 3, [0]), (5, 3, [0]), (6, 3, [0, 3]), (10, 3, [0, 3, 6]), (4, 2, [0, 2])],
)
def test_the_last_block_has_up_to_twice_as_many(count: int, span: int, begins: list[int]) -> None:
    assert block_begins(count, span) == begins


@pytest.mark.parametrize(("count", "span"), [(40, 4), (33, 3), (12, 2)])
def test_slots_have_a_speed_for_each_tenth_of_the_run(count: int, span: int) -> None:
    rng = np.random.default_rng(1)
    at, (measured, fitted) = np.cumsum(rng.random(count)), rng.random((2, count)) + 0.5
    begins = [*range(0, count - span + 1, span), count]
    found = path_of_slots(at, measured, fitted, 1.25)
    blocks = [slice(*ends) for ends in itertools.pairwise(begins)]
    assert found.speed == pytest.approx([measured[b].sum() / fitted[b].sum() for b in blocks])
    assert found.at.tolist() == [*at[begins[:-1]], at[-1] + measured[-1]]
    assert found.outside == 1.25


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", [30.0, 400.0])
def test_a_resampled_path_is_pieces_of_the_whole_one(seed: int, end: float) -> None:
    """The same pieces, each looked up at many instants; as long as asked for, in random order."""
    drawn = np.random.default_rng(seed)
    at = 5.0 + np.append(0.0, np.sort(drawn.uniform(0, end, 40)))
    whole = SpeedPath(at, drawn.uniform(0.5, 2.0, 40), outside=1.5)
    found = whole.resampled(300.0, 3.0, np.random.default_rng(seed))
    assert found is not None
    assert (found.at[0], found.at[-1], found.outside) == (0.0, pytest.approx(300.0), 4.5)
    rng, begun, span = np.random.default_rng(seed), 0.0, at[-1] - at[0]
    length = min(float(rng.choice((20.0, 120.0))), span / 2)
    while begun < 300.0:
        piece = min(rng.exponential(length), 300.0 - begun, span)
        since = at[0] + rng.random() * (span - piece)
        inside = np.linspace(0, piece, 52)[1:-1]
        expected = whole.speed[np.searchsorted(at, since + inside, "right") - 1]
        speeds = found.speed[np.searchsorted(found.at, begun + inside, "right") - 1]
        assert speeds == pytest.approx(3.0 * expected)
        begun += piece


def test_a_path_without_length_has_no_pieces() -> None:
    rng = np.random.default_rng(1)
    assert SpeedPath(np.array([2.0, 2.0]), np.array([1.0]), 1.0).resampled(9.0, 1.0, rng) is None
    assert PATH.resampled(0.0, 1.0, rng) is None
