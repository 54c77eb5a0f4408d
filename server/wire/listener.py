"""Takes the connections of a listening socket: plain ones are read and written in
`server.wire.transport`, TLS is the event loop's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn

from kendall.server.wire.transport import (
    ConnectionProtocol,
    StampedTransport,
    stamps_arrivals,
)

log = logging.getLogger("kendall")
AT_ONCE = 64  # connections taken before others have their turn
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
PAUSE = 1.0  # seconds without taking any where the system has no room for another


class ConnectionListener:
    """Of one socket, until it is closed."""

    def __init__(self, sock: socket.socket, make: Callable[[], ConnectionProtocol]) -> None:
        self._loop, self._socket, self._make = asyncio.get_running_loop(), sock, make
        self._descriptor, self._closed = sock.fileno(), False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
        stamps_arrivals(sock)
        self._listen()

    def close(self) -> None:
        """Take no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: connections end for themselves."""

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._descriptor, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                log.warning("cannot take a connection: %s; the next in %g s", error.strerror, PAUSE)
                self._loop.remove_reader(self._descriptor)
                self._loop.call_later(PAUSE, self._listen)
                return
            connection.setblocking(False)
            StampedTransport(self._loop, connection, self._make()).start()


class ListeningServer(uvicorn.Server):
    """uvicorn, whose plain connections are taken here."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The application's start, then its connections."""
        await super().startup(sockets=[])
        for sock in sockets or ():
            if self.config.ssl is None:
                listener = ConnectionListener(sock, self._protocol)
                self.servers.append(cast("asyncio.Server", listener))
            else:
                loop = asyncio.get_running_loop()
                self.servers.append(
                    await loop.create_server(
                        self._protocol, sock=sock, ssl=self.config.ssl, backlog=self.config.backlog
                    )
                )

    def _protocol(self) -> Any:
        """Of one connection."""
        make: Any = self.config.http_protocol_class
        return make(self.config, self.server_state)
