"""Lengths that a limit cut, or that are not over yet, do not bias what is said of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.choosing.gain.known_lengths import known_lengths
from kendall.queueing.distributions.fit import fit_distribution
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.lengths.lengths import Lengths, SavedLengths, lengths
from kendall.queueing.json_form import from_json, json_object

LONG = parse_distribution("lognormal:mu=3,sigma=0.7", 2000)
RUNS = 200


def test_the_product_limit_by_hand() -> None:
    """Ends at 1, 2, 4; cut at 2 and 3 (at least so many): S = 4/5, 4/5 * 3/4, ..., then one of
    one at risk ends at 4.
    """
    sample = lengths([1, 2, 2, 3, 4], [False, False, True, True, False])
    assert sample.survival.tolist() == pytest.approx([1.0, 0.8, 0.8 * 2 / 3, 0.8 * 2 / 3, 0.0])
    assert sample.mean().value == pytest.approx(1 + 0.8 + 2 * 0.8 * 2 / 3)
    assert sample.mean(2).value == pytest.approx(1.8)


def test_without_censoring_it_is_the_plain_mean_with_its_plain_interval() -> None:
    counts = LONG.sample(np.random.default_rng(0), 400)
    estimate = lengths(counts).mean()
    assert estimate.value == pytest.approx(counts.mean())
    half = 1.959964 * counts.std(ddof=1) / 20
    assert (estimate.low, estimate.high) == pytest.approx(
        (counts.mean() - half, counts.mean() + half)
    )
    assert np.allclose(lengths(counts).law().pmf, TokenDistribution.from_counts(counts).pmf)


def test_the_interval_of_the_mean_covers_the_truth() -> None:
    samples = [lengths(LONG.sample(np.random.default_rng(seed), 500)) for seed in range(RUNS)]
    assert sum(sample.mean().covers(LONG.mean) for sample in samples) >= 0.88 * RUNS
    assert np.mean([sample.mean().relative for sample in samples]) < 0.08


def test_the_interval_of_a_clipped_mean_covers_the_truth() -> None:
    """Three limits in turn, older requests counting less: the mean under the largest limit, of
    which few requests had the chance.
    """
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


@pytest.mark.parametrize(("level", "ends"), [(0.5, (47.0, 50.0, 54.0)), (0.9, (88.0, 90.0, 92.0))])
def test_the_ends_of_a_quantile_are_where_the_law_and_its_error_cross_the_level(
    level: float, ends: tuple[float, ...]
) -> None:
    """A thousand answers spread evenly over 1 to 100 tokens: the error of P(N <= n) is 1.96
    sqrt(P (1 - P) / 1000), 3.1 and 1.9 %.
    """
    found = lengths(np.repeat(np.arange(1, 101), 10)).quantile(level)
    assert (found.low, found.value, found.high, found.effective_n) == (*ends, 1000.0)


@pytest.mark.parametrize(
    ("count", "going", "unknown"),
    [(10_000, 19, 0.0), (10_000, 21, 0.0021), (100, 1, 0.0), (100, 2, 0.02)],
)
def test_what_goes_on_is_nothing_up_to_two_in_a_thousand_or_one_request(
    count: int, going: int, unknown: float
) -> None:
    ended = count - going
    assert lengths(
        [5] * ended + [6] * going, [False] * ended + [True] * going
    ).unknown_mass == pytest.approx(unknown)


def test_requests_still_in_service_enter_as_more_than_they_have() -> None:
    """A window of 60 tokens' time: only counting who ended favours short answers; counting all
    who were met in service, long ones.
    """
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


def test_an_extrapolated_law_is_the_known_one_up_to_the_limit() -> None:
    drawn = LONG.sample(np.random.default_rng(3), 2000)
    sample = lengths(np.minimum(drawn, 40), drawn >= 40)
    found = known_lengths(sample, "lognormal")
    assert found is not None
    assert np.allclose(found.whole.pmf[:40], sample.law(40).pmf[:40])
    assert found.law(400).mean == pytest.approx(LONG.mean, rel=0.05)


def test_lengths_survive_a_file() -> None:
    rng = np.random.default_rng(5)
    sample = lengths(
        rng.integers(1, 30, 300), rng.random(300) < 0.2, ages=rng.random(300), half_life=0.5
    )
    again = Lengths.restored(sample.saved())
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
        again = from_json(json_object(estimate), Estimate)
        assert again == estimate or (math.isnan(again.value) and again.low == estimate.low)
    assert json_object(UNKNOWN) == {"value": None, "low": None, "high": None, "effective_n": 0.0}
    assert not UNKNOWN.known


def test_quantiles_and_their_ends_by_hand() -> None:
    """A hundred answers of 1 to 100 tokens: the share below n has the error of a binomial share."""
    found = lengths(range(1, 101))
    for level in (0.5, 0.9):
        shares = [
            (n, n / 100, 1.959964 * math.sqrt(n / 100 * (1 - n / 100) / 100)) for n in range(100)
        ]
        low = next(n for n, share, error in shares if share + error >= level)
        high = next(n for n, share, error in shares if share - error >= level)
        quantile = found.quantile(level)
        assert (quantile.value, quantile.low, quantile.high) == (100 * level, low, high)
        assert quantile.effective_n == pytest.approx(100.0)
    nothing = lengths([]).quantile(0.5)
    assert math.isnan(nothing.value)
    assert (nothing.low, nothing.high, nothing.effective_n) == (-math.inf, math.inf, 0.0)


def test_of_two_answers_the_mean_has_the_error_of_two_and_of_one_any() -> None:
    pair, one = lengths([2, 4]).mean(), lengths([3]).mean()
    assert (pair.value, pair.high) == pytest.approx(
        (3.0, 3.0 + 1.959964)
    )  # standard deviation root 2, over root 2
    assert one.value == 3.0
    assert not one.known
    empty = lengths([]).mean()
    assert (empty.low, empty.high, empty.effective_n) == (-math.inf, math.inf, 0.0)


@pytest.mark.parametrize(
    ("count", "open_ones", "known"),
    [
        # two in a thousand may be taken to end at the longest, or one and a half requests' worth
        (10_000, 19, True),
        (10_000, 21, False),
        (100, 1, True),
        (100, 2, False),
    ],
)
def test_what_is_left_beyond_the_longest_is_known_or_not(
    count: int, open_ones: int, known: bool
) -> None:
    sample = lengths(
        [5] * (count - open_ones) + [9] * open_ones,
        [False] * (count - open_ones) + [True] * open_ones,
    )
    assert sample.unknown_mass == (0.0 if known else pytest.approx(open_ones / count))
    assert lengths([]).known_to == 0


def test_a_law_under_a_limit_ends_there() -> None:
    sample = lengths([1, 2, 2, 5])
    assert sample.law(2).pmf.tolist() == pytest.approx([0.0, 0.25, 0.75])
    assert sample.law(5).pmf.tolist() == pytest.approx([0.0, 0.25, 0.5, 0.0, 0.0, 0.25])
    assert sample.law(99).longest == 5


def test_weights_of_age_and_the_number_that_they_are_as_good_as() -> None:
    sample = lengths([4, 8, 8], ages=[0.0, 10.0, 20.0], half_life=10.0)
    assert sample.weights.tolist() == [1.0, 0.5, 0.25]
    assert sample.effective_n == pytest.approx(1.75**2 / 1.3125)
    assert sample.mean().value == pytest.approx((4 + 0.75 * 8) / 1.75)


def test_a_group_is_every_so_manieth_and_a_file_keeps_them_apart() -> None:
    sample = lengths([1, 2, 3, 4, 5, 6, 7], [True] + [False] * 6)
    assert sample.without(1, 3).counts.tolist() == [1, 3, 4, 6, 7]
    assert sample.without(0, 3).censored.tolist() == [False] * 4
    read = Lengths.restored(sample.saved())
    assert (sorted(read.counts.tolist()), read.effective_n) == (
        [1, 2, 3, 4, 5, 6, 7],
        pytest.approx(7.0),
    )
    assert read.without(1, 7).effective_n == pytest.approx(6.0)
    plain = lengths(
        [3, 3, 3, 8], [False, False, True, False], ages=[0.0, 1.0, 0.0, 2.0], half_life=1.0
    ).saved()
    assert (plain.counts, plain.censored) == ([3, 3, 8], [0, 1, 0])
    assert (plain.number, plain.weights) == ([2, 1, 1], [1.5, 1.0, 0.25])
    assert lengths([]).saved() == SavedLengths([], [], [], [], 0.0)
    assert Lengths.restored(lengths([]).saved()).counts.size == 0


def test_an_extrapolated_law_says_what_it_rests_on() -> None:
    drawn = LONG.sample(np.random.default_rng(3), 1000)
    sample = lengths(np.minimum(drawn, 40), drawn >= 40)
    found = known_lengths(sample, "lognormal")
    assert found is not None
    assert (found.known_to, found.reach, len(found.parts)) == (40.0, math.inf, 8)
    assert found.to_error == pytest.approx(7 / math.sqrt(8)), "a jackknife of 8 groups"
    assert found.note.startswith(
        f"extrapolated: {np.mean(drawn >= 40):.0%} of the answers were cut at 40 tokens or later; "
        "beyond, "
    )
    fitted = fit_distribution(sample.counts, sample.censored, families=("lognormal",))[0]
    ratio = found.whole.pmf[41:60] / fitted.law(400).pmf[41:60]
    assert ratio == pytest.approx([ratio[0]] * 19), (
        "beyond the limit the law is the family's, scaled"
    )
    odd = lengths([1] * 20 + [2] * 20 + [9] * 20, [False] * 40 + [True] * 20)
    refused = known_lengths(odd, "deterministic")
    assert refused is not None
    assert "expected another family" in refused.note
    assert refused.reach == 9.0
