"""Clients that do not behave, over real sockets: malformed, huge, slow, half-closed, pipelined,
gone. Each says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import numpy as np

HEAD_TIMEOUT, BODY_TIMEOUT, READER_PATIENCE = 0.4, 0.8, 0.5  # seconds, of the gateway under test
MAX_BODY = 4096
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"nonsense\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    b"GET http://x HTTP/1.1\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\n\r\n",
    _POST + b"content-length: many\r\n\r\n",
    _POST + b"content-length: -5\r\n\r\n",
    _POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    _POST + b"content-length: 99999999999999999999999\r\n\r\n",
    _POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",  # smuggling
    _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    _POST + b"transfer-encoding: chunked\r\n\r\n5\r\nabcdefgh",
]
NO_CALL = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"null",
    b"[" * 4000,
    b'{"a":' * 600,
    b'{"model": "tiny", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"model": "tiny", "prompt": 1e999}',
    b'{"model": "tiny", "prompt": [5], "max_tokens": -1}',
    b'{"model": "tiny", "prompt": [5], "max_tokens": 99999999999999999999}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": [5], "prompt": {}}',
    b'{"model": "tiny", "prompt": [5], "temperature": NaN}',
    b'{"model": "tiny", "n": 128, "prompt": [' + b'"a",' * 900 + b'"a"]}',  # 115,328 sequences
    b'{"model": "tiny", "prompt": [5], "stop": "' + b"x" * 2000 + b'"}',
]


def call(tokens: int, *, stream: bool = False, more: bytes = b"") -> bytes:
    """A whole request that is in order."""
    fields = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return post(json.dumps(fields).encode(), more)


def post(body: bytes, more: bytes = b"") -> bytes:
    """Any bytes as a body."""
    return _POST + more + b"content-length: %d\r\n\r\n" % len(body) + body


CLOSE = b"connection: close\r\n"


class Client:
    """One connection; what came back is parsed as a sequence of answers."""

    def __init__(self, rng: np.random.Generator, port: int) -> None:
        self.rng, self._port = rng, port
        self.statuses: list[int] = []
        self.whole = 0
        self.reset = False
        self._parser: Any = httptools.HttpResponseParser(self)

    async def open(self) -> Client:
        """Connect; little is read ahead."""
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=1024
        )
        return self

    def on_status(self, _: bytes) -> None:
        """httptools: the line of an answer."""
        self.statuses.append(self._parser.get_status_code())

    def on_message_complete(self) -> None:
        """httptools: its end."""
        self.whole += 1

    async def send(self, data: bytes) -> bool:
        """False where the gateway has closed."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except (
            ConnectionError,
            RuntimeError,
        ):  # uvloop raises the latter for a connection that is closed
            self.reset = True
        return not (self.reset or self.writer.is_closing())

    async def read(self, answers: int = 10**9) -> None:
        """Until the gateway closes, or so many answers are whole."""
        with contextlib.suppress(ConnectionError):
            while self.whole < answers and (data := await self.reader.read(1 << 16)):
                self._parser.feed_data(data)

    async def drip(self, data: bytes, pause: float) -> None:
        """A byte at a time, until an answer comes or the end."""
        reading = asyncio.create_task(self.read(1))
        for index in range(len(data)):
            if reading.done() or not await self.send(data[index : index + 1]):
                break
            await asyncio.sleep(pause)
        await reading

    def half_close(self) -> None:
        """Nothing more will be sent; answers could still be read."""
        with contextlib.suppress(OSError):
            self.writer.write_eof()

    def abort(self) -> None:
        """A reset instead of an orderly end."""
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    @property
    def label(self) -> str:
        """How it ended, for the counts."""
        return " ".join(map(str, self.statuses)) or "closed"


Scene = Callable[[Client], Awaitable[Any]]


async def in_order(c: Client) -> None:
    await c.send(call(int(c.rng.integers(1, 12)), stream=bool(c.rng.integers(2)), more=CLOSE))
    await c.read()


async def in_pieces(c: Client) -> None:
    data = call(3, more=CLOSE)
    for piece in (data[:5], data[5:60], data[60:-20], data[-20:]):
        await c.send(piece)
        await asyncio.sleep(0.01)
    await c.read()


async def pipelined(c: Client) -> None:
    await c.send(
        call(2)
        + call(5, stream=True)
        + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        + call(1, more=CLOSE)
    )
    await c.read()


async def pipelined_behind_a_body(c: Client) -> None:
    """Chunks, a rejection in the middle, and one more that is in order."""
    chunked = _POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n"
    await c.send(chunked + call(2) + post(b"{") + call(1, more=CLOSE))
    await c.read()


async def pipelined_then_no_http(c: Client) -> None:
    await c.send(call(3) + NO_HTTP[int(c.rng.integers(len(NO_HTTP)))])
    await c.read()


async def pipelined_and_gone(c: Client) -> None:
    await c.send(call(50, stream=True) * 40)
    await asyncio.sleep(float(c.rng.exponential(0.02)))


async def no_http(c: Client) -> None:
    await c.send(NO_HTTP[int(c.rng.integers(len(NO_HTTP)))])
    await c.read()


