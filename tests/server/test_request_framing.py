"""What stands between the head and the end of a request beside its body: trailers, chunk
extensions; and requests answered early.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from kendall.server.http import bounds as protocol
from kendall.server.http.bounds import ANSWERED_BYTES, MAX_HEAD_BYTES, LimitedProtocol
from tests.serving import on_a_socket

ANSWERED_TIMEOUT = 0.4
MOST = 32 << 20  # bytes: far more than any bound here, with what the kernel holds
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Hasty(LimitedProtocol):
    answered_timeout = ANSWERED_TIMEOUT


async def show(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the headers and the size of the body, read in that order; `/early` answers at
    once.
    """
    if scope["type"] != "http":
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    told = json.dumps(
        {
            "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
            "size": size,
        }
    ).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(told))],
        }
    )
    await send({"type": "http.response.body", "body": told})


@pytest.fixture(
    params=[asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
    scope="module",
)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with on_a_socket(show, Hasty, request.param) as port:
        yield port


class Client:
    """A raw connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def push(self, piece: bytes, most: int = MOST) -> int:
        """Bytes that were sent before the server closed; fails where it takes all of them."""
        sent = 0
        try:
            while sent < most:
                self.socket.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            return sent
        raise AssertionError(f"the server took {sent} bytes")

    def answer(self) -> tuple[int, Any]:
        """Status and JSON of one answer; status 0 where the connection ended without."""
        found = b""
        try:
            while not _is_whole(found):
                data = self.socket.recv(1 << 16)
                if not data:
                    return 0, None
                found += data
        except ConnectionResetError:
            return 0, None
        head, _, body = found.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def closed(self) -> bool:
        """Whether nothing more comes."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(lengths) and len(body) >= int(lengths[0].partition(b":")[2])


@pytest.mark.parametrize("apart", [False, True])
def test_trap_a_trailer_is_no_header(port: int, apart: bool) -> None:
    """uvicorn appends trailers to the headers: one named `Host`, or one of a proxy, would be
    believed.
    """
    with Client(port) as client:
        client.socket.sendall(CHUNKED + b"2\r\nab\r\n0\r\n")
        if apart:
            time.sleep(0.05)
        client.socket.sendall(b"host: 127.0.0.1\r\nauthorization: Bearer key\r\nx-more: 1\r\n\r\n")
        status, told = client.answer()
        assert (status, told["size"]) == (200, 2)
        assert told["headers"] == [["host", "x"], ["transfer-encoding", "chunked"]]
        client.socket.sendall(b"GET / HTTP/1.1\r\nhost: y\r\n\r\n")  # the next request has its own
        assert client.answer()[1]["headers"] == [["host", "y"]]


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"a:\r\n" * 4096),
        (b"0\r\na: ", b"v" * 16384),
        (b"1;", b"e" * 16384),
        (b"", b"1;" + b"e" * 4096 + b"\r\nx\r\n"),
    ],
    ids=["trailers", "one trailer", "one extension", "extensions"],
)
def test_trap_trailers_and_chunk_extensions_are_bounded_as_a_head_is(
    port: int, begin: bytes, piece: bytes
) -> None:
    with Client(port) as client:
        client.socket.sendall(CHUNKED + begin)
        time.sleep(0.05)  # the head is read before
        assert client.push(piece) < MOST
    with Client(port) as client:
        client.socket.sendall(CHUNKED + begin)
        time.sleep(0.05)
        for _ in range(MAX_HEAD_BYTES // len(piece) + 3):
            try:
                client.socket.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.002)
        status, told = client.answer()
        assert status in (0, 431)  # 0: a reset overtook it
        assert status == 0 or told["error"]["code"] == "head_too_large"


def test_a_body_in_many_small_chunks_is_no_attack(port: int) -> None:
    """What frames a chunk is five times the chunk here, and more than a head may be."""
    chunks = 30_000
    assert chunks * 5 > 2 * MAX_HEAD_BYTES
    with Client(port) as client:
        client.socket.sendall(CHUNKED)
        time.sleep(0.05)
        client.socket.sendall(b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
        status, told = client.answer()
        assert (status, told["size"]) == (200, chunks)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (
            b"GET /early HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"a:\r\n" * 4096,
        ),
        (b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n", b"x" * 16384),
    ],
    ids=["trailers", "body"],
)
def test_trap_a_request_that_is_answered_is_not_read_to_its_end(
    port: int, head: bytes, piece: bytes
) -> None:
    """40 MB of trailers behind `GET /health` doubled the memory of the gateway."""
    with Client(port) as client:
        client.socket.sendall(head)
        assert client.answer()[0] == 200
        assert client.push(piece, ANSWERED_BYTES + MOST) < ANSWERED_BYTES + MOST


def test_the_rest_of_a_request_that_is_answered_has_little_time(port: int) -> None:
    with Client(port) as client:
        began = time.perf_counter()
        client.socket.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab")
        assert client.answer()[0] == 200
        assert client.closed()
        assert time.perf_counter() - began > ANSWERED_TIMEOUT * 0.9, "not before its time"


@pytest.mark.parametrize(
    "make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_small_body_behind_its_answer_leaves_the_connection_usable(make: Any) -> None:
    """And nothing that would close it later: no timer is left once the body is whole."""
    timed: list[bool] = []

    class Patient(LimitedProtocol):
        answered_timeout = 60.0

        def on_message_complete(self) -> None:
            super().on_message_complete()
            timed.append(self._deadline is not None)

    with on_a_socket(show, Patient, make) as port, Client(port) as client:
        for _ in range(3):
            client.socket.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
            assert client.answer()[0] == 200
            client.socket.sendall(b"cde")
        client.socket.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.answer()[0] == 200
    assert timed == [False] * 4


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: elsewhere\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 200),
        (b"GET / HTTP/1.0\r\n\r\n", 200),  # a load balancer's check
    ],
)
def test_trap_a_request_names_its_host_once(port: int, head: bytes, status: int) -> None:
    """RFC 9112, 3.2: whoever reads the first Host and whoever reads the last would decide
    otherwise.
    """
    with Client(port) as client:
        client.socket.sendall(head)
        found, told = client.answer()
        assert found == status
        assert status == 200 or (told["error"]["code"], "Host" in told["error"]["message"]) == (
            "invalid_http",
            True,
        )


@pytest.mark.parametrize("announced", [40_000, 60_000])
def test_the_body_of_an_answered_request_is_not_kept(announced: int) -> None:
    """A connection that stays open holds no body that nobody read, be it whole or not."""
    kept: list[int] = []

    class Watched(Hasty):
        def on_response_complete(self) -> None:
            super().on_response_complete()
            kept.append(len(self.cycle.body))

    with on_a_socket(show, Watched, asyncio.new_event_loop) as port, Client(port) as client:
        client.socket.sendall(
            b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % announced
            + b"x" * 40_000
        )
        assert client.answer()[0] == 200
    assert kept == [0]


def test_the_bounds_are_those_that_the_documentation_names() -> None:
    assert (protocol.MAX_HEAD_BYTES, protocol.ANSWERED_BYTES, protocol.ANSWERED_TIMEOUT) == (
        64 << 10,
        1 << 20,
        5.0,
    )
