"""Tail index alpha of an output-length law: P(N > n) ~ n^-alpha. Small is heavy; at alpha <= 2
there is no variance, and no mean at <= 1.

- From a text: a Pareto part's alpha, the smallest of a mixture; None for every other named law.
- From a probability vector: the slope -d log P(N > n) / d log(n + 1/2), over the last three decades
  of probability, if it is the same (2 %) in both halves of them; else None: no power law. (Exact
  for a rounded Pareto law, whose survival is a power of n + 1/2.) Meant for laws, not for the steps
  of an empirical one.
- From data: Hill's estimator on the k largest, exceedances over the edge u = x + 1/2 of the
  (k+1)-th largest count x (the edge of the k-th itself would leave one exceedance of nothing):
  alpha = d / sum log(x_i / u), d of them not censored. Given u, alpha sum log(X/u) of d exceedances
  is Gamma(d, 1): exact interval for a Pareto tail without censoring, approximate with it. It
  answers for light tails too, then growing as k falls: look at several k.

Source: Hill (1975); the half for whole numbers, Clauset, Shalizi and Newman (2009), Eq. 3.7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv

from kendall.policies.text import SpecError
from kendall.queueing.distributions.text import DistributionText, read_text
from kendall.queueing.distributions.token_distribution import TokenDistribution

DECADES = 1e3  # of probability, over which a slope is taken
SAME_SLOPE = 0.02


@dataclass(frozen=True, slots=True)
class TailIndex:
    """Hill's estimate with its 95 % interval."""

    value: float
    low: float
    high: float
    threshold: float  # u, tokens
    exceedances: int


def tail_index(law: TokenDistribution) -> float | None:
    """Slope of the log survival of a law at its end; None where there is no power law, or less
    than a decade of it.
    """
    positive = np.flatnonzero(law.survival > 0)
    end = int(positive[-1])
    start = int(np.searchsorted(-law.survival, -min(law.survival[end] * DECADES, 1 - 1e-9)))
    middle = round(math.sqrt((start + 0.5) * (end + 0.5)) - 0.5)
    if not start < middle < end or law.survival[start] < 10 * law.survival[end]:
        return None
    first, last = _slope(law, start, middle), _slope(law, middle, end)
    return _slope(law, start, end) if abs(last / first - 1) <= SAME_SLOPE else None


def _slope(law: TokenDistribution, start: int, end: int) -> float:
    return math.log(law.survival[start] / law.survival[end]) / math.log((end + 0.5) / (start + 0.5))


def text_tail_index(text: str) -> float | None:
    """The tail index of a named law before its support is cut; None for a light tail and for an
    empirical law.
    """
    return _named(read_text(text))


def _named(spec: DistributionText) -> float | None:
    if spec.name == "pareto":
        return spec.numbers[0]
    indices = [index for index in map(_named, spec.parts) if index is not None]
    return min(indices) if indices else None


def hill(
    counts: npt.ArrayLike, largest: int | None = None, censored: npt.ArrayLike | None = None
) -> TailIndex:
    """Hill's estimator on the `largest` counts (default: the square root of their number). Raises
    SpecError.

    `censored[i]`: request i was clipped at counts[i], its length is at least that. Counts equal to
    the threshold's are not used, so that ties leave fewer than `largest`.
    """
    values = np.asarray(counts, dtype=float)
    clipped = (
        np.zeros(values.shape, dtype=bool) if censored is None else np.asarray(censored, dtype=bool)
    )
    rank = math.ceil(math.sqrt(values.size)) if largest is None else largest
    if not 2 <= rank < values.size or clipped.shape != values.shape:
        raise SpecError(
            f"got {values.size} counts, {clipped.size} marks and {rank} to use; expected 2 to use "
            "at least, and a mark each"
        )
    threshold = float(np.sort(values)[-rank - 1]) + 0.5
    above = values > threshold
    events = int(np.count_nonzero(above & ~clipped))
    if events < 2:
        raise SpecError(
            f"got {events} counts above {threshold} that were not clipped; expected two at least: "
            "use more, or raise the limit"
        )
    edges = np.where(clipped, values - 0.5, values)  # "at least n" = more than the lower edge of n
    total = float(np.log(edges[above] / threshold).sum())
    low, high = (float(gammaincinv(events, level)) / total for level in (0.025, 0.975))
    return TailIndex(events / total, low, high, threshold, events)
