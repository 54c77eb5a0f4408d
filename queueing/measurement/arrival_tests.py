"""Tests of a Poisson stream, each on arrival instants alone: a statistic and its p-value.

They condition on what the stream's rate has decided. Given n arrivals of which the first is at a
and the last at b, the n - 2 between are, in a Poisson stream, independent and uniform on (a, b),
and the n - 1 gaps are an exponential sample divided by its sum; so no rate need be known and the
p-values hold at every n. Conditions: continuous instants, sorted.

- constant rate: Kolmogorov-Smirnov of the instants against the uniform law (Cox and Lewis 1966,
  chapter 6).
- gap law: Kolmogorov-Smirnov of the gaps against the exponential law. The plain p-value is right
  where the mean is given; with the mean taken from the same gaps it needs Lilliefors' (1969), here
  for Stephens' (1974) statistic x = (D - 0.2/m) (sqrt m + 0.26 + 0.5/sqrt m) as min(1, 2.85
  exp(-3.35 x^2)): the Gaussian tail of the limit process, fitted to 490,000 simulated samples of
  50-1000 gaps; from 0 to 12 % too large for p between 0.2 and 0.0001.
- gap spacings: Durbin's (1961) transform, as Lewis (1965) uses it: the ordered gaps' differences,
  each times the number of gaps that reach it, are again an exponential sample; their partial sums
  are uniform. The sharper of the two.
- correlation of gaps: rank correlation at lags 1..k (heavy tails do no harm), mean -1/m and
  standard error 1/sqrt m under exchangeable gaps (Dufour and Roy 1985); several lags together as a
  sum of squares (chi-square, k degrees).
- dispersion: variance over mean of the counts in equal windows; times (windows - 1) a chi-square
  (Fisher).
- longest gap: P(largest of m uniform spacings > share x) <= m (1 - x)^(m - 1) (Fisher 1929,
  Bonferroni's bound).
- phase: Rayleigh's test of the instants modulo a period, over whole periods.
- repeated gaps: of the pairs of gaps that differ by at most NEAR steps of the clock, those that
  differ by at most EQUAL. The difference of two gaps has the density exp(-|x|/mean) / (2 mean), and
  where the law of the gaps is another one but smooth, nearly a constant one so near to 0: the
  number is binomial. Gaps that are repeated exactly fall into EQUAL.
- rate: rate times span is a Gamma(n - 1) variable: exact p-value and interval.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, chdtr, chdtrc, chdtri, gammainc, gammaincc, kolmogorov

FloatArray = NDArray[np.float64]
EQUAL, NEAR = (
    1.5,
    7.5,
)  # steps of the clock between two gaps: equal ones are at most 1 apart once both are rounded


class Finding(NamedTuple):
    """What a test found."""

    statistic: float
    p_value: float


def constant_rate(instants: FloatArray) -> Finding:
    """Largest distance between the share of arrivals and the share of time gone by."""
    inner = (instants[1:-1] - instants[0]) / (instants[-1] - instants[0])
    return _kolmogorov(inner)


def gap_law(gaps: FloatArray, mean: float | None = None) -> Finding:
    """Largest distance between the gaps' law and the exponential one of a given mean, or of
    their own (Lilliefors).
    """
    share = -np.expm1(-np.sort(gaps) / (gaps.mean() if mean is None else mean))
    plain = _kolmogorov(share)
    if mean is not None:
        return plain
    m = gaps.size
    x = max(0.0, plain.statistic - 0.2 / m) * (math.sqrt(m) + 0.26 + 0.5 / math.sqrt(m))
    return Finding(plain.statistic, min(1.0, 2.85 * math.exp(-3.35 * x * x)))


def gap_spacings(gaps: FloatArray) -> Finding:
    """The same of the ordered gaps' weighted differences (Durbin, Lewis): exact with the mean
    unknown.
    """
    m = gaps.size
    weighted = np.diff(np.sort(gaps), prepend=0.0) * np.arange(m, 0, -1)
    share = np.cumsum(weighted)
    return _kolmogorov(share[:-1] / share[-1])


def rank_correlations(values: FloatArray, lags: int) -> FloatArray:
    """Correlation of the ranks of values 1, 2, ..., `lags` places apart; equal values share a
    rank. Zero where all are equal.
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    centred = ranks - ranks.mean()
    total = float(centred @ centred)
    return np.array(
        [float(centred[:-k] @ centred[k:]) / total if total else 0.0 for k in range(1, lags + 1)]
    )


