"""A plain connection, read and written here: one descriptor, each reading with the kernel's stamp.

A stamp taken by the event loop is the instant at which the loop came to it. At 1,000 requests/s a
loop that spends 0.4 ms on each is busy when every third one comes: those are stamped one after the
other when it is free again, no two of them closer than its own work, and a perfect Poisson stream
looks regular and bunched at once. The kernel stamps a packet as it comes in (SO_TIMESTAMPNS,
Linux), but hands the stamp out through `recvmsg` only, which no event loop's transport calls.
Elsewhere the stamp is the loop's.

The head of an answer goes out with what follows it, one system call and one packet in place of two:
it is held until the next write, or until the event loop has its next turn.

A client may send its last byte and wait for its answers (a half-closed connection, RFC 9112 leaves
it to the server). Whether it waits or has gone is asked every 5 s, by an interim response: one that
has gone resets the connection, and is noticed by that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from typing import Any, Protocol

from kendall.server.wire.hang_ups import HangUps

# Linux on every architecture but a few; Python's socket module does not name it
SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_READ_BYTES = 1 << 16
_HIGH, _LOW = 1 << 16, 1 << 14  # bytes unsent at which writing is paused, and goes on
_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"  # an interim response has nothing behind it
# seconds between two questions to a client that has half-closed, or whose end may be behind bytes
# that are not read
ASK_EVERY = 5.0
# nanoseconds that a reading of both clocks takes at most, if nothing comes in between
READING = 5000
# nanoseconds that bytes lie with the kernel at most; a stamp of longer ago is another clock's
LONGEST_UNREAD = 60_000_000_000


def stamps_arrivals(sock: socket.socket) -> bool:
    """Ask the kernel to stamp what comes in; a listening socket hands this on to its
    connections. False where it cannot.
    """
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class ConnectionProtocol(Protocol):
    """What a connection tells of itself, and asks."""

    def connection_made(self, transport: Any) -> None:
        """It begins."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""

    def data_received(self, data: bytes, at: float | None) -> None:
        """`at`: when the kernel had them, seconds of the monotonic clock; None where it is not
        known.
        """

    def pause_writing(self) -> None:
        """The client does not read."""

    def resume_writing(self) -> None:
        """It reads again."""

    def answer_what_is_whole(self) -> None:
        """The client sends no more."""

    def ask_whether_gone(self) -> None:
        """Send a client something that it skips, if its answer has not begun."""


