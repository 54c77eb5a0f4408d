"""What vLLM's serving objects take for the engine: they ask it for eight names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from kendall.server.openai_tools.call import CURRENT
from kendall.server.runtime.errors import ApiError


class EngineProxy:
    """Registered as vLLM's `EngineClient`. It keeps the renderer of one life of the engine, not the
    engine: what is generated passes through the gateway's queue.
    """

    errored = False  # else vLLM answers before the gateway does
    is_running = True
    is_stopped = False

    def __init__(self, client: Any, dead_error: type[Exception]) -> None:
        self.renderer = client.renderer
        self.model_config = client.model_config
        self.input_processor = client.input_processor
        self.vllm_config = client.vllm_config
        self._dead_error = dead_error

    @property
    def dead_error(self) -> Exception:
        """The error that a lost engine would raise."""
        return self._dead_error()

    def check_admission(self, *_: Any, **__: Any) -> None:
        """The gateway admits, once it knows every sequence of the call."""

    async def is_tracing_enabled(self) -> bool:
        """Asked by vLLM to 0.30."""
        return False

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **arguments: Any
    ) -> AsyncGenerator[Any, None]:
        """The outputs of what the call in the context asks for here; it is queued when vLLM begins
        to read them. No coroutine: all prompts of a call are known before the first is read.
        """
        return CURRENT.get().ask(prompt, sampling_params, request_id, arguments)

    def encode(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        """Raises ApiError: of pooling models."""
        raise ApiError(501, "unsupported", "embeddings need an embedding model")
