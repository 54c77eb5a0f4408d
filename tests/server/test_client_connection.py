"""A client that goes is noticed at once, streamed or not, behind a large body, and behind
another request on its connection.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.requests import ClientDisconnect

from kendall.server.http.answer import GeneratedAnswer
from kendall.server.http.client_connection import (
    CONNECTION,
    ClientConnection,
    watch_client,
    while_connected,
)
from kendall.server.http.connection import CONTINUE, StampedProtocol
from kendall.server.queue.sequence import SequenceState
from kendall.server.security.exposure import uvicorn_tls
from kendall.server.security.settings import TlsSettings
from kendall.server.wire import transport
from kendall.server.wire.hang_ups import HangUps
from tests.eventually import eventually
from tests.server.asgi import Call, call, completion, running
from tests.server.counts import open_files
from tests.server.test_http import counted
from tests.serving import on_a_socket, self_signed
from tests.virtual_time import run_virtual


def test_everybody_who_watches_is_told_once_and_nobody_who_left_off() -> None:
    told: list[str] = []
    connection = ClientConnection(lambda: told.append("read on"))
    first, second, third = (
        (lambda: told.append("1")),
        (lambda: told.append("2")),
        (lambda: told.append("3")),
    )
    connection.watch(first)
    connection.watch(second)
    connection.watch(third)
    connection.unwatch(second)
    connection.unwatch(second)
    connection.lose()
    connection.lose()
    assert told == ["read on"] * 3 + ["1", "3"]


def test_a_connection_that_is_lost_already_says_so_at_once() -> None:
    told: list[int] = []
    connection = ClientConnection(lambda: None)
    connection.lose()
    connection.watch(lambda: told.append(1))
    assert told == [1]


def over(connection: ClientConnection, app: Any) -> Any:
    """The application as it is called for requests of this connection."""

    async def called(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {CONNECTION: connection}, receive, send)

    return called


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0.0005, 0.01], ids=["before its first token", "within its answer"])
def test_a_lost_connection_takes_its_call_out_of_the_engine(stream: bool, at: float) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            connection = ClientConnection(lambda: None)
            made = Call(
                over(connection, app),
                "POST",
                "/v1/completions",
                completion(max_tokens=200, stream=stream),
            )
            await asyncio.sleep(at)
            assert gateway.batcher.in_service == 1
            connection.lose()
            await made.task
            assert gateway.batcher.in_service == gateway.batcher.unanswered == 0
            assert counted(gateway, "cancelled") == 1
            assert not made.whole

    run_virtual(main())


def test_a_client_that_leaves_the_queue_gives_its_place_away() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=50))
            connection = ClientConnection(lambda: None)
            second = Call(over(connection, app), "POST", "/v1/completions", completion())
            await asyncio.sleep(0.005)
            assert gateway.batcher.queue_length == 1
            connection.lose()
            assert (
                gateway.batcher.queue_length == 1
            )  # its own task takes it out, on the loop's next turn
            await second.task
            assert gateway.batcher.queue_length == 0
            await first.task
            assert first.status == 200

    run_virtual(main())


def test_an_answered_call_is_not_told_of_a_connection_that_is_lost_later() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            connection = ClientConnection(lambda: None)
            made = await call(over(connection, app), "POST", "/v1/completions", completion())
            connection.lose()
            await asyncio.sleep(0.01)
            assert made.status == 200
            assert (counted(gateway, "completed"), counted(gateway, "cancelled")) == (1, 0)

    run_virtual(main())


def test_a_call_over_such_a_connection_has_no_second_task() -> None:
    async def main() -> None:
        async with running() as (app, _):
            before = asyncio.all_tasks()
            made = Call(
                over(ClientConnection(lambda: None), app), "POST", "/v1/completions", completion()
            )
            await asyncio.sleep(0.001)
            assert asyncio.all_tasks() - before == {made.task}
            await made.task

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_call_leaves_nothing_to_the_collector(stream: bool) -> None:
    """Call, choices and sequences know one another; they let go when the answer has left."""

    async def main() -> None:
        async with running() as (app, _):
            connection = ClientConnection(lambda: None)
            gc.collect()
            gc.disable()
            before = [
                each
                for each in gc.get_objects()
                if issubclass(type(each), (GeneratedAnswer, SequenceState))
            ]  # of other tests
            try:
                for _ in range(3):
                    await call(
                        over(connection, app),
                        "POST",
                        "/v1/completions",
                        completion(stream=stream, n=2),
                    )
                await asyncio.sleep(0.1)
                after = [
                    each
                    for each in gc.get_objects()
                    if issubclass(type(each), (GeneratedAnswer, SequenceState))
                ]
            finally:
                gc.enable()
            left = {id(each): type(each).__name__ for each in after}
            assert left.keys() <= {id(each) for each in before}, left

    run_virtual(main())


# ---- on a socket ----

noticed, begun = threading.Event(), threading.Event()
PATIENCE = 30.0  # seconds


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is asked: whoever goes is noticed by that, except where a test says otherwise."""
    monkeypatch.setattr(transport, "ASK_EVERY", 3600.0)
    noticed.clear()
    begun.clear()


