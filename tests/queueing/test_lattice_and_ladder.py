"""The two tools under the exact chains: laws on a lattice, and the factors of a random walk,
each against what is known otherwise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.queueing.distributions.lattice import (
    Grid,
    Vector,
    blocks,
    cyclic,
    fitted_width,
    mean_of,
    spectra,
    spread,
)
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.models.batches.ladder import Ladder, solve_ladder
from kendall.queueing.models.roots import bisected
from kendall.queueing.result import LEVELS


def exponential(grid: Grid, share: float = 1.0) -> Vector:
    """Lattice masses of a law of mean 1."""
    return grid.masses(share / (1 + grid.s) * grid.hat)


@pytest.mark.parametrize("atom", [0.0, 0.3, 0.6, 0.92])
def test_an_exponential_law_beside_an_atom_has_its_quantiles(atom: float) -> None:
    """P(X > x) = (1 - atom) e^-x."""
    grid = Grid(0.01, 2048)
    masses = exponential(grid, 1 - atom)
    assert masses.sum() + atom == pytest.approx(1.0, abs=1e-4)
    assert mean_of(masses, grid) == pytest.approx(1 - atom, rel=1e-4)
    for found, level in zip(grid.quantiles(masses, atom), LEVELS.values(), strict=True):
        assert found == (
            0.0 if atom >= level else pytest.approx(math.log((1 - atom) / (1 - level)), rel=1.5e-3)
        )


def test_a_quantile_beyond_the_horizon_is_none() -> None:
    for points, known in ((64, 0), (100, 1), (280, 2), (310, 3), (470, 4)):
        found = Grid(0.01, points).quantiles(exponential(Grid(0.01, points)))
        assert [each is not None for each in found] == [True] * known + [False] * (4 - known), (
            points
        )


def test_a_transform_there_and_back_is_the_law() -> None:
    grid = Grid(0.5, 64)
    masses = np.random.default_rng(0).dirichlet(np.ones(64))
    assert grid.masses(grid.transform(masses)) == pytest.approx(masses, abs=1e-12)
    two = np.array([masses, masses[::-1]])
    assert grid.masses(grid.transform(two)) == pytest.approx(two, abs=1e-12)
    alone = grid.masses(grid.transform(np.eye(64)[3]) * grid.transform(np.eye(64)[5]))
    assert alone == pytest.approx(np.eye(64)[8], abs=1e-12), "three and five steps are eight"
    assert grid.s[0] == pytest.approx(8 / 64)


@pytest.mark.parametrize("order", [2, 4, 8])
def test_mass_that_is_spread_keeps_the_moments_below_the_order(order: int) -> None:
    values, weights, width, points = (
        np.array([0.0, 0.1234, 0.5, 1.499, 1.5]),
        np.array([0.1, 0.2, 0.3, 0.15, 0.25]),
        0.1,
        16,
    )
    masses, instants = spread(values, weights, width, points, order), 0.1 * np.arange(16)
    for power in range(order):
        assert masses @ instants**power == pytest.approx(weights @ values**power, rel=1e-9)
    assert abs(masses @ instants**order - weights @ values**order) > 1e-9, "and no higher one"
    inner = np.array([0.7, 0.7777, 0.8])
    assert cyclic(inner, np.ones(3), width, points, order) == pytest.approx(
        spread(inner, np.ones(3), width, points, order), abs=1e-12
    )


@pytest.mark.parametrize("order", [2, 8])
def test_the_spectrum_of_a_point_is_that_of_its_lattice_law(order: int) -> None:
    values, width, points = np.array([0.0, 0.25, 0.777, 1.1]), 0.1, 16
    rows = spectra(values, width, points, order)(slice(3, 9))
    for column, value in zip(rows.T, values, strict=True):
        expected = np.fft.fft(cyclic(np.array([value]), np.ones(1), width, points, order))[3:9]
        assert column == pytest.approx(expected, abs=1e-12)
    assert np.abs(rows).max() <= 1 + 1e-12


def test_a_lattice_covers_its_horizon_with_less_than_half_as_much_again() -> None:
    for horizon in np.geomspace(1e-3, 1e3, 40):
        width = fitted_width(float(horizon), 256)
        assert horizon <= 256 * width * (1 + 1e-12) < 1.4143 * horizon
        assert 2 * math.log2(width) == pytest.approx(round(2 * math.log2(width)))


def test_blocks_cover_everything_once() -> None:
    assert [(part.start, part.stop) for part in blocks(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert [(part.start, part.stop) for part in blocks(8, 4)] == [(0, 4), (4, 8)]
    assert list(blocks(0, 4)) == []


def poisson_row(mean: float, count: int = 200) -> Vector:
    j = np.arange(count)
    return np.exp(j * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in range(count)]))


def left_behind(row: Vector, size: int, states: int = 500) -> Vector:
    """The law of R' = (R + A - b)^+, by its equations."""
    matrix = np.zeros((states, states))
    for state in range(states):
        for arrived, chance in enumerate(row):
            matrix[state, min(max(state + arrived - size, 0), states - 1)] += chance
    equations = matrix.T - np.eye(states)
    equations[-1] = 1.0
    return np.linalg.solve(equations, np.eye(states)[-1])


