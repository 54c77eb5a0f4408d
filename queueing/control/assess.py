"""One look at a window: estimates, the check, the long run with its interval, every assumption, and
the verdict. For the predicting process.

The mean, p50, p90 and p99 that theory gives at the window's rate, lengths, speed and residual;
never a delay enters them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies import Policy, SpecError, parse_policy, served_as
from policies.text import policy_batch_size
from queueing.control.long_run import LongRun, long_run
from queueing.estimation.arrivals import while_requests_came
from queueing.estimation.assumptions.assumption import (
    Assumption,
    Evidence,
    ForecastEvidence,
    judged,
)
from queueing.estimation.assumptions.engine_assumptions import ENGINE_TESTS
from queueing.estimation.assumptions.forecast_assumptions import FORECAST_TESTS
from queueing.estimation.assumptions.verdict import Compared, compare
from queueing.estimation.checked import Pairs, check_window, cut_at
from queueing.estimation.estimates import Estimates, estimate, held_tokens
from queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from queueing.estimation.speed.own_shape import own_shape
from queueing.estimation.speed.speed_history import SpeedHistory
from queueing.estimation.speed.speeds import Speeds
from queueing.estimation.window.snapshot import Snapshot
from queueing.estimation.window_queue import Limits
from queueing.latency.law import LatencyModel
from queueing.measurement.recursion import prompts_cut
from queueing.model import Model
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.result import Prediction


@dataclass(frozen=True, eq=False, kw_only=True)
class Assessment:
    """`load` and `compared.predicted` are those of the long run; None: nothing has been served."""

    estimates: Estimates
    load: Estimate
    compared: Compared
    long_run: LongRun | None = None
    model: Model | None = None  # at these estimates; without one nothing has been served
    # of each of several servers that has served enough: factor on the law's times
    server_speeds: Mapping[int, float] = field(default_factory=dict)
    pairs: Pairs | None = None  # what `compared.check` rests on

    @property
    def prediction(self) -> Prediction | None:
        """Of the long run; None where there is no steady state or no answer."""
        return None if self.long_run is None else self.long_run.prediction


def assess(
    seen: Snapshot,
    shape: LatencyModel,
    limits: Limits,
    *,
    known: LongRun | None = None,
    waiting_before: int = 0,
    history: SpeedHistory | None = None,
) -> Assessment:
    """`shape` is the calibrated law; `waiting_before` waited when the epoch began.

    `known`, of the assessment before, of any epoch, saves most of the work while it stands.
    `history` takes in the batches, keeps the engine's own shape for a while, and gives the wander
    of the last hour in place of the window's. Limits and shape are those of the epoch. Raises
    SpecError where a limit lies beyond what the lengths are known for.
    """
    policy = served_as(parse_policy(seen.policy), pads=limits.pads)
    seen = while_requests_came(seen)
    shape_of = own_shape if history is None else history.own_shape
    own = shape_of(policy, seen, shape, limits.step_tokens)
    estimates, speeds = _estimated(seen, policy, (own.law, shape), limits, history)
    point = OperatingPoint(estimates=estimates, shape=shape, limits=limits, factors=speeds.factors)
    if not estimates.count or not estimates.arrival_rate.value > 0 or point.lengths is None:
        return _nothing(seen, estimates, policy)
    if (refusal := point.lengths.refusal(limits.max_output_tokens)) is not None:
        raise SpecError(refusal)
    setting = Setting(
        policy=seen.policy, max_output_tokens=limits.max_output_tokens, servers=limits.servers
    )
    model = point.model(setting)
    load = _load(model, estimates, shape)
    found = long_run(point, setting, model, load, scatter=own.scatter, before=known)
    assumptions = _assumptions(seen, speeds, found, limits, waiting_before=waiting_before)
    pairs = check_window(seen, cut_at(model, limits.batch_tokens), speeds)
    return Assessment(
        estimates=estimates,
        load=found.load,
        long_run=found,
        compared=_compared(seen, found.interval, assumptions, pairs, policy),
        pairs=pairs,
        model=model,
        server_speeds={each.server: math.exp(each.log) for each in speeds.servers},
    )


def _estimated(
    seen: Snapshot,
    policy: Policy,
    shapes: tuple[LatencyModel, LatencyModel],
    limits: Limits,
    history: SpeedHistory | None,
) -> tuple[Estimates, Speeds]:
    """`shapes`: the engine's own, and the calibrated one."""
    own, shape = shapes
    speeds = Speeds.of(policy, seen, own, limits.step_tokens)
    slow = None if history is None else history.add(speeds, seen.epoch)
    found = estimate(seen, policy, shape, speeds=speeds, slow=slow)
    found = found.with_shape(own, shape)
    held = held_tokens(seen.mine, limits.reserved_tokens)
    return dataclasses.replace(found, held_tokens=held, prompts_cut=_cut(seen, limits)), speeds


