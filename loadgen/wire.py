"""HTTP/1.1 as an open-loop sender needs it: a request is one write, at the very instant at which it is due.

Between the decision to send and the bytes on the wire, a client library does 0.13 ms of work (aiohttp, the quickest of
those measured in bench/client_library.py): two requests of one sender are never closer than that, which at 1,000
requests/s is every eighth gap of a Poisson process. Here the bytes are made beforehand, the connection stands, and the
answer is read by the parser of uvicorn (httptools) without a task of its own.

A connection carries one request at a time. Nothing is retried and nothing times out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from policies.text import SpecError

# seconds; servers close idle connections after 5 s (uvicorn's default) or more: a request sent into a closing one is lost
KEEPALIVE = 4.0
RESERVE = 16  # idle connections kept ready, so that a burst need not wait for them to be made


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
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise SpecError(f"got URL {url!r}; expected http://HOST:PORT")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        lines = [f"POST {parts.path or '/'}{'?' + parts.query if parts.query else ''} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
        self._head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]).encode("latin-1")

    def message(self, body: bytes, request_id: str) -> bytes:
        """The bytes of one request."""
        return b"%s\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n%s" % (self._head, request_id.encode("latin-1"), len(body), body)


class Connection(asyncio.Protocol):
    """One connection; the methods named on_... are the parser's callbacks."""

    def __init__(self, pool: Pool) -> None:
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
        """See asyncio.Protocol."""
        self.transport = cast(asyncio.Transport, transport)
        self.idle_since = self._loop.time()

    def send(self, message: bytes, receiver: Receiver) -> None:
        """Send a request; its answer goes to `receiver`."""
        self._receiver, self._headers, self._headed = receiver, {}, False
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._now = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None  # a bug of ours: asyncio reports it and closes the connection
        except httptools.HttpParserError as error:
            self._lose(f"not HTTP/1.1: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All of them; 1xx is no answer yet."""
        status = self._parser.get_status_code()
        self._headed = status >= 200
        if self._headed and self._receiver is not None:
            self._receiver.on_head(status, self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
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
            receiver.on_lost(str(exc) if exc else "the server closed the connection without an answer", self._loop.time())

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.on_lost(reason, self._now)

    def abort(self) -> None:
        """Drop it; its receiver is told nothing more."""
        self._receiver = None
        self.transport.abort()


class Pool:
    """Connections to one address: as many as there are requests under way, and a reserve of idle ones."""

    def __init__(self, address: Address, reserve: int = RESERVE) -> None:
        self.address = address
        self._reserve = reserve
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle
        self._open: set[Connection] = set()
        self._refilling: asyncio.Task[None] | None = None
        self._tls = ssl.create_default_context() if address.tls else None
        self._resolved: tuple[str, int] | None = None

    async def __aenter__(self) -> Pool:
        """Resolve the name once and fill the reserve, as far as somebody listens; who does not is each request's own failure."""
        with contextlib.suppress(OSError):
            await self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # transports close in the next turn

    def take(self) -> Connection | None:
        """An idle connection, the one used last; None where there is none."""
        taken = None
        if self._idle:
            taken, _ = self._idle.popitem()
            if self._loop.time() - taken.idle_since > KEEPALIVE:  # and so are all others
                for connection in (taken, *self._idle):
                    connection.abort()
                self._idle.clear()
                taken = None
        if len(self._idle) < self._reserve // 2 and (self._refilling is None or self._refilling.done()):
            self._refilling = self._loop.create_task(self._refill())
        return taken

    def put(self, connection: Connection, now: float) -> None:
        """Idle again."""
        connection.idle_since = now
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    async def connect(self) -> Connection:
        """A new connection. Raises OSError."""
        if self._resolved is None:
            self._resolved = await self._resolve()
        host, port = self._resolved
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": self.address.host} if self._tls else {}
        _, connection = await self._loop.create_connection(lambda: Connection(self), host, port, **tls)
        self._open.add(connection)
        return connection

    async def _resolve(self) -> tuple[str, int]:
        """The first address of the name at which somebody listens."""
        found = await self._loop.getaddrinfo(self.address.host, self.address.port, type=1)
        failure: OSError | None = None
        for _, _, _, _, (host, port, *_) in found:
            try:
                transport, _ = await self._loop.create_connection(asyncio.Protocol, str(host), int(port))
            except OSError as error:
                failure = error
            else:
                transport.abort()
                return str(host), int(port)
        raise failure or OSError(f"{self.address.host} has no address")

    async def _refill(self) -> None:
        with contextlib.suppress(OSError):
            await self._fill()

    async def _fill(self) -> None:
        while len(self._idle) < self._reserve:
            self.put(await self.connect(), self._loop.time())
