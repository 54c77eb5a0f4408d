"""Runs of one timetable under several orders of service, made by the simulator, and results of
orders made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kendall.loadgen.compare.comparison import (
    LengthGroup,
    LongestTenth,
    OrderResult,
    RatioInterval,
    VersusFirstCome,
)
from kendall.policies import Request, parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

LAW = LatencyModel(k2=0.01, k4=0.002)
LENGTHS = parse_distribution("uniform:low=1,high=60")


def jobs(
    rate: float, count: int, predictor: str = "exact", *, seed: int = 1, reverse: bool = False
) -> list[Job]:
    """`reverse`: the longest are predicted to be the shortest."""
    rng = np.random.default_rng(seed)
    instants = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    lengths = LENGTHS.sample(rng, count)
    told = predicted_tokens(parse_predictor(predictor), rng, lengths.astype(float), 10**6)
    told = 61 - told if reverse else told
    return [
        Job(
            Request(
                id=str(i),
                arrived_at=at,
                prompt_tokens=1,
                max_output_tokens=100,
                predicted_output_tokens=None if predictor == "none" else float(told[i]),
            ),
            int(lengths[i]),
        )
        for i, at in enumerate(instants)
    ]


def records(policy: str, drawn: Sequence[Job], epoch: int = 0) -> list[Record]:
    """Of one server, with the callers' ids; each epoch begins where the one before is long over."""
    later = 1e4 * epoch
    requests = [job.request._replace(arrived_at=job.request.arrived_at + later) for job in drawn]
    moved = [Job(request, job.output_tokens) for request, job in zip(requests, drawn, strict=True)]
    engine = SimulatedEngine(LAW, max_batch_size=64)
    found = simulate_trace(parse_policy(policy), moved, engine, [np.random.default_rng(0)])
    return [
        msgspec.structs.replace(
            record,
            request_id=f"{epoch}-{record.request_id}",
            client_request_id=f"run-{record.request_id}",
            batch_id=(record.batch_id or 0) + 10**6 * epoch,
            epoch=epoch,
        )
        for record in found
    ]


def group(
    shortest: int, longest: int, slowdown: float, predicted: float | None, again: float | None
) -> LengthGroup:
    return LengthGroup(
        shortest=shortest,
        longest=longest,
        mean_tokens=(shortest + longest) / 2,
        n=40,
        slowdown=RatioInterval(slowdown, 0.1 * slowdown),
        predicted=predicted,
        same_arrivals=again,
    )


FIRST_COME = OrderResult(
    policy="continuous:max_batch_size=4",
    order="fcfs",
    groups=(group(1, 4, 3.0, 2.9, 3.1), group(5, 5, 2.0, 2.1, 2.0), group(6, 60, 1.5, 1.4, 1.6)),
    longest=LongestTenth(delay=RatioInterval(0.05, 0.01), predicted=0.049, same_arrivals=0.051),
    versus=None,
)
SHORTEST = OrderResult(
    policy="continuous:max_batch_size=4",
    order="spjf",
    groups=(group(1, 4, 1.25, 1.2, 1.3), group(6, 60, 2.5, 2.4, 2.6)),
    longest=LongestTenth(delay=RatioInterval(0.11, 0.02), predicted=0.1, same_arrivals=0.12),
    versus=VersusFirstCome(
        delay=RatioInterval(0.625, 0.05),
        predicted=0.6,
        a_priori=0.61,
        same_arrivals=0.64,
        p99=1.75,
        longest=RatioInterval(2.2, 0.3),
        longest_predicted=2.05,
        paired=True,
    ),
)
AGING = OrderResult(
    policy="continuous:max_batch_size=4",
    order="spjf:aging=0.02",
    groups=(
        group(1, 4, 1.5, None, 1.45),
        group(5, 5, 1.6, None, None),
        group(6, 60, 2.0, None, 2.1),
    ),
    longest=LongestTenth(delay=RatioInterval(0.08, 0.02), predicted=None, same_arrivals=None),
    versus=VersusFirstCome(
        delay=RatioInterval(0.7, float("inf")),
        predicted=None,
        a_priori=None,
        same_arrivals=None,
        p99=None,
        longest=RatioInterval(float("nan"), float("inf")),
        longest_predicted=None,
        paired=False,
    ),
)
