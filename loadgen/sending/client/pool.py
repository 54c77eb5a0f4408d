"""Standing connections for a sender: one per request under way, and a reserve, so that a burst
need not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from kendall.loadgen.sending.client.wire import Address, SenderConnection
from kendall.remote import SYSTEM

# seconds; servers close idle connections after 5 s (uvicorn's default) or more: a request sent into
# a closing one is lost
KEEPALIVE = 4.0
RESERVE = 16  # idle connections kept ready


class ConnectionPool:
    """Connections to one address: as many as there are requests under way, and a reserve of idle
    ones.
    """

    def __init__(
        self, address: Address, reserve: int = RESERVE, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self._reserve = reserve
        self._loop = asyncio.get_running_loop()
        self._idle: dict[SenderConnection, None] = {}  # in the order in which they became idle
        self._open: set[SenderConnection] = set()
        self._refilling: asyncio.Task[None] | None = None
        self._tls = (tls or SYSTEM.context()) if address.tls else None
        self._resolved: tuple[str, int] | None = None

    async def __aenter__(self) -> ConnectionPool:
        """Resolve the name once and fill the reserve, as far as somebody listens; who does not
        is each request's own failure.
        """
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

    def take(self) -> SenderConnection | None:
        """An idle connection, the one used last; None where there is none."""
        taken = None
        if self._idle:
            taken, _ = self._idle.popitem()
            if self._loop.time() - taken.idle_since > KEEPALIVE:  # and so are all others
                for connection in (taken, *self._idle):
                    connection.abort()
                self._idle.clear()
                taken = None
        if len(self._idle) < self._reserve // 2 and (
            self._refilling is None or self._refilling.done()
        ):
            self._refilling = self._loop.create_task(self._refill())
        return taken

    def put(self, connection: SenderConnection, now: float) -> None:
        connection.idle_since = now
        self._idle[connection] = None

    def forget(self, connection: SenderConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    async def connect(self) -> SenderConnection:
        """A new connection. Raises OSError."""
        if self._resolved is None:
            self._resolved = await self._resolve()
        host, port = self._resolved
        tls: dict[str, Any] = (
            {"ssl": self._tls, "server_hostname": self.address.host} if self._tls else {}
        )
        _, connection = await self._loop.create_connection(
            lambda: SenderConnection(self), host, port, **tls
        )
        self._open.add(connection)
        return connection

    async def _resolve(self) -> tuple[str, int]:
        """The first address of the name at which somebody listens."""
        found = await self._loop.getaddrinfo(self.address.host, self.address.port, type=1)
        failure: OSError | None = None
        for _, _, _, _, (host, port, *_) in found:
            try:
                transport, _ = await self._loop.create_connection(
                    asyncio.Protocol, str(host), int(port)
                )
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
