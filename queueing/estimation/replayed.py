"""Given requests, served by the model at the speed that the machine had.

Batches take as long as measured but for what the law has to say
(queueing.estimation.speed.batch_factors), which has an error: there are several draws of it. The
steps of a continuous engine have no measured times; there neighbours share the engine, so that how
long a slot is held depends on all of them: each pass corrects the speed of a moment
(queueing.latency.speed_path) by a power of the ratio of the measured holding times to the model's.
Nothing is taken from delays.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.policies import Fixed
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.estimation.speed.batch_factors import BatchFactors
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed_path import SpeedPath
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast
from kendall.queueing.simulation.experiment import run_given

DRAWS = 16  # of the residuals of batches
PASSES, DRIVEN_PASSES = 12, 2  # over a continuous run, at most
LEAST_STEP = 0.05  # of a correction
ENOUGH = 0.0005  # relative error of the holding times
Machine = BatchFactors | SpeedPath  # how fast it was at each moment


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
    model: Queue,
    given: fast.Trace,
    *,
    machine: Machine | None = None,
    holding: Holding | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Replayed:
    """At the law's speed and with residuals drawn by its cv, or as fast as the `machine` was; of a
    continuous engine corrected by `holding`. One seed draws the same for every law with the same
    cv; a policy from outside has one draw.
    """
    at = given.arrived_at
    if np.any(at[1:] == at[:-1]):  # the policy decides once all of one instant are there
        given = dataclasses.replace(given, call_ends=np.searchsorted(at, at, "right"))
    model, given = _as_kernels_have_it(model, given)
    factors = machine if isinstance(machine, BatchFactors) else None
    path = machine if isinstance(machine, SpeedPath) else None
    if model.policy.joins_running:
        path = path if factors is None else factors.path(np.random.default_rng(seed))
        return _of_slots(model, given, path, holding)
    compiled = fast.is_compiled(model) and not given.limits.size
    if path is not None and keeps_pace(model):
        return _at_pace(model.but(law=_plain(model.engine.law)), given, path)
    factors = factors if compiled else None
    draws = draws if compiled and (model.engine.law.cv or factors) else 1
    if factors is not None:
        model = model.but(server_speeds=(), law=_plain(model.engine.law))
    alone = keeps_pace(model)
    found = np.empty((2, draws, given.arrived_at.size))
    for number in range(draws):
        stream = np.random.SeedSequence(seed, spawn_key=(number,))
        if factors is not None:
            rng = np.random.default_rng(stream)
            if alone:
                again = _at_pace(model, given, factors.path(rng))
                found[:, number] = again.dispatched[0], again.released[0]
                continue
            given = dataclasses.replace(given, given_residuals=factors.drawn(rng))
        run = run_given(model, given, stream)
        found[:, number] = run.dispatched_at, run.released_at
    return Replayed(dispatched=found[0], released=found[1], speed=model.engine.law.speed)


def keeps_pace(model: Queue) -> bool:
    """Whether one clock serves: there is none for several servers, nor for a wait that does not
    follow the machine.
    """
    waits = isinstance(model.policy, Fixed) and math.isfinite(model.policy.max_wait)
    return model.engine.servers == 1 and not waits


def _plain(law: LatencyModel) -> LatencyModel:
    """At speed 1, without a residual."""
    return dataclasses.replace(law, speed=1.0, cv=0.0)


def _of_slots(
    model: Queue, given: fast.Trace, path: SpeedPath | None, holding: Holding | None
) -> Replayed:
    found = _at_pace(model, given, path)
    if holding is None:
        return found
    known = np.isfinite(holding.held) & (holding.held > 0)
    at, held = holding.dispatched[known], holding.held[known]
    # where many share the engine, a slower one holds more at once, which slows it again: the step
    # is shorter by as much as the one before went too far
    step, before = 1.0, 0.0
    for _ in range(PASSES if fast.is_compiled(model) else DRIVEN_PASSES):
        again = (found.released - found.dispatched)[0][known]
        total = float(again.sum())
        if not total > 0:
            return found
        off = math.log(float(held.sum()) / total)
        if abs(off) < ENOUGH:
            return found
        if before and (answered := (before - off) / (step * before)) > 1:
            step = max(LEAST_STEP, 1 / answered)
        before = off
        if path is None:
            speed = model.engine.law.speed * math.exp(step * off)
            model = model.but(law=model.engine.law.at_speed(speed))
        else:
            path = path.corrected(at, held, again, step)
        found = _at_pace(model, given, path)
    return found


def _at_pace(model: Queue, given: fast.Trace, path: SpeedPath | None) -> Replayed:
    speed, stream = model.engine.law.speed, np.random.SeedSequence(0)
    if path is None:
        run = run_given(model, given, stream)
        found = np.stack([run.dispatched_at, run.released_at])[:, None]
    else:
        model = model.but(law=model.engine.law.at_speed(1.0))
        moved = dataclasses.replace(given, arrived_at=path.to_clock(given.arrived_at))
        run = run_given(model, moved, stream)
        at_once = run.dispatched_at == moved.arrived_at  # the way there and back is no delay
        dispatched = np.where(at_once, given.arrived_at, path.to_run(run.dispatched_at))
        found = np.stack([dispatched, path.to_run(run.released_at)])[:, None]
    return Replayed(dispatched=found[0], released=found[1], speed=speed)


def _as_kernels_have_it(model: Queue, given: fast.Trace) -> tuple[Queue, fast.Trace]:
    """Where they know one limit for all: an order takes a request without a prediction to be as
    long as its own limit.
    """
    policy, limits = model.policy, given.limits
    if not fast.is_compiled(model) or not limits.size:
        return model, given
    none = np.empty(0, dtype=np.int64)
    if in_arrival_order(policy):
        return model, dataclasses.replace(given, predicted=np.empty(0), limits=none)
    if order_of(policy).form.bins is not None:  # by shares of the limit
        return model, given
    told = given.predicted if given.predicted.size else np.full(limits.size, np.inf)
    told = np.minimum(np.where(np.isnan(told), np.inf, told), limits)
    if model.engine.bounds.max_context_tokens is None:  # else the limit says what a request takes
        most = max(model.requests.token_limit, int(limits.max()))
        model = model.but(max_output_tokens=most)
    return model, dataclasses.replace(given, predicted=told, limits=none)
