"""The named policies replayed on arrays by compiled kernels (queueing.simulation.kernels): what
`kendall simulate` runs.

One seed gives the same arrivals, lengths and residuals under every policy and in either simulator
(common random numbers). Random numbers are drawn in blocks that stay in the cache; where all
members of a batch fare alike, one value a batch is kept and spread when read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies.core import UNBOUNDED
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Continuous, Single
from kendall.policies.ordered import in_arrival_order, order_of, wants_steps
from kendall.queueing.arrivals.notation import has_end
from kendall.queueing.distributions.call_lengths import equal_calls, within_calls
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.engine_bounds import or_unbounded
from kendall.queueing.latency.kv_memory import KEEP, PREEMPT, held_in_calls
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.token_gaps import GapCounts, Gaps, found, no_gaps
from kendall.queueing.latency.stalls import SPARE_GAPS
from kendall.queueing.models.batches.calls import draw_calls
from kendall.queueing.models.gg1 import unit_gaps
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.predictors.prediction_cost import NO_COST
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import kernels, memory_kernels, slot_kernels
from kendall.queueing.simulation.orders.batch_kernels import (
    run_ordered_batches,
    run_ordered_single,
    run_ordered_slots,
)
from kendall.queueing.simulation.orders.interrupting_kernels import (
    NO_INTERRUPTION,
    first_ranks,
    run_interrupting,
)
from kendall.queueing.simulation.orders.policy_order import (
    has_queue,
    interrupting_of,
    interrupts,
    queue_of,
    ranks_of,
)
from kendall.queueing.simulation.orders.waiting_kernels import RANKED, ordered_queue

Ints = npt.NDArray[np.signedinteger[Any]]
MOST_SLOTS = 4096  # of a continuous server; beyond, the generic simulator
COLUMNS = kernels.RequestPath._fields
_GUIDE = 2**16
_BLOCK = 2**14


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a run, drawn or given: arrivals (s), lengths and the generators of the
    residuals, one per server.
    """

    arrived_at: Vector
    output_tokens: Ints
    prompt_tokens: Ints
    residuals: list[np.random.Generator] = field(default_factory=list)
    call_ends: Ints = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # for each where its call ends; empty: one by one
    predicted: Vector = field(default_factory=lambda: np.empty(0))  # tokens; empty: none are
    limits: Ints = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # max_output_tokens of each; empty: the model's
    flows: npt.NDArray[np.str_] = field(
        default_factory=lambda: np.empty(0, dtype=np.str_)
    )  # of each; empty: one
    # whether the second model serves it, where that is by a share; empty: not
    second: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    # of each the two servers that its call may join; empty: any
    choices: Ints = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    # of each server's batches, in their order, instead of the generators' (then 1); empty: none
    given_residuals: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    # of each, tokens before its call to a tool (0: none), its seconds, those predicted
    tool_calls: tuple[Ints, Vector, Vector] | None = None


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """What happened to each request, in order of arrival; instants in seconds, not-a-number and
    batch -1 where it was lost, `kernels.REJECTED` where that was as it arrived.
    """

    arrived_at: Vector
    output_tokens: Ints
    columns: Mapping[
        str, npt.NDArray[Any]
    ]  # those of COLUMNS, one value a request or, where `sizes` are given, one a batch
    sizes: Ints | None = None  # of batches of consecutive requests on one server
    gaps: Gaps | None = None  # between tokens; None where all of an answer are alike, or padded
    # what happened at each of two servers in turn, in the same order; here the dispatch is the
    # arrival and the time in their queues
    stations: tuple[SimulatedRun, ...] = ()
    # s that predictions outside of the engine took, of each, before it joined; empty: none
    predicting: Vector = field(default_factory=lambda: np.empty(0))

    @property
    def joined_at(self) -> Vector:
        """When it came to the queue of the engine."""
        return self.arrived_at + self.predicting if len(self.predicting) else self.arrived_at

    @cached_property
    def dispatched_at(self) -> Vector:
        """Start of the service, or of the batch."""
        return self._column("dispatched_at")

    @cached_property
    def released_at(self) -> Vector:
        """Its answer has left."""
        return self._column("released_at")

    @cached_property
    def first_token_at(self) -> Vector:
        """End of its first step."""
        return self._column("first_token_at")

    @cached_property
    def server_free_at(self) -> Vector:
        """End of its batch; continuous: of its slot."""
        return self._column("server_free_at")

    @cached_property
    def batch_id(self) -> Ints:
        """Number of the dispatch, from 0."""
        return self._column("batch_id")

    @cached_property
    def batch_size(self) -> Ints:
        """Members of its batch; continuous: in service right after the dispatch."""
        return self._column("batch_size")

    @cached_property
    def server_id(self) -> Ints:
        """Where it was served, from 0."""
        return self._column("server_id")

    @property
    def lost(self) -> npt.NDArray[np.bool_]:
        """Those whose patience ran out, or who were rejected."""
        return self.batch_id < 0

    @property
    def rejected(self) -> npt.NDArray[np.bool_]:
        """Those who were lost as they arrived."""
        return np.asarray(self.batch_id == kernels.REJECTED)

    @property
    def queueing_delay(self) -> Vector:
        """Dispatch - arrival."""
        return self.dispatched_at - self.arrived_at

    @property
    def sojourn_time(self) -> Vector:
        """Release - arrival."""
        return self.released_at - self.arrived_at

    def after(self, first: int) -> SimulatedRun:
        """Without the first requests (the warm-up); gaps are those that were counted."""
        kept = {name: getattr(self, name)[first:] for name in COLUMNS}
        return SimulatedRun(
            self.arrived_at[first:],
            self.output_tokens[first:],
            kept,
            gaps=self.gaps,
            stations=tuple(station.after(first) for station in self.stations),
            predicting=self.predicting[first:],
        )

    def _column(self, name: str) -> npt.NDArray[Any]:
        values = self.columns[name] if name in self.columns else self._implied(name)
        if self.sizes is None or len(values) == len(self.arrived_at):
            return values
        column = np.empty(len(self.arrived_at), dtype=values.dtype)
        kernels.spread(values, self.sizes, column)
        return column

    def _implied(self, name: str) -> Ints:
        assert self.sizes is not None
        if name == "batch_size":
            return self.sizes
        return (
            np.arange(len(self.sizes))
            if name == "batch_id"
            else np.zeros(len(self.sizes), dtype=np.int32)
        )


