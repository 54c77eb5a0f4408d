"""One look at a window: estimates, prediction with its interval, every assumption, and the verdict.
For the predicting process.

The mean, p50, p90 and p99 that theory gives at the window's rate, lengths, speed and residual;
never a delay enters them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies import Policy, SpecError, is_first_come, parse_policy, served_as
from policies.text import policy_batch_size
from queueing.distributions.token_distribution import TokenDistribution
from queueing.errors import PredictionError, UnstableQueueError
from queueing.estimation.assumptions.assumption import Assumption
from queueing.estimation.assumptions.client_assumptions import (
    client_assumptions,
    independent_lengths,
)
from queueing.estimation.assumptions.engine_assumptions import (
    StalledDelay,
    engine_assumptions,
    equal_servers,
    settled,
    stable_queue,
)
from queueing.estimation.assumptions.memory_assumption import enough_memory
from queueing.estimation.assumptions.verdict import Compared, compare, with_check
from queueing.estimation.band import (
    Ask,
    Sensitivity,
    relaxation_time,
    sensitivity,
)
from queueing.estimation.cached_prediction import CachedPrediction
from queueing.estimation.checked import Pairs, at_their_speeds, check_window, cut_at
from queueing.estimation.estimates import Estimates, estimate, held_tokens
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.estimation.lengths.within_calls import significant
from queueing.estimation.speed.own_shape import Scatter, own_shape
from queueing.estimation.speed.speed_history import SpeedHistory
from queueing.estimation.speed.speeds import Speeds
from queueing.estimation.stall_backlog import behind_stalls, stall_backlog
from queueing.estimation.window.snapshot import Snapshot
from queueing.latency.law import LatencyModel
from queueing.measurement.recursion import prompts_cut
from queueing.model import Model, memory_limited, step_bound
from queueing.models.soap.predictor_text import parse_predictor
from queueing.prediction import predict_model
from queueing.result import Prediction, Quantiles
from queueing.simulation.experiment import simulate_run

SIMULATED = 30_000  # requests per simulation of the sensitivity
# of a policy from outside: without a compiled simulation, and a look asks some twenty times
SIMULATED_OUTSIDE = 4000
FEWEST_ARRIVALS = 10
RARELY_CUT = 0.01  # of the batches, by their prompts: a forecast does not heed it
SILENCE, BEYOND_LARGEST = 20.0, 3.0  # mean gaps (one Poisson gap in 5e8 is longer), largest gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator and the engine bound."""

    max_output_tokens: int | None = None
    max_num_seqs: int | None = None
    patience: float | None = None
    servers: int = 1
    pads: bool = True  # the engine can pad a batch; else a padded policy is served as elastic
    # that the engine computes in one step, where it computes long prompts in parts; and of a batch,
    # which computes all its prompts in one
    step_tokens: int | None = None
    batch_tokens: int | None = None
    # KV memory of a server, and of that what is kept free for an answer; None: enough, its limit
    max_context_tokens: int | None = None
    reserved_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What is taken over from an earlier assessment while it stands: the sensitivity, 16
    simulations (`Sensitivity.fresh`), and the exact prediction (`CachedPrediction.moved`).
    """

    sensitivity: Sensitivity | None = None
    cached: CachedPrediction | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Assessment:
    """`prediction` is None where there is no steady state or no answer; `compared.predicted` is
    its mean with the interval.
    """

    estimates: Estimates
    load: Estimate
    prediction: Prediction | None
    sensitivity: Sensitivity | None
    compared: Compared
    cached: CachedPrediction | None = (
        None  # the exact prediction that `prediction` is, or was moved from
    )
    model: Model | None = None  # at these estimates; without one nothing has been served
    scatter: Scatter | None = None  # of a continuous engine about its law, where it is known
    # of each of several servers that has served enough: factor on the law's times
    server_speeds: Mapping[int, float] = field(default_factory=dict)
    pairs: Pairs | None = None  # what `compared.check` rests on

    @property
    def known(self) -> Known:
        """For the next assessment."""
        return Known(self.sensitivity, self.cached)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Forecast:
    """What theory says at the window's estimates; seconds."""

    prediction: Prediction | None
    cached: CachedPrediction | None
    sensitivity: Sensitivity | None
    mean: float | None  # of the quantity that is compared
    interval: Estimate  # of that mean
    relaxation: float
    moves: float | None  # the mean, as a share, by the slow wander of the speed
    free_rate: float  # requests/s that the engine could serve beyond those that arrive
    stalled: StalledDelay | None
    overload: float  # the load over that of the requests alone, where interruptions are too many


