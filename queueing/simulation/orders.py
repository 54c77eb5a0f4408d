"""One server under an order with predictions, simulated: independent replications of compiled
sample paths, bit-reproducible under a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from queueing.distributions.token_distribution import Vector
from queueing.models.soap.orders import DrawnJobs, LeastAttained, Order
from queueing.models.soap.predictors import Predictor
from queueing.models.soap.queue import EXACT
from queueing.models.soap.sizes import SizeLaw
from queueing.simulation.order_kernels import run_least_attained, run_ranks

WARM_UP = 0.1  # share of each replication
SLACK = 0.002  # of the mean size: see order_kernels
_NO_CLASS = -2


@dataclass(frozen=True)
class SimulatedSojourn:
    """Mean over replications, its standard error (seconds), and the jobs counted."""

    mean: float
    standard_error: float
    jobs: int


@dataclass(frozen=True)
class Replications:
    """`count` runs of `jobs` arrivals each, whose streams follow from `seed`."""

    jobs: int = 200_000
    count: int = 8
    seed: int | tuple[int, ...] = 0


RUNS = Replications()


def simulate_order(
    order: Order,
    sizes: SizeLaw,
    arrival_rate: float,
    predictor: Predictor = EXACT,
    runs: Replications = RUNS,
) -> SimulatedSojourn:
    """Mean sojourn time, the first tenth of each run left out."""
    streams, jobs = np.random.SeedSequence(runs.seed).spawn(runs.count), runs.jobs
    means = []
    for stream in streams:
        rng = np.random.default_rng(stream)
        arrived_at = np.cumsum(rng.exponential(1 / arrival_rate, jobs))
        drawn = order.draw(rng, sizes.sample(rng, jobs), predictor)
        means.append(float(sojourns(order, arrived_at, drawn)[int(WARM_UP * jobs) :].mean()))
    error = float(np.std(means, ddof=1)) / math.sqrt(runs.count)
    counted = runs.count * (jobs - int(WARM_UP * jobs))
    return SimulatedSojourn(float(np.mean(means)), error, counted)


def sojourns(order: Order, arrived_at: Vector, drawn: DrawnJobs) -> Vector:
    """Sojourn time of each job, seconds."""
    if isinstance(order, LeastAttained):
        return np.asarray(run_least_attained(arrived_at, drawn.totals) - arrived_at)
    ranks = drawn.ranks
    last_come = _NO_CLASS if ranks.last_come is None else ranks.last_come
    slack = SLACK * float(drawn.totals.mean())
    arrays = (ranks.start, ranks.level, ranks.value, ranks.slope)
    rows = tuple(np.ascontiguousarray(array) for array in arrays)
    departures = run_ranks(arrived_at, drawn.totals, (*rows, float(last_come), slack))
    return np.asarray(departures - arrived_at)
