"""Prefill and decode as two phases of a request on GPUs that serve one phase of one request at a
time.

    dedicated  prefills on some servers, decodes on others
    together   any server; a request keeps it through both phases
    pooled     any server serves any phase: after its prefill a request waits again

The first two are queues of the product (`queue_of_phases`): `disaggregated` or not, first come,
first served or the shortest phase (together: request) first. Pooled, first come, first served, is
together: the request that came first goes on. Its other orders are simulated here, not interrupted,
equal ranks in order of arrival:

    prefill-first    that phase, then arrival
    shortest-phase   seconds of the phase
    shortest-left    seconds of what is left

Prefill takes k1 + k2 + kp prompt seconds, decode (k3 + k4) output; nothing is paid for a decode on
another server. Checked against a path made one event at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_trace
from kendall.queueing.simulation.fast import Trace
from kendall.queueing.simulation.kernels import Floats, compiled
from kendall.queueing.simulation.orders.kernels import pop, push
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential

ORDERS = ("prefill-first", "shortest-phase", "shortest-left")
PREFILL, DECODE = 0, 1


class PhaseRanks(NamedTuple):
    """A level for each phase, then a value for each phase and request [2, n]; lower first."""

    level: Floats
    value: Floats


def run_pooled(
    arrived_at: Vector, seconds: Vector, ranks: PhaseRanks, servers: int
) -> tuple[Vector, Vector]:
    """End of the prefill and of the decode of each request, whose phases take `seconds` [2, n]."""
    count = len(arrived_at)
    ends, queue = np.full((2, count), np.nan), np.empty((2 * count, 4))
    free_at, busy = np.full(servers, np.inf), np.zeros((2, servers), dtype=np.int64)
    _run(arrived_at, seconds, ranks, (queue, free_at, busy), ends)
    return ends[PREFILL], ends[DECODE]


@compiled()
def _run(arrived_at, seconds, ranks, state, path):  # type: ignore[no-untyped-def]
    queue, free_at, busy = state
    waiting, come, phase, job = 0, 0, 0, 0
    while True:
        first = np.argmin(free_at)
        arrival = arrived_at[come] if come < len(arrived_at) else np.inf
        now = min(free_at[first], arrival)
        if now == np.inf:
            return
        if free_at[first] <= arrival:
            job, phase = busy[0, first], busy[1, first] + 1
            path[phase - 1, job] = now
            free_at[first] = np.inf
        else:
            job, phase = come, PREFILL
            come += 1
        if phase <= DECODE:
            rank = ranks[0][phase], ranks[1][phase, job], float(job)
            push(queue, waiting, rank, 2 * job + phase)
            waiting += 1
        for s in range(len(free_at)):
            if waiting > 0 and free_at[s] == np.inf:
                code = pop(queue, waiting)
                waiting -= 1
                job, phase = code // 2, code % 2
                busy[0, s], busy[1, s] = job, phase
                free_at[s] = now + seconds[phase, job]


def phase_ranks(order: str, seconds: Vector) -> PhaseRanks:
    """For requests whose phases take these seconds [2, n], known in advance."""
    none, equal = np.zeros_like(seconds), np.zeros(2)
    match order:
        case "prefill-first":
            return PhaseRanks(np.array([0.0, 1.0]), none)
        case "shortest-phase":
            return PhaseRanks(equal, seconds)
        case "shortest-left":
            return PhaseRanks(equal, np.array([seconds.sum(axis=0), seconds[DECODE]]))
        case _:
            raise SpecError(f"got order={order!r}; expected {', '.join(ORDERS)}")


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


def queue_of_phases(work: PhaseWork, policy: str, servers: int, *, dedicated: bool) -> Queue:
    """The product's queue of requests with known lengths, one server of each kind or `servers`;
    its lengths are those of the longest kind, as each request has lengths of its own.
    """
    _, prompts, outputs = max(work.kinds, key=lambda kind: kind[2].longest)
    return Queue.read(
        policy,
        outputs,
        work.law,
        prompt_tokens=prompts,
        predictor="exact",
        disaggregated=dedicated,
        servers=servers,
    )


def simulate_queue(work: PhaseWork, queue: Queue, runs: Replications) -> tuple[Measured, Measured]:
    """Mean sojourn time and mean time to the end of the prefill, in a queue of the product."""

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn = work.drawn(rng, runs.jobs)
        served = run_trace(queue, replace(drawn, residuals=rng.spawn(queue.engine.servers)))
        prefilled = served.released_at - work.phases(drawn)[DECODE]
        if served.stations:
            prefilled = served.stations[PREFILL].released_at
        return served.sojourn_time, prefilled - drawn.arrived_at

    sojourn, first = measured(run, runs)
    return sojourn, first


def simulate_pooled(
    work: PhaseWork, order: str, servers: int, runs: Replications
) -> tuple[Measured, Measured]:
    """The same under an order of phases."""

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn = work.drawn(rng, runs.jobs)
        at, seconds = drawn.arrived_at, work.phases(drawn)
        prefilled, ended = run_pooled(at, seconds, phase_ranks(order, seconds), servers)
        return ended - at, prefilled - at

    sojourn, first = measured(run, runs)
    return sojourn, first