def nothing_served() -> SimulatedRun:
    """A run without a request, as of arrivals that end before the first one."""
    nothing, whole = np.empty(0), np.empty(0, dtype=np.int64)
    columns = {name: nothing if name.endswith("_at") else whole for name in COLUMNS}
    return SimulatedRun(nothing, whole, columns)


def draw_trace(
    model: Queue, arrival_rate: float, num_requests: int, stream: np.random.SeedSequence
) -> Trace:
    """Arrivals, of one request or of calls of several, and lengths, independent but in a call; of
    arrivals that end as many as come.
    """
    arrivals, lengths, prompts, *residuals = (
        np.random.default_rng(child) for child in stream.spawn(3 + model.engine.servers)
    )
    sizes = draw_calls(model.requests.sequences, num_requests, stream)
    equal = equal_calls(sizes, model.requests.intraclass_correlation, stream)
    calls = num_requests if sizes is None else len(sizes)
    if model.arrivals.process is None:
        instants = _instants(1 / arrival_rate, model.arrivals.scv, arrivals, calls)
    else:
        instants = process_instants(model.at_mean_rate(arrival_rate), arrivals, calls)
        num_requests = len(instants) if has_end(model.arrivals.process) else num_requests
    outputs = sample_tokens(model.requests.output_tokens, lengths, num_requests)
    outputs = within_calls(outputs, sizes, equal)
    flows = np.empty(0, np.str_)
    if model.requests.flows is not None:
        flows = model.requests.flows.names_of_run(stream, calls)
    return Trace(
        instants if sizes is None else np.repeat(instants, sizes),
        outputs,
        np.zeros(num_requests, dtype=np.int64)
        if model.requests.prompt_tokens is None
        else sample_tokens(model.requests.prompt_tokens, prompts, num_requests),
        residuals,
        np.empty(0, dtype=np.int64) if sizes is None else np.repeat(np.cumsum(sizes), sizes),
        draw_predictions(model, outputs, stream),
        flows=flows if sizes is None or not len(flows) else np.repeat(flows, sizes),
        choices=draw_choices(model, calls if sizes is None else sizes, stream),
        tool_calls=draw_tool_calls(model, outputs, stream),
        second=draw_second(model, num_requests, stream),
    )