async def random_bytes(c: Client) -> None:
    await c.send(c.rng.bytes(int(c.rng.integers(1, 3000))))
    await c.read()


async def no_call(c: Client) -> None:
    await c.send(post(NO_CALL[int(c.rng.integers(len(NO_CALL)))], CLOSE))
    await c.read()


async def endless_head(c: Client) -> None:
    reading = asyncio.create_task(c.read(1))
    await c.send(_POST + b"x: ")
    while not reading.done() and await c.send(b"a" * 8192):  # noqa: ASYNC110 - as fast as it goes
        await asyncio.sleep(0)
    await reading


async def too_many_headers(c: Client) -> None:
    await c.send(_POST + b"h: x\r\n" * 300 + b"\r\n")
    await c.read()


async def huge_by_its_length(c: Client) -> None:
    reading = asyncio.create_task(c.read())
    await c.send(_POST + b"content-length: 1000000000000\r\n\r\n")
    while not reading.done() and await c.send(b" " * 65536):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await reading


async def huge_in_chunks(c: Client) -> None:
    reading = asyncio.create_task(c.read())
    await c.send(_POST + b"transfer-encoding: chunked\r\n\r\n")
    while not reading.done() and await c.send(b"1000\r\n" + b" " * 4096 + b"\r\n"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await reading


async def slow_head(c: Client) -> None:
    await c.drip(_POST + b"x: " + b"a" * 200, 0.02)


async def slow_body(c: Client) -> None:
    await c.send(_POST + b"content-length: 200\r\n\r\n")
    await c.drip(b" " * 200, 0.02)


async def slow_behind_an_answer(c: Client) -> None:
    """Kept alive, then a head that does not end."""
    await c.send(call(2))
    await c.read(1)
    await c.drip(_POST + b"x: " + b"a" * 200, 0.02)
    await c.read()


async def silent(c: Client) -> None:
    await c.read()


async def blank_lines(c: Client) -> None:
    await c.drip(b"\r\n" * 100, 0.02)


async def half_closed_in_a_head(c: Client) -> None:
    await c.send(_POST[: int(c.rng.integers(1, len(_POST)))])
    c.half_close()
    await c.read()


async def half_closed_in_a_body(c: Client) -> None:
    await c.send(call(5)[:-10])
    c.half_close()
    await c.read()


async def half_closed_behind_a_call(c: Client) -> None:
    await c.send(call(200, stream=bool(c.rng.integers(2))))
    await asyncio.sleep(float(c.rng.exponential(0.01)))
    c.half_close()
    await c.read()


async def gone_somewhere(c: Client) -> None:
    data = call(100, stream=True)
    await c.send(data[: int(c.rng.integers(0, len(data) + 200))])
    await asyncio.sleep(float(c.rng.exponential(0.02)))


async def reset_somewhere(c: Client) -> None:
    await gone_somewhere(c)
    c.abort()


async def reads_late(c: Client) -> None:
    await c.send(call(100, stream=True) * 4)
    await asyncio.sleep(READER_PATIENCE + 0.5)
    await c.read()


async def waits_for_leave(c: Client) -> None:
    head, body = call(3, more=CLOSE + b"expect: 100-continue\r\n").split(b"\r\n\r\n")
    await c.send(head + b"\r\n\r\n")
    await asyncio.sleep(0.02)
    await c.send(body)
    await c.read()


async def asks_for_another_protocol(c: Client) -> None:
    await c.send(
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: "
        b"websocket\r\n\r\n"
    )
    await c.read()


# what each may be answered; "closed": no answer. A client that leaves first may see any beginning
# of its answers.
EXPECTED: dict[Scene, set[str]] = {
    in_order: {"200"},
    in_pieces: {"200"},
    pipelined: {"200 200 200 200"},
    pipelined_behind_a_body: {"400 200 400 200"},
    pipelined_then_no_http: {"closed", "200", "200 400", "200 413"},
    pipelined_and_gone: {"closed"},
    no_http: {"400", "413"},
    random_bytes: {"400", "408", "closed"},
    no_call: {"400"},
    endless_head: {"431", "closed"},
    too_many_headers: {"431"},
    huge_by_its_length: {"413", "closed"},
    huge_in_chunks: {"413", "closed"},
    slow_head: {"408"},
    slow_body: {"408"},
    slow_behind_an_answer: {"200 408", "200"},
    silent: {"closed"},
    blank_lines: {"closed"},
    half_closed_in_a_head: {"closed", "400"},
    half_closed_in_a_body: {"closed", "400"},
    half_closed_behind_a_call: {"100 200", "200"},  # an interim response asks whether it has gone
    gone_somewhere: {"closed"},
    reset_somewhere: {"closed"},
    reads_late: {"200 200 200 200"},
    waits_for_leave: {"100 200"},
    asks_for_another_protocol: {"200"},
}


async def play(scene: Scene, rng: np.random.Generator, port: int, limit: float) -> Client:
    """The client of a scene, closed at its end. Raises TimeoutError: the gateway neither
    answered nor closed.
    """
    client = await Client(rng, port).open()
    try:
        async with asyncio.timeout(limit):
            await scene(client)
    finally:
        client.writer.close()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()
    return client
