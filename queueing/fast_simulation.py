"""The named policies replayed on arrays by compiled kernels (queueing.kernels): what `kendall simulate` runs.

The trace is that of `queueing.experiment.draw_jobs`, number for number: the same generators spawned from the seed, so one seed
gives the same arrivals, lengths and residuals under every policy and in either simulator (common random numbers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.fixed import Fixed
from policies.immediate import Continuous
from queueing import kernels, slot_kernels
from queueing.distributions import TokenDistribution, Vector
from queueing.latency import LatencyModel
from queueing.model import Model

Ints = npt.NDArray[np.signedinteger[Any]]
MOST_SLOTS = 4096  # of a continuous server; beyond, the generic simulator
_GUIDE = 8192


@dataclass(frozen=True, eq=False)
class Trace:
    """Arrivals (s), lengths and the generators of the residuals, one per server."""

    arrived_at: Vector
    output_tokens: Ints
    prompt_tokens: Ints
    residuals: list[np.random.Generator]


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """What happened to each request, in order of arrival; instants in seconds, not-a-number and batch -1 where it was lost."""

    arrived_at: Vector
    dispatched_at: Vector
    released_at: Vector
    first_token_at: Vector
    server_free_at: Vector
    batch_id: Ints
    batch_size: Ints
    server_id: Ints
    output_tokens: Ints

    @property
    def lost(self) -> npt.NDArray[np.bool_]:
        """Those whose patience ran out."""
        return self.batch_id < 0

    @property
    def queueing_delay(self) -> Vector:
        """Dispatch - arrival."""
        return self.dispatched_at - self.arrived_at

    @property
    def sojourn_time(self) -> Vector:
        """Release - arrival."""
        return self.released_at - self.arrived_at

    def after(self, first: int) -> SimulatedRun:
        """Without the first requests (the warm-up)."""
        return SimulatedRun(**{name: getattr(self, name)[first:] for name in self.__dataclass_fields__})


def draw_trace(model: Model, arrival_rate: float, num_requests: int, stream: np.random.SeedSequence) -> Trace:
    """Poisson arrivals and independent lengths."""
    arrivals, lengths, prompts, *residuals = (np.random.default_rng(child) for child in stream.spawn(3 + model.servers))
    return Trace(
        np.cumsum(arrivals.exponential(1 / arrival_rate, num_requests)),
        _sample(model.output_tokens, lengths, num_requests),
        np.zeros(num_requests, dtype=np.int64) if model.prompt_tokens is None else _sample(model.prompt_tokens, prompts, num_requests),
        residuals,
    )


def replay(model: Model, trace: Trace) -> SimulatedRun:
    """The policy on the trace. The queue closes with the last arrival."""
    bound = 2**31 if model.bound is None else model.bound
    law = model.law
    coefficients = (law.k1, law.k2, law.k3, law.k4, law.kp, law.speed)
    deadlines = trace.arrived_at + (math.inf if model.patience is None else model.patience)
    lengths = trace.output_tokens, trace.prompt_tokens
    fixed = model.policy if isinstance(model.policy, Fixed) else None
    wait_for, max_wait = (1, math.inf) if fixed is None else (bound, fixed.max_wait)
    if isinstance(model.policy, Continuous):
        found = slot_kernels.run_slots(trace.arrived_at, *lengths, deadlines, coefficients, law.turnaround, model.servers, bound)
    elif model.servers == 1 and model.patience is None and max_wait == math.inf:
        residuals = _residuals(law, trace)
        found = kernels.run_one_server(trace.arrived_at, *lengths, coefficients, residuals, bound, wait_for, model.policy.padded)
    else:
        limits = (model.servers, bound, wait_for, max_wait, model.policy.padded)
        found = kernels.run_batches(trace.arrived_at, *lengths, deadlines, coefficients, _residuals(law, trace), *limits)
    dispatched, released, first, free, batch, sizes, server = found
    return SimulatedRun(trace.arrived_at, dispatched, released, first, free, batch, sizes, server, trace.output_tokens)


def is_compiled(model: Model) -> bool:
    """Whether the kernels cover it: all but a continuous engine with thousands of slots."""
    return not isinstance(model.policy, Continuous) or (model.bound is not None and model.bound <= MOST_SLOTS)


def _residuals(law: LatencyModel, trace: Trace) -> Vector:
    """One draw per batch that there can be at most, for each server."""
    if law.cv == 0:
        return np.empty((len(trace.residuals), 0))
    shape = law.cv**-2
    return np.array([rng.gamma(shape, 1 / shape, len(trace.arrived_at)) for rng in trace.residuals])


def _sample(lengths: TokenDistribution, rng: np.random.Generator, size: int) -> Ints:
    """What `TokenDistribution.sample` draws, by a guide table."""
    return np.asarray(kernels.invert(*_guided(lengths), rng.random(size)))


@lru_cache(maxsize=8)
def _guided(lengths: TokenDistribution) -> tuple[Vector, Ints]:
    return lengths.cdf, kernels.build_guide(lengths.cdf, _GUIDE)
