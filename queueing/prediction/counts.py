"""How many requests wait, and how many there are, by formulas.

Where later arrivals do not change a request's wait, and requests leave in their order of arrival,
those that it leaves behind are the Poisson arrivals during its own time, and so many there are at
any instant (distributional Little's law): in the queue, also of batches, by its delay, and in a
system of one request at a time by its sojourn. One server alone is empty while it is not in use.

Source: Keilson and Servi (1988); docs/why/theory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import pdtr

from kendall.policies.immediate import Single
from kendall.policies.registry import is_first_come
from kendall.queueing.distributions.lattice import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.batch_delay import delay_law
from kendall.queueing.models.mg1 import laws
from kendall.queueing.prediction.solvers.first_come import BATCHES, SINGLE
from kendall.queueing.queue import Queue
from kendall.queueing.result import Count, Levels, Prediction

_POINTS = 2048  # of a law: coarser ones are of the same Poisson numbers to 1e-4


def counts(model: Queue, arrival_rate: float, found: Prediction) -> Mapping[str, Count]:
    """By the names of `Prediction`, of a formula's answer; what a simulation saw stays."""
    by_formula = found.method in ("exact", "approximation")
    if found.counts or not by_formula or model.one_of_several is not None:
        return found.counts
    known = {}
    if _is_one_server(model) and found.utilisation is not None:
        known["number_in_system"] = Count(1 - found.utilisation)
    exact = found.method == "exact" and is_first_come(model.policy)
    if exact and not model.requests.endless:
        for name, (instants, masses) in _laws(model, arrival_rate).items():
            known[name] = arrivals_during(arrival_rate, instants, masses, model.levels)
    return known


def arrivals_during(rate: float, instants: Vector, masses: Vector, levels: Levels) -> Count:
    """Of Poisson arrivals in a time that is `instants` seconds with chances `masses`."""
    parts = np.array_split(np.arange(masses.size), min(_POINTS, masses.size))
    starts = [part[0] for part in parts]
    weights = np.add.reduceat(masses, starts)
    sums = np.add.reduceat(masses * instants, starts)
    used = weights > 0
    means, weights = rate * sums[used] / weights[used], weights[used] / weights[used].sum()
    means = np.maximum(means, 0.0)

    def at_most(number: int) -> float:
        return float(weights @ pdtr(number, means))

    return Count(at_most(0), {name: float(_first(at_most, at)) for name, at in levels.items()})


def _first(at_most: Callable[[int], float], level: float) -> int:
    """The least number with that chance."""
    below, above = -1, 1
    while at_most(above) < level:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if at_most(middle) >= level else (middle, above)
    return above


def _is_one_server(model: Queue) -> bool:
    """Whose utilisation is the share of time in which anybody is there."""
    alone = model.engine.servers == 1 and not model.engine.disaggregated
    return alone and model.external_prediction == 0


def _laws(model: Queue, arrival_rate: float) -> Mapping[str, tuple[Vector, Vector]]:
    """Instants and chances of the delay and, of single requests, of the sojourn."""
    if not model.arrivals.poisson or model.requests.sequences is not None:
        return {}
    several = model.engine.servers > 1 or model.engine.second_model is not None
    if model.requests.patience is not None or several:
        return {}
    try:
        if isinstance(model.policy, Single) and SINGLE.covers(model):
            lengths = model.requests
            service = ServiceTime.of(model.engine.law, lengths.output_tokens, lengths.prompt_tokens)
            found = laws(service, arrival_rate)
            if found is None:
                return {}
            grid, *masses = found
            names = ("queue_length", "number_in_system")
            return {name: (grid.instants, of) for name, of in zip(names, masses, strict=True)}
        if BATCHES.covers(model):
            queue = solve_batch_chain(model.batch_time, arrival_rate, model.bound)
            law = delay_law(model.batch_time, arrival_rate, queue)
            return {} if law is None else {"queue_length": law}
    except NotConvergedError:
        pass
    return {}
