"""The queue that counters describe, what the model says of it, and how far the next hour may be
from that.

Replicas are taken as equal, each with a queue of its own to which its share of the requests comes
as a Poisson process. The step law gives the shape; its speed is the one with which the model's mean
service is the observed one. A server counts the wait for the begin of the next step as queueing
delay, also of a request that finds a free slot; so does the prediction.

An engine whose speed changes within the hour has more delay than one with the same speed
throughout, at a load of 0.7 often twice as much. So where it changes it is simulated, at pieces of
the speeds that its parts had.

The interval holds nine of ten hours: hours are simulated, each at a rate and a speed that are
drawn about the estimated ones by as much as they moved from one hour to the next before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from kendall.policies.text import counted
from kendall.queueing.distributions.laws import SUPPORT_LIMIT
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.estimation.counters.bucketed_lengths import law_of_buckets
from kendall.queueing.estimation.counters.samples import Totals
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.outlook import (
    ENOUGH,
    LEVEL,
    USUAL_DRIFT,
    USUAL_STRETCHES,
    band,
)
from kendall.queueing.estimation.replayed import replayed
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed_path import SpeedPath
from kendall.queueing.measurement.batch_means import normal, student
from kendall.queueing.models.slots.continuous import SlotTime, in_service, next_step
from kendall.queueing.prediction.steady_state import doubt_of, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast
from kendall.queueing.simulation.experiment import run_given

MOST = 200_000  # requests that are simulated for an interval
FEWEST = 20  # requests of an hour that is judged
USUAL_SERVICE_DRIFT = 0.02  # of the log of the mean service, as if so seen once
MODEL_ERROR = 0.05  # of a mean, relative: what an approximation that is not in doubt is known to
SPREAD = 8.0  # standard deviations of the number in service that slots are followed to
WIDEST, NEAR = 3.0, 1e-5  # log of the speed: reach and accuracy of the search
METHOD, SHORT = "approximation", 0.02  # delay over sojourn below which it is far off
LONGEST = 1e9  # seconds of a service, in place of an infinite one


class Level(NamedTuple):
    """Of a stretch: requests/s of one replica, seconds of a service alone in the engine, and the
    relative standard errors of both.
    """

    arrival_rate: float
    rate_error: float
    service: float
    length_error: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedFleet:
    """Estimates of one stretch of time."""

    arrival_rate: float  # requests/s of one replica
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None
    law: LatencyModel
    slots: int | None  # of one replica; None: not known, and nothing is taken to wait for one
    outside: float  # seconds of a request outside the engine
    requests: float  # of all replicas, in that time
    dispersion: float  # of the arrivals of its parts: variance over mean
    pace: SpeedPath | None  # the law's speed within that time, where it changed

    @property
    def queue(self) -> Queue:
        """The queue of one replica. Slots that are never taken are left out."""
        prompts = self.prompt_tokens if self.law.kp else None
        if self.slots is None:
            return Queue.read("continuous", self.output_tokens, self.law, prompt_tokens=prompts)
        time = SlotTime(self.law, self.output_tokens, prompts)
        running = self.arrival_rate * time.mean(self.slots, refilled=True)  # or fewer
        slots = min(self.slots, math.ceil(running + SPREAD * math.sqrt(running) + SPREAD))
        policy = f"continuous:max_batch_size={slots}"
        return Queue.read(policy, self.output_tokens, self.law, prompt_tokens=prompts)

    @property
    def rate_error(self) -> float:
        """Relative standard error of the arrival rate."""
        return math.sqrt(max(1.0, self.dispersion) / self.requests)

    @property
    def length_error(self) -> float:
        """Relative standard error of the mean length."""
        return math.sqrt(self.output_tokens.scv / self.requests)

    @property
    def level(self) -> Level:
        """What `Movement` reads of it."""
        service = self.law.step(1) * self.output_tokens.mean
        return Level(self.arrival_rate, self.rate_error, service, self.length_error)

    def at(self, **changes: object) -> ObservedFleet:
        """The same with other estimates."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def at_service(self, seconds: float) -> ObservedFleet:
        """At the speed with which the mean service, from the first step on, is this."""
        if not math.isfinite(seconds) or seconds <= 0:
            return self

        def excess(log_speed: float) -> float:
            queue = self.at(law=self.law.at_speed(math.exp(log_speed))).queue
            modelled = in_service(queue.slot_time, self.arrival_rate, queue.bound)
            return math.log(min(modelled, LONGEST) / seconds)

        middle = math.log(self.law.speed)
        ends = middle - WIDEST, middle + WIDEST
        if excess(ends[0]) >= 0 or excess(ends[1]) <= 0:
            return self
        return self.at(law=self.law.at_speed(math.exp(brentq(excess, *ends, xtol=NEAR))))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPrediction:
    """Means of a stretch; seconds. The intervals hold nine of ten."""

    load: float
    queueing_delay: Estimate
    sojourn_time: Estimate
    method: str


