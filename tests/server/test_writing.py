"""A head goes out with what follows it, and never later than the event loop's next turn."""

import asyncio
import gc
import http.client
import weakref
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from kendall.server.http.arrival_timestamps import StampedProtocol
from kendall.server.runtime.writing import JoiningTransport
from tests.serving import on_a_socket

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Recording:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


async def joining() -> tuple[Recording, JoiningTransport]:
    below = Recording()
    return below, JoiningTransport(asyncio.get_running_loop(), cast("Any", below))


def test_a_head_and_what_follows_it_are_one_write() -> None:
    async def main() -> None:
        below, transport = await joining()
        transport.write(HEAD)
        assert below.written == []
        transport.write(b"{}")
        transport.write(b"more")
        await asyncio.sleep(0)
        assert below.written == [HEAD + b"{}", b"more"]

    asyncio.run(main())


def test_a_head_waits_for_one_turn_of_the_loop_only() -> None:
    async def main() -> None:
        below, transport = await joining()
        transport.write(HEAD)
        await asyncio.sleep(0)
        assert below.written == [HEAD]
        transport.write(b"{}")
        assert below.written == [HEAD, b"{}"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 100 Continue\r\n\r\n", b"data: {}\n\n", b"", b"5\r\nHTTP/1.1 200\r\n"]
)
def test_everything_else_goes_out_at_once(data: bytes) -> None:
    async def main() -> None:
        below, transport = await joining()
        transport.write(data)
        assert below.written == [data]

    asyncio.run(main())


def test_heads_keep_their_order() -> None:
    async def main() -> None:
        below, transport = await joining()
        for body in (b"", b"{}", b""):
            transport.write(HEAD)
            if body:
                transport.write(body)
            transport.expect_head()
        await asyncio.sleep(0)
        assert below.written == [HEAD, HEAD + b"{}", HEAD]

    asyncio.run(main())


def test_each_answer_of_a_connection_is_joined() -> None:
    async def main() -> None:
        below, transport = await joining()
        for _ in range(3):
            transport.write(HEAD)
            transport.write(b"{}")
            transport.expect_head()
            await asyncio.sleep(0)
        assert below.written == [HEAD + b"{}"] * 3

    asyncio.run(main())


def test_what_is_held_when_the_connection_is_lost_is_dropped_and_no_cycle_is_left() -> None:
    async def main() -> None:
        below, transport = await joining()
        transport.write(HEAD)
        transport.let_go()
        await asyncio.sleep(0)
        assert below.written == []
        gone = weakref.ref(below)
        gc.disable()
        try:
            del below, transport
            assert gone() is None
        finally:
            gc.enable()

    asyncio.run(main())


def test_a_close_sends_what_is_held_first() -> None:
    async def main() -> None:
        below, transport = await joining()
        transport.write(HEAD)
        transport.close()
        assert below.written == [HEAD]
        assert below.closed
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert below.written == [HEAD]

    asyncio.run(main())


def test_the_rest_is_the_transport_s() -> None:
    async def main() -> None:
        _, transport = await joining()
        assert transport.get_extra_info("socket") == "the socket"
        with pytest.raises(AttributeError):
            _ = transport.nothing

    asyncio.run(main())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_is_whole_with_and_without_a_body(method: str, *, closes: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = [(b"content-length", b"5"), *([(b"connection", b"close")] if closes else [])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"whole"})

    with on_a_socket(app, StampedProtocol, asyncio.new_event_loop) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for _ in range(2):
            connection.request(method, "/")
            answer = connection.getresponse()
            assert answer.read() == (b"" if method == "HEAD" else b"whole")
        connection.close()
