"""The arrival rate, from the arrivals of a window whose older part counts less.

    w(t) = 2^-((now - t) / half_life),    rate = sum_i w(t_i) / int w
    m = (sum w)^2 / sum w^2               arrivals that tell as much

The interval is the exact one of a Poisson count of m (Garwood 1936), gamma quantiles of m and m +
1, with m divided by the index of dispersion of the counts where this is above 1: Var = D x
Poisson's. D comes from the counts of `BLOCKS` equal parts of the window, so it holds what is
correlated within a part too, and is widened for being judged from 20 numbers.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import chdtri, gammaincinv, stdtrit

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from kendall.queueing.estimation.window.snapshot import Snapshot

BLOCKS = 20
FEWEST_PER_BLOCK = 5  # arrivals, else fewer blocks
FEWEST_ARRIVALS = 10
SILENCE, BEYOND_LARGEST = 20.0, 3.0  # mean gaps (one Poisson gap in 5e8 is longer), largest gaps


def while_requests_came(seen: Snapshot) -> Snapshot:
    """The window from its first arrival to its last one, where so long a silence as before the
    first, or the present one, is no gap of these arrivals: they have begun, or stopped.

    A rate that falls with the silence would be compared with the delays of the requests beside it.
    """
    if seen.arrivals.size < FEWEST_ARRIVALS:
        return seen
    gaps = np.diff(seen.arrivals)
    longest = max(SILENCE * float(gaps.mean()), BEYOND_LARGEST * float(gaps.max()))
    first, last = float(seen.arrivals[0]), float(seen.arrivals[-1])
    seen = seen.since(first) if first - seen.start > longest else seen
    return seen.ending(last) if seen.now - last > longest else seen


def arrival_rate(
    instants: Vector, start: float, now: float, *, half_life: float = math.inf
) -> Estimate:
    """Arrivals per second over (start, now], with its interval; instants in seconds, ascending."""
    length = now - start
    if length <= 0:
        return UNKNOWN
    within = instants[(instants > start) & (instants <= now)]
    if not within.size:
        return Estimate(0.0, 0.0, float(-math.log(0.025)) / _integral(length, half_life), 0.0)
    weights = np.exp2((within - now) / half_life)
    value = float(weights.sum()) / _integral(length, half_life)
    effective_n = float(weights.sum() ** 2 / (weights @ weights))
    count = effective_n / inflation(within, start, now)
    low, high = gammaincinv(count, 0.025) / count, gammaincinv(count + 1, 0.975) / count
    return Estimate(value, value * float(low), value * float(high), count)


def dispersion(instants: Vector, start: float, now: float, blocks: int = BLOCKS) -> Estimate:
    """Index of dispersion of counts, variance / mean, over equal parts of the window; 1 for
    Poisson arrivals.
    """
    parts = min(blocks, instants.size // FEWEST_PER_BLOCK)
    if parts < 2:
        return UNKNOWN
    counts = np.histogram(instants, np.linspace(start, now, parts + 1))[0]
    degrees = parts - 1
    value = float(counts.var(ddof=1) / counts.mean()) if counts.any() else math.nan
    return Estimate(
        value,
        value * degrees / float(chdtri(degrees, 0.025)),
        value * degrees / float(chdtri(degrees, 0.975)),
        float(degrees),
    )


def inflation(instants: Vector, start: float, now: float) -> float:
    """By how much the variance of the rate exceeds a Poisson count's: at least 1."""
    found = dispersion(instants, start, now)
    if not found.effective_n:
        return 1.0
    return max(1.0, found.value * (float(stdtrit(found.effective_n, 0.975)) / NORMAL) ** 2)


def _integral(length: float, half_life: float) -> float:
    """Integral of the weights over a window of that length, seconds."""
    if math.isinf(half_life):
        return length
    decay = math.log(2) / half_life
    return -math.expm1(-decay * length) / decay
