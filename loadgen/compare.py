"""One run beside theory: what was observed, and what it should have been for four reasons to differ.

    measured service   the recursion on the run's own arrivals, batches and service times: gateway right or wrong
    same arrivals      the run's own arrivals and lengths through the simulator, law at the run's speed: law right or wrong
    a priori           the asked rate and lengths and the law as calibrated: what could be known before the run
    predicted          the same, with the law at the run's own speed and residual: taken from service times, never from delays
    observed           with an interval from batch means

Deviation = observed / theory - 1. For `continuous` the sojourn is compared: waiting for the engine's next step
belongs to service there, and the delay alone is next to nothing at moderate load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadgen.timetable import delivered_rate
from policies import Policy, parse_policy
from queueing.latency import LatencyModel
from queueing.record import Record
from queueing.recursion import Served, batches, measured_starts, served
from queueing.speed import Replay, Speed, measured_speed
from queueing.statistics import FloatArray, Interval, mean_interval, warm_up

TOO_WIDE = 0.25  # half width over mean beyond which a run is too short to say anything


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one theory says, seconds; how far the observation is from it, with the half width of that deviation."""

    mean: float
    deviation: float  # observed / mean - 1
    half_width: float  # for a theory on the run's own arrivals: of the paired differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One quantity of a run, observed and in theory; None where a theory was not asked or cannot say."""

    observed: Interval
    measured_service: Estimate | None = None
    same_arrivals: Estimate | None = None
    a_priori: Estimate | None = None
    predicted: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The means of a prediction, seconds, and the load it was made for."""

    load: float | None
    queueing_delay: float | None
    sojourn_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy in one epoch."""

    policy: str
    epoch: int
    compared: Literal["queueing_delay", "sojourn_time"]
    n: int  # requests compared, after warm-up
    arrival_rate: float  # measured, per second
    asked_rate: float | None
    load: float | None
    batch_size: float  # mean over batches; for continuous: mean number in service at a dispatch
    speed: Speed | None
    queueing_delay: Quantity
    sojourn_time: Quantity

    @property
    def quantity(self) -> Quantity:
        """The one that is compared."""
        return self.sojourn_time if self.compared == "sojourn_time" else self.queueing_delay

    @property
    def prediction_error(self) -> float | None:
        """Observed / predicted - 1."""
        predicted = self.quantity.predicted
        return None if predicted is None else predicted.deviation

    @property
    def too_short(self) -> bool:
        """Whether the run is too short for its mean to be judged."""
        return self.quantity.observed.relative > TOO_WIDE


Predict = Callable[[Policy, float, Sequence[Served], LatencyModel], Predicted]  # policy, measured rate, the run, the law


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """What a run is compared with besides itself: the law, and how to simulate and predict under it."""

    law: LatencyModel
    replay: Replay | None = None
    predict: Predict | None = None
    asked_rate: float | None = None


def compare(records: Iterable[Record], theory: Theory | None = None) -> list[Comparison]:
    """One comparison per policy and epoch, in their order. Raises ValueError where no record was dispatched."""
    everyone = served(records)
    if not everyone:
        raise ValueError("got no dispatched request with arrival, dispatch and server's end; expected a run file of a gateway or simulator")
    starts = measured_starts(everyone)
    return [_compare(group, starts, theory) for group in groups(everyone)]


def groups(everyone: Iterable[Served]) -> list[list[Served]]:
    """Per epoch those that arrived and were dispatched in it, in order of arrival.

    A record carries the epoch of its dispatch; the change itself lies after the last dispatch of the epoch before, so
    who arrived by then is left out.
    """
    by_epoch: dict[int, list[Served]] = {}
    for request in everyone:
        by_epoch.setdefault(request.epoch, []).append(request)
    found, began_at = [], -math.inf
    for epoch in sorted(by_epoch):
        found.append([request for request in by_epoch[epoch] if request.arrived_at > began_at])
        began_at = max(request.dispatched_at for request in by_epoch[epoch])
    return [group for group in found if group]


def _compare(group: list[Served], starts: dict[str, float], theory: Theory | None) -> Comparison:
    policy, kept = parse_policy(group[0].policy), group[warm_up(len(group)) :]
    finished = [request for request in kept if request.completed and request.released_at is not None]
    rate = delivered_rate(np.array([request.arrived_at for request in group]))
    speed = measured_speed(policy, group, theory.law, theory.replay) if theory else None
    a_priori, predicted = _predictions(policy, rate, group, theory, speed)
    replayed = _replay(policy, group, theory, speed)
    return Comparison(
        policy=group[0].policy,
        epoch=group[0].epoch,
        compared="sojourn_time" if policy.joins_running else "queueing_delay",
        n=len(kept),
        arrival_rate=rate,
        asked_rate=theory.asked_rate if theory else None,
        load=a_priori.load if a_priori else None,
        batch_size=float(np.mean([members[0].batch_size for members in batches(kept)])),
        speed=speed,
        queueing_delay=_quantity(
            _array(r.dispatched_at - r.arrived_at for r in kept),
            _array(starts[r.id] - r.arrived_at for r in kept),
            _array(replayed[r.id][0] - r.arrived_at for r in kept) if replayed else None,
            a_priori.queueing_delay if a_priori else None,
            predicted.queueing_delay if predicted else None,
        ),
        sojourn_time=_quantity(
            _array(_sojourn(r) for r in finished),
            _array(_sojourn(r) + starts[r.id] - r.dispatched_at for r in finished),
            _array(replayed[r.id][1] - r.arrived_at for r in finished) if replayed else None,
            a_priori.sojourn_time if a_priori else None,
            predicted.sojourn_time if predicted else None,
        ),
    )


def _predictions(
    policy: Policy, rate: float, group: Sequence[Served], theory: Theory | None, speed: Speed | None
) -> tuple[Predicted | None, Predicted | None]:
    """With the law as calibrated, and at the run's speed."""
    if theory is None or theory.predict is None:
        return None, None
    a_priori = theory.predict(policy, rate, group, theory.law)
    return a_priori, a_priori if speed is None else theory.predict(policy, rate, group, speed.law(theory.law))


def _replay(policy: Policy, group: Sequence[Served], theory: Theory | None, speed: Speed | None) -> dict[str, tuple[float, float]] | None:
    if theory is None or theory.replay is None or speed is None:
        return None
    return theory.replay(policy, group, speed.law(theory.law))


def _quantity(
    observed: FloatArray, measured: FloatArray, replayed: FloatArray | None, a_priori: float | None, predicted: float | None
) -> Quantity:
    interval = mean_interval(observed)
    return Quantity(
        observed=interval,
        measured_service=_paired(observed, measured),
        same_arrivals=None if replayed is None else _paired(observed, replayed),
        a_priori=None if a_priori is None else _estimate(interval.mean, a_priori, interval.half_width),
        predicted=None if predicted is None else _estimate(interval.mean, predicted, interval.half_width),
    )


def _paired(observed: FloatArray, theory: FloatArray) -> Estimate:
    return (
        _estimate(float(observed.mean()), float(theory.mean()), mean_interval(observed - theory).half_width)
        if observed.size
        else _nothing()
    )


def _estimate(observed: float, mean: float, half_width: float) -> Estimate:
    if not mean:
        return Estimate(mean, 0.0 if observed == mean else np.inf, np.inf)
    return Estimate(mean, observed / mean - 1, half_width / abs(mean))


def _nothing() -> Estimate:
    return Estimate(np.nan, np.nan, np.inf)


def _sojourn(request: Served) -> float:
    assert request.released_at is not None
    return request.released_at - request.arrived_at


def _array(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, dtype=np.float64)
