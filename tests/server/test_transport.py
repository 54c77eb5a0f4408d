"""A connection: a head goes out with what follows it, and never later than the event loop's next
turn; nothing that was written is lost, and both sides learn of its end.
"""

import asyncio
import contextlib
import gc
import http.client
import socket
import weakref
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from kendall.server.http.connection import StampedProtocol
from kendall.server.wire.transport import StampedTransport
from tests.eventually import eventually
from tests.serving import on_a_socket

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
PATIENCE = 30.0  # seconds


class Told:
    """What a connection told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.read = b""

    def connection_made(self, transport: object) -> None:
        del transport
        self.said.append("made")

    def connection_lost(self, exc: Exception | None) -> None:
        assert exc is None
        self.said.append("lost")

    def data_received(self, data: bytes, at: float | None) -> None:
        assert at is None or at > 0
        self.read += data

    def pause_writing(self) -> None:
        self.said.append("pause")

    def resume_writing(self) -> None:
        self.said.append("resume")

    def answer_what_is_whole(self) -> None:
        self.said.append("end")

    def ask_whether_gone(self) -> None:
        self.said.append("ask")


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[socket.socket, StampedTransport, Told]]:
    """A client's side, the connection and what it told."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    client.setblocking(False)
    told = Told()
    transport = StampedTransport(asyncio.get_running_loop(), sock, told)
    transport.start()
    try:
        yield client, transport, told
    finally:
        client.close()
        transport.abort()
        await asyncio.sleep(0)
        assert sock.fileno() == -1
        assert told.said[-1] == "lost"
        assert told.said.count("lost") == 1


def there(client: socket.socket) -> bytes:
    """What has come; on this machine it comes at once."""
    with contextlib.suppress(BlockingIOError):
        return client.recv(1 << 20)
    return b""


async def until(told: Told, what: str) -> None:
    await eventually(lambda: what in told.said)


def test_a_head_and_what_follows_it_are_one_write() -> None:
    async def main() -> None:
        async with connected() as (client, transport, _):
            transport.write(HEAD)
            assert there(client) == b""
            transport.write(b"{}")
            assert there(client) == HEAD + b"{}"
            transport.write(b"more")
            assert there(client) == b"more"

    asyncio.run(main())


def test_a_head_waits_for_one_turn_of_the_loop_only() -> None:
    async def main() -> None:
        async with connected() as (client, transport, _):
            transport.write(HEAD)
            await asyncio.sleep(0)
            assert there(client) == HEAD
            transport.write(b"{}")
            assert there(client) == b"{}"

    asyncio.run(main())


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 100 Continue\r\n\r\n", b"data: {}\n\n", b"5\r\nHTTP/1.1 200\r\n"]
)
def test_everything_else_goes_out_at_once(data: bytes) -> None:
    async def main() -> None:
        async with connected() as (client, transport, _):
            transport.write(data)
            assert there(client) == data

    asyncio.run(main())


def test_heads_keep_their_order_and_each_answer_is_joined() -> None:
    async def main() -> None:
        async with connected() as (client, transport, _):
            found = []
            for body in (b"", b"{}", b"", b"{}"):
                transport.write(HEAD)
                if body:
                    transport.write(body)
                transport.expect_head()
                found.append(there(client))
            assert found == [HEAD, HEAD + b"{}"] * 2

    asyncio.run(main())


def test_what_is_held_when_the_connection_is_lost_is_dropped_and_no_cycle_is_left() -> None:
    async def main() -> None:
        async with connected() as (client, transport, told):
            transport.write(HEAD)
            transport.abort()
            await asyncio.sleep(0)
            assert there(client) == b""
            assert told.said == ["made", "lost"]
            transport.write(b"late")
        gone = weakref.ref(told)
        gc.disable()
        try:
            del transport, told
            assert gone() is None
        finally:
            gc.enable()

    asyncio.run(main())


def test_a_close_sends_what_is_held_first() -> None:
    async def main() -> None:
        async with connected() as (client, transport, told):
            transport.write(HEAD)
            transport.close()
            assert transport.is_closing()
            assert there(client) == HEAD
            transport.write(b"late")
            await until(told, "lost")
            assert client.recv(1) == b""

    asyncio.run(main())


@pytest.mark.parametrize("closes", [False, True])
def test_what_the_socket_does_not_take_follows_when_the_client_reads(*, closes: bool) -> None:
    async def main() -> None:
        async with connected() as (client, transport, told):
            sent = b"".join(number.to_bytes(4, "big") for number in range(2_000_000))
            for at in range(0, len(sent), 1 << 20):
                transport.write(sent[at : at + (1 << 20)])
            assert told.said == ["made", "pause"]
            if closes:
                transport.close()
            got = b""
            async with asyncio.timeout(PATIENCE):
                while len(got) < len(sent):
                    got += there(client)
                    await asyncio.sleep(0)
            assert got == sent
            await until(told, "lost" if closes else "resume")
            assert ("lost" in told.said) is closes

    asyncio.run(main())


@pytest.mark.parametrize("writing", [False, True])
def test_a_client_that_resets_is_noticed(*, writing: bool) -> None:
    async def main() -> None:
        async with connected() as (client, transport, told):
            if writing:
                transport.write(b"x" * (16 << 20))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            await until(told, "lost")

    asyncio.run(main())


def test_reading_pauses_and_goes_on_and_an_end_is_told_once_what_came_before_it_is_read() -> None:
    async def main() -> None:
        async with connected() as (client, transport, told):
            client.send(b"first")
            await eventually(lambda: told.read == b"first")
            transport.pause_reading()
            client.send(b"second")
            await asyncio.sleep(0.01)
            assert (told.read, transport.has_unread()) == (b"first", True)
            client.shutdown(socket.SHUT_WR)
            await until(told, "ask")  # it may be gone
            transport.resume_reading()
            await until(told, "end")
            assert (told.read, transport.has_unread()) == (b"firstsecond", False)
            transport.write(b"answer")
            assert there(client) == b"answer"
            transport.resume_reading()  # there can be no more
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            await until(told, "lost")

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
