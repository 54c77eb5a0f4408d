"""Arrival processes obey their laws, repeat with their generator, and never depend on where the
run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.processes import (
    ArrivalStream,
    Deterministic,
    FloatArray,
    Gamma,
    Poisson,
    Recorded,
    delivered_rate,
    renewal,
)
from kendall.queueing.arrivals.rates import Piecewise, Ramp, invert_steps, knots
from kendall.queueing.arrivals.text import (
    EXAMPLES,
    Process,
    at_rate,
    format_arrivals,
    parse_arrivals,
)

SIGNIFICANCE = 1e-3
EVERY = [
    *EXAMPLES.values(),
    "gamma:rate=3,burstiness=4",
    "gamma:rate=3,burstiness=inf",
    "mmpp:rates=0/30/4,durations=2/0.5/1",
    "piecewise:rates=5/0/40,durations=20/10/30",
    "ramp:start=20,end=0,duration=60",
    "ramp:start=20,end=2,duration=60,shape=exponential",
    "ramp:start=7,end=7,duration=60,shape=exponential",
]


def _rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def _expected(process: Process) -> Callable[[FloatArray], FloatArray]:
    """The cumulative rate, integrated numerically: written apart from the inversion that the
    processes use.
    """
    if isinstance(process, Piecewise):
        ends = np.cumsum(process.durations)
        return lambda t: np.interp(
            t, [0, *ends], [0, *np.cumsum(np.multiply(process.rates, process.durations))]
        )
    assert isinstance(process, Ramp)
    grid = np.linspace(0, process.duration, 100_001)
    share = grid / process.duration
    if process.shape == "linear":
        rate = process.start + (process.end - process.start) * share
    else:
        rate = process.start * (process.end / process.start) ** share
    area = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(grid))])
    return lambda t: np.interp(t, grid, area)


# laws


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_mean_and_shape(burstiness: float) -> None:
    gaps = np.diff(Gamma(20.0, burstiness).instants(_rng(), count=20_000), prepend=0.0)
    assert (
        stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (20 * burstiness))).pvalue
        > SIGNIFICANCE
    )
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(gaps.size)


def test_burstiness_is_the_inverse_of_the_dispersion_over_long_windows() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        instants = Gamma(100.0, burstiness).instants(_rng(3), duration=4000.0)
        counts = np.histogram(instants, np.arange(0, 4001, 2))[0]
        assert counts.var(ddof=1) / counts.mean() == pytest.approx(1 / burstiness, rel=0.15)


def test_gamma_of_shape_one_is_the_poisson_process_bit_for_bit() -> None:
    assert np.array_equal(
        Gamma(7.0, 1.0).instants(_rng(), count=5000), Poisson(7.0).instants(_rng(), count=5000)
    )


def test_deterministic_arrivals_lie_on_the_grid_without_drift() -> None:
    instants = Deterministic(10.0).instants(_rng(), count=1_000_000)
    assert np.array_equal(instants, np.arange(1, 1_000_001) / 10.0)
    assert Deterministic(10.0).instants(_rng(), duration=60.0).size == 600
    assert np.array_equal(
        Gamma(10.0, math.inf).instants(_rng(), count=99),
        Deterministic(10.0).instants(_rng(), count=99),
    )


@pytest.mark.parametrize("text", [text for text in EVERY if text.startswith(("piecewise", "ramp"))])
def test_the_cumulative_rate_turns_the_instants_into_a_unit_rate_poisson_process(text: str) -> None:
    """Time change theorem: Lambda(t_n) are the sums of the unit gaps that were drawn, and so
    exponential.
    """
    process = at_rate(parse_arrivals(text), 100.0)
    instants = process.instants(_rng(5))
    gaps = np.diff(_expected(process)(instants), prepend=0.0)
    assert gaps.size > 2000
    assert stats.kstest(gaps, "expon").pvalue > SIGNIFICANCE
    assert gaps[:1000] == pytest.approx(
        _rng(5).exponential(size=instants.size)[:1000], rel=1e-3, abs=1e-4
    )


def test_the_number_of_a_ramp_is_poisson_with_the_area_as_its_mean() -> None:
    ramp = Ramp(1.0, 9.0, 20.0)
    counts = np.array([ramp.instants(_rng(seed)).size for seed in range(400)])
    assert counts.mean() == pytest.approx(100.0, abs=4 * 10 / math.sqrt(400))
    assert SIGNIFICANCE < stats.chi2.cdf(counts.var(ddof=1) / 100.0 * 399, 399) < 1 - SIGNIFICANCE


def test_nothing_comes_in_a_pause_and_all_ends_with_the_last_piece() -> None:
    instants = Piecewise((50.0, 0.0, 50.0), (10.0, 5.0, 10.0)).instants(_rng(), count=10_000)
    assert not np.any((instants > 10) & (instants < 15))
    assert 900 < instants.size < 1100
    assert instants[-1] <= 25


def test_a_cumulative_rate_met_exactly_belongs_to_the_piece_before() -> None:
    """At the edge of a pause the instant is the pause's beginning, and the last instant is the
    end.
    """
    path = knots(np.array([2.0, 0.0, 1.0]), np.array([3.0, 5.0, 4.0]))
    assert invert_steps(np.array([1.0, 6.0, 6.5, 10.0]), *path).tolist() == [0.5, 3.0, 8.5, 12.0]


# the Markov-modulated process


def _windows(process: Mmpp, window: float, runs: int, per_run: int) -> FloatArray:
    """Counts of disjoint windows of independent runs."""
    edges = np.arange(per_run + 1) * window
    return np.concatenate(
        [
            np.histogram(process.instants(_rng(seed), duration=edges[-1]), edges)[0]
            for seed in range(runs)
        ]
    ).astype(float)


def test_dispersion_of_two_states_is_the_textbook_formula() -> None:
    """1 + 2 s1 s2 (r1 - r2)^2 / ((s1 + s2)^2 (r1 s2 + r2 s1)), s the rates of leaving (Fischer
    and Meier-Hellstern 1993).
    """
    (r1, r2), (s1, s2) = (5.0, 50.0), (1 / 10, 1 / 1)
    formula = 1 + 2 * s1 * s2 * (r1 - r2) ** 2 / ((s1 + s2) ** 2 * (r1 * s2 + r2 * s1))
    process = Mmpp((r1, r2), (10.0, 1.0))
    assert process.dispersion == pytest.approx(formula, rel=1e-12)
    assert process.mean_rate == pytest.approx((r1 * s2 + r2 * s1) / (s1 + s2), rel=1e-12)
    decay, window = s1 + s2, 3.0
    partial = 1 + (formula - 1) * (1 - (1 - math.exp(-decay * window)) / (decay * window))
    assert process.dispersion_over(window) == pytest.approx(partial, rel=1e-12)


@pytest.mark.parametrize(
    "process", [Mmpp((5.0, 40.0), (2.0, 0.5)), Mmpp((0.0, 30.0, 4.0), (2.0, 0.5, 1.0))]
)
def test_counts_have_the_mean_and_the_dispersion_of_the_closed_forms(process: Mmpp) -> None:
    for window in (0.5, 5.0):
        counts = _windows(process, window, runs=40, per_run=400)
        assert counts.mean() == pytest.approx(process.mean_rate * window, rel=0.05)
        assert counts.var() / counts.mean() == pytest.approx(
            process.dispersion_over(window), rel=0.12
        )


def test_dispersion_grows_from_one_to_its_limit() -> None:
    process = Mmpp((0.0, 30.0, 4.0), (2.0, 0.5, 1.0))
    over = [process.dispersion_over(window) for window in (1e-4, 0.1, 1.0, 10.0, 1e6)]
    assert over[0] == pytest.approx(1.0, abs=0.02)
    assert over == sorted(over)
    assert over[-1] == pytest.approx(process.dispersion, rel=1e-5)


def test_the_chain_starts_in_its_stationary_state() -> None:
    """The first second counts as any other: started always in one state, it would not."""
    process = Mmpp((2.0, 40.0), (3.0, 1.0))
    firsts = np.array([process.instants(_rng(seed), duration=1.0).size for seed in range(1500)])
    error = math.sqrt(process.dispersion_over(1.0) * process.mean_rate / firsts.size)
    assert firsts.mean() == pytest.approx(process.mean_rate, abs=4 * error)
    assert error < 0.05 * process.mean_rate


def test_states_follow_one_another_in_the_order_given() -> None:
    """After every burst of the middle state comes the last state, not the silence of the first."""
    instants = Mmpp((0.0, 2000.0, 100.0), (1.0, 1.0, 1.0)).instants(_rng(), duration=300.0)
    counts = np.histogram(instants, np.arange(0, 300, 0.1))[0]
    ends = [i for i in range(1, counts.size - 1) if counts[i - 1] > 100 and counts[i] <= 100]
    assert len(ends) > 50
    assert np.mean([counts[i + 1] > 0 for i in ends]) > 0.8


def test_equal_rates_in_all_states_are_the_poisson_process() -> None:
    modulated = Mmpp((8.0, 8.0), (1.0, 0.1)).instants(_rng(), count=3000)
    assert modulated == pytest.approx(Poisson(8.0).instants(_rng(), count=3000), rel=1e-9)


# how a run is cut


@settings(deadline=None, max_examples=120)
@given(
    text=st.sampled_from(EVERY),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 3000),
    more=st.integers(0, 2000),
    duration=st.floats(0.5, 400.0),
)
def test_every_run_is_the_beginning_of_one_endless_run(
    text: str, seed: int, count: int, more: int, duration: float
) -> None:
    """By number, by duration or by both: the same instants bit for bit, as far as they go."""
    process = parse_arrivals(text)
    longest = process.instants(_rng(seed), count=count + more)
    assert np.array_equal(process.instants(_rng(seed), count=count), longest[:count])
    timed = process.instants(_rng(seed), duration=duration)
    both = process.instants(_rng(seed), count=count, duration=duration)
    common = min(timed.size, longest.size)
    assert np.array_equal(timed[:common], longest[:common])
    assert np.array_equal(both, longest[: both.size])
    assert both.size == min(count, timed.size)
    assert np.all(np.diff(longest, prepend=0.0) >= 0)
    assert timed.size == 0 or timed[-1] <= duration


@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(
        ["poisson:rate=10", "gamma:rate=10,burstiness=0.3", "deterministic:rate=10"]
    ),
    rate=st.floats(0.01, 1e4),
)
def test_renewal_processes_at_another_rate_are_stretched(text: str, rate: float) -> None:
    process = parse_arrivals(text)
    there = at_rate(process, rate).instants(_rng(2), count=200)
    assert there * rate == pytest.approx(process.instants(_rng(2), count=200) * 10, rel=1e-9)


@pytest.mark.parametrize("text", [text for text in EVERY if not text.startswith("mmpp")])
def test_nothing_is_pinned_to_the_end(text: str) -> None:
    """The number of arrivals in a duration is random, unless nothing is."""
    process = parse_arrivals(text)
    sizes = {process.instants(_rng(seed), duration=50.0).size for seed in range(30)}
    certain = isinstance(process, Deterministic) or getattr(process, "burstiness", 1.0) == math.inf
    assert (len(sizes) == 1) is certain


@pytest.mark.thinned(3)
@pytest.mark.parametrize("text", EVERY)
def test_the_delivered_rate_is_the_mean_rate(text: str) -> None:
    process = at_rate(parse_arrivals(text), 20.0)
    assert process.mean_rate == pytest.approx(20.0)
    span = (
        sum(process.durations)
        if isinstance(process, Piecewise)
        else process.duration
        if isinstance(process, Ramp)
        else 4000.0
    )
    sizes = [process.instants(_rng(seed), duration=span).size for seed in range(20)]
    assert np.mean(sizes) / span == pytest.approx(20.0, rel=0.05)


def test_recorded_instants_come_back_as_they_are() -> None:
    at = np.array([0.0, 0.5, 0.5, 2.25])
    recorded = Recorded(at)
    assert np.array_equal(recorded.instants(_rng()), at)
    assert np.array_equal(recorded.instants(_rng(), duration=0.5), at[:3])
    assert np.array_equal(recorded.instants(_rng(), count=2, duration=9.0), at[:2])
    assert recorded.mean_rate == delivered_rate(at) == 3 / 2.25


def test_the_flags_of_rate_and_burstiness_name_a_renewal_process() -> None:
    assert renewal(4.0) == Poisson(4.0)
    assert renewal(4.0, 0.5) == Gamma(4.0, 0.5)
    assert renewal(4.0, math.inf) == Deterministic(4.0)


# text


@pytest.mark.parametrize("text", EVERY)
def test_text_reads_back_as_the_same_process(text: str) -> None:
    process = parse_arrivals(text)
    canonical = format_arrivals(process)
    assert parse_arrivals(canonical) == process
    assert format_arrivals(parse_arrivals(canonical)) == canonical
    assert canonical == text.removesuffix(",shape=linear")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("mmpp:rates=5/50,durations=1m30s/500ms", "mmpp:rates=5/50,durations=90/0.5"),
        (
            "piecewise:rates=5/20/5,durations=1min/30s/60",
            "piecewise:rates=5/20/5,durations=60/30/60",
        ),
        ("ramp:start=1,end=50,duration=1m", "ramp:start=1,end=50,duration=60"),
    ],
)
def test_durations_take_a_unit_and_a_bare_number_is_seconds(text: str, seconds: str) -> None:
    assert parse_arrivals(text) == parse_arrivals(seconds)
    assert format_arrivals(parse_arrivals(text)) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison:rate=1", "did you mean 'poisson'"),
        ("poisson", "expected rate too, for example poisson:rate=10"),
        ("poisson:rat=1", "did you mean 'rate'"),
        ("poisson:rate=fast", "expected a number"),
        (
            "poisson:rate=0",
            "got request rate 0.0; expected requests per second > 0 .in 'poisson:rate=0'",
        ),
        ("gamma:rate=1,burstiness=0", "burstiness 0.0; expected a shape > 0"),
        ("mmpp:rates=1,durations=1", "expected two or more"),
        ("mmpp:rates=1/2/3,durations=1/2", "3 rates and 2 durations"),
        ("mmpp:rates=1/2,durations=1", "got 2 rates and 1 duration;"),
        ("piecewise:rates=1,durations=1/2", "got 1 rate and 2 durations;"),
        ("mmpp:rates=0/0,durations=1/2", "rates of 0 only"),
        ("mmpp:rates=1/2,durations=1/0", "durations with 0.0; expected finite numbers > 0"),
        ("piecewise:rates=1/-2,durations=1/1", "rates with -2.0; expected finite numbers >= 0"),
        ("piecewise:rates=inf,durations=1", "rates with inf"),
        ("piecewise:rates=0,durations=1", "rates of 0 only"),
        ("piecewise:rates=1/2,durations=1", "as many of both"),
        (
            "ramp:start=0,end=5,duration=60,shape=exponential",
            "start with 0.0; expected finite numbers > 0",
        ),
        ("ramp:start=0,end=0,duration=60", "from 0 to 0"),
        ("ramp:start=1,end=5,duration=60,shape=lineal", "did you mean 'linear'"),
        (
            "ramp:start=1,end=5,duration=-1",
            "got duration='-1' in .*; expected a duration: 2s, 100ms",
        ),
        ("ramp:start=1,end=5,duration=3 days", "got duration='3 days' in"),
        ("mmpp:rates=1/2,durations=1/2q", "got durations='2q' in"),
        ("piecewise:rates=1/2,durations=1/inf", "durations with inf; expected finite numbers > 0"),
    ],
)
def test_a_wrong_text_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_arrivals(text)


@pytest.mark.parametrize(
    ("process", "bounds", "message"),
    [
        (
            Poisson(5.0),
            {},
            (
                r"with no end; expected a number of requests \(--num-prompts\) or seconds "
                r"\(--duration\)$"
            ),
        ),
        (
            Poisson(math.inf),
            {"duration": 5.0},
            r"with no end; expected a number of requests \(--num-prompts\)$",
        ),
        (Gamma(5.0, 0.5), {}, "with no end"),
        (Mmpp((1.0, 2.0), (1.0, 1.0)), {}, "with no end"),
        (Deterministic(5.0), {"count": 0}, "got 0 prompts"),
        (Ramp(1.0, 5.0, 10.0), {"duration": 0.0}, "got duration 0.0"),
        (Poisson(5.0), {"duration": math.inf}, "got duration inf"),
        (Recorded(np.zeros(2)), {"count": -1}, "got -1 prompts"),
        (Poisson(1e6), {"duration": 1e9}, "got about 1e.15 arrivals; expected 10.8 at most"),
        (Deterministic(1e6), {"duration": 1e9}, "got about 1e.15 arrivals"),
        (Mmpp((1e6, 1e6), (1.0, 1.0)), {"duration": 1e9}, "got about 1e.15 arrivals"),
        (Piecewise((1e6,), (1e9,)), {}, "got about 1e.15 arrivals"),
        (Ramp(1e6, 1e6, 1e9), {}, "got about 1e.15 arrivals"),
        (Poisson(1.0), {"count": 10**9}, "expected a whole number >= 1 and <= 10.8"),
    ],
)
def test_bounds_that_give_no_end_are_refused(
    process: ArrivalStream, bounds: dict[str, float], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        process.instants(_rng(), **bounds)  # type: ignore[arg-type]


def test_other_values_out_of_range_are_named() -> None:
    with pytest.raises(SpecError, match="shape 'square'"):
        Ramp(1.0, 2.0, 3.0, "square")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="out of order"):
        Recorded(np.array([1.0, 0.5]))
    with pytest.raises(SpecError, match="request rate inf"):
        at_rate(Poisson(1.0), math.inf)
