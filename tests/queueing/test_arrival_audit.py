"""The audit of arrivals: a true Poisson stream passes as often as stated, and each known disease
is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kendall.policies.text import counted
from kendall.queueing.measurement import arrival_tests
from kendall.queueing.measurement.arrival_audit import (
    Budget,
    above_dead_time,
    audit_arrivals,
    holm_tests,
    resolution,
)
from kendall.queueing.measurement.arrival_tests import Finding
from kendall.queueing.measurement.arrival_words import disease

FloatArray = NDArray[np.float64]
Stamps = Callable[[FloatArray], FloatArray]


def poisson(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return 1234.5 + np.cumsum(rng.exponential(1 / rate, n))


def lock_step(rng: np.random.Generator, rate: float, n: int, workers: int = 10) -> FloatArray:
    """Every worker draws the same gaps from one seed; a shared offset adds them all."""
    return np.cumsum(np.repeat(rng.exponential(1 / rate, -(-n // workers)), workers)[:n])


def seen_late(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    """The same as a server sees it, each a millisecond late on average."""
    return lock_step(rng, rate, n) + rng.exponential(1e-3, n)


def rescaled(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    instants = np.cumsum(rng.exponential(1 / rate, n))
    return instants * (n / rate / instants[-1])


def pinned(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    """A Poisson count per second, its gaps stretched so that the last arrival falls on the whole
    second.
    """
    instants: list[float] = []
    second = 0
    while len(instants) < n:
        if count := rng.poisson(rate):
            gaps = np.cumsum(rng.exponential(1.0, count))
            instants += (second + gaps / gaps[-1]).tolist()
        second += 1
    return np.array(instants[:n])


def pinned_to_tenths(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return pinned(rng, rate / 10, n) / 10


def re_anchored(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    """Now and then the sender stands still, and the whole rest of the schedule moves back with
    it.
    """
    lost = np.zeros(n)
    lost[rng.choice(n, 5, replace=False)] = rng.uniform(0.8, 1.6, 5)
    return np.cumsum(rng.exponential(1 / rate, n)) + np.cumsum(lost)


def drifting(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    """Each sleep begins when the request before it is on its way."""
    return np.cumsum(rng.exponential(1 / rate, n) + 0.08 / rate)


def bursty(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return np.cumsum(rng.gamma(0.5, 2 / rate, n))


def regular(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return np.cumsum(rng.gamma(4.0, 0.25 / rate, n))


def constant(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return np.arange(n) / rate + rng.uniform(0, 0.01 / rate, n)


def ramp(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return np.sqrt(np.cumsum(rng.exponential(1.0, n)) * n) / rate


def in_pairs(rng: np.random.Generator, rate: float, n: int) -> FloatArray:
    return np.repeat(np.cumsum(rng.exponential(2 / rate, n // 2)), 2)


DISEASES = [
    (lock_step, 30.0, 1500, "the same gaps occur again: 150 distinct of 1499"),
    (
        seen_late,
        30.0,
        1500,
        "of gaps are like the one before them, as of senders that share one seed",
    ),
    (pinned, 1.0, 1000, "pinned to whole seconds"),
    (pinned, 2.0, 1000, "pinned to whole seconds"),
    (pinned, 5.0, 1000, "pinned to whole seconds"),
    (
        pinned_to_tenths,
        20.0,
        1000,
        "of arrivals are within 1 ms of one phase: pinned to tenths of a second",
    ),
    (
        pinned_to_tenths,
        50.0,
        1000,
        "of arrivals are within 1 ms of one phase: pinned to tenths of a second",
    ),
    (re_anchored, 30.0, 1000, "the sender fell behind and never caught up"),
    (drifting, 200.0, 1500, "something adds to every gap, as successive sleeps do"),
    (bursty, 10.0, 1000, "arrivals come in bursts"),
    (regular, 10.0, 1000, "arrivals are too regular"),
    (constant, 10.0, 1000, "gaps are nearly constant"),
    (ramp, 10.0, 1000, "arrivals come in bursts"),
    (in_pairs, 10.0, 1000, "50% come at the very instant of the one before"),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("disease", "rate", "n", "words"), DISEASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_disease_is_named_in_the_verdict(disease, rate, n, words):
    verdicts = [
        audit_arrivals(disease(np.random.default_rng(seed), rate, n), asked_rate=rate).verdict
        for seed in range(20)
    ]
    named = [
        verdict for verdict in verdicts if verdict.startswith("not poisson: ") and words in verdict
    ]
    assert len(named) >= 19, [verdict for verdict in verdicts if verdict not in named]


NAMES = ("constant rate", "gap law", "longest gap", "rate")


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        # of four tests the smallest is held against 1/4 of 1 %, the next against 1/3, then 1/2,
        # then all of it
        ((0.0024, 0.5, 0.5, 0.5), 1),
        ((0.0026, 0.5, 0.5, 0.5), 0),
        ((0.0024, 0.0033, 0.5, 0.5), 2),
        ((0.0024, 0.0034, 0.5, 0.5), 1),
        ((0.0024, 0.0033, 0.0049, 0.5), 3),
        ((0.0024, 0.0033, 0.0051, 0.5), 2),
        ((0.0024, 0.0033, 0.0049, 0.0099), 4),
        ((0.0024, 0.0033, 0.0049, 0.0101), 3),
        ((0.0026, 0.0027, 0.0028, 0.0029), 0),  # the first that passes lets all behind it pass
        ((0.0024, 0.0034, 0.0035, 0.0036), 1),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_several_tests_are_held_against_holms_levels_in_any_order(
    p_values: tuple[float, ...], rejected: int, order: tuple[int, ...]
) -> None:
    judged = holm_tests([(NAMES[i], Finding(1.0, p_values[i])) for i in order], 0.01, np.ones(10))
    assert [test.name for test in judged] == [NAMES[i] for i in order]
    assert {test.name for test in judged if not test.holds} == set(NAMES[:rejected])


@pytest.mark.slow
def test_a_true_poisson_stream_fails_in_at_most_the_stated_share():
    failed = sum(
        not audit_arrivals(poisson(np.random.default_rng(seed), 30, 500), asked_rate=30).good
        for seed in range(1000)
    )
    assert failed <= 19, (
        failed
    )  # significance 0.01: 20 or more of 1000 would have probability 0.003


def test_each_p_value_is_uniform_over_poisson_streams():
    """Holm's rule needs every test's own share of false alarms to be right."""
    found: dict[str, list[float]] = {}
    for seed in range(1000):
        for test in audit_arrivals(
            poisson(np.random.default_rng(10_000 + seed), 3, 300), asked_rate=3
        ).tests:
            found.setdefault(test.name, []).append(test.p_value)
    assert len(found) == 14
    for name, values in found.items():
        for level in (0.1, 0.05, 0.01):
            share = float(np.mean(np.array(values) <= level))
            assert share <= level + 4 * math.sqrt(level / 1000), (name, level, share)
            if name != "repeated gaps":  # of a count that is nearly always 0
                assert share >= level / 2 - 4 * math.sqrt(level / 2000), (name, level, share)


def test_a_schedule_rescaled_to_end_on_time_is_not_told_by_one_run_but_by_several():
    """Given its number and span it is a Poisson stream: only the span, too near to n / rate,
    tells.
    """
    single, runs = [], []
    for seed in range(40):
        instants = rescaled(np.random.default_rng(seed), 30, 1000)
        single.append(audit_arrivals(instants, asked_rate=30).verdict)
        runs.append((999, float(instants[-1] - instants[0])))
    assert single.count("poisson") >= 38
    together = [
        arrival_tests.too_exact(runs[index : index + 5], 30).p_value for index in range(0, 40, 5)
    ]
    assert max(together) < 0.001
    honest = [
        (999, float(np.ptp(poisson(np.random.default_rng(seed), 30, 1000)))) for seed in range(5)
    ]
    assert arrival_tests.too_exact(honest, 30).p_value > 0.01


@pytest.mark.parametrize("n", [50, 300, 2000])
def test_kolmogorov_p_values_are_the_exact_ones(n):
    gaps = np.random.default_rng(n).exponential(2.0, n)
    for mean in (2.0, 2.3):
        ours, exact = arrival_tests.gap_law(gaps, mean), stats.kstest(gaps, "expon", args=(0, mean))
        assert ours.statistic == pytest.approx(exact.statistic, abs=1e-12)
        assert ours.p_value == pytest.approx(exact.pvalue, rel=0.05, abs=1e-4)


def test_the_fitted_mean_makes_the_distance_smaller_and_the_p_value_knows_it():
    """Stephens (1974), table for the exponential law with unknown mean: 0.990 at 10 %, 1.094 at
    5 %, 1.308 at 1 %.
    """
    m = 400
    for x, level in ((0.990, 0.10), (1.094, 0.05), (1.308, 0.01)):
        distance = x / (math.sqrt(m) + 0.26 + 0.5 / math.sqrt(m)) + 0.2 / m
        gaps = _gaps_at_distance(m, distance)
        found = arrival_tests.gap_law(gaps)
        assert found.statistic == pytest.approx(distance, rel=1e-6)
        assert found.p_value == pytest.approx(level, rel=0.15)


def _gaps_at_distance(m: int, distance: float) -> FloatArray:
    """Gaps whose largest distance from their own exponential law is given: a share set to 0 and
    the rest left alone.
    """
    ideal = -np.log1p(-(np.arange(m) + 0.5) / m)

    def largest(share: float) -> tuple[float, FloatArray]:
        gaps = ideal + share * np.sin(2 * np.pi * np.arange(m) / m) * ideal
        return arrival_tests.gap_law(gaps).statistic, gaps

    low, high = 0.0, 0.9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if largest(middle)[0] < distance else (low, middle)
    return largest(high)[1]


def test_rank_correlation_is_spearmans_and_heavy_tails_do_it_no_harm():
    values = np.random.default_rng(3).pareto(0.7, 4000)
    found = arrival_tests.rank_correlations(values, 3)
    for lag in (1, 2, 3):
        assert found[lag - 1] == pytest.approx(
            stats.spearmanr(values[:-lag], values[lag:])[0], abs=2e-3
        )
    assert arrival_tests.correlation(values, 10).p_value > 0.01
    assert arrival_tests.correlation(np.repeat(values, 2)).p_value < 1e-9
    assert arrival_tests.rank_correlations(np.ones(100), 2).tolist() == [0, 0]


def test_equal_gaps_are_a_binomial_share_of_those_nearly_equal():
    """1,000 gaps and steps of 0.1 % of their mean: the p-value is right in its tail, and the
    ratio is 1 on average.
    """
    found = [
        arrival_tests.repeated_gaps(np.random.default_rng(seed).exponential(1.0, 1000), 0.001)
        for seed in range(2000)
    ]
    assert np.mean([finding.statistic for finding in found]) == pytest.approx(1, abs=0.01)
    for level in (0.1, 0.01):
        assert np.mean([finding.p_value <= level for finding in found]) == pytest.approx(
            level, abs=4 * math.sqrt(level / 2000)
        )


def test_gaps_that_cluster_are_no_repeated_gaps():
    """As of requests sent one after the other: 10 microseconds apart, give or take 2, a hundred
    times as dense as elsewhere.
    """
    found = [
        arrival_tests.repeated_gaps(1e-5 + 2e-6 * np.random.default_rng(seed).random(2000), 1e-9)
        for seed in range(200)
    ]
    assert np.mean([finding.statistic for finding in found]) == pytest.approx(1, abs=0.01)
    assert np.mean([finding.p_value <= 0.01 for finding in found]) <= 0.04
    assert (
        arrival_tests.repeated_gaps(
            np.repeat(1e-5 + 2e-6 * np.random.default_rng(0).random(1000), 2), 1e-9
        ).p_value
        < 1e-9
    )


def test_durbins_transform_makes_an_exponential_sample_uniform():
    """Ordered gaps 1, 2, 4: differences 1, 1, 2, each times the gaps that reach it: 3, 2, 2;
    shares 3/7 and 5/7.
    """
    assert arrival_tests.gap_spacings(np.array([4.0, 1.0, 2.0])).statistic == pytest.approx(3 / 7)


def test_the_rate_interval_is_exact():
    """Garwood's limits from the chi-square law, here for the time to the n-th arrival."""
    low, high = arrival_tests.rate_interval(100, 50.0)
    assert low == pytest.approx(stats.chi2.ppf(0.025, 200) / 100)
    assert high == pytest.approx(stats.chi2.ppf(0.975, 200) / 100)
    audit = audit_arrivals(poisson(np.random.default_rng(0), 20, 1000), asked_rate=20)
    assert audit.rate_low < audit.rate < audit.rate_high
    assert audit.rate == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("asked", [24.0, 16.5])
