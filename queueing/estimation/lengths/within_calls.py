"""How alike the output lengths of one call are: their intraclass correlation, by components of
dispersion.

    r = 1 - E |N_1 - N_2|^p of one call / E |N - N'|^p of two calls

p = 2 compares variances (Fisher 1925), p = 1 Gini's mean differences. Where the lengths of a call
are equal with probability r and else independent, as the models have it
(queueing.distributions.call_lengths), both are r. Where they are alike in another way no r says
all of it: p = 2 is the one under which the total of a call has its variance, which is what single
requests and slots depend on; p = 1 the one under which the longest of two has its mean, as batches
do.

Of answers that left whole, each cut at the smallest limit of the gateway that cut one: so an epoch
with another limit says the same. Intervals: delete-a-group jackknife over the calls in their order;
where all of m calls have equal lengths, 3 / m beyond it (the rule of three).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.summaries import WithinCalls
from kendall.queueing.estimation.window.snapshot import CENSORED, WITHOUT_LENGTH, Snapshot

Ints = npt.NDArray[np.int64]

FEWEST = 20  # calls of which two answers or more have left
GROUPS = 10


def significant(found: Estimate) -> float:
    """r, or 0 where chance explains it."""
    return found.value if found.known and found.low > 0 else 0.0


def alike_within_calls(seen: Snapshot) -> WithinCalls:
    """Of the answers dispatched in the window, as their lengths are."""
    kept = (
        (seen.column("dispatched_at") >= seen.carried_from)
        & (seen.column("ending") < WITHOUT_LENGTH)
        & np.isfinite(seen.column("released_at"))
    )
    if seen.sequences is None or not kept.any():
        return WithinCalls()
    lengths = seen.column("output_tokens")[kept]
    cut = lengths[seen.column("ending")[kept] == CENSORED]
    lengths = np.minimum(lengths, cut.min(initial=math.inf))
    _, calls = np.unique(seen.column("arrived_at")[kept], return_inverse=True)
    if np.count_nonzero(np.bincount(calls) > 1) < FEWEST:
        return WithinCalls()
    return WithinCalls(
        longest=_correlation(calls, lengths, 1), total=_correlation(calls, lengths, 2)
    )


def _correlation(calls: Ints, lengths: Vector, power: int) -> Estimate:
    """`calls[i]`: number of the call of the i-th answer, in order of arrival."""
    lengths = lengths - lengths.mean()
    inner, order = np.lexsort((lengths, calls)), np.argsort(lengths, kind="stable")
    sizes = np.bincount(calls)
    apart = _of_pairs(lengths[inner], calls[inner], power)
    several = np.cumsum(sizes > 1) - 1  # the groups hold as many calls that tell something
    group = np.where(sizes > 1, several * GROUPS // (several[-1] + 1), GROUPS)

    def without(left_out: int) -> float:
        kept = group != left_out
        values = lengths[order][kept[calls[order]]]
        total = float(_of_pairs(values, np.zeros(values.size, dtype=np.int64), power)[0])
        pairs, count = sizes[kept] * (sizes[kept] - 1) / 2, values.size
        within, number = float(apart[kept].sum()), float(pairs.sum())
        across = (total - within) / (count * (count - 1) / 2 - number)
        return 1 - within / number / across if across > 0 else math.nan

    value = without(-1)
    parts = np.array([without(each) for each in range(GROUPS)])
    if not np.all(np.isfinite(parts)):
        return UNKNOWN
    error = math.sqrt((GROUPS - 1) * float(np.var(parts)))
    half = error * float(stdtrit(GROUPS - 1, 0.975))
    calls_seen = int(np.count_nonzero(sizes > 1))
    if value == 1:
        half = 3 / calls_seen
    return Estimate(min(1.0, max(0.0, value)), value - half, min(1.0, value + half), calls_seen)


def _of_pairs(values: Vector, groups: Ints, power: int) -> Vector:
    """For each group the sum of |difference|^power over its pairs; values ordered within groups
    that follow each other.
    """
    sizes = np.bincount(groups)
    if power == 2:
        squares, sums = (np.bincount(groups, of) for of in (values**2, values))
        return np.asarray(sizes * squares - sums**2)
    places = np.arange(values.size) - (np.cumsum(sizes) - sizes)[groups]
    return np.asarray(np.bincount(groups, values * (2 * places - sizes[groups] + 1)), dtype=float)
