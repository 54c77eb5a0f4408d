"""How long a run has to be, told before it: the number of requests for a mean delay to +-10 %.

The mean of n delays has variance sigma^2 / n for large n, sigma^2 = sum over all lags of their
autocovariances. With w the mean delay, z the normal quantile and r the relative half width asked
for,

    n = ASSURANCE (z / q)^2 sigma^2 / w^2
        and at least 450 memories, m = sigma^2 / Var W requests

where q < r is the half width by the run's variance alone: what is printed is wider, as a lucky run
underestimates both (queueing.measurement.mean_interval; q = 0.072 for r = 0.1, 0.121 for 0.2, 0.139
for 0.25). ASSURANCE = 2.4 pays for the estimate of that variance; with it nine runs of ten print
+-r or better. The least length is what the interval itself needs to be trusted. The 5 % that
warm-up may take are added.

One request at a time (M/G/1), sigma^2 is exact (queueing.measurement.delay_variance). Any other
queue is simulated for a second, and sigma^2 taken from 100 to 1,000 batch means of that pilot.

>>> rule = advise_model(Queue.read("single", "deterministic:value=1", "a=1,c=0"), 0.9)  # M/D/1
>>> rule.requests, rule.how
(403659, 'exact')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kendall.policies.durations import rounded_duration
from kendall.policies.immediate import Single
from kendall.policies.text import SpecError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.measurement.batch_means import (
    TOO_WIDE,
    FloatArray,
    batch_means_interval,
    normal,
)
from kendall.queueing.measurement.delay_variance import DelayMoments, mg1_delay_moments
from kendall.queueing.measurement.mean_interval import plug_in
from kendall.queueing.measurement.warm_up import WARM_UP
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run

Quantity = Literal["queueing_delay", "sojourn_time"]

ASSURANCE = 2.4
PILOT, SLOW_PILOT, GENERIC_PILOT = (
    2_000_000,
    500_000,
    10_000,
)  # requests; continuous engines; policy objects
PILOT_BATCHES, BATCH_MEMORIES = 100, 30
# below, coverage falls short (0.89 at 100) and n_eff may fall below what an interval needs
LEAST_MEMORIES = 450


@dataclass(frozen=True, slots=True)
class RunLength:
    """How many requests a run needs, warm-up included."""

    requests: int
    seconds: float
    # nine runs of ten print an interval of the mean no wider; less than asked where the least
    # length binds
    relative_half_width: float
    confidence: float
    load: float
    quantity: Quantity
    memory: float  # requests over which the quantity is remembered
    how: str  # exact | pilot of ... requests


@dataclass(frozen=True, slots=True)
class _Moments(DelayMoments):
    how: str


def advise_model(
    model: Queue,
    rate: float,
    *,
    relative: float = 0.1,
    confidence: float = 0.95,
    quantity: Quantity | None = None,
) -> RunLength:
    """Requests for the mean of `quantity` to +-`relative`.

    Without `quantity`: the queueing delay, of policies that join a running batch the sojourn.
    Raises SpecError, UnstableQueueError.
    """
    _check(relative, confidence)
    load = model.stable_load(rate)
    chosen: Quantity = quantity or (
        "sojourn_time" if model.policy.joins_running else "queueing_delay"
    )
    found = _moments(model, rate, chosen)
    if not found.mean > 0:
        raise SpecError(
            f"got load {load:.3g}, where no request waits in a {found.how}; expected a higher "
            "load, or the sojourn time"
        )
    # equal values tell no more together than one
    memory = found.asymptotic_variance / found.variance if found.variance else 1.0
    precision = (normal(confidence) / plug_in(relative)) ** 2
    needed = ASSURANCE * precision * found.asymptotic_variance / found.mean**2
    kept = max(needed, LEAST_MEMORIES * memory)
    requests = math.ceil(kept / (1 - WARM_UP))
    return RunLength(
        requests=requests,
        seconds=requests / (rate * model.requests.call_size),
        relative_half_width=relative * math.sqrt(needed / kept),
        confidence=confidence,
        load=load,
        quantity=chosen,
        memory=memory,
        how=found.how,
    )


def _check(relative: float, confidence: float) -> None:
    if not 0 < relative <= TOO_WIDE:
        raise SpecError(
            f"got relative={relative}; expected 0 < relative <= {TOO_WIDE}, beyond which a run "
            "counts as too short"
        )
    if not 0 < confidence < 1:
        raise SpecError(f"got confidence={confidence}; expected a number between 0 and 1")


def describe(advice: RunLength) -> str:
    """One line."""
    name, width = advice.quantity.replace("_", " "), 100 * advice.relative_half_width
    return (
        f"load {advice.load:.2f}: {_rounded(advice.requests):,} requests "
        f"({rounded_duration(advice.seconds)}) for +-{width:.3g} % of the mean {name} in nine "
        f"runs of ten ({advice.how})"
    )


def _moments(model: Queue, rate: float, quantity: Quantity) -> _Moments:
    plain = (
        isinstance(model.policy, Single)
        and model.engine.servers == 1
        and model.requests.patience is None
        and model.requests.sequences is None
        and model.arrivals.scv == 1
        and model.arrivals.process is None
    )
    return (
        exact_moments(model, rate)
        if plain and quantity == "queueing_delay"
        else pilot_moments(model, rate, quantity)
    )


def exact_moments(model: Queue, rate: float) -> _Moments:
    moments = mg1_delay_moments(
        rate,
        _service_moments(
            ServiceTime.of(
                model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
            )
        ),
    )
    return _Moments(moments.mean, moments.variance, moments.asymptotic_variance, "exact")


def _service_moments(service: ServiceTime) -> list[float]:
    """E S .. E S^4; the residual is gamma with mean 1."""
    residual, moments = 1.0, []
    for n in range(1, 5):
        residual *= 1 + (n - 1) * service.cv**2
        moments.append(residual * float(service.weights @ service.values**n))
    return moments


def pilot_moments(model: Queue, rate: float, quantity: Quantity) -> _Moments:
    from kendall.queueing.simulation.fast import is_compiled  # noqa: PLC0415 - numba is loaded only where something is simulated

    count = (
        (SLOW_PILOT if model.policy.joins_running else PILOT)
        if is_compiled(model)
        else GENERIC_PILOT
    )
    run = simulate_run(model, rate, count, np.random.SeedSequence(0)).after(int(WARM_UP * count))
    values: FloatArray = getattr(run, quantity)[~run.lost]
    rough = batch_means_interval(values, batches=PILOT_BATCHES)
    batches = int(
        min(max(values.size / (BATCH_MEMORIES * rough.memory), PILOT_BATCHES), 10 * PILOT_BATCHES)
    )
    interval, variance = batch_means_interval(values, batches=batches), float(values.var())
    return _Moments(
        interval.mean, variance, variance * interval.memory, f"pilot of {count:,} requests"
    )


def _rounded(count: int) -> int:
    """Up to two figures and a half: advice is no more exact."""
    step = int(max(1, 5 * 10 ** (len(str(count)) - 3)))
    return -(-count // step) * step
