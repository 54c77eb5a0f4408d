"""Disaggregated prefill and decode, simulated: the prefill servers on the arrivals, then the policy
on what they have finished, each by the loop of its own queue.

Where each station is one server for one request at a time, first come, first served, and all
transfers are equal, the exact recursion of queueing.models.tandem takes the place of both loops.
Service times are drawn from the law itself there: X ((1 - q) h + s K) at each station, with a
residual and stalls of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.tandem import tandem_path
from kendall.queueing.queue import Queue, ranks_by_prompt
from kendall.queueing.simulation.fast import COLUMNS, Ints, SimulatedRun, Trace

Serve = Callable[[Queue, Trace, int], SimulatedRun]


def run_stations(model: Queue, trace: Trace, since: int, serve: Serve) -> SimulatedRun:
    """Both stations, in order of arrival; `serve` runs a trace through the queue of one of them,
    and keeps the gaps between the tokens of the requests from `since` on.
    """
    engine = model.engine
    alone = engine.all_servers == 2 and isinstance(model.policy, Single)
    if alone and in_arrival_order(model.policy) and not engine.kv_transfer.token:
        return _recursion(model, trace)
    rngs = trace.residuals[0].spawn(engine.prefill_servers)
    predicted = np.empty(0) if ranks_by_prompt(model.policy) else trace.predicted
    first = serve(model.prefill, replace(trace, residuals=rngs, predicted=predicted), 0)
    transfer = engine.kv_transfer.setup + engine.kv_transfer.token * trace.prompt_tokens
    ready = first.released_at + transfer
    order = np.argsort(ready, kind="stable")
    second = serve(model.decode, _reordered(trace, ready, order), since)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    columns = {name: getattr(second, name)[places] for name in COLUMNS}
    decode = SimulatedRun(ready, trace.output_tokens, columns, gaps=second.gaps)
    return _in_turn(trace, first, decode)


def _reordered(trace: Trace, ready: Vector, order: Ints) -> Trace:
    """The requests as they come to the second station."""
    of_each = {
        name: values[order] if len(values := getattr(trace, name)) else values
        for name in ("output_tokens", "prompt_tokens", "predicted", "limits", "flows")
    }
    return replace(trace, arrived_at=ready[order], **of_each)


def _in_turn(trace: Trace, first: SimulatedRun, second: SimulatedRun) -> SimulatedRun:
    delays = first.queueing_delay + second.queueing_delay
    columns = {name: getattr(second, name) for name in COLUMNS}
    columns["dispatched_at"] = trace.arrived_at + delays
    return SimulatedRun(
        trace.arrived_at, trace.output_tokens, columns, gaps=second.gaps, stations=(first, second)
    )


def _recursion(model: Queue, trace: Trace) -> SimulatedRun:
    law, rngs = model.engine.law, trace.residuals[0].spawn(2)
    setups = law.speed * (law.k1 + law.k2 + law.kp * trace.prompt_tokens)
    _, prefill = drawn_services(law, setups, rngs[0])
    pace, decode = drawn_services(law, law.step(1) * trace.output_tokens, rngs[1])
    transfer = model.engine.kv_transfer.setup
    delays = tandem_path(trace.arrived_at, np.array([prefill, decode]), transfer)
    first = _served(trace, trace.arrived_at, delays[0], prefill, prefill)
    ready = first.released_at + transfer
    second = _served(trace, ready, delays[1], decode, pace * law.step(1))
    return _in_turn(trace, first, second)


def _served(
    trace: Trace, arrived_at: Vector, delays: Vector, services: Vector, first_tokens: Vector
) -> SimulatedRun:
    """One by one; `first_tokens`: seconds from dispatch to the end of the first step."""
    starts, numbers = arrived_at + delays, np.arange(len(delays))
    ends = starts + services
    columns = {
        "dispatched_at": starts,
        "released_at": ends,
        "first_token_at": starts + first_tokens,
        "server_free_at": ends,
        "batch_id": numbers,
        "batch_size": np.ones_like(numbers),
        "server_id": np.zeros_like(numbers),
    }
    return SimulatedRun(arrived_at, trace.output_tokens, columns)


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