def test_another_rate_than_asked_is_said_whichever_is_higher(asked: float) -> None:
    audit = audit_arrivals(poisson(np.random.default_rng(0), 20, 1000), asked_rate=asked)
    assert f"of {asked:g} per second asked" in audit.verdict
    assert {test.name for test in audit.tests if not test.holds} == {
        "rate",
        "gap law at the asked rate",
    }
    assert next(test.statistic for test in audit.tests if test.name == "rate") == pytest.approx(
        audit.rate / asked
    )
    assert (audit.rate > asked) == (asked < 20)
    assert audit_arrivals(poisson(np.random.default_rng(0), 20, 1000)).verdict == "poisson"


def test_requests_sent_at_once_after_a_stall_are_not_mistaken_for_one_seed():
    """Ten microseconds apart and stamped in nanoseconds, some of their gaps are equal."""
    rng = np.random.default_rng(4)
    sent = poisson(rng, 1000, 2000)
    stalled = slice(500, 1100)
    sent[stalled] = sent[1100] - 1e-5 * np.arange(600)[::-1] + rng.normal(0, 2e-7, 600)
    audit = audit_arrivals(np.round(sent, 9), asked_rate=1000)
    assert next(test.holds for test in audit.tests if test.name == "repeated gaps")
    assert audit.verdict.startswith("not poisson: ")
    assert "seed" not in " ".join(audit.reasons)


