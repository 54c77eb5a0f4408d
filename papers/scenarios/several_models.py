"""Several models on one machine: the queue of `kendall predict --second-model`, its requests drawn
as those of the other scenarios. The orders of the slides, as texts:

    fcfs        single
    exhaustive  single, first=loaded
    shortest    single:order=spjf,by=service: predicted seconds, the loading included
"""

from __future__ import annotations

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_trace
from kendall.queueing.simulation.fast import Trace
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential


def simulate_models(queue: Queue, arrival_rate: float, runs: Replications) -> Measured:
    """Mean sojourn time under Poisson arrivals."""
    lengths = queue.requests.output_tokens

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        arrived_at = unit_exponential(rng, runs.jobs) / arrival_rate
        output = lengths.sample(rng, runs.jobs)
        predicted = predicted_tokens(
            queue.requests.predictor, rng, output.astype(float), lengths.longest
        )
        prompts = np.zeros(runs.jobs, dtype=np.int64)
        trace = Trace(arrived_at, output, prompts, residuals=[rng], predicted=predicted)
        return (run_trace(queue, trace).sojourn_time,)

    (sojourn,) = measured(run, runs)
    return sojourn
