"""HTTP/1.1 as an open-loop sender needs it: a request is one write, at the very instant at which it
is due.

Between the decision to send and the bytes on the wire, a client library does 0.13 ms of work
(aiohttp, the quickest of those measured in bench/client_library.py at revision e9b4e9dc): two
requests of one sender are never closer than that, which at 1,000 requests/s is every eighth gap of
a Poisson process. Here the bytes are made beforehand, the connection stands, and the answer is read
by the parser of uvicorn (httptools) without a task of its own.

A connection carries one request at a time. Nothing is retried and nothing times out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from kendall.policies.text import SpecError
from kendall.remote import reason as why

FLOW_HEADER = "x-llm-d-inference-fairness-id"


class Receiver(Protocol):
    """Who is told of an answer; `now` is the instant at which the loop read it."""

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        """Status and headers, names in lower case."""
        ...

    def on_data(self, data: bytes, now: float) -> None:
        """A piece of the body."""
        ...

    def on_end(self, now: float) -> None:
        """The answer is whole."""
        ...

    def on_lost(self, reason: str, now: float) -> None:
        """It will never be."""
        ...


class Address:
    """Where a URL leads, and what every request to it begins with. Raises SpecError."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise SpecError(f"got URL {url!r}: {error}; expected http://HOST:PORT") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise SpecError(f"got URL {url!r}; expected http://HOST:PORT")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        lines = [
            f"POST {parts.path or '/'}{'?' + parts.query if parts.query else ''} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
        ]
        self._head = "\r\n".join(
            [*lines, *(f"{name}: {value}" for name, value in headers.items())]
        ).encode("latin-1")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def message(self, body: bytes, request_id: str, flow: str | None = None) -> bytes:
        """The bytes of one request."""
        named = request_id if flow is None else f"{request_id}\r\n{FLOW_HEADER}: {flow}"
        return b"%s\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n%s" % (
            self._head,
            named.encode("latin-1"),
            len(body),
            body,
        )


class IdleConnections(Protocol):
    """Where a connection rests between two requests."""

    def put(self, connection: SenderConnection, now: float) -> None:
        """It is idle again."""
        ...

    def forget(self, connection: SenderConnection) -> None:
        """It is closed."""
        ...


class SenderConnection(asyncio.Protocol):
    """One connection; the methods named on_... are the parser's callbacks."""

    def __init__(self, pool: IdleConnections) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self._headed = False
        self.idle_since = 0.0
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.idle_since = self._loop.time()

    def send(self, message: bytes, receiver: Receiver) -> None:
        """Send a request; its answer goes to `receiver`."""
        self._receiver, self._headers, self._headed = receiver, {}, False
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._now = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise (
                error.__context__ or error
            ) from None  # a bug of ours: asyncio reports it and closes the connection
        except httptools.HttpParserError as error:
            self._lose(f"not HTTP/1.1: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All of them; 1xx is no answer yet."""
        status = self._parser.get_status_code()
        self._headed = status >= 200
        if self._headed and self._receiver is not None:
            self._receiver.on_head(status, self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_data(data, self._now)

    def on_message_complete(self) -> None:
        """The answer is whole; the connection may be used again."""
        if not self._headed:
            self._headers = {}
            return
        receiver, self._receiver = self._receiver, None
        if receiver is None or not self._parser.should_keep_alive():
            self.transport.close()
        else:
            self._pool.put(self, self._now)
        if receiver is not None:
            receiver.on_end(self._now)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. A body without a length ends here."""
        self._pool.forget(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and self._headed:
            receiver.on_end(self._loop.time())
        else:
            receiver.on_lost(
                why(exc) if exc else "the server closed the connection without an answer",
                self._loop.time(),
            )

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.on_lost(reason, self._now)

    def abort(self) -> None:
        """Drop it; its receiver is told nothing more."""
        self._receiver = None
        self.transport.abort()
