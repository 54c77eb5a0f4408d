"""The port of `kendall watch --otlp`, and what comes to it: spans over both protocols, and bodies
that are meant to break it. All are refused with a reason that is counted, within bounded memory.
"""

from __future__ import annotations

import asyncio
import gzip
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.server.watch.receiver import (
    LARGEST_BODY,
    METHOD,
    PATH,
    Listener,
    SpanReceiver,
    address,
)
from kendall.server.watch.spans import MOST_MESSAGES, RequestSpan
from tests.server.watch.exports import GIVEN, export

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
PROTOBUF = {"content-type": "application/x-protobuf"}
ONE = ("llm_request", 1_790_000_000_000_000_000, GIVEN)


class Port:
    """A listener on a port of its own, and what it took in."""

    def __init__(self) -> None:
        self.spans: list[RequestSpan] = []
        self.receiver = SpanReceiver(self._take)
        self.listener = Listener(self.receiver, "127.0.0.1:0")

    def _take(self, span: RequestSpan) -> None:
        self.spans.append(span)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}{PATH}"


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Port, httpx.AsyncClient]]:
    port = Port()
    await port.listener.start()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            for _ in range(100):
                try:
                    await client.get(f"http://127.0.0.1:{port.listener.port}/")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
            port.receiver.received.refused.clear()
            yield port, client
    finally:
        await port.listener.stop()


async def status_of(
    client: httpx.AsyncClient,
    port: Port,
    body: bytes | AsyncIterator[bytes],
    headers: dict[str, str],
) -> int:
    """Of one export. One whose body is not read may find the connection closed before its answer,
    which is as good as a 413.
    """
    try:
        return (await client.post(port.url, content=body, headers=headers)).status_code
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        return 413


def post(body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Port]:
    """Its status, and the port that it came to."""

    async def run() -> tuple[int, Port]:
        async with opened() as (port, client):
            return await status_of(client, port, body, PROTOBUF | (headers or {})), port

    return asyncio.run(run())


@pytest.mark.parametrize("encoded", [False, True])
def test_spans_over_http(encoded: bool) -> None:
    """Plain or gzipped, as OpenTelemetry's exporters send them."""
    body = export([ONE, ("boot", 1, {})])
    headers = {"content-encoding": "gzip"} if encoded else {}
    status, port = post(gzip.compress(body) if encoded else body, headers)
    assert status == 200
    assert [each.request_id for each in port.spans] == ["cmpl-1"]
    assert port.receiver.received.requests == 1
    assert port.receiver.received.ignored == {"other_span": 1}


def test_spans_over_grpc_on_the_same_port() -> None:
    """The exporter of OpenTelemetry that vLLM uses by default."""
    grpc = pytest.importorskip("grpc")

    async def run() -> Port:
        async with opened() as (port, _):
            where = f"127.0.0.1:{port.listener.port}"
            async with grpc.aio.insecure_channel(where) as channel:
                await channel.unary_unary(METHOD)(export([ONE] * 3), timeout=20)
            return port

    assert len(asyncio.run(run()).spans) == 3


