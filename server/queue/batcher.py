"""The dispatch loop: one class that keeps the queue, asks the policy, carries out what it decides,
and follows each sequence to its one outcome. Its methods stand in the order of a request's life;
changes of the policy, the limits and the servers follow, and at the end all that others read. The
class `Recovery` below it is needed only where an engine is lost.

While requests wait, it asks on every arrival, end, cancellation and expiry, on a change of policy,
and at the instant of the last `WaitUntil`; after a `Dispatch` it asks again at once, and after
every engine step where the policy wants that. Everything happens synchronously on the event loop's
clock, so that on virtual time the instants equal the simulator's. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from kendall.policies import (
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Request,
    Running,
    Server,
    Waiting,
    WaitUntil,
    format_policy,
    policy_batch_size,
    served_as,
)
from kendall.policies.core import UNBOUNDED
from kendall.policies.decision import DecisionError, check_once
from kendall.policies.flow_counters import FlowCounters
from kendall.policies.ordered import Ordered, counts, order_of, wants_steps, with_ranking
from kendall.policies.orders.order import Order
from kendall.policies.registry import is_built_in, may_preempt
from kendall.policies.waiting_queues import WaitingQueue, moved, queue_for
from kendall.queueing.measurement.record import Outcome, Record
from kendall.server.engines.base import Capabilities, Engine, EngineRequest
from kendall.server.queue.continuing import interrupted, listen, prepare, resumable
from kendall.server.queue.kill_trial import KillTrial
from kendall.server.queue.observers import Observer, Observers
from kendall.server.queue.poison import CODE, FAILED, LOSSES, ServerTrials, Trials
from kendall.server.queue.policy_failures import PolicyFailures, decided
from kendall.server.queue.prefixes import PrefixMatches, matches_for
from kendall.server.queue.proxied import ReturnedCalls, sequence_of
from kendall.server.queue.sequence import Batch, Consumer, SequenceState, forming_until
from kendall.server.queue.slots import Lease, Slot
from kendall.server.runtime.clock import clock_of

log = logging.getLogger("kendall.batcher")
MOST_AT_ONCE = 5000  # decisions after the first without a wait: more than any engine has places


class Batcher:
    """Queue + policy + engine. One instance per engine; every method is called on the event
    loop.
    """

    def __init__(
        self,
        engine: Engine,
        capabilities: Capabilities,
        policy: Policy,
        observers: Sequence[Observer] = (),
        queue_for: Callable[[Policy], WaitingQueue] = queue_for,
        *,
        suspect_after: int = 2,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = clock_of(self._loop)
        self.engine = engine
        self.capabilities = capabilities  # of the engine that serves, or served last
        self.epoch = 0
        self.max_output_tokens: int | None = None  # in force; `limit_tokens` changes it
        self.closing = False  # nothing more will arrive
        self.failures: Counter[str] = Counter()  # failed requests, by the code of the error
        self.observers = Observers(observers)
        self.lease = Lease()
        self._queue, self._queue_for = WaitingQueue(), queue_for
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._returned = ReturnedCalls()
        self._slots = [Slot(index) for index in range(capabilities.servers)]
        self._unsettled: dict[str, SequenceState] = {}  # without an outcome
        self._settled_in_service = 0  # with an outcome; their record is not complete
        self.moved_at = self.now()  # instant of the last arrival, outcome or pause
        self._changed = asyncio.Event()  # wakes the tasks that wait for a change
        self._batch_ids = itertools.count()
        self._dispatched: set[str] = set()  # requests, since the policy was asked
        self._asking = self._again = False
        self._timer: asyncio.TimerHandle | None = None  # the instant that the policy named
        self._soon: asyncio.Handle | None = None
        self.policy_failures = PolicyFailures(self._loop)
        self._prefixes: PrefixMatches | None = None  # under route=prefix
        self._wants_predictions: bool  # until it was said that a request has none
        self.recovery = Recovery(self, suspect_after)
        self._govern(policy)

    # a request arrives

    def submit(
        self,
        requests: Sequence[EngineRequest],
        consumers: Sequence[Consumer],
    ) -> list[SequenceState]:
        """Put sequences into the queue, all of one call together, and ask the policy. Raises
        ValueError where an id is in use.
        """
        if self._wants_predictions and any(
            each.request.predicted_output_tokens is None for each in requests
        ):
            self._wants_predictions = False
            log.warning(
                "policy %s orders by predicted lengths, and a request has no "
                "predicted_output_tokens: its token limit counts instead (said once)",
                self.policy_text,
            )
        eos = self.capabilities.eos_token_ids
        sequences = [
            sequence_of(self, engine_request, eos, consumer)
            for engine_request, consumer in zip(requests, consumers, strict=True)
        ]
        arriving: dict[str, SequenceState] = {}
        for sequence in sequences:
            if sequence.id in self._unsettled or sequence.id in arriving:
                raise ValueError(f"request id {sequence.id!r} is in use")
            arriving[sequence.id] = sequence
        self._unsettled.update(arriving)
        self.moved_at = self.now()
        for sequence in sequences:
            sequence.limit_tokens()
            self._queue.append(sequence.waiting())
            deadline = sequence.engine_request.request.deadline
            if deadline < math.inf:
                self._expiries[sequence.id] = self._loop.call_at(deadline, self._expire, sequence)
            self.observers.on_arrival(sequence)
        self.lease.revoke()
        self.ask()
        return sequences

    def turn_away(self, record: Record) -> None:
        """Record and count a request that arrived and was refused; it is never queued."""
        self.observers.on_record(record)

    def _expire(self, sequence: SequenceState) -> None:
        if sequence.batch is None:
            message = "the request's patience ran out while it waited"
            self.fail(sequence, "abandoned", "queue_timeout", message)

    # the policy decides

    def ask(self) -> None:
        """Carry out decisions until the policy waits, also where nothing happened: what was due
        and missed happens now. A call from within a decision makes the outer one ask again.
        """
        self._again = True
        if self._asking:
            return
        self._asking = True
        self._dispatched.clear()
        try:
            while self._again:
                self._again = False
                deadline = self._decide_until_it_waits()
                if deadline < math.inf or self._timer is not None:
                    self._set_timer(deadline)
            self.policy_failures.error = None
        except Exception as error:  # noqa: BLE001 - logged, and counted
            retry_at = self.policy_failures.failed(error)
            if retry_at is not None:
                self._set_timer(retry_at)
        finally:
            self._asking = False

    def _decide_until_it_waits(self) -> float:
        """Carry out one decision after the other; returns the instant at which to ask again,
        infinity for the next event. Raises DecisionError where the policy never waits.
        """
        for _ in range(1 + MOST_AT_ONCE):
            if not self._queue or self.lease.blocks or self.recovery.blocks:
                return math.inf  # nothing can start, whatever the policy
            now, deadline = self.now(), math.inf
            views = self._returned.views(self._state(), lambda: self.servers_in_use, now)
            for state, again in views:
                decision = self._decide(state, now)
                if isinstance(decision, WaitUntil):
                    deadline = min(deadline, decision.deadline, again)
                    continue
                if isinstance(decision, Preempt):
                    self._preempt(decision, now)
                else:
                    self._dispatch(decision)
                break
            else:  # it waits, whichever servers it is shown
                return deadline
        raise DecisionError(
            f"policy {self.policy_text}: got {MOST_AT_ONCE:,} decisions at one instant; "
            "expected a WaitUntil"
        )

    def _state(self) -> QueueState:
        bounds = self.capabilities
        servers = [
            Server(
                slot.id,
                tuple(slot.running.values()),
                min(bounds.max_num_seqs, slot.room),
                bounds.max_num_batched_tokens,
                bounds.kv_cache_tokens,
                (slot.sequences, slot.context_tokens),
            )
            for slot in self._slots
            if slot.up and (not slot.running or slot.policy is self.policy)
        ]
        counters, prefixes = self.counters, self._prefixes
        virtual_tokens = {} if counters is None else counters.virtual_tokens
        matches = {} if prefixes is None else prefixes
        return QueueState(self._queue, servers, {}, self.closing, virtual_tokens, matches)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self.ask) if deadline < math.inf else None

    def _ask_soon(self) -> None:
        """Ask after what is under way in this turn of the event loop: an engine step brings the
        tokens of all its sequences one after the other.
        """
        if self._soon is None:
            self._soon = self._loop.call_soon(self._asked_soon)

    def _asked_soon(self) -> None:
        self._soon = None
        self.ask()

    def _ask_for_servers(self) -> None:
        """A server can be dispatched to again: ask at once, or where the policy follows tokens,
        once all sequences have theirs of this step.
        """
        if self.on_made is None:
            self.ask()
        else:
            self._ask_soon()

    # a dispatch, and the ways back into the queue

    def _dispatch(self, decision: Dispatch) -> None:
        now, policy = self.now(), self.policy
        check_once(self.policy_text, decision, self._dispatched)
        taken = self._queue.take(decision.request_ids)
        sequences = [self._unsettled[waiting.request.id] for waiting in taken]
        batch = Batch(
            next(self._batch_ids),
            decision.server_id,
            policy,
            self.policy_text,
            now,
            forming_until(policy, sequences, self.capabilities.max_num_seqs, now),
            sequences,
            {sequence.id for sequence in sequences},
        )
        if self._expiries:
            for sequence in sequences:
                self._stop_expiry(sequence)
        if self._prefixes is not None:
            self._prefixes.serve(batch.server_id, sequences)
        slot = self._slots[batch.server_id]
        slot.policy = policy
        for sequence in sequences:
            sequence.begin_service(batch, self.epoch)
            engine_request = sequence.engine_request
            sequence.running = Running(
                engine_request.request,
                now,
                len(engine_request.output_token_ids),
                self._preempts
                and engine_request.call is None
                and resumable(engine_request.sampling),
                sequence.preemptions,
            )
            slot.enter(sequence.running)
        for sequence in sequences:
            sequence.batch_size = slot.sequences
        self.observers.on_dispatch(batch)
        for sequence in self._start(batch, sequences):
            if not sequence.preemptions:
                self._call(sequence, sequence.consumer.on_dispatched)

    def _stop_expiry(self, sequence: SequenceState) -> None:
        timer = self._expiries.pop(sequence.id, None)
        if timer is not None:
            timer.cancel()

    def _start(
        self, batch: Batch, sequences: Sequence[SequenceState], *, joining: bool = False
    ) -> Sequence[SequenceState]:
        """Hand a batch, or what is left of it, to the engine; returns those that it took. If the
        engine refuses, these sequences fail, not the loop.
        """
        policy = batch.policy
        try:
            streams = self.engine.dispatch(
                batch.server_id,
                [sequence.engine_request for sequence in sequences],
                padded=policy.padded,
                joining=joining or policy.joins_running,
            )
        except Exception as error:
            log.exception("the engine rejected a batch")
            for sequence in sequences:
                message = f"the engine rejected the request: {error}"
                self.fail(sequence, "failed", "engine_error", message)
            return ()
        for sequence, stream in zip(sequences, streams, strict=True):
            listen(sequence, stream)
        return sequences

    def _preempt(self, decision: Preempt, now: float) -> None:
        """Back into the queue, with the tokens made so far."""
        sequences = [self._unsettled[request_id] for request_id in decision.request_ids]
        for sequence in sequences:
            self._end_stint(sequence, now)
            sequence.limit_tokens()
        self._queue.put_back([sequence.waiting() for sequence in sequences])

    def put_back(self, sequences: Sequence[SequenceState]) -> None:
        """They go to the head of the queue, to continue elsewhere, and may be dispatched again at
        once; their places are free.
        """
        now, batches = self.now(), {}
        for sequence in sequences:
            batch = self._end_stint(sequence, now)
            batches[batch.id] = batch
            prepare(sequence)  # it may have to begin anew, and not behind what it has
            sequence.limit_tokens()
            self._dispatched.discard(sequence.id)
        self._returned.add(sequences, now)
        self._queue.put_back([sequence.waiting() for sequence in sequences])
        joined = {batch.server_id for batch in batches.values() if batch.policy.joins_running}
        for server_id in joined:
            self._report_idle(self._slots[server_id], now)
        for batch in batches.values():
            self._after_departure(batch)

    def _end_stint(self, sequence: SequenceState, now: float) -> Batch:
        """Take it out of the engine and of its batch, which is returned."""
        batch = sequence.batch
        assert batch is not None
        self.observers.on_preempt(sequence)
        self.engine.cancel([sequence.id])
        self._slots[batch.server_id].leave(sequence.id)
        batch.open.discard(sequence.id)
        sequence.end_stint(now)
        return batch

    # tokens come: `SequenceState.on_tokens` hears them, and then calls these two

    def _on_made(self, running: Running, tokens: int) -> None:
        """Count the tokens of each flow, and ask after each step, where the policy wants it."""
        if self.counters is not None:
            self.counters.made(running.request.flow, tokens)
        if self.wants_steps:
            self._ask_soon()

    def member_ended(self, sequence: SequenceState) -> None:
        """A sequence met its own end: it leaves now, or with its batch."""
        batch = sequence.batch
        assert batch is not None
        batch.open.discard(sequence.id)
        if not batch.policy.padded:
            if sequence.stop_detector.stop_reason is not None:
                # the engine knows no stop strings, nor always the stop tokens
                self.engine.cancel([sequence.id])
            self._leave(sequence, batch)
        self._after_departure(
            batch, leaving=sequence if batch.policy.release == "request" else None
        )

    # a sequence ends without an answer

    def cancel(self, sequence: SequenceState) -> None:
        """The client is gone: out of the queue or out of the engine. No effect on a sequence with
        an outcome.
        """
        self._drop(sequence, "cancelled")

    def fail(self, sequence: SequenceState, outcome: Outcome, code: str, message: str) -> None:
        """No answer for this sequence; its consumer is told."""
        if sequence.outcome is None:
            sequence.failed_because(message)
            if outcome == "failed":
                self.failures[code] += 1
            try:
                sequence.consumer.on_failed(outcome, code, message)
            except Exception:
                log.exception("internal error while telling a client that its request failed")
            self._drop(sequence, outcome)

    def fail_all(self, code: str, message: str) -> None:
        """The engine is gone or the gateway stops: every unanswered sequence fails, once."""
        self.lease.pause(True)  # nothing may be dispatched in between
        self.recovery.stop()
        for sequence in list(self._unsettled.values()):
            self.fail(sequence, "failed", code, message)

    def _drop(self, sequence: SequenceState, outcome: Outcome) -> None:
        if sequence.outcome is not None:
            return
        batch = sequence.batch
        if batch is None:
            self._queue.remove(sequence.id)
            self._stop_expiry(sequence)
            self.settle(sequence, outcome)
            self.ask()
            return
        self.settle(sequence, outcome)
        batch.open.discard(sequence.id)
        if sequence.id in self._slots[batch.server_id].running:
            self.engine.cancel([sequence.id])
            self._leave(sequence, batch)
            self._after_departure(batch)

    def _call(self, sequence: SequenceState, notify: Callable[[], None]) -> None:
        """Call a consumer; a fault in one answer ends that answer, and nothing else."""
        try:
            notify()
        except Exception:
            log.exception("internal error while handling an answer")
            message = "internal error of the gateway; its log has the details"
            self.fail(sequence, "failed", "internal_error", message)

    # a place on a server becomes free

    def _leave(self, sequence: SequenceState, batch: Batch) -> None:
        slot = self._slots[batch.server_id]
        slot.leave(sequence.id)
        if batch.policy.joins_running:
            now = self.now()
            self._end_service(sequence, now)
            self._report_idle(slot, now)

    def _after_departure(self, batch: Batch, leaving: SequenceState | None = None) -> None:
        """The next dispatch comes first, then the answers that may leave: writing them takes
        time.
        """
        over = not batch.open and bool(batch.sequences)
        held = self._end(batch) if over else []
        if over or batch.policy.joins_running:
            self._ask_for_servers()
        for sequence in [leaving] if leaving is not None else held:
            if sequence.outcome is None:
                self._call(sequence, sequence.consumer.on_release)

    def _end(self, batch: Batch) -> list[SequenceState]:
        """Every member has met its own end: padding stops, the server is free; returns the
        answers held back.
        """
        sequences = [
            sequence for sequence in batch.sequences if sequence.batch is batch
        ]  # a preempted one has moved on
        batch.sequences = []
        slot = self._slots[batch.server_id]
        padding = [sequence.id for sequence in sequences if sequence.id in slot.running]
        if padding:
            self.engine.cancel(padding)
            for request_id in padding:
                slot.leave(request_id)
        if not batch.policy.joins_running:
            now = self.now()
            for sequence in sequences:
                self._end_service(sequence, now)
            self._report_idle(slot, now)
        return sequences if batch.policy.release == "batch" else []

    def _report_idle(self, slot: Slot, at: float) -> None:
        if not slot.running:
            self._changed.set()
            self.observers.on_idle(slot.id, at)

    # one outcome, one record

    def settle(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Give a sequence its one outcome; its record leaves once its server's end is known too."""
        sequence.outcome, sequence.stream = outcome, None
        self._unsettled.pop(sequence.id, None)
        self.moved_at = self.now()
        self.observers.on_settle(sequence)
        if sequence.at.server_free is not None or sequence.batch is None:
            self.observers.on_record(sequence.record())
        else:
            self._settled_in_service += 1
        self._changed.set()
        self.recovery.settled(sequence)

    def _end_service(self, sequence: SequenceState, at: float) -> None:
        """`at` is the instant that `on_idle` reports, too: the process may lose the CPU between
        two readings of the clock.
        """
        sequence.at.server_free = at
        if sequence.outcome is not None:
            self._settled_in_service -= 1
            self.observers.on_record(sequence.record())

    async def _change(self) -> None:
        """Return after the next outcome, idle server or reopening."""
        self._changed.clear()
        await self._changed.wait()

    async def drained(self) -> bool:
        """Return once nothing is unanswered, or the queue was opened again: False then."""
        while self._unsettled and self.closing:
            await self._change()
        return self.closing

    async def answered(self) -> None:
        """Return once nothing is unanswered."""
        while self._unsettled:
            await self._change()

    async def served(self) -> None:
        """Return once nothing is in service, and no trial or proof has the engine."""
        while self.in_service or self.recovery.tries:
            await self._change()

    async def emptied(self, server_id: int) -> None:
        """Return once this server has nothing in service."""
        while self._slots[server_id].running:
            await self._change()

    # changes of the policy, of the limits and of the servers

    def switch(self, policy: Policy | None = None) -> int:
        """Put another policy in force (None: only a limit changed); returns the new epoch.

        What is in service finishes under the old policy, what waits is served under the new one.
        """
        self.epoch += 1
        if policy is not None:
            self._govern(policy)
        self.ask()
        return self.epoch

    def _govern(self, policy: Policy) -> None:
        queue = moved(self._queue, self._queue_for(policy))  # an order that fails changes nothing
        self.policy = served_as(policy, pads=self.capabilities.pads)
        built_in = is_built_in(self.policy)
        self._decide = self.policy.decide if built_in else partial(decided, self.policy, self.now)
        self.policy_text = format_policy(policy)  # as asked, however it is served
        self.policy_batch_size = policy_batch_size(policy)  # the largest that it asks for
        self.wants_steps = wants_steps(policy)
        self._wants_predictions = order_of(policy).predicts
        self._preempts = may_preempt(policy)  # it may take sequences out of the engine again
        self._queue = queue
        # of the flows, under an order that counts
        self.counters: FlowCounters | None = self._queue.counters
        self._prefixes = matches_for(self.policy, self._prefixes, self._unsettled)
        follows_tokens = self.wants_steps or counts(policy)
        self.on_made: Callable[[Running, int], None] | None
        self.on_made = self._on_made if follows_tokens else None

    def rank_by(self, ranking: Order) -> None:
        """What the order in force has learned: it holds for what waits and what is in service, and
        begins no epoch.
        """
        before = self.policy
        if not isinstance(before, Ordered) or before.ranking == ranking:
            return
        self._govern(with_ranking(before, ranking))
        for slot in self._slots:
            if slot.policy is before:
                slot.policy = self.policy
        self.ask()

    def rank_again(self) -> None:
        """Sort the requests that wait anew, after priorities began to age or ceased to."""
        if self.counters is None:
            self._queue = moved(self._queue, self._queue_for(self.policy))
        self.ask()

    def limit_tokens(self, limit: int | None) -> None:
        """The gateway's token limit, for those who wait too; what is in service keeps its own. The
        policy is not asked: an epoch begins.
        """
        self.max_output_tokens = limit
        for sequence in self._unsettled.values():
            if sequence.batch is None:
                sequence.limit_tokens()
        self._queue.renew(lambda waiting: self._unsettled[waiting.request.id].waiting())

    def close(self) -> None:
        """Nothing more will arrive: a partial batch is dispatched rather than kept waiting."""
        self.closing = True
        self.lease.revoke()
        self.ask()

    def reopen(self) -> None:
        """Cancel the wait for the last request: new ones are admitted again."""
        self.closing = False
        self._changed.set()
        self.ask()

    def pause_dispatch(self, paused: bool) -> None:
        """Stop dispatching (what waits keeps its place), or dispatch again."""
        self.lease.pause(paused)
        self.moved_at = self.now()
        self.ask()

    def withhold(self, servers: Collection[int], *, ask: bool = True) -> None:
        """These take no work from now on, all others do. `ask`: not where an epoch begins, which
        asks: what is dispatched then belongs to it.
        """
        for slot in self._slots:
            slot.up = slot.id not in servers
        if ask:
            self._ask_for_servers()

    def use_only(self, servers: Collection[int], *, ask: bool = True) -> None:
        """These take work from now on, no other does; one may be new. `ask` as for `withhold`."""
        self._add_slots(max(servers, default=0) + 1)
        for server_id in servers:
            self._slots[server_id].leaving = False
        self.withhold({slot.id for slot in self._slots} - set(servers), ask=ask)

    def trust(self, server_id: int, room: int | None) -> None:
        """This server gets so many sequences at once; None: as many as it serves."""
        self._add_slots(server_id + 1)
        self._slots[server_id].room = UNBOUNDED if room is None else room
        self._ask_for_servers()

    def _add_slots(self, servers: int) -> None:
        self._slots += [Slot(index) for index in range(len(self._slots), servers)]

    # read from outside: by the HTTP layer, admission, the live model, the page

    @property
    def queue_length(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    @property
    def waiting(self) -> Sequence[Waiting]:
        """Requests waiting, in the order of service. A view: not to be kept."""
        return self._queue

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests waiting."""
        return self._queue.prompt_tokens

    def place_of(self, request: Request) -> int:
        """How many would wait before this request if it were submitted now."""
        return self._queue.place_of(request)

    @property
    def effective_max_batch_size(self) -> int:
        """The least of the policy's own bound and the engine's."""
        own, bound = self.policy_batch_size, self.capabilities.max_num_seqs
        return bound if own is None else min(own, bound)

    @property
    def in_service(self) -> int:
        """Requests dispatched whose own end has not come (or whose padded batch runs on)."""
        return sum([len(slot.running) for slot in self._slots])

    @property
    def unanswered(self) -> int:
        """Requests without an outcome."""
        return len(self._unsettled)

    @property
    def unrecorded(self) -> int:
        """Requests that have arrived and whose record has not been handed out."""
        return len(self._unsettled) + self._settled_in_service

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is served, and nothing else has the engine."""
        busy = self.lease.blocks or self.unanswered or self.in_service
        return not (busy or self.recovery.tries)

    @property
    def resting(self) -> bool:
        """Whether what is in service waits for an engine, or that for a proof."""
        return self.recovery.down or self.recovery.trials.proving

    @property
    def servers(self) -> int:
        """How many take work."""
        return sum(slot.up for slot in self._slots)

    @property
    def servers_in_use(self) -> frozenset[int]:
        """Ids of the servers that take work."""
        return frozenset(slot.id for slot in self._slots if slot.up)

    def unanswered_sequences(self) -> Iterable[SequenceState]:
        """Sequences without an outcome: waiting, in service, or being written."""
        return self._unsettled.values()

    def running(self) -> list[list[Running]]:
        """The requests in service on each server."""
        return [list(slot.running.values()) for slot in self._slots]

    def in_service_sequences(self) -> list[list[SequenceState]]:
        """The sequences in service on each server, without those whose client is gone."""
        unsettled = self._unsettled
        return [
            [unsettled[name] for name in slot.running if name in unsettled] for slot in self._slots
        ]


class Recovery:
    """Keeps sequences that were in service when an engine was lost, and hands them to the next one.

    Of several engines that each are one server of the queue (`server.supervision.replicas`) one
    can be lost alone. What it had in service goes back to the head of the queue then and continues
    on another, except for requests that may have killed it: they wait for its own return and are
    tried there, while the queue goes on with the others.
    """

    def __init__(self, batcher: Batcher, suspect_after: int) -> None:
        self._batcher, self._suspect_after = batcher, suspect_after
        self.down = False  # a lost engine is being started again
        self._handling = False  # what one server had is being put back
        self.trials = Trials(
            suspect_after,
            self.restart,
            self._over,
            lambda proved: KillTrial(batcher.engine, proved),
        )
        self.servers: dict[int, ServerTrials] = {}  # of those that were lost alone
        # so many losses of this server were caused by requests that are refused now
        self.on_forgiven: Callable[[int, int], None] | None = None
        # one of several servers takes work again
        self.on_server_back: Callable[[], None] | None = None

    # the engine

    def interrupt(self, message: str, most: int) -> SequenceState | None:
        """The engine is gone and another one is being started: what waits keeps its place, what is
        in service stays there for `resume`.

        Three kinds fail now: what cannot be continued exactly, what saw more than `most` engines
        die, and the request that is certain to have killed it, which is returned.
        """
        self._batcher.lease.revoke()
        self.down = True
        sequences = self._in_service(self._batcher._slots)
        guilty = self.trials.died(sequences)
        self._detach(sequences, guilty, message, most)
        return guilty

    def resume(self, capabilities: Capabilities) -> None:
        """Another engine serves: first what was in service continues, batch by batch under its own
        policy, then the queue.
        """
        self._batcher.capabilities, self.down = capabilities, False
        self.trials.resume(self._kept(self._batcher.servers_in_use))

    # one of several servers

    def interrupt_server(
        self, server_id: int, message: str, most: int, *, comes_back: bool
    ) -> SequenceState | None:
        """This server is gone and takes no work; what it had in service goes back to the head of
        the queue, except for suspects that it will try when it comes back. See `interrupt`.
        """
        batcher, slot = self._batcher, self._batcher._slots[server_id]
        batcher.lease.revoke()
        trials = self._trials_of(server_id)
        slot.up = False
        self._handling = True
        try:
            sequences = self._in_service([slot])
            guilty = trials.died(sequences)
            continues = self._detach(sequences, guilty, message, most)
            if not comes_back:
                continues = self._kept({server_id})
            batcher.put_back(
                [
                    each
                    for each in continues
                    if each.outcome is None and not (comes_back and trials.suspected(each))
                ]
            )
        finally:
            self._handling = False
        batcher.ask()
        return guilty

    def resume_server(self, server_id: int) -> None:
        """It serves: first what it has to try, then its part of the queue."""
        self._trials_of(server_id).resume(self._kept({server_id}))

    def withdraw_server(self, server_id: int) -> None:
        """It gets nothing new, and ends what it has."""
        self._batcher.lease.revoke()
        slot = self._batcher._slots[server_id]
        slot.up, slot.leaving = False, True

    def _trials_of(self, server_id: int) -> ServerTrials:
        if server_id not in self.servers:
            self.servers[server_id] = ServerTrials(
                self._suspect_after,
                self.restart,
                partial(self._server_over, server_id),
                lambda proved: KillTrial(self._batcher.engine, proved, server_id),
                first_death=(server_id + 1) * LOSSES,
            )
            self.servers[server_id].on_forgiven = self._forgiven
        return self.servers[server_id]

    def _server_over(self, server_id: int) -> None:
        slot = self._batcher._slots[server_id]
        slot.up = not slot.leaving
        self._batcher._changed.set()
        if slot.up and self.on_server_back is not None:
            self.on_server_back()
        self._batcher.ask()

    def _forgiven(self, server_id: int, losses: int) -> None:
        if self.on_forgiven is not None:
            self.on_forgiven(server_id, losses)

    # the sequences that were in service

    def _in_service(self, slots: Iterable[Slot]) -> list[SequenceState]:
        unsettled = self._batcher._unsettled
        return [unsettled[request_id] for slot in slots for request_id in slot.running]

    def _detach(
        self,
        sequences: Sequence[SequenceState],
        guilty: SequenceState | None,
        message: str,
        most: int,
    ) -> list[SequenceState]:
        """They hear no more of the engine that had them; returns those that can go on."""
        fail = self._batcher.fail
        for sequence in sequences:  # all, before one that fails ends the batch of others
            if sequence.stream is not None:
                sequence.interruptions += 1
        continues = []
        for sequence in sequences:
            if sequence is guilty:
                fail(sequence, "failed", CODE, f"{FAILED} ({message})")
            elif sequence.stream is None:  # it had not gone back to the engine yet
                continue
            elif reason := interrupted(sequence, most):
                fail(sequence, "failed", "engine_unavailable", f"{reason} ({message})")
            elif sequence.stop_detector.finish_reason is None:
                continues.append(sequence)
        return continues

    def _batches(self) -> list[Batch]:
        """Batches with members whose own end has not come, in the order of their dispatch."""
        batches = {
            sequence.batch for server in self._batcher.in_service_sequences() for sequence in server
        }
        return sorted(
            (batch for batch in batches if batch is not None and batch.open),
            key=lambda batch: batch.id,
        )

    def _kept(self, servers: Collection[int]) -> list[SequenceState]:
        """In no engine, and not over: those in service on these servers."""
        return [
            sequence
            for batch in self._batches()
            if batch.server_id in servers
            for sequence in batch.sequences
            if sequence.id in batch.open and sequence.stream is None
        ]

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Back into the engine, batch by batch; a part of a batch joins the part that is there."""
        ids = {sequence.id for sequence in sequences}
        for batch in self._batches():
            # one that was preempted or put back has moved on to another batch
            own = [sequence for sequence in batch.sequences if sequence.batch is batch]
            if part := [sequence for sequence in own if sequence.id in ids]:
                served = any(sequence.stream is not None for sequence in own)
                self._batcher._start(batch, part, joining=served)

    def renew(self, sequence: SequenceState) -> None:
        """Out of the engine, and in again behind what it has; its place in its batch stays."""
        assert sequence.batch is not None
        self._batcher.engine.cancel([sequence.id])
        self._batcher._start(sequence.batch, [sequence], joining=True)

    # trials and proofs

    def settled(self, sequence: SequenceState) -> None:
        """Its last token can show that the engine is sound."""
        self.trials.settled(sequence)
        batch = sequence.batch
        if batch is not None and (own := self.servers.get(batch.server_id)) is not None:
            own.settled(sequence)

    def stop(self) -> None:
        """No trial goes on."""
        for trials in self._all():
            trials.stop()

    def _over(self) -> None:
        self._batcher._changed.set()
        self._batcher.ask()

    def _all(self) -> tuple[Trials, ...]:
        return (self.trials, *self.servers.values())

    @property
    def blocks(self) -> bool:
        """Whether the queue waits for a new engine, a trial or a proof."""
        return self.down or self.trials.pauses_dispatch or self._handling

    @property
    def tries(self) -> bool:
        """Whether an engine has a trial or a proof to do."""
        return any(trials.pauses_dispatch for trials in self._all())

    def statistics(self) -> dict[str, Any]:
        """For `/admin/state`."""
        every = self._all()
        return {
            "on_trial": any(trials.suspect is not None for trials in every),
            "proving": any(trials.proving for trials in every),
            "convicted": sum(trials.convicted for trials in every),
        }
