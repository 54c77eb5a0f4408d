"""Fits of named laws to counts, clipped ones included; the product-limit estimate; tail indices."""

import math

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.censoring import redraw, sample
from kendall.queueing.distributions.fit import FAMILIES, FittedDistribution, fit_distribution
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution

CAP = 100_000
TRUTHS = [
    "uniform:low=3,high=500",
    "uniform:low=0,high=6",
    "normal:mean=300,std=60",
    "normal:mean=20,std=15",
    "lognormal:mu=5,sigma=0.7",
    "lognormal:mu=1,sigma=0.5",
    "geometric:mean=40",
    "weibull:shape=1.5,scale=200",
    "weibull:shape=0.6,scale=90",
    "pareto:alpha=1.8,minimum=20",
    "pareto:alpha=3,minimum=1.2",
]


def draws(text: str, size: int, seed: int = 5) -> np.ndarray:
    return parse_distribution(text, CAP).sample(np.random.default_rng(seed), size)


def by_family(fits: list[FittedDistribution]) -> dict[str, FittedDistribution]:
    return {fit.family: fit for fit in fits}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("text", TRUTHS)
def test_the_family_that_made_the_counts_ranks_first_near_the_truth_and_above_its_likelihood(
    text: str,
) -> None:
    counts = draws(text, 3000)
    best = fit_distribution(counts)[0]
    truth = parse_distribution(text, CAP)
    assert best.family == text.partition(":")[0]
    assert best.log_likelihood >= float(np.log(truth.pmf[counts]).sum())
    assert (
        best.log_likelihood - float(np.log(truth.pmf[counts]).sum()) < 8
    )  # twice it is chi-square with 2 degrees
    assert best.law(CAP).mean == pytest.approx(truth.mean, rel=0.06)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("text", TRUTHS)
def test_the_likelihood_is_that_of_the_rounded_law_and_no_neighbour_has_a_higher_one(
    text: str,
) -> None:
    counts = draws(text, 500)
    fits = [
        fit for fit in fit_distribution(counts) if fit.law(CAP).longest > counts.max()
    ]  # else beyond its cut at 1e-12
    assert len(fits) >= 2
    for fit in fits:
        assert fit.log_likelihood == pytest.approx(
            float(np.log(fit.law(CAP).pmf[counts]).sum()), rel=1e-9
        )
        assert fit.aic == pytest.approx(2 * len(fit.parameters) - 2 * fit.log_likelihood)
        assert fit.bic == pytest.approx(
            math.log(500) * len(fit.parameters) - 2 * fit.log_likelihood
        )
        for key, value in fit.parameters.items():
            for factor in (0.99, 1.01):
                numbers = {**fit.parameters, key: value * factor}
                moved = f"{fit.family}:" + ",".join(
                    f"{name}={number!r}" for name, number in numbers.items()
                )
                law = parse_distribution(moved, CAP)
                inside = counts.max() <= law.longest and law.pmf[counts].min() > 0
                assert not inside or np.log(law.pmf[counts]).sum() <= fit.log_likelihood + 1e-5


@pytest.mark.parametrize("limit", [None, 60, 25])
def test_a_geometric_fit_is_ended_over_trials(limit: int | None) -> None:
    counts = draws("geometric:mean=40", 1000)
    clipped = counts >= limit if limit else np.zeros(1000, bool)
    seen = np.where(clipped, limit or 0, counts)
    fit = fit_distribution(seen, clipped, families=["geometric"])[0]
    ended = np.count_nonzero(~clipped)
    assert fit.parameters["mean"] == pytest.approx(
        (seen[~clipped].sum() + (seen[clipped] - 1).sum()) / ended, rel=1e-4
    )


@pytest.mark.parametrize(
    "text",
    [
        "lognormal:mu=5,sigma=0.7",
        "weibull:shape=1.5,scale=200",
        "normal:mean=300,std=60",
        "pareto:alpha=1.8,minimum=20",
    ],
)
def test_clipped_counts_are_used_as_at_least(text: str) -> None:
    """The fit sees the law through the limit; taking clipped counts for whole ones does not."""
    counts = draws(text, 4000)
    limit = int(np.quantile(counts, 0.6))
    clipped = counts >= limit
    seen = np.minimum(counts, limit)
    family = text.partition(":")[0]
    truth, fit = (
        parse_distribution(text, CAP),
        fit_distribution(seen, clipped, families=[family])[0],
    )
    assert fit.law(CAP).quantile(0.9) == pytest.approx(truth.quantile(0.9), rel=0.08)
    ignored = fit_distribution(seen, families=[family])[0]
    assert ignored.law(CAP).quantile(0.9) < 0.9 * truth.quantile(0.9)
    expected = np.log(fit.law(CAP).pmf[seen[~clipped]]).sum() + clipped.sum() * math.log(
        fit.law(CAP).survival[limit - 1]
    )
    assert fit.log_likelihood == pytest.approx(float(expected), rel=1e-9)


def test_a_uniform_law_is_seen_through_a_limit() -> None:
    counts = draws("uniform:low=0,high=1000", 4000)
    fit = fit_distribution(np.minimum(counts, 400), counts >= 400, families=["uniform"])[0]
    assert fit.parameters["high"] == pytest.approx(1000, rel=0.08)


def test_the_distance_is_the_largest_gap_between_the_distribution_functions() -> None:
    counts = draws("geometric:mean=12", 200)
    for fit in fit_distribution(counts):
        law, empirical = fit.law(CAP), TokenDistribution.from_counts(counts)
        grid = np.arange(min(law.longest, empirical.longest))
        assert fit.ks == pytest.approx(
            max(
                np.abs(law.cdf[grid] - empirical.cdf[grid]).max(),
                law.survival[min(empirical.longest, law.longest)],
            ),
            abs=1e-12,
        )


