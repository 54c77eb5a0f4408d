"""A policy's input and its decision: plain values, no clock, no I/O, no randomness.

A driver (the live batcher, the simulator) shows a policy the queue as a `QueueState` and carries
out the `Decision` it gets back. Nothing here is modified by a policy, nothing waits, nothing is
logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

Release = Literal["batch", "request"]
UNBOUNDED = 2**62


class Request(NamedTuple):  # a frozen dataclass takes four times as long to make
    """One sequence to generate, or the sequences of one call that is served whole, as policies see
    it: never its true output length.
    """

    id: str
    arrived_at: float  # instant on the driver's clock, seconds
    prompt_tokens: int
    # the limit in force: the client's own, the gateway's clip and the context, whichever is least
    max_output_tokens: int
    predicted_output_tokens: float | None = None
    priority: int = 0
    deadline: float = math.inf  # instant at which its patience runs out
    flow: str = ""  # whom its service counts to: an API key's name, or a fairness id
    sequences: int = 1  # that it counts for in a batch: more than one of a call that is never split
    # of an answer, for which memory is kept free; what it needs beyond is the engine's affair
    reserved_tokens: int = UNBOUNDED

    @property
    def context_tokens(self) -> int:
        """Memory that is kept free for it: at most what it holds at its end."""
        limit, reserved = self.max_output_tokens, self.reserved_tokens
        return self.prompt_tokens + self.sequences * (limit if limit < reserved else reserved)


class Waiting(NamedTuple):
    """A request in the queue; `output_tokens_so_far` > 0 after a preemption or an engine's
    death.
    """

    request: Request
    output_tokens_so_far: int = 0


@dataclass(slots=True)
class Running:
    """A request in service. A read-only view for policies; its driver keeps the token count
    current.
    """

    request: Request
    started_at: float
    output_tokens_so_far: int = 0
    preemptible: bool = True  # its answer can be continued exactly behind what was made
    preemptions: int = 0  # times that it was put back into the queue


@dataclass(slots=True)  # frozen ones take five times as long to make, for each decision
class Server:
    """One engine: its sequences in service and the limits on its next batch."""

    id: int
    in_service: Sequence[Running] = ()
    max_batch_size: int = 2**31
    max_prompt_tokens: int = 2**31  # sum over the batch: all prompts are computed in one step
    # sum over the batch of prompt + limit, or what is reserved: what the KV memory holds
    max_context_tokens: int = UNBOUNDED
    # sequences in service and the tokens that they may come to hold, where the driver keeps count
    counted: tuple[int, int] | None = None

    @property
    def sequences(self) -> int:
        """In service."""
        return sequences_of(self.in_service) if self.counted is None else self.counted[0]

    @property
    def context_tokens(self) -> int:
        """That those in service may come to hold: prompts and limits, or what is reserved."""
        if self.counted is not None:
            return self.counted[1]
        return sum([each.request.context_tokens for each in self.in_service])


@dataclass(slots=True)
class QueueState:
    """The queue at one instant, oldest first; read-only and valid only during the call."""

    waiting: Sequence[Waiting]
    servers: Sequence[Server]
    estimates: dict[str, float] = field(default_factory=dict)
    closing: bool = False  # nothing more will arrive: a drain, or the end of a trace
    # weighted tokens of each flow's service so far, under an order that counts them
    virtual_tokens: Mapping[str, float] = field(default_factory=dict)
    # by request and server, under route=prefix: blocks of the prompt's prefix that it has served
    prefix_matches: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def empty_server(self) -> Server | None:
        """The first server with nothing in service."""
        return next((server for server in self.servers if not server.in_service), None)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start these waiting requests together on that server, now."""

    request_ids: tuple[str, ...]
    server_id: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take these requests out of service and put them back into the queue with what they have so
    far. They must be in service and `preemptible`.
    """

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to do now; ask again at `deadline` (an instant; infinity: at the next event)."""

    deadline: float


Decision = Dispatch | Preempt | WaitUntil
IDLE = WaitUntil(math.inf)


class Policy(Protocol):
    """A frozen dataclass of parameters that decides which waiting requests start next.

    A subclass has these values unless it sets its own. `max_batch_size`, a field or an attribute,
    is the largest batch that it asks for, where it has one.
    """

    name: ClassVar[str]
    # the engine decodes every member until the batch's last has ended
    padded: ClassVar[bool] = False
    # answers leave together when the batch is over, or each on its own
    release: ClassVar[Release] = "request"
    wants_steps: ClassVar[bool] = False  # asked after every engine step too
    # a request may start on a server that already holds others
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """The next thing to do. Does not modify `state`, does not wait; the same input gives the
        same answer.
        """
        ...


def sequences_of(requests: Sequence[Waiting] | Sequence[Running]) -> int:
    """How many these count for in a batch."""
    return sum([each.request.sequences for each in requests])


def first_ids(state: QueueState, size: int, server: Server) -> tuple[str, ...]:
    """The first waiting requests, `size` sequences at most, fewer where their tokens would exceed
    the server's bounds.

    An empty server always gets the oldest: admission rejects requests that cannot run even alone,
    and a call of more sequences than `size` runs alone.
    """
    return fitting_ids(state.waiting, size, server)


def fitting_ids(ordered: Sequence[Waiting], size: int, server: Server) -> tuple[str, ...]:
    """As `first_ids`, of waiting requests in an order of the policy's own.

    Where others are in service, what they may yet hold counts, and there may be room for none.
    """
    if size <= 0:
        return ()
    ids: list[str] = []
    bound = server.max_batch_size
    most = size if size < bound else bound
    sequences = prompt_tokens = 0
    context_tokens = 0
    if server.max_context_tokens < UNBOUNDED:  # not free: 50 us with 256 that nobody counted
        context_tokens = server.context_tokens
    for waiting in ordered[:most]:
        sequences += waiting.request.sequences
        prompt_tokens += waiting.request.prompt_tokens + waiting.output_tokens_so_far
        context_tokens += waiting.request.context_tokens
        if ids and prompt_tokens > server.max_prompt_tokens:
            break
        if (ids or server.in_service) and (
            sequences > most or context_tokens > server.max_context_tokens
        ):
            break
        ids.append(waiting.request.id)
    return tuple(ids)