def assess(
    seen: Snapshot,
    shape: LatencyModel,
    limits: Limits,
    *,
    known: Known | None = None,
    waiting_before: int = 0,
    history: SpeedHistory | None = None,
) -> Assessment:
    """`shape` is the calibrated law; `waiting_before` waited when the epoch began.

    `known`, of the assessment before, of any epoch, saves most of the work. `history` takes in the
    batches, and gives the wander of the last hour in place of the window's. Limits and shape are
    those of the epoch. Raises SpecError where a limit lies beyond what the lengths are known for.
    """
    policy = served_as(parse_policy(seen.policy), pads=limits.pads)
    seen = while_requests_came(seen)
    own = own_shape(policy, seen, shape, limits.step_tokens)
    estimates, speeds = _estimated(seen, policy, (own.law, shape), limits, history)
    if not estimates.count or not estimates.arrival_rate.value > 0:
        return _nothing(seen, estimates, policy)
    lengths = estimates.output_tokens.law(limits.max_output_tokens)
    model = model_of(policy, lengths, estimates.law(shape), limits, estimates)
    model = at_their_speeds(model, speeds.factors)
    load = _load(model, estimates, shape)
    forecast = _forecast(model, load.value, estimates, limits, known or Known())
    load = load.scaled(forecast.overload)
    assumptions = _assumptions(seen, speeds, forecast, load, limits, waiting_before=waiting_before)
    assumptions = (*assumptions, _within_calls(model, estimates, forecast, limits))
    pairs = check_window(seen, cut_at(model, limits.batch_tokens), speeds)
    return Assessment(
        estimates=estimates,
        load=load,
        prediction=forecast.prediction,
        sensitivity=forecast.sensitivity,
        compared=_compared(seen, forecast, assumptions, pairs, policy),
        pairs=pairs,
        cached=forecast.cached,
        model=model,
        scatter=own.scatter,
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
    forecast: _Forecast,
    assumptions: Sequence[Assumption],
    pairs: Pairs | None,
    policy: Policy,
) -> Compared:
    sojourn = policy.joins_running
    found = compare(seen, forecast.interval, assumptions, sojourn=sojourn)
    return found if pairs is None else with_check(found, pairs.check, sojourn=sojourn)


def _forecast(
    model: Model, load: float, estimates: Estimates, limits: Limits, known: Known
) -> _Forecast:
    policy = model.policy
    prediction, cached, overload = None, None, 1.0
    try:
        prediction, cached = _predicted(model, estimates, known)
    except UnstableQueueError as error:
        overload = error.load / load if load < 1 else 1.0
    backlog = 0.0
    if policy.joins_running:
        backlog = stall_backlog(estimates.stalls, model, load)
    slope, compared, moves = None, None, None
    if prediction is not None:
        slope = _renewed(known.sensitivity, model, load, estimates, limits)
        prediction = behind_stalls(prediction, backlog)
        compared = prediction.with_turnaround(estimates.gateway_turnaround)
    mean = _mean(compared, policy)
    relaxation = _relaxation(model, load, prediction)
    interval = UNKNOWN
    stalled = _stalled(cached, mean, policy, backlog)
    if slope is not None and mean and estimates.wander.significant:
        moves = slope.wander_effect(estimates, relaxation)
    if slope is not None and mean is not None:
        effect = 0.0 if stalled is None else stalled.effect
        interval = slope.interval(mean, estimates, effect).at_least(estimates.gateway_turnaround)
    return _Forecast(
        prediction=prediction,
        cached=cached,
        sensitivity=slope,
        mean=mean,
        interval=interval,
        relaxation=relaxation,
        moves=moves,
        free_rate=(model.largest_stable_rate - estimates.arrival_rate.value) * model.call_size,
        stalled=stalled,
        overload=overload,
    )


def _assumptions(
    seen: Snapshot,
    speeds: Speeds,
    forecast: _Forecast,
    load: Estimate,
    limits: Limits,
    *,
    waiting_before: int,
) -> tuple[Assumption, ...]:
    clients, policy = client_assumptions(seen), parse_policy(seen.policy)
    several = [equal_servers(speeds.servers)] if seen.servers > 1 else []
    bounds = [each for each in (policy_batch_size(policy), limits.max_num_seqs) if each is not None]
    return (
        *clients,
        *engine_assumptions(
            speeds,
            continuous=policy.joins_running,
            wander_effect=forecast.moves,
            stalled=forecast.stalled,
        ),
        *several,
        enough_memory(seen, policy, min(bounds, default=None)),
        stable_queue(load, seen.judged(), kept_finite=_kept_finite(clients, limits)),
        _settled(seen, clients, forecast.relaxation, waiting_before, forecast.free_rate),
    )