def test_a_stall_that_is_made_up_is_a_pause_not_a_lost_schedule():
    rng = np.random.default_rng(0)
    intended = poisson(rng, 100, 2000)
    late = (intended > intended[800]) & (intended < intended[800] + 0.5)
    sent = np.where(late, intended[800] + 0.5, intended) + rng.exponential(1e-3, 2000)
    verdict = audit_arrivals(np.sort(sent), asked_rate=100).verdict
    assert verdict.startswith("not poisson: pauses of up to 0.")
    assert "lost" not in verdict


@pytest.mark.parametrize("instants", [[], [3.0], list(range(49))])
def test_too_few_arrivals_are_not_judged(instants):
    audit = audit_arrivals(np.array(instants, dtype=np.float64))
    assert (
        audit.verdict
        == f"too few to say: {counted(len(instants), 'arrival')}; expected at least 50"
    )
    assert (audit.poisson, audit.tests, audit.good) == (None, (), True)


def test_all_at_one_instant_is_not_poisson():
    for n in (50, 100):
        audit = audit_arrivals(np.full(n, 7.0))
        assert audit.verdict == "not poisson: all arrive at one instant"
        assert audit.poisson is False
        assert math.isnan(audit.rate)
    assert audit_arrivals(np.full(49, 7.0)).verdict.startswith("too few to say: 49 arrivals")


