"""What a cell's records say: the observation of the very window that the live prediction was made
of, and theory on the same records.

observed          queueing delays (continuous: sojourns) of who arrived in the window and was
                  dispatched, means by batch means
offline           the estimators and the prediction once more, from the run file instead of the
                  gateway's memory
measured service  the recursion on the run's own arrivals, batches and service times: gateway right
                  or wrong
answers           continuous: time to first token and sojourn time, means and p95, with what is
                  predicted for them
waiting           continuous: who waited more than `WAITED`, observed, and P(Wq > 0) at the
                  estimates; p99 of the sojourn simulated there
block speeds      measured over lawful service time in blocks: was the machine quiet
speed path        the same second by second
at its speeds     the predicted mean along that path, beside the prediction itself, which assumes a
                  constant speed
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.live.answers import DURATIONS, answers, predicted_again, whole_by
from bench.live.speed_path import LoadedQueue, speed_path
from loadgen.compare.compare import compare
from policies import Policy, parse_policy
from queueing.control.assess import Assessment, assess
from queueing.errors import PredictionError
from queueing.estimation.estimates import Estimates
from queueing.estimation.speed.batch_times import BatchTimes, batch_times
from queueing.estimation.window.window import Snapshot, snapshot_of
from queueing.estimation.window_queue import Limits
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Record, call_of
from queueing.model import Model
from queueing.models.slots.continuous import solve_continuous
from queueing.prediction import predict_model
from queueing.simulation.experiment import simulate_run

WAITED = 1e-3  # seconds: a slot that is free is given within less
SIMULATED = 200_000  # requests
FEWEST_IN_BLOCK = 10  # batches, or groups of a continuous engine
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is known of a cell when it is judged."""

    policy: str
    epoch: int
    records: Sequence[Record]  # of the epoch and of the one before, in which it settled
    shape: LatencyModel
    limits: Limits
    block: float  # seconds
    live: Plain | None  # the last live prediction, whose window is judged


def observe(cell: Cell) -> Plain:
    """Everything of it, as JSON."""
    seen = seen_in(cell)
    policy = parse_policy(cell.policy)
    found = assess(seen, cell.shape, cell.limits)
    times = batch_times(policy, seen.mine, cell.shape)
    return {
        "compared": "sojourn_time" if policy.joins_running else "queueing_delay",
        "window": {"start": seen.start, "end": seen.now, "seconds": seen.now - seen.start},
        "n": found.compared.n,
        "observed": found.compared.observed.to_dict()
        | {name: each.to_dict() for name, each in found.compared.observed_quantiles.items()},
        "offline": _offline(found),
        "measured_service": measured_service(cell.records, cell.epoch, seen.now),
        "answers": _answers(cell, seen, found) if policy.joins_running else None,
        "waiting": _waiting(policy, seen, cell, found.estimates) if policy.joins_running else None,
        "block_speeds": block_speeds(times, cell.block),
        "speed_path": speed_path(times),
        "at_its_speeds": at_its_speeds(found, cell.shape, speed_path(times)),
    }


def _answers(cell: Cell, seen: Snapshot, found: Assessment) -> list[Plain]:
    """With what the gateway predicted while it served; what that has not, predicted again."""
    mine = [record for record in cell.records if record.epoch == cell.epoch]
    again, live = predicted_again(found) or {}, cell.live or {}
    both = {name: (again.get(name) or {}) | _given(live.get(name) or {}) for name in DURATIONS}
    return answers(mine, (seen.start, seen.now), both)


def _given(values: Plain) -> Plain:
    return {name: value for name, value in values.items() if value is not None}


def seen_in(cell: Cell) -> Snapshot:
    """The window of the live prediction, rebuilt from the run file; without one, the whole epoch
    but for who was cut at its end.
    """
    if cell.live is not None:
        start, end = float(cell.live["window"]["start"]), float(cell.live["window"]["end"])
    else:
        mine = [
            each.arrived_at
            for each in _ended(cell.records, math.inf)
            if each.epoch == cell.epoch and each.arrived_at is not None
        ]
        start, end = min(mine), max(mine)
    found = snapshot_of(_ended(cell.records, end), cell.policy, start, end, epoch=cell.epoch)
    arrived = {
        each.request_id: each.arrived_at
        for each in cell.records
        if each.arrived_at is not None and start < each.arrived_at <= end
    }
    sizes = Counter(call_of(name) or name for name in arrived)
    calls = sorted(
        {call_of(name) or name: at for name, at in arrived.items()}.items(),
        key=lambda call: call[1],
    )
    counts = np.array([float(sizes[name]) for name, _ in calls])
    return dataclasses.replace(
        found,
        arrivals=np.array([at for _, at in calls]),
        sequences=counts if (counts > 1).any() else None,
    )


