"""The mean of a delay, with an interval whose width does not depend on whether the run was lucky.

Batch means alone fail short runs: one without a long busy period has a low mean AND a low variance,
so where their interval is narrow it is wrong. Of M/M/1 runs of 600 requests at utilisation 0.5,
1,000 at 0.7 and 6,000 at 0.9 (true 95 % half widths: 43, 49 and 53 % of the mean) they called 4, 5
and 2 % good to +-25 %; of those intervals 53, 31 and 10 % covered the mean.
Three things are done about it, and the widest interval counts:

1. With `theory` (queueing.measurement.delay_variance: arrivals and service times, or a model) the
variance of the mean is known without
   its luck, r = z sigma / (w sqrt(n)) of the mean. The mean delay of a run of low utilisation is
   still low, so the half width is 1.2 r (1 + r) of the mean.
2. Without, the run's own variance is estimated on every scale: from 20, 40, 80, .. batches as long
as their means correlate
   less than 0.6 (queueing.measurement.batch_means corrects for that), and from the correlation c of
   delays L requests apart, for the largest L = 1, 2, 4, .. with c >= 0.5. Reflected Brownian
   motion, the limit of a busy queue, forgets over

       m = L (4 - 3 sqrt(1 - c)) / (1 - c)    requests

   (fit to its autocorrelation, Abate and Whitt 1987, within 8 % for c >= 0.5). The widest of them
   is r of the mean. That r grows with the mean itself: in heavy traffic it is proportional to it.
   So the means w that the run does not exclude satisfy |w - mean| <= q r w^2 / mean, as in Wilson's
   interval of a share, and the upper end is mean (1 + u),

       u = (1 - sqrt(1 - 4 q r)) / (2 q r) - 1,    q = 1.15

   which is the half width, +-u. From q r = 1/4 on no mean is excluded; the half width then
   continues as 4 q r and is too wide.
3. The interval of 20 batch means is a lower bound in either case: it sees what theory does not,
such as an engine whose speed drifts.

1.2 and 1.15 were chosen by simulation, so that nine of ten intervals cover in every decile of the
printed half width (docs/why/intervals.md). Too short: wider than +-25 % of the mean, or fewer than
100 memories.
"""

from __future__ import annotations

import dataclasses
import math

from kendall.queueing.measurement.batch_means import (
    BATCHES,
    LEAST_EFFECTIVE,
    TOO_WIDE,
    FloatArray,
    Interval,
    batch_means_interval,
    inner,
    normal,
    student,
    variance_of_mean,
)
from kendall.queueing.measurement.delay_variance import AsymptoticVariance

WITH_THEORY, WITHOUT_THEORY = 1.2, 1.15
MOST_CORRELATED = 0.6  # batch means of a scale that is used
HALF = 0.5  # correlation of delays down to which a distance is used
NO_BOUND = 0.25  # of q r


def mean_interval(
    values: FloatArray, confidence: float = 0.95, theory: AsymptoticVariance | None = None
) -> Interval:
    """Mean of a stationary sequence of durations, in its order. Of values below 0 the interval
    is that of batch means.
    """
    plain = batch_means_interval(values, confidence)
    if values.size < 2 or not plain.mean > 0 or values.min() < 0:
        return plain
    if theory is not None:
        relative = normal(confidence) * math.sqrt(theory.relative / plain.n)
        half_width = max(plain.half_width, WITH_THEORY * relative * (1 + relative) * plain.mean)
        effective_n = min(plain.effective_n, plain.n / theory.memory)
        return dataclasses.replace(plain, half_width=half_width, effective_n=effective_n)
    widest = widest_interval(values, confidence)
    return dataclasses.replace(widest, half_width=widened(widest.relative) * widest.mean)


def run_factor(relative: float, effective_n: float) -> float:
    """How many times as long a run would be long enough to print its mean, from what it showed;
    1 or more.
    """
    return max(1.0, (plug_in(relative) / plug_in(TOO_WIDE)) ** 2, LEAST_EFFECTIVE / effective_n)


def plug_in(relative: float) -> float:
    """The half width over the mean by the run's variance alone, in a run that prints `relative`,
    all factors included.
    """
    return (relative / (1 + relative) ** 2 if relative < 1 else relative / 4) / WITHOUT_THEORY


def widest_interval(values: FloatArray, confidence: float = 0.95) -> Interval:
    """Mean of a stationary sequence with the widest interval of all scales, not widened for what
    a lucky run underestimates.
    """
    plain = batch_means_interval(values, confidence)
    shifted = values - values[0]
    variance, half_width = 0.0, plain.half_width
    parts = min(BATCHES, plain.n)
    while parts <= plain.n:
        found, correlation = variance_of_mean(shifted, parts)
        if parts == BATCHES or correlation <= MOST_CORRELATED:
            variance = max(variance, found)
            half_width = max(half_width, student(parts - 1, confidence) * math.sqrt(found))
        parts *= 2
    local = correlation_variance(shifted)
    variance = max(variance, local)
    half_width = max(half_width, normal(confidence) * math.sqrt(local))
    effective_n = plain.effective_n
    if variance:
        effective_n = min(float(shifted.var(ddof=1)) / variance, float(plain.n))
    return dataclasses.replace(plain, half_width=half_width, effective_n=effective_n)


def correlation_variance(values: FloatArray) -> float:
    """Of the mean, from the largest distance over which two delays correlate by a half; 0 where
    not even neighbours do.
    """
    centred = values - values.mean()
    total, memory, distance = inner(centred, centred) / values.size, 0.0, 1
    while total and 4 * distance < values.size:
        correlation = (
            inner(centred[distance:], centred[:-distance]) / (values.size - distance) / total
        )
        if not HALF <= correlation < 1:
            break
        memory = distance * (4 - 3 * math.sqrt(1 - correlation)) / (1 - correlation)
        distance *= 2
    return memory * total / values.size


def widened(relative: float) -> float:
    """The half width over the mean that covers a mean which was underestimated, from that by the
    run's variance alone.
    """
    given = WITHOUT_THEORY * relative
    if given >= NO_BOUND:
        return 4 * given
    return (1 - math.sqrt(1 - 4 * given)) / (2 * given) - 1 if given > 1e-6 else given
