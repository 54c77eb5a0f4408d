"""Requests on the wire: prepared bytes out, answers counted, with epoll in one thread and no HTTP
library in between.

A connection asks one request at a time. An answer is over with its `content-length` or with the
last chunk of a chunked one; server-sent events are counted when it is. Instants are seconds of
`time.perf_counter`.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

EVENT = b"data: "
_END = b"\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_READ_BYTES = 1 << 18
_ANSWER_LIMIT = 60.0  # seconds without a byte from anybody


class WireError(RuntimeError):
    """A server did not answer as it should."""


def post(path: str, body: object) -> bytes:
    """A whole request with a JSON body."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class Connection:
    """One connection that is kept open, and the answer that it is reading."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.idle = True  # no answer is awaited
        self.missed = False  # the server closed it, as idle, in the instant in which it was asked
        self.request = b""
        self.open()
        self.answer = bytearray()
        self.asked_at = self.first_event_at = 0.0
        self._length: int | None = None  # of the whole answer; None while its head is not there
        self._chunked = False

    def open(self) -> None:
        """Connect, at first or anew: servers close what was idle for some seconds."""
        self.socket = socket.create_connection(("127.0.0.1", self._port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.ended_at = 0.0  # of its last answer; 0 before there is one

    def ask(self, request: bytes) -> None:
        """Send it all; the answer before must be over."""
        self.request, self.answer, self.idle = request, bytearray(), False
        self.first_event_at, self._length, self._chunked = 0.0, None, False
        self.asked_at = time.perf_counter()
        if self.socket.send(request) != len(request):
            raise WireError("a request did not fit into the socket's buffer; expected small ones")

    def read(self) -> bool:
        """Take what is there; whether the answer is over now."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        self.missed = not data and not self.answer and bool(self.ended_at)
        if self.missed:
            return False
        if not data:
            raise WireError(
                f"the connection was closed within an answer: {bytes(self.answer[:200])!r}"
            )
        self.answer += data
        if self._length is None and not self._read_head():
            return False
        if not self.first_event_at and EVENT in data:
            self.first_event_at = time.perf_counter()
        over = (
            self.answer.endswith(_END) if self._chunked else len(self.answer) >= (self._length or 0)
        )
        if over:
            self.ended_at, self.idle = time.perf_counter(), True
        return over

    def _read_head(self) -> bool:
        end = self.answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.answer[: end + 2])
        if not head.startswith(b"HTTP/1.1 200"):
            raise WireError(f"got {bytes(self.answer[:400])!r}; expected status 200")
        self._chunked = _CHUNKED.search(head) is not None
        length = _LENGTH.search(head)
        self._length = end + 4 + (int(length[1]) if length else 0)
        return True


@dataclass
class Load:
    """Counts of answers and events; `seconds` from the first request to the last answer."""

    answers: int = 0
    events: int = 0
    sizes: set[int] = field(default_factory=set)  # events of an answer
    seconds: float = 0.0
    sender_cpu: float = 0.0  # processor seconds of this process

    def add(self, answer: bytearray) -> None:
        events = answer.count(EVENT)
        self.answers += 1
        self.events += events
        self.sizes.add(events)


class Pool:
    """Open connections to one server."""

    def __init__(self, port: int, size: int) -> None:
        self._connections = [Connection(port) for _ in range(size)]
        self._poll = select.epoll()
        for connection in self._connections:
            self._poll.register(connection.socket, select.EPOLLIN)
        self._by_number = {
            connection.socket.fileno(): connection for connection in self._connections
        }

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()
        for connection in self._connections:
            connection.socket.close()

    def answered(self, timeout: float) -> Iterator[Connection]:
        """Yield connections whose answers are over, after at most `timeout` seconds."""
        for number, _ in self._poll.poll(timeout):
            connection = self._by_number[number]
            if connection.idle:
                self._renew(connection)
            elif connection.read():
                yield connection
            elif connection.missed:
                self._renew(connection)
                connection.ask(connection.request)

    def _renew(self, connection: Connection) -> None:
        """The server has closed it while nobody asked."""
        if connection.socket.recv(1):
            raise WireError("got more of an answer behind its end")
        self._poll.unregister(connection.socket)
        del self._by_number[connection.socket.fileno()]
        connection.socket.close()
        connection.open()
        self._poll.register(connection.socket, select.EPOLLIN)
        self._by_number[connection.socket.fileno()] = connection

    def keep_asking(self, requests: Iterable[bytes], seconds: float = float("inf")) -> Load:
        """A closed loop: whoever is answered asks the next one, until there are none left or
        time is up. Waits for what was asked.
        """
        load, left = Load(), iter(requests)
        list(self.answered(0.0))  # those that were closed since the last loop are opened anew
        began, cpu = time.perf_counter(), time.process_time()
        open_answers = 0
        for connection, request in zip(self._connections, left, strict=False):
            connection.ask(request)
            open_answers += 1
        end = began + seconds
        heard = began
        while open_answers:
            for connection in self.answered(1.0):
                heard = connection.ended_at
                load.add(connection.answer)
                following = next(left, None) if heard < end else None
                if following is None:
                    open_answers -= 1
                else:
                    connection.ask(following)
            if time.perf_counter() - heard > _ANSWER_LIMIT:
                raise WireError(f"no answer ended for {_ANSWER_LIMIT:.0f} s")
        load.seconds, load.sender_cpu = time.perf_counter() - began, time.process_time() - cpu
        return load

    def ask_at(self, timetable: Sequence[tuple[float, bytes]]) -> list[tuple[float, float]]:
        """An open loop: request k leaves at its instant after the start. Seconds to the first
        event and to the end of each, as they end.
        """
        free = list(self._connections)
        durations: list[tuple[float, float]] = []
        began = time.perf_counter()
        waiting = iter(timetable)
        due = next(waiting, None)
        while due is not None or len(free) < len(self._connections):
            now = time.perf_counter() - began
            while due is not None and due[0] <= now:
                if not free:
                    raise WireError(
                        f"got more than {len(self._connections)} requests unanswered; expected a "
                        "rate that the server can bear"
                    )
                free.pop().ask(due[1])
                due = next(waiting, None)
            for connection in self.answered(
                1.0 if due is None else max(0.0, due[0] - (time.perf_counter() - began))
            ):
                free.append(connection)
                durations.append(
                    (
                        connection.first_event_at - connection.asked_at,
                        connection.ended_at - connection.asked_at,
                    )
                )
        return durations
