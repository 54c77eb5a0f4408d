"""Two models (`queueing.second_model`), simulated: on servers of their own two queues that know
nothing of each other; on one server, that holds one of them at a time:

    S = switch if it holds the other one, + seconds of the request by the law of its model

One request at a time, not interrupted; an idle server keeps what it holds, and starts with the
first model. Next is the request with the lowest rank, equal ones in order of arrival; where they
are ranked by seconds of service (`by=service`), with the switch if its model is not loaded; under
first=loaded one of the model that is held, if any waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kendall.policies.ordered import order_of
from kendall.policies.orders.order import ByLength
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.slots.token_gaps import Gaps
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast, kernels
from kendall.queueing.simulation.kernels import compiled, first_step, last_step
from kendall.queueing.simulation.orders.kernels import pop, push
from kendall.queueing.simulation.orders.policy_order import queue_of

_OF_REQUESTS = ("arrived_at", "output_tokens", "prompt_tokens", "predicted", "limits", "flows")
Replay = Callable[[Queue, fast.Trace, int], fast.SimulatedRun]


class Machine(NamedTuple):
    """What it takes to load a model, in seconds and in ranks, and whether requests of the one that
    is loaded go first.
    """

    switch: float
    in_ranks: float
    loaded_first: bool


def of_second(model: Queue, trace: fast.Trace) -> npt.NDArray[np.bool_]:
    """Which requests the second model serves."""
    second = model.engine.second_model
    assert second is not None
    if second.share is not None:
        return trace.second
    return second.chosen(fast.predictions_of(model, trace))


def run_apart(model: Queue, trace: fast.Trace, since: int, replay: Replay) -> fast.SimulatedRun:
    """Each model on its own servers; `replay` is for the requests of one."""
    second = of_second(model, trace)
    queues = [queue for _, queue in model.models]
    trace = dataclasses.replace(trace, second=np.empty(0, np.bool_))
    return run_parts(list(zip((~second, second), queues, strict=True)), trace, since, replay)


def run_parts(
    parts: Sequence[tuple[npt.NDArray[np.bool_], Queue]],
    trace: fast.Trace,
    since: int,
    replay: Replay,
) -> fast.SimulatedRun:
    """Some of the requests, and servers that serve only them, in each part."""
    columns: dict[str, npt.NDArray[Any]] = {}
    gaps, batches, first_server = [], 0, 0
    for chosen, queue in parts:
        own = slice(first_server, first_server + queue.engine.servers)
        given: dict[str, Any] = {
            name: values[chosen]
            for name in _OF_REQUESTS
            if len(values := getattr(trace, name)) or name == "arrived_at"
        }
        given |= {name: getattr(trace, name)[own] for name in ("residuals", "given_residuals")}
        if len(trace.call_ends):
            given["call_ends"] = np.cumsum(chosen)[trace.call_ends[chosen] - 1]
        part = dataclasses.replace(trace, **given)
        served = replay(queue, part, int(np.count_nonzero(chosen[:since])))
        for name in fast.COLUMNS:
            values = getattr(served, name)
            columns.setdefault(name, np.empty(len(chosen), values.dtype))[chosen] = values
        columns["batch_id"][chosen] += np.where(served.lost, 0, batches)
        columns["server_id"][chosen] += first_server
        gaps.append(served.gaps)
        batches, first_server = int(served.batch_id.max(initial=-1)) + 1, own.stop
    known = [each for each in gaps if each is not None]
    merged = Gaps(*map(np.concatenate, zip(*known, strict=True))) if known else None
    return fast.SimulatedRun(trace.arrived_at, trace.output_tokens, columns, gaps=merged)


def run_together(model: Queue, trace: fast.Trace) -> fast.SimulatedRun:
    """Both models on one server."""
    second, order = model.engine.second_model, order_of(model.policy)
    assert second is not None
    chosen, laws = of_second(model, trace).astype(np.int64), (model.engine.law, second.law)
    count, limit = len(chosen), float(model.requests.token_limit)
    values, in_ranks = fast.predictions_of(model, trace), 0.0
    if isinstance(order, ByLength) and order.by == "service":
        seconds = [
            law.setup(1) + law.step(1) * values + law.speed * law.kp * trace.prompt_tokens
            for law in laws
        ]
        values, limit = np.where(chosen, seconds[1], seconds[0]), np.inf
        aging = 1.0 if order.form.aging is None else order.form.aging
        in_ranks = aging * order.form.weight * second.switch
    rank = queue_of(model.policy, trace.arrived_at, values, limit, 1).rank
    path = kernels.new_path(count)
    path.batch_size[:], path.server_id[:] = 1, 0
    given = trace.arrived_at, trace.output_tokens, trace.prompt_tokens, chosen, rank
    coefficients = tuple((*map(float, fast.coefficients(law)), 0.0, 0.0, 0.0) for law in laws)
    machine = Machine(second.switch, in_ranks, second.first == "loaded")
    room = np.empty((2, count, 4)), np.zeros(2, dtype=np.int64)
    drawn = _residuals(model, trace), np.empty(0), np.zeros(2)
    _run((given, room), coefficients, drawn, machine, path)
    path.server_free_at[:] = path.released_at
    return fast.SimulatedRun(trace.arrived_at, trace.output_tokens, path._asdict())


def _residuals(model: Queue, trace: fast.Trace) -> Vector:
    """By model and number of the dispatch; the same ones where the laws have the same."""
    assert model.engine.second_model is not None
    first, other = model.engine.law, model.engine.second_model.law
    drawn = [np.ones(len(trace.arrived_at))] * 2
    if first.cv:
        drawn[0] = fast.residuals_of(first, trace)[0]
    if other.cv:
        drawn[1] = drawn[0] if other.cv == first.cv else fast.residuals_of(other, trace)[0]
    return np.array(drawn)


@compiled()
def _next_model(machine, held, queues, waiting):  # type: ignore[no-untyped-def]
    """The model whose first request is served next."""
    other = 1 - held
    if waiting[other] == 0 or (machine.loaded_first and waiting[held] > 0):
        return held
    if waiting[held] == 0:
        return other
    own, switched = queues[held, 0, 1], queues[other, 0, 1] + machine.in_ranks
    if own == switched:
        return held if queues[held, 0, 2] < queues[other, 0, 2] else other
    return held if own < switched else other


@compiled()
def _run(work, laws, drawn, machine, path):  # type: ignore[no-untyped-def]
    (arrived_at, lengths, prompts, model, rank), (queues, waiting) = work
    residuals, gaps, clock = drawn
    dispatched_at, released_at, first_token_at, _, batch, _, _ = path
    free, held, coming, count = -np.inf, 0, 0, len(arrived_at)
    for number in range(count):
        start, total = free, waiting[0] + waiting[1]
        if total == 0:
            start = max(free, arrived_at[coming])
        while coming < count and (arrived_at[coming] < start or total == 0):
            m = model[coming]
            push(queues[m], waiting[m], (0.0, rank[coming], float(coming)), coming)
            waiting[m] += 1
            total += 1
            coming += 1
        m = _next_model(machine, held, queues, waiting)
        job = pop(queues[m], waiting[m])
        waiting[m] -= 1
        begun = start + machine.switch if m != held else start
        held = m
        chance = residuals[m, number], gaps, clock
        inputs = prompts[job] if laws[m][4] != 0 else 0
        first, rest, step = first_step(begun, 1, inputs, laws[m], chance)
        free = last_step(first, lengths[job], rest, step, laws[m], chance)
        dispatched_at[job], first_token_at[job], released_at[job] = start, first, free
        batch[job] = number