def test_lateness_is_held_against_a_budget_and_does_not_change_the_verdict():
    rng = np.random.default_rng(2)
    intended = poisson(rng, 50, 1000)
    prompt = audit_arrivals(intended + 0.0005, intended=intended, asked_rate=50)
    late = audit_arrivals(intended + rng.exponential(0.003, 1000), intended=intended, asked_rate=50)
    assert (prompt.verdict, prompt.valid, prompt.good) == ("poisson", True, True)
    assert (late.verdict, late.valid, late.good) == ("poisson", False, False)
    assert late.lateness is not None
    assert late.lateness.mean == pytest.approx(0.003, rel=0.1)
    assert late.lateness.p99 == pytest.approx(0.003 * math.log(100), rel=0.2)
    assert (
        audit_arrivals(
            intended + 0.003, intended=intended, budget=Budget(p99=0.004, mean=0.004)
        ).valid
        is True
    )
    with pytest.raises(ValueError, match="expected one for each"):
        audit_arrivals(intended, intended=intended[1:])


@pytest.mark.parametrize(
    ("late", "budget", "within"),
    [
        (0.00299, Budget(mean=0.003, p99=0.01), True),
        (0.00301, Budget(mean=0.003, p99=0.01), False),
        (0.00299, Budget(mean=0.01, p99=0.003), True),
        (0.00301, Budget(mean=0.01, p99=0.003), False),
        (0.00099, None, True),
        (0.00101, None, False),
        # as early as that in the mean
        (-0.00299, Budget(mean=0.003, p99=0.01), True),
        (-0.00301, Budget(mean=0.003, p99=0.01), False),
    ],
)
def test_a_sender_may_be_as_late_as_its_budget_says(
    late: float, budget: Budget | None, within: bool
) -> None:
    """Everything equally late, or early; by default a millisecond in the mean."""
    intended = poisson(np.random.default_rng(2), 50, 1000)
    audit = audit_arrivals(intended + late, intended=intended, asked_rate=50, budget=budget)
    assert audit.lateness is not None
    assert (audit.lateness.mean, audit.lateness.p99, audit.lateness.max) == pytest.approx(
        (late, late, late)
    )
    assert (audit.valid, audit.good) == (within, within)


@pytest.mark.parametrize(("late", "within"), [(0.0049, True), (0.0051, False)])
def test_by_default_one_in_a_hundred_may_be_five_milliseconds_late(
    late: float, within: bool
) -> None:
    intended = poisson(np.random.default_rng(2), 50, 1000)
    sent = intended + np.where(np.arange(1000) % 50 == 0, late, 0.0)
    assert audit_arrivals(sent, intended=intended).valid is within


@pytest.mark.parametrize(
    ("asked", "held"), [(0.3, True), (1.0, True), (0.0, False), (-1.0, False), (math.inf, False)]
)
def test_a_rate_of_any_size_is_held_against_the_arrivals(asked: float, held: bool) -> None:
    """A rate of 0, below 0 or infinite is reported, but not tested."""
    audit = audit_arrivals(poisson(np.random.default_rng(3), 0.5, 200), asked_rate=asked)
    names = {test.name for test in audit.tests} & {"rate", "span too exact"}
    assert names == ({"rate", "span too exact"} if held else set())
    assert audit.asked_rate == asked


@pytest.mark.parametrize(("n", "lags"), [(60, 2), (61, 3), (200, 9), (201, 10), (400, 10)])
def test_gaps_are_correlated_over_up_to_ten_lags_a_twentieth_of_them_at_most(
    n: int, lags: int
) -> None:
    names = {test.name for test in audit_arrivals(poisson(np.random.default_rng(3), 10, n)).tests}
    assert {"correlation, lag 1", f"correlation, lags 1-{lags}"} == {
        name for name in names if name.startswith("correlation")
    }


@pytest.mark.parametrize(("n", "poisson_or_not"), [(49, None), (50, True)])
def test_fifty_arrivals_are_judged_and_fewer_are_not(n: int, poisson_or_not: bool | None) -> None:
    audit = audit_arrivals(poisson(np.random.default_rng(3), 10, n))
    assert audit.poisson is poisson_or_not
    assert bool(audit.tests) == (poisson_or_not is True)
    assert audit.rate == pytest.approx((n - 1) / audit.span)
    assert audit.rate_low < audit.rate < audit.rate_high