def _within_calls(
    model: Model, estimates: Estimates, forecast: _Forecast, limits: Limits
) -> Assumption:
    if model.sequences is None:
        says = "not judged: every call is of one sequence"
        return Assumption("independent_lengths", None, math.nan, says)
    slope = forecast.sensitivity
    return independent_lengths(
        estimates.alike(model.policy, limits.max_num_seqs),
        forecast.mean,
        1.0 if slope is None else slope.independent,
    )


def _kept_finite(clients: Sequence[Assumption], limits: Limits) -> str | None:
    """What bounds the queue whatever arrives."""
    if limits.patience is not None:
        return "patience"
    refuses = any(each.name == "all_admitted" and each.holds is False for each in clients)
    return "what the gateway refuses" if refuses else None


def while_requests_came(seen: Snapshot) -> Snapshot:
    """The window from its first arrival to its last one, where so long a silence as before the
    first, or the present one, is no gap of these arrivals: they have begun, or stopped.

    A rate that falls with the silence would be compared with the delays of the requests beside it.
    """
    if seen.arrivals.size < FEWEST_ARRIVALS:
        return seen
    gaps = np.diff(seen.arrivals)
    longest = max(SILENCE * float(gaps.mean()), BEYOND_LARGEST * float(gaps.max()))
    first, last = float(seen.arrivals[0]), float(seen.arrivals[-1])
    seen = seen.since(first) if first - seen.start > longest else seen
    return seen.ending(last) if seen.now - last > longest else seen


def _predicted(
    model: Model, estimates: Estimates, known: Known
) -> tuple[Prediction | None, CachedPrediction | None]:
    """The last exact one moved, where that will do; else solved. Raises UnstableQueueError."""
    rate = estimates.arrival_rate.value
    cached, slope = known.cached, known.sensitivity
    if (
        cached is not None
        and slope is not None
        and slope.fresh(estimates.epoch, estimates.now, model.load(rate))
    ):
        moved = (
            cached.moved(model, rate, slope, estimates.now)
            if cached.epoch == estimates.epoch
            else None
        )
        if moved is not None:
            return moved, cached
    found = _predict(model, rate)
    if found is None:
        return None, None
    smooth = (
        _predict(dataclasses.replace(model, law=model.law.without_stalls()), rate)
        if model.law.stall_share
        else None
    )
    return found, CachedPrediction.of(
        found, model, rate, estimates.epoch, estimates.now, smooth=smooth
    )


def _stalled(
    cached: CachedPrediction | None, mean: float | None, policy: Policy, backlog: float
) -> StalledDelay | None:
    """What stalls do to the mean, else in the proportion that the cached prediction had; None
    where there are none or theory has no answer.
    """
    if backlog and mean:
        return StalledDelay(mean, mean - backlog)
    if cached is None or cached.smooth is None or not mean:
        return None
    whole, smooth = (_mean(each, policy) for each in (cached.prediction, cached.smooth))
    return None if not whole or smooth is None else StalledDelay(mean, mean * smooth / whole)


def _nothing(seen: Snapshot, estimates: Estimates, policy: Policy) -> Assessment:
    compared = compare(seen, UNKNOWN, client_assumptions(seen), sojourn=policy.joins_running)
    return Assessment(
        estimates=estimates,
        load=UNKNOWN,
        prediction=None,
        sensitivity=None,
        compared=compared,
    )


def model_of(
    policy: Policy,
    lengths: TokenDistribution,
    law: LatencyModel,
    limits: Limits,
    estimates: Estimates,
) -> Model:
    """The queue of the estimates under this policy, with these lengths and this law."""
    cut = limits.batch_tokens if estimates.prompts_cut > RARELY_CUT else None
    step = step_bound(policy, limits.max_num_seqs, limits.step_tokens, cut)
    matter = (law.kp or step is not None) and estimates.prompt_tokens.counts.size
    model = Model(
        policy=policy,
        output_tokens=lengths,
        law=law,
        prompt_tokens=estimates.prompt_tokens.law() if matter else None,
        max_num_seqs=limits.max_num_seqs,
        step_tokens=step,
        servers=limits.servers,
        patience=limits.patience,
        sequences=estimates.call_sizes,
        intraclass_correlation=0.0
        if estimates.call_sizes is None
        else significant(estimates.alike(policy, limits.max_num_seqs)),
        predictor=parse_predictor(estimates.predictor or "none"),
    )
    return _in_memory(model, limits, estimates)