async def waiter(scope: Any, receive: Any, send: Any) -> None:
    """`/wait` never answers: it waits for its client to go, from `begun` on; any other path
    answers with nothing.
    """
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/wait":
        gone = asyncio.Event()
        end = watch_client(scope, receive, gone.set)
        begun.set()
        await gone.wait()
        end()
        noticed.set()
        return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(params=["asyncio", "uvloop"], scope="module")
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Where a server whose connections call back listens."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    with on_a_socket(waiter, StampedProtocol, loops[request.param]) as port:
        yield port


def post(path: str, body: bytes = b"") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")
@pytest.mark.parametrize(
    ("sent", "how"),
    [
        pytest.param(post("/wait"), "close", id="plain"),
        pytest.param(
            post("/wait", b"x" * 200_000), "close", id="behind a body beyond which reading pauses"
        ),
        pytest.param(post("/wait") + post("/after"), "close", id="with another request behind it"),
        pytest.param(post("/wait"), "reset", id="reset"),
    ],
)
def test_a_client_that_goes_is_noticed(port: int, sent: bytes, how: str) -> None:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    client.sendall(sent)
    assert begun.wait(PATIENCE)
    assert not noticed.is_set()
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.close()
    assert noticed.wait(PATIENCE)


@pytest.mark.thinned(2)
@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
@pytest.mark.parametrize(
    "behind",
    [
        post("/after"),
        post("/after", b"x" * 200_000),
        post("/after") * 50,
        post("/after", b"x" * 9)[:-5],
    ],
)
def test_a_client_that_goes_is_noticed_behind_a_request_that_it_sent_later(
    port: int, behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read while the later one waits for its turn. Behind more than the kernel
    buffers the end itself does not come in.
    """
    monkeypatch.setattr(transport, "ASK_EVERY", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(post("/wait"))
        assert begun.wait(PATIENCE)
        client.sendall(behind)
        time.sleep(0.1)
        assert not noticed.is_set()
    assert noticed.wait(PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_a_client_that_goes_is_noticed_behind_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificate))
    with (
        on_a_socket(
            waiter,
            StampedProtocol,
            uvloop.new_event_loop,
            **uvicorn_tls(TlsSettings(certfile=certificate, keyfile=key)),
        ) as port,
        trust.wrap_socket(
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE),
            server_hostname="localhost",
        ) as client,
    ):
        client.sendall(post("/wait"))
        assert begun.wait(PATIENCE)
        client.sendall(post("/after"))
        time.sleep(0.1)
        assert not noticed.is_set()
        client.close()
        assert noticed.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
@pytest.mark.parametrize(
    "sent", [post("/wait"), post("/wait") + post("/after")], ids=["one request", "pipelined"]
)
def test_a_half_closed_connection_is_kept_and_its_end_is_noticed(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ASK_EVERY", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(sent)
        assert begun.wait(PATIENCE)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000).startswith(CONTINUE)
        assert not noticed.wait(0.2)
    assert noticed.wait(PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["at once", "later"])
def test_every_whole_request_before_a_half_close_is_answered(port: int, pause: float) -> None:
    """And one that is not whole is not; then the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(
            post("/") + post("/", b"x" * 100_000) + post("/") + post("/", b"cut off")[:-1]
        )
        time.sleep(pause)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while data := client.recv(1000):
            received += data
    assert received.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")
def test_an_http_1_0_client_that_half_closes_is_taken_for_gone(port: int) -> None:
    """It understands no interim response."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(b"POST /wait HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
        assert begun.wait(PATIENCE)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b""
        assert noticed.wait(PATIENCE)


def test_work_goes_on_while_the_client_is_there_and_is_cancelled_when_it_goes() -> None:
    async def main() -> None:
        connection, cancelled = ClientConnection(lambda: None), asyncio.Event()

        async def work() -> int:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return 7

        scope: Any = {CONNECTION: connection}
        assert await while_connected(scope, asyncio.Event().wait, work()) == 7  # type: ignore[arg-type]
        present = asyncio.create_task(while_connected(scope, asyncio.Event().wait, work()))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        connection.lose()
        with pytest.raises(ClientDisconnect):
            await present
        assert cancelled.is_set()

    run_virtual(main())


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_hang_ups_are_told_once_and_leave_no_descriptor_open() -> None:
    async def main() -> list[str]:
        told: list[str] = []
        loop, before = asyncio.get_running_loop(), open_files()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            server, _ = listening.accept()
            with server:
                HangUps.watch(
                    loop, server.fileno(), lambda: told.append("gone"), lambda: told.append("half")
                )
                HangUps.watch(loop, 10_000, lambda: told.append("never"))  # no such descriptor
                client.sendall(b"unread")
                await asyncio.sleep(0.05)
                assert told == []
                client.shutdown(socket.SHUT_WR)
                await eventually(lambda: told)
                await asyncio.sleep(0.05)  # for more than one
                client.close()
                server.sendall(b"x")
                await eventually(lambda: "gone" in told)
                await asyncio.sleep(0.05)
                HangUps.forget(loop, server.fileno())
        assert open_files() <= before
        return told

    assert asyncio.run(main()) == ["half", "gone"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")
def test_a_connection_is_watched_anew_for_each_of_its_requests(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        for _ in range(3):
            client.sendall(post("/"))
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(post("/wait"))
        assert begun.wait(PATIENCE)
        assert not noticed.is_set()
    assert noticed.wait(PATIENCE)
