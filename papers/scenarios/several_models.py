"""Several models on one machine, of which it holds one at a time: to serve a request of another one
it loads that first.

    S = load_seconds[model] if the machine holds another model, + seconds of the request

One request at a time, not interrupted; an idle machine keeps what it holds, and starts with model
0. Orders of the queue, equal ranks in order of arrival:

    fcfs        arrival
    exhaustive  a request of the model that is held, if one waits, else the oldest; after `most` of
                one model in a row the oldest of the others, where one waits
    shortest    predicted seconds, the loading included

Choice of the model by predicted length (`chosen`): up to `threshold` tokens the small one.

Conditions: Poisson arrivals, independent lengths. Without loading times fcfs is M/G/1, and
exhaustive has its mean delay where all models serve alike; with one model shortest is SPJF.
First come, first served the path is a recursion: start_i = max(arrival_i, end_{i-1}).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.simulation.kernels import Floats, Ints, compiled, inner
from kendall.queueing.simulation.orders.kernels import pop, push
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential

ORDERS = ("fcfs", "exhaustive", "shortest")
FCFS, EXHAUSTIVE, SHORTEST = range(3)
SMALL, LARGE = 0, 1
EXACT = PredictorText("exact")


class ModelWork(NamedTuple):
    """Of each request: arrival, model, seconds of service without loading, and as predicted."""

    arrived_at: Floats
    model: Ints
    seconds: Floats
    predicted: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Seconds to load each model; `most` of one model in a row (exhaustive), where others wait."""

    load_seconds: tuple[float, ...]
    most: int = 2**62

    def __post_init__(self) -> None:
        if not self.load_seconds or min(self.load_seconds) < 0 or self.most < 1:
            raise SpecError(f"got {self}; expected seconds >= 0 for each model, and most >= 1")


def run_models(work: ModelWork, order: str, machine: Machine) -> tuple[Vector, int]:
    """End of each request, and how often a model was loaded."""
    if order not in ORDERS:
        raise SpecError(f"got order={order!r}; expected {', '.join(ORDERS)}")
    count, models = len(work.arrived_at), len(machine.load_seconds)
    if count and not 0 <= work.model.min() <= work.model.max() < models:
        raise SpecError(
            f"got models {work.model.min()} to {work.model.max()}; expected 0 to {models - 1}"
        )
    ended = np.full(count, np.nan)
    queues = np.empty((models, count, 4))
    waiting = np.zeros(models, dtype=np.int64)
    rules = ORDERS.index(order), machine.most
    loads = _run(work, rules, np.array(machine.load_seconds), (queues, waiting), ended)
    return ended, int(loads)


@inner
def oldest(queues, waiting, without):  # type: ignore[no-untyped-def]
    """The model of the request that has waited longest, `without` left out; -1: none."""
    best = -1
    for m in range(len(waiting)):
        first = best < 0 or queues[m, 0, 2] < queues[best, 0, 2]
        if m != without and waiting[m] > 0 and first:
            best = m
    return best


@inner
def quickest(queues, waiting, held, load_seconds):  # type: ignore[no-untyped-def]
    """The model of the request that is predicted to be done first."""
    best, least = -1, np.inf
    for m in range(len(waiting)):
        if waiting[m] == 0:
            continue
        seconds = queues[m, 0, 1] + (load_seconds[m] if m != held else 0.0)
        if seconds < least or (seconds == least and queues[m, 0, 2] < queues[best, 0, 2]):
            best, least = m, seconds
    return best


@inner
def next_model(rules, load_seconds, held, row, state):  # type: ignore[no-untyped-def]
    """Which model serves next, `row` requests of the held one after one another."""
    (order, most), (queues, waiting) = rules, state
    if order == SHORTEST:
        return quickest(queues, waiting, held, load_seconds)
    if order == EXHAUSTIVE and waiting[held] > 0:
        other = oldest(queues, waiting, held) if row >= most else -1
        return held if other < 0 else other
    return oldest(queues, waiting, -1)


@compiled()
def _run(work, rules, load_seconds, state, ended):  # type: ignore[no-untyped-def]
    arrived_at, model, seconds, predicted = work
    queues, waiting = state
    now, held, row, coming, loads, count = 0.0, 0, 0, 0, 0, len(arrived_at)
    total = 0
    while coming < count or total > 0:
        if total == 0:
            now = max(now, arrived_at[coming])
        while coming < count and arrived_at[coming] <= now:
            m = model[coming]
            value = predicted[coming] if rules[0] == SHORTEST else 0.0
            push(queues[m], waiting[m], (0.0, value, float(coming)), coming)
            waiting[m] += 1
            total += 1
            coming += 1
        m = next_model(rules, load_seconds, held, row, state)
        job = pop(queues[m], waiting[m])
        waiting[m] -= 1
        total -= 1
        row = row + 1 if m == held else 1
        if m != held:
            now += load_seconds[m]
            loads += 1
        held = m
        now += seconds[job]
        ended[job] = now
    return loads


@dataclass(frozen=True, eq=False, kw_only=True)
class LengthWork:
    """Poisson arrivals, lengths and their predictor; of each model, small first, seconds a request
    and seconds a token.
    """

    arrival_rate: float
    output_tokens: TokenDistribution
    setup: tuple[float, ...]
    step: tuple[float, ...]
    predictor: PredictorText = EXACT

    def drawn(self, rng: np.random.Generator, count: int, threshold: float) -> ModelWork:
        """Requests predicted up to `threshold` tokens go to the small model."""
        arrived_at = unit_exponential(rng, count) / self.arrival_rate
        output = self.output_tokens.sample(rng, count)
        longest = self.output_tokens.longest
        predicted = predicted_tokens(self.predictor, rng, output.astype(float), longest)
        model = chosen(predicted, threshold)
        setup, step = np.array(self.setup)[model], np.array(self.step)[model]
        return ModelWork(arrived_at, model, setup + step * output, setup + step * predicted)


def chosen(predicted: Vector, threshold: float) -> Ints:
    """The model of each request."""
    return np.where(predicted <= threshold, SMALL, LARGE)


def simulate_models(
    work: LengthWork, order: str, machine: Machine, threshold: float, runs: Replications
) -> tuple[Measured, Measured]:
    """Mean sojourn time, and loads of a model per request."""

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn = work.drawn(rng, runs.jobs, threshold)
        ended, loads = run_models(drawn, order, machine)
        return ended - drawn.arrived_at, np.full(runs.jobs, loads / runs.jobs)

    sojourn, loads = measured(run, runs)
    return sojourn, loads
