"""A short answer that the gateway asks of an engine for itself: whether it makes tokens at all."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from kendall.policies import Request
from kendall.server.engines.base import (
    Engine,
    EngineEnd,
    EngineRequest,
    FailureCode,
    Sampling,
    Token,
    TokenStream,
)
from kendall.server.runtime.clock import clock_of

log = logging.getLogger("kendall.supervision")
TOKENS = 16  # more than an engine has under way when it dies
LIMIT = 10.0  # seconds
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
_ids = itertools.count()


class KillTrial:
    """Under way from the start on; `over(sound)` is called once, unless `stop` comes before.

    In no queue and no record, nor in Kendall's metrics.
    """

    def __init__(self, engine: Engine, over: Callable[[bool], None], server_id: int = 0) -> None:
        self._engine, self._over = engine, over
        self._made = 0
        self._ended = False
        self._stream: TokenStream | None = None
        self._id = f"proof-{next(_ids)}"
        loop = asyncio.get_running_loop()
        loop.call_later(LIMIT, self._end, False)
        request = Request(
            id=self._id,
            arrived_at=clock_of(loop)(),
            prompt_tokens=len(PROMPT),
            max_output_tokens=TOKENS,
        )
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        try:
            (self._stream,) = engine.dispatch(
                server_id,
                [EngineRequest(request, list(PROMPT), sampling)],
                padded=False,
                joining=False,
            )
        except Exception:
            log.exception("the engine rejected the gateway's own request")
            loop.call_soon(self._end, False)
        else:
            self._stream.listener = self

    def stop(self) -> None:
        """The engine is gone."""
        self._ended = True
        if self._stream is not None:
            self._stream.listener = None

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """Enough of them are the proof."""
        self._made += len(tokens)
        if self._made >= TOKENS:
            self._end(True)

    def on_end(self, end: EngineEnd) -> None:
        """At the edge of a short context."""
        self._end(end != "cancelled" and self._made > 0)

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """No proof."""
        del message, code
        self._end(False)

    def _end(self, sound: bool) -> None:
        if self._ended:
            return
        self.stop()
        self._engine.cancel([self._id])
        self._over(sound)
