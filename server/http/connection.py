"""HTTP/1.1 on one connection (`server.wire.transport`, or a TLS transport of the event loop): the
application is told when a request's last byte came in and when its client is gone.

A client may send its last byte and wait for its answers (a half-closed connection): what has come
whole is answered, and the connection closed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
import urllib.parse
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from kendall.server.http.client_connection import CONNECTION, ClientConnection
from kendall.server.http.descriptors import Room
from kendall.server.wire.cycle import CLOSE, CONTINUE, Cycle
from kendall.server.wire.hang_ups import HangUps
from kendall.server.wire.transport import StampedTransport

log = logging.getLogger("kendall")
RECEIVED_AT = "kendall.received_at"  # key of a request's scope; seconds of the monotonic clock
ENOUGH = 1 << 16  # bytes of a body that nobody has asked for, beyond which reading is paused
_UPGRADE = frozenset({b"upgrade", b"http2-settings"})
_RESET = struct.pack("ii", 1, 0)
_ASGI = {"version": "3.0", "spec_version": "2.3"}


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


class StampedProtocol(asyncio.Protocol):
    """Of one connection, in the room that its server has for them; its requests are answered in
    turn.
    """

    reader_patience: float = 0.0  # seconds that a client may leave its answer unread; 0: for ever
    room: Room | None = None  # of all connections of a server; None: as many as the system permits
    __slots__ = (
        "_again",
        "_app",
        "_before",
        "_config",
        "_connection",
        "_fed",
        "_idle_since",
        "_idle_timer",
        "_in_room",
        "_paused",
        "_pipeline",
        "_plain",
        "_read_paused",
        "_reader",
        "_received_at",
        "_slow",
        "_state",
        "_unfinished",
        "_writable",
        "client",
        "cycle",
        "expects_continue",
        "headers",
        "loop",
        "parser",
        "scope",
        "server",
        "transport",
        "url",
        "write_paused",
    )

    def __init__(self, config: uvicorn.Config, server_state: ServerState) -> None:
        self.loop = asyncio.get_running_loop()
        self._config, self._state = config, server_state
        self._app = cast("ASGIApp", config.loaded_app)
        self.parser: Any = self._new_parser()
        self.transport: asyncio.Transport
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self._connection: ClientConnection
        self._reader: asyncio.Transport | PausedTransport
        self._plain: StampedTransport | None = None
        self._paused: PausedTransport | None = None  # of TLS
        self._in_room = self._read_paused = self.write_paused = False
        self._unfinished = True  # the room may close it
        self._fed = self._again = b""  # what the parser has now; what it is to have after it
        self._received_at = 0.0
        self._slow: asyncio.TimerHandle | None = None
        self._writable: asyncio.Event | None = None  # of whoever waits for a client to read
        self._idle_since: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        # of the request that came last
        self.scope: Scope = {}
        self.url, self.headers = b"", cast("list[tuple[bytes, bytes]]", [])
        self.expects_continue = False
        self.cycle: Cycle | None = None
        # pipelined requests before the last one, answered or not; those that wait for their turn
        self._before: tuple[Cycle, ...] = ()
        self._pipeline: deque[Cycle] | None = None

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # an answer may end the connection while pipelined requests are read
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins, if there is room for it."""
        self._state.connections.add(cast("Any", self))
        self.transport = self._reader = cast("asyncio.Transport", transport)
        self._connection = ClientConnection(self.resume_reading, self.transport.abort)
        sock = transport.get_extra_info("socket")
        if isinstance(transport, StampedTransport):
            self._plain = transport
        if sock is None:
            return
        self.client, self.server = _address(sock.getpeername), _address(sock.getsockname)
        if self._may_stay(sock) and self._plain is None:
            self._reader = self._paused = PausedTransport(self.loop, self.transport, sock)

    def _may_stay(self, sock: socket.socket) -> bool:
        """Whether there is room for it, for a probe at least."""
        if self.room is None:
            return True
        place = self.room.enter(sock.fileno(), self.client, self._close_unfinished)
        self._in_room = True
        if place == "any":
            return True
        if place == "probes":
            self._app = self.room.probes_only(self._app)
            self.loop.call_later(self.room.longest_probe, self._end_probe)
        else:
            self.transport.write(self.room.rejection(place))
            self.transport.close()
        return False

    def _close_unfinished(self) -> None:
        self.transport.abort()

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
        del exc
        self._state.connections.discard(cast("Any", self))
        self._stop_waiting()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.room is not None and self._in_room:
            self._in_room = False
            self.room.leave(self.client, self._close_unfinished)
        if self._paused is not None:
            self._paused.close()
        for cycle in (*self._before, self.cycle):
            if cycle is not None:
                cycle.lose()
        self._before, self.cycle, self._pipeline, self.parser = (), None, None, None
        self._resume_writing()
        self._connection.lose()

    def shutdown(self) -> None:
        """No request after this one."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    @property
    def pipelined(self) -> bool:
        """Whether requests wait for their turn."""
        return bool(self._pipeline)

    @property
    def resting(self) -> bool:
        """Whether nothing has come since the last answer."""
        return self._idle_since is not None

    def rest(self) -> None:
        """Between two requests; one timer for the whole connection."""
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self._config.timeout_keep_alive, self._rested)

    def _rested(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return
        left = self._idle_since + self._config.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._rested)
        else:
            self.transport.close()

    def answer_what_is_whole(self) -> None:
        """No more comes: a request that is not whole never will be, the others are answered, the
        last of them closes the connection.
        """
        if self.cycle is not None and self.cycle.more_body and self._pipeline:
            self._pipeline.pop()
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

    def _unanswered(self) -> list[Cycle]:
        return [
            cycle
            for cycle in (*self._before, self.cycle)
            if cycle is not None and not cycle.response_complete
        ]

    # reading

    def pause_reading(self) -> None:
        """What comes in stays with the kernel."""
        if not self._read_paused:
            self._read_paused = True
            self._reader.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._read_paused:
            self._read_paused = False
            self._reader.resume_reading()

    def data_received(self, data: bytes, at: float | None = None) -> None:
        """`at`: when the kernel had them, seconds of the monotonic clock; None: now."""
        self._received_at = time.clock_gettime(time.CLOCK_MONOTONIC) if at is None else at
        self._idle_since = None
        while data:
            self._fed, self._again = data, b""
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._hear_again(upgrade.args[0])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            data = self._again
        self._fed = b""

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        head = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(msg)
        self.transport.write(STATUS_LINE[400] + head + msg.encode())
        self.transport.close()

    def _hear_again(self, stopped_at: int) -> None:
        """The parser takes what follows a head with `Upgrade` for another protocol: hear the
        request again without it (RFC 9110, 7.8).
        """
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response(
                "got CONNECT; expected another method: this server is not a proxy"
            )
            return
        self._again = (
            _without_upgrade(self.parser, self.url, self.scope["headers"]) + self._fed[stopped_at:]
        )
        self.parser = self._new_parser()  # the other one ignores what follows `Connection: close`

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self.url, self.headers, self.expects_continue = b"", [], False
        self.scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": "http" if self._paused is None else "https",
            "root_path": "",
            "headers": self.headers,
        }

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head, or a trailer."""
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expects_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """A request begins; the one before it may still be without an answer."""
        parser, scope = self.parser, self.scope
        scope["method"] = parser.get_method().decode("ascii")
        version = parser.get_http_version()
        if version != "1.1":
            scope["http_version"] = version
        if parser.should_upgrade():
            return  # it is heard again
        target = httptools.parse_url(self.url)
        path = target.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = target.path, target.query or b""
        before = self.cycle
        cycle = self.cycle = Cycle(
            self,
            scope,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            expects_continue=self.expects_continue,
        )
        if before is None or before.response_complete:
            self._before = ()
            self._start(cycle)
        else:
            self._before = (*self._before, before)
            self.pause_reading()
            if self._pipeline is None:
                self._pipeline = deque()
            self._pipeline.append(cycle)

    def _start(self, cycle: Cycle) -> None:
        tasks = self._state.tasks
        task = self.loop.create_task(cycle.run(self._app))
        task.add_done_callback(tasks.discard)
        tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.parser.should_upgrade():
            return
        cycle.add(body)
        if len(cycle.body) > ENOUGH:
            self.pause_reading()
        cycle.tell()

    def on_message_complete(self) -> None:
        """The last byte is there."""
        cycle = self.cycle
        if cycle is None or self.parser.should_upgrade():
            return
        if self._unfinished and self.room is not None:
            self._unfinished = False
            self.room.whole(self._close_unfinished)
        cycle.scope[RECEIVED_AT] = self._received_at
        cycle.scope[CONNECTION] = self._connection
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.tell()

    # writing

    def default_headers(self) -> tuple[bytes, bool]:
        """What every head has, and whether that ends the connection."""
        return _lines(tuple(self._state.default_headers))

    def on_response_complete(self) -> None:
        """The next answer may begin."""
        self._state.total_requests += 1
        if self._plain is not None:
            self._plain.expect_head()
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self._pipeline:
            self._start(self._pipeline.popleft())
        else:
            self.rest()

    def pause_writing(self) -> None:
        """The client does not read: its answer waits, and somebody has to end the wait."""
        self.write_paused = True
        if self.reader_patience > 0 and self._slow is None:
            self._slow = self.loop.call_later(self.reader_patience, self._cut)

    def resume_writing(self) -> None:
        """It reads again."""
        self._stop_waiting()
        self._resume_writing()

    def _resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Until the client reads."""
        if self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

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
            # the kernel lets go of what it holds too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


@lru_cache(maxsize=4)  # they change once a second, with the date
def _lines(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bool]:
    return b"".join(b"%b: %b\r\n" % header for header in headers), CLOSE in headers


def _address(ask: Any) -> tuple[str, int] | None:
    """Of a socket's end; None where it has none any more."""
    try:
        found = ask()
    except OSError:
        return None
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


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
        type(
            base.__name__,
            (base,),
            {"__slots__": (), "reader_patience": reader_patience, "room": room},
        ),
    )
