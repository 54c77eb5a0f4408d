"""What the gateway asks of the engine in an actor, what that says to the gateway, and the list in
which it waits to be fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from kendall.server.engines.base import EngineEnd, EngineRequest, FailureCode, Token, TokenStream


class DispatchOrder(msgspec.Struct, frozen=True):
    """See `Engine.dispatch`."""

    requests: Sequence[EngineRequest]
    padded: bool
    joining: bool


class CancelOrder(msgspec.Struct, frozen=True):
    """See `Engine.cancel`."""

    request_ids: Sequence[str]


Order: TypeAlias = DispatchOrder | CancelOrder


class Tokens(msgspec.Struct, frozen=True):
    """More of one answer; what belongs to its prompt comes with the first."""

    request_id: str
    tokens: Sequence[Token]
    prompt_logprobs: Sequence[Any] | None = None
    cached_tokens: int = 0


class End(msgspec.Struct, frozen=True):
    """The engine has let the sequence go."""

    request_id: str
    end: EngineEnd


class SequenceFailure(msgspec.Struct, frozen=True):
    """The engine failed over one sequence."""

    request_id: str
    message: str
    code: FailureCode


class StepEnd(msgspec.Struct, frozen=True):
    """A `Step`, but for its instant: the actor's clock may be another machine's."""

    running: int
    admitted: int
    prompt_tokens: int


class Death(msgspec.Struct, frozen=True):
    """The engine was lost; the actor is still there."""

    reason: str


Message: TypeAlias = Tokens | End | SequenceFailure | StepEnd | Death


class Inbox:
    """Orders by their numbers: each waits for those before it."""

    def __init__(self) -> None:
        self._early: dict[int, Order] = {}
        self._next = 0

    def put(self, number: int, order: Order) -> Iterator[Order]:
        """Orders whose turn it is now."""
        self._early[number] = order
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1


class Outbox:
    """Messages in order; whoever fetches them gets all that there are at once."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._some = asyncio.Event()

    def put(self, message: Message) -> None:
        """One more."""
        self._messages.append(message)
        self._some.set()

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Batches of messages, without an end."""
        while True:
            await self._some.wait()
            self._some.clear()
            fetched, self._messages = self._messages, []
            yield fetched


class Relay:
    """The listener of a sequence in the actor."""

    __slots__ = ("_outbox", "_stream")

    def __init__(self, stream: TokenStream, outbox: Outbox) -> None:
        self._stream, self._outbox = stream, outbox

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """See `TokenListener`."""
        prompt, self._stream.prompt_logprobs = self._stream.prompt_logprobs, None
        self._outbox.put(
            Tokens(self._stream.request_id, list(tokens), prompt, self._stream.cached_tokens)
        )

    def on_end(self, end: EngineEnd) -> None:
        """See `TokenListener`."""
        self._outbox.put(End(self._stream.request_id, end))

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """See `TokenListener`."""
        self._outbox.put(SequenceFailure(self._stream.request_id, message, code))