class StampedTransport(asyncio.Transport):
    """Of one connection, until `connection_lost`."""

    __slots__ = (
        "_asking",
        "_at_end",
        "_clock",
        "_closing",
        "_descriptor",
        "_expects_head",
        "_full",
        "_held",
        "_loop",
        "_lost",
        "_protocol",
        "_reading",
        "_socket",
        "_unsent",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: ConnectionProtocol,
    ) -> None:
        self._loop, self._socket, self._protocol = loop, sock, protocol
        self._descriptor, self._clock = sock.fileno(), WallClock()
        self._reading = self._closing = self._lost = self._full = False
        self._at_end = False  # the peer's last byte was read
        self._expects_head, self._held = True, b""
        self._unsent = bytearray()
        self._asking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Read what is there, and from then on what comes."""
        self._protocol.connection_made(self)
        if not self._closing:
            self.resume_reading()
            self._read()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Its socket."""
        return self._socket if name == "socket" else default

    def is_closing(self) -> bool:
        """Whether nothing is read or written any more."""
        return self._closing

    # reading

    def pause_reading(self) -> None:
        """What comes in stays with the kernel; the connection's end is still noticed."""
        if self._reading:
            self._stop()
            HangUps.watch(self._loop, self._descriptor, self.abort, self._protocol.ask_whether_gone)
            self._asking = self._loop.call_later(ASK_EVERY, self._ask)

    def resume_reading(self) -> None:
        """Go on, if there can be more."""
        if not (self._reading or self._at_end or self._closing):
            HangUps.forget(self._loop, self._descriptor)
            self._ask_no_more()
            self._reading = True
            self._loop.add_reader(self._descriptor, self._read)

    def has_unread(self) -> bool:
        """Whether bytes of the client wait to be read."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        if data:
            self._protocol.data_received(data, _stamp(ancillary, self._clock))
        else:
            self._end()

    def _end(self) -> None:
        """The peer's last byte was read: it waits for its answers, or is gone."""
        self._stop()
        self._ask_no_more()
        self._at_end = True
        HangUps.watch(self._loop, self._descriptor, self.abort)
        self._asking = self._loop.call_later(ASK_EVERY, self._ask)
        self._protocol.answer_what_is_whole()

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _ask(self) -> None:
        self._asking = self._loop.call_later(ASK_EVERY, self._ask)
        self._protocol.ask_whether_gone()

    def _ask_no_more(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    # writing

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """To the socket, what that does not take to memory; nothing once it is closing."""
        if self._closing:
            return
        if self._held:
            data, self._held = self._held + data, b""
        elif self._expects_head and data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._expects_head, self._held = False, data
            self._loop.call_soon(self._flush)
            return
        if self._unsent:
            self._unsent += data
            self._weigh()
            return
        if (sent := self._taken(data)) < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._descriptor, self._send)
            self._weigh()

    def expect_head(self) -> None:
        """The answer before is whole."""
        self._flush()
        self._expects_head = True

    def _flush(self) -> None:
        if self._held:
            self.write(b"")

    def _send(self) -> None:
        """The socket takes more."""
        del self._unsent[: self._taken(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._descriptor)
            if self._closing:
                self.abort()
                return
        if self._full and len(self._unsent) <= _LOW:
            self._full = False
            self._protocol.resume_writing()

    def _taken(self, data: bytes | bytearray) -> int:
        """Bytes that the socket took; all of them where the connection is broken, and so over."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return len(data)

    def _weigh(self) -> None:
        if not self._full and len(self._unsent) > _HIGH:
            self._full = True
            self._protocol.pause_writing()

    # the end

    def close(self) -> None:
        """Once everything is sent."""
        self._flush()
        if self._closing:
            return
        self._closing = True
        self._stop()
        if not self._unsent:
            self.abort()

    def abort(self) -> None:
        """At once."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._stop()
        self._ask_no_more()
        HangUps.forget(self._loop, self._descriptor)
        if self._unsent:
            self._loop.remove_writer(self._descriptor)
            self._unsent.clear()
        self._held = b""
        self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        try:
            self._protocol.connection_lost(None)
        finally:
            self._socket.close()


class WallClock:
    """The wall clock's stamps on the clock of event loops; what a step of the wall clock came
    between counts as just come.
    """

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = min(self._reading() for _ in range(10))[1]

    @staticmethod
    def _reading() -> tuple[int, int, int]:
        """How long it took, monotonic - wall (wrong by at most half as long), and monotonic.
        Nanoseconds: floats are coarser.
        """
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        wall = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return after - before, (before + after) // 2 - wall, after

    def monotonic(self, wall: int) -> float:
        """The monotonic instant, seconds, of one of the wall clock, nanoseconds."""
        took, offset, now = self._reading()
        # the two clocks differ by steps only: both are slewed alike
        stepped = abs(offset - self._offset) > took + READING
        if took < READING or stepped:
            # else this process stood still between the readings: the last one is better
            self._offset = offset
        at = wall + self._offset
        if stepped or not now - LONGEST_UNREAD < at <= now:
            at = now
        return at * 1e-9


def _stamp(ancillary: list[tuple[int, int, bytes]], clock: WallClock) -> float | None:
    """The kernel's stamp, monotonic; None where it gave none."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return clock.monotonic(int(seconds) * 1_000_000_000 + int(nanoseconds))
    return None