def draw_choices(model: Queue, calls: int | Ints, stream: np.random.SeedSequence) -> Ints:
    """Two servers for each call of one request, or for the requests of each of such sizes, by a
    child of the seed behind all others; none under another routing.
    """
    servers = model.engine.servers
    if model.engine.routing != "power_of_two" or servers == 1:
        return np.empty((0, 2), dtype=np.int64)
    rng = np.random.default_rng(stream.spawn(1)[0])
    sizes = np.ones(calls, dtype=np.int64) if isinstance(calls, int) else calls
    first = rng.integers(servers, size=len(sizes))
    other = (first + rng.integers(1, servers, size=len(sizes))) % servers
    return np.repeat(np.stack([first, other], axis=1), sizes, axis=0)


def draw_tool_calls(
    model: Queue, outputs: Ints, stream: np.random.SeedSequence
) -> tuple[Ints, Vector, Vector] | None:
    """Of each request, by a child of the seed behind all others; None where there are none."""
    calls = model.requests.tool_calls
    if calls is None or not calls.share:
        return None
    return calls.drawn(np.random.default_rng(stream.spawn(1)[0]), outputs.astype(np.int64))


def draw_second(model: Queue, count: int, stream: np.random.SeedSequence) -> npt.NDArray[np.bool_]:
    """Which of so many requests ask for the second model, where a share of all does; by a child of
    the seed behind all others.
    """
    second = model.engine.second_model
    if second is None or second.share is None:
        return np.empty(0, dtype=np.bool_)
    rng = np.random.default_rng(stream.spawn(1)[0])
    return np.asarray(rng.random(count) < second.share)


def beginning_with(trace: Trace, waiting: int) -> Trace:
    """The same requests, of which so many are there at 0 and the others come as from there on."""
    if not waiting:
        return trace
    instants = np.concatenate([np.zeros(waiting), trace.arrived_at[:-waiting]])
    return dataclasses.replace(trace, arrived_at=instants)


def process_instants(model: Queue, rng: np.random.Generator, count: int) -> Vector:
    """Seconds from 0 of `count` arrivals of its process; of one that ends, all."""
    assert model.arrivals.process is not None
    return model.arrivals.process.instants(
        rng, count=None if has_end(model.arrivals.process) else count
    )


def draw_predictions(model: Queue, outputs: Ints, stream: np.random.SeedSequence) -> Vector:
    """For a queue that reads them, else none; from the child of the seed behind all others."""
    if model.requests.predictor == NO_PREDICTION or not model.reads_predictions:
        return np.empty(0)
    rng = np.random.default_rng(stream.spawn(1)[0])
    return predicted_tokens(
        model.requests.predictor, rng, outputs.astype(float), model.requests.token_limit
    )


