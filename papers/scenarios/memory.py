"""KV memory: continuous batching whose requests hold prompt + generated tokens of a bounded memory,
in orders by predicted length or by memory-time; and calls to tools inside of requests.

    step = k3 n + k4 + k1 m + kp (tokens computed) + swaps      n in service, m of them entered
    T_forward(C) = k1 + kp C    T_swap(C) = swap_setup + swap_token C      C tokens of context

A request that loses its memory goes back into the queue and has prompt + generated computed again.
Interrupted ones (orders `remaining`, `trail`) lose it at once, or keep it until others need it
(`keep`). A request may call a tool once; during the call its memory is

    preserve     held                     wastes  call x C                    token-seconds
    discard      freed, computed again    wastes  T_forward(C) x (all tokens in memory)
    swap         moved out and back       wastes  2 T_swap(C) x (all tokens in memory)
    least-waste  the least of the three by the predicted call, when it begins (INFERCEPT, 2024)

Orders, lower rank first, by predictions made at the arrival:

    fcfs         arrival
    shortest     output tokens
    remaining    output tokens left, preemptive     trail   the same, not from c x the output on
    with-call    step x output + seconds of the call
    memory-time  token-seconds: step x sum of (prompt + j, j = 1 .. output), and for the call call x
                 C, T_forward(C) C or 2 T_swap(C) C (MARS, 2024); without calls and with one prompt
                 length the order of `shortest`

Conditions: every request fits alone; residual, stalls, k2 and turnaround of the law are not used.
Without a memory bound it is `continuous` (queueing.simulation.slot_kernels); with one slot and no
prompts M/G/1 under an order (queueing.models.soap). Sources: Abhyankar et al., INFERCEPT (2024);
Shahout et al., Fast inference for augmented LLMs (2024), Don't stop me now (2025); the slides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.kv_memory import (
    DISCARD,
    KEEP,
    PRESERVE,
    ToolCalls,
    held_in_calls,
)
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.simulation import memory_kernels
from kendall.queueing.simulation.kernels import Floats
from kendall.queueing.simulation.memory_kernels import Engine, Order, Path, Work
from kendall.queueing.simulation.orders.interrupting_kernels import NEVER, Interrupting
from papers.scenarios.runs import Measured, Replications, measured, unit_exponential

HANDLINGS = {"least-waste" if name == "auto" else name: kind for name, kind in KEEP.items()}
ORDERS = ("fcfs", "shortest", "remaining", "trail", "with-call", "memory-time")
UNBOUNDED = 2**62
EXACT = PredictorText("exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEngine:
    """What serves: `slots`, `memory` in tokens, the law; seconds of a swap each way."""

    law: LatencyModel
    slots: int
    memory: int = UNBOUNDED
    keep: bool = False
    swap_setup: float = 0.0
    swap_token: float = 0.0

    def __post_init__(self) -> None:
        if self.slots < 1 or self.memory < 1:
            raise SpecError(
                f"got slots={self.slots}, memory={self.memory}; expected at least 1 of both"
            )
        if self.swap_setup < 0 or self.swap_token < 0:
            raise SpecError(
                f"got swap_setup={self.swap_setup:g}, swap_token={self.swap_token:g}; expected "
                "seconds >= 0"
            )

    @property
    def full_step(self) -> float:
        """Seconds of a step with all slots taken."""
        return self.law.step(self.slots)

    def forward(self, tokens: Vector) -> Vector:
        """T_forward."""
        return np.asarray(self.law.speed * (self.law.k1 + self.law.kp * tokens))

    def swap(self, tokens: Vector) -> Vector:
        """T_swap."""
        return np.asarray(self.swap_setup + self.swap_token * tokens)

    def compiled(self) -> Engine:
        """As the kernel takes it."""
        law = self.law
        k1, k3, k4, kp, kr = (law.speed * each for each in (law.k1, law.k3, law.k4, law.kp, law.kr))
        preempt = PRESERVE if self.keep else DISCARD
        times = k1, k3, k4, kp, kr, self.swap_setup, self.swap_token
        return Engine(self.slots, self.memory, preempt, *times)


class Ranking(NamedTuple):
    """value + slope x tokens made, lower first; one that has made `limit` tokens of its output or
    more is not interrupted for another.
    """

    value: Floats
    slope: float
    limit: Floats

    @property
    def order(self) -> Order:
        """As the kernel takes it."""
        no_levels = np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), 0
        form = Interrupting(
            self.value, self.limit, 1.0, math.nan, self.slope, False, 0, *no_levels, NEVER, 0.0, 0.0
        )
        return Order(form, np.empty(0))


def run_memory(work: Work, ranking: Ranking, engine: Engine) -> tuple[Path, Floats]:
    """What happens to each request, and what was wasted
    (queueing.simulation.memory_kernels.run_memory).
    """
    return memory_kernels.run_memory(work, ranking.order, engine)


NO_CALLS = ToolCalls(share=0.0, kinds=((1.0, 0.0),))


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryWork:
    """Poisson arrivals with independent lengths, their predictor, and calls."""

    arrival_rate: float
    prompt_tokens: TokenDistribution
    output_tokens: TokenDistribution
    predictor: PredictorText = EXACT
    calls: ToolCalls = NO_CALLS
    handling: str = "preserve"

    def __post_init__(self) -> None:
        if self.handling not in HANDLINGS:
            raise SpecError(f"got handling={self.handling!r}; expected {', '.join(HANDLINGS)}")

    def drawn(self, rng: np.random.Generator, count: int) -> tuple[Work, Vector]:
        """Requests, and their predicted lengths. The same numbers are drawn whatever the
        handling.
        """
        arrived_at = unit_exponential(rng, count) / self.arrival_rate
        prompt = self.prompt_tokens.sample(rng, count)
        output = self.output_tokens.sample(rng, count)
        longest = self.output_tokens.longest
        predicted = predicted_tokens(self.predictor, rng, output.astype(float), longest)
        after, seconds, told = self.calls.drawn(rng, output)
        handling = np.full(count, HANDLINGS[self.handling])
        return Work(arrived_at, prompt, output, after, seconds, told, handling), predicted


def ranking(
    order: str, work: Work, predicted: Vector, engine: MemoryEngine, c: float = 0.8
) -> Ranking:
    """The ranks of these requests."""
    none = np.zeros(len(predicted))
    match order:
        case "fcfs":
            return Ranking(none, 0.0, none)
        case "shortest":
            return Ranking(predicted, 0.0, none)
        case "remaining":
            return Ranking(predicted, -1.0, np.full(len(predicted), np.inf))
        case "trail":
            return Ranking(predicted, -1.0, c * predicted)
        case "with-call":
            return Ranking(engine.full_step * predicted + work.predicted_call, 0.0, none)
        case "memory-time":
            return Ranking(memory_time(work, predicted, engine), 0.0, none)
        case _:
            raise SpecError(f"got order={order!r}; expected {', '.join(ORDERS)}")


def memory_time(work: Work, predicted: Vector, engine: MemoryEngine) -> Vector:
    """Token-seconds that each request is predicted to hold, in steps with all slots taken."""
    generated = predicted * work.prompt + predicted * (predicted + 1) / 2
    context = np.where(work.call_after > 0, work.prompt + work.call_after, 0)
    again, moved = engine.forward(context), engine.swap(context)
    known = work.handling, work.predicted_call, context, again, moved
    held = held_in_calls(*known, memory=float(engine.memory))
    return np.asarray(engine.full_step * generated + held)


@dataclass(frozen=True, slots=True)
class MemoryMeans:
    """Means over requests: seconds in the system (calls included), to the first token; losses of
    memory before the end; token-seconds wasted idle and in stalls.
    """

    sojourn: Measured
    first_token: Measured
    lost_memory: Measured
    idle_waste: Measured
    stall_waste: Measured


def simulate_memory(
    work: MemoryWork, order: str, engine: MemoryEngine, runs: Replications, *, c: float = 0.8
) -> MemoryMeans:
    """Raises SpecError: an unknown order, requests that do not fit alone."""
    largest = work.prompt_tokens.longest + work.output_tokens.longest
    if largest > engine.memory:
        raise SpecError(
            f"got memory={engine.memory}; expected {largest} tokens, the largest request"
        )

    def run(rng: np.random.Generator) -> tuple[Vector, ...]:
        drawn, predicted = work.drawn(rng, runs.jobs)
        path, waste = run_memory(
            drawn, ranking(order, drawn, predicted, engine, c), engine.compiled()
        )
        each = np.ones(runs.jobs) / runs.jobs
        return (
            path.ended_at - drawn.arrived_at,
            path.first_token_at - drawn.arrived_at,
            path.lost_memory.astype(float),
            *(total * each for total in waste),
        )

    return MemoryMeans(*measured(run, runs))
