"""Prefill and decode as two phases of a request on GPUs that serve one phase of one request at a
time: dedicated, pooled, or together.

    dedicated  the first `prefill` servers serve prefills, the others decodes: two queues in series
    pooled     any server serves any phase: after its prefill a request waits again
    together   any server; a request keeps it through both phases

Prefill takes k1 + k2 + kp prompt seconds, decode (k3 + k4) output; a decode on another server than
its prefill takes `transfer` seconds per prompt token more (its KV cache has to come over). Orders,
by predicted phases (exact or not), not interrupted, equal ranks in order of arrival:

    fcfs             arrival                 prefill-first, decode-first   that phase, then arrival
    shortest-phase   seconds of the phase    shortest-left                 seconds of what is left

Checked against closed forms: together is M/G/c with the sum of both; dedicated 1 + 1 first come,
first served is queueing.models.tandem.tandem_path; pooled on one server, decode first, is together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.simulation.kernels import Floats, compiled, inner
from kendall.queueing.simulation.orders.kernels import pop, push
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential

LAYOUTS = ("dedicated", "pooled", "together")
ORDERS = ("fcfs", "prefill-first", "decode-first", "shortest-phase", "shortest-left")
PREFILL, DECODE = 0, 1


class Phases(NamedTuple):
    """Of each request: arrival, seconds of both phases [2, n], seconds more for a decode
    elsewhere.
    """

    arrived_at: Floats
    seconds: Floats
    transfer: Floats


class PhaseRanks(NamedTuple):
    """A level for each phase, then a value for each phase and request [2, n]; lower first."""

    level: Floats
    value: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """How many servers; of them for prefills, where they are dedicated; seconds per token moved."""

    servers: int
    layout: str = "pooled"
    prefill: int = 0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise SpecError(f"got layout={self.layout!r}; expected {', '.join(LAYOUTS)}")
        if self.servers < 1 or self.transfer < 0:
            raise SpecError(
                f"got servers={self.servers}, transfer={self.transfer:g}; expected at least 1 and "
                "seconds >= 0"
            )
        dedicated = self.layout == "dedicated"
        if dedicated != (0 < self.prefill < self.servers):
            raise SpecError(
                f"got prefill={self.prefill} of {self.servers} servers, {self.layout}; expected "
                "some for prefills and some for decodes if dedicated, else prefill=0"
            )


def run_phases(work: Phases, ranks: PhaseRanks, gpus: Gpus) -> tuple[Vector, Vector]:
    """End of the prefill and of the decode of each request."""
    count = len(work.arrived_at)
    ends = np.full((2, count), np.nan)
    queues = np.empty((2, count, 4))
    split = gpus.prefill if gpus.layout == "dedicated" else gpus.servers
    servers = np.full(gpus.servers, np.inf), np.zeros((2, gpus.servers), dtype=np.int64)
    home = np.full(count, -1, dtype=np.int64)
    places = split, gpus.layout == "together"
    _run(work, ranks, places, (queues, *servers, home, np.zeros(3, np.int64)), ends)
    return ends[PREFILL], ends[DECODE]


@inner
def first_idle(ends, first, last):  # type: ignore[no-untyped-def]
    """The first idle server of a range, or -1."""
    for s in range(first, last):
        if ends[s] == np.inf:
            return s
    return -1


@inner
def start(now, part, work, split, state):  # type: ignore[no-untyped-def]
    """Give a server that is idle to `part`, a request and its phase."""
    (job, phase), (_, ends, busy, home, _) = part, state
    first, last = (0, split) if phase == PREFILL or split == len(ends) else (split, len(ends))
    s = home[job]
    if s < first or ends[s] < np.inf:
        s = first_idle(ends, first, last)
    seconds = work[1][phase, job]
    if phase == DECODE and s != home[job]:
        seconds += work[2][job]
    home[job] = s
    busy[0, s], busy[1, s] = job, phase
    ends[s] = now + seconds


@inner
def wait(job, phase, queue, ranks, state):  # type: ignore[no-untyped-def]
    """Put a phase of a request into a queue."""
    counts = state[4]
    rank = ranks[0][phase], ranks[1][phase, job], float(job)
    push(state[0][queue], counts[queue], rank, 2 * job + phase)
    counts[queue] += 1


@inner
def fill(now, work, split, state):  # type: ignore[no-untyped-def]
    """Idle servers take who goes first."""
    queues, ends, _, _, counts = state
    for queue in range(2):
        first, last = (0, split) if queue == 0 else (split, len(ends))
        while counts[queue] > 0 and first_idle(ends, first, last) >= 0:
            code = pop(queues[queue], counts[queue])
            counts[queue] -= 1
            start(now, (code // 2, code % 2), work, split, state)


@compiled()
def _run(work, ranks, places, state, path):  # type: ignore[no-untyped-def]
    arrived_at, (split, together) = work[0], places
    _, ends, busy, _, counts = state
    while True:
        s = 0
        for k in range(1, len(ends)):
            if ends[k] < ends[s]:
                s = k
        arrival = arrived_at[counts[2]] if counts[2] < len(arrived_at) else np.inf
        now = min(ends[s], arrival)
        if now == np.inf:
            return
        if ends[s] <= arrival:
            job, phase = busy[0, s], busy[1, s]
            path[phase, job] = now
            ends[s] = np.inf
            if phase == PREFILL and together:
                start(now, (job, DECODE), work, split, state)
            elif phase == PREFILL:
                wait(job, DECODE, 0 if split == len(ends) else 1, ranks, state)
        else:
            wait(counts[2], PREFILL, 0, ranks, state)
            counts[2] += 1
        fill(now, work, split, state)


def phase_ranks(order: str, predicted: Vector) -> PhaseRanks:
    """Of requests whose phases are predicted to take these seconds [2, n]."""
    none = np.zeros_like(predicted)
    equal = np.zeros(2)
    match order:
        case "fcfs":
            return PhaseRanks(equal, none)
        case "prefill-first":
            return PhaseRanks(np.array([0.0, 1.0]), none)
        case "decode-first":
            return PhaseRanks(np.array([1.0, 0.0]), none)
        case "shortest-phase":
            return PhaseRanks(equal, predicted)
        case "shortest-left":
            return PhaseRanks(equal, np.array([predicted.sum(axis=0), predicted[DECODE]]))
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

    def drawn(self, rng: np.random.Generator, count: int, transfer: float) -> Phases:
        """`count` requests."""
        arrived_at = unit_exponential(rng, count) / self.arrival_rate
        chances = [chance for chance, *_ in self.kinds]
        kind = rng.choice(len(chances), count, p=chances)
        drawn = [[each.sample(rng, count) for each in tokens] for _, *tokens in self.kinds]
        prompt, output = (np.choose(kind, [row[part] for row in drawn]) for part in (0, 1))
        law = self.law
        prefill = law.speed * (law.k1 + law.k2 + law.kp * prompt)
        return Phases(arrived_at, np.array([prefill, law.step(1) * output]), transfer * prompt)

    @property
    def seconds(self) -> tuple[float, float]:
        """Mean seconds of prefill and decode."""
        prompt = sum(chance * prompts.mean for chance, prompts, _ in self.kinds)
        output = sum(chance * outputs.mean for chance, _, outputs in self.kinds)
        law = self.law
        return law.speed * (law.k1 + law.k2 + law.kp * prompt), law.step(1) * output


def simulate_phases(
    work: PhaseWork, order: str, gpus: Gpus, runs: Replications
) -> tuple[Measured, Measured]:
    """Mean sojourn time and mean time to the end of the prefill; phases are known in advance."""

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn = work.drawn(rng, runs.jobs, gpus.transfer)
        prefilled, ended = run_phases(drawn, phase_ranks(order, drawn.seconds), gpus)
        return ended - drawn.arrived_at, prefilled - drawn.arrived_at

    sojourn, first = measured(run, runs)
    return sojourn, first
