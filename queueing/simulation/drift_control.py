"""The mean delay of batches without a bound from a simulated run, by the drifts of the number that
waits: moment closure, ten times as quiet as the run's own mean.

    E[B] (1 - lam s) = lam E[kappa(B)] + p0            kappa(b) = E[H | b] - s b
    E[B^2] (1 - lam^2 q) = lam E[H] + lam^2 E[r(B)] + p0    r(b) = E[H^2 | b] - q b^2
    E[Wq] = (E[B^2] - E[B]) / (2 lam E[B])

B the size of a batch, s the seconds that one more request adds to a large batch, q = s^2 times
1 + cv^2, p0 the share of batches that an idle server begins. All three hold exactly
(queueing.models.batches.batch_chain). E[kappa(B)], E[r(B)] / E[B] and p0 are the run's: kappa and
r / b grow as the longest of b lengths does, so that they hardly vary while B does. Standard error:
jackknife over 20 parts of the run. Conditions: one server, Poisson arrivals of single requests,
order of arrival, nobody leaves, lam^2 q < 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kendall.policies.immediate import Dynamic, Elastic
from kendall.policies.registry import is_first_come
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Quantiles

if TYPE_CHECKING:
    from kendall.queueing.simulation.fast import SimulatedRun

_PARTS = 20
_SIZES = 32  # at which the moments of a batch are computed, others between them
_FEWEST = 3 * _PARTS  # batches


def has_drifts(model: Queue) -> bool:
    """Whether they give the mean delay."""
    return (
        isinstance(model.policy, Dynamic | Elastic)
        and is_first_come(model.policy)
        and model.bound is None
        and (model.engine.servers, model.arrivals.scv) == (1, 1.0)
        and model.arrivals.process is None
        and model.requests.sequences is None
        and model.lossless
        and not model.engine.disaggregated
        and model.requests.tail_index > 2
    )


def means_by_drifts(
    run: SimulatedRun, model: Queue, arrival_rate: float
) -> tuple[Quantiles, Mean] | None:
    """Mean delay and mean size of a batch with their standard errors; None where the run has too
    few batches. `run`: without its warm-up.
    """
    seconds = 1 / model.batch_time.largest_stable_rate(None)
    growth = arrival_rate**2 * (1 + model.engine.law.cv**2) * seconds**2
    ids = run.batch_id
    first = np.flatnonzero(np.diff(ids)) + 1  # the run may begin amid a batch, and end in one
    if growth >= 1 or len(first) < _FEWEST + 1:
        return None
    begun, free = run.dispatched_at[first], run.server_free_at[first]
    sizes = run.batch_size[first][:-1].astype(float)
    idle = (begun[1:] > free[:-1]).astype(float)
    kappa, rest = _moments(model, sizes, seconds)
    rows = np.array([sizes, kappa, rest, idle])
    parts = np.array([part.mean(axis=1) for part in np.array_split(rows, _PARTS, axis=1)])
    counts = np.array([part.shape[1] for part in np.array_split(rows, _PARTS, axis=1)])
    total = counts @ parts

    def means_of(sums: Vector, batches: float) -> tuple[float, float]:
        size, kappa, rest, idle = sums / batches
        mean = (arrival_rate * kappa + idle) / (1 - arrival_rate * seconds)
        service = (mean - idle) / arrival_rate
        square = arrival_rate * service + arrival_rate**2 * rest / size * mean + idle
        return float((square / (1 - growth) - mean) / (2 * arrival_rate * mean)), float(mean)

    batches = int(counts.sum())
    without = np.array(
        [
            means_of(total - count * part, batches - count)
            for part, count in zip(parts, counts, strict=True)
        ]
    )
    (delay, size), spread = means_of(total, batches), ((without - without.mean(axis=0)) ** 2).sum(0)
    error, of_size = np.sqrt((_PARTS - 1) / _PARTS * spread).tolist()
    return Quantiles(delay, standard_error=error), Mean(size, of_size)


def _moments(model: Queue, sizes: Vector, seconds: float) -> tuple[Vector, Vector]:
    """Of each batch kappa and r of its size."""
    time, square = model.batch_time, (1 + model.engine.law.cv**2) * seconds**2
    low, high = sizes.min(), sizes.max()
    grid = np.unique(np.rint(np.geomspace(low, high, _SIZES)))
    kappa = np.array([time.mean(int(b)) - seconds * b for b in grid])
    rest = np.array([time.second_moment(int(b)) / b - square * b for b in grid])
    place, known = np.log(sizes), np.log(grid)
    return np.interp(place, known, kappa), np.interp(place, known, rest) * sizes
