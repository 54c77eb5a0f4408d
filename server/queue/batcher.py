"""The driver of a policy on a live engine: keeps the queue, asks, carries out, and owns every
unanswered ticket.

While somebody waits, it asks on every arrival, end, cancellation and expiry, on a change of policy,
and at the last `WaitUntil`; after a `Dispatch` it asks again at once. Everything happens
synchronously on the event loop's clock, so that on virtual time the instants equal the simulator's.
Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from policies import (
    Dispatch,
    Fixed,
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
)
from queueing.measurement.record import Outcome, Record
from queueing.simulation.waiting import WaitingQueue
from server.engines.base import Capabilities, Engine, Work
from server.queue.continuing import interrupted, listen
from server.queue.ending import Ending
from server.queue.observers import Observer, Observers
from server.queue.poison import CODE, FAILED, Trials
from server.queue.proof import Proof
from server.queue.ticket import Batch, Consumer, Ticket
from server.runtime.clock import clock_of

log = logging.getLogger("kendall.batcher")


@dataclass(slots=True)
class _Slot:
    """One server: what runs there, and for which policy."""

    id: int
    running: dict[str, Running] = field(default_factory=dict)
    policy: Policy | None = None  # whose work it holds


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
        queue: WaitingQueue | None = None,
        *,
        suspect_after: int = 2,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = clock_of(self._loop)
        self.engine = engine
        self.capabilities = capabilities
        self.policy = policy
        self.policy_text = format_policy(policy)
        self.epoch = 0
        self.closing = False
        self.held = False  # True while something else (a calibration) has the engine to itself
        self.down = False  # True while a lost engine is started again
        # what went wrong when the policy was asked last, if something did
        self.failing: str | None = None
        self.failures: Counter[str] = Counter()  # requests that failed, by the code of the error
        self.moved_at = self.now()  # last arrival, outcome or end of a hold
        # what was in service when engines died, back to the next one
        self.trials = Trials(
            suspect_after, self._restart, self._trials_over, lambda over: Proof(self.engine, over)
        )
        self._let_go: Callable[[], None] | None = None  # frees the engine that is lent
        self._observers = Observers(observers)
        self._queue = WaitingQueue() if queue is None else queue
        self._slots = [_Slot(index) for index in range(capabilities.servers)]
        self._batch_ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._asking = self._ask_again = False
        self._settled = asyncio.Event()  # something met its outcome, or a server became idle
        self._unsettled: dict[
            str, Ticket
        ] = {}  # not in the queue, or in it: without an outcome yet
        self._unrecorded = 0  # with an outcome, whose server is not free yet

    # what it holds

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
        own, bound = policy_batch_size(self.policy), self.capabilities.max_num_seqs
        return bound if own is None else min(own, bound)

    @property
    def in_service(self) -> int:
        """Requests dispatched whose own end has not come (or whose padded batch goes on)."""
        return sum([len(slot.running) for slot in self._slots])

    @property
    def unanswered(self) -> int:
        """Requests without an outcome."""
        return len(self._unsettled)

    @property
    def unrecorded(self) -> int:
        """Requests that have arrived and whose record has not been handed out."""
        return len(self._unsettled) + self._unrecorded

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is served, and the engine is its own."""
        return not (self.held or self._unsettled or self.in_service or self.trials.holding)

    @property
    def lent(self) -> bool:
        """Whether someone has borrowed the engine."""
        return self._let_go is not None

    def unanswered_tickets(self) -> Iterable[Ticket]:
        """Those without an outcome: waiting, in service, or being written."""
        return self._unsettled.values()

    def running(self) -> list[list[Running]]:
        """What each server has in service."""
        return [list(slot.running.values()) for slot in self._slots]

    def in_service_tickets(self) -> list[list[Ticket]]:
        """The same with how far each is; without those whose client is gone."""
        return [
            [self._unsettled[name] for name in slot.running if name in self._unsettled]
            for slot in self._slots
        ]

    # what comes in

    def submit(
        self, works: Sequence[Work], consumers: Sequence[Consumer], client_limit: int | None = None
    ) -> list[Ticket]:
        """Put sequences into the queue, all of one call together, and ask the policy."""
        eos = self.capabilities.eos_token_ids
        tickets = [
            Ticket(
                self,
                work,
                Ending(work.sampling, eos if work.ends_by_itself else ()),
                consumer,
                client_limit,
            )
            for work, consumer in zip(works, consumers, strict=True)
        ]
        for ticket in tickets:
            if ticket.id in self._unsettled:
                raise ValueError(f"request id {ticket.id!r} is in use")
            self._unsettled[ticket.id] = ticket
            self._queue.append(ticket.waiting())
            deadline = ticket.work.request.deadline
            if deadline < math.inf:
                self._expiries[ticket.id] = self._loop.call_at(deadline, self._expire, ticket)
            self._observers.on_arrival(ticket)
        self.moved_at = self.now()
        self.take_back()
        self._ask()
        return tickets

    def turn_away(self, record: Record) -> None:
        """One that arrived and was refused: recorded and counted, never queued."""
        self._observers.on_record(record)

    def switch(self, policy: Policy | None = None) -> int:
        """Put another policy in force (None: only a limit changed); returns the new epoch.

        What is in service finishes under the old policy, what waits goes on under the new one.
        """
        self.epoch += 1
        if policy is not None:
            self.policy, self.policy_text = policy, format_policy(policy)
        self._ask()
        return self.epoch

    def requeue(self, queue: WaitingQueue) -> None:
        """Move the waiting requests into `queue`, which is empty and has another order."""
        for waiting in sorted(self._queue, key=lambda waiting: waiting.request.arrived_at):
            queue.append(waiting)
        self._queue = queue
        self._ask()

    def close(self) -> None:
        """Nothing more will arrive: a partial batch is dispatched rather than kept waiting."""
        self.closing = True
        self.take_back()
        self._ask()

    def reopen(self) -> None:
        """Cancel the wait for the last request: new ones are admitted again."""
        self.closing = False
        self._settled.set()
        self._ask()

    async def drained(self) -> bool:
        """Return once nothing is unanswered, or the queue was opened again: False then."""
        while self._unsettled and self.closing:
            self._settled.clear()
            await self._settled.wait()
        return self.closing

    async def answered(self) -> None:
        """Return once nothing is unanswered."""
        while self._unsettled:
            self._settled.clear()
            await self._settled.wait()

    async def served(self) -> None:
        """Return once nothing is in service, and no trial or proof has the engine."""
        while self.in_service or self.trials.holding:
            self._settled.clear()
            await self._settled.wait()

    def _trials_over(self) -> None:
        self._settled.set()
        self._ask()

    def hold(self, held: bool) -> None:
        """Stop dispatching (what waits keeps its place), or go on."""
        self.take_back()
        self.held, self.moved_at = held, self.now()
        self._ask()

    def lend(self, let_go: Callable[[], None]) -> None:
        """Give the idle engine away until someone arrives, holds it, or closes: `let_go` is
        called then, and frees it at once.
        """
        self.held, self._let_go = True, let_go

    def take_back(self) -> None:
        """End a loan, if there is one."""
        if self._let_go is not None:
            let_go, self._let_go, self.held = self._let_go, None, False
            let_go()

    # what ends

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: out of the queue or out of the engine. No effect on a ticket with
        an outcome.
        """
        self._drop(ticket, "cancelled")

    def lose(self, ticket: Ticket, outcome: Outcome, code: str, message: str) -> None:
        """No answer for this ticket; its consumer is told."""
        if ticket.outcome is None:
            ticket.lost_because(message)
            if outcome == "failed":
                self.failures[code] += 1
            try:
                ticket.consumer.on_lost(outcome, code, message)
            except Exception:
                log.exception("internal error while telling a client that its request failed")
            self._drop(ticket, outcome)

    def lose_all(self, code: str, message: str) -> None:
        """The engine is gone or the gateway stops: every unanswered ticket fails, once."""
        self.take_back()
        self.held = True  # nothing may be dispatched in between
        self.trials.stop()
        for ticket in list(self._unsettled.values()):
            self.lose(ticket, "failed", code, message)

    def interrupt(self, message: str, most: int) -> Ticket | None:
        """The engine is gone and another one is started: what waits keeps its place, what is in
        service stays there for `resume`.

        Those lose their answer now that cannot be continued exactly, those that saw more than
        `most` engines die, and the one that is certain to have killed it, which is returned.
        """
        self.take_back()
        self.down = True
        tickets = [
            self._unsettled[request_id] for slot in self._slots for request_id in slot.running
        ]
        guilty = self.trials.died(tickets)
        for ticket in tickets:
            if ticket is guilty:
                ticket.interruptions += 1
                self.lose(ticket, "failed", CODE, f"{FAILED} ({message})")
            elif ticket.stream is not None and (
                reason := interrupted(ticket, most)
            ):  # the others had not gone back to the engine yet
                self.lose(ticket, "failed", "engine_unavailable", f"{reason} ({message})")
        return guilty

    def resume(self, capabilities: Capabilities) -> None:
        """Another engine serves: first what was in service goes on, batch by batch under its own
        policy, then the queue.
        """
        self.capabilities, self.down = capabilities, False
        self.trials.resume(
            [
                ticket
                for batch in self._batches()
                for ticket in batch.tickets
                if ticket.id in batch.open
            ]
        )

    def hand_over_again(self, ticket: Ticket) -> None:
        """Out of the engine, and in again behind what it has; its place in its batch stays."""
        assert ticket.batch is not None
        self.engine.cancel([ticket.id])
        self._start(ticket.batch, [ticket], joining=True)

    def poke(self) -> None:
        """Ask the policy although nothing happened: if something was due that nobody asked for,
        it happens now.
        """
        self._ask()

    def _batches(self) -> list[Batch]:
        """Those in service with members whose own end has not come, in the order of their
        dispatch.
        """
        found = {
            self._unsettled[request_id].batch for slot in self._slots for request_id in slot.running
        }
        return sorted(
            (batch for batch in found if batch is not None and batch.open),
            key=lambda batch: batch.id,
        )

    def member_ended(self, ticket: Ticket) -> None:
        """A ticket met its own end: it leaves now, or with its batch."""
        batch = ticket.batch
        assert batch is not None
        batch.open.discard(ticket.id)
        if ticket.ending.stop_reason is not None and not batch.policy.padded:
            self.engine.cancel(
                [ticket.id]
            )  # the engine knows no stop strings, nor always the stop tokens
        if not batch.policy.padded:
            self._leave_server(ticket)
        self._after_departure(batch, leaving=ticket if batch.policy.release == "request" else None)

    def settle(self, ticket: Ticket, outcome: Outcome) -> None:
        """Give a ticket its one outcome; its record leaves once its server's end is known too."""
        ticket.outcome, ticket.stream = outcome, None
        self._unsettled.pop(ticket.id, None)
        if self.trials.explained and outcome == "completed":
            self.trials.completed(ticket)
        self._settled.set()
        self.moved_at = self.now()
        self._observers.on_settle(ticket)
        if ticket.at.server_free is not None or ticket.batch is None:
            self._emit(ticket)
        else:
            self._unrecorded += 1

    # inside

    def _expire(self, ticket: Ticket) -> None:
        if ticket.batch is None:
            self.lose(
                ticket,
                "abandoned",
                "queue_timeout",
                "the request's patience ran out while it waited",
            )

    def _drop(self, ticket: Ticket, outcome: Outcome) -> None:
        if ticket.outcome is not None:
            return
        if ticket.batch is None:
            self._queue.remove(ticket.id)
            self._forget_expiry(ticket)
            self.settle(ticket, outcome)
            self._ask()
            return
        batch = ticket.batch
        assert batch is not None
        self.settle(ticket, outcome)
        in_service = ticket.id in self._slots[batch.server_id].running
        batch.open.discard(ticket.id)
        if in_service:
            self.engine.cancel([ticket.id])
            self._leave_server(ticket)
            self._after_departure(batch)

    def _leave_server(self, ticket: Ticket) -> None:
        batch = ticket.batch
        assert batch is not None
        slot = self._slots[batch.server_id]
        slot.running.pop(ticket.id, None)
        if batch.policy.joins_running:
            now = self.now()
            self._free(ticket, now)
            self._tell_idle(slot, now)

    def _after_departure(self, batch: Batch, leaving: Ticket | None = None) -> None:
        """The next dispatch comes first, then the answers that may leave: writing them takes
        time.
        """
        over = not batch.open and bool(batch.tickets)
        held = self._end_batch(batch) if over else []
        if over or batch.policy.joins_running:
            self._ask()
        for ticket in [leaving] if leaving is not None else held:
            if ticket.outcome is None:
                self._tell(ticket, ticket.consumer.on_release)

    def _end_batch(self, batch: Batch) -> list[Ticket]:
        """Every member has met its own end: padding stops, the server is free; returns the
        answers held back.
        """
        tickets = [
            ticket for ticket in batch.tickets if ticket.batch is batch
        ]  # a preempted one has moved on
        batch.tickets = []
        slot = self._slots[batch.server_id]
        padding = [ticket.id for ticket in tickets if ticket.id in slot.running]
        if padding:
            self.engine.cancel(padding)
            for request_id in padding:
                del slot.running[request_id]
        if not batch.policy.joins_running:
            now = self.now()
            for ticket in tickets:
                self._free(ticket, now)
            self._tell_idle(slot, now)
        return tickets if batch.policy.release == "batch" else []

    def _tell_idle(self, slot: _Slot, at: float) -> None:
        if not slot.running:
            self._settled.set()
            self._observers.on_idle(slot.id, at)

    def _free(self, ticket: Ticket, at: float) -> None:
        # the instant that `on_idle` has: the process may lose the CPU between two readings of the
        # clock
        ticket.at.server_free = at
        if ticket.outcome is not None:
            self._unrecorded -= 1
            self._emit(ticket)

    def _emit(self, ticket: Ticket) -> None:
        record = ticket.record()
        self._observers.on_record(record)

    def _forget_expiry(self, ticket: Ticket) -> None:
        if timer := self._expiries.pop(ticket.id, None):
            timer.cancel()

    # asking the policy and carrying out

    def _ask(self) -> None:
        """Carry out what the policy decides until it waits. A call from within is served by the
        outer one.
        """
        if self._asking:
            self._ask_again = True
            return
        self._asking = True
        try:
            self._ask_again = True
            while self._ask_again:
                self._ask_again = False
                self._carry_out()
            self.failing = None
        except Exception as error:
            if self.failing is None:
                log.exception("a dispatch decision failed; the queue continues with the next event")
            self.failing = str(error) or type(error).__name__
        finally:
            self._asking = False

    def _carry_out(self) -> None:
        while not (self.held or self.down or self.trials.holding):
            if not self._queue:  # nothing can start, whatever the policy
                self._wake_at(math.inf)
                return
            decision = self.policy.decide(self._state(), self.now())
            if isinstance(decision, WaitUntil):
                self._wake_at(decision.deadline)
                return
            if isinstance(decision, Preempt):
                self._preempt(decision)
            else:
                self._dispatch(decision)

    def _wake_at(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._ask) if deadline < math.inf else None

    def _state(self) -> QueueState:
        bounds = self.capabilities
        servers = [
            Server(
                slot.id,
                tuple(slot.running.values()),
                bounds.max_num_seqs,
                bounds.max_num_batched_tokens,
                bounds.kv_cache_tokens,
            )
            for slot in self._slots
            if not slot.running or slot.policy is self.policy
        ]
        return QueueState(self._queue, servers, {}, self.closing)

    def _dispatch(self, decision: Dispatch) -> None:
        now = self.now()
        slot, policy = self._slots[decision.server_id], self.policy
        tickets = [
            self._unsettled[waiting.request.id]
            for waiting in self._queue.take(decision.request_ids)
        ]
        slot.policy = policy
        forming = self._forming_until(tickets, now)
        batch = Batch(
            next(self._batch_ids),
            slot.id,
            policy,
            self.policy_text,
            now,
            forming,
            tickets,
            {ticket.id for ticket in tickets},
        )
        for ticket in tickets:
            self._forget_expiry(ticket)
            ticket.batch, ticket.at.dispatched, ticket.epoch = batch, now, self.epoch
            ticket.running = slot.running[ticket.id] = Running(
                ticket.work.request, now, len(ticket.work.output_token_ids)
            )
        for ticket in tickets:
            ticket.batch_size = len(slot.running)
        self._observers.on_dispatch(batch)
        for ticket in self._start(batch, tickets):
            self._tell(ticket, ticket.consumer.on_dispatched)

    def _restart(self, tickets: Sequence[Ticket]) -> None:
        """Back into the engine, batch by batch; a part of a batch joins the part that is there."""
        ids = {ticket.id for ticket in tickets}
        for batch in self._batches():
            if part := [ticket for ticket in batch.tickets if ticket.id in ids]:
                self._start(
                    batch, part, joining=any(ticket.stream is not None for ticket in batch.tickets)
                )

    def _start(
        self, batch: Batch, tickets: Sequence[Ticket], *, joining: bool = False
    ) -> Sequence[Ticket]:
        """Hand a batch, or what is left of it, to the engine; one that refuses loses these
        requests, not the loop. Returns the started.
        """
        policy = batch.policy
        try:
            works = [ticket.work for ticket in tickets]
            streams = self.engine.dispatch(
                batch.server_id,
                works,
                padded=policy.padded,
                joining=joining or policy.joins_running,
            )
        except Exception as error:
            log.exception("the engine rejected a batch")
            for ticket in tickets:
                self.lose(
                    ticket, "failed", "engine_error", f"the engine rejected the request: {error}"
                )
            return ()
        for ticket, stream in zip(tickets, streams, strict=True):
            listen(ticket, stream)
        return tickets

    def _tell(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """A fault in one answer ends that answer, and nothing else."""
        try:
            call()
        except Exception:
            log.exception("internal error while handling an answer")
            self.lose(
                ticket,
                "failed",
                "internal_error",
                "internal error of the gateway; its log has the details",
            )

    def _forming_until(self, tickets: Sequence[Ticket], now: float) -> float:
        """Only fixed batching makes a request wait for company; elsewhere a batch forms of what
        is there.
        """
        if not isinstance(self.policy, Fixed):
            return -math.inf
        last = max(ticket.work.request.arrived_at for ticket in tickets)
        if len(tickets) >= min(self.policy.batch_size, self.capabilities.max_num_seqs):
            return last
        return min(
            now, min(ticket.work.request.arrived_at for ticket in tickets) + self.policy.max_wait
        )

    def _preempt(self, decision: Preempt) -> None:
        """Back to the head of the queue, with the tokens made so far."""
        back = []
        for request_id in decision.request_ids:
            ticket = self._unsettled[request_id]
            batch = ticket.batch
            assert batch is not None
            self.engine.cancel([request_id])
            self._slots[batch.server_id].running.pop(request_id)
            batch.open.discard(request_id)
            ticket.resume_later()
            back.append(ticket.waiting())
        self._queue.put_back(back)
