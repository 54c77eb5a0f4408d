"""The servers of an engine, each with what runs on it; and the engine's lease: who may use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kendall.policies import Policy, Running
from kendall.policies.core import UNBOUNDED


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
