"""One request and its answer: what an ASGI application receives and sends."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

log = logging.getLogger("uvicorn.error")
_BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTHS, _BODILESS = frozenset({b"content-length", b"transfer-encoding"}), frozenset({204, 304})
CLOSE = (b"connection", b"close")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # HTTP/1.1 clients skip it
_FAILED = b"Internal Server Error"
Headers = list[tuple[bytes, bytes]]


class CycleConnection(Protocol):
    """The connection, as a request and its answer see it."""

    transport: asyncio.Transport
    write_paused: bool

    def default_headers(self) -> tuple[bytes, bool]:
        """What every head has, and whether that ends the connection."""

    def resume_reading(self) -> None:
        """The application waits for more of the request."""

    async def drain(self) -> None:
        """Until the client reads."""

    def on_response_complete(self) -> None:
        """The next answer may begin."""


class Cycle:
    """From the end of a request's head to the end of its answer."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_left",
        "_news",
        "_told",
        "body",
        "disconnected",
        "ended",
        "expects_continue",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(
        self, connection: CycleConnection, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection, self.scope = connection, scope
        self.keep_alive, self.expects_continue = keep_alive, expects_continue
        self.body: bytes | bytearray = b""  # received, not yet asked for
        self.more_body, self.disconnected = True, False
        self.response_started = self.response_complete = self.ended = False
        self._told = False  # that there is something to receive
        self._news: asyncio.Event | None = None  # of whoever waits for that
        self._chunked = False
        self._left: int | None = None  # bytes of the answer; None: as many as come

    def add(self, body: bytes) -> None:
        """More of the request."""
        if self.body:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += body
        else:
            self.body = body

    def tell(self) -> None:
        """There is something to receive."""
        self._told = True
        if self._news is not None:
            self._news.set()

    async def run(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """The application's answer; 500 where it fails before it has begun one."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException:
            log.exception("the application failed")
            await self._fail()
        else:
            if not (self.response_complete or self.disconnected):
                log.error("the application returned without a complete response")
                await self._fail()
        finally:
            self.ended = True

    async def _fail(self) -> None:
        if self.response_started:
            self._connection.transport.close()
            return
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(_FAILED)),
            CLOSE,
        ]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": _FAILED})

    async def receive(self) -> Message:
        """A part of the request, or that nothing more comes."""
        transport = self._connection.transport
        if self.expects_continue and not transport.is_closing():
            transport.write(CONTINUE)
            self.expects_continue = False
        if not (self.disconnected or self.response_complete):
            self._connection.resume_reading()
            if not self._told:
                self._news = self._news or asyncio.Event()
                await self._news.wait()
            self._told = False
            if self._news is not None:
                self._news.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), b""
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """A part of the answer. Raises RuntimeError for one out of turn, illegal headers, and a
        body of another length than was announced.
        """
        if self._connection.write_paused and not self.disconnected:
            await self._connection.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if message["type"] != expected or self.response_complete:
            raise RuntimeError(f"got {message['type']}; expected {expected}, before the end")
        if self.response_started:
            self._write_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            self._write_head(message["status"], cast("Headers", message.get("headers", ())))

    def _write_head(self, status: int, headers: Headers) -> None:
        defaults, closes = self._connection.default_headers()
        lines, announced = [STATUS_LINE[status], defaults], False
        _check(headers)
        for name, value in headers:
            lower = name.lower()
            announced |= lower in _LENGTHS and self._announce(lower, value)
            closes |= lower == b"connection" and b"close" in _tokens(value)
            lines += (lower, b": ", value, b"\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        self.keep_alive = self.keep_alive and not closes
        if not announced:
            lines.append(self._unannounced(status))
        lines.append(b"\r\n")
        self.response_started, self.expects_continue = True, False
        self._connection.transport.write(b"".join(lines))

    def _announce(self, name: bytes, value: bytes) -> bool:
        if name == b"content-length":
            self._left = int(value)
        else:
            self._chunked = value.lower() == b"chunked"
        return True

    def _unannounced(self, status: int) -> bytes:
        """HTTP/1.0 knows no chunks: the end of the connection is that of the answer (RFC 9112)."""
        if status in _BODILESS or self.scope["method"] == "HEAD":
            self._left = 0
        elif self.scope["http_version"] != "1.0":
            self._chunked = True
            return b"transfer-encoding: chunked\r\n"
        return b""

    def _write_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._left = 0
        elif self._chunked:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._connection.transport.write(framed if more else framed + b"0\r\n\r\n")
        else:
            if self._left is not None:
                self._left -= len(body)
            if (self._left or 0) < 0:
                raise RuntimeError("Response content longer than Content-Length")
            self._connection.transport.write(body)
        if not more:
            self._complete()

    def _complete(self) -> None:
        if self._left and not self._chunked:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.tell()
        if not self.keep_alive:
            self._connection.transport.close()
        if not self.ended:
            self._connection.on_response_complete()

    def lose(self) -> None:
        """The connection is lost."""
        if not self.response_complete:
            self.disconnected = True
        self.tell()


def _check(headers: Headers) -> None:
    """Raises RuntimeError."""
    if _BAD_NAME.search(b"".join([name for name, _ in headers])) or _BAD_VALUE.search(
        b"".join([value for _, value in headers])
    ):
        raise RuntimeError(f"got the headers {headers!r}; expected legal ones")


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip() for token in value.lower().split(b",")]
