"""Disaggregated prefill and decode, simulated: the trace of `kendall simulate`, and the exact
recursion of queueing.models.tandem on it.

Service times are drawn from the law itself, not from the classes of queueing.latency.service_time:
X ((1 - q) h + s K) at each station, with a residual and stalls of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.tandem import tandem_path
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Prediction, Station
from kendall.queueing.simulation.fast import draw_trace
from kendall.queueing.simulation.simulated_means import (
    Kind,
    kind_of_runs,
    mean_of_runs,
    summary_of_runs,
)

NAMES = ("prefill", "decode")


def simulate_tandem(
    model: Queue,
    arrival_rate: float,
    num_requests: int,
    streams: Sequence[np.random.SeedSequence],
    *,
    warm_up: int,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Means with standard errors over one run for each of `streams`; the first `warm_up`
    requests of each are left out.
    """
    runs = [_run(model, arrival_rate, num_requests, stream, warm_up) for stream in streams]
    delays, services = ([run[part] for run in runs] for part in (0, 1))
    kind = kind_of_runs(model)
    total = summary_of_runs([delay.sum(axis=0) for delay in delays], kind, model.levels)
    first_tokens = [delay.sum(axis=0) + service[0] + step for delay, service, step in runs]
    stations = _stations(arrival_rate, delays, services, kind)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method="simulation",
        stable=True,
        load=model.load(arrival_rate),
        utilisation=float(np.mean([station.load for station in stations])),
        queueing_delay=total,
        sojourn_time=summary_of_runs(
            [(delay + service).sum(axis=0) for delay, service, _ in runs], kind
        ),
        batch_size=Mean(1.0),
        served_queueing_delay=total,
        time_to_first_token=summary_of_runs(first_tokens, kind, model.levels),
        assumptions=(*model.assumptions, *notes),
        **model.counted(arrival_rate),
        stations=stations,
    )


def _stations(
    arrival_rate: float, delays: Sequence[Vector], services: Sequence[Vector], kind: Kind
) -> tuple[Station, ...]:
    return tuple(
        Station(
            name,
            arrival_rate * float(np.mean([service[i].mean() for service in services])),
            summary_of_runs([delay[i] for delay in delays], kind),
            Mean(*mean_of_runs([service[i] for service in services])),
        )
        for i, name in enumerate(NAMES)
    )


def _run(
    model: Queue,
    arrival_rate: float,
    num_requests: int,
    stream: np.random.SeedSequence,
    warm_up: int,
) -> tuple[Vector, Vector, Vector]:
    """Delays and service times (stations x requests), and each request's first decode step;
    seconds.
    """
    trace, law = draw_trace(model, arrival_rate, num_requests, stream), model.engine.law
    rngs = trace.residuals[0].spawn(len(NAMES))
    pace, prefill = drawn_services(
        law, law.speed * (law.k1 + law.k2 + law.kp * trace.prompt_tokens), rngs[0]
    )
    pace, decode = drawn_services(law, law.step(1) * trace.output_tokens, rngs[1])
    services = np.array([prefill, decode])
    delays = tandem_path(trace.arrived_at, services)
    return delays[:, warm_up:], services[:, warm_up:], (pace * law.step(1))[warm_up:]


def drawn_services(
    law: LatencyModel, seconds: Vector, rng: np.random.Generator
) -> tuple[Vector, Vector]:
    """Residual and service time of each request: X and X ((1 - q) h + s K), K ~ Poisson(q h /
    s).
    """
    residual = rng.gamma(law.cv**-2, law.cv**2, len(seconds)) if law.cv else np.ones(len(seconds))
    if not law.stall_share:
        return residual, residual * seconds
    stalls = rng.poisson(law.stall_rate * seconds)
    return residual, residual * ((1 - law.stall_share) * seconds + law.stall * stalls)