def known_memory(limits: Limits, estimates: Estimates) -> tuple[int, int] | None:
    """The KV memory, and what the mean request holds of it beside its prompt, whether or not its
    answer gets so long; None where one of them or the prompts are not known.
    """
    memory, held = limits.max_context_tokens, estimates.held_tokens
    if memory is None or not math.isfinite(held) or not estimates.prompt_tokens.counts.size:
        return None
    limit = math.inf if limits.max_output_tokens is None else limits.max_output_tokens
    return memory, max(1, round(min(held, limit)))


def _in_memory(model: Model, limits: Limits, estimates: Estimates) -> Model:
    """With the engine's KV memory, where first come, first served may wait for it in slots: each
    request holds its prompt, and for the rest as much as the mean one.
    """
    known = known_memory(limits, estimates)
    if known is None:
        return model
    memory, reserved = known
    policy = model.policy
    alone = policy.joins_running and is_first_come(policy) and model.sequences is None
    if not alone:
        return model
    try:
        limited = dataclasses.replace(
            model,
            prompt_tokens=estimates.prompt_tokens.law(),
            max_context_tokens=memory,
            reserved_tokens=reserved,
            max_output_tokens=reserved,
        )
    except SpecError:  # not even the largest one fits
        return model
    return limited if memory_limited(limited) else model


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


def _predict(model: Model, rate: float) -> Prediction | None:
    """Raises UnstableQueueError."""
    try:
        return predict_model(model, rate)
    except UnstableQueueError:
        raise
    except PredictionError:
        return None


def _asking(policy: Policy, limits: Limits, estimates: Estimates) -> Ask:
    """The mean by simulation on common random numbers: its noise cancels in ratios, and a run
    takes 10 ms under every policy.
    """

    def ask(
        rate: float,
        lengths: TokenDistribution,
        law: LatencyModel,
        sequences: TokenDistribution | None = None,
        correlation: float | None = None,
    ) -> float:
        model = model_of(policy, lengths, law, limits, estimates)
        model = model if sequences is None else dataclasses.replace(model, sequences=sequences)
        if correlation is not None:
            model = dataclasses.replace(model, intraclass_correlation=correlation)
        if model.load(rate) >= 1 and limits.patience is None:
            return math.inf
        count = _simulated(policy)
        run = simulate_run(model, rate, count, np.random.SeedSequence(0)).after(count // 10)
        values = run.sojourn_time if policy.joins_running else run.queueing_delay
        return float(np.mean(values[~run.lost]))

    return ask


def _simulated(policy: Policy) -> int:
    return SIMULATED if is_first_come(policy) else SIMULATED_OUTSIDE


def _mean(prediction: Prediction | None, policy: Policy) -> float | None:
    """Of the quantity that is compared: dispatched requests' delay, as lost ones have none."""
    if prediction is None:
        return None
    found: Quantiles = (
        prediction.sojourn_time if policy.joins_running else prediction.served_queueing_delay
    )
    return found.mean


def _settled(
    seen: Snapshot,
    clients: Sequence[Assumption],
    relaxation: float,
    waiting_before: int,
    free: float,
) -> Assumption:
    """Not judged of a closed loop, which forgets sooner than the open queue whose relaxation
    time this is.
    """
    closed = any(each.name == "open_loop" and each.holds is False for each in clients)
    known = math.inf if closed else relaxation
    return settled(
        seen.now - seen.start,
        seen.start - seen.epoch_at,
        known,
        waiting_before=waiting_before,
        free_rate=max(free, 1e-9),
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


def _renewed(
    known: Sensitivity | None, model: Model, load: float, estimates: Estimates, limits: Limits
) -> Sensitivity:
    """The known one while it is fresh."""
    if known is not None and known.fresh(estimates.epoch, estimates.now, load):
        return known
    ask = _asking(model.policy, limits, estimates)
    return sensitivity(
        ask,
        estimates,
        model.law,
        load,
        limit=limits.max_output_tokens,
        pole=model.patience is None,
        alike=estimates.alike(model.policy, limits.max_num_seqs),
    )
