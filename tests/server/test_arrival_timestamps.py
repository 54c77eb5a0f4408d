"""The kernel's stamps: a request arrived when its last byte came in, whatever the event loop was
doing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from kendall.server.http.connection import RECEIVED_AT, StampedProtocol
from kendall.server.wire.transport import WallClock, stamps_arrivals
from tests.eventually import eventually_here
from tests.server.counts import open_files
from tests.serving import on_a_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the stamp and the number of bytes; `/block` stops the loop until released,
    `/wait` waits until the client goes.
    """
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/block":
        blocked.set()
        released.wait(PATIENCE)  # on purpose: the loop stands still
    if scope["path"] == "/wait":
        gone.clear()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
    body = json.dumps({"received_at": scope.get(RECEIVED_AT), "size": size}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


PATIENCE = 30.0  # seconds
gone, blocked, released = threading.Event(), threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def nothing_is_blocked() -> None:
    blocked.clear()
    released.clear()


@pytest.fixture(
    params=[asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
    scope="module",
)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Where a server with stamps listens."""
    sock = socket.create_server(("127.0.0.1", 0))
    assert stamps_arrivals(sock)
    with on_a_socket(echo, StampedProtocol, request.param, sock) as port:
        yield port


class Client:
    """A raw connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, path: str, body: bytes = b"") -> None:
        self.socket.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def answer(self) -> dict[str, Any]:
        assert self.file.readline() == b"HTTP/1.1 200 OK\r\n"
        length = 0
        while (line := self.file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return dict(json.loads(self.file.read(length)))


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def test_a_request_to_a_busy_loop_arrives_when_it_comes_in(port: int) -> None:
    with Client(port) as first, Client(port) as second:
        first.send("/")
        second.send("/")
        first.answer()
        second.answer()
        first.send("/block")
        assert blocked.wait(PATIENCE)
        sent = now()
        second.send("/")
        time.sleep(0.2)
        free = now()
        released.set()
        assert sent - 0.001 < second.answer()["received_at"] < free
        first.answer()


def test_the_last_byte_counts(port: int) -> None:
    with Client(port) as client:
        client.socket.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        time.sleep(0.1)
        sent = now()
        client.socket.sendall(b"cd")
        answer = client.answer()
        assert answer["size"] == 4
        assert sent - 0.001 < answer["received_at"] <= now()


def test_a_fresh_connection_is_stamped_too(port: int) -> None:
    for _ in range(20):
        sent = now()
        with Client(port) as client:
            client.send("/")
            assert sent - 0.001 < client.answer()["received_at"] <= now()


def test_bodies_larger_than_the_buffers_arrive_whole(port: int) -> None:
    """uvicorn pauses the reading beyond 64 KiB and goes on when the application has taken it."""
    with Client(port) as client:
        for size in (1, 70_000, 3_000_000, 5):
            client.send("/", b"x" * size)
            assert client.answer()["size"] == size


def test_requests_sent_without_waiting_for_answers_are_all_answered(port: int) -> None:
    with Client(port) as client:
        for size in (1, 2, 3):
            client.send("/", b"x" * size)
        assert [client.answer()["size"] for _ in range(3)] == [1, 2, 3]


def test_a_client_that_goes_is_noticed_and_leaves_no_descriptor_behind(port: int) -> None:
    with Client(port) as client:
        client.send("/")
        client.answer()
    before = open_files()
    for _ in range(5):
        with Client(port) as client:
            gone.clear()
            client.send("/wait")
            time.sleep(0.05)
        assert gone.wait(PATIENCE)
    eventually_here(lambda: open_files() <= before)


def test_a_client_that_half_closes_gets_the_end_of_the_connection(port: int) -> None:
    with Client(port) as client:
        client.send("/")
        client.answer()
        client.socket.shutdown(socket.SHUT_WR)
        assert client.socket.recv(10) == b""


def test_the_wall_clock_is_read_on_the_monotonic_one() -> None:
    clock = WallClock()
    before = now()
    read = clock.monotonic(time.clock_gettime_ns(time.CLOCK_REALTIME))
    assert before - 1e-3 < read < now() + 1e-3


@pytest.mark.parametrize("step", [3600.0, 2.0, -2.0, -3600.0])
def test_a_step_of_the_wall_clock_between_stamp_and_reading_does_not_move_an_arrival(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Nor any that come after it."""
    stepped = 0

    def read(clock: int) -> int:
        return clock_gettime_ns(clock) + (stepped if clock == time.CLOCK_REALTIME else 0)

    clock_gettime_ns = time.clock_gettime_ns
    monkeypatch.setattr(time, "clock_gettime_ns", read)
    clock = WallClock()
    before, stamp = now(), read(time.CLOCK_REALTIME)
    stepped = int(step * 1e9)
    assert before - 1e-3 <= clock.monotonic(stamp) <= now()
    before, stamp = now(), read(time.CLOCK_REALTIME)
    assert before - 1e-3 <= clock.monotonic(stamp) <= now()


@pytest.mark.parametrize("wrong", [3600.0, -3600.0])
def test_a_stamp_of_before_a_step_on_a_connection_of_after_it_is_not_believed(wrong: float) -> None:
    stamp = time.clock_gettime_ns(time.CLOCK_REALTIME) + int(wrong * 1e9)
    before = now()
    assert before <= WallClock().monotonic(stamp) <= now()