def correlation(gaps: FloatArray, lags: int = 1) -> Finding:
    """Rank correlation of successive gaps; with several lags the one furthest from 0, and the
    p-value of all together.
    """
    found = rank_correlations(gaps, lags)
    z = (found + 1 / gaps.size) * math.sqrt(gaps.size)
    return Finding(float(found[np.argmax(np.abs(z))]), float(chdtrc(lags, z @ z)))


def dispersion(instants: FloatArray, per_window: float) -> Finding:
    """Variance over mean of the counts in windows of so many arrivals on average; both tails."""
    inner = (instants[1:-1] - instants[0]) / (instants[-1] - instants[0])
    windows = max(2, int(inner.size / per_window))
    counts = np.bincount(
        np.minimum((inner * windows).astype(np.int64), windows - 1), minlength=windows
    )
    mean = inner.size / windows
    square = float(((counts - mean) ** 2).sum() / mean)
    tails = float(chdtr(windows - 1, square)), float(chdtrc(windows - 1, square))
    return Finding(square / (windows - 1), 2 * min(tails))


def longest_gap(gaps: FloatArray) -> Finding:
    """The longest gap in mean gaps."""
    m, share = gaps.size, float(gaps.max() / gaps.sum())
    return Finding(share * m, min(1.0, m * (1 - share) ** (m - 1)))


def phase(instants: FloatArray, period: float) -> Finding | None:
    """Length of the mean of the arrivals' places on a clock face of `period` seconds; None over
    less than ten periods.
    """
    since = instants[1:] - instants[0]
    whole = math.floor(since[-1] / period)
    angles = 2 * np.pi * since[since < whole * period] / period
    n = angles.size
    if whole < 10 or n < 20:
        return None
    length = math.hypot(float(np.cos(angles).mean()), float(np.sin(angles).mean()))
    # Greenwood and Durand's form of Rayleigh's p-value, right in the tail
    exponent = math.sqrt(1 + 4 * n + 4 * n * n * (1 - length * length)) - (1 + 2 * n)
    return Finding(length, min(1.0, math.exp(exponent)))


def repeated_gaps(gaps: FloatArray, step: float) -> Finding:
    """Pairs of equal gaps over the number that pairs a little less alike lead to expect; `step`:
    resolution of the gaps, seconds.
    """
    near = NEAR * step / float(gaps.mean())
    equal, alike = pairs_within(gaps, EQUAL * step), pairs_within(gaps, NEAR * step)
    share = math.expm1(-near * EQUAL / NEAR) / math.expm1(-near)
    return Finding(equal / (alike * share) if alike else 0.0, float(bdtrc(equal - 1, alike, share)))


def pairs_within(gaps: FloatArray, tolerance: float) -> int:
    """Pairs of gaps that differ by `tolerance` seconds at most."""
    ordered = np.sort(gaps)
    return int(
        np.sum(
            np.searchsorted(ordered, ordered + tolerance, side="right")
            - np.arange(1, gaps.size + 1)
        )
    )


def rate(gaps: int, span: float, asked: float) -> Finding:
    """Delivered over asked rate, from the number of gaps in a span; both tails."""
    tails = float(gammainc(gaps, asked * span)), float(gammaincc(gaps, asked * span))
    return Finding(gaps / span / asked, min(1.0, 2 * min(tails)))


def rate_interval(gaps: int, span: float, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of the rate."""
    outside = (1 - confidence) / 2
    low, high = (float(chdtri(2 * gaps, p)) / (2 * span) for p in (1 - outside, outside))
    return low, high


def too_exact(runs: list[tuple[int, float]], asked: float) -> Finding:
    """Whether spans meet (number of gaps) / rate more closely than chance does, over several runs
    (Fisher's combination).

    A schedule rescaled to end at n/rate is a Poisson stream given its number and span: nothing
    within a run tells it, only the span does, which is off by about one mean gap where sqrt(n) were
    due. One run of 1,000 has p near 0.02, below 0.001 in 3 of 100; three such runs together are
    below it in 88 of 100, five in all.
    """
    logs = 0.0
    for gaps, span in runs:
        off = abs(asked * span - gaps)
        logs += math.log(
            max(1e-300, float(gammainc(gaps, gaps + off) - gammainc(gaps, max(0.0, gaps - off))))
        )
    return Finding(-2 * logs, float(chdtrc(2 * len(runs), -2 * logs)))


def _kolmogorov(share: FloatArray) -> Finding:
    """Against the uniform law; Stephens' finite-sample form of the limit, within 1 % of the
    exact p-value from n = 20.
    """
    n = share.size
    ordered, steps = np.sort(share), np.arange(n + 1) / n
    distance = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    return Finding(
        distance, float(kolmogorov((math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance))
    )