def replay(model: Queue, trace: Trace, since: int = 0) -> SimulatedRun:
    """The policy on the trace. The queue closes with the last arrival. Gaps between tokens are
    those of the requests from `since` on. Of `one_of_several` servers, not of all.
    """
    assert model.one_of_several is None
    if model.on_demand:
        return _taking_memory(model, trace, since)
    law, bound = model.law, _slots(model) or 2**31
    wait_for, max_wait = (
        (bound, model.policy.max_wait) if isinstance(model.policy, Fixed) else (1, math.inf)
    )
    tokens = or_unbounded(model.step_tokens)
    bounds = kernels.Bounds(
        model.engine.servers, bound, wait_for, max_wait, model.policy.padded, tokens
    )
    continuous = isinstance(model.policy, Continuous)
    if order_of(model.policy).preemptive and not continuous:
        return _interrupting(model, trace, since)
    bounded = model.engine.max_num_queued_reqs is not None
    if model.engine.has_queues or bounded or not in_arrival_order(model.policy):
        return _in_order(model, trace, bounds, since)
    alone = model.engine.servers == 1 and model.requests.patience is None and not continuous
    alike = bound == 1 and not law.stall_share
    if alone and (alike or (model.policy.padded and max_wait == math.inf)):
        return _from_batch_to_batch(model, trace, bounds)
    requests = _requests(model, trace)
    if continuous:
        slots = _empty_slots(model, requests, bounds, since)
        given = (*coefficients(law), law.kr), law.turnaround, bounds, slots
        path, gaps = slot_kernels.run_slots(requests, *given, _memory(model)), slots.gaps
    else:
        servers = kernels.new_servers(paces_of(model), min(bound, len(trace.arrived_at)), since)
        served = _of_batches(model), _drawn(law, trace), bounds, servers
        path, gaps = kernels.run_batches(requests, *served), servers.gaps
    return _run(model, trace, path, gaps)


def _run(
    model: Queue, trace: Trace, path: kernels.RequestPath, gaps: GapCounts | None
) -> SimulatedRun:
    return SimulatedRun(
        trace.arrived_at,
        trace.output_tokens,
        path._asdict(),
        gaps=None if gaps is None or model.policy.padded else found(gaps),
    )


def _in_order(model: Queue, trace: Trace, bounds: kernels.Bounds, since: int) -> SimulatedRun:
    """From one queue or from one for each server; batches under an order that interrupts nobody."""
    requests, drawn, law = (
        _requests(model, trace),
        _drawn(model.law, trace),
        model.law,
    )
    limit, predicted = float(model.requests.token_limit), predictions_of(model, trace)
    lanes = model.engine.servers if model.engine.has_queues else 1
    most = or_unbounded(model.engine.max_num_queued_reqs)
    queue = queue_of(
        model.policy,
        trace.arrived_at,
        predicted,
        limit,
        bounds.batch_size,
        prompts=trace.prompt_tokens,
        lanes=lanes,
    )
    plain = model.lossless and not (len(trace.call_ends) or law.stall_share)
    if isinstance(model.policy, Continuous):
        slots, order = _empty_slots(model, requests, bounds, since), NO_INTERRUPTION
        if interrupts(model.policy):
            order = interrupting_of(model.policy, predicted, limit, NO_COST, trace.prompt_tokens)
            ranks, largest = first_ranks(order, trace.arrived_at), len(queue.chosen)
            queue = ordered_queue(RANKED, ranks, np.zeros(len(ranks)), largest)
        given = (*coefficients(law), law.kr), law.turnaround, bounds, queue, slots
        path = run_ordered_slots(requests, *given, _memory(model), trace.choices, most, order)
        return _run(model, trace, path, slots.gaps)
    if plain and bounds.servers == bounds.batch_size == 1 and queue.kind == RANKED:
        path = run_ordered_single(requests, _of_batches(model), drawn, queue.rank)
        return _run(model, trace, path, None)
    servers = kernels.new_servers(paces_of(model), len(queue.chosen), since)
    of_batches = _of_batches(model), drawn, bounds, queue, servers
    path = run_ordered_batches(requests, *of_batches, trace.choices, most)
    return _run(model, trace, path, servers.gaps)


