"""An engine in an actor of Ray behind the `Engine` protocol: one actor, made anew at every start.

What the engine does comes back as messages, all that there are at once. An actor that dies ends
their stream; one that is silent (its machine may be gone) is lost after `hang_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kendall.server.engines.base import (
    NOT_RUNNING,
    Capabilities,
    Engine,
    EngineRequest,
    EngineStartError,
    Sampling,
    Step,
    TokenStream,
    stillborn,
)
from kendall.server.engines.ray.actor import EngineActor
from kendall.server.engines.ray.cluster import join, lacking, leave
from kendall.server.engines.ray.messages import (
    CancelOrder,
    Death,
    DispatchOrder,
    End,
    Message,
    Order,
    SequenceFailure,
    StepEnd,
    Tokens,
)
from kendall.server.engines.vllm.reader import first_line

log = logging.getLogger("kendall.engine")
HANG_TIMEOUT = 15.0  # seconds without an answer to a ping
PING_EVERY = 2.0  # seconds
ANSWER = 30.0  # seconds for a question about a prompt
DECODE = 5.0  # seconds that the event loop may be held up by one, which takes a millisecond
STOP = 10.0  # seconds for the engine's own end; then the actor is killed
T = TypeVar("T")


class Answers:
    """The answers that an actor makes, by the ids of their requests. `cancel` lets go of requests
    whose listeners fail.
    """

    def __init__(self, cancel: Callable[[Sequence[str]], None]) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._cancel = cancel

    def expect(self, streams: Sequence[TokenStream]) -> None:
        """These were dispatched."""
        self._streams |= {stream.request_id: stream for stream in streams}

    def forget(self, request_ids: Sequence[str]) -> list[str]:
        """Hear no more of these; returns those that were known."""
        return [each for each in request_ids if self._streams.pop(each, None) is not None]

    def fail(self, reason: str) -> None:
        """All of them."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)

    def hear(self, message: Tokens | End | SequenceFailure) -> None:
        """Pass a message on; one of a sequence that was cancelled meanwhile is dropped."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if isinstance(message, Tokens):
            self._hand_over(stream, message)
            return
        del self._streams[message.request_id]
        if isinstance(message, End):
            stream.end(message.end)
        else:
            stream.fail(message.message, message.code)

    def _hand_over(self, stream: TokenStream, message: Tokens) -> None:
        """A listener's fault stays its own."""
        if message.prompt_logprobs is not None:
            stream.prompt_logprobs = message.prompt_logprobs
        stream.cached_tokens = message.cached_tokens
        try:
            stream.push(message.tokens)
        except Exception as error:  # noqa: BLE001
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a token listener failed", "exception": error}
            )
            self._cancel([message.request_id])
            said = f"internal error while handling a token: {first_line(error)}"
            stream.fail(said, "internal_error")


class Handed(msgspec.Struct, frozen=True):
    """Headers of a trace, made before the request left this process."""

    headers: Mapping[str, str]

    def handed_on(self, request_id: str) -> Mapping[str, str]:
        """See `Traced`."""
        del request_id
        return self.headers