@pytest.mark.parametrize("instants", [[], [7.0], [7.0] * 60])
def test_arrivals_without_a_gap_span_nothing_and_are_not_poisson(instants: list[float]) -> None:
    audit = audit_arrivals(np.array(instants))
    assert (audit.n, audit.span) == (len(instants), 0.0)
    assert not audit.poisson


def test_what_was_not_asked_to_be_poisson_is_compared_with_its_timetable():
    intended = bursty(np.random.default_rng(1), 20, 1000)
    kept = audit_arrivals(intended + 0.0004, intended=intended, process="gamma")
    broken = audit_arrivals(intended + 0.1, intended=intended, process="gamma")
    early = audit_arrivals(intended - 0.1, intended=intended, process="gamma")
    alone = audit_arrivals(intended, process="gamma")
    assert kept.verdict == (
        "timetable kept (mean 0.4 ms, p99 0.4 ms late); not tested: the distribution of the "
        "gaps (asked: gamma)"
    )
    digits = audit_arrivals(intended + 0.00043219, intended=intended, process="gamma")
    assert digits.verdict.startswith("timetable kept (mean 0.432 ms, p99 0.432 ms late)")
    assert broken.verdict.startswith("timetable not kept (mean 100 ms")
    assert early.verdict.startswith("timetable not kept (mean -100 ms")
    assert (
        alone.verdict
        == "not judged: gamma was requested, and there is no timetable to compare with"
    )
    assert [audit.poisson for audit in (kept, broken, early, alone)] == [None] * 4
    assert [audit.good for audit in (kept, broken, early, alone)] == [True, False, False, True]


def test_a_coarse_clock_is_not_mistaken_for_repeated_gaps():
    """Instants written in milliseconds make equal gaps; the tests that need finer ones are left
    out.
    """
    instants = np.round(poisson(np.random.default_rng(0), 50, 2000), 3)
    assert resolution(instants) == 1e-3
    audit = audit_arrivals(instants, asked_rate=50)
    assert audit.verdict == "poisson"
    assert not any("gap law" in test.name or "repeated" in test.name for test in audit.tests)
    assert resolution(poisson(np.random.default_rng(0), 50, 100)) < 1e-8


def whole(step: float) -> Stamps:
    return lambda instants: np.round(instants / step) * step


def ticks_of_100_mhz(instants: FloatArray) -> FloatArray:
    """A counter that ticks every 9.9987 ns, told in whole nanoseconds: no two differ by 1 to 8
    of them.
    """
    return np.round(np.floor(instants / 9.9987e-9) * 9.9987e-9, 9)


def since_1970(instants: FloatArray) -> FloatArray:
    """Floats of that size are 2**-22 s apart, and stay so when the origin is taken off."""
    return (1.7e9 + instants) - 1.7e9


STAMPS = [
    (whole(1e-9), 1e-9),
    (ticks_of_100_mhz, 1e-8),
    (whole(1e-7), 1e-7),
    (lambda instants: 1.7e9 + instants, 2**-22),
    (since_1970, 2**-22),
    (lambda instants: np.round(1.7e9 + instants, 6), 1e-6),
]


@pytest.mark.parametrize(("stamps", "step"), STAMPS)
def test_the_clocks_step_is_found_in_the_instants(stamps: Stamps, step: float) -> None:
    assert resolution(stamps(poisson(np.random.default_rng(0), 6000, 4096))) == pytest.approx(
        step, rel=0.1
    )


@pytest.mark.parametrize("step", [1.0, 0.5, 1e-4, 2.0**-20, 1e-8, 2.0**-29])
def test_a_clock_counts_in_decimal_or_binary_steps(step: float) -> None:
    stamps = whole(step)(poisson(np.random.default_rng(0), 0.02 / step, 4096))
    assert resolution(stamps) == pytest.approx(step, rel=1e-6)


@pytest.mark.parametrize(("tick", "told"), [(4.2, 4), (9.7, 10), (10.3, 10), (63.3, 63), (64.3, 1)])
def test_a_tick_of_up_to_63_steps_is_told_to_the_nearest_one(tick: float, told: int) -> None:
    """Nanoseconds, in which such a counter is stamped."""
    instants = poisson(np.random.default_rng(0), 6000, 10_000)
    ticks = np.round(np.floor(instants / (tick * 1e-9)) * (tick * 1e-9), 9)
    assert resolution(ticks) == pytest.approx(told * 1e-9, rel=1e-6)