def after_predictions(model: Queue, trace: Trace, run: SimulatedRun) -> SimulatedRun:
    """The same run, later by the time that requests wait for predictions outside of the engine;
    but for first tokens that are made before the prediction.
    """
    paid = model.predictions
    if paid is None or model.predicts_on_server:
        return run
    seconds = paid.seconds(predictions_of(model, trace), trace.output_tokens.astype(float))
    columns = {name: getattr(run, name) for name in COLUMNS}
    for name in ("dispatched_at", "first_token_at", "released_at", "server_free_at"):
        if name != "first_token_at" or paid.beyond is None:
            columns[name] = columns[name] + seconds
    return dataclasses.replace(run, columns=columns, sizes=None, predicting=seconds)


def predictions_of(model: Queue, trace: Trace) -> Vector:
    """Of each request; the token limit where none is predicted."""
    limit = float(model.requests.token_limit)
    told = trace.predicted if len(trace.predicted) else np.full(len(trace.arrived_at), limit)
    return np.minimum(told, limit)


def _interrupting(model: Queue, trace: Trace, since: int) -> SimulatedRun:
    """One request at a time, under an order that interrupts; how many residuals that takes is known
    afterwards.
    """
    assert isinstance(model.policy, Single)
    law, limit = model.engine.law, float(model.requests.token_limit)
    coefficients = law.k1, law.k2, law.k3, law.k4, law.kp, law.kr, law.speed
    count = len(trace.arrived_at)
    paid = model.predictions
    on_server = paid if paid is not None and model.predicts_on_server else NO_COST
    order = interrupting_of(model.policy, predictions_of(model, trace), limit, on_server)
    residuals, path = residuals_of(law, trace), None
    while path is None:
        queue, gaps = ordered_queue(RANKED, np.zeros(count), np.zeros(count), 1), no_gaps(since)
        given = _requests(model, trace), coefficients, paces_of(model), residuals
        path = run_interrupting(*given, order, queue, gaps)
        if path is None:
            residuals = np.hstack([residuals, residuals_of(law, trace)])
    return _run(model, trace, path, gaps)


def _taking_memory(model: Queue, trace: Trace, since: int) -> SimulatedRun:
    """Requests that take memory token by token. The column of dispatches has the arrival and the
    time in the queue.
    """
    count, law, kv = len(trace.arrived_at), model.engine.law, model.kv
    limit, prompts = float(model.requests.token_limit), trace.prompt_tokens.astype(np.int64)
    assert isinstance(model.policy, Continuous)
    ranks = ranks_of(model.policy, predictions_of(model, trace), limit, prompts)
    k1, k3, k4, kp, kr = (law.speed * each for each in (law.k1, law.k3, law.k4, law.kp, law.kr))
    engine = memory_kernels.Engine(
        UNBOUNDED if model.bound is None else model.bound,
        or_unbounded(model.engine.bounds.max_context_tokens),
        PREEMPT[kv.preempt],
        *(k1, k3, k4, kp, kr),
        *(kv.setup or 0.0, kv.token or 0.0),
    )
    none = np.zeros(count)
    after, seconds, predicted = trace.tool_calls or (np.zeros(count, np.int64), none, none)
    calls, form = model.requests.tool_calls, model.policy.ranking.form
    handling = np.full(count, KEEP["preserve" if calls is None else calls.keep])
    if form.quantity == "memory":  # MARS: the calls hold memory too
        context = np.where(after > 0, prompts + after, 0)
        known = handling, predicted, context, k1 + kr + kp * context, kv.swap(context)
        held = held_in_calls(*known, memory=float(engine.memory))
        values = ranks[0].value + form.weight * held / law.step(min(engine.slots, MOST_SLOTS))
        ranks = ranks[0]._replace(value=values), ranks[1]
    outputs = trace.output_tokens.astype(np.int64)
    work = memory_kernels.Work(
        trace.arrived_at, prompts, outputs, after, seconds, predicted, handling
    )
    gaps = no_gaps(since)
    path, _ = memory_kernels.run_memory(work, memory_kernels.Order(*ranks), engine, gaps)
    columns = {
        "dispatched_at": trace.arrived_at + path.waited,
        "released_at": path.ended_at,
        "first_token_at": path.first_token_at,
        "server_free_at": path.ended_at,
        "batch_id": path.dispatch,
        "batch_size": path.size,
        "server_id": np.zeros(count, np.int64),
    }
    return SimulatedRun(trace.arrived_at, trace.output_tokens, columns, gaps=found(gaps))