def test_the_distance_is_also_taken_just_below_each_count() -> None:
    """Between two counts the empirical law is flat and the fitted one grows: the largest gap is
    at 99, before the step at 100.
    """
    counts = [1] * 6 + [100] * 14
    fit = fit_distribution(counts, families=["geometric"])[0]
    mean = np.mean(counts)
    assert fit.ks == pytest.approx(1 - (1 - 1 / mean) ** 99 - 0.3, rel=1e-4)


def test_the_distance_below_a_limit_does_not_depend_on_what_is_above() -> None:
    counts = draws("lognormal:mu=5,sigma=0.7", 2000)
    clipped = counts >= 150
    fit = by_family(fit_distribution(np.minimum(counts, 150), clipped))["lognormal"]
    grid = np.arange(1, 150)
    empirical = np.array([(counts <= n).mean() for n in grid])
    assert fit.ks == pytest.approx(np.abs(fit.law(CAP).cdf[grid] - empirical).max(), abs=1e-12)


def test_a_wrong_family_has_a_small_p_value_and_the_right_one_does_not() -> None:
    fits = by_family(
        fit_distribution(
            draws("lognormal:mu=3,sigma=0.7", 400),
            families=["lognormal", "exponential"],
            rng=np.random.default_rng(2),
            bootstrap=39,
        )
    )
    assert fits["exponential"].p_value == 1 / 40
    assert fits["lognormal"].p_value is not None
    assert fits["lognormal"].p_value > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000_000, 30])
def test_p_values_of_true_families_are_uniform(limit: int) -> None:
    """Mean 1/2 and standard deviation 1/sqrt(12); tables for known parameters would give a mean
    near 0.8.
    """
    rng, values = np.random.default_rng(11), []
    law = parse_distribution("geometric:mean=25")
    for _ in range(100):
        counts = law.sample(rng, 80)
        fit = fit_distribution(
            np.minimum(counts, limit),
            counts >= limit,
            families=["geometric"],
            rng=rng,
            bootstrap=39,
        )[0]
        assert fit.p_value is not None
        values.append(fit.p_value)
    assert abs(np.mean(values) - 0.5125) < 4 * math.sqrt(1 / 12 / 100)
    assert np.mean(np.array(values) <= 0.1) < 0.1 + 4 * math.sqrt(0.09 / 100)


def test_equal_counts_are_deterministic_and_nothing_else() -> None:
    fit = fit_distribution([7] * 20, rng=np.random.default_rng(1))
    assert [(f.text, f.log_likelihood, f.ks) for f in fit] == [("deterministic:value=7", 0.0, 0.0)]


def test_one_ended_length_and_a_limit_above_it_leave_the_laws_of_one_parameter() -> None:
    """30 ended at 1, 10 were clipped at 2: P(N > 1) = 1/4, a mean of 4/3."""
    fits = by_family(fit_distribution([1] * 30 + [2] * 10, [False] * 30 + [True] * 10))
    assert set(fits) == {"exponential", "geometric"}
    assert fits["geometric"].parameters["mean"] == pytest.approx(4 / 3, rel=1e-4)


def test_a_normal_law_that_would_be_an_exponential_one_is_left_out() -> None:
    """Its likelihood grows as the mean goes to minus infinity: there is no maximum."""
    assert "normal" not in by_family(fit_distribution(draws("weibull:shape=0.6,scale=90", 500)))


def test_a_fit_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 10"):
        fit_distribution([1, 2, 3])
    with pytest.raises(SpecError, match="did you mean 'weibull'"):
        fit_distribution(range(1, 30), families=["wiebull"])
    with pytest.raises(SpecError, match="as long"):
        fit_distribution(range(1, 30), [True])
    with pytest.raises(SpecError, match="whole number"):
        fit_distribution([0.5] * 20)


def test_every_named_law_with_parameters_can_be_fitted() -> None:
    assert set(FAMILIES) == {
        "deterministic",
        "uniform",
        "normal",
        "lognormal",
        "exponential",
        "geometric",
        "weibull",
        "pareto",
    }


def test_the_product_limit_estimate_is_that_of_the_textbook() -> None:
    """Ends at 3, 5, 5, 8; clipped at 4, 5, 8: 6 of 7 outlive 3, then 2 of the 4 at risk at 5,
    then none of the 1 at 8.
    """
    estimate = sample([3, 4, 5, 5, 5, 8, 8], [False, True, False, False, True, False, True])
    assert estimate.values.tolist() == [3, 4, 5, 8]
    assert estimate.survival() == pytest.approx([6 / 7, 6 / 7, 6 / 7 * 2 / 4, 0.0])


def test_one_common_limit_is_found_as_the_limit_of_all() -> None:
    counts = np.minimum(draws("geometric:mean=40", 500), 50)
    found = sample(counts, counts == 50)
    limits, shares = found.limits()
    assert (limits.tolist(), shares.tolist()) == ([50], [1.0])
    again = redraw(draws("geometric:mean=40", 500, seed=9), found, np.random.default_rng(1))
    assert again.values.max() == 50
    assert again.clipped.sum() == again.clipped[-1] > 0


def test_two_limits_are_estimated_with_their_shares() -> None:
    rng = np.random.default_rng(4)
    lengths, limits = draws("geometric:mean=40", 20_000), rng.choice([20, 60], 20_000, p=[0.3, 0.7])
    found, shares = sample(np.minimum(lengths, limits), lengths >= limits).limits()
    assert found.tolist() == [20, 60]
    assert shares == pytest.approx([0.3, 0.7], abs=0.02)