def first_descent(row: Vector, size: int, states: int = 500) -> Vector:
    """P(the walk from 0 falls by j at its first strict descent), j = 0 .. b, by its expected
    visits to 0 and above.
    """
    up = np.array(
        [
            [row[to - at + size] if 0 <= to - at + size < len(row) else 0.0 for to in range(states)]
            for at in range(states)
        ]
    )
    visits = np.linalg.solve(np.eye(states) - up.T, np.eye(states)[0])
    return np.array(
        [
            sum(visits[at] * row[size - fall - at] for at in range(size - fall + 1))
            if fall
            else 0.0
            for fall in range(size + 1)
        ]
    )


CASES = [(1, 0.5, 1.5), (1, 0.9, 1.1), (3, 2.0, 1.3), (3, 2.7, 1.08), (8, 5.0, 1.3)]


@pytest.fixture(params=CASES, ids=str, scope="module")
def walk(request: pytest.FixtureRequest) -> tuple[Vector, Ladder]:
    size, mean, radius = request.param
    row = poisson_row(mean)
    return row, solve_ladder(row, size, radius)


def test_the_supremum_has_the_mean_of_the_recursion(walk: tuple[Vector, Ladder]) -> None:
    row, ladder = walk
    behind = left_behind(row, ladder.size)
    assert ladder.mean_supremum == pytest.approx(float(behind @ np.arange(len(behind))), rel=1e-8)
    if ladder.size == 1:
        mean = float(row @ np.arange(len(row)))
        assert ladder.mean_supremum == pytest.approx(
            mean**2 / (2 * (1 - mean)), rel=1e-9
        )  # M/D/1 at departures, less the one in service


def test_the_ladder_heights_are_those_of_the_first_descent(walk: tuple[Vector, Ladder]) -> None:
    row, ladder = walk
    assert ladder.heights == pytest.approx(first_descent(row, ladder.size), abs=1e-9)
    assert ladder.heights.sum() == pytest.approx(1.0, abs=1e-9)
    assert ladder.residual < 1e-9


def test_the_supremums_transform_is_that_of_its_law_inside_and_outside_the_circle(
    walk: tuple[Vector, Ladder],
) -> None:
    row, ladder = walk
    behind = left_behind(row, ladder.size)
    behind = behind[
        : int(np.argmax(behind < 1e-15))
    ]  # beyond are rounding errors, which powers outside the circle blow up
    inner, outer = 0.5 + 0.3j, 1 + 0.8 * (ladder.radius - 1) + 0j
    w = np.array([0.2 + 0j, inner, 1.0 + 0j, outer])
    powers = np.polynomial.polynomial.polyval(w, row) * w ** -float(ladder.size)
    assert ladder.supremum_transform(w, powers) == pytest.approx(
        np.polynomial.polynomial.polyval(w, behind), rel=1e-6
    )


def test_a_walk_that_does_not_fall_has_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kendall.queueing.models.batches.ladder._LAST", 2**12)
    with np.errstate(all="ignore"), pytest.raises(NotConvergedError, match="Wiener-Hopf"):
        solve_ladder(poisson_row(3.5), 3, 1.05)


def test_a_root_is_found_from_either_side_and_only_where_there_is_one() -> None:
    assert bisected(lambda x: x**3 - 2, 0.0, 2.0) == pytest.approx(2 ** (1 / 3), rel=1e-15)
    assert bisected(lambda x: 2 - x**3, 0.0, 2.0) == pytest.approx(2 ** (1 / 3), rel=1e-15)
    with pytest.raises(ValueError, match="one sign"):
        bisected(lambda x: x**2 + 1, 0.0, 2.0)
