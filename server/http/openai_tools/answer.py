"""The answer of a call that vLLM's serving objects write: its bytes come from them, everything else
is `GeneratedAnswer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from starlette.types import Send

from kendall.server.engines.base import EngineRequest, Token
from kendall.server.http.answer import Choice, GeneratedAnswer
from kendall.server.http.formats import AnswerFormat
from kendall.server.http.headers import delay_headers, early_headers
from kendall.server.http.queue_stream import QueueStream
from kendall.server.http.submitted import AnswerOptions
from kendall.server.openai_tools.call import Outlet, VllmCall
from kendall.server.openai_tools.endpoints import Dialect, error_event
from kendall.server.queue.batcher import Batcher
from kendall.server.runtime.errors import ApiError

_BROKEN = ApiError(
    500, "internal_error", "vLLM's API server ended the answer before its end; the log has why"
)


class VllmChoice(Choice):
    """The consumer of one sequence: hands its tokens to vLLM."""

    __slots__ = ("_prompt_told", "outlet")

    def __init__(self, call: GeneratedAnswer, index: int, outlet: Outlet) -> None:
        super().__init__(call, index)
        self.outlet = outlet
        self._prompt_told = False

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """Hand tokens to vLLM, the first ones with the prompt's log probabilities."""
        told = None
        if not self._prompt_told:
            self._prompt_told = True
            if self.sequence is not None and self.sequence.stream is not None:
                told = self.sequence.stream.prompt_logprobs
        self.outlet.add(text, tokens, told)

    def on_release(self) -> None:
        """Its end may leave."""
        assert self.sequence is not None
        detector = self.sequence.stop_detector
        assert detector.finish_reason is not None
        self.done = True
        self.outlet.end(detector.finish_reason, detector.stop_reason)


class VllmAnswer(GeneratedAnswer):
    """See above. The call has asked for its sequences, and waits for their tokens."""

    def __init__(
        self,
        batcher: Batcher,
        requests: list[EngineRequest],
        front: VllmCall,
        dialect: Dialect,
        options: AnswerOptions,
    ) -> None:
        super().__init__(batcher, requests, cast("AnswerFormat", None), options)  # vLLM has its own
        self._front = front
        self._dialect: Dialect = dialect
        self._events = 0  # sent
        self._written: list[VllmChoice] = [
            VllmChoice(self, index, outlet) for index, outlet in enumerate(front.outlets)
        ]
        self._parts = self._choices = list(self._written)
        front.on_change = self.wake

    async def __call__(self, *asgi: Any) -> None:
        """Run the call to its end, and vLLM's part of it."""
        try:
            await super().__call__(*asgi)
        finally:
            self._front.close()
            self._written = []

    def _may_begin(self) -> bool:
        return self._over() or (self.stream and not self.undispatched)

    def _has_more(self) -> object:
        return self._front.events or self._over()

    def _over(self) -> bool:
        """Whether vLLM writes no more. Where it stopped before its sequences did, they fail."""
        if self._front.over and self.error is None:
            left = [each.sequence for each in self._written if not each.done]
            self.error = self._front.error or (_BROKEN if left else None)
            for sequence in left if self.error is not None else ():
                if sequence is not None:
                    self._batcher.fail(sequence, "failed", "internal_error", _BROKEN.message)
        return self._front.over

    async def _write_whole(self, send: Send) -> None:
        body = self._front.whole
        assert body is not None
        headers = [
            *delay_headers(*self._delays()),
            *early_headers(self._options.request_id, self._choices[-1].sequence),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if not self._gone:
            self._release()

    async def _write_events(self, send: Send) -> None:
        over = False
        while not over:
            await self._until(self._has_more)
            if self._gone:
                return
            over = self._over() or self.error is not None
            events, self._front.events = self._front.events, []
            self._events += len(events)
            if self.error is not None:
                events.append(error_event(self._dialect, self.error, self._events))
            body = b"".join(events)
            written = [each for each in self._written if each.done and each.outlet.written]
            await send({"type": "http.response.body", "body": body, "more_body": not over})
            if self._gone:
                return  # it left while this waited for it to read: none of it went out
            self._release(written)


class VllmQueueStream(QueueStream, VllmAnswer):
    """A `VllmAnswer` that speaks while it waits."""