@dataclass(frozen=True, slots=True)
class Movement:
    """How far the arrivals of one stretch, and the services, are from those of the one before:
    standard deviations of the logs.
    """

    arrivals: float = USUAL_DRIFT
    services: float = USUAL_SERVICE_DRIFT

    @classmethod
    def of(cls, levels: Iterable[Level]) -> Movement:
        """From successive stretches, beyond chance; what is usual counts as one more of them."""
        rates, rate_errors, services, length_errors = (
            np.array([*levels], dtype=float).reshape(-1, len(Level._fields)).T
        )
        return cls(
            _moved(rates, rate_errors, USUAL_DRIFT),
            _moved(services, length_errors, USUAL_SERVICE_DRIFT),
        )


def _moved(values: Vector, errors: Vector, usual: float) -> float:
    chance = errors**2
    squares = np.maximum(np.diff(np.log(values)) ** 2 - chance[1:] - chance[:-1], 0.0)
    total = USUAL_STRETCHES * usual**2 + float(squares.sum())
    few = student(squares.size + 2, LEVEL) / normal(LEVEL)  # it is estimated from so many itself
    return few * math.sqrt(total / (USUAL_STRETCHES + squares.size))


def observed_fleet(
    seen: Totals,
    law: LatencyModel,
    slots: int | None,
    dispersion: float = 1.0,
    pace: SpeedPath | None = None,
) -> ObservedFleet | None:
    """The estimates of a stretch, at its own speed; None where too little came, or neither lengths
    nor times of service are counted.
    """
    rate, mean = seen.rate("arrived"), seen.mean_output
    if not (seen.total("arrived") >= FEWEST and rate > 0 and math.isfinite(mean)):
        return None
    lengths = _lengths(seen, "output_tokens", mean)
    prompts = _lengths(seen, "computed_tokens", seen.mean_computed)
    if lengths is None:
        return None
    return ObservedFleet(
        arrival_rate=rate,
        output_tokens=lengths,
        prompt_tokens=prompts,
        law=law,
        slots=slots,
        outside=seen.outside,
        requests=seen.total("arrived"),
        dispersion=dispersion,
        pace=pace,
    ).at_service(seen.service)


def _lengths(seen: Totals, name: str, mean: float) -> TokenDistribution | None:
    """By its histogram; without one geometric with the mean for answers, one length for prompts."""
    if not math.isfinite(mean):
        return None
    counted_by = seen.lengths.get(name)
    if counted_by is not None and counted_by.uppers.size:
        found = law_of_buckets(counted_by.uppers, counted_by.counts, mean)
        if found is not None:
            return found
    if name == "output_tokens" and mean > 1:
        n = np.arange(1.0, min(SUPPORT_LIMIT, math.ceil(40 * mean)) + 1)
        pmf = np.append(0.0, np.exp((n - 1) * math.log1p(-1 / mean)))
        return TokenDistribution(pmf / pmf.sum())
    return TokenDistribution.from_counts([max(1, round(mean))])


def predicted(
    fleet: ObservedFleet, moved: Movement | None = None, seed: int = 0
) -> FleetPrediction:
    """The means of the next stretch like this one; with intervals where `moved` says how far such
    stretches are apart.
    """
    queue, rate = fleet.queue, fleet.arrival_rate
    wait = next_step(queue.slot_time, rate, queue.bound)
    (delay, sojourn), method = _means(fleet, queue, seed)
    means = delay + wait, sojourn
    ends = [(-math.inf, math.inf)] * 2
    if moved is not None:
        bands = [band(each) for each in _hours(fleet, queue, moved, wait, seed)]
        ends = [
            (min(found.low, mean * (1 - MODEL_ERROR)), max(found.high, mean * (1 + MODEL_ERROR)))
            for found, mean in zip(bands, means, strict=True)
        ]
    estimates = [
        Estimate(mean + added, low + added, high + added, float(ENOUGH + 1))
        for mean, (low, high), added in zip(means, ends, (0.0, fleet.outside), strict=True)
    ]
    return FleetPrediction(
        load=rate / queue.largest_stable_rate,
        queueing_delay=estimates[0],
        sojourn_time=estimates[1],
        method=method,
    )


