"""Which serving objects are in force: they keep the renderer of one engine, which ends with it, and
are built anew for the next one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from kendall.server.engines.base import EngineStartError, ServingEngine
from kendall.server.openai_tools.apart import PLACES
from kendall.server.openai_tools.call import OpenAIServing
from kendall.server.runtime.turns import Turns
from kendall.server.settings import Settings

Build = Callable[[Any], Awaitable[OpenAIServing]]


class ServingObjects:
    """The serving objects of one gateway."""

    def __init__(
        self, engine: ServingEngine, settings: Settings, build: Build | None = None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._build = build or self._vllm
        self._turn = asyncio.Lock()
        self.large_calls = Turns(PLACES)  # that are rendered in threads
        self._client: weakref.ref[Any] | None = None  # of which engine they are
        self._serving: OpenAIServing | None = None
        # a reasoning parser looks at every chat
        self.every_chat = settings.reasoning_parser is not None
        self.takes_parts = False  # other than text

    async def open(self) -> None:
        """Build the first ones. Raises EngineStartError where the options are wrong."""
        try:
            await self.serving()
        except KeyError as error:
            raise EngineStartError(
                f"got --tool-call-parser {self._settings.tool_call_parser} and --reasoning-parser "
                f"{self._settings.reasoning_parser}; expected parsers of this vLLM: {error}"
            ) from error

    async def serving(self) -> OpenAIServing:
        """The objects for the engine that serves now. Raises RuntimeError between two engines."""
        client = self._engine.client()
        async with self._turn:
            if self._serving is None or self._client is None or self._client() is not client:
                self._serving = await self._build(client)
                self._client = weakref.ref(client)
        return self._serving

    def close(self) -> None:
        """Let them go: they hold parts of the engine."""
        self._client = self._serving = None

    async def _vllm(self, client: Any) -> OpenAIServing:
        if "generate" not in await client.get_supported_tasks():
            raise EngineStartError(
                f"got model {self._settings.model}, which generates no text; expected one that does"
            )
        serving = await asyncio.to_thread(
            import_module, "kendall.server.openai_tools.serving"
        )  # it imports vLLM
        self.takes_parts = bool(client.model_config.is_multimodal_model)
        made: OpenAIServing = await serving.VllmServing.build(client, self._settings)
        return made


def serving_objects_of(engine: object, settings: Settings) -> ServingObjects | None:
    """None where the engine's library has no API server."""
    return ServingObjects(engine, settings) if isinstance(engine, ServingEngine) else None
