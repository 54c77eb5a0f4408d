"""M/G/1 under an order of service with predictions: mean sojourn time, and by size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.soap.analysis import mean_sojourns
from kendall.queueing.models.soap.orders import Jobs, Order
from kendall.queueing.models.soap.resuming import Resuming, ResumingAnalysis
from kendall.queueing.predictors.laws import ExactPrediction, Predictor
from kendall.queueing.predictors.sizes import Atoms, Residual, SizeGrid, SizeLaw

_FULL = 0.9999  # load for which the cells are cut at most
CELLS = 150  # of a continuous law, and of its predictions, on the coarser of the two grids
EXACT = ExactPrediction()


@dataclass(frozen=True, eq=False)
class OrderedQueue:
    """The steady state; seconds. `by_size` [n] is E[T | X = sizes[i]]; `error`: what the last
    refinement of the cells changed of `sojourn` (0 where sizes and predictions are atoms).
    """

    load: float
    sojourn: float
    service: float  # mean total service, predictions on the server included
    sizes: Vector
    by_size: Vector
    error: float = 0.0
    served: Vector | None = None  # [n] mean total service by size, where interruptions add to it

    @property
    def delay(self) -> float:
        """Mean time in the system outside of service, interruptions included."""
        return self.sojourn - self.service

    def slowdown(self) -> Vector:
        """E[T | X] / X at each of the sizes."""
        return np.asarray(self.by_size / self.sizes)


def solve_order(
    order: Order,
    sizes: SizeLaw,
    arrival_rate: float,
    predictor: Predictor = EXACT,
    cells: int = CELLS,
) -> OrderedQueue:
    """The queue of `arrival_rate` jobs/s on one server. Raises UnstableQueueError.

    Relative error of the mean: 1e-12 for atoms; about 1e-5 for continuous laws, from cells and
    twice as many (Richardson), 1e-4 at load 0.99; `by_size` is of the finer grid, without it.
    """
    coarse = _solve(order, sizes, arrival_rate, predictor, cells)
    if coarse.error == 0:
        return coarse
    fine = _solve(order, sizes, arrival_rate, predictor, 2 * cells)
    change = (fine.sojourn - coarse.sojourn) / 3
    return replace(fine, sojourn=fine.sojourn + change, error=abs(change))


def _solve(
    order: Order, sizes: SizeLaw, arrival_rate: float, predictor: Predictor, cells: int
) -> OrderedQueue:
    grid = SizeGrid(cells, order.boundaries(predictor), min(arrival_rate * sizes.mean, _FULL))
    atoms = sizes.cells(grid)
    jobs = order.jobs(atoms, predictor, grid)
    exact = isinstance(sizes, Atoms) and atoms is sizes and jobs.exact
    if isinstance(order, Resuming):
        return _solve_resuming(order, jobs, arrival_rate, atoms.residual, exact=exact)
    means = mean_sojourns(jobs, arrival_rate, atoms.residual)
    if order.ties_matter and not (exact or predictor.few_values):
        last_come = replace(jobs, ranks=replace(jobs.ranks, last_come=0))
        means = (means + mean_sojourns(last_come, arrival_rate, atoms.residual)) / 2
    weights = jobs.joint.sum(axis=0)
    service = float((jobs.joint * np.add.outer(jobs.before, jobs.sizes)).sum())
    sojourn = float((jobs.joint * means).sum())
    by_size = (jobs.joint * means).sum(axis=0) / np.where(weights > 0, weights, 1.0)
    return OrderedQueue(
        arrival_rate * service, sojourn, service, jobs.sizes, by_size, 0.0 if exact else 1.0
    )


def _solve_resuming(
    order: Resuming, jobs: Jobs, arrival_rate: float, residual: Residual, *, exact: bool
) -> OrderedQueue:
    """An approximation, with what interruptions add as a part of the service."""
    analysis = ResumingAnalysis(jobs, arrival_rate, residual, cost=order.cost)
    means, weights = analysis.sojourns(), jobs.joint.sum(axis=0)
    share = jobs.joint / np.where(weights > 0, weights, 1.0)
    return OrderedQueue(
        analysis.load,
        float((jobs.joint * means).sum()),
        analysis.load / arrival_rate,
        jobs.sizes,
        (share * means).sum(axis=0),
        0.0 if exact else 1.0,
        (share * analysis.services).sum(axis=0),
    )


def price_of_misprediction(
    order: Order, sizes: SizeLaw, arrival_rate: float, predictor: Predictor
) -> float:
    """Mean sojourn time with this predictor over that with exact predictions (Mitzenmacher 2020,
    there for the time before service under SPJF).
    """
    predicted = solve_order(order, sizes, arrival_rate, predictor)
    return predicted.sojourn / solve_order(order, sizes, arrival_rate).sojourn
