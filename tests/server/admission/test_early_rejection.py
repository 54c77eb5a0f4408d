"""A rejection leaves before the body is in, and the connection behaves afterwards: raw ASGI, and
sockets to a real server.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from kendall.queueing.latency.law import parse_law
from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.http.connection import StampedProtocol
from kendall.server.runtime.errors import ApiError
from kendall.server.security import early_answer
from kendall.server.security.early_answer import RejectionResponse
from kendall.server.settings import Settings
from kendall.server.wire.listener import ListeningServer
from tests.eventually import eventually
from tests.server.asgi import SLOW
from tests.virtual_time import run_virtual

ERROR = ApiError(429, "queue_full", "no", retry_after=2.5)
PATIENCE = 30.0  # seconds


async def refuse(
    messages: list[Any], headers: list[tuple[bytes, bytes]]
) -> tuple[list[Any], list[int], float]:
    """What was sent, how many messages had been read at each send, and how long it took; `None`
    in messages is silence.
    """
    sent: list[Any] = []
    read_before: list[int] = []
    read = 0

    async def receive() -> Any:
        nonlocal read
        message = messages[read] if read < len(messages) else None
        if message is None:
            await asyncio.Event().wait()
        read += 1
        return message

    async def send(message: Any) -> None:
        sent.append(message)
        read_before.append(read)

    began = asyncio.get_running_loop().time()
    await RejectionResponse(ERROR, "id-1")({"type": "http", "headers": headers}, receive, send)
    return sent, read_before, asyncio.get_running_loop().time() - began


def part(size: int, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def test_the_refusal_is_whole_before_the_body_is_read_and_the_body_is_read_before_it_ends() -> None:
    sent, read_before, _ = run_virtual(
        refuse([part(10, more=True), part(10, more=False)], [(b"content-length", b"20")])
    )
    start, body, end = sent
    headers = dict(start["headers"])
    assert start["status"] == 429
    assert (headers[b"retry-after"], headers[b"retry-after-ms"], headers[b"x-request-id"]) == (
        b"3",
        b"2500",
        b"id-1",
    )
    assert b"connection" not in headers
    assert json.loads(body["body"])["error"]["code"] == "queue_full"
    assert len(body["body"]) == int(headers[b"content-length"])
    assert read_before == [0, 0, 2]
    assert (body["more_body"], end["body"], end["more_body"]) == (True, b"", False)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([(b"content-length", b"20")], early_answer.MOST_SECONDS),  # a slow client
        ([(b"content-length", b"99999999")], early_answer.LINGER),  # more than is worth reading
        ([(b"transfer-encoding", b"chunked")], early_answer.LINGER),  # nobody knows how much
        (
            [(b"content-length", b"20"), (b"expect", b"100-continue")],
            0.0,
        ),  # it waits for leave to send, and gets none
    ],
)
def test_nobody_holds_a_refused_connection_for_long(
    headers: list[tuple[bytes, bytes]], seconds: float
) -> None:
    sent, _, took = run_virtual(refuse([part(1, more=True), None], headers))
    assert took == pytest.approx(seconds)
    assert (dict(sent[0]["headers"]).get(b"connection") == b"close") == (
        seconds < early_answer.MOST_SECONDS
    )
    assert sent[-1]["more_body"] is False


def test_of_a_body_that_is_refused_no_more_is_read_than_a_body_may_have() -> None:
    endless = [part(1 << 20, more=True)] * 100
    sent, read_before, took = run_virtual(refuse(endless, [(b"transfer-encoding", b"chunked")]))
    assert read_before == [0, 0, 16]
    assert took == pytest.approx(early_answer.LINGER), (
        "the client has the time to read the rejection"
    )
    assert sent[-1]["more_body"] is False


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_a_body_that_was_not_announced_is_not_waited_for(
    headers: list[tuple[bytes, bytes]],
) -> None:
    sent, read_before, took = run_virtual(refuse([None], headers))
    assert (read_before, took) == ([0, 0, 0], 0.0)
    assert b"connection" not in dict(sent[0]["headers"])


def test_a_client_that_leaves_ends_it_at_once() -> None:
    _, _, took = run_virtual(
        refuse([part(1, more=True), {"type": "http.disconnect"}], [(b"content-length", b"20")])
    )
    assert took == 0.0


@asynccontextmanager
async def served(**overload: Any) -> AsyncIterator[tuple[int, Gateway]]:
    """A gateway on a socket, in this loop. Its engine takes 100 s over the call that `occupy`
    makes.
    """
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        policy="single",
        prediction_interval=0,
        overload=OverloadSettings(**overload),
    )
    gateway = Gateway(settings, EmulatedEngine(parse_law(SLOW)), parse_law(SLOW))
    ready = asyncio.Event()
    app = create_app(gateway, on_ready=lambda _: ready.set())
    config = uvicorn.Config(
        app, http=StampedProtocol, ws="none", log_level="error", timeout_graceful_shutdown=1
    )
    server = ListeningServer(config)
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await ready.wait()
        while not server.started:  # noqa: ASYNC110 - it says so by this alone
            await asyncio.sleep(0.01)
        yield sock.getsockname()[1], gateway
    finally:
        server.should_exit = True
        await task


def post(length: int, *extra: str) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {length}",
        *extra,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def head_and_body(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(
        next(
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ).split(b":")[1]
    )
    return head, json.loads(await reader.readexactly(length))


async def occupy(port: int, gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A long call that has the whole bound of one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"model": "tiny", "prompt": [1], "max_tokens": 2000, "ignore_eos": True}
    ).encode()
    writer.write(post(len(body)) + body)
    await eventually(lambda: gateway.batcher.unanswered == 1)
    return reader, writer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still sent behind a rejection may take its time."""
    assert (early_answer.MOST_SECONDS, early_answer.LINGER) == (5.0, 1.0)
    monkeypatch.setattr(early_answer, "MOST_SECONDS", PATIENCE)
    monkeypatch.setattr(early_answer, "LINGER", PATIENCE)


