"""One assessment of a window: estimates, the check, the long run with its interval, every
assumption, and the verdict. For the predicting process.

The mean, p50, p90 and p99 that theory gives at the window's rate, lengths, speed and residual;
never a delay enters them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kendall.policies import SpecError, parse_policy, served_as
from kendall.policies.text import policy_batch_size
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.control.long_run import LongRun, long_run
from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.assumptions.assumption import (
    Assumption,
    Evidence,
    ForecastEvidence,
    judged,
)
from kendall.queueing.estimation.assumptions.compared_window import Compared, compare
from kendall.queueing.estimation.assumptions.engine_assumptions import ENGINE_TESTS
from kendall.queueing.estimation.assumptions.forecast_assumptions import FORECAST_TESTS
from kendall.queueing.estimation.checked import Pairs, check_window, cut_at
from kendall.queueing.estimation.estimates import Estimates, estimate, held_tokens
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.speed.fitted_law import fitted_law
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import prompts_cut
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction


@dataclass(frozen=True, eq=False, kw_only=True)
class Assessment:
    """`load` and `compared.predicted` are those of the long run; None: nothing has been served."""

    estimates: Estimates
    load: Estimate
    compared: Compared
    long_run: LongRun | None = None
    model: Queue | None = None  # at these estimates; without one nothing has been served
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
    limits: QueueLimits,
    *,
    known: LongRun | None = None,
    waiting_before: int = 0,
    history: SpeedHistory | None = None,
) -> Assessment:
    """`shape` is the calibrated law; `waiting_before` waited when the epoch began.

    `known`, of the assessment before, of any epoch, saves most of the work while it stands.
    `history` takes in the batches, keeps the engine's own shape for a while, and gives the wander
    of the last hour in place of the window's. QueueLimits and shape are those of the epoch. Raises
    SpecError where a limit lies beyond what the lengths are known for.
    """
    policy = served_as(parse_policy(seen.policy), pads=limits.pads)
    seen = while_requests_came(seen)
    shape_of = fitted_law if history is None else history.fitted_law
    own = shape_of(policy, seen, shape, limits.engine.step_tokens)
    speeds = Speeds.of(policy, seen, own.law, limits.engine.step_tokens)
    slow = None if history is None else history.add(speeds, seen.epoch)
    estimates = estimate(seen, policy, shape, speeds=speeds, slow=slow).with_shape(own.law, shape)
    cut = 0.0
    if limits.engine.batch_tokens is not None:
        batches, prompts = seen.mine.column("batch_id"), seen.mine.column("prompt_tokens")
        cut = prompts_cut(batches, np.nan_to_num(prompts), limits.engine.batch_tokens)
    held = held_tokens(seen.mine, limits.engine.reserved_tokens)
    estimates = dataclasses.replace(estimates, held_tokens=held, prompts_cut=cut)
    point = OperatingPoint(estimates=estimates, shape=shape, limits=limits, factors=speeds.factors)
    sojourn = policy.joins_running
    if not estimates.count or not estimates.arrival_rate.value > 0 or point.lengths is None:
        assumptions = judged(Evidence(seen=seen), FORECAST_TESTS)
        compared = compare(seen, UNKNOWN, assumptions, sojourn=sojourn)
        return Assessment(estimates=estimates, load=UNKNOWN, compared=compared)
    if (refusal := point.lengths.refusal(limits.max_output_tokens)) is not None:
        raise SpecError(refusal)
    setting = Setting(
        policy=seen.policy, max_output_tokens=limits.max_output_tokens, servers=limits.servers
    )
    model = point.model(setting)
    load = load_interval(model, estimates, shape)
    found = long_run(point, setting, model, load, scatter=own.scatter, before=known)
    assumptions = _assumptions(seen, speeds, found, limits, waiting_before=waiting_before)
    pairs = check_window(seen, cut_at(model, limits.engine.batch_tokens), speeds)
    compared = compare(seen, found.interval, assumptions, sojourn=sojourn)
    return Assessment(
        estimates=estimates,
        load=found.load,
        long_run=found,
        compared=compared if pairs is None else compared.with_check(pairs.check, sojourn=sojourn),
        pairs=pairs,
        model=model,
        server_speeds={each.server: math.exp(each.log) for each in speeds.servers},
    )


def _assumptions(
    seen: Snapshot, speeds: Speeds, found: LongRun, limits: QueueLimits, *, waiting_before: int
) -> tuple[Assumption, ...]:
    policy = parse_policy(seen.policy)
    bounds = [
        each for each in (policy_batch_size(policy), limits.engine.max_num_seqs) if each is not None
    ]
    rate = found.estimates.arrival_rate.value
    alone = found.model.requests.sequences is None
    forecast = ForecastEvidence(
        policy=policy,
        speeds=speeds,
        load=found.load,
        mean=found.mean,
        stalled=found.stalled,
        wander_effect=found.wander_effect,
        relaxation=found.relaxation_time,
        free_rate=(found.model.largest_stable_rate - rate) * found.model.requests.call_size,
        waiting_before=waiting_before,
        patience=limits.patience,
        slots=min(bounds, default=None),
        own_queues=limits.routing != "central",
        alike=None
        if alone
        else found.estimates.alike(found.model.policy, limits.engine.max_num_seqs),
        independent_effect=1.0 if alone else found.with_independent_lengths,
    )
    return judged(Evidence(seen=seen, forecast=forecast), (*FORECAST_TESTS, *ENGINE_TESTS))


def load_interval(model: Queue, estimates: Estimates, shape: LatencyModel) -> Estimate:
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