@pytest.mark.parametrize(
    ("equal", "between", "apart", "told"),
    [(20, 2, 10, 10.0), (20, 3, 10, 1.0), (20, 2, 9, 1.0)],
)
def test_a_tick_has_a_valley_before_it_and_half_as_many_pairs_as_are_equal(
    equal: int, between: int, apart: int, told: float
) -> None:
    """A clock of whole seconds. Pairs of gaps, far from all others: so many equal, so many that
    differ by two steps, a tenth of those at most, and by a tick of ten, give or take one.
    """
    ticks = [9, *[10] * (apart - 2), 11]
    pairs = enumerate([*[0] * equal, *[2] * between, *ticks], start=1)
    gaps = [gap for place, apart_by in pairs for gap in (1000 * place, 1000 * place + apart_by)]
    assert resolution(np.cumsum([0.0, *gaps])) == told


@pytest.mark.parametrize(
    ("least", "taken_off"), [(0.999e-5, False), (1.001e-5, True), (4.99e-5, True), (5.01e-5, False)]
)
def test_the_time_of_a_write_is_taken_off_the_gaps(least: float, taken_off: bool) -> None:
    """From ten mean gaps over their number, here a thousand, up to what a sleep adds."""
    gaps = np.linspace(least, 2e-3 - least, 1000)
    expected = gaps[gaps > 8 * least] - 8 * least if taken_off else gaps
    assert above_dead_time(gaps).tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize(("above", "taken_off"), [(49, False), (50, True)])
def test_the_time_of_a_write_is_left_where_it_leaves_too_few_gaps(
    above: int, taken_off: bool
) -> None:
    gaps = np.append(np.full(100, 4e-5), np.full(above, 1e-3))
    expected = np.full(above, 1e-3 - 8 * 4e-5) if taken_off else gaps
    assert above_dead_time(gaps).tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def written_one_by_one(instants: FloatArray, rng: np.random.Generator, least: float) -> FloatArray:
    """None leaves before the write of the one before it is over, which takes `least` seconds,
    now and then five times as long.
    """
    takes = least * (1 + rng.exponential(0.7, instants.size).clip(max=4))
    over = np.concatenate([[0.0], np.cumsum(takes)[:-1]])
    return np.maximum.accumulate(instants - over) + over


@pytest.mark.parametrize("write", [0.0, 5e-6])
@pytest.mark.parametrize(("stamps", "_step"), STAMPS)
@pytest.mark.parametrize("rate", [1000, 6000, 20_000])
@pytest.mark.thinned(36)
def test_poisson_streams_pass_at_the_resolution_of_their_stamps(
    rate: float, stamps: Stamps, _step: float, write: float
) -> None:
    """Ten streams of 10,000 each; a hundredth of true ones fails, so one of ten may, and none is
    said to be of one seed.
    """
    found = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        found.append(
            audit_arrivals(
                stamps(written_one_by_one(poisson(rng, rate, 10_000), rng, write)), asked_rate=rate
            ).verdict
        )
    assert found.count("poisson") >= 9, found
    assert not any("seed" in verdict or "sleeps" in verdict for verdict in found), found


@pytest.mark.parametrize("write", [0.0, 5e-6])
@pytest.mark.parametrize(("stamps", "_step"), STAMPS)
@pytest.mark.parametrize("rate", [1000, 6000, 20_000])
@pytest.mark.thinned(24)
def test_senders_of_one_seed_are_found_at_the_resolution_of_their_stamps(
    rate: float, stamps: Stamps, _step: float, write: float
) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sent = written_one_by_one(lock_step(rng, rate, 10_000), rng, write)
        verdict = audit_arrivals(stamps(sent), asked_rate=rate).verdict
        assert verdict.startswith("not poisson: ")
        assert "senders that share one seed" in verdict


def test_a_clock_of_whole_nanoseconds_makes_no_repeated_gaps():
    """By chance 100 pairs of 10,000 gaps at 4,000/s are equal then; counting neighbours in too
    would make that 300.
    """
    audits = [
        audit_arrivals(np.round(poisson(np.random.default_rng(seed), 4000, 10_000), 9))
        for seed in range(5)
    ]
    ratios = [
        test.statistic for audit in audits for test in audit.tests if test.name == "repeated gaps"
    ]
    assert np.mean(ratios) == pytest.approx(1, abs=0.2)
    assert [audit.verdict for audit in audits] == ["poisson"] * 5


def test_order_and_origin_do_not_matter():
    instants = poisson(np.random.default_rng(5), 20, 600)
    shuffled = np.random.default_rng(6).permutation(instants) + 5000.0
    first, second = audit_arrivals(instants, asked_rate=20), audit_arrivals(shuffled, asked_rate=20)
    assert [test.p_value for test in first.tests] == pytest.approx(
        [test.p_value for test in second.tests], rel=1e-4, abs=1e-9
    )


def test_gaps_that_are_not_exponential_are_told_by_the_statistic_that_failed() -> None:
    gaps = np.random.default_rng(1).exponential(size=500)
    (said,) = disease(np.cumsum(gaps), gaps, {"gap spacings": 0.123}, None, 1e-6)
    assert said == (
        "gaps are not exponential: the ordered gaps' differences are at most 0.123 away from "
        "exponential ones"
    )


GAPS = np.random.default_rng(1).exponential(size=1000)


