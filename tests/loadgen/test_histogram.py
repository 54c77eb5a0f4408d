"""The histogram of a report: every value in one bin, ends that a person can read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.loadgen.measures.histogram import histogram


@given(st.lists(st.floats(-1e3, 1e4), min_size=1, max_size=200))
def test_every_value_is_in_one_bin_and_the_bins_have_no_gaps(values: list[float]) -> None:
    found = histogram(np.array(values))
    assert sum(each.count for each in found) == len(values)
    assert [each.high for each in found[:-1]] == [each.low for each in found[1:]]
    assert found[0].low <= min(values)
    assert found[-1].high >= max(values)
    assert len(found) <= 12


@pytest.mark.parametrize(
    ("draw", "width"),
    [
        (lambda rng: rng.uniform(0.103, 0.297, 5000), 0.02),
        (lambda rng: rng.exponential(0.1, 5000), 0.05),
        (lambda rng: rng.uniform(20.0, 90.0, 5000), 10.0),
        (lambda rng: rng.uniform(0.0, 0.00099, 5000), 0.0001),
    ],
)
def test_the_ends_of_the_bins_are_round(draw, width: float) -> None:  # type: ignore[no-untyped-def]
    found = histogram(draw(np.random.default_rng(1)))
    assert 4 <= len(found) <= 12
    for each in found[:-1]:
        assert each.high - each.low == pytest.approx(width)
        assert math.isclose(each.low / width, round(each.low / width), abs_tol=1e-9)


def test_counts_are_those_between_the_ends() -> None:
    values = np.random.default_rng(2).gamma(2.0, 0.05, 3000)
    for each in histogram(values)[:-1]:
        assert each.count == np.sum((values >= each.low) & (values < each.high))


def test_one_slow_answer_does_not_press_the_others_into_one_bin() -> None:
    values = np.append(np.random.default_rng(3).uniform(0.1, 0.2, 999), 60.0)
    found = histogram(values)
    assert (found[-1].high, found[-1].count) == (60.0, 1)
    assert len(found) > 9
    assert max(each.count for each in found) < 150


def test_a_heavy_tail_leaves_the_bins_to_the_bulk() -> None:
    """A few in a hundred are a hundred times as slow: the others still have several bins."""
    rng = np.random.default_rng(4)
    values = np.append(rng.exponential(0.1, 970), rng.uniform(5.0, 10.0, 30))
    found = histogram(values)
    assert 30 <= found[-1].count < 40
    assert max(each.count for each in found) < 700


def test_equal_values_are_one_bin_and_no_values_none() -> None:
    assert [(each.low, each.high, each.count) for each in histogram(np.full(7, 0.05))] == [
        (0.05, 0.05, 7)
    ]
    assert histogram(np.array([])) == ()
