"""The law of lengths of which only a histogram's buckets and the sum are known.

    p(n) = c_j f(n) e^{theta n} / Z_j        for lower_j < n <= upper_j, c_j the share of bucket j

log f is piecewise linear through the mean densities of neighbouring buckets at their middles; f is
tilted by the one theta with which the mean is the known one. Shares of the buckets and the mean are
therefore exact; how lengths lie within a bucket is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector

BEYOND = 2.0  # where the last bucket that has no end is taken to end, times its lower end
STEEPEST = 500.0  # theta times the longest length


def law_of_buckets(uppers: Vector, counts: Vector, mean: float) -> TokenDistribution | None:
    """`counts[j]` lengths are at most `uppers[j]`, ascending; `mean`: of them all, which is moved
    to what the buckets allow. None without a length.

    >>> law = law_of_buckets(np.array([10.0, 20.0, np.inf]), np.array([1.0, 4.0, 4.0]), 12.0)
    >>> round(law.mean, 6), round(float(law.pmf[:11].sum()), 6)
    (12.0, 0.25)
    """
    within = np.diff(counts, prepend=0.0)
    if not within.sum() > 0:
        return None
    lows = np.floor(np.concatenate([[0.0], uppers[:-1]])).astype(int)
    ends = np.where(np.isfinite(uppers), uppers, np.maximum(2.0, BEYOND * lows))
    used = [
        (low, int(end), share)
        for low, end, share in zip(lows, ends, within / within.sum(), strict=True)
        if share > 0 and int(end) > low
    ]
    longest = max(end for _, end, _ in used)
    lengths = np.arange(longest + 1.0)
    shape = _log_density(used, lengths)

    def law(theta: float) -> Vector:
        pmf = np.zeros(longest + 1)
        logs = shape + theta * lengths / longest
        for low, end, share in used:
            own = logs[low + 1 : end + 1]
            weights = np.exp(own - own.max())
            pmf[low + 1 : end + 1] = share * weights / weights.sum()
        return np.asarray(pmf / pmf.sum())

    def excess(theta: float) -> float:
        return float(law(theta) @ lengths) - mean

    if not math.isfinite(mean):
        return TokenDistribution(law(0.0))
    if excess(-STEEPEST) >= 0 or excess(STEEPEST) <= 0:
        return TokenDistribution(law(math.copysign(STEEPEST, -excess(0.0))))
    return TokenDistribution(law(float(brentq(excess, -STEEPEST, STEEPEST, xtol=1e-10))))


def _log_density(used: Sequence[tuple[int, int, float]], lengths: Vector) -> Vector:
    """log f; at both ends with the slope beside it."""
    middles = np.array([(low + 1 + end) / 2 for low, end, _ in used])
    densities = np.log([share / (end - low) for low, end, share in used])
    if len(used) == 1:
        return np.zeros(lengths.size)
    slopes = np.diff(densities) / np.diff(middles)
    below = densities[0] + slopes[0] * (0.0 - middles[0])
    above = densities[-1] + slopes[-1] * (lengths[-1] - middles[-1])
    knots = np.concatenate([[0.0], middles, [max(lengths[-1], middles[-1] + 1)]])
    values = np.concatenate([[below], densities, [above]])
    return np.asarray(np.interp(lengths, knots, values))