def told(
    gaps: FloatArray,
    *failed: str,
    ordered: FloatArray | None = None,
    step: float = 1e-9,
    statistic: float = 0.5,
) -> str:
    """What is said of these gaps where these tests failed."""
    return "; ".join(
        disease(
            np.cumsum(gaps) if ordered is None else ordered,
            gaps,
            dict.fromkeys(failed, statistic),
            None,
            step,
        )
    )


@pytest.mark.parametrize(
    ("simultaneous", "step", "said"),
    [(10, 1e-9, False), (11, 1e-9, True), (19, 0.0095, False), (20, 0.0095, True)],
)
def test_more_than_one_in_a_hundred_at_one_instant_are_groups(
    simultaneous: int, step: float, said: bool
) -> None:
    """And what chance makes of a clock of that step, in mean gaps."""
    gaps = np.append(np.zeros(simultaneous), GAPS[simultaneous:])
    step *= float(gaps.mean())
    assert (
        "come at the very instant of the one before" in told(gaps, "gap law", step=step)
    ) == said


@pytest.mark.parametrize(("half", "said"), [(0.199, True), (0.201, False)])
def test_gaps_within_a_fifth_of_their_mean_are_nearly_constant(half: float, said: bool) -> None:
    """Else something adds to every one of these, as the least is 0.8 of the mean."""
    found = told(np.tile([1 + half, 1 - half], 500), "gap law")
    assert ("gaps are nearly constant" in found) == said
    assert ("something adds to every gap" in found) == (not said)


@pytest.mark.parametrize(
    ("at_one_phase", "failed", "said"),
    [
        # of a thousand: 5 in a hundred
        (50, {}, False),
        (51, {}, True),
        # 15 where bursts may be the cause, which begin above a dispersion of 1.5
        (51, {"dispersion, 5 per window": 1.5}, True),
        (150, {"dispersion, 5 per window": 1.51}, False),
        (151, {"dispersion, 5 per window": 1.51}, True),
    ],
)
def test_arrivals_are_pinned_to_a_phase_where_enough_of_them_are(
    at_one_phase: int, failed: dict[str, float], said: bool
) -> None:
    """The others are spread evenly over nine tenths of a second, so that no 20 ms of it hold 5
    in a hundred.
    """
    others = 0.05 + 0.9 * np.arange(1000 - at_one_phase) / (1000 - at_one_phase)
    ordered = np.arange(1000.0) + np.append(np.zeros(at_one_phase), others)
    found = "; ".join(disease(ordered, GAPS, {"phase in 1 s": 0.3} | failed, None, 1e-9))
    assert (
        (
            f"{at_one_phase / 10:.0f}% of arrivals are within 10 ms of one phase: pinned to whole "
            "seconds"
        )
        in found
    ) == said


@pytest.mark.parametrize(("twice", "said"), [(100, False), (101, True)])
def test_gaps_of_one_seed_are_a_quarter_of_them_equal_to_another(twice: int, said: bool) -> None:
    once = 1 + 0.01 * np.arange(400 - twice)
    gaps = np.concatenate([once, once[:twice]])
    assert (
        "the same gaps occur again" in told(gaps, "repeated gaps", step=1e-6, statistic=9.0)
    ) == said


@pytest.mark.parametrize(("alike", "said"), [(300, False), (301, True)])
def test_gaps_like_the_one_before_are_of_one_seed_from_three_in_ten_on(
    alike: int, said: bool
) -> None:
    gaps = np.append(np.ones(alike + 1), np.resize([3.0, 1.0], 1000 - alike))
    assert ("of gaps are like the one before them" in told(gaps, "correlation, lag 1")) == said


@pytest.mark.parametrize(("apart", "said"), [(0.1630, True), (0.1632, False)])
def test_gaps_are_alike_that_differ_by_less_than_a_tenth_of_their_mean(
    apart: float, said: bool
) -> None:
    """That is 1.63."""
    gaps = np.append(np.resize([1.0, 1.0 + apart], 402), np.resize([3.0, 1.0], 598))
    assert ("of gaps are like the one before them" in told(gaps, "correlation, lag 1")) == said


@pytest.mark.parametrize(("short", "said"), [(0.1245, False), (0.1247, True)])
def test_gaps_below_a_tenth_of_their_mean_say_nothing_of_a_seed(short: float, said: bool) -> None:
    """That is 1.246: they are of requests sent at once."""
    gaps = np.append(np.full(402, short), np.resize([3.0, 1.0], 598))
    assert ("of gaps are like the one before them" in told(gaps, "correlation, lag 1")) == said


def of_pauses(gaps: FloatArray, *failed: str) -> str:
    """What is said of gaps at an asked rate of 1, where the longest one is too long."""
    names = dict.fromkeys(("longest gap", *failed), 0.5)
    return "; ".join(disease(np.cumsum(gaps), gaps, names, 1.0, 1e-9))


