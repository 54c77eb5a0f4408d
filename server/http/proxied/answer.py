"""The answer of the server behind, written as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from kendall.queueing.measurement.record import Outcome
from kendall.server.engines.base import EngineRequest, Token
from kendall.server.engines.proxied import Refused
from kendall.server.http.client_connection import cut
from kendall.server.http.formats import DONE
from kendall.server.http.headers import delay_headers, early_headers, of_server_behind
from kendall.server.http.submitted import AnswerOptions, Submitted
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState

CHAT = ("/v1/chat/completions", "/v1/completions")  # whose streams end with [DONE]
AHEAD = 256 << 10  # bytes that are read of the server before the client has taken them
EVENTS = "text/event-stream"
UNBUFFERED = (b"x-accel-buffering", b"no")  # nginx would hold tokens back


def raw(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers as the server behind wrote them, in bytes."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class ProxiedPart:
    """The consumer of a passed call (`ProxiedConsumer`)."""

    __slots__ = ("_call", "done", "sequence")

    def __init__(self, call: ProxiedAnswer) -> None:
        self._call = call
        self.sequence: SequenceState | None = None
        self.done = False

    def on_dispatched(self) -> None:
        """Nothing to write yet."""

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """Never called: bytes come in place of tokens."""

    def on_head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """The answer begins."""
        self._call.head, self._call.streamed = headers, streamed
        self._call.wake()

    def on_bytes(self, data: bytes) -> Awaitable[None] | None:
        """On to the client; what it has not taken is not much."""
        call = self._call
        call.chunks.append(data)
        call.ahead += len(data)
        if not call.streamed:
            return None
        if call.sleeping is not None:
            call.wake()
        return call.taken() if call.ahead > AHEAD else None

    def on_refused(self, answer: Refused) -> None:
        """The client's answer."""
        self._call.refused = answer

    def on_release(self) -> None:
        """The answer is whole."""
        self.done = True
        self._call.wake()

    def on_failed(self, outcome: Outcome, code: str, message: str) -> None:
        """Nothing more will come."""
        del outcome
        self._call.error = self._call.error or self._call.failure(code, message)
        self._call.wake()


class ProxiedAnswer(Submitted):
    """Of one call. What the server behind wrote goes out byte by byte; the gateway adds its
    headers.
    """

    def __init__(
        self, batcher: Batcher, engine_request: EngineRequest, options: AnswerOptions
    ) -> None:
        super().__init__(batcher, [engine_request], options)
        self._part = ProxiedPart(self)
        self._parts = [self._part]
        self.head: Sequence[tuple[str, str]] | None = None
        self.streamed = False
        self.chunks: list[bytes] = []
        self.ahead = 0  # bytes of them
        self._taken: asyncio.Future[None] | None = None
        self.refused: Refused | None = None

    def taken(self) -> asyncio.Future[None]:
        """Ends when the client has taken the bytes, or the call is over."""
        if self._taken is None:
            self._taken = self._loop.create_future()
        return self._taken

    def _take(self) -> bytes:
        """Bytes to be sent now."""
        body, self.chunks, self.ahead = b"".join(self.chunks), [], 0
        if self._taken is not None:
            if not self._taken.done():
                self._taken.set_result(None)
            self._taken = None
        return body

    def _may_begin(self) -> bool:
        return self.head is not None and (self.streamed or self._part.done)

    @property
    def _told(self) -> bool:
        """The server behind has written the error itself, in an answer that began well."""
        return self.refused is not None and self.head is not None

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._until(self._may_begin)
        if self._gone:
            return
        with contextlib.suppress(ConnectionError):
            if self.error is not None and self.refused is None and not self._may_begin():
                await self._write_error(scope, receive, send)
            elif self.refused is not None and not self._told:
                await self._write_refused(send, self.refused)
            elif self.streamed:
                await self._write_stream(scope, send)
            else:
                await self._write_whole(send, 200, self._take())
                if not self._gone and self._part.sequence is not None:
                    self._part.sequence.released()

    async def _write_refused(self, send: Send, answer: Refused) -> None:
        self.head = answer.headers
        await self._write_whole(send, answer.status, answer.body)

    async def _write_whole(self, send: Send, status: int, body: bytes) -> None:
        headers = [*self._own_headers(*self._delays()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, scope: Scope, send: Send) -> None:
        """Events, or a whole answer that is too large to be held."""
        headers = self._own_headers(self._delays()[0])
        if not any(name == UNBUFFERED[0] for name, _ in headers):
            headers.append(UNBUFFERED)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        over = False
        while not over:
            await self._until(self._has_more)
            if self._gone:
                return
            over = self._part.done or self.error is not None
            if self.error is not None and not self._told:
                if not self._in_events:
                    await cut(scope)
                    return
                self.chunks.append(self._error_event())
            body = self._take()
            await send({"type": "http.response.body", "body": body, "more_body": not over})
        if not self._gone and self._part.sequence is not None:
            self._part.sequence.released()

    def _let_go(self) -> None:
        super()._let_go()
        self._take()
        del self._part

    def _has_more(self) -> object:
        return self.chunks or self._part.done

    def _own_headers(self, queue: float, service: float | None = None) -> list[tuple[bytes, bytes]]:
        """Before those of the server behind, which may be a gateway too: the delays are of this
        queue.
        """
        assert self.head is not None
        own = [
            *delay_headers(queue, service),
            *early_headers(self._options.request_id, self._part.sequence),
        ]
        return own + of_server_behind(raw(self.head))

    @property
    def _in_events(self) -> bool:
        """Whether an error can be written behind what was."""
        kinds = [value for name, value in self.head or () if name == "content-type"]
        return bool(kinds) and kinds[-1].partition(";")[0].strip().lower() == EVENTS

    def _error_event(self) -> bytes:
        """In the words of the route, behind what has been written."""
        assert self.error is not None
        call = self._requests[0].call
        body = self._options.error_body(self.error)
        if call is not None and call.path in CHAT:
            return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **body}) + b"\n\n"
