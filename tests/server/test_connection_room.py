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
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from server.http import descriptors
from server.http.arrival_timestamps import protocol_with
from server.http.bounds import LimitedProtocol
from server.http.descriptors import KEPT, Room
from tests.eventually import eventually_here
from tests.serving import on_a_socket

PATIENCE = 60.0  # seconds
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    asyncio.new_event_loop,
    uvloop.new_event_loop,
]


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(
    make: Callable[[], asyncio.AbstractEventLoop], **limits: Any
) -> Iterator[tuple[int, CollectorRegistry]]:
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

        statuses = []
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
        address = ("127.0.0.1", port)
        statuses = []
        silent: list[socket.socket] = []
        for place in range(300):
            silent.append(stack.enter_context(socket.create_connection(address, timeout=PATIENCE)))
            time.sleep(0.005)
            for closed in select.select(silent, [], [], 0)[0]:
                closed.close()
                silent.remove(closed)
            if place % 10 == 9:
                for path in ("/health", "/v1/completions"):
                    with socket.create_connection(address, timeout=PATIENCE) as client:
                        statuses.append(ask(client, path)[0])
        assert statuses == [200] * 60
        assert refused(registry, "silent") > 50
        assert refused(registry, "descriptors") == 0


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