@pytest.mark.usefixtures("patient")
def test_a_connection_goes_on_after_a_refusal_that_overtook_its_body() -> None:
    async def main() -> None:
        async with served(max_num_queued_reqs=1) as (port, gateway):
            _, busy = await occupy(port, gateway)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(300_000) + b"x" * 1000)
            head, error = await asyncio.wait_for(head_and_body(reader), PATIENCE)
            assert head.startswith(b"HTTP/1.1 429")
            assert error["error"]["code"] == "queue_full"
            writer.write(b"x" * 299_000)
            await writer.drain()
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            head, version = await asyncio.wait_for(head_and_body(reader), PATIENCE)
            assert head.startswith(b"HTTP/1.1 200")
            assert version["version"]
            writer.close()
            busy.close()

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_a_huge_body_is_refused_readably_and_its_connection_closed() -> None:
    async def main() -> None:
        async with served(max_num_queued_reqs=1) as (port, gateway):
            _, busy = await occupy(port, gateway)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(12 << 20))

            async def push() -> None:
                for _ in range(12 << 4):
                    writer.write(b"x" * 65536)
                    await writer.drain()

            pushing = asyncio.create_task(push())
            head, error = await asyncio.wait_for(head_and_body(reader), PATIENCE)
            assert error["error"]["code"] == "queue_full"
            assert b"connection: close" in head.lower()
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            assert gateway.batcher.unanswered == 1
            writer.close()
            busy.close()

    asyncio.run(main())


def test_a_client_that_waits_for_leave_to_send_is_answered_without_it() -> None:
    async def main() -> None:
        async with served(max_num_queued_reqs=1) as (port, gateway):
            _, busy = await occupy(port, gateway)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(1000, "expect: 100-continue"))
            head, _ = await asyncio.wait_for(head_and_body(reader), PATIENCE)
            assert head.startswith(b"HTTP/1.1 429")
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()
            busy.close()

    asyncio.run(main())
