"""Is a stream of arrivals what it is said to be? Tests, a verdict, and whether the sender kept its
timetable.

The verdict holds several tests at once: by Holm's rule a true Poisson stream fails in at most
`significance` of audits, whatever hangs together among the tests. A stream that was asked to be
something else (gamma, a trace) is not held against the exponential law but against its own
timetable: delivered = intended + lateness.

Power at n = 1000, one audit at significance 0.01, in 100 streams each
(tests/queueing/test_arrival_audit.py): gaps drawn by ten senders from one seed, arrivals pinned to
seconds, schedules lost by re-anchoring and sleeps that drift by 8 % of a gap are all named. A
schedule rescaled to end on time is a Poisson stream but for its length: one run does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.text import counted, short_number
from kendall.queueing.measurement import arrival_tests as tests
from kendall.queueing.measurement.arrival_tests import Finding, FloatArray
from kendall.queueing.measurement.arrival_words import SLEEP, disease, in_words

ENOUGH = 50  # arrivals before anything is said
SIGNIFICANCE = 0.01  # share of true Poisson streams that fail
WINDOWS = (5, 20, 50)  # arrivals in a window of counts, on average
LEAST_WINDOWS = 10
PERIODS = (1.0, 0.1)  # seconds
LAGS = 10
FINE = 0.002  # of a mean gap: with a clock of coarser steps the gaps are not judged one by one
LEAST_RESOLUTION = 1e-9  # seconds
STEPS = sorted(
    [10.0**-k for k in range(10)] + [2.0**-k for k in range(1, 30)], reverse=True
)  # seconds: clocks tick in one of them
LONGEST_TICK = 64  # steps
TOO_LONG = 10  # mean gaps over their number
DEAD_TIMES = 8  # a write takes now and then so many times the least one


@dataclass(frozen=True, slots=True)
class Test:
    """One test of the stream."""

    name: str
    statistic: float
    p_value: float
    holds: bool  # not rejected, by Holm's rule over all tests
    says: str


@dataclass(frozen=True, slots=True)
class Budget:
    """How late requests may leave, or how early on average, seconds, before a run is not the run
    that was asked for.
    """

    p99: float = 0.005
    mean: float = 0.001


@dataclass(frozen=True, slots=True)
class Lateness:
    """Delivered - intended, seconds."""

    mean: float
    p50: float
    p99: float
    max: float
    budget: Budget

    @classmethod
    def of(cls, late: FloatArray, budget: Budget) -> Lateness:
        """Of each arrival's seconds."""
        p50, p99 = np.quantile(late, (0.5, 0.99)).tolist()
        return cls(float(late.mean()), p50, p99, float(late.max()), budget)

    @property
    def within(self) -> bool:
        """Whether the budget was kept."""
        return abs(self.mean) <= self.budget.mean and self.p99 <= self.budget.p99


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a stream of arrivals is. Rates per second, instants and spans in seconds; NaN where
    nothing can be said.
    """

    n: int
    span: float
    rate: float
    rate_low: float  # 95 %, exact for a Poisson stream
    rate_high: float
    asked_rate: float | None
    gap_variation: float  # standard deviation of the gaps over their mean; Poisson: 1
    dispersion: float  # variance over mean of counts in the longest judged windows; Poisson: 1
    process: str  # what the stream was asked to be
    significance: float
    tests: tuple[Test, ...]
    lateness: Lateness | None
    verdict: str
    poisson: bool | None  # None: too few to say, or not asked to be
    reasons: tuple[str, ...] = ()  # what is wrong, the most telling first
    valid: bool | None = field(default=None)  # lateness within budget; None without a timetable

    @property
    def good(self) -> bool:
        """The stream is as asked, as far as was judged, and not late."""
        return not self.reasons and self.valid is not False


def audit_arrivals(
    instants: FloatArray,
    *,
    asked_rate: float | None = None,
    intended: FloatArray | None = None,
    process: str = "poisson",
    significance: float = SIGNIFICANCE,
    budget: Budget | None = None,
) -> Audit:
    """Judge arrival instants (seconds, any origin and order); `intended` is the timetable, entry by
    entry.

    `process` is what the stream was asked to be; other than "poisson" the tests are shown but the
    verdict compares with the timetable alone. Raises ValueError where the two arrays differ in
    length, or an instant is not finite.
    """
    if not np.isfinite(instants).all():
        raise ValueError(
            f"got {np.count_nonzero(~np.isfinite(instants))} instants that are not finite; "
            "expected seconds"
        )
    if intended is not None and intended.size != instants.size:
        raise ValueError(
            f"got {instants.size} instants and {intended.size} intended ones; expected one for each"
        )
    late = None
    if intended is not None and instants.size:
        late = Lateness.of(instants - intended, budget or Budget())
    finite = asked_rate if asked_rate is not None and 0 < asked_rate < math.inf else None
    stream = _Stream.of(instants, finite, significance)
    gaps, span = stream.gaps, stream.span
    if process == "poisson":
        reasons = stream.reasons
    else:
        kept = late is None or late.within
        reasons = () if kept else ("it does not keep its timetable",)
    low, high = tests.rate_interval(gaps.size, span) if span else (math.nan, math.nan)
    dispersions = [t.statistic for t in stream.tests if t.name.startswith("dispersion")]
    return Audit(
        n=instants.size,
        span=span,
        rate=gaps.size / span if span else math.nan,
        rate_low=low,
        rate_high=high,
        asked_rate=asked_rate,
        gap_variation=float(gaps.std() / gaps.mean()) if span else math.nan,
        dispersion=dispersions[-1] if dispersions else math.nan,
        process=process,
        significance=significance,
        tests=stream.tests,
        lateness=late,
        verdict=_verdict(instants.size, process, reasons, late),
        poisson=None if process != "poisson" or instants.size < ENOUGH else not reasons,
        reasons=reasons,
        valid=None if late is None else late.within,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Arrivals from the first one on, and the tests of them."""

    ordered: FloatArray
    gaps: FloatArray
    span: float
    asked_rate: float | None  # finite
    step: float  # of the clock
    tests: tuple[Test, ...]

    @classmethod
    def of(cls, instants: FloatArray, asked_rate: float | None, significance: float) -> _Stream:
        """Untested where there are too few."""
        ordered = np.sort(instants) - (instants.min() if instants.size else 0.0)
        gaps = np.diff(ordered)
        gaps = np.where(gaps < LEAST_RESOLUTION, 0.0, gaps)
        span = float(ordered[-1]) if gaps.any() else 0.0
        if instants.size < ENOUGH or not span > 0:
            return cls(ordered, gaps, span, asked_rate, math.nan, ())
        step = resolution(instants)
        found = list(_findings(ordered, gaps, asked_rate, step))
        return cls(ordered, gaps, span, asked_rate, step, holm_tests(found, significance, gaps))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not Poisson; none where it is."""
        if self.ordered.size >= ENOUGH and not self.tests:
            return ("all arrive at one instant",)
        rejected = {test.name: test.statistic for test in self.tests if not test.holds}
        return disease(self.ordered, self.gaps, rejected, self.asked_rate, self.step)


def resolution(instants: FloatArray) -> float:
    """Seconds between the instants that the clock could tell apart: its step, decimal or binary,
    or the floats' own; its tick.
    """
    since = instants - instants[0]
    rounding = float(np.spacing(np.abs(instants).max()))
    noise = max(rounding, LEAST_RESOLUTION / 10)

    def steps_by(step: float, some: FloatArray) -> bool:
        return bool(np.all(np.abs(some - np.round(some / step) * step) <= noise))

    found = (
        step
        for step in STEPS
        if step >= 4 * noise and steps_by(step, since[:ENOUGH]) and steps_by(step, since)
    )
    return tick(np.diff(np.sort(since)), next(found, max(LEAST_RESOLUTION, rounding)))


def tick(gaps: FloatArray, step: float) -> float:
    """The tick of a clock that counts in `step` but ticks more seldom, as counters of 25 or 100 MHz
    do: 40 or 10 ns, rounded.

    Gaps then differ by nothing or by a tick and hardly by what lies between; without such a valley
    it is `step`.
    """

    def pairs(steps: float) -> int:
        return tests.pairs_within(gaps, steps * step)

    equal = pairs(tests.EQUAL)
    if equal < 4:
        return step
    for ticks in range(4, LONGEST_TICK):
        if pairs(ticks - 1.5) - equal > equal / 10:
            return step
        around, after = (pairs(middle + 1.5) - pairs(middle - 1.5) for middle in (ticks, ticks + 1))
        if around >= max(equal / 2, after):
            return ticks * step
    return step


def above_dead_time(gaps: FloatArray) -> FloatArray:
    """The gaps that the time between two stamps has not made, less that time: exponential where the
    gaps were, with their mean.

    A sender that writes one request after the other cannot stamp two closer than one write takes,
    and those due within it leave one write apart; exponential gaps have no memory. The least of m
    Poisson gaps is mean / m on average, and TOO_LONG times as much once in 20,000 streams. What a
    sleep adds to every gap is more than SLEEP and is not taken off.
    """
    least = float(gaps.min())
    if not TOO_LONG * float(gaps.mean()) / gaps.size < least < SLEEP:
        return gaps
    above = gaps[gaps > DEAD_TIMES * least] - DEAD_TIMES * least
    return above if above.size >= ENOUGH else gaps


def _findings(
    ordered: FloatArray, gaps: FloatArray, asked_rate: float | None, step: float
) -> Iterator[tuple[str, Finding]]:
    """Every test that the number of arrivals and the resolution of their stamps allow."""
    yield "constant rate", tests.constant_rate(ordered)
    for per_window in WINDOWS:
        if ordered.size >= per_window * LEAST_WINDOWS:
            yield f"dispersion, {per_window} per window", tests.dispersion(ordered, per_window)
    for period in PERIODS:
        if (found := tests.phase(ordered, period)) is not None:
            yield f"phase in {period:g} s", found
    above = above_dead_time(gaps)
    yield "longest gap", tests.longest_gap(gaps)
    yield "correlation, lag 1", tests.correlation(above)
    lags = min(LAGS, above.size // 20)
    yield f"correlation, lags 1-{lags}", tests.correlation(above, lags)
    if step < FINE * float(gaps.mean()):  # the clock tells the gaps apart
        yield "gap law", tests.gap_law(above)
        yield "gap spacings", tests.gap_spacings(above)
        yield "repeated gaps", tests.repeated_gaps(above, step)
        if asked_rate is not None:
            yield "gap law at the asked rate", tests.gap_law(above, 1 / asked_rate)
    if asked_rate is not None:
        yield "rate", tests.rate(gaps.size, float(ordered[-1]), asked_rate)
        yield "span too exact", tests.too_exact([(gaps.size, float(ordered[-1]))], asked_rate)


def holm_tests(
    found: list[tuple[str, Finding]], significance: float, gaps: FloatArray
) -> tuple[Test, ...]:
    """By Holm's rule: the i-th smallest of k p-values is held against significance / (k - i),
    until the first that passes.
    """
    rejected: set[str] = set()
    for index, (name, finding) in enumerate(sorted(found, key=lambda pair: pair[1].p_value)):
        if finding.p_value > significance / (len(found) - index):
            break
        rejected.add(name)
    return tuple(
        Test(name, f.statistic, f.p_value, name not in rejected, in_words(name, f.statistic, gaps))
        for name, f in found
    )


def _verdict(n: int, process: str, reasons: Sequence[str], late: Lateness | None) -> str:
    if process != "poisson":
        if late is None:
            return f"not judged: {process} was requested, and there is no timetable to compare with"
        late_by = (
            f"mean {short_number(late.mean * 1e3, 3)} ms, p99 "
            f"{short_number(late.p99 * 1e3, 3)} ms late"
        )
        kept = "not kept" if reasons else "kept"
        return (
            f"timetable {kept} ({late_by}); not tested: the distribution of the gaps (asked: "
            f"{process})"
        )
    if n < ENOUGH:
        return f"too few to say: {counted(n, 'arrival')}; expected at least {ENOUGH}"
    return "not poisson: " + "; ".join(reasons[:2]) if reasons else "poisson"
