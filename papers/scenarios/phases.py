"""Prefill and decode as two phases of a request on GPUs that serve one phase of one request at a
time: queues of the product with requests of several kinds, whose lengths are known in advance.

    dedicated  prefills on some servers, decodes on others (`disaggregated`)
    pooled     any server serves any phase: after its prefill a request waits again
               (`prefill_servers` 0); first come, first served it goes on at once

Prefill takes k1 + k2 + kp prompt seconds, decode (k3 + k4) output; nothing is paid for a decode on
another server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_trace
from kendall.queueing.simulation.fast import Trace
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseWork:
    """Poisson arrivals; each request is of one of `kinds`, each (probability, prompt tokens, output
    tokens).
    """

    arrival_rate: float
    kinds: tuple[tuple[float, TokenDistribution, TokenDistribution], ...]
    law: LatencyModel

    def drawn(self, rng: np.random.Generator, count: int) -> Trace:
        """`count` requests; their lengths are predicted exactly."""
        arrived_at = unit_exponential(rng, count) / self.arrival_rate
        chances = [chance for chance, *_ in self.kinds]
        kind = rng.choice(len(chances), count, p=chances)
        drawn = [[each.sample(rng, count) for each in tokens] for _, *tokens in self.kinds]
        prompt, output = (np.choose(kind, [row[part] for row in drawn]) for part in (0, 1))
        return Trace(arrived_at, output, prompt, predicted=output.astype(float))

    def phases(self, drawn: Trace) -> Vector:
        """Seconds of prefill and decode [2, n]."""
        law = self.law
        prefill = law.speed * (law.k1 + law.k2 + law.kp * drawn.prompt_tokens)
        return np.array([prefill, law.step(1) * drawn.output_tokens])

    @property
    def seconds(self) -> tuple[float, float]:
        """Mean seconds of prefill and decode."""
        prompt = sum(chance * prompts.mean for chance, prompts, _ in self.kinds)
        output = sum(chance * outputs.mean for chance, _, outputs in self.kinds)
        law = self.law
        return law.speed * (law.k1 + law.k2 + law.kp * prompt), law.step(1) * output


def queue_of_phases(work: PhaseWork, policy: str, servers: int, prefill_servers: int = 0) -> Queue:
    """The product's queue of requests with known lengths, on servers that prefill only and
    `servers` behind them, or that do both; its lengths are those of the longest kind, as each
    request has lengths of its own.
    """
    _, prompts, outputs = max(work.kinds, key=lambda kind: kind[2].longest)
    return Queue.read(
        policy,
        outputs,
        work.law,
        prompt_tokens=prompts,
        predictor="exact",
        disaggregated=True,
        prefill_servers=prefill_servers,
        servers=servers,
    )


def simulate_queue(work: PhaseWork, queue: Queue, runs: Replications) -> tuple[Measured, Measured]:
    """Mean sojourn time and mean time to the end of the prefill, in a queue of the product."""

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn = work.drawn(rng, runs.jobs)
        served = run_trace(queue, replace(drawn, residuals=rng.spawn(queue.engine.servers)))
        return served.sojourn_time, served.stations[0].released_at - drawn.arrived_at

    sojourn, first = measured(run, runs)
    return sojourn, first
