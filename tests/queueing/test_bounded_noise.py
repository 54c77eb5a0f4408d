"""Bounded noise (Scully, Grosof and Mitzenmacher) and the price of misprediction (Mitzenmacher), in
quick forms; the slides' own claims are in `kendall reproduce slides-noise` and
`slides-misprediction`.
"""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import kv

from kendall.queueing.models.soap.orders import (
    SHORTEST_FIRST,
    SHORTEST_REMAINING,
    BounceRanks,
)
from kendall.queueing.models.soap.queue import price_of_misprediction, solve_order
from kendall.queueing.predictors.laws import ExponentialPrediction, UniformPrediction
from kendall.queueing.predictors.sizes import SizeGrid, exponential_sizes
from papers.sample_paths import Replications, simulate_order

EXPONENTIAL = exponential_sizes()
NOISE = UniformPrediction(0.5, 2.0)
COARSE = 60


def test_noisy_predictions_stay_within_their_bounds():
    sizes = np.array([0.1, 1.0, 7.0])
    told = NOISE.sample(np.random.default_rng(1), np.repeat(sizes, 20_000)).reshape(3, -1)
    for row, size in zip(told, sizes, strict=True):
        assert 0.5 * size <= row.min() < 0.51 * size
        assert 1.99 * size < row.max() <= 2 * size
        for y in (0.5 * size, 0.8 * size, 1.7 * size):
            share = float(NOISE.at_most(np.array(y), np.array(size)))
            assert (row <= y).mean() == pytest.approx(share, abs=0.015)
    law = NOISE.joint(EXPONENTIAL.cells(SizeGrid(COARSE)), SizeGrid(COARSE))
    inside = (law.predictions[:, None] >= 0.45 * law.sizes) & (
        law.predictions[:, None] <= 2.2 * law.sizes
    )
    assert law.joint[~inside].sum() < 0.02


@pytest.mark.parametrize("order", [SHORTEST_REMAINING, BounceRanks()], ids=["sprpt", "srpt-b"])
def test_the_analysis_under_bounded_noise_is_the_simulated_mean(order):
    exact = solve_order(order, EXPONENTIAL, 0.8, NOISE, COARSE).sojourn
    found = simulate_order(order, EXPONENTIAL, 0.8, NOISE, Replications(20_000, 16, 4))
    assert found.standard_error < 0.01 * exact
    assert abs(found.mean - exact) < 4 * found.standard_error + 2e-3 * exact


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bounds", [(0.9, 1.1), (0.5, 2.0), (0.1, 2.0)])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_srpt_with_bounce_is_graceful_and_consistent(load, bounds):
    """E[T] <= 3.5 alpha / beta E[T under SRPT], and near it where the noise is small."""
    best = solve_order(SHORTEST_REMAINING, EXPONENTIAL, load, cells=COARSE).sojourn
    noisy = solve_order(
        BounceRanks(), EXPONENTIAL, load, UniformPrediction(*bounds), COARSE
    ).sojourn
    assert 1 - 1e-3 < noisy / best < 3.5 * bounds[1] / bounds[0]
    if bounds == (0.9, 1.1):
        assert noisy / best < 1.03


@pytest.mark.thinned(3)
@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
def test_the_price_of_misprediction_is_the_formula_with_the_squares_outside(load):
    """int f_p / (1 - rho'_y)^2 over int f_S / (1 - rho_x)^2, exponential sizes and predictions:
    f_p(y) = 2 K0(2 sqrt y), rho'_y = lam (1 - 2 y K2(2 sqrt y)); y = z^2.
    """

    def predicted(z):
        rho = load * (1 - 2 * z * z * kv(2, 2 * z))
        return 4 * z * kv(0, 2 * z) / (1 - rho) ** 2

    def exact(x):
        return np.exp(-x) / (1 - load * (1 - (1 + x) * np.exp(-x))) ** 2

    formula = quad(predicted, 1e-12, 60, limit=300)[0] / quad(exact, 0, 60, limit=300)[0]
    told, known = (
        solve_order(SHORTEST_FIRST, EXPONENTIAL, load, source).delay
        for source in (ExponentialPrediction(), UniformPrediction(1 - 1e-6, 1 + 1e-6))
    )
    assert told / known == pytest.approx(formula, rel=1e-3)
    price = price_of_misprediction(SHORTEST_FIRST, EXPONENTIAL, load, ExponentialPrediction())
    assert price == pytest.approx((told + 1) / (known + 1), rel=1e-3)
