"""One call on its way through vLLM's serving objects: the sequences that it asks for, and the
events that it writes.

vLLM pulls: it asks for sequences (`ask`) and reads their outputs. It is run up to the first read
(`VllmCall.reach`), when every sequence is known: a large call in a thread, because checking and
rendering it may take seconds (`server.openai_tools.apart`). Then the gateway admits and queues
them, and pushes what the engine makes into their `Outlet`s. What vLLM writes gathers in `events`,
or in `whole`. Nothing is ever raised into vLLM's generators, which would log it and write an error
of their own: the gateway knows why a call ends, ends the task and says it in the endpoint's words.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Protocol

from kendall.server.engines.base import Token
from kendall.server.openai_tools.apart import HERE, Apart, Rest
from kendall.server.openai_tools.endpoints import ApiEndpoint
from kendall.server.runtime.errors import ApiError

CURRENT: ContextVar[VllmCall] = ContextVar("kendall.front_call")


class OpenAIServing(Protocol):
    """The serving objects of one life of the engine."""

    plain: Any  # sampling parameters that say nothing

    def request(self, endpoint: ApiEndpoint, body: Mapping[str, Any]) -> Any:
        """vLLM's model of the body. Raises ApiError."""

    async def create(self, endpoint: ApiEndpoint, request: Any) -> bytes | AsyncIterator[str]:
        """The whole answer, or its events. Raises ApiError, or whatever vLLM raises."""

    def output(self, asked: AskedSequence, parts: Sequence[SequencePart]) -> Any:
        """vLLM's form of them."""

    def refusal(self, error: Exception, *, early: bool) -> ApiError:
        """What a client is told of an exception; `early`: before any sequence was queued."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Part of a sequence that vLLM gets at once."""

    index: int
    text: str
    tokens: Sequence[Token]
    prompt_logprobs: Sequence[Any] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Outlet:
    """One sequence's tokens on their way to vLLM."""

    __slots__ = (
        "_on_change",
        "_prompt_logprobs",
        "_text",
        "_tokens",
        "changed",
        "finish_reason",
        "index",
        "stop_reason",
        "written",
    )

    def __init__(self, index: int, on_change: Callable[[], None]) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.changed = False
        self.written = False  # its last event
        self._text = ""
        self._tokens: list[Token] = []
        self._prompt_logprobs: Sequence[Any] | None = None
        self._on_change = on_change

    def add(
        self, text: str, tokens: Sequence[Token], prompt_logprobs: Sequence[Any] | None = None
    ) -> None:
        """More of the answer; what is known of the prompt, once."""
        self._text += text
        self._tokens += tokens
        self._prompt_logprobs = self._prompt_logprobs or prompt_logprobs
        self.changed = True
        self._on_change()

    def end(self, finish_reason: str, stop_reason: str | int | None) -> None:
        """It is whole, and may leave."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.changed = True
        self._on_change()

    def take(self) -> SequencePart:
        """Hand over its contents, and forget them."""
        part = SequencePart(
            self.index,
            self._text,
            self._tokens,
            self._prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
        )
        self._text, self._tokens, self._prompt_logprobs, self.changed = "", [], None, False
        return part


class AskedSequence:
    """What vLLM asks for at once: `n` sequences of one prompt, to be read as they come, or when all
    are whole.
    """

    def __init__(
        self, prompt: Mapping[str, Any], params: Any, request_id: str, arguments: Mapping[str, Any]
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.request_id = request_id
        self.arguments = arguments
        self.outlets = [Outlet(index, self._wake) for index in range(params.n)]
        self._streamed = params.output_kind.name == "DELTA"
        self._sleeping: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        sleeping, self._sleeping = self._sleeping, None
        if sleeping is not None and not sleeping.done():
            sleeping.set_result(None)

    @property
    def whole(self) -> bool:
        """Whether every sequence has ended."""
        return all(outlet.finish_reason is not None for outlet in self.outlets)

    async def parts(self) -> AsyncIterator[list[SequencePart]]:
        """Of one sequence each, or of all at the end. A sequence is written when its reader comes
        back for more.
        """
        over = False
        while not over:
            while not self._ready():
                self._sleeping = asyncio.get_running_loop().create_future()
                await self._sleeping
            over = self.whole
            changed = [outlet for outlet in self.outlets if outlet.changed]
            for outlets in [[outlet] for outlet in changed] if self._streamed else [changed]:
                parts = [outlet.take() for outlet in outlets]
                yield parts
                for outlet, part in zip(outlets, parts, strict=True):
                    outlet.written = part.finish_reason is not None

    def _ready(self) -> bool:
        changed = self._streamed and any(outlet.changed for outlet in self.outlets)
        return changed or self.whole


class VllmCall:
    """See above. `on_change` is called when there are events, or the task has ended."""

    def __init__(
        self, serving: OpenAIServing, endpoint: ApiEndpoint, body: Mapping[str, Any]
    ) -> None:
        self.asked: list[AskedSequence] = []
        self.events: list[bytes] = []
        self.whole: bytes | None = None
        self.error: ApiError | None = None
        self.over = False
        self.on_change: Callable[[], None] = _nothing
        self._serving = serving
        self._endpoint = endpoint
        self._body = body
        self._apart: Apart | None = None  # where it is run up to the first read
        self._reached = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def outlets(self) -> list[Outlet]:
        """The outlets of all sequences, in order."""
        return [outlet for asked in self.asked for outlet in asked.outlets]

    async def reach(self, apart: Apart | None = None) -> None:
        """Until vLLM has asked for every sequence. Raises ApiError where it refuses the call, and
        what `apart`, which runs it so far, raises.
        """
        context = copy_context()
        context.run(CURRENT.set, self)
        running: Coroutine[Any, Any, None] = self._run()
        if apart is not None:
            self._apart = apart
            rest = Rest(running)
            await apart.run(rest, context)
            self._apart = None
            running = rest.here()
            if self.over:
                self._reached.set()
        self._task = asyncio.get_running_loop().create_task(
            running, name="front-call", context=context
        )
        await self._reached.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """vLLM is asked for nothing more."""
        self.on_change = _nothing
        if self._task is not None:
            self._task.cancel()

    def ask(
        self, prompt: Mapping[str, Any], params: Any, request_id: str, arguments: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """See `EngineProxy.generate`."""
        asked = AskedSequence(prompt, params, request_id, arguments)
        self.asked.append(asked)
        return self._outputs(asked)

    async def _outputs(self, asked: AskedSequence) -> AsyncGenerator[Any, None]:
        if self._apart is not None:
            await HERE
        self._reached.set()
        async for parts in asked.parts():
            yield self._serving.output(asked, parts)

    async def _run(self) -> None:
        try:
            request = self._serving.request(self._endpoint, self._body)
            made = await self._serving.create(self._endpoint, request)
            if isinstance(made, bytes):
                self.whole = made
                return
            async for event in made:
                self.events.append(event.encode())
                self.on_change()
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises
            early = not self._reached.is_set()
            self.error = self._serving.refusal(error, early=early)
        finally:
            self.over = True
            if self._apart is None:
                self._reached.set()
            self.on_change()


def _nothing() -> None:
    """Nobody waits for it."""
