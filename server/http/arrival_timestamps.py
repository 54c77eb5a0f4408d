"""When a request arrived: the instant at which the kernel had its last byte, however busy the event
loop was then.

A stamp taken by the event loop is the instant at which the loop came to it. At 1,000 requests/s a
loop that spends 0.4 ms on each is busy when every third one comes: those are stamped one after the
other when it is free again, no two of them closer than its own work, and a perfect Poisson stream
looks regular and bunched at once. The kernel stamps a packet as it comes in (SO_TIMESTAMPNS,
Linux), but hands the stamp out through `recvmsg` only, which no event loop calls. So the
transport's own reading is paused and the socket is read here; writing stays the transport's.
Elsewhere the stamp is the loop's.

A client may send its last byte and wait for its answers (a half-closed connection, RFC 9112 leaves
it to the server): what has come whole is answered, and the connection closed then. Whether it waits
or has gone is asked by an interim response, `100 Continue`, which HTTP/1.1 clients skip, at once
and every 5 s: one that has gone resets the connection, and is noticed by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kendall.server.http.client_connection import CONNECTION, ClientConnection, HangUps
from kendall.server.http.descriptors import Room
from kendall.server.runtime.writing import JoiningTransport

log = logging.getLogger("kendall")
RECEIVED_AT = "kendall.received_at"  # key of a request's scope; seconds of the monotonic clock
# Linux on every architecture but a few; Python's socket module does not name it
SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_READ_BYTES = 1 << 16
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADE = frozenset({b"upgrade", b"http2-settings"})
# seconds between two questions to a client that has half-closed, or whose end may be behind bytes
# that are not read
ASK_EVERY = 5.0
_RESET = struct.pack("ii", 1, 0)
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


class StampedReader:
    """Reads one connection in place of its transport, which goes on writing."""

    def __init__(
        self, protocol: StampedProtocol, transport: asyncio.Transport, sock: socket.socket
    ) -> None:
        self._protocol = protocol
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # a second descriptor of the same connection: event loops refuse one that a transport holds
        self._socket = socket.socket(
            sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno())
        )
        self._clock = WallClock()
        self._reading = False
        self._at_end = False  # the peer's last byte was read
        self._asking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Read what is there and take over. The transport begins to read when connection_made
        returns: what comes in before the loop's next turn is its own, and stamped at once,
        because the loop polls next.
        """
        self._loop.call_soon(self._take_over)
        self._read()

    def _take_over(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self.resume_reading()

    def pause_reading(self) -> None:
        """What comes in stays with the kernel; the connection's end is still noticed."""
        if self._reading:
            self._stop()
            HangUps.watch(
                self._loop,
                self._socket.fileno(),
                self._transport.abort,
                self._protocol.ask_whether_gone,
            )
            self._asking = self._loop.call_later(ASK_EVERY, self._ask)

    def resume_reading(self) -> None:
        """Go on, if there can be more."""
        if not (self._reading or self._at_end) and self._socket.fileno() >= 0:
            HangUps.forget(self._loop, self._socket.fileno())
            self._ask_no_more()
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._read)

    def end(self) -> None:
        """The peer's last byte was read: it waits for its answers, or is gone."""
        self._stop()
        self._ask_no_more()
        self._at_end = True
        HangUps.watch(self._loop, self._socket.fileno(), self._transport.abort)
        self._asking = self._loop.call_later(ASK_EVERY, self._ask)
        self._protocol.answer_what_is_whole()

    def close(self) -> None:
        """The connection is lost: let its second descriptor go, or the peer never sees the end."""
        self._stop()
        self._ask_no_more()
        if self._socket.fileno() >= 0:
            HangUps.forget(self._loop, self._socket.fileno())
        self._socket.close()

    def _ask(self) -> None:
        self._asking = self._loop.call_later(ASK_EVERY, self._ask)
        self._protocol.ask_whether_gone()

    def _ask_no_more(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def has_unread(self) -> bool:
        """Whether bytes of the client wait to be read."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _read(self) -> None:
        if self._transport.is_closing():
            self._stop()
            return
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._stop()
            self._transport.abort()
            return
        if data:
            self._protocol.data_received(data, _stamp(ancillary, self._clock))
        else:
            self.end()


class PausedTransport:
    """What flow control pauses where the transport reads by itself (TLS): one that is paused
    does not notice its end.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, sock: socket.socket
    ) -> None:
        self._loop, self._transport, self._socket = loop, transport, sock
        self._descriptor: int | None = None

    def pause_reading(self) -> None:
        """TLS has no half-closed connections: whoever sends no more is gone."""
        self._transport.pause_reading()
        if self._descriptor is None:
            with contextlib.suppress(OSError):  # it is closing, or no descriptor is left
                self._descriptor = os.dup(self._socket.fileno())
                HangUps.watch(
                    self._loop, self._descriptor, self._transport.abort, self._transport.abort
                )

    def resume_reading(self) -> None:
        """Go on."""
        self.close()
        self._transport.resume_reading()

    def close(self) -> None:
        """Let the second descriptor go."""
        if self._descriptor is not None:
            HangUps.forget(self._loop, self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


class WallClock:
    """The wall clock's stamps on the clock of event loops; what a step of the wall clock came
    between counts as just come.
    """

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


class StampedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which tells the application when a request's last byte came in and
    when its client is gone.
    """

    reader_patience: float = 0.0  # seconds that a client may leave its answer unread; 0: for ever
    room: Room | None = None  # of all connections of a server; None: as many as the system permits
    _received_at: float
    _connection: ClientConnection
    _writing: JoiningTransport
    _reader: StampedReader | None = None
    _paused: PausedTransport | None = None
    _in_room = False
    _unfinished = True  # the room may close it
    _fed = _again = b""  # what the parser has now; what it is to have after it
    _slow: asyncio.TimerHandle | None = None
    _before: Sequence[
        RequestResponseCycle
    ] = ()  # pipelined requests before the last one, answered or not

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read it here, where the kernel stamps."""
        super().connection_made(transport)
        self._writing = JoiningTransport(self.loop, transport)
        self.transport = cast("asyncio.Transport", self._writing)
        self._connection = ClientConnection(self._read_on, transport.abort)
        sock: Any = transport.get_extra_info("socket")
        if sock is None or not self._may_stay(sock):
            return
        if transport.get_extra_info("sslcontext") is not None:
            self._paused = PausedTransport(self.loop, transport, sock)
            self.flow = FlowControl(self._paused)  # type: ignore[arg-type]
        elif stamps_arrivals(sock):
            self._reader = StampedReader(self, transport, sock)
            self.flow = FlowControl(self._reader)  # type: ignore[arg-type]
            self._reader.start()

    def _may_stay(self, sock: socket.socket) -> bool:
        """Whether there is room for it; one that takes the last room is served itself, by the
        transport's own reading.
        """
        if self.room is None:
            return True
        place = self.room.enter(sock.fileno(), self.client, self._close_unfinished)
        self._in_room = True
        if place == "any":
            return True
        if place == "probes":
            self.app = cast("Any", self.room.probes_only(cast("Any", self.app)))
            self.loop.call_later(self.room.longest_probe, self._end_probe)
        else:
            self.transport.write(self.room.rejection(place))
            self.transport.close()
        return False

    def _close_unfinished(self) -> None:
        self._writing.abort()

    def note_unfinished(self, *, in_body: bool) -> None:
        """A part of a request is there, and no call is in service."""
        if self.room is not None and self._in_room:
            self._unfinished = True
            self.room.unfinished(self._close_unfinished, in_body=in_body)

    def _end_probe(self) -> None:
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of it."""
        self._stop_waiting()
        if self.room is not None and self._in_room:
            self._in_room = False
            self.room.leave(self.client, self._close_unfinished)
        for reader in (self._reader, self._paused):
            if reader is not None:
                reader.close()
        self._writing.let_go()
        super().connection_lost(exc)
        for cycle in (
            self._before
        ):  # uvicorn tells the last one only, and would answer the others on a closed connection
            cycle.disconnected = True
            cycle.message_event.set()
        self._connection.lose()

    def _read_on(self) -> None:
        self.flow.resume_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The transport read the end itself, before its reading was taken over."""
        if self._reader is None:
            return None
        self._reader.end()
        return True  # not to be closed yet

    def answer_what_is_whole(self) -> None:
        """No more comes: a request that is not whole never will be, the others are answered, the
        last of them closes the connection.
        """
        if (
            self.cycle is not None
            and self.cycle.more_body
            and self.pipeline
            and self.pipeline[0][0] is self.cycle
        ):
            self.pipeline.popleft()
        whole = [cycle for cycle in self._unanswered() if not cycle.more_body]
        if not whole or whole[0].scope["http_version"] != "1.1":
            self.transport.close()
            return
        whole[-1].keep_alive = False
        self.ask_whether_gone()

    def ask_whether_gone(self) -> None:
        """By an interim response where nothing of the answer has been sent; elsewhere what is
        sent next asks.
        """
        oldest = next(iter(self._unanswered()), None)
        if (
            oldest is None
            or oldest.response_started
            or oldest.scope["http_version"] != "1.1"
            or self.transport.is_closing()
        ):
            return
        self.transport.write(CONTINUE)

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [
            cycle
            for cycle in (*self._before, self.cycle)
            if cycle is not None and not cycle.response_complete
        ]

    def on_response_complete(self) -> None:
        """The next answer may begin."""
        self._writing.expect_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: uvicorn has the answer wait from here on, and somebody has
        to end the wait.
        """
        super().pause_writing()
        if self.reader_patience > 0 and self._slow is None:
            self._slow = self.loop.call_later(self.reader_patience, self._cut)

    def resume_writing(self) -> None:
        """It reads again."""
        self._stop_waiting()
        super().resume_writing()

    def _stop_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _cut(self) -> None:
        self._slow = None
        log.info(
            "disconnected a client that left its response unread for %g s", self.reader_patience
        )
        if (sock := self.transport.get_extra_info("socket")) is not None:
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )  # the kernel lets go of what it holds too
        self.transport.abort()

    def data_received(self, data: bytes, at: float | None = None) -> None:
        """From the reader with its stamp, or from the transport."""
        self._received_at = time.clock_gettime(time.CLOCK_MONOTONIC) if at is None else at
        while data:
            self._fed, self._again = data, b""
            super().data_received(data)
            data = self._again

    def _unsupported_upgrade_warning(self) -> None:
        """The parser takes what follows a head with `Upgrade` for another protocol: hear the
        request again without it (RFC 9110, 7.8).
        """
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response(
                "got CONNECT; expected another method: this server is not a proxy"
            )
            return
        stopped_at: int = sys.exc_info()[1].args[0]  # type: ignore[union-attr]  # an httptools.HttpParserUpgrade
        self._again = (
            _without_upgrade(self.parser, self.url, self.scope["headers"]) + self._fed[stopped_at:]
        )
        self.parser = httptools.HttpRequestParser(
            self
        )  # the other one ignores what follows `Connection: close`
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def on_headers_complete(self) -> None:
        """A request begins; the one before it may still be without an answer."""
        if self.parser.should_upgrade():
            return  # it is heard again
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilClose()
        if before is None or before.response_complete:
            self._before = ()
        elif before is not self.cycle:
            self._before = (*self._before, before)

    def on_message_complete(self) -> None:
        """The last byte is there."""
        if self.parser.should_upgrade():
            return
        if self._unfinished and self.room is not None:
            self._unfinished = False
            self.room.whole(self._close_unfinished)
        scope = cast("dict[str, Any]", self.cycle.scope)
        scope[RECEIVED_AT] = self._received_at
        scope[CONNECTION] = self._connection
        super().on_message_complete()


class _UntilClose(int):
    """The length of an answer that ends with its connection: HTTP/1.0 knows no chunks (RFC 9112,
    6.1).
    """

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClose:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _without_upgrade(parser: Any, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request once more, without what asks for another protocol."""
    lines = [b"%s %s HTTP/%s" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [token for token in value.split(b",") if token.strip().lower() not in _UPGRADE]
            if kept:
                lines.append(b"connection:" + b",".join(kept))
        elif name not in _UPGRADE:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def protocol_with(
    base: type[StampedProtocol], reader_patience: float, room: Room | None = None
) -> type[StampedProtocol]:
    """`base` for a gateway whose clients may leave an answer unread for so long, seconds, and that
    has so much room for connections.

    What a slow reader makes the gateway hold is bounded: 64 KiB in the transport, and what of its
    own answer is made meanwhile (its token limit). Unread means that the transport did not come
    down from 64 to 16 KiB in that time.
    """
    return cast(
        "type[StampedProtocol]",
        type(base.__name__, (base,), {"reader_patience": reader_patience, "room": room}),
    )
