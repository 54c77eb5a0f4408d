"""A request that has not wholly come in: how large its head may be, how long head and body may take.

httptools sets no bound on a head, and uvicorn no time, so that a client could hold memory by one endless header and
connections by sending a byte a minute. Requests whose head and body come in at once, as nearly all do, meet no timer.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.errors import ApiError
from server.receiving import StampedProtocol

MAX_HEAD_BYTES = 64 << 10  # beyond the first reading, which the kernel bounds
MAX_HEADERS = 256  # as vLLM
HEAD_TIMEOUT = 30.0  # seconds, from the connection or the head's first byte
BODY_TIMEOUT = 120.0  # seconds, from the head's end to the body's


class LimitedProtocol(StampedProtocol):
    """Refuses what is too large or too slow, in OpenAI's form, and closes the connection."""

    head_timeout = HEAD_TIMEOUT
    body_timeout = BODY_TIMEOUT
    _in_head = False  # a head has begun and is not whole
    _in_body = False
    _head_bytes = 0
    _headers_refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects and says nothing is let go."""
        self._set_deadline(self.head_timeout)  # first: what is there already is read at once
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes, at: float | None = None) -> None:
        """See whether the request is whole afterwards."""
        went_on = self._in_head
        super().data_received(data, at)
        if self._in_head:
            self._head_bytes = self._head_bytes + len(data) if went_on else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "head_too_large", f"got more than {MAX_HEAD_BYTES} bytes of headers; expected less")
        if self._deadline is None and (self._in_head or self._in_body or self._between()):
            self._set_deadline(self.body_timeout if self._in_body else self.head_timeout)

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole. Raises ValueError, which uvicorn takes for a broken request: too many headers."""
        if len(self.headers) > MAX_HEADERS:
            self._headers_refused = True
            raise ValueError("too many headers")
        super().on_headers_complete()  # raises, too: a URL that is none
        self._in_head, self._in_body = False, True
        self._clear_deadline()

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
        """For what is no HTTP, and for too many headers."""
        if self._headers_refused:
            self._refuse(431, "head_too_large", f"got more than {MAX_HEADERS} headers; expected less")
        else:
            self._refuse(400, "invalid_http", msg)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered; a part of the next one may be there."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def hang_up(self) -> None:
        """Close a connection that is idle, unless its next request is there, unread."""
        if self._reader is None or not self._reader.has_unread():
            self.transport.close()

    def _between(self) -> bool:
        """Data came after an answer, but no head began: blank lines, which stop uvicorn's own timer."""
        return self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None

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
        if self._answering_an_earlier_one():  # its end comes first; what came in behind it has not been read on
            self._set_deadline(self.body_timeout)
        elif self._in_head or self._in_body:
            self._refuse(408, "request_timeout", "got a part of a request; expected the rest sooner")
        else:
            self.transport.close()  # no request that could be answered

    def _answering_an_earlier_one(self) -> bool:
        busy = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (busy and not self._in_body)

    def _nothing_sent(self) -> bool:
        if self.cycle is None:
            return True
        if self._in_body:
            return not (self.cycle.response_started or self.pipeline)  # what is pipelined waits for the answer before it
        return self.cycle.response_complete

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer past uvicorn, unless an answer has begun, and close."""
        if self.transport.is_closing():
            return
        if self._nothing_sent():
            body = json.dumps(ApiError(status, code, message).body()).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