def measured_service(records: Sequence[Record], epoch: int, end: float) -> Plain:
    """Observed mean of the epoch and that of the recursion, over the same requests. Seconds."""
    comparison = next(each for each in compare(_ended(records, end)) if each.epoch == epoch)
    service = comparison.quantity.measured_service
    assert service is not None
    return {
        "observed": comparison.quantity.observed.mean,
        "recursion": service.mean,
        "n": comparison.n,
    }


def _ended(records: Sequence[Record], end: float) -> list[Record]:
    """Whose answer was whole by then: the load is cut off when a cell ends."""
    return [each for each in records if whole_by(each, end)]


def block_speeds(times: BatchTimes, seconds: float) -> list[float]:
    """Measured over lawful service time of consecutive blocks; a block with too few batches
    joins the next.
    """
    if not times.count:
        return []
    edges = np.arange(times.at[0], times.at[-1], seconds)
    block = np.searchsorted(edges, times.at, "right")
    speeds, measured, fitted, number = [], 0.0, 0.0, 0
    for index in range(1, block[-1] + 1):
        mine = block == index
        measured, fitted, number = (
            measured + times.measured[mine].sum(),
            fitted + times.fitted[mine].sum(),
            number + int(mine.sum()),
        )
        if number >= FEWEST_IN_BLOCK:
            speeds.append(float(measured / fitted))
            measured, fitted, number = 0.0, 0.0, 0
    return speeds


def at_its_speeds(found: Assessment, shape: LatencyModel, path: Sequence[float]) -> float | None:
    """The predicted mean at the speeds of the path, seconds; None where the queue is not simulated,
    or would not be stable.

    By simulation, times the exact mean at a constant speed over the same simulated.
    """
    model, rate, fast = (
        found.model,
        found.estimates.arrival_rate.value,
        found.estimates.wander.fast_cv,
    )
    if model is None or found.prediction is None:
        return None
    along = dataclasses.replace(
        model,
        law=dataclasses.replace(
            shape.at_speed(1.0), cv=min(model.law.cv, fast) if fast >= 0 else model.law.cv
        ),
    )
    plain = dataclasses.replace(model, law=model.law.without_stalls())
    wandering, steady = LoadedQueue.of(along, rate), LoadedQueue.of(plain, rate)
    if wandering is None or steady is None or len(path) < 2:
        return None
    exact, simulated = (
        predict_model(plain, rate).served_queueing_delay.mean,
        steady.at_speeds([1.0, 1.0]),
    )
    mean = wandering.at_speeds(path)
    return None if not exact or not simulated or mean is None else mean * exact / simulated


def _offline(found: Assessment) -> Plain:
    return {
        "prediction": None if found.prediction is None else found.prediction.as_dict(),
        "interval": found.compared.predicted.to_dict(),
        "load_interval": found.load.to_dict(),
        "estimates": found.estimates.summary(),
        "comparison": found.compared.to_dict(),
    }


def _waiting(policy: Policy, seen: Snapshot, cell: Cell, estimates: Estimates) -> Plain:
    delays = seen.judged()
    observed = float(np.mean(delays > WAITED)) if delays.size else None
    lengths, law = (
        estimates.output_tokens.law(cell.limits.max_output_tokens),
        estimates.law(cell.shape),
    )
    prompts = estimates.prompt_tokens.law() if law.kp else None
    model = Model(
        policy=policy,
        output_tokens=lengths,
        law=law,
        prompt_tokens=prompts,
        max_num_seqs=cell.limits.max_num_seqs,
    )
    try:
        predicted = solve_continuous(
            model.slot_time, estimates.arrival_rate.value, model.bound
        ).waiting
    except PredictionError:
        predicted = None
    sojourn_p99 = simulated_p99(model, estimates.arrival_rate.value)
    return {
        "observed": observed,
        "predicted": predicted,
        "n": int(delays.size),
        "simulated_sojourn_p99": sojourn_p99,
    }


def simulated_p99(model: Model, rate: float) -> float | None:
    """Of the sojourn, seconds: the approximation of a continuous engine has no quantiles of it."""
    if model.load(rate) >= 1:
        return None
    run = simulate_run(model, rate, SIMULATED, np.random.SeedSequence(0)).after(SIMULATED // 10)
    return float(np.quantile(run.sojourn_time, 0.99))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
