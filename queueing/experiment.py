"""`simulate`: Poisson arrivals and lengths drawn first, as data, then the policy replayed on them; means with standard errors.

The queue starts empty; the first tenth of the requests is dropped. The standard error comes from the replications, with
one replication from 20 batch means of consecutive requests. Every stream has its own generator, spawned from the seed:
arrivals, output tokens, prompt tokens, one residual stream per server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from policies.core import Policy, Request
from policies.text import SpecError
from queueing.distributions import TokenDistribution, Vector
from queueing.latency import LatencyModel
from queueing.model import Model
from queueing.record import Record
from queueing.result import LEVELS, Mean, Prediction, Quantiles
from queueing.simulation import Job, simulate_trace

WARM_UP = 0.1
BATCH_MEANS = 20
NUM_REQUESTS = 100_000


def simulate(
    policy: Policy,
    arrival_rate: float,
    output_tokens: TokenDistribution,
    law: LatencyModel,
    *,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    replications: int = 1,
    max_output_tokens: int | None = None,
    max_num_seqs: int | None = None,
    prompt_tokens: TokenDistribution | None = None,
    servers: int = 1,
    patience: float | None = None,
) -> Prediction:
    """Simulated means with standard errors, over `replications` runs of `num_requests` each."""
    model = Model(
        policy=policy,
        output_tokens=output_tokens if max_output_tokens is None else output_tokens.clip(max_output_tokens),
        law=law,
        prompt_tokens=prompt_tokens,
        max_num_seqs=max_num_seqs,
        servers=servers,
        patience=patience,
    )
    return simulate_model(model, arrival_rate, num_requests=num_requests, seed=seed, replications=replications)


def simulate_model(
    model: Model,
    arrival_rate: float,
    *,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    replications: int = 1,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """`simulate` for a model that is put together already."""
    if replications < 1 or num_requests * (1 - WARM_UP) < BATCH_MEANS:
        raise SpecError(f"got {num_requests} requests and {replications} replications; expected at least {2 * BATCH_MEANS} and 1")
    load = model.load(arrival_rate)
    streams = np.random.SeedSequence(seed).spawn(replications)
    runs = [_run(model, arrival_rate, num_requests, stream) for stream in streams]
    waits, sojourns, served, sizes, lost = zip(*(_series(run, model.patience) for run in runs), strict=True)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method="simulation",
        stable=True,
        load=load,
        utilisation=float(np.mean([_busy(run) / model.servers for run in runs])),
        queueing_delay=_summary(waits),
        sojourn_time=_summary(sojourns),
        batch_size=Mean(_mean(sizes), _standard_error(sizes)),
        loss_fraction=_mean(lost),
        served_queueing_delay=_summary(served),
        assumptions=(*model.assumptions, *notes),
    )


def draw_jobs(
    model: Model, arrival_rate: float, num_requests: int, stream: np.random.SeedSequence
) -> tuple[list[Job], list[np.random.Generator]]:
    """The trace and the residual generators of one replication."""
    arrivals, lengths, prompts, *residuals = (np.random.default_rng(child) for child in stream.spawn(3 + model.servers))
    instants = np.cumsum(arrivals.exponential(1 / arrival_rate, num_requests)).tolist()
    outputs = model.output_tokens.sample(lengths, num_requests).tolist()
    inputs = [0] * num_requests if model.prompt_tokens is None else model.prompt_tokens.sample(prompts, num_requests).tolist()
    limit = model.output_tokens.longest
    patience = math.inf if model.patience is None else model.patience
    jobs = [
        Job(Request(id=str(i), arrived_at=at, prompt_tokens=inputs[i], max_output_tokens=limit, deadline=at + patience), outputs[i])
        for i, at in enumerate(instants)
    ]
    return jobs, residuals


def _run(model: Model, arrival_rate: float, num_requests: int, stream: np.random.SeedSequence) -> list[Record]:
    jobs, residuals = draw_jobs(model, arrival_rate, num_requests, stream)
    bound = 2**31 if model.max_num_seqs is None else model.max_num_seqs
    records = simulate_trace(model.policy, jobs, model.law, residuals, servers=model.servers, max_batch_size=bound)
    records.sort(key=lambda record: record.arrived_at or 0.0)
    return records[int(WARM_UP * num_requests) :]


def _series(records: list[Record], patience: float | None) -> tuple[Vector, Vector, Vector, Vector, Vector]:
    """In order of arrival: delay (lost ones at their patience), sojourn, delay of the served, batch size per dispatch, lost or not."""
    served = [record for record in records if record.outcome == "completed"]
    waits = np.array([patience if record.queueing_delay is None else record.queueing_delay for record in records], dtype=float)
    sojourns = np.array([record.sojourn_time for record in served], dtype=float)
    delays = np.array([record.queueing_delay for record in served], dtype=float)
    sizes = {record.batch_id: record.batch_size for record in served}
    lost = np.array([record.outcome == "abandoned" for record in records], dtype=float)
    return waits, sojourns, delays, np.array(list(sizes.values()), dtype=float), lost


def _busy(records: list[Record]) -> float:
    """Servers busy on average, from the first dispatch to the last: union of the service intervals of each server."""
    spans = sorted(
        (r.server_id, r.dispatched_at, r.server_free_at)
        for r in records
        if r.server_id is not None and r.dispatched_at is not None and r.server_free_at is not None
    )
    busy, server, until = 0.0, -1, -math.inf
    for server_id, start, end in spans:
        if server_id != server:
            server, until = server_id, -math.inf
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / (max(end for _, _, end in spans) - min(start for _, start, _ in spans))


def _summary(series: Sequence[Vector]) -> Quantiles:
    values = np.concatenate(series)
    if not len(values):
        return Quantiles()
    quantiles = dict(zip(LEVELS, np.quantile(values, list(LEVELS.values())).tolist(), strict=True))
    return Quantiles(_mean(series), **quantiles, standard_error=_standard_error(series))


def _mean(series: Sequence[Vector]) -> float | None:
    values = np.concatenate(series)
    return float(values.mean()) if len(values) else None


def _standard_error(series: Sequence[Vector]) -> float | None:
    parts = series if len(series) > 1 else np.array_split(series[0], BATCH_MEANS)
    if any(len(part) == 0 for part in parts):
        return None
    means = np.array([part.mean() for part in parts])
    return float(means.std(ddof=1) / math.sqrt(len(means)))
