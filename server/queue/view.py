"""What a batcher holds, to be read: by the HTTP layer, admission, the live model, the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kendall.policies import Policy, Request, Running, Waiting
from kendall.policies.waiting_queues import WaitingQueue
from kendall.server.engines.base import Capabilities
from kendall.server.queue.ledger import Ledger
from kendall.server.queue.recovery import Recovery
from kendall.server.queue.sequence import SequenceState
from kendall.server.queue.service import Lease, Service


class QueueView:
    """The queue, what is in service, and what is being written; reading changes nothing."""

    policy: Policy
    policy_batch_size: int | None  # the largest batch that it asks for
    lease: Lease
    recovery: Recovery
    closing = False
    _queue: WaitingQueue
    _service: Service
    _ledger: Ledger

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine that serves, or served last."""
        return self._service.capabilities

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
        own, bound = self.policy_batch_size, self._service.capabilities.max_num_seqs
        return bound if own is None else min(own, bound)

    @property
    def in_service(self) -> int:
        """Requests dispatched whose own end has not come (or whose padded batch runs on)."""
        return self._service.size

    @property
    def unanswered(self) -> int:
        """Requests without an outcome."""
        return len(self._ledger.unsettled)

    @property
    def unrecorded(self) -> int:
        """Requests that have arrived and whose record has not been handed out."""
        return self._ledger.unrecorded

    @property
    def moved_at(self) -> float:
        """Instant of the last arrival, outcome or pause."""
        return self._ledger.moved_at

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is served, and nothing else has the engine."""
        busy = self.lease.blocks or self.unanswered or self.in_service
        return not (busy or self.recovery.tries)

    def unanswered_sequences(self) -> Iterable[SequenceState]:
        """Those without an outcome: waiting, in service, or being written."""
        return self._ledger.unsettled.values()

    @property
    def servers(self) -> int:
        """How many take work."""
        return sum(slot.up for slot in self._service.slots)

    @property
    def servers_in_use(self) -> frozenset[int]:
        """Those that take work."""
        return frozenset(slot.id for slot in self._service.slots if slot.up)

    @property
    def resting(self) -> bool:
        """Whether what is in service waits for an engine, or that for a proof."""
        return self.recovery.down or self.recovery.trials.proving

    def running(self) -> list[list[Running]]:
        """What each server has in service."""
        return [list(slot.running.values()) for slot in self._service.slots]

    def in_service_sequences(self) -> list[list[SequenceState]]:
        """The same with how far each is; without those whose client is gone."""
        unsettled = self._ledger.unsettled
        return [
            [unsettled[name] for name in slot.running if name in unsettled]
            for slot in self._service.slots
        ]

    async def drained(self) -> bool:
        """Return once nothing is unanswered, or the queue was opened again: False then."""
        while self.unanswered and self.closing:
            await self._ledger.change()
        return self.closing

    async def answered(self) -> None:
        """Return once nothing is unanswered."""
        while self.unanswered:
            await self._ledger.change()

    async def served(self) -> None:
        """Return once nothing is in service, and no trial or proof has the engine."""
        while self.in_service or self.recovery.tries:
            await self._ledger.change()
