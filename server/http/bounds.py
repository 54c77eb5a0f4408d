"""Bounds on a request while it is received: the size of its head, of the framing of its body, and
the time for both.

httptools bounds neither a head nor the trailers and chunk extensions of a body, and nothing sets a
time limit: a client could fill the memory with one endless header or with trailers, and hold
connections by sending a byte a minute. Trailers are discarded: the parser would append them to the
headers, where a `Host` among them would replace the real one. A request that was answered before
its end is read a little further, for the sake of the connection, which is then closed. Requests
whose head and body arrive in one reading, as nearly all do, meet no timer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from kendall.server.http.connection import StampedProtocol
from kendall.server.runtime.errors import ApiError

# beyond the first reading, which the kernel bounds; of a body's framing and trailers too
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256  # as vLLM
# bytes a chunk may be framed by: its size in hexadecimal and two line ends, without an extension
CHUNK_FRAMING = 16
HEAD_TIMEOUT = 30.0  # seconds, from the connection or the head's first byte
BODY_TIMEOUT = 120.0  # seconds, from the head's end to the body's
ANSWERED_BYTES = 1 << 20  # of a request that are still read once it is answered
ANSWERED_TIMEOUT = 5.0  # seconds


class _Discarded(list[tuple[bytes, bytes]]):
    """Stands for the headers once the head is complete: trailers go nowhere."""

    def append(self, _: tuple[bytes, bytes], /) -> None:
        """Keep nothing."""


_TRAILERS = _Discarded()


def fault_of_head(
    headers: Sequence[tuple[bytes, bytes]], parser: httptools.HttpRequestParser
) -> tuple[int, str, str] | None:
    """Status, code and message, of a head that is valid HTTP otherwise."""
    if len(headers) > MAX_HEADERS:
        return 431, "head_too_large", f"got more than {MAX_HEADERS} headers; expected less"
    hosts = [name for name, _ in headers].count(b"host")
    if hosts == 1 or (hosts == 0 and parser.get_http_version() == "1.0"):
        return None
    message = f"got {hosts} Host headers; expected exactly one (RFC 9112, 3.2)"
    return 400, "invalid_http", message


class LimitedProtocol(StampedProtocol):
    """Refuses what is too large or too slow, in OpenAI's form, and closes the connection."""

    head_timeout = HEAD_TIMEOUT
    body_timeout = BODY_TIMEOUT
    answered_timeout = ANSWERED_TIMEOUT
    __slots__ = (
        "_answered_bytes",
        "_body_bytes",
        "_deadline",
        "_fault",
        "_framing_bytes",
        "_head_bytes",
        "_in_body",
        "_in_head",
    )

    def __init__(self, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config, server_state)
        self._in_head = False  # a head has begun and is not whole
        self._in_body = False
        self._head_bytes = 0
        self._body_bytes = 0  # of the body, each piece with what frames a chunk
        self._framing_bytes = 0  # received between head and end that are neither
        self._answered_bytes = 0  # received behind the end of the response
        self._fault: tuple[int, str, str] | None = None  # of a head that is valid HTTP otherwise
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client that connects and says nothing is let go."""
        self._set_deadline(self.head_timeout)  # first: what is there already is read at once
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes, at: float | None = None) -> None:
        """See whether the request is whole afterwards."""
        went_on, unfinished, body_bytes = (
            self._in_head,
            self.cycle if self._in_body else None,
            self._body_bytes,
        )
        super().data_received(data, at)
        if self._in_head:
            self._head_bytes = self._head_bytes + len(data) if went_on else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    431,
                    "head_too_large",
                    f"got more than {MAX_HEAD_BYTES} bytes of headers; expected less",
                )
        elif unfinished is not None and self._in_body and self.cycle is unfinished:
            self._weigh(len(data), self._body_bytes - body_bytes)
        if self._in_head or self._in_body or self._between():
            if self._deadline is None:
                self._set_deadline(self.body_timeout if self._in_body else self.head_timeout)
            if not self._answering_an_earlier_one():
                self.note_unfinished(in_body=self._in_body)

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole. Raises ValueError, which the parser takes for a broken request."""
        self._fault = fault_of_head(self.headers, self.parser)
        if self._fault is not None:
            raise ValueError(self._fault[2])
        super().on_headers_complete()  # raises, too: a URL that is none
        self.headers = _TRAILERS
        self._in_head, self._in_body = False, True
        self._framing_bytes = self._answered_bytes = 0
        self._clear_deadline()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body_bytes += len(body) + CHUNK_FRAMING
        super().on_body(body)

    def on_response_complete(self) -> None:
        """What nobody read of the body is released; the rest of a request that is answered
        already has little time.
        """
        super().on_response_complete()
        if (self._in_head or self._in_body) and not self._answering_an_earlier_one():
            self.note_unfinished(in_body=False)
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or not cycle.response_complete:
            return
        cycle.body = b""
        if self._in_body:
            self._clear_deadline()
            self._set_deadline(self.answered_timeout)

    def on_message_complete(self) -> None:
        """The body is whole too."""
        self._in_body = False
        self._clear_deadline()
        super().on_message_complete()

    def answer_what_is_whole(self) -> None:
        """No more comes: nothing that is not whole is waited for."""
        self._in_head = self._in_body = False
        self._clear_deadline()
        super().answer_what_is_whole()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, and a head that is refused."""
        self._refuse(*(self._fault or (400, "invalid_http", msg)))

    def _weigh(self, received: int, body: int) -> None:
        """A reading wholly between the head and the end of a request: what is neither body nor
        plain framing is bounded.
        """
        if self.cycle is None or self.cycle.response_complete:
            self._answered_bytes += received
            if self._answered_bytes > ANSWERED_BYTES:
                self.transport.close()
            return
        self._framing_bytes += max(0, received - body)
        if self._framing_bytes > MAX_HEAD_BYTES:
            message = (
                f"got more than {MAX_HEAD_BYTES} bytes of trailers and chunk extensions; "
                "expected less"
            )
            self._refuse(431, "head_too_large", message)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered; a part of the next one may be there."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipelined

    def hang_up(self) -> None:
        """Close a connection that is idle, unless its next request is there, unread."""
        if self._plain is None or not self._plain.has_unread():
            self.transport.close()

    def _between(self) -> bool:
        """Data came after an answer, but no head began: blank lines."""
        return self.cycle is not None and self.cycle.response_complete and not self.resting

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if (
            self._answering_an_earlier_one()
        ):  # its end comes first; what came in behind it has not been read on
            self._set_deadline(self.body_timeout)
        elif self._in_head or self._in_body:
            self._refuse(
                408, "request_timeout", "got an incomplete request; expected the rest in time"
            )
        else:
            self.transport.close()  # no request that could be answered

    def _answering_an_earlier_one(self) -> bool:
        busy = self.cycle is not None and not self.cycle.response_complete
        return self.pipelined or (busy and not self._in_body)

    def _nothing_sent(self) -> bool:
        if self.cycle is None:
            return True
        if self._in_body:
            return not (
                self.cycle.response_started or self.pipelined
            )  # what is pipelined waits for the answer before it
        return self.cycle.response_complete

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer past the application, unless an answer has begun, and close."""
        if self.transport.is_closing():
            return
        if self._nothing_sent():
            body = json.dumps(ApiError(status, code, message).body()).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % len(body)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
