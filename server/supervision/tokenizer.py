"""Tokenizer and sampling checks of the engine, needed before a call queues: a restart in the middle
does not fail them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kendall.server.engines.base import Engine, Sampling
from kendall.server.supervision.supervisor import Supervisor

MOST_AT_ONCE = 4096  # tokens that become text on the event loop


class RestartSafeTokenizer:
    """A `PromptReader`: each call waits for a restart, and is made again where the engine was
    lost meanwhile (`Supervisor.across_restarts`).
    """

    def __init__(self, engine: Engine, supervisor: Supervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """See `Engine`."""
        encoding = partial(self._engine.encode, text, special_tokens=special_tokens)
        return await self._supervisor.across_restarts(encoding)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """See `Engine`."""
        encoding = partial(self._engine.encode_chat, messages, template_arguments)
        return await self._supervisor.across_restarts(encoding)

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """See `Engine`."""
        return await self._supervisor.across_restarts(
            partial(self._engine.check_sampling, sampling)
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """See `Engine`; it needs the tokenizer, which goes with the engine."""

        async def decoded() -> str:
            if len(token_ids) <= MOST_AT_ONCE:
                return self._engine.decode(token_ids)
            return await asyncio.to_thread(self._engine.decode, token_ids)

        return await self._supervisor.across_restarts(decoded)