def paces_of(model: Queue) -> Vector:
    """Of each server, how many times as long as the law's its times are."""
    return np.array(model.engine.server_speeds or [1.0] * model.engine.servers)


def is_compiled(model: Queue) -> bool:
    """Whether the kernels cover it: the built-in policies, in an order that interrupts nobody, no
    continuous engine with thousands of slots; in orders that interrupt from one queue, without
    calls and stalls, where none is rejected, and of a continuous engine without a bound on memory
    and patience.

    No step may take less than no time: a fitted law may have k1 or k2 below zero, and with it a
    batch that ends before it began.
    """
    if model.models_apart:
        return all(is_compiled(queue) for _, queue in model.models)
    model = model.decode  # a server that prefills is covered
    if model.on_demand or model.shares_server:
        return True
    law = model.engine.law
    several = model.requests.sequences is not None or model.engine.has_queues or law.stall_share > 0
    bounded = model.engine.max_num_queued_reqs is not None
    if not has_queue(model.policy) and (several or bounded or not interrupts(model.policy)):
        return False
    first = law.k1 + law.k3 + min(law.k2, 0) + law.k4
    if law.kp < 0 or law.k1 + law.k3 < 0 or first < 0:
        return False
    if not isinstance(model.policy, Continuous):
        return True
    slots = _slots(model)
    bounded = model.reservations is not None or model.requests.patience is not None
    covered = first > 0 and slots is not None and slots <= MOST_SLOTS
    return covered and not (bounded and interrupts(model.policy))


def _slots(model: Queue) -> int | None:
    """The most that are in service together: no more than the memory has room for."""
    memory = model.reservations
    bounds = (model.bound, None if memory is None else memory.most)
    return min((bound for bound in bounds if bound is not None), default=None)


def _empty_slots(
    model: Queue, requests: kernels.Requests, bounds: kernels.Bounds, since: int
) -> slot_kernels.Slots:
    tokens, stepwise = or_unbounded(model.step_tokens), wants_steps(model.policy)
    given = requests, bounds, paces_of(model), tokens, since
    return slot_kernels.new_slots(*given, asked_each_step=stepwise)


def _memory(model: Queue) -> slot_kernels.Memory:
    memory = model.reservations
    if memory is None:
        return slot_kernels.UNLIMITED
    return slot_kernels.Memory(memory.memory, memory.token_limit)


def _from_batch_to_batch(model: Queue, trace: Trace, bounds: kernels.Bounds) -> SimulatedRun:
    """One server, all members of a batch leave at its end; memory from numpy, which asks for
    huge pages (half of the time else).
    """
    count, law = len(trace.arrived_at), _of_batches(model)
    requests, drawn = _requests(model, trace), _drawn(model.law, trace)
    starts, firsts, ends = np.empty((3, count))
    path = kernels.BatchPath(starts, firsts, ends, np.empty(count, dtype=np.int32))
    if bounds.batch_size == 1:
        kernels.run_single(requests, law, drawn, path)
        path.size[:] = 1
    else:
        count = kernels.run_padded(requests, law, drawn, bounds, path)
    columns = {
        "dispatched_at": starts,
        "released_at": ends[:count],
        "first_token_at": firsts[:count],
        "server_free_at": ends[:count],
    }
    return SimulatedRun(trace.arrived_at, trace.output_tokens, columns, path.size[:count])


