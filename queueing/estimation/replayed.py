"""Given requests, served by the model at the speed that the machine had at each moment
(queueing.latency.speed_path).

Batches carry residuals: there are several draws of them. The steps of a continuous engine carry
none, but there neighbours share the engine, so that how long a slot is held depends on all of them:
each pass corrects the speed by the ratio of the measured holding times to the model's. Speeds are
taken from service times, never from delays.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.ordered import in_arrival_order, order_of
from policies.orders.by_length import Binned
from queueing.distributions.token_distribution import Vector
from queueing.estimation.speed.batch_times import lawful_times
from queueing.latency.law import LatencyModel
from queueing.latency.speed_path import SpeedPath
from queueing.measurement.recursion import by_batch
from queueing.model import Model, token_limit
from queueing.simulation import fast
from queueing.simulation.experiment import run_given

DRAWS = 16  # of the residuals of batches
PASSES = 8  # over a continuous run, at most
ENOUGH = 0.0005  # relative error of the holding times


@dataclass(frozen=True, eq=False)
class Holding:
    """How long each request of a continuous engine was served, seconds; not a number where that is
    not known or it was cut short.
    """

    dispatched: Vector
    held: Vector


@dataclass(frozen=True, eq=False, kw_only=True)
class Replayed:
    """A row for each draw of the residuals, a column for each request; seconds."""

    dispatched: npt.NDArray[np.float64]
    released: npt.NDArray[np.float64]
    speed: float  # of the machine, over all of it


def replayed(
    model: Model,
    given: fast.Trace,
    path: SpeedPath | None = None,
    holding: Holding | None = None,
    *,
    seed: int = 0,
) -> Replayed:
    """`path`: the speed at each moment, or that of the model's law. `holding`: what a continuous
    engine's speed is corrected by. One seed draws the same residuals for every law with the same
    cv; a policy from outside has one draw.
    """
    given = _together(given)
    if not model.policy.joins_running:
        several = model.law.cv and fast.is_compiled(model)
        return _drawn(model, given, path, DRAWS if several else 1, seed)
    found = _drawn(model, given, path, 1, seed)
    if holding is None:
        return found
    known = np.isfinite(holding.held) & (holding.held > 0)
    at, held = holding.dispatched[known], holding.held[known]
    for _ in range(PASSES):
        again = (found.released - found.dispatched)[0][known]
        total = float(again.sum())
        if not total > 0:
            return found
        ratio = float(held.sum()) / total
        if path is None:
            if abs(ratio - 1) < ENOUGH:
                return found
            model = dataclasses.replace(model, law=_slower(model.law, ratio))
        else:
            path = path.corrected(at, held, again)
        found = _drawn(model, given, path, 1, seed)
        if path is not None and abs(ratio - 1) < ENOUGH:
            return found
    return found


def _together(given: fast.Trace) -> fast.Trace:
    """Who comes at one instant is there when the policy decides, as the sequences of a call are."""
    at = given.arrived_at
    if not np.any(at[1:] == at[:-1]):
        return given
    return dataclasses.replace(given, call_ends=np.searchsorted(at, at, "right"))


def _slower(law: LatencyModel, factor: float) -> LatencyModel:
    return dataclasses.replace(law, speed=law.speed * factor)


def _drawn(
    model: Model, given: fast.Trace, path: SpeedPath | None, draws: int, seed: int
) -> Replayed:
    speed = model.law.speed
    model, given = _as_kernels_have_it(model, given)
    if path is not None:
        cv = model.law.cv if model.policy.joins_running else path.cv
        model = dataclasses.replace(model, law=dataclasses.replace(model.law, speed=1.0, cv=cv))
    found = np.empty((2, draws, given.arrived_at.size))
    for number in range(draws):
        stream = np.random.SeedSequence(seed, spawn_key=(number,))
        found[:, number] = _run(model, given, path, stream, measured=draws > 1)
    return Replayed(dispatched=found[0], released=found[1], speed=speed)


def _run(
    model: Model,
    given: fast.Trace,
    path: SpeedPath | None,
    stream: np.random.SeedSequence,
    *,
    measured: bool,
) -> tuple[Vector, Vector]:
    """Dispatches and releases of one draw. The speeds of the path are measured ones: where they are
    those of batches (`measured`), each block of the draw takes, in sum, as long as they say.
    """
    if path is None:
        run = run_given(model, given, stream)
        return run.dispatched_at, run.released_at
    moved = dataclasses.replace(given, arrived_at=path.to_clock(given.arrived_at))
    run = run_given(model, moved, stream)
    if measured:
        again = np.random.SeedSequence(stream.entropy, spawn_key=stream.spawn_key)
        path = path.corrected(*_lawful_and_drawn(model, given, run, path))
        return _run(model, given, path, again, measured=False)
    at_once = run.dispatched_at == moved.arrived_at  # the way there and back is no delay
    dispatched = np.where(at_once, given.arrived_at, path.to_run(run.dispatched_at))
    return dispatched, path.to_run(run.released_at)


def _lawful_and_drawn(
    model: Model, given: fast.Trace, run: fast.SimulatedRun, path: SpeedPath
) -> tuple[Vector, Vector, Vector]:
    """Of the batches of a draw: start, the law's mean service time, and the one that was drawn."""
    order, first = by_batch(run.batch_id)

    def over(values: npt.NDArray[Any], how: np.ufunc) -> npt.NDArray[Any]:
        return np.asarray(how.reduceat(values[order], first))

    size, tokens = np.diff(np.append(first, order.size)), given.output_tokens
    sums = over(tokens, np.add), over(tokens, np.maximum), over(given.prompt_tokens, np.add)
    lawful = np.add(*lawful_times(model.law, (size, *sums), padded=model.policy.padded))
    begun = over(run.dispatched_at, np.minimum)
    return path.to_run(begun), lawful, over(run.server_free_at, np.maximum) - begun


def _as_kernels_have_it(model: Model, given: fast.Trace) -> tuple[Model, fast.Trace]:
    """Where they know one limit for all: an order takes a request without a prediction to be as
    long as its own limit.
    """
    policy, limits = model.policy, given.limits
    if not fast.is_compiled(model) or not limits.size:
        return model, given
    none = np.empty(0, dtype=np.int64)
    if in_arrival_order(policy):
        return model, dataclasses.replace(given, predicted=np.empty(0), limits=none)
    if isinstance(order_of(policy), Binned):  # by shares of the limit
        return model, given
    told = given.predicted if given.predicted.size else np.full(limits.size, np.inf)
    told = np.minimum(np.where(np.isnan(told), np.inf, told), limits)
    if model.max_context_tokens is None:  # else the limit says what a request takes
        most = max(token_limit(model), int(limits.max()))
        model = dataclasses.replace(model, max_output_tokens=most)
    return model, dataclasses.replace(given, predicted=told, limits=none)
