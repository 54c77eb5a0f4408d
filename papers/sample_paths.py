"""An order with predictions on one server or several, simulated: independent replications of
compiled sample paths, bit-reproducible under a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.soap.orders import DrawnJobs, LeastAttainedRanks, Order
from kendall.queueing.models.soap.queue import EXACT
from kendall.queueing.models.soap.ranks import Ranks
from kendall.queueing.predictors.laws import Predictor
from kendall.queueing.predictors.sizes import NO_RESIDUAL, Atoms, Residual, SizeLaw
from kendall.queueing.simulation.orders.kernels import mean_work_ahead, run_ranks
from papers.server_kernels import run_least_attained, run_ranks_on_servers

WARM_UP = 0.1  # share of each replication
LAST = 0.05  # share of it whose jobs are not counted: behind them no others arrive
SLACK = 0.002  # of the mean size: see kernels
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

    jobs: int = 50_000
    count: int = 32
    seed: int | tuple[int, ...] = 0


RUNS = Replications()


def simulate_order(
    order: Order,
    sizes: SizeLaw,
    arrival_rate: float,
    predictor: Predictor = EXACT,
    runs: Replications = RUNS,
    *,
    servers: int = 1,
) -> SimulatedSojourn:
    """Mean sojourn time, the first tenth and the last twentieth of each run left out.

    Control variates: the service time, and the unfinished work that arrivals find at one server as
    fast as all `servers` together, whose mean is known (Pollaczek and Khinchine) whatever the order
    of service. Raises SpecError: stalls.
    """
    residual = sizes.residual if isinstance(sizes, Atoms) else NO_RESIDUAL
    streams = np.random.SeedSequence(runs.seed).spawn(runs.count)
    first, last = int(WARM_UP * runs.jobs), int((1 - LAST) * runs.jobs)
    found = []
    for stream in streams:
        rng = np.random.default_rng(stream)
        arrived_at = np.cumsum(rng.exponential(1 / arrival_rate, runs.jobs))
        drawn_sizes = sizes.sample(rng, runs.jobs)
        drawn = order.draw(rng, drawn_sizes, predictor)
        if residual != NO_RESIDUAL:
            factors = _residuals(rng, residual, runs.jobs)
            drawn, drawn_sizes = stretched(drawn, factors), drawn_sizes * factors
        mean = float(sojourns(order, arrived_at, drawn, servers)[first:last].mean())
        ahead = mean_work_ahead(arrived_at, drawn_sizes / servers, first, last)
        found.append((mean, ahead, float(drawn_sizes[first:last].mean())))
    load = arrival_rate * sizes.mean / servers
    work = arrival_rate * sizes.second_moment / servers**2 / (2 * (1 - load))
    return controlled(np.array(found), (work, sizes.mean), runs.count * (last - first))


def _residuals(rng: np.random.Generator, residual: Residual, count: int) -> Vector:
    """Gamma, mean 1."""
    if residual.stalls:
        raise SpecError("got stalls; expected sizes without them in a simulation of an order")
    scv = residual.factor - 1
    return rng.gamma(1 / scv, scv, count)


def stretched(drawn: DrawnJobs, factors: Vector) -> DrawnJobs:
    """The same jobs with service times multiplied; ranks follow the ages before that."""
    ranks, column = drawn.ranks, factors[:, None]
    return DrawnJobs(
        drawn.totals * factors,
        Ranks(
            ranks.start * column, ranks.level, ranks.value, ranks.slope / column, ranks.last_come
        ),
        drawn.resume,
    )


def controlled(found: Vector, known: tuple[float, ...], jobs: int) -> SimulatedSojourn:
    """From the mean sojourn time and the control variates of each run: the regression of the first
    on the others, at their `known` means.
    """
    sojourn, deviations = found[:, 0], found[:, 1:] - known
    design = np.column_stack([np.ones(len(found)), deviations])
    weights = np.linalg.pinv(design)
    estimate = weights @ sojourn
    residual = sojourn - design @ estimate
    scatter = float(residual @ residual) / (len(found) - design.shape[1])
    error = math.sqrt(scatter * float(weights[0] @ weights[0]))
    return SimulatedSojourn(float(estimate[0]), error, jobs)


def sojourns(order: Order, arrived_at: Vector, drawn: DrawnJobs, servers: int = 1) -> Vector:
    """Sojourn time of each job, seconds."""
    if isinstance(order, LeastAttainedRanks):
        return np.asarray(run_least_attained(arrived_at, drawn.totals, servers) - arrived_at)
    rows = rank_rows(drawn)
    if servers == 1:
        return np.asarray(run_ranks(arrived_at, drawn.totals, rows, drawn.resume) - arrived_at)
    if drawn.resume:
        raise SpecError(f"got {servers} servers and a cost of resuming; expected one server")
    departures = run_ranks_on_servers(
        arrived_at, drawn.totals, rows, servers, can_rise(drawn.ranks)
    )
    return np.asarray(departures - arrived_at)


def rank_rows(drawn: DrawnJobs) -> tuple[Vector | float, ...]:
    """The ranks of a sample as the kernels take them."""
    ranks = drawn.ranks
    last_come = _NO_CLASS if ranks.last_come is None else ranks.last_come
    slack = SLACK * float(drawn.totals.mean())
    arrays = (ranks.start, ranks.level, ranks.value, ranks.slope)
    return (*(np.ascontiguousarray(array) for array in arrays), float(last_come), slack)


def can_rise(ranks: Ranks) -> bool:
    """Whether the rank of a job in service can rise (False only where it cannot)."""
    later = np.isfinite(ranks.start[:, 1:]) & (np.diff(ranks.level, axis=1) >= 0)
    return bool((ranks.slope > 0).any() or later.any())