def _requests(model: Queue, trace: Trace) -> kernels.Requests:
    deadlines = (
        np.empty(0)
        if model.requests.patience is None
        else trace.arrived_at + model.requests.patience
    )
    return kernels.Requests(
        trace.arrived_at,
        trace.output_tokens,
        trace.prompt_tokens,
        trace.call_ends,
        deadlines,
    )


def _drawn(law: LatencyModel, trace: Trace) -> kernels.Drawn:
    clocks = np.zeros((len(trace.residuals), 2))
    return kernels.Drawn(residuals_of(law, trace), stall_gaps(law, trace), clocks)


def coefficients(law: LatencyModel) -> tuple[float, ...]:
    """k1, k2, k3, k4, kp and the speed."""
    return law.k1, law.k2, law.k3, law.k4, law.kp, law.speed


def _of_batches(model: Queue) -> tuple[float, ...]:
    return (
        *coefficients(model.law),
        model.law.stall_share,
        model.law.stall,
        float(model.pads_prompts),
    )


def stall_gaps(law: LatencyModel, trace: Trace) -> Vector:
    """Gaps between stalls in units of their mean, for each server: the numbers that `StallClock`
    draws one by one.
    """
    if not law.stall_share:
        return np.empty((len(trace.residuals), 0))
    drawn = np.empty((len(trace.residuals), len(trace.arrived_at) + SPARE_GAPS))
    for rng, row in zip(trace.residuals, drawn, strict=True):
        rng.spawn(1)[0].standard_exponential(out=row)
    return drawn


def residuals_of(law: LatencyModel, trace: Trace) -> Vector:
    """One draw per batch that there can be at most, for each server: the numbers that
    `LatencyModel.residual` draws one by one.
    """
    if trace.given_residuals.size:
        return _given(trace)
    if law.cv == 0:
        return np.empty((len(trace.residuals), 0))
    shape = law.cv**-2
    drawn = np.empty((len(trace.residuals), len(trace.arrived_at)))
    for rng, row in zip(trace.residuals, drawn, strict=True):
        rng.standard_gamma(shape, out=row)
    drawn *= 1 / shape
    return drawn


def _given(trace: Trace) -> Vector:
    given, rows = trace.given_residuals, np.ones((len(trace.residuals), len(trace.arrived_at)))
    servers, most = min(len(given), len(rows)), min(given.shape[1], rows.shape[1])
    rows[:servers, :most] = given[:servers, :most]
    return rows


def _instants(mean_gap: float, scv: float, rng: np.random.Generator, count: int) -> Vector:
    """`cumsum(mean_gap * unit_gaps(...))`."""
    instants, block, last = np.empty(count), np.empty(_BLOCK), 0.0
    for first in range(0, count, _BLOCK):
        gaps = unit_gaps(rng, scv, block[: count - first])
        last = kernels.accumulate(last, mean_gap, gaps, instants[first : first + _BLOCK])
    return instants


def sample_tokens(lengths: TokenDistribution, rng: np.random.Generator, count: int) -> Ints:
    """What `TokenDistribution.sample` draws, by a guide table."""
    if lengths.pmf[-1] == 1:
        return np.full(count, lengths.longest)
    found, block = np.empty(count, dtype=np.int64), np.empty(_BLOCK)
    cdf, guide = _guided(lengths)
    for first in range(0, count, _BLOCK):
        uniforms = block[: count - first]
        rng.random(out=uniforms)
        kernels.invert(cdf, guide, uniforms, found[first : first + _BLOCK])
        lengths.with_tail(found[first : first + _BLOCK], uniforms)
    return found


@lru_cache(maxsize=8)
def _guided(lengths: TokenDistribution) -> tuple[Vector, npt.NDArray[Any]]:
    guide = kernels.build_guide(lengths.cdf, _GUIDE)
    return lengths.cdf, guide.astype(np.uint16) if lengths.longest < 2**16 else guide
