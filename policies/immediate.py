"""Policies that never wait for a batch to form: they dispatch as soon as a server is empty (or a
slot is free) and a request waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

from kendall.policies.core import IDLE, Decision, Dispatch, QueueState, Release, Server
from kendall.policies.ordered import Ordered, preempted
from kendall.policies.routes import PREFIX, by_match, together, warmest


def _take(policy: Ordered, state: QueueState, size: int | None, now: float) -> Decision:
    server = state.empty_server()
    if server is None or not state.waiting:
        return IDLE
    size = server.max_batch_size if size is None else size
    ids = policy.ranking.first(state.waiting, size, server, now, state.virtual_tokens)
    if policy.route == PREFIX:
        server = warmest(state, ids, server)
    return Dispatch(ids, server.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Ordered):
    """One request at a time."""

    max_batch_size: ClassVar[int] = 1
    interrupts: ClassVar[bool] = True
    name: ClassVar[str] = "single"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch the first request once the server is empty, or interrupt the one in service for
        it.
        """
        decision = _take(self, state, 1, now)
        if decision is IDLE and state.waiting:
            return preempted(self, state, 1)
        return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic(Ordered):
    """All waiting requests, as one padded batch, once the server is empty."""

    name: ClassVar[str] = "dynamic"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch everything up to the engine's bound."""
        return _take(self, state, None, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped(Ordered):
    """As dynamic, at most `max_batch_size` together."""

    max_batch_size: int
    name: ClassVar[str] = "capped"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch min(waiting, max_batch_size)."""
        return _take(self, state, self.max_batch_size, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic(Ordered):
    """As dynamic or capped, but not padded: each member leaves when it is complete; the server is
    free after the last.
    """

    max_batch_size: int | None = None
    name: ClassVar[str] = "elastic"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch min(waiting, max_batch_size)."""
        return _take(self, state, self.max_batch_size, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuous(Ordered):
    """A request starts as soon as a slot is free; at most `max_batch_size` in service per
    server.
    """

    max_batch_size: int | None = None
    interrupts: ClassVar[bool] = True
    name: ClassVar[str] = "continuous"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        """Fill the free slots of the server with the most free slots, among those with memory for
        the first request; where there is none, interrupt others for it. With route=prefix a server
        that has served the prefix of its prompt goes before.
        """
        if not state.waiting:
            return IDLE
        free = [(self._free_slots(server), server) for server in state.servers]
        if len(free) > 1:
            free.sort(key=itemgetter(0), reverse=True)
        for slots, server in free:
            ids = self.ranking.first(state.waiting, slots, server, now, state.virtual_tokens)
            if ids and self.route == PREFIX:
                return self._to_prefix(state, Dispatch(ids, server.id), now)
            if ids:
                return Dispatch(ids, server.id)
        return preempted(self, state, self.max_batch_size)

    def _to_prefix(self, state: QueueState, usual: Dispatch, now: float) -> Dispatch:
        """The same first request, to the server that has served the longest prefix of its prompt;
        with those behind it that prefer no other one.
        """
        first, taken = usual.request_ids[0], usual
        free = [server for server in state.servers if self._free_slots(server)]
        free.sort(key=self._free_slots, reverse=True)
        for server in by_match(state, first, free):
            slots = self._free_slots(server)
            ids = self.ranking.first(state.waiting, slots, server, now, state.virtual_tokens)
            if ids and ids[0] == first:
                taken = Dispatch(ids, server.id)
                break
        chosen = next(server for server in free if server.id == taken.server_id)
        return Dispatch(together(state, taken.request_ids, chosen, free), chosen.id)

    def _free_slots(self, server: Server) -> int:
        own, bound = self.max_batch_size, server.max_batch_size
        free = (bound if own is None or own > bound else own) - server.sequences
        # more than the bound may be in service after the bound was lowered
        return free if free > 0 else 0
