"""Room for connections: by descriptors, with some kept for probes, and by address."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from kendall.server.http import descriptors
from kendall.server.http.bounds import LimitedProtocol
from kendall.server.http.connection import protocol_with
from kendall.server.http.descriptors import KEPT, Room
from tests.eventually import eventually_here
from tests.serving import on_a_socket

PATIENCE = 60.0  # seconds
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    asyncio.new_event_loop,
    uvloop.new_event_loop,
]


held: set[asyncio.Future[None]] = set()  # calls to /held, in service until /release


async def app(scope: Any, receive: Any, send: Any) -> None:
    while scope["path"] != "/early" and (message := await receive()).get("more_body"):
        pass
    if scope["path"] != "/early" and message["type"] == "http.disconnect":
        return
    if scope["path"] == "/held":
        call = asyncio.get_running_loop().create_future()
        held.add(call)
        await call
    if scope["path"] == "/release":
        while held:
            held.pop().set_result(None)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(
    make: Callable[[], asyncio.AbstractEventLoop], **limits: Any
) -> Iterator[tuple[int, CollectorRegistry]]:
    held.clear()  # of a test that failed before its release
    registry = CollectorRegistry()
    room = Room(registry, **limits)
    room.longest_probe = 60.0
    with on_a_socket(app, protocol_with(LimitedProtocol, 0.0, room), make) as port:
        yield port, registry


def ask(client: socket.socket, path: str) -> tuple[int, bytes]:
    """Status and the rest, to the end of the connection or of an answer without a body."""
    client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
    return answer(client)


def answer(client: socket.socket) -> tuple[int, bytes]:
    received = b""
    while not received.endswith(b"content-length: 0\r\n\r\n") and (data := client.recv(4096)):
        received += data
    return int(received.split()[1]), received


def refused(registry: CollectorRegistry, reason: str) -> float:
    return registry.get_sample_value("kendall_refused_connections_total", {"reason": reason}) or 0.0


def free_numbers(count: int) -> list[int]:
    """The lowest that no open file has; what other tests left open may lie between them, and is
    not closed by chance from here on.
    """
    gc.collect()
    numbers = [os.dup(0) for _ in range(count)]
    for number in numbers:
        os.close(number)
    return numbers


def close_ended(clients: list[socket.socket]) -> None:
    """Those that the server has closed: their descriptors count, too."""
    for client in select.select(clients, [], [], 0)[0]:
        with suppress(ConnectionError):
            if client.recv(4096):
                continue
        client.close()
        clients.remove(client)


@pytest.mark.slow
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_probes_are_answered_when_descriptors_run_out(
    make: Callable[[], asyncio.AbstractEventLoop],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING, "kendall")
    assert descriptors.LOG_EVERY == 10.0
    monkeypatch.setattr(descriptors, "LOG_EVERY", 3600.0)
    with (
        served(make, limit=free_numbers(30)[-1] + 1 + KEPT) as (port, registry),
        ExitStack() as stack,
    ):

        def connect() -> socket.socket:
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            )

        statuses: list[int] = []
        while len(statuses) < 60 and 503 not in statuses:
            statuses.append(ask(connect(), "/v1/completions")[0])
        assert statuses[0] == 200
        assert statuses[-1] == 503
        status, told = ask(connect(), "/v1/completions")
        error = json.loads(told.partition(b"\r\n\r\n")[2])["error"]
        assert (status, error["code"]) == (503, "too_many_connections")
        assert b"retry-after: " in told
        assert b"connection: close" in told
        for path in ("/health", "/ready", "/metrics"):
            status, told = ask(connect(), path)
            assert status == 200
            assert b"connection: close" in told
        assert refused(registry, "descriptors") >= 5
        assert (registry.get_sample_value("kendall_connections") or 0.0) > 2
    assert "open files" in caplog.text
    assert caplog.text.count("refused") == 1, "one line in so long"


@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_the_very_last_descriptors_go_to_no_connection(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with (
        served(make, limit=1) as (port, registry),
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client,
    ):
        status, told = answer(client)
        assert status == 503
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert client.recv(1) == b""
        assert refused(registry, "descriptors") == 1


@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_connections_of_one_address_are_bounded(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with served(make, most_per_address=2) as (port, registry), ExitStack() as stack:
        first, second, third = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            for _ in range(3)
        )
        assert answer(third)[0] == 429
        assert ask(first, "/")[0] == ask(second, "/")[0] == 200
        assert refused(registry, "address") == 1
        first.close()

        def admitted() -> bool:
            with (
                suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as again,
            ):
                return ask(again, "/")[0] == 200
            return False  # refused before it had asked

        eventually_here(admitted)  # the end of a connection is noticed


def crowded(stack: ExitStack, port: int, count: int, sent: bytes = b"") -> list[int]:
    """The statuses of a probe and a call after every ten of so many connections, which send this
    and no more.
    """
    address = ("127.0.0.1", port)
    statuses: list[int] = []
    clients: list[socket.socket] = []
    for place in range(count):
        clients.append(stack.enter_context(socket.create_connection(address, timeout=PATIENCE)))
        clients[-1].sendall(sent)
        time.sleep(0.005)  # the server's turn: connections come one by one
        close_ended(clients)
        if place % 10 == 9:
            for path in ("/health", "/v1/completions"):
                with socket.create_connection(address, timeout=PATIENCE) as client:
                    statuses.append(ask(client, path)[0])
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_silent_connections_take_the_room_of_nobody(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """More of them than descriptors are left: the oldest are closed for those that come, and
    probes and calls are answered.
    """
    with (
        served(make, limit=free_numbers(350)[-1] + 1) as (port, registry),
        ExitStack() as stack,
    ):
        assert crowded(stack, port, 300) == [200] * 60
        assert refused(registry, "silent") > 50
        assert refused(registry, "descriptors") == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_a_connection_that_has_asked_is_not_closed_for_a_new_one(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with served(make, limit=free_numbers(20)[-1] + 1 + KEPT) as (port, registry):
        address = ("127.0.0.1", port)
        with socket.create_connection(address, timeout=PATIENCE) as first:
            assert ask(first, "/health")[0] == 200
            time.sleep(2 * descriptors.SILENT)
            for _ in range(5):
                with socket.create_connection(address, timeout=PATIENCE) as other:
                    assert ask(other, "/health")[0] == 200
            assert ask(first, "/health")[0] == 200
        assert refused(registry, "silent") == 0


UNFINISHED = {
    "body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
    "chunked body": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
    ),
    "body of an answered call": b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
    "second head": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\nPOST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    ),
    "second body": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("unfinished", UNFINISHED.values(), ids=UNFINISHED.keys())
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_unfinished_requests_take_the_room_of_nobody(
    make: Callable[[], asyncio.AbstractEventLoop], unfinished: bytes
) -> None:
    """A whole head does not keep a connection whose body does not come, nor an answer one whose
    next request does not.
    """
    with (
        served(make, limit=free_numbers(200)[-1] + 1) as (port, registry),
        ExitStack() as stack,
    ):
        assert crowded(stack, port, 150, unfinished) == [200] * 30
        assert refused(registry, "silent") > 25
        assert refused(registry, "descriptors") == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_a_body_that_goes_on_and_a_call_in_service_are_kept(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The oldest connections, one of which sends a byte now and then; the others wait for an
    answer, whatever they have sent behind their calls. Those that have sent nothing since are
    closed in their place.
    """
    with (
        served(make, limit=free_numbers(200)[-1] + 1) as (port, registry),
        ExitStack() as stack,
    ):

        def connect(data: bytes) -> socket.socket:
            client = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            )
            client.sendall(data)
            return client

        clients: list[socket.socket] = []
        whole = b"POST /held HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{"
        behind = (b"", b"POST / HTTP/1.1\r\nhost: x\r\n", UNFINISHED["body"])
        in_service = [connect(whole + part) for part in behind]
        sending = connect(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        for _ in range(99):
            clients.append(connect(UNFINISHED["body"]))
            sending.sendall(b"x")
            time.sleep(0.005)
            close_ended(clients)
        assert refused(registry, "silent") > 25
        sending.sendall(b"x")
        assert answer(sending)[0] == 200
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
            assert ask(client, "/release")[0] == 200
        assert [answer(client)[0] for client in in_service] == [200, 200, 200]


@pytest.mark.parametrize(("whole", "silence_ended"), [(False, True), (True, False)])
def test_the_oldest_connection_is_kept_that_sends_its_body_or_has_sent_its_request(
    whole: bool, silence_ended: bool
) -> None:
    """However long it has been open: where all others are older, or have not sent theirs, they
    alone are closed.
    """

    async def main() -> None:
        now = 0.0
        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        room = Room(CollectorRegistry(), limit=100 + KEPT)
        closed: list[str] = []
        first, silent, *others = (partial(closed.append, name) for name in "abcd")
        room.enter(10, None, first)
        room.enter(12, None, silent)
        for _ in range(2 * whole):
            room.whole(first)
        now = 1.0
        if silence_ended:
            room.unfinished(first, in_body=True)
        for close in others:
            now += 0.01
            room.enter(80, None, close)
        del asyncio.get_running_loop().time
        assert closed == ["b"]

    asyncio.run(main())


def test_a_burst_of_unfinished_requests_leaves_room_for_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at one instant: none has been silent for long. Each takes the lowest free descriptor,
    and a second one where it is served as usual.
    """

    monkeypatch.setattr(descriptors, "SILENT", PATIENCE)

    async def main() -> None:
        room = Room(CollectorRegistry(), limit=300)
        taken: dict[int, list[int]] = {}

        def connect(number: int) -> str:
            free = iter(sorted(set(range(10, 300)).difference(*taken.values())))
            held = [next(free, 300)]
            place = room.enter(held[0], None, partial(close, number))
            taken[number] = [*held, next(free, 300)] if place == "any" else held
            return place

        def close(number: int) -> None:
            del taken[number]
            room.leave(None)

        places = {connect(number) for number in range(330)}
        assert places <= {"any", "probes"}
        assert 0 not in taken, "the oldest is closed first"
        assert 329 in taken
        assert len(taken) > 110, "no more than it takes"

    asyncio.run(main())
