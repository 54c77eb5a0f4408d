"""Batches in service: started on the engine, followed to the end of every member, their servers
freed. And the engine's lease: who may use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kendall.policies import Policy, Running
from kendall.policies.core import UNBOUNDED
from kendall.queueing.measurement.record import Outcome
from kendall.server.engines.base import Capabilities, Engine
from kendall.server.queue.continuing import listen, prepare, resumable
from kendall.server.queue.ledger import Ledger
from kendall.server.queue.sequence import Batch, SequenceState

log = logging.getLogger("kendall.batcher")
Fail = Callable[[SequenceState, Outcome, str, str], None]


@dataclass(slots=True)
class Slot:
    """One server: what runs there, and the policy that dispatched it."""

    id: int
    running: dict[str, Running] = field(default_factory=dict)
    policy: Policy | None = None
    up: bool = True  # it takes work
    leaving: bool = False  # and will not take any again
    room: int = UNBOUNDED  # sequences at once that it is trusted with
    sequences: int = 0  # that run
    context_tokens: int = 0  # that they may come to hold

    def enter(self, running: Running) -> None:
        """One more runs."""
        request = running.request
        self.running[request.id] = running
        self.sequences += request.sequences
        self.context_tokens += request.context_tokens

    def leave(self, request_id: str) -> None:
        """It runs no more, if it did."""
        running = self.running.pop(request_id, None)
        if running is not None:
            self.sequences -= running.request.sequences
            self.context_tokens -= running.request.context_tokens


class Lease:
    """A pause keeps the engine from the batcher until it ends; a lease ends with the first
    arrival, a pause or a drain.
    """

    def __init__(self) -> None:
        self.paused = False
        self._on_revoke: Callable[[], None] | None = None

    @property
    def active(self) -> bool:
        """Whether somebody has leased the engine."""
        return self._on_revoke is not None

    @property
    def blocks(self) -> bool:
        """Whether the batcher must not dispatch."""
        return self.paused or self._on_revoke is not None

    def acquire(self, on_revoke: Callable[[], None]) -> None:
        """Lease the idle engine. `on_revoke` is called once, when the lease ends early, and frees
        the engine before it returns.
        """
        self._on_revoke = on_revoke

    def revoke(self) -> None:
        """End the lease, if there is one."""
        if self._on_revoke is not None:
            on_revoke, self._on_revoke = self._on_revoke, None
            on_revoke()

    def pause(self, paused: bool) -> None:
        """Begin or end a pause; a lease ends with either."""
        self.revoke()
        self.paused = paused


class Service:
    """`ask` is called when a server can be dispatched to again: at once, or under a policy that is
    asked after every step when all have their tokens of it. `fail` is called for a sequence that
    cannot be answered.
    """

    def __init__(
        self,
        engine: Engine,
        capabilities: Capabilities,
        ledger: Ledger,
        ask: Callable[[], None],
        fail: Fail,
    ) -> None:
        self.engine = engine
        self.capabilities = capabilities
        self.slots = [Slot(index) for index in range(capabilities.servers)]
        self.ledger, self.ask, self._fail = ledger, ask, fail
        # to the head of the queue, in this order
        self.requeue: Callable[[Sequence[SequenceState]], None]
        self.preempts: bool  # the policy in force may take sequences out again

    @property
    def size(self) -> int:
        """Sequences dispatched whose own end has not come (or whose padded batch runs on)."""
        return sum([len(slot.running) for slot in self.slots])

    def sequences(self, server_id: int | None = None) -> list[SequenceState]:
        """Those in service, server by server, or on one server."""
        unsettled = self.ledger.unsettled
        slots = self.slots if server_id is None else [self.slots[server_id]]
        return [unsettled[request_id] for slot in slots for request_id in slot.running]

    def batches(self) -> list[Batch]:
        """Those with members whose own end has not come, in the order of their dispatch."""
        unsettled = self.ledger.unsettled
        found = {
            sequence.batch
            for slot in self.slots
            for request_id in slot.running
            if (sequence := unsettled.get(request_id)) is not None
        }
        return sorted(
            (batch for batch in found if batch is not None and batch.open),
            key=lambda batch: batch.id,
        )

    def begin(self, batch: Batch, epoch: int) -> None:
        """Its members take their places on the server."""
        slot = self.slots[batch.server_id]
        slot.policy = batch.policy
        for sequence in batch.sequences:
            sequence.begin_service(batch, epoch)
            sequence.running = Running(
                sequence.engine_request.request,
                batch.dispatched_at,
                len(sequence.engine_request.output_token_ids),
                self.preempts
                and sequence.engine_request.call is None
                and resumable(sequence.engine_request.sampling),
                sequence.preemptions,
            )
            slot.enter(sequence.running)
        for sequence in batch.sequences:
            sequence.batch_size = slot.sequences

    def start(
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
                self._fail(sequence, "failed", "engine_error", message)
            return ()
        for sequence, stream in zip(sequences, streams, strict=True):
            listen(sequence, stream)
        return sequences

    def call(self, sequence: SequenceState, notify: Callable[[], None]) -> None:
        """Call a consumer; a fault in one answer ends that answer, and nothing else."""
        try:
            notify()
        except Exception:
            log.exception("internal error while handling an answer")
            message = "internal error of the gateway; its log has the details"
            self._fail(sequence, "failed", "internal_error", message)

    def preempt(self, sequence: SequenceState, now: float) -> None:
        """Out of the engine and of its batch, with the tokens made so far."""
        batch = sequence.batch
        assert batch is not None
        self.ledger.observers.on_preempt(sequence)
        self.engine.cancel([sequence.id])
        self.slots[batch.server_id].leave(sequence.id)
        batch.open.discard(sequence.id)
        sequence.end_stint(now)

    def put_back(self, sequence: SequenceState) -> None:
        """The engine did not begin it: it goes to the head of the queue, and its place is free."""
        self.put_all_back([sequence])

    def put_all_back(self, sequences: Sequence[SequenceState]) -> None:
        """They go to the head of the queue, to continue elsewhere; their places are free."""
        now, batches = self.ledger.now(), {}
        for sequence in sequences:
            batch = sequence.batch
            assert batch is not None
            batches[batch.id] = batch
            self.preempt(sequence, now)
            prepare(sequence)  # it may have to begin anew, and not behind what it has
        self.requeue(sequences)
        joined = {batch.server_id for batch in batches.values() if batch.policy.joins_running}
        for server_id in joined:
            self._report_idle(self.slots[server_id], now)
        for batch in batches.values():
            self._after_departure(batch)

    def withhold(self, servers: Collection[int], *, ask: bool = True) -> None:
        """These take no work from now on, all others do. `ask`: not where an epoch begins, which
        asks: what is dispatched then belongs to it.
        """
        for slot in self.slots:
            slot.up = slot.id not in servers
        if ask:
            self.ask()

    def use_only(self, servers: Collection[int], *, ask: bool = True) -> None:
        """These take work from now on, no other does; one may be new. `ask` as for `withhold`."""
        self.slots += [Slot(index) for index in range(len(self.slots), max(servers, default=0) + 1)]
        for server_id in servers:
            self.slots[server_id].leaving = False
        self.withhold({slot.id for slot in self.slots} - set(servers), ask=ask)

    def trust(self, server_id: int, room: int | None) -> None:
        """This server gets so many sequences at once; None: as many as it serves."""
        self.slots += [Slot(index) for index in range(len(self.slots), server_id + 1)]
        self.slots[server_id].room = UNBOUNDED if room is None else room
        self.ask()

    async def emptied(self, server_id: int) -> None:
        """Return once this server has nothing in service."""
        while self.slots[server_id].running:
            await self.ledger.change()

    def serve_within(self, capabilities: Capabilities) -> None:
        """There is another number of servers, or they have other bounds."""
        self.capabilities = capabilities

    def drop(self, sequence: SequenceState) -> None:
        """Its answer is not wanted any more."""
        batch = sequence.batch
        assert batch is not None
        batch.open.discard(sequence.id)
        if sequence.id in self.slots[batch.server_id].running:
            self.engine.cancel([sequence.id])
            self._leave(sequence, batch)
            self._after_departure(batch)

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

    def _leave(self, sequence: SequenceState, batch: Batch) -> None:
        slot = self.slots[batch.server_id]
        slot.leave(sequence.id)
        if batch.policy.joins_running:
            now = self.ledger.now()
            self.ledger.freed(sequence, now)
            self._report_idle(slot, now)

    def _after_departure(self, batch: Batch, leaving: SequenceState | None = None) -> None:
        """The next dispatch comes first, then the answers that may leave: writing them takes
        time.
        """
        over = not batch.open and bool(batch.sequences)
        held = self._end(batch) if over else []
        if over or batch.policy.joins_running:
            self.ask()
        for sequence in [leaving] if leaving is not None else held:
            if sequence.outcome is None:
                self.call(sequence, sequence.consumer.on_release)

    def _end(self, batch: Batch) -> list[SequenceState]:
        """Every member has met its own end: padding stops, the server is free; returns the
        answers held back.
        """
        sequences = [
            sequence for sequence in batch.sequences if sequence.batch is batch
        ]  # a preempted one has moved on
        batch.sequences = []
        slot = self.slots[batch.server_id]
        padding = [sequence.id for sequence in sequences if sequence.id in slot.running]
        if padding:
            self.engine.cancel(padding)
            for request_id in padding:
                slot.leave(request_id)
        if not batch.policy.joins_running:
            now = self.ledger.now()
            for sequence in sequences:
                self.ledger.freed(sequence, now)
            self._report_idle(slot, now)
        return sequences if batch.policy.release == "batch" else []

    def _report_idle(self, slot: Slot, at: float) -> None:
        if not slot.running:
            self.ledger.notify()
            self.ledger.observers.on_idle(slot.id, at)
