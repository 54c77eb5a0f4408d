"""What runs in the actor: an engine, its orders, and messages of what it does. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kendall.server.engines.base import Capabilities, Engine, Sampling, Step
from kendall.server.engines.ray.messages import (
    CancelOrder,
    Death,
    DispatchOrder,
    Inbox,
    Message,
    Order,
    Outbox,
    Relay,
    SequenceFailure,
    StepEnd,
)


class EngineActor:
    """`make()` makes the engine, here."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._engine = make()
        self._outbox: Outbox | None = None
        self._inbox = Inbox()

    async def start(self) -> Capabilities:
        """See `Engine`."""
        outbox = self._outbox = Outbox()

        def on_step(step: Step) -> None:
            outbox.put(StepEnd(step.running, step.admitted, step.prompt_tokens))

        self._engine.on_step = on_step
        self._engine.on_death = lambda reason: outbox.put(Death(reason))
        return await self._engine.start()

    async def stop(self) -> None:
        """See `Engine`."""
        await self._engine.stop()

    async def healthy(self) -> bool:
        """See `Engine`."""
        return await self._engine.healthy()

    async def process_id(self) -> int:
        """The actor's process."""
        return os.getpid()

    async def messages(self) -> AsyncIterator[list[Message]]:
        """All from here on, as they come."""
        assert self._outbox is not None
        async for batch in self._outbox.batches():
            yield batch

    async def take(self, number: int, order: Order) -> None:
        """Serve or cancel requests; their tokens and ends are sent as messages."""
        for each in self._inbox.put(number, order):
            if isinstance(each, CancelOrder):
                self._engine.cancel(each.request_ids)
            else:
                self._dispatch(each)

    def _dispatch(self, order: DispatchOrder) -> None:
        assert self._outbox is not None
        try:
            streams = self._engine.dispatch(
                0, order.requests, padded=order.padded, joining=order.joining
            )
        except Exception as error:  # noqa: BLE001 - whatever the engine raises
            said = f"the engine failed while starting the request: {error}"
            for each in order.requests:
                self._outbox.put(SequenceFailure(each.request.id, said, "engine_error"))
            return
        for stream in streams:
            stream.listener = Relay(stream, self._outbox)

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """See `Engine`."""
        return await self._engine.encode(text, special_tokens=special_tokens)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """See `Engine`."""
        return await self._engine.encode_chat(messages, template_arguments)

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """See `Engine`."""
        return await self._engine.check_sampling(sampling)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See `Engine`."""
        return self._engine.decode(token_ids)


def vllm_engine(
    model: str, engine_args: Mapping[str, Any], form_time: float, engines: int = 1
) -> Engine:
    """On the machine of the actor, which makes `tiny` and `smollm2` itself; `engines`: how many may
    be there.
    """
    from kendall.server.engines.hugging_face import folder_of  # noqa: PLC0415
    from kendall.server.engines.vllm.engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(
        folder_of(model), engine_args=engine_args, form_time=form_time, engines=engines
    )