def _cut(seen: Snapshot, limits: Limits) -> float:
    if limits.batch_tokens is None:
        return 0.0
    batches, prompts = seen.mine.column("batch_id"), seen.mine.column("prompt_tokens")
    return prompts_cut(batches, np.nan_to_num(prompts), limits.batch_tokens)


def _compared(
    seen: Snapshot,
    interval: Estimate,
    assumptions: Sequence[Assumption],
    pairs: Pairs | None,
    policy: Policy,
) -> Compared:
    sojourn = policy.joins_running
    found = compare(seen, interval, assumptions, sojourn=sojourn)
    return found if pairs is None else found.with_check(pairs.check, sojourn=sojourn)


def _assumptions(
    seen: Snapshot, speeds: Speeds, found: LongRun, limits: Limits, *, waiting_before: int
) -> tuple[Assumption, ...]:
    policy = parse_policy(seen.policy)
    bounds = [each for each in (policy_batch_size(policy), limits.max_num_seqs) if each is not None]
    relaxation = _relaxation(found.model, found.load.value, found.prediction)
    rate = found.estimates.arrival_rate.value
    alone = found.model.sequences is None
    forecast = ForecastEvidence(
        policy=policy,
        speeds=speeds,
        load=found.load,
        mean=found.mean,
        stalled=found.stalled,
        wander_effect=_wander_effect(found, relaxation),
        relaxation=relaxation,
        free_rate=(found.model.largest_stable_rate - rate) * found.model.call_size,
        waiting_before=waiting_before,
        patience=limits.patience,
        slots=min(bounds, default=None),
        alike=None if alone else found.estimates.alike(found.model.policy, limits.max_num_seqs),
        independent_effect=1.0 if alone else found.with_independent_lengths,
    )
    return judged(Evidence(seen=seen, forecast=forecast), (*FORECAST_TESTS, *ENGINE_TESTS))


def _wander_effect(found: LongRun, relaxation: float) -> float | None:
    """By what share the slow wander of the speed moves the mean of a window, at most (95 %): what
    is fast against the queue's relaxation time averages out in it.
    """
    slow, window = found.estimates.wander, found.estimates.now - found.estimates.start
    if not slow.significant or found.mean is None:
        return None
    left = slow.tau / (slow.tau + relaxation)
    spread = slow.sigma.value * math.sqrt(left * min(1.0, 2 * slow.tau / window))
    return NORMAL * abs(found.speed_elasticity) * spread


def _nothing(seen: Snapshot, estimates: Estimates, policy: Policy) -> Assessment:
    assumptions = judged(Evidence(seen=seen), FORECAST_TESTS)
    compared = compare(seen, UNKNOWN, assumptions, sojourn=policy.joins_running)
    return Assessment(
        estimates=estimates,
        load=UNKNOWN,
        compared=compared,
    )


def _load(model: Model, estimates: Estimates, shape: LatencyModel) -> Estimate:
    """Arrival rate over the largest stable one, with what rate and speed leave open. A speed
    without an interval may as well be the calibrated one.
    """
    value = model.load(estimates.arrival_rate.value)
    relative = math.hypot(
        *(each.relative for each in (estimates.arrival_rate, estimates.speed) if each.known)
    )
    lowest = highest = 1.0
    if not estimates.speed.known and math.isfinite(estimates.speed.value):
        calibrated = shape.speed / estimates.speed.value
        lowest, highest = min(1.0, calibrated), max(1.0, calibrated)
    return Estimate(
        value,
        value * lowest * max(0.0, 1 - relative),
        value * highest * (1 + relative),
        estimates.arrival_rate.effective_n,
    )


def _relaxation(model: Model, load: float, prediction: Prediction | None) -> float:
    if prediction is None:
        return math.inf
    size = prediction.batch_size.mean or 1.0
    if model.policy.joins_running:
        return relaxation_time(
            load, (prediction.sojourn_time.mean or 0.0) / max(1.0, size), one_by_one=True
        )
    service = model.batch_time.mean(max(1, round(size)))
    return relaxation_time(load, service / model.servers, one_by_one=model.bound == 1)


def relaxation_time(
    load: float, service_time: float, *, one_by_one: bool, scv: float = 1.0
) -> float:
    """Seconds in which a queue forgets where it began; infinite at load 1.

    One by one: that of M/M/1, s / (1 - sqrt(load))^2, times (1 + scv) / 2. Batches of all that
    wait: the number found falls by the factor `load` a batch, so s / (1 - load).
    """
    if load >= 1:
        return math.inf
    return (
        service_time * (1 + scv) / 2 / (1 - math.sqrt(load)) ** 2
        if one_by_one
        else service_time / (1 - load)
    )
