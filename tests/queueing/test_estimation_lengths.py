"""Lengths that a limit cut, or that are not over yet, do not bias what is said of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.text import SpecError
from queueing.distributions import TokenDistribution, parse_distribution
from queueing.estimation.extrapolation import extrapolate
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.estimation.lengths import Lengths, lengths

LONG = parse_distribution("lognormal:mu=3,sigma=0.7", 2000)
RUNS = 200


def test_the_product_limit_by_hand() -> None:
    """Ends at 1, 2, 4; cut at 2 and 3 (at least so many): S = 4/5, 4/5 * 3/4, ..., then one of one at risk ends at 4."""
    sample = lengths([1, 2, 2, 3, 4], [False, False, True, True, False])
    assert sample.survival.tolist() == pytest.approx([1.0, 0.8, 0.8 * 2 / 3, 0.8 * 2 / 3, 0.0])
    assert sample.mean().value == pytest.approx(1 + 0.8 + 2 * 0.8 * 2 / 3)
    assert sample.mean(2).value == pytest.approx(1.8)


def test_without_censoring_it_is_the_plain_mean_with_its_plain_interval() -> None:
    counts = LONG.sample(np.random.default_rng(0), 400)
    estimate = lengths(counts).mean()
    assert estimate.value == pytest.approx(counts.mean())
    half = 1.959964 * counts.std(ddof=1) / 20
    assert (estimate.low, estimate.high) == pytest.approx((counts.mean() - half, counts.mean() + half))
    assert np.allclose(lengths(counts).law().pmf, TokenDistribution.from_counts(counts).pmf)


def test_the_interval_of_the_mean_covers_the_truth() -> None:
    samples = [lengths(LONG.sample(np.random.default_rng(seed), 500)) for seed in range(RUNS)]
    assert sum(sample.mean().covers(LONG.mean) for sample in samples) >= 0.88 * RUNS
    assert np.mean([sample.mean().relative for sample in samples]) < 0.08


def test_the_interval_of_a_clipped_mean_covers_the_truth() -> None:
    """Three limits in turn, older requests counting less: the mean under the largest limit, of which few requests had the chance."""
    covered = naive = 0
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        drawn, limits = LONG.sample(rng, 600), rng.choice([20, 40, 80], 600)
        cut = np.minimum(drawn, limits)
        sample = lengths(cut, drawn >= limits, ages=100 * rng.random(600), half_life=60.0)
        covered += sample.mean(80).covers(LONG.clip(80).mean)
        naive += lengths(cut).mean().covers(LONG.clip(80).mean)
    assert covered >= 0.88 * RUNS
    assert naive < 0.05 * RUNS


def test_quantiles_cover_up_to_where_the_law_is_known() -> None:
    limit = LONG.quantile(0.9)
    covered, beyond = 0, []
    for seed in range(RUNS):
        drawn = LONG.sample(np.random.default_rng(seed), 500)
        sample = lengths(np.minimum(drawn, limit), drawn >= limit)
        covered += sample.quantile(0.5).covers(LONG.quantile(0.5))
        beyond += [sample.quantile(0.99)]
    assert covered >= 0.88 * RUNS
    assert all(math.isnan(estimate.value) and math.isinf(estimate.high) for estimate in beyond)


def test_requests_still_in_service_enter_as_more_than_they_have() -> None:
    """A window of 60 tokens' time: only counting who ended favours short answers; counting all who were met in service, long ones."""
    ended, cohort, met = [], [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        started = np.sort(rng.uniform(-400.0, 60.0, 1500))  # one token per unit of time
        drawn = LONG.sample(rng, 1500)
        over, since = started + drawn <= 60.0, started >= 0.0
        so_far = np.where(over, drawn, np.floor(60.0 - started).astype(np.int64) + 1)
        ended += [drawn[over & since].mean()]
        cohort += [lengths(so_far[since], ~over[since]).mean(40).value]
        kept = since | ~over
        met += [lengths(so_far[kept], ~over[kept]).mean(40).value]
    truth = LONG.clip(40).mean
    assert np.mean(cohort) == pytest.approx(truth, rel=0.02)
    assert np.mean(np.minimum(ended, 40)) < 0.85 * LONG.mean
    assert np.mean(met) > 1.02 * truth  # standard error 0.5 %


def test_nothing_is_said_beyond_the_limit_without_a_family() -> None:
    sample = lengths([3, 5, 8, 8], [False, False, True, True])
    assert sample.unknown_mass == pytest.approx(0.5)
    assert math.isnan(sample.mean().value)
    assert sample.law(8).pmf[8] == pytest.approx(0.5)
    with pytest.raises(SpecError, match="known up to 8 only"):
        sample.law(9)
    with pytest.raises(SpecError, match="known up to 8 only"):
        sample.law()


def test_one_long_request_still_in_service_does_not_hide_the_law() -> None:
    sample = lengths([*range(1, 301), 310], [False] * 300 + [True])
    assert sample.law().longest == 310
    assert sample.law().mean == pytest.approx(sample.mean().value)


@pytest.mark.slow
def test_beyond_the_limit_a_named_family_covers_the_truth_and_says_so() -> None:
    limit = LONG.quantile(0.9)
    covered, others = 0, []
    for seed in range(40):
        drawn = LONG.sample(np.random.default_rng(seed), 500)
        sample = lengths(np.minimum(drawn, limit), drawn >= limit)
        found = extrapolate(sample, "lognormal", 4 * limit)
        covered += found.mean.covers(LONG.clip(4 * limit).mean)
        others += [extrapolate(sample, "exponential", 4 * limit)]
    assert covered >= 0.85 * 40  # a jackknife of 8 groups, each with a fit of its own
    assert found.note.startswith("extrapolated: ")
    assert f"cut at {limit} tokens" in found.note
    assert others[-1].aic > found.aic  # what the AIC is for


def test_an_extrapolated_law_is_the_known_one_up_to_the_limit() -> None:
    drawn = LONG.sample(np.random.default_rng(3), 2000)
    sample = lengths(np.minimum(drawn, 40), drawn >= 40)
    law = extrapolate(sample, "lognormal", 400).law
    assert np.allclose(law.pmf[:40], sample.law(40).pmf[:40])
    assert law.longest == 400
    assert law.mean == pytest.approx(LONG.mean, rel=0.05)


def test_lengths_survive_a_file() -> None:
    rng = np.random.default_rng(5)
    sample = lengths(rng.integers(1, 30, 300), rng.random(300) < 0.2, ages=rng.random(300), half_life=0.5)
    again = Lengths.from_dict(sample.to_dict())
    assert again.mean(29).value == pytest.approx(sample.mean(29).value)
    assert again.mean(29).high == pytest.approx(sample.mean(29).high)
    assert again.effective_n == pytest.approx(sample.effective_n)


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(SpecError, match="count below 1"):
        lengths([0, 3])
    with pytest.raises(SpecError, match="as many of each"):
        Lengths(np.array([1, 2]), np.array([False]), np.array([1.0, 1.0]))
    with pytest.raises(SpecError, match="no lengths"):
        lengths([]).law(3)


def test_an_estimate_survives_json() -> None:
    for estimate in (Estimate(1.5, 1.0, math.inf, 7.0), UNKNOWN):
        again = Estimate.from_dict(estimate.to_dict())
        assert again == estimate or (math.isnan(again.value) and again.low == estimate.low)
    assert UNKNOWN.to_dict() == {"value": None, "low": None, "high": None, "effective_n": 0.0}
    assert not UNKNOWN.known
