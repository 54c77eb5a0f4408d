"""How the process leaves without cutting off a client: what has been accepted is answered, and
every answer ends its connection.

A connection between two requests may carry the next one at any instant, and closing it then resets
that request. So answers say `connection: close` from the signal on, a connection without a request
is kept for a moment, and it is closed only where nothing waits to be read. A listening socket that
is closed resets what its backlog holds: first the kernel drops new connections, the event loop
accepts what is there, then it is closed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kendall.policies.text import counted
from kendall.server.runtime.logs import end_logs
from kendall.server.wire.cycle import CLOSE

if TYPE_CHECKING:
    import uvicorn

    from kendall.server.gateway import Gateway

log = logging.getLogger("kendall")
# seconds that a connection without a request is kept, and that the socket listens after the drain
# has begun
LINGER = 1.0
HANDSHAKE = 0.1  # seconds for handshakes under way
BACKLOG = 1.0  # seconds that what is in the backlog may take to be accepted
TICK = 0.05
_SO_ATTACH_FILTER = 26  # Linux; Python's socket module does not name it
_TCP_FLAGS, _SYN, _SYN_ACK = 13, 0x02, 0x12
_LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06  # of classic BPF
# drop a segment that has SYN and not ACK: the first of a connection
_DROP_NEW = (
    (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
    (_AND, 0, 0, _SYN_ACK),
    (_JUMP_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)
_UNACCEPTED = struct.Struct(
    "=24xI"
)  # tcpi_unacked of struct tcp_info: of a listening socket, connections in its backlog


def say_close(server: uvicorn.Server) -> None:
    """Every answer that has not begun ends its connection from here on."""
    headers = server.config.encoded_headers
    if CLOSE not in headers:
        headers.append(CLOSE)
        server.server_state.default_headers = [*server.server_state.default_headers, CLOSE]
    for connection in list(server.server_state.connections):
        cycle: Any = getattr(connection, "cycle", None)
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False


async def wind_down(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """Return when no connection is left and nothing listens; or where `force_exit` is set, or
    time is up.
    """
    now = asyncio.get_running_loop().time
    listens_until = now() + LINGER
    ends_at = now() + (server.config.timeout_graceful_shutdown or 0.0)
    listening = True
    idle_since: dict[Any, float] = {}
    while not server.force_exit and now() < ends_at:
        connections: set[Any] = set(server.server_state.connections)
        if listening and (not connections or now() >= listens_until):
            await close_listeners(server, sockets)
            listening = False
            continue
        if not connections:
            return
        idle = {connection for connection in connections if connection.idle}
        idle_since = {connection: idle_since.get(connection, now()) for connection in idle}
        for connection, since in idle_since.items():
            if now() - since >= LINGER:
                connection.hang_up()
        await asyncio.sleep(TICK)


def break_off(server: uvicorn.Server) -> None:
    """The connections that are left are lost: their calls end as those of clients that have
    left. Else the event loop cancels them as it closes, and that is answered with 500 and
    logged as an error.
    """
    for connection in list(server.server_state.connections):
        cast("Any", connection).transport.abort()


async def close_listeners(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """No connection that the kernel has accepted is reset."""
    filtered = [drop_new_connections(sock) for sock in sockets]
    if any(filtered):
        await asyncio.sleep(HANDSHAKE)
    deadline = asyncio.get_running_loop().time() + BACKLOG
    while any(map(unaccepted, sockets)) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - only the kernel knows
        await asyncio.sleep(TICK)
    for listener in server.servers:
        listener.close()
    for sock in sockets:
        sock.close()


def drop_new_connections(sock: socket.socket) -> bool:
    """Have the kernel pass over new connections, whose clients try again later or elsewhere.
    False where it cannot.
    """
    if sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *step) for step in _DROP_NEW)
    )
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", len(_DROP_NEW), ctypes.addressof(program)),
        )
    except OSError:
        return False
    return True


def unaccepted(sock: socket.socket) -> int:
    """Connections in the backlog of a listening socket; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    try:
        return int(
            _UNACCEPTED.unpack(
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACCEPTED.size)
            )[0]
        )
    except OSError:
        return 0


class DrainLog:
    """One line when a drain begins and one when it has ended: how many sequences it was for, and
    how many of them were cut off.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._all = self._cut = 0

    def begin(self, gateway: Gateway) -> None:
        """Only the first call counts, and only where there is a queue."""
        if self._began_at is not None or not gateway.lifecycle.started:
            return
        self._began_at, batcher = gateway.now(), gateway.batcher
        self._all = batcher.unanswered
        limit = gateway.settings.shutdown_timeout
        log.info(
            "draining: %d waiting, %d in service; within %g s",
            batcher.queue_length,
            batcher.in_service,
            limit,
        )

    def cut(self, gateway: Gateway) -> None:
        """Count the sequences that have no outcome yet: the gateway is about to fail them."""
        if gateway.lifecycle.started:
            self._cut += gateway.batcher.unanswered

    def end(self, gateway: Gateway) -> None:
        """No connection is left, or none that is waited for: what is unanswered yet is cut off,
        too.
        """
        if self._began_at is None:
            return
        self.cut(gateway)
        seconds = gateway.now() - self._began_at
        log.info(
            "drained in %.1f s: %s ended, %d cut off",
            seconds,
            counted(self._all - self._cut, "sequence"),
            self._cut,
        )


class ExitBound:
    """Ends the process where its orderly end takes too long: something outside it, a disk or
    another process, does not answer.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def start(self, seconds: float) -> None:
        """Only the first call counts."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, _end_now, [seconds])
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """It ended."""
        if self._timer is not None:
            self._timer.cancel()


def _end_now(seconds: float) -> None:
    log.critical(
        "the gateway had not stopped %g s after the request to stop; it exits now", seconds
    )
    end_logs()
    os._exit(1)
