"""Disaggregated prefill and decode, simulated: the prefill servers on the arrivals, then the policy
on what they have finished, each by the loop of its own queue.

Where each station is one server for one request at a time, first come, first served, and all
transfers are equal, the exact recursion of queueing.models.tandem takes the place of both loops.
Service times are drawn from the law itself there: X ((1 - q) h + s K) at each station, with a
residual and stalls of its own.

Where the same servers do both, a server serves one phase of one request at a time, not interrupted,
from one queue in which a request waits for either; its times are drawn in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order
from kendall.queueing.description.disaggregated import ranks_by_prompt
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.tandem import tandem_path
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import COLUMNS, Ints, SimulatedRun, Trace, predictions_of
from kendall.queueing.simulation.kernels import compiled, inner
from kendall.queueing.simulation.orders.kernels import pop, push
from kendall.queueing.simulation.orders.policy_order import phase_ranks

Serve = Callable[[Queue, Trace, int], SimulatedRun]


def run_stations(model: Queue, trace: Trace, since: int, serve: Serve) -> SimulatedRun:
    """Both stations, in order of arrival; `serve` runs a trace through the queue of one of them,
    and keeps the gaps between the tokens of the requests from `since` on.
    """
    engine = model.engine
    if engine.pooled:
        return _pooled(model, trace)
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
    services, step = _phases(model, trace)
    transfer = model.engine.kv_transfer.setup
    delays = tandem_path(trace.arrived_at, services, transfer)
    first = _served(trace, trace.arrived_at, trace.arrived_at + delays[0], services[0], services[0])
    ready = first.released_at + transfer
    second = _served(trace, ready, ready + delays[1], services[1], step)
    return _in_turn(trace, first, second)


def _pooled(model: Queue, trace: Trace) -> SimulatedRun:
    transfer, limit = model.engine.kv_transfer, float(model.requests.token_limit)
    services, step = _phases(model, trace)
    in_tokens = None
    if ranks_by_prompt(model.policy):
        in_tokens = _setups(model, trace) / model.engine.law.step(1)
    given = trace.arrived_at, predictions_of(model, trace), limit, trace.prompt_tokens
    ranks = phase_ranks(model.policy, *given, in_tokens=in_tokens)
    moves = transfer.setup + transfer.token * trace.prompt_tokens
    count, servers = len(trace.arrived_at), model.engine.servers
    free = np.full(servers, np.inf), np.zeros(servers, np.int64)
    starts, on = np.empty((2, count)), np.zeros((2, count), np.int64)
    work = trace.arrived_at, services, moves, ranks
    _run(work, (np.empty((2 * count, 4)), np.empty((count, 4)), *free), (starts, on))
    first = _served(trace, trace.arrived_at, starts[0], services[0], services[0], servers=on[0])
    ready = first.released_at + moves
    second = _served(trace, ready, starts[1], services[1], step, servers=on[1])
    return _in_turn(trace, first, second)


@inner
def _start(now, waiting, work, state, path):  # type: ignore[no-untyped-def]
    """How many wait once each free server has taken one."""
    (queue, _, free_at, busy), (starts, on) = state, path
    for s in range(len(free_at)):
        if waiting > 0 and free_at[s] == np.inf:
            busy[s] = pop(queue, waiting)
            waiting -= 1
            job, phase = busy[s] // 2, busy[s] % 2
            starts[phase, job], on[phase, job] = now, s
            free_at[s] = now + work[1][phase, job]
    return waiting


@compiled()
def _run(work, state, path):  # type: ignore[no-untyped-def]
    """Phase 0 is the prefill, 1 the decode, 2 the end."""
    arrived_at, _, moves, ranks = work
    queue, moving, free_at, busy = state
    waiting, away, coming, count = 0, 0, 0, len(arrived_at)
    while True:
        first = np.argmin(free_at)
        arrival = arrived_at[coming] if coming < count else np.inf
        moved = moving[0, 0] if away > 0 else np.inf
        now = min(free_at[first], arrival, moved)
        if now == np.inf:
            return
        if free_at[first] == now:
            job, phase = busy[first] // 2, busy[first] % 2 + 1
            free_at[first] = np.inf
            if phase == 1 and moves[job] > 0.0:
                push(moving, away, (now + moves[job], 0.0, float(job)), job)
                away += 1
                phase = 2
        elif moved == now:
            job, phase = pop(moving, away), 1
            away -= 1
        else:
            job, phase = coming, 0
            coming += 1
        if phase < 2:
            push(queue, waiting, (0.0, ranks[phase, job], float(job)), 2 * job + phase)
            waiting += 1
        waiting = _start(now, waiting, work, state, path)


def _setups(model: Queue, trace: Trace) -> Vector:
    law = model.engine.law
    return np.asarray(law.speed * (law.k1 + law.k2 + law.kp * trace.prompt_tokens))


def _phases(model: Queue, trace: Trace) -> tuple[Vector, Vector]:
    """Seconds of prefill and decode [2, n], and of a step of the decode."""
    law, rngs = model.engine.law, trace.residuals[0].spawn(2)
    _, prefill = drawn_services(law, _setups(model, trace), rngs[0])
    pace, decode = drawn_services(law, law.step(1) * trace.output_tokens, rngs[1])
    return np.array([prefill, decode]), pace * law.step(1)


def _served(
    trace: Trace,
    arrived_at: Vector,
    starts: Vector,
    services: Vector,
    first_tokens: Vector,
    *,
    servers: Ints | int = 0,
) -> SimulatedRun:
    """One by one; `first_tokens`: seconds from dispatch to the end of the first step."""
    numbers = np.arange(len(starts))
    ends = starts + services
    columns = {
        "dispatched_at": starts,
        "released_at": ends,
        "first_token_at": starts + first_tokens,
        "server_free_at": ends,
        "batch_id": numbers,
        "batch_size": np.ones_like(numbers),
        "server_id": np.zeros_like(numbers) + servers,
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
