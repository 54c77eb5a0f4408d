"""Each statistic of an audit of arrivals and its p-value against an independent computation, and
each border of a finding.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kendall.queueing.measurement import arrival_tests
from kendall.queueing.measurement.arrival_audit import (
    Budget,
    above_dead_time,
    audit_arrivals,
    resolution,
    tick,
)
from kendall.queueing.measurement.arrival_words import (
    disease,
    distinct_gaps,
    gaps_repeat,
    in_words,
    pinned_phase,
)

FloatArray = NDArray[np.float64]


def arrivals(n: int, rate: float = 10.0, seed: int = 1) -> FloatArray:
    return 100.0 + np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))


# statistics


@pytest.mark.parametrize("n", [30, 400])
def test_a_constant_rate_is_kolmogorovs_test_of_those_between_the_first_and_the_last(
    n: int,
) -> None:
    instants = arrivals(n) ** 1.02
    inner = (instants[1:-1] - instants[0]) / (instants[-1] - instants[0])
    found, exact = arrival_tests.constant_rate(instants), stats.kstest(inner, "uniform")
    assert found.statistic == pytest.approx(exact.statistic)
    assert found.p_value == pytest.approx(exact.pvalue, rel=0.05)


def test_the_spacings_of_gaps_are_held_against_the_uniform_law() -> None:
    gaps = np.random.default_rng(2).gamma(1.3, 1.0, 200)
    ordered = np.concatenate([[0.0], np.sort(gaps)])
    weighted = np.array([(ordered[i + 1] - ordered[i]) * (200 - i) for i in range(200)])
    shares = np.cumsum(weighted)[:-1] / weighted.sum()
    exact = stats.kstest(shares, "uniform")
    found = arrival_tests.gap_spacings(gaps)
    assert found.statistic == pytest.approx(exact.statistic)
    assert found.p_value == pytest.approx(exact.pvalue, rel=0.05)


@pytest.mark.parametrize("lags", [1, 3])
def test_correlations_are_standardised_by_their_mean_and_error_under_exchangeable_gaps(
    lags: int,
) -> None:
    values = np.random.default_rng(3).exponential(1.0, 300)
    values[1:] += 0.5 * values[:-1]
    ranks = stats.rankdata(values)
    centred = ranks - ranks.mean()
    expected = np.array(
        [(centred[:-k] * centred[k:]).sum() / (centred**2).sum() for k in range(1, lags + 1)]
    )
    z = (expected + 1 / 300) * math.sqrt(300)
    found = arrival_tests.correlation(values, lags)
    assert found.statistic == pytest.approx(expected[np.argmax(np.abs(z))])
    assert found.p_value == pytest.approx(stats.chi2.sf((z**2).sum(), lags))


def test_equal_values_share_a_rank() -> None:
    values = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 5.0, 1.0, 3.0])
    ranks = stats.rankdata(values)
    centred = ranks - ranks.mean()
    expected = [(centred[:-k] * centred[k:]).sum() / (centred**2).sum() for k in (1, 2)]
    assert arrival_tests.rank_correlations(values, 2) == pytest.approx(expected)


@pytest.mark.parametrize(("counts", "tail"), [([1, 9] * 10, "upper"), ([5] * 20, "lower")])
def test_the_dispersion_of_counts_in_equal_windows_has_both_tails_of_a_chi_square(
    counts: list[int], tail: str
) -> None:
    """Twenty windows of a second, five arrivals each on average; the first and the last arrival
    are not counted.
    """
    inner = np.concatenate(
        [window + (np.arange(count) + 0.5) / count for window, count in enumerate(counts)]
    )
    found = arrival_tests.dispersion(np.concatenate([[0.0], inner, [20.0]]), 5)
    square = sum((count - 5) ** 2 for count in counts) / 5
    lower, upper = stats.chi2.cdf(square, 19), stats.chi2.sf(square, 19)
    assert found.statistic == pytest.approx(square / 19)
    assert found.p_value == pytest.approx(min(1.0, 2 * (lower if tail == "lower" else upper)))


def test_windows_of_counts_are_two_at_least_and_hold_the_last_arrival() -> None:
    found = arrival_tests.dispersion(np.array([0.0, 1.0, 9.0, 10.0]), 50)
    assert found.statistic == pytest.approx(0.0)
    assert arrival_tests.dispersion(
        np.array([0.0, 1.0, 2.0, 10.0, 10.0]), 50
    ).statistic == pytest.approx((0.5**2 + 0.5**2) / 1.5)


def test_the_longest_gap_is_held_against_fishers_bound() -> None:
    gaps = np.array([1.0] * 40 + [6.0])
    found = arrival_tests.longest_gap(gaps)
    assert found.statistic == pytest.approx(6 / 46 * 41)
    assert found.p_value == pytest.approx(41 * (40 / 46) ** 40)
    assert arrival_tests.longest_gap(np.ones(10)).p_value == 1.0


def test_the_phase_is_rayleighs_test_over_whole_periods() -> None:
    rng = np.random.default_rng(5)
    instants = np.sort(rng.uniform(0, 20.4, 300) + 0.1 * (rng.random(300) < 0.5))
    found = arrival_tests.phase(instants, 1.0)
    assert found is not None
    since = instants[1:] - instants[0]
    angles = 2 * math.pi * since[since < math.floor(since[-1])]
    n = angles.size
    length = abs(np.exp(1j * angles).mean())
    assert found.statistic == pytest.approx(length)
    exact = math.exp(math.sqrt(1 + 4 * n + 4 * (n**2 - (n * length) ** 2)) - (1 + 2 * n))
    assert found.p_value == pytest.approx(exact)


@pytest.mark.parametrize(
    ("span", "count", "told"),
    [(10.01, 50, True), (9.99, 50, False), (30.0, 21, True), (30.0, 20, False)],
)
def test_a_phase_needs_ten_whole_periods_and_twenty_arrivals(
    span: float, count: int, told: bool
) -> None:
    """Beside the first and the last one."""
    instants = np.concatenate([np.linspace(0.0, 9.5, count), [span + 1e-9]])
    assert (arrival_tests.phase(instants, 1.0) is not None) == told


def test_pairs_of_gaps_are_counted_once_each() -> None:
    gaps = np.array([1.0, 3.0, 3.5, 7.0, 1.2, 3.1])
    for tolerance in (0.0, 0.15, 0.45, 2.0, 100.0):
        expected = sum(abs(gaps[i] - gaps[j]) <= tolerance for i in range(6) for j in range(i))
        assert arrival_tests.pairs_within(gaps, tolerance) == expected


def test_repeated_gaps_are_a_binomial_number_of_those_nearly_alike() -> None:
    """Steps of 0.01 of the mean; equal within 1.5 of them, alike within 7.5."""
    gaps = np.random.default_rng(6).exponential(1.0, 200)
    gaps /= gaps.mean()
    found = arrival_tests.repeated_gaps(gaps, 0.01)
    equal = sum(abs(gaps[i] - gaps[j]) <= 0.015 for i in range(200) for j in range(i))
    alike = sum(abs(gaps[i] - gaps[j]) <= 0.075 for i in range(200) for j in range(i))
    share = (1 - math.exp(-0.015)) / (1 - math.exp(-0.075))
    assert found.statistic == pytest.approx(equal / (alike * share))
    assert found.p_value == pytest.approx(stats.binom.sf(equal - 1, alike, share))
    none = arrival_tests.repeated_gaps(np.array([1.0, 2.0, 4.0]), 1e-3)
    assert (none.statistic, none.p_value) == (0.0, 1.0)


@pytest.mark.parametrize("asked", [8.0, 10.0, 12.0])
def test_a_rate_has_both_tails_of_a_gamma_time(asked: float) -> None:
    found = arrival_tests.rate(100, 10.0, asked)
    later, sooner = (
        stats.gamma.cdf(10.0, 100, scale=1 / asked),
        stats.gamma.sf(10.0, 100, scale=1 / asked),
    )
    assert found.statistic == pytest.approx(10.0 / asked)
    assert found.p_value == pytest.approx(min(1.0, 2 * min(later, sooner)))
    low, high = arrival_tests.rate_interval(100, 10.0, 0.9)
    assert (low, high) == pytest.approx(
        (stats.chi2.ppf(0.05, 200) / 20, stats.chi2.ppf(0.95, 200) / 20)
    )


@pytest.mark.parametrize("runs", [[(50, 5.1)], [(50, 5.01), (80, 7.9)], [(5, 3.0)]])
def test_spans_that_are_too_exact_are_combined_as_fisher_does(
    runs: list[tuple[int, float]],
) -> None:
    logs = []
    for gaps, span in runs:
        off = abs(10 * span - gaps)
        logs.append(
            math.log(
                stats.gamma.cdf(gaps + off, gaps) - stats.gamma.cdf(max(0.0, gaps - off), gaps)
            )
        )
    found = arrival_tests.too_exact(runs, 10.0)
    assert found.statistic == pytest.approx(-2 * sum(logs))
    assert found.p_value == pytest.approx(stats.chi2.sf(-2 * sum(logs), 2 * len(runs)))


def test_the_fitted_exponential_law_has_lilliefors_p_value() -> None:
    for seed in range(5):
        gaps = np.random.default_rng(seed).gamma(1.0 + 0.05 * seed, 1.0, 300)
        found = arrival_tests.gap_law(gaps)
        exact = stats.kstest(gaps, "expon", args=(0, gaps.mean())).statistic
        x = (exact - 0.2 / 300) * (math.sqrt(300) + 0.26 + 0.5 / math.sqrt(300))
        assert found.statistic == pytest.approx(exact)
        assert found.p_value == pytest.approx(min(1.0, 2.85 * math.exp(-3.35 * x * x)))


# the audit's borders


def test_which_tests_are_made_of_how_many_arrivals() -> None:
    def names(n: int, asked: float | None = None) -> list[str]:
        return [test.name for test in audit_arrivals(arrivals(n), asked_rate=asked).tests]

    assert names(50) == [
        "constant rate",
        "dispersion, 5 per window",
        "phase in 0.1 s",
        "longest gap",
        "correlation, lag 1",
        "correlation, lags 1-2",
        "gap law",
        "gap spacings",
        "repeated gaps",
    ]
    assert [name for name in names(199) if name.startswith("dispersion")] == [
        "dispersion, 5 per window"
    ]
    assert [name for name in names(200) if name.startswith("dispersion")] == [
        "dispersion, 5 per window",
        "dispersion, 20 per window",
    ]
    assert "dispersion, 50 per window" not in names(499)
    assert names(500)[1:4] == [f"dispersion, {count} per window" for count in (5, 20, 50)]
    assert [name for name in names(500) if name.startswith("phase")] == [
        "phase in 1 s",
        "phase in 0.1 s",
    ]
    assert "correlation, lags 1-10" in names(500)
    assert "correlation, lags 1-2" in names(60)
    assert "correlation, lags 1-3" in names(61)
    assert names(60, 10.0)[-3:] == ["gap law at the asked rate", "rate", "span too exact"]
    assert audit_arrivals(arrivals(500)).dispersion == next(
        test.statistic
        for test in audit_arrivals(arrivals(500)).tests
        if test.name == "dispersion, 50 per window"
    )


@pytest.mark.parametrize("asked", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_not_tested(asked: float) -> None:
    assert not any(
        "rate" in test.name and test.name != "constant rate"
        for test in audit_arrivals(arrivals(60), asked_rate=asked).tests
    )


def test_the_numbers_of_an_audit_by_hand() -> None:
    instants = arrivals(80)
    shuffled = np.random.default_rng(1).permutation(instants)
    found, gaps = audit_arrivals(shuffled), np.diff(instants)
    assert (found.n, found.span, found.rate) == (
        80,
        pytest.approx(gaps.sum()),
        pytest.approx(79 / gaps.sum()),
    )
    assert (found.rate_low, found.rate_high) == pytest.approx(
        arrival_tests.rate_interval(79, gaps.sum())
    )
    assert found.gap_variation == pytest.approx(gaps.std() / gaps.mean())
    assert (found.process, found.significance, found.lateness, found.valid) == (
        "poisson",
        0.01,
        None,
        None,
    )
    with pytest.raises(ValueError, match="got 2 instants that are not finite"):
        audit_arrivals(np.array([1.0, math.inf, math.nan]))


def test_how_late_a_run_may_be_unless_it_is_said() -> None:
    assert (Budget().p99, Budget().mean) == (0.005, 0.001)
    late = np.linspace(0.0, 0.002, 101)
    found = audit_arrivals(arrivals(101) + late, intended=arrivals(101)).lateness
    assert found is not None
    assert (found.mean, found.p50, found.p99, found.max) == pytest.approx(
        (0.001, 0.001, 0.00198, 0.002)
    )


def test_instants_nearer_than_a_clock_can_tell_are_one() -> None:
    instants = np.concatenate([arrivals(60), arrivals(60)[:5] + 0.9e-9])
    (said, *_) = audit_arrivals(instants).reasons
    assert "come at the very instant of the one before" in said


@pytest.mark.parametrize("step", [1.0, 0.1, 1e-3, 1e-6, 2.0**-5, 2.0**-20])
def test_a_step_is_found_decimal_or_binary(step: float) -> None:
    instants = np.sort(np.random.default_rng(1).integers(0, 10**6, 300)) * step
    assert resolution(instants) == pytest.approx(step)


def test_a_clock_without_a_step_resolves_what_its_floats_do() -> None:
    assert resolution(arrivals(300) * 1e7) == np.spacing(np.abs(arrivals(300) * 1e7).max())
    assert resolution(arrivals(300)) == pytest.approx(1e-9)


def test_a_gap_below_a_nanosecond_is_none() -> None:
    assert [audit_arrivals(np.array([0.0, gap])).span for gap in (1e-9, 0.999e-9)] == [1e-9, 0.0]


@pytest.mark.parametrize(
    ("steps", "told"), [(2, False), (4, True), (10, True), (40, True), (64, True), (65, False)]
)
def test_a_tick_is_four_to_sixty_four_steps(steps: int, told: bool) -> None:
    """Gaps of whole ticks; within a step."""
    gaps = steps * np.random.default_rng(2).geometric(0.01, 3000).astype(float)
    assert tick(gaps, 1.0) == (pytest.approx(steps, abs=1.0) if told else 1.0)
    assert tick(gaps * 1e-9, 1e-9) == pytest.approx((steps if told else 1) * 1e-9, abs=1.0001e-9)


def test_gaps_without_a_valley_have_the_clocks_step() -> None:
    gaps = np.random.default_rng(2).geometric(0.01, 3000).astype(float)
    assert tick(gaps, 1.0) == 1.0
    assert tick(np.array([10.0, 20.0, 30.0, 40.0]), 1.0) == 1.0, "none are equal"
    assert tick(np.array([10.0] * 3 + [20.0, 40.0]), 1.0) == 1.0, "three pairs are equal"
    assert tick(np.array([10.0] * 3 + [20.0] * 2), 1.0) == pytest.approx(10.0, abs=1.0), "four are"


@pytest.mark.parametrize(("equal_gaps", "told"), [(5, True), (6, False)])
def test_gaps_a_tick_apart_are_half_as_many_as_those_that_are_equal(
    equal_gaps: int, told: bool
) -> None:
    """Five equal gaps are ten pairs, and five of them are a tick from the sixth gap; six are
    fifteen, and six a tick from the seventh.
    """
    found = tick(np.array([10.0] * equal_gaps + [20.0]), 1.0)
    assert found == (pytest.approx(10.0, abs=1.0) if told else 1.0)


def test_a_tick_that_is_rounded_to_several_steps_is_the_middle_one() -> None:
    """Eight pairs of gaps each are 9, 10, 11 and 12 steps apart; three pairs are between, a tenth
    of the 31 that are equal.
    """
    assert tick(np.array([10.0] * 8 + [19.0, 20.0, 21.0, 22.0]), 1.0) == 10.0


def test_what_a_write_takes_is_taken_off_eight_times_where_it_is_long_for_chance() -> None:
    rng = np.random.default_rng(3)
    gaps = 1e-5 + rng.exponential(1e-3, 2000)
    least = gaps.min()
    above = above_dead_time(gaps)
    assert sorted(above) == pytest.approx(
        sorted(gap - 8 * least for gap in gaps if gap > 8 * least)
    )
    assert above_dead_time(rng.exponential(1e-3, 2000)).size == 2000, (
        "the least of so many is shorter by chance"
    )
    slept = 6e-5 + rng.exponential(1e-3, 2000)
    assert above_dead_time(slept) is slept, "more than a sleep adds"


@pytest.mark.parametrize(("longer", "taken_off"), [(49, False), (50, True)])
def test_what_a_write_takes_is_taken_off_where_fifty_gaps_are_longer(
    longer: int, taken_off: bool
) -> None:
    gaps = np.repeat([1e-5, 1e-2], [2000 - longer, longer])
    expected = np.full(longer, 1e-2 - 8e-5) if taken_off else gaps
    assert above_dead_time(gaps).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("least", "taken_off"), [(4.99e-6, False), (5.01e-6, True)])
def test_a_least_gap_is_long_for_chance_from_ten_mean_gaps_over_their_number_on(
    least: float, taken_off: bool
) -> None:
    """Two thousand gaps with a mean of a millisecond."""
    gaps = np.full(2000, 1e-3)
    gaps[:2] = least, 2e-3 - least
    assert (above_dead_time(gaps).size < gaps.size) == taken_off


# words


WORDS = {
    "phase in 1 s": (0.1234, "arrivals lean 0.123 towards one phase (0: none, 1: all at it)"),
    "constant rate": (0.1234, "the share of arrivals is at most 0.123 away from the share of time"),
    "gap law": (
        0.1234,
        "the gaps' law is at most 0.123 away from the exponential law of their own mean",
    ),
    "gap law at the asked rate": (
        0.1234,
        "the gaps' law is at most 0.123 away from the exponential law of the asked rate",
    ),
    "repeated gaps": (3.456, "3.46 times as many equal gaps as chance gives"),
    "correlation, lags 1-3": (
        -0.1234,
        "ranks of successive gaps correlate by -0.123 (standard error 0.100)",
    ),
    "dispersion, 5 per window": (1.234, "variance of counts is 1.23 times their mean (Poisson: 1)"),
    "longest gap": (9.87, "the longest gap is 9.9 mean gaps (expected about 5.2)"),
    "rate": (1.2345, "delivered over asked rate is 1.234"),
    "span too exact": (
        7.77,
        "the run is as long as n / rate more closely than chance (statistic 7.8)",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_statistic_in_words(name: str) -> None:
    statistic, words = WORDS[name]
    assert in_words(name, statistic, np.ones(100)) == words


EXPONENTIAL = np.random.default_rng(4).exponential(1.0, 400)


def said(
    gaps: FloatArray, failed: dict[str, float], asked: float | None = None, step: float = 1e-9
) -> tuple[str, ...]:
    return disease(np.concatenate([[0.0], np.cumsum(gaps)]), gaps, failed, asked, step)


def test_what_failed_without_a_known_sign_is_told_by_its_statistic() -> None:
    assert said(EXPONENTIAL, {}) == ()
    assert said(EXPONENTIAL, {"phase in 1 s": 0.2}) == (
        "arrivals lean 0.200 towards one phase (0: none, 1: all at it)",
    )


@pytest.mark.parametrize(("simultaneous", "told"), [(4, False), (5, True)])
def test_more_than_a_hundredth_at_one_instant_are_told(simultaneous: int, told: bool) -> None:
    gaps = EXPONENTIAL.copy()
    gaps[:simultaneous] = 0.0
    found = said(gaps, {"gap law": 0.1})
    assert found[0].startswith("1% come at the very instant of the one before") == told
    coarse = said(gaps, {"gap law": 0.1}, step=0.1 * gaps.mean())
    assert "very instant" not in coarse[0], "a clock of a tenth of a gap makes a twentieth"


@pytest.mark.parametrize(("spread", "told"), [(0.19, True), (0.21, False)])
def test_gaps_are_nearly_constant_below_a_fifth(spread: float, told: bool) -> None:
    gaps = 1.0 + spread * np.where(np.arange(400) % 2, 1.0, -1.0)
    found = said(gaps, {"gap law": 0.3, "correlation, lag 1": -0.9})
    assert (
        found[0].startswith(
            f"gaps are nearly constant (standard deviation {spread:.2g} of their mean)"
        )
        == told
    )


@pytest.mark.parametrize(("alike", "told"), [(0.29, False), (0.31, True)])
def test_gaps_like_the_one_before_are_told_from_three_tenths_on(alike: float, told: bool) -> None:
    gaps = np.where(np.arange(2001) % 2, 1.0, 3.0)
    number = round(alike * 2000)
    gaps[: number + 1] = 3.0
    found = said(gaps, {"correlation, lag 1": 0.5})
    assert (
        found[0].startswith(
            f"{alike:.0%} of gaps are like the one before them, as of senders that share one seed"
        )
        == told
    )


def test_repeated_gaps_are_a_quarter_of_the_gaps_beyond_those_nearly_alike() -> None:
    """A thousand gaps, so many of them twice; the others are twenty steps apart."""
    for doubled, repeated in ((240, False), (260, True)):
        apart = 20e-6 * np.arange(1, 1001 - doubled)
        gaps = np.concatenate([apart, apart[:doubled]])
        assert gaps_repeat(gaps, 1e-6) == (doubled > 0.25 * gaps.size) == repeated
    near = np.concatenate(
        [20e-6 * np.arange(1, 501), 20e-6 * np.arange(1, 501) + 5e-6]
    )  # alike, not equal
    assert not gaps_repeat(near, 1e-6)
    assert distinct_gaps(np.array([1.0, 1.0, 2.0, 2.05, 5.0]), 0.1) == 3
    assert distinct_gaps(np.array([1.0, 1.0, 2.0, 2.05, 5.0]), 0.01) == 4
    assert distinct_gaps(np.array([1.0, 2.0, 4.0]), 1.0) == 2, "a step apart are the same"


@pytest.mark.parametrize(
    ("steps", "pairs", "repeated"),
    [
        # n = 900 gaps and these: 300 less a quarter of those alike is compared with n / 4
        (2, 149, True),
        (2, 150, False),
        (7, 149, True),
        (7, 150, False),
        (8, 298, True),  # not alike: 300 with n = 1198
        (8, 300, False),
        (1, 150, True),  # equal
    ],
)
def test_pairs_that_are_nearly_alike_take_a_quarter_from_those_that_are_equal(
    steps: int, pairs: int, repeated: bool
) -> None:
    apart = 20e-6 * np.arange(1, 601)
    gaps = np.concatenate([apart, apart[:300], apart[300 : 300 + pairs] + steps * 1e-6])
    assert gaps_repeat(gaps, 1e-6) == repeated


def test_the_phase_that_most_arrivals_share_is_told_with_its_width() -> None:
    """An eighth around the whole second, and less within 10 ms of 0.3: two hundredths of the
    period are one phase.
    """
    spread = (np.arange(800) + 0.5) / 800
    around = np.concatenate([np.full(75, 0.3), np.full(65, 0.995), np.full(60, 0.004)])
    seconds = np.sort(np.arange(1000) * 1.0 + np.concatenate([spread, around]))
    share, words = pinned_phase(seconds, {"phase in 1 s": 0.1})
    assert share == pytest.approx(0.125 + 0.8 * 0.02, abs=0.002)
    assert (
        words == f"{share:.0%} of arrivals are within 10 ms of one phase: pinned to whole seconds"
    )
    assert pinned_phase(seconds, {"gap law": 0.1}) == (0.0, "")
    tenths = pinned_phase(seconds / 10, {"phase in 0.1 s": 0.1})
    assert tenths[0] == pytest.approx(share, abs=1e-6)
    assert tenths[1].endswith("are within 1 ms of one phase: pinned to tenths of a second")


@pytest.mark.parametrize(
    ("value", "words"), [(1.6, "arrivals come in bursts: "), (0.6, "arrivals are too regular: ")]
)
def test_the_most_telling_dispersion_is_told(value: float, words: str) -> None:
    failed = {
        "dispersion, 5 per window": 1.1,
        "dispersion, 20 per window": value,
        "constant rate": 0.1,
    }
    found = said(EXPONENTIAL, failed)
    assert found == (f"{words}variance over mean of counts is {value:.2f} (20 per window)",)


def test_a_rate_that_is_not_constant_is_told_by_its_halves() -> None:
    gaps = np.concatenate([EXPONENTIAL, 3 * EXPONENTIAL])
    ordered = np.concatenate([[0.0], np.cumsum(gaps)])
    first = np.mean(ordered <= ordered[-1] / 2)
    assert said(gaps, {"constant rate": 0.3}) == (
        f"the rate is not constant: {first:.0%} of arrivals lie in the first half of the time",
    )


def test_a_rate_beside_the_asked_one_and_a_span_that_is_too_exact_are_told() -> None:
    found = said(EXPONENTIAL, {"rate": 0.8, "span too exact": 9.0}, asked=1.25)
    assert found == (
        f"delivered {1 / EXPONENTIAL.mean():.4g} of 1.25 per second asked",
        "the run ends at n / rate more exactly than chance does: a rescaled schedule",
    )
    assert said(EXPONENTIAL, {"rate": 0.8}) == ("delivered over asked rate is 0.800",)


def test_correlated_gaps_are_told_by_the_strongest() -> None:
    rng = np.random.default_rng(5)
    gaps = rng.exponential(1.0, 400)
    found = said(
        gaps, {"correlation, lag 1": 0.2, "correlation, lags 1-10": -0.34, "gap law": 0.12}
    )
    assert found == (
        "gaps are correlated (rank correlation -0.34)",
        (
            "gaps are not exponential: the gaps' law is at most 0.120 away from the exponential "
            "law of their own mean"
        ),
    )


@pytest.mark.parametrize(("least", "told"), [(0.13, True), (0.12, False)])
def test_something_adds_to_every_gap_where_the_least_is_fifty_times_what_chance_makes_it(
    least: float, told: bool
) -> None:
    """Four hundred gaps: an eighth of the mean."""
    gaps = EXPONENTIAL / EXPONENTIAL.mean() + 1.0
    gaps[0] = least * gaps.mean()
    found = said(gaps, {"gap law": 0.3})
    assert (
        any(
            each.startswith("no gap is shorter than ") and "something adds to every gap" in each
            for each in found
        )
        == told
    )


def test_a_pause_is_told_by_its_length_and_a_schedule_that_was_lost_by_the_rate() -> None:
    rng = np.random.default_rng(6)
    gaps = rng.exponential(0.01, 1000)
    gaps[500] = 2.0
    rate = 1 / 0.01
    paused = said(gaps, {"longest gap": 170.0}, asked=rate)
    assert paused == ("pauses of up to 2 s (200 mean gaps): the sender or the network stalled",)
    lost = said(gaps, {"longest gap": 170.0, "rate": 0.8}, asked=rate)
    assert lost[0].startswith("pauses of up to 2 s (200 mean gaps), delivered ")
    assert lost[0].endswith(" of 100 per second asked: the sender fell behind and never caught up")
    unasked = said(gaps, {"longest gap": 170.0})
    assert unasked[0].startswith(
        f"pauses of up to 2 s ({2 / (np.median(gaps) / math.log(2)):.0f} mean gaps)"
    )
    uneven = np.concatenate([rng.gamma(0.3, 0.03, 999), [2.0]])
    assert not any(
        "pauses" in each for each in said(uneven, {"longest gap": 170.0}, asked=1 / uneven.mean())
    )
    assert not any("pauses" in each for each in said(gaps, {"rate": 0.8}, asked=rate))
