"""What stands beside an observation: the simulator on the run's own arrivals, and the prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.compare import Predicted, Theory
from policies import Policy, Request
from queueing.distributions import TokenDistribution
from queueing.errors import PredictionError, UnstableQueueError
from queueing.latency import LatencyModel
from queueing.prediction import predict
from queueing.record import Record
from queueing.recursion import Served
from queueing.simulation import Job, simulate_trace

REPLICATIONS = 5  # draws of the residuals; without a residual one is enough
UNBOUNDED = 2**31


def theory_of(
    law: LatencyModel,
    output_tokens: TokenDistribution | None = None,
    asked_rate: float | None = None,
    max_num_seqs: int | None = None,
    seed: int = 0,
) -> Theory:
    """Everything a law can say about a run. Lengths and rate default to the run's own."""

    def replay(policy: Policy, group: Sequence[Served], at: LatencyModel) -> dict[str, tuple[float, float]]:
        return replay_arrivals(policy, group, at, max_num_seqs, seed)

    def predicted(policy: Policy, rate: float, group: Sequence[Served], at: LatencyModel) -> Predicted:
        lengths = output_tokens or TokenDistribution.from_counts([r.output_tokens for r in group if r.output_tokens])
        prompts = TokenDistribution.from_counts([max(1, r.prompt_tokens) for r in group]) if law.kp else None
        servers = 1 + max(request.server_id for request in group)
        return predict_means(policy, asked_rate or rate, lengths, at, max_num_seqs=max_num_seqs, prompt_tokens=prompts, servers=servers)

    return Theory(law=law, replay=replay, predict=predicted, asked_rate=asked_rate)


def replay_arrivals(
    policy: Policy, group: Sequence[Served], law: LatencyModel, max_num_seqs: int | None = None, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Start and release of every request had the law served it: means over draws of the residuals, by id.

    Who was cut short in the run is replayed with the tokens that it got. The queue begins empty.
    """
    servers = 1 + max(request.server_id for request in group)
    total = np.zeros((len(group), 2))
    draws = REPLICATIONS if law.cv else 1
    for child in np.random.SeedSequence(seed).spawn(draws):
        rngs = [np.random.default_rng(one) for one in child.spawn(servers)]
        for record in simulate_trace(policy, jobs_of(group), law, rngs, servers=servers, max_batch_size=max_num_seqs or UNBOUNDED):
            total[int(record.request_id)] += _instants(record)
    return {request.id: (start, release) for request, (start, release) in zip(group, (total / draws).tolist(), strict=True)}


def jobs_of(group: Sequence[Served]) -> list[Job]:
    """The requests as the simulator takes them, named by their place in the run."""
    return [
        Job(
            Request(id=str(index), arrived_at=r.arrived_at, prompt_tokens=r.prompt_tokens, max_output_tokens=max(1, r.output_tokens)),
            max(1, r.output_tokens),
        )
        for index, r in enumerate(group)
    ]


def _instants(record: Record) -> tuple[float, float]:
    assert record.dispatched_at is not None
    assert record.released_at is not None
    return record.dispatched_at, record.released_at


def predict_means(
    policy: Policy,
    rate: float,
    lengths: TokenDistribution,
    law: LatencyModel,
    *,
    max_num_seqs: int | None = None,
    prompt_tokens: TokenDistribution | None = None,
    servers: int = 1,
) -> Predicted:
    """Means of a prediction; None where there is no steady state or no method for it."""
    if not 0 < rate < math.inf:
        return Predicted(load=None, queueing_delay=None, sojourn_time=None)
    try:
        prediction = predict(policy, rate, lengths, law, max_num_seqs=max_num_seqs, prompt_tokens=prompt_tokens, servers=servers)
    except UnstableQueueError as error:
        return Predicted(load=error.load, queueing_delay=None, sojourn_time=None)
    except PredictionError:
        return Predicted(load=None, queueing_delay=None, sojourn_time=None)
    return Predicted(load=prediction.load, queueing_delay=prediction.queueing_delay.mean, sojourn_time=prediction.sojourn_time.mean)