@pytest.mark.parametrize(("beyond", "said"), [(-0.1, False), (0.1, True)])
def test_a_pause_is_longer_than_the_usual_longest_gap_by_four_mean_gaps(
    beyond: float, said: bool
) -> None:
    """Of the logarithm of their number in all. Twenty that are shorter are no pauses but of gaps
    that are uneven.
    """
    usual = -np.log1p(-(np.arange(980) + 0.5) / 980)
    gaps = np.append(usual, np.full(20, np.log(1000) + 4 + beyond))
    assert ("pauses of up to 11 s (11 mean gaps): the sender" in of_pauses(gaps)) == said


@pytest.mark.parametrize(("variation", "said"), [(0.87, False), (0.88, True), (1.0, True)])
def test_pauses_stand_out_from_gaps_that_vary_as_poisson_ones_do(
    variation: float, said: bool
) -> None:
    """Within four over the root of their number, 0.126."""
    gaps = np.append(np.tile([1 + variation, 1 - variation], 500), 31.234)
    assert ("pauses of up to 31.2 s (31 mean gaps)" in of_pauses(gaps)) == said


@pytest.mark.parametrize(("usual", "lost"), [(1 / 1.126, True), (1 / 1.127, False)])
def test_a_schedule_is_lost_where_all_but_the_pauses_is_at_the_asked_rate(
    usual: float, lost: bool
) -> None:
    """Within four over the root of their number, 0.1265; else more is wrong than the pauses."""
    gaps = np.append(usual * np.tile([1.95, 0.05], 500), 600.0)
    found = of_pauses(gaps, "rate")
    assert ("per second asked: the sender fell behind and never caught up" in found) == lost
    assert ("(600 mean gaps): the sender or the network stalled" in found) == (not lost)


@pytest.mark.parametrize(
    ("value", "words"), [(0.99, "arrivals are too regular"), (1.01, "arrivals come in bursts")]
)
def test_counts_vary_more_or_less_than_by_chance(value: float, words: str) -> None:
    found = told(GAPS, "dispersion, 5 per window", statistic=value)
    assert found == f"{words}: variance over mean of counts is {value} (5 per window)"


def test_counts_are_of_two_windows_at_least() -> None:
    """Three and none."""
    assert arrival_tests.dispersion(np.array([0.0, 1.0, 2.0, 4.0, 10.0]), 5) == (
        pytest.approx(3.0),
        pytest.approx(2 * stats.chi2.sf(3.0, 1)),
    )


@pytest.mark.parametrize(
    ("least", "mean", "count", "said"),
    [
        # fifty times what the least of a thousand gaps is by chance
        (0.0499, 1.0, 1000, False),
        (0.0501, 1.0, 1000, True),
        # but more than the kernel adds to any sleep
        (4.99e-5, 1e-3, 10_000, False),
        (5.01e-5, 1e-3, 10_000, True),
    ],
)
def test_something_adds_to_every_gap_where_the_least_is_far_from_nothing(
    least: float, mean: float, count: int, said: bool
) -> None:
    gaps = np.linspace(least, 2 * mean - least, count)
    assert ("something adds to every gap" in told(gaps, "gap law")) == said


@pytest.mark.parametrize(
    ("n", "windows"),
    [
        (99, {"5"}),
        (100, {"5"}),
        (199, {"5"}),
        (200, {"5", "20"}),
        (499, {"5", "20"}),
        (500, {"5", "20", "50"}),
    ],
)
def test_counts_are_judged_in_ten_windows_at_least(n: int, windows: set[str]) -> None:
    names = {test.name for test in audit_arrivals(poisson(np.random.default_rng(3), 10, n)).tests}
    assert {name.split()[1] for name in names if name.startswith("dispersion")} == windows


@pytest.mark.parametrize(
    ("span", "n", "judged"),
    [(10.0, 30, True), (9.99, 30, False), (100.0, 22, True), (100.0, 21, False)],
)
def test_a_phase_takes_ten_periods_and_twenty_arrivals(span: float, n: int, judged: bool) -> None:
    assert (arrival_tests.phase(np.linspace(0, span, n), 1.0) is not None) == judged


@pytest.mark.parametrize(("rate", "fine"), [(0.85, True), (1.25, False)])
def test_gaps_are_judged_one_by_one_where_the_clock_is_500_times_as_fine(
    rate: float, fine: bool
) -> None:
    """A clock of 1/512 s: a five-hundredth of 0.98 s."""
    names = {
        test.name
        for test in audit_arrivals(
            whole(2**-9)(poisson(np.random.default_rng(3), rate, 1000))
        ).tests
    }
    assert ({"gap law", "gap spacings", "repeated gaps"} <= names) == fine
    assert ({"gap law", "gap spacings", "repeated gaps"} & names == set()) == (not fine)


def test_nearly_constant_gaps_are_told_with_their_spread() -> None:
    gaps = 2.0 + 0.2 * np.resize([1.0, -1.0], 1000)
    verdict = audit_arrivals(np.cumsum(gaps), asked_rate=0.5).verdict
    assert "gaps are nearly constant (standard deviation 0.1 of their mean)" in verdict
