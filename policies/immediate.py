"""Policies that never wait for a batch to form: they dispatch as soon as a server is empty (or a
slot is free) and a request waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core import IDLE, Decision, Dispatch, QueueState, Release, Server, first_ids


def _take(state: QueueState, size: int | None) -> Decision:
    server = state.empty_server()
    if server is None or not state.waiting:
        return IDLE
    return Dispatch(
        first_ids(state, len(state.waiting) if size is None else size, server), server.id
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One request at a time."""

    order: str = "fcfs"
    max_batch_size: ClassVar[int] = 1
    name: ClassVar[str] = "single"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch the oldest request once the server is empty."""
        return _take(state, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """All waiting requests, as one padded batch, once the server is empty."""

    order: str = "fcfs"
    name: ClassVar[str] = "dynamic"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch everything up to the engine's bound."""
        return _take(state, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """As dynamic, at most `max_batch_size` together."""

    max_batch_size: int
    order: str = "fcfs"
    name: ClassVar[str] = "capped"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch min(waiting, max_batch_size)."""
        return _take(state, self.max_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """As dynamic or capped, but not padded: each member leaves when it is complete; the server is
    free after the last.
    """

    max_batch_size: int | None = None
    order: str = "fcfs"
    name: ClassVar[str] = "elastic"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch min(waiting, max_batch_size)."""
        return _take(state, self.max_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuous:
    """A request starts as soon as a slot is free; at most `max_batch_size` in service per
    server.
    """

    max_batch_size: int | None = None
    order: str = "fcfs"
    name: ClassVar[str] = "continuous"
    padded: ClassVar[bool] = False
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        """Fill the free slots of the server with the most free slots, among those with memory for
        the oldest request.
        """
        if not state.waiting:
            return IDLE
        for server in sorted(state.servers, key=self._free_slots, reverse=True):
            ids = first_ids(state, self._free_slots(server), server)
            if ids:
                return Dispatch(ids, server.id)
        return IDLE

    def _free_slots(self, server: Server) -> int:
        bound = (
            server.max_batch_size
            if self.max_batch_size is None
            else min(self.max_batch_size, server.max_batch_size)
        )
        return max(
            bound - len(server.in_service), 0
        )  # more than the bound may be in service after the bound was lowered
