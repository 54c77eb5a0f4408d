"""`kendall serve` on the real engine, which marked prompts kill or lose; few records may wait
for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from kendall.loadgen.gateway.gateway_child import end_with
from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.server.engines.base import EngineEnd, EngineRequest, FailureCode, Token, TokenStream
from kendall.server.engines.vllm import engine as vllm_engine
from kendall.server.telemetry import recorder

POISON, LOST = 666, 667  # first token of a prompt
QUEUE_BYTES = 1 << 17


class Deaf:
    """Hears the first tokens of a stream and nothing after them: a sequence that the engine has
    forgotten.
    """

    def __init__(self, stream: TokenStream) -> None:
        assert stream.listener is not None
        self._stream, self._listener = stream, stream.listener
        stream.listener = self

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        self._stream.listener = None
        self._listener.on_tokens(tokens)

    def on_end(self, end: EngineEnd) -> None:
        self._listener.on_end(end)

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        self._listener.on_failure(message, code)


class MarkedEngine(vllm_engine.VllmEngine):
    """Its process is killed by each poisonous prompt; a sequence to be lost is lost once, after
    its first tokens.
    """

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        streams = super().dispatch(server_id, requests, padded=padded, joining=joining)
        loop = asyncio.get_running_loop()
        for engine_request, stream in zip(requests, streams, strict=True):
            mark = engine_request.prompt_token_ids[0]
            if mark == POISON:
                loop.call_soon(_kill, self.process_id)
            elif mark == LOST and not engine_request.output_token_ids:
                loop.call_soon(Deaf, stream)  # by then it has its listener
        return streams


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class MarkedGateway(GatewayProcess):
    """Its child is this module."""

    module = "tests.server.marked_gateway"


if __name__ == "__main__":
    from kendall import cli

    end_with(int(sys.argv[1]))
    vllm_engine.VllmEngine = MarkedEngine  # type: ignore[misc]
    recorder.QUEUE_BYTES = QUEUE_BYTES
    cli.main(sys.argv[2:])
