"""Policies that break one contract each, and two that keep them all."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kendall.policies import (
    Decision,
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Server,
    WaitUntil,
    fitting_ids,
)
from kendall.policies.core import IDLE, UNBOUNDED


@dataclass(frozen=True, kw_only=True)
class Shortest(Policy):
    """The requests with the lowest limits first; keeps the contracts."""

    max_batch_size: int = 4
    name: ClassVar[str] = "shortest"

    def decide(self, state: QueueState, now: float) -> Decision:
        """As capped, in another order."""
        server = state.empty_server()
        if server is None or not state.waiting:
            return IDLE
        ordered = sorted(state.waiting, key=lambda waiting: waiting.request.max_output_tokens)
        return Dispatch(fitting_ids(ordered, self.max_batch_size, server), server.id)


@dataclass(frozen=True, kw_only=True)
class Broken(Policy):
    """Dispatches the first request; subclasses break something of it."""

    name: ClassVar[str] = "broken"

    def decide(self, state: QueueState, now: float) -> Decision:
        """The first request alone."""
        server = state.empty_server()
        if server is None or not state.waiting:
            return IDLE
        return self.start(state, server)

    def start(self, state: QueueState, server: Server) -> Decision:
        """What there is to break."""
        return Dispatch((state.waiting[0].request.id,), server.id)


class Raises(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        raise KeyError("oops")


class Exits(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        raise SystemExit("good\nbye")


class Garbage(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return "dispatch everything"  # type: ignore[return-value]


class Stranger(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return Dispatch(("nobody",), server.id)


class Twice(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return Dispatch((state.waiting[0].request.id,) * 2, server.id)


class Empty(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return Dispatch((), server.id)


class Elsewhere(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return Dispatch((state.waiting[0].request.id,), 4711)


class Busy(Broken):
    def decide(self, state: QueueState, now: float) -> Decision:
        if not state.waiting or not state.servers:
            return IDLE
        return Dispatch((state.waiting[0].request.id,), state.servers[0].id)


@dataclass(frozen=True, kw_only=True)
class Greedy(Broken):
    max_batch_size: int = 2

    def start(self, state: QueueState, server: Server) -> Decision:
        ids = fitting_ids(state.waiting, len(state.waiting), server)
        return Dispatch(ids, server.id)


class Boundless(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        waiting = state.waiting[: server.max_batch_size]
        return Dispatch(tuple(each.request.id for each in waiting), server.id)


class Overfull(Broken):
    """Keeps the bound on prompts, not that on what the memory holds."""

    def start(self, state: QueueState, server: Server) -> Decision:
        loose = dataclasses.replace(server, max_context_tokens=UNBOUNDED)
        return Dispatch(fitting_ids(state.waiting, len(state.waiting), loose), server.id)


class Nobody(Broken):
    """Preempts none of those in service."""

    def decide(self, state: QueueState, now: float) -> Decision:
        if any(server.in_service for server in state.servers):
            return Preempt(())
        return super().decide(state, now)


class Evicts(Broken):
    """Takes one after the other out of service, then waits."""

    def decide(self, state: QueueState, now: float) -> Decision:
        for server in state.servers:
            if server.in_service:
                return Preempt((server.in_service[0].request.id,))
        return IDLE


class Ruthless(Broken):
    def decide(self, state: QueueState, now: float) -> Decision:
        for server in state.servers:
            if server.in_service:
                return Preempt((server.in_service[0].request.id,))
        return super().decide(state, now)


class Late(Broken):
    def decide(self, state: QueueState, now: float) -> Decision:
        return WaitUntil(now)


class Never(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return WaitUntil(math.inf)


class Restless(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        return WaitUntil(math.inf) if state.closing else super().start(state, server)


@dataclass(frozen=True, kw_only=True)
class Moody(Broken):
    asked: list[int] = field(default_factory=list, compare=False)

    def start(self, state: QueueState, server: Server) -> Decision:
        self.asked.append(1)
        if len(self.asked) % 2:
            return WaitUntil(1e9)
        return super().start(state, server)


class Meddler(Broken):
    def start(self, state: QueueState, server: Server) -> Decision:
        waiting: Any = state.waiting
        decision = super().start(state, server)
        waiting.reverse()
        return decision


class Swap(Broken):
    """Preempts and dispatches the same for ever."""

    joins_running: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        for server in state.servers:
            if server.in_service and all(each.preemptible for each in server.in_service):
                return Preempt((server.in_service[0].request.id,))
        return super().decide(state, now)


@dataclass(frozen=True, kw_only=True)
class Unreadable(Broken):
    words: str = "a"


# the contract that each breaks first
BREAKS: dict[type[Policy], str] = {
    Exits: "the decision is a Dispatch, a Preempt or a WaitUntil",
    Raises: "the decision is a Dispatch, a Preempt or a WaitUntil",
    Garbage: "the decision is a Dispatch, a Preempt or a WaitUntil",
    Stranger: "a batch has waiting requests, each once",
    Twice: "a batch has waiting requests, each once",
    Empty: "a batch has waiting requests, each once",
    Elsewhere: "a batch starts on a server that can take it",
    Busy: "a batch starts on a server that can take it",
    Greedy: "a batch is no larger than the policy and the engine allow",
    Boundless: "a batch keeps within the token bounds of its server",
    Overfull: "a batch keeps within the token bounds of its server",
    Nobody: "only preemptible requests in service are preempted",
    Ruthless: "only preemptible requests in service are preempted",
    Late: "a wait ends later than now",
    Moody: "the same state gives the same decision",
    Meddler: "deciding changes nothing in the state",
    Swap: "after its dispatches a policy waits",
    Never: "nothing waits for ever",
    Restless: "nothing waits for ever",
}