class RayEngine:
    """`make()` makes the engine in the actor, which takes `needs` (CPU, GPU, or a resource of the
    cluster's own) on one machine; `address` of a cluster, or None for a Ray of its own.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        needs: Mapping[str, float] | None = None,
        address: str | None = None,
        hang_timeout: float = HANG_TIMEOUT,
    ) -> None:
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self._make, self._needs, self._address = make, dict(needs or {}), address
        self._hang_timeout = hang_timeout
        self.process_id: int | None = None  # of the actor, on its machine
        self._actor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._answers = Answers(self.cancel)
        self._orders = 0  # that the actor was given

    # life

    async def start(self) -> Capabilities:
        """See `Engine`."""
        await self._let_go()
        await join(self, self._address)
        if (lack := lacking(self._needs)) is not None:
            raise EngineStartError(
                f"the engine needs {lack}; expected --engine-arg num_cpus, num_gpus or resources "
                "that one of its machines has"
            )
        try:
            capabilities = await self._come_up()
        except BaseException:
            await self._let_go()
            raise
        self._tasks = [
            asyncio.create_task(self._listen(self._actor), name="ray-messages"),
            asyncio.create_task(self._watch(self._actor), name="ray-watch"),
        ]
        return capabilities

    async def _come_up(self) -> Capabilities:
        """The limit is that of whoever starts it."""
        import ray  # noqa: PLC0415

        self._actor, self._orders = _actor_of(self._needs).remote(self._make), 0
        if self._needs:
            wants = ", ".join(f"{number:g} {name}" for name, number in self._needs.items())
            log.info("the engine's actor takes %s on one machine, once they are free", wants)
        try:
            capabilities: Capabilities = await _told(self._actor.start.remote())
            self.process_id = await _told(self._actor.process_id.remote())
        except ray.exceptions.RayError as error:
            raise EngineStartError(f"the actor did not start: {first_line(error)}") from error
        versions = {**capabilities.versions, "ray": ray.__version__}
        return dataclasses.replace(capabilities, versions=versions)

    async def stop(self) -> None:
        """See `Engine`. The last engine of this process ends Ray too."""
        await self._let_go()
        with contextlib.suppress(TimeoutError):
            await leave(self)

    async def _let_go(self) -> None:
        actor, self._actor = self._actor, None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._answers.fail("the engine was stopped")
        if actor is None:
            return
        try:
            async with asyncio.timeout(STOP):
                await _told(actor.stop.remote())
        except Exception as error:  # noqa: BLE001 - it may be gone already
            log.debug("the engine in the actor did not stop by itself: %s", first_line(error))
        finally:
            _kill(actor)

    async def healthy(self) -> bool:
        """See `Engine`."""
        actor = self._actor
        if actor is None:
            return False
        try:
            async with asyncio.timeout(self._hang_timeout):
                return bool(await _told(actor.healthy.remote()))
        except Exception:  # noqa: BLE001 - whatever it is, it did not answer
            return False

    async def _listen(self, actor: Any) -> None:
        try:
            async for batch in actor.messages.remote():
                for message in await batch:
                    self._hear(message)
        except Exception as error:  # noqa: BLE001 - Ray's, of an actor that died in any way
            self._lost(actor, f"the actor ended: {first_line(error)}")
        else:
            self._lost(actor, "the actor sends no more messages")

    async def _watch(self, actor: Any) -> None:
        """Whether it answers; that its engine is well, the engine itself sees to."""
        while True:
            await asyncio.sleep(PING_EVERY)
            try:
                async with asyncio.timeout(self._hang_timeout):
                    await _told(actor.healthy.remote())
            except TimeoutError:
                self._lost(actor, f"the actor did not answer within {self._hang_timeout:g} s")
            except Exception as error:  # noqa: BLE001 - Ray's, of an actor that died in any way
                self._lost(actor, f"the actor ended: {first_line(error)}")

    def _lost(self, actor: Any, reason: str) -> None:
        """Say so, once, then fail every stream that still has a listener."""
        if actor is not self._actor:
            return
        self._actor = None
        _kill(actor)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self.on_death is not None:
            self.on_death(reason)
        self._answers.fail(reason)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Death):
            self._lost(self._actor, message.reason)
        elif not isinstance(message, StepEnd):
            self._answers.hear(message)
        elif self.on_step is not None:
            at = asyncio.get_running_loop().time()
            self.on_step(Step(at, message.running, message.admitted, message.prompt_tokens))

    # prompts

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """See `Engine`."""
        return await self._answer(lambda actor: actor.encode.remote(text, special_tokens))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """See `Engine`."""
        return await self._answer(
            lambda actor: actor.encode_chat.remote(messages, template_arguments)
        )

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """See `Engine`."""
        return await self._answer(lambda actor: actor.check_sampling.remote(sampling))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Engine`. Waits for the actor."""
        import ray  # noqa: PLC0415

        ids = list(token_ids)
        return str(ray.get(self._running().decode.remote(ids), timeout=DECODE))

    async def _answer(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        actor = self._running()
        try:
            async with asyncio.timeout(ANSWER):
                return await _told(ask(actor))
        except TimeoutError:
            raise RuntimeError(f"the engine did not answer within {ANSWER:g} s") from None

    def _running(self) -> Any:
        if self._actor is None:
            raise RuntimeError(NOT_RUNNING)
        return self._actor

    # sequences

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        """See `Engine`."""
        del server_id  # there is one
        if self._actor is None:
            return [stillborn(engine_request) for engine_request in requests]
        streams = [TokenStream(each.request.id) for each in requests]
        self._answers.expect(streams)
        self._order(DispatchOrder(list(map(as_it_travels, requests)), padded, joining))
        return streams

    def cancel(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        known = self._answers.forget(request_ids)
        if known and self._actor is not None:
            self._order(CancelOrder(known))

    def _order(self, order: Order) -> None:
        """Numbered: actors take calls in any order."""
        self._actor.take.remote(self._orders, order)
        self._orders += 1


def as_it_travels(engine_request: EngineRequest) -> EngineRequest:
    """For the actor: a trace is of this process, and only the headers that name it go along."""
    if engine_request.trace is None:
        return engine_request
    headers = dict(engine_request.trace.handed_on(engine_request.request.id))
    return msgspec.structs.replace(engine_request, trace=Handed(headers))


def _actor_of(needs: Mapping[str, float]) -> Any:
    """The class, with its place in the cluster."""
    import ray  # noqa: PLC0415

    own = {name: number for name, number in needs.items() if name not in ("CPU", "GPU")}
    return ray.remote(EngineActor).options(
        num_cpus=needs.get("CPU", 0),
        num_gpus=needs.get("GPU", 0),
        resources=own or None,
        max_restarts=0,
    )


async def _told(answer: Awaitable[T]) -> T:
    """Await the actor's answer. Raises what it raised there."""
    import ray  # noqa: PLC0415

    try:
        return await answer
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def _kill(actor: Any) -> None:
    import ray  # noqa: PLC0415

    with contextlib.suppress(Exception):  # Ray itself may be gone
        ray.kill(actor)