def test_grpc_refuses_what_cannot_be_read_and_what_is_compressed() -> None:
    """A gzip bomb never reaches the library's decompressor unbounded."""
    grpc = pytest.importorskip("grpc")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def run() -> tuple[list[object], Port]:
        codes: list[object] = []
        async with opened() as (port, _):
            where = f"127.0.0.1:{port.listener.port}"
            async with grpc.aio.insecure_channel(where) as channel:
                call = channel.unary_unary(METHOD)
                bomb = bytes(200 << 20)
                for body, way in ((b"\xff" * 50, None), (bomb, grpc.Compression.Gzip)):
                    try:
                        await call(body, timeout=60, compression=way)
                    except grpc.aio.AioRpcError as error:
                        codes.append(error.code())
            return codes, port

    codes, port = asyncio.run(run())
    assert codes[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert codes[1] in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert port.receiver.received.refused["malformed"] == 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500 << 10, "the client's own copies, not the server's of what it unpacks"


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b"\xff\xff\xff\xff", {}, 400, "malformed"),
        (b"\x0a\x7f\x00", {}, 400, "malformed"),
        (export([ONE])[:-3], {}, 400, "malformed"),
        (b"{}", {"content-type": "application/json"}, 415, "not_protobuf"),
        (b"", {"content-encoding": "br"}, 415, "not_protobuf"),
        (b"not gzip", {"content-encoding": "gzip"}, 400, "malformed"),
        (gzip.compress(export([ONE]))[:-9], {"content-encoding": "gzip"}, 400, "malformed"),
        (bytes(LARGEST_BODY + 1), {}, 413, "too_large"),
    ],
)
def test_what_is_no_export_is_refused_with_a_reason(
    body: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    got, port = post(body, headers)
    assert (got, port.receiver.received.refused) == (status, {reason: 1})


def test_another_path_is_not_found() -> None:
    async def run() -> tuple[int, Port]:
        async with opened() as (port, client):
            answer = await client.get(port.url)
            return answer.status_code, port

    status, port = asyncio.run(run())
    assert (status, port.receiver.received.refused) == (404, {"not_found": 1})


def test_a_gzip_bomb_is_refused_as_it_unpacks() -> None:
    """1 GiB of zeros in 1 MiB."""
    import zlib

    packer, piece = zlib.compressobj(9, wbits=31), bytes(1 << 24)
    bomb = b"".join([*(packer.compress(piece) for _ in range(64)), packer.flush()])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, port = post(bomb, {"content-encoding": "gzip"})
    assert (status, port.receiver.received.refused) == (413, {"too_large": 1})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_body_without_an_announced_length_is_read_to_the_bound_only() -> None:
    sent = 0

    async def run() -> tuple[int, Port]:
        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while sent < 100 << 20:
                sent += 1 << 20
                yield bytes(1 << 20)

        async with opened() as (port, client):
            return await status_of(client, port, endless(), PROTOBUF), port

    status, port = asyncio.run(run())
    assert (status, port.receiver.received.refused) == (413, {"too_large": 1})
    assert sent < 40 << 20


def test_millions_of_empty_spans_make_no_objects() -> None:
    """Four million in one body, and what stands before the bound is used."""
    scope = b"\x12\x00" * (LARGEST_BODY // 2 - 64)
    inner = b"\x12" + _varint(len(scope)) + scope
    body = b"\x0a" + _varint(len(inner)) + inner
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, port = post(body)
    assert (status, port.receiver.received.refused) == (400, {"malformed": 1})
    assert port.receiver.received.ignored["other_span"] <= MOST_MESSAGES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def test_a_connection_that_says_little_holds_up_nobody() -> None:
    """Neither half of a gRPC preface nor half of a head."""

    async def run() -> int:
        async with opened() as (port, client):
            slow = [
                await asyncio.open_connection("127.0.0.1", port.listener.port) for _ in range(20)
            ]
            for number, (_, writer) in enumerate(slow):
                writer.write(b"PRI * HT" if number % 2 else b"POST /v1/tra")
            answer = await client.post(port.url, content=export([ONE]), headers=PROTOBUF)
            for _, writer in slow:
                writer.close()
            return answer.status_code

    assert asyncio.run(run()) == 200


def test_addresses() -> None:
    assert address(":4318") == ("0.0.0.0", 4318)
    assert address("[::1]:1") == ("::1", 1)
    for text in ("4318", "host:", "host:99999", ""):
        with pytest.raises(SpecError, match="expected HOST:PORT"):
            address(text)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_one_line(taken: int) -> None:
    listener = Listener(SpanReceiver(lambda _: None), f"127.0.0.1:{taken}")
    with pytest.raises(CommandError, match=f"got --otlp 127.0.0.1:{taken}, which cannot"):
        asyncio.run(listener.start())