def _means(fleet: ObservedFleet, queue: Queue, seed: int) -> tuple[tuple[float, float], str]:
    """Delay and sojourn of such a stretch, and by which method. Where the speed changes, the
    approximation is not to be trusted, a delay is very short, or more comes than is served, they
    are simulated.
    """
    if fleet.pace is not None and fleet.arrival_rate < queue.largest_stable_rate:
        long = fleet.at(requests=float(MOST))
        return _mean_of(_hours(long, queue, seed=seed)), "simulation"
    try:
        answer = predict_model(queue, fleet.arrival_rate, METHOD)
    except (UnstableQueueError, NotConvergedError):
        answer = None
    if answer is not None and doubt_of(answer) is None:
        delay, sojourn = answer.queueing_delay.mean, answer.sojourn_time.mean
        if delay is not None and sojourn is not None and not 0 < delay < SHORT * sojourn:
            return (delay, sojourn), answer.method
    return _mean_of(_hours(fleet, queue, seed=seed)), "simulation"


def _mean_of(hours: Vector) -> tuple[float, float]:
    delay, sojourn = hours.mean(axis=1)
    return float(delay), float(sojourn)


def _hours(
    fleet: ObservedFleet,
    queue: Queue,
    moved: Movement | None = None,
    wait: float = 0.0,
    seed: int = 0,
) -> Vector:
    """Mean delays and sojourns of simulated hours, a row each, at the estimates, or drawn about
    them as far as such hours moved. `wait`: for the next step, on average, which the delay of a
    server has too.
    """
    requests = int(min(fleet.requests, MOST / (ENOUGH + 1)))
    errors = (0.0, 0.0)
    if moved is not None:
        errors = (
            math.hypot(moved.arrivals, fleet.rate_error),
            math.hypot(moved.services, fleet.length_error),
        )
    found = []
    for index in range(ENOUGH + 1):
        stream = np.random.SeedSequence(seed, spawn_key=(index,))
        rng = np.random.default_rng(stream.spawn(1)[0])
        faster, slower = np.exp(errors * rng.standard_normal(2))
        own = queue.but(law=queue.engine.law.at_speed(queue.engine.law.speed * slower))
        given = fast.draw_trace(own, fleet.arrival_rate * faster, requests, stream)
        delay, sojourn = _simulated(own, given, fleet.pace, stream)
        if wait:
            delay += wait * _relative_wait(fleet.arrival_rate * sojourn, faster, requests, rng)
        found.append((delay, sojourn))
    return np.array(found).T


def _simulated(
    model: Queue, given: fast.Trace, pace: SpeedPath | None, stream: np.random.SeedSequence
) -> tuple[float, float]:
    """Mean delay and sojourn of these requests."""
    if pace is None:
        run = run_given(model, given, stream)
        return float(run.queueing_delay.mean()), float(run.sojourn_time.mean())
    rng = np.random.default_rng(stream.spawn(1)[0])
    at = given.arrived_at
    path = pace.resampled(float(at[-1]), model.engine.law.speed, rng)
    again = replayed(model, given, machine=path, draws=1)
    return float((again.dispatched[0] - at).mean()), float((again.released[0] - at).mean())


def _relative_wait(running: float, faster: float, requests: int, rng: np.random.Generator) -> float:
    """The mean wait for the next step of so many requests over the one that is expected: whoever
    finds the engine busy waits for a part of a step, any part alike.
    """
    busy, before = -math.expm1(-running * faster), -math.expm1(-running)
    spread = math.sqrt(max(0.0, 4 / (3 * busy) - 1) / requests)
    return busy / before * (1 + spread * float(rng.standard_normal()))


def slots_of(seen: Sequence[Totals]) -> int | None:
    """The most that one replica ran while something waited; None where nothing ever did."""
    most = [each.most_while_waiting for each in seen if each.most_while_waiting >= 1]
    return int(max(most)) if most else None


def slots_in_words(slots: int | None, given: int | None, most_running: float) -> str:
    """Where the number of slots is from."""
    if given is not None:
        return f"{counted(given, 'slot')} a replica, as given"
    if slots is not None:
        return f"{counted(slots, 'slot')} a replica: the most that ran while something waited"
    ran = f"{most_running:.0f} ran at most" if math.isfinite(most_running) else "nothing is counted"
    return (
        f"slots not known, {ran} and nothing waited: no wait for a slot is predicted; "
        "--max-num-seqs says how many there are"
    )
