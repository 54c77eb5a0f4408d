"""HTTP/1.1 on a raw socket: every form of answer that a server may give, pieces cut anywhere,
connections kept or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

import pytest

import kendall.loadgen.sending.client.pool
from kendall.loadgen.sending.client.pool import ConnectionPool
from kendall.loadgen.sending.client.wire import Address, SenderConnection
from tests.eventually import eventually

HEAD = b"HTTP/1.1 200 OK\r\nA-Header: one\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
SIZED = HEAD + b"content-length: 5\r\n\r\nabcde"
UNTIL_CLOSED = HEAD + b"connection: close\r\n\r\nabcde"
Act = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Told:
    """Keeps what a receiver is told."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""
        self.ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.status, self.headers = status, dict(headers)

    def on_data(self, data: bytes, now: float) -> None:
        self.body += data

    def on_end(self, now: float) -> None:
        self.ending.set_result("end")

    def on_lost(self, reason: str, now: float) -> None:
        self.ending.set_result(reason)


class Raw:
    """Acts once per request; keeps the requests' bytes and counts connections."""

    def __init__(self, act: Act) -> None:
        self.act, self.port, self.connections = act, 0, 0
        self.got: list[bytes] = []
        self.carried: list[int] = []  # which connection each request came by
        self.writers: list[asyncio.StreamWriter] = []
        self.handlers: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections = self.connections + 1
        self.writers.append(writer)
        self.handlers.append(cast("asyncio.Task[None]", asyncio.current_task()))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.carried.append(number)
                self.got.append(head + await reader.readexactly(size))
                await self.act(writer)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def raw(act: Act) -> AsyncIterator[Raw]:
    server = Raw(act)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server
        for writer in server.writers:
            writer.transport.abort()
        await asyncio.gather(*server.handlers)  # they see it


def writes(*parts: bytes, close: bool = False) -> Act:
    async def act(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        if close:
            writer.close()

    return act


async def ask(pool: ConnectionPool) -> Told:
    told = Told()
    connection: SenderConnection = pool.take() or await pool.connect()
    connection.send(pool.address.message(b"{}", "id-1"), told)
    await asyncio.wait_for(told.ending, 60)
    return told


def talk(act: Act, times: int = 1, reserve: int = 1) -> tuple[list[Told], Raw]:
    async def main() -> tuple[list[Told], Raw]:
        async with (
            raw(act) as server,
            ConnectionPool(
                Address(f"http://127.0.0.1:{server.port}/v1/x?y=1", {"authorization": "Bearer k"}),
                reserve,
            ) as pool,
        ):
            return [await ask(pool) for _ in range(times)], server

    return asyncio.run(main())


@pytest.mark.parametrize(
    "act",
    [
        writes(CHUNKED),
        writes(SIZED),
        writes(UNTIL_CLOSED, close=True),
        writes(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED),
        writes(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", CHUNKED),
        writes(*(CHUNKED[i : i + 1] for i in range(len(CHUNKED)))),
    ],
)
def test_every_form_of_body_is_read_to_its_end(act: Act) -> None:
    (told,), server = talk(act)
    assert (told.status, told.body, told.ending.result()) == (200, b"abcde", "end")
    assert told.headers["a-header"] == "one"
    head, _, body = server.got[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/x?y=1 HTTP/1.1"
    assert {
        b"host: 127.0.0.1:%d" % server.port,
        b"authorization: Bearer k",
        b"x-request-id: id-1",
        b"content-length: 2",
    } <= set(lines)
    assert body == b"{}"


def test_cuts_anywhere_make_no_difference() -> None:
    for cut in range(1, len(CHUNKED)):
        (told,), _ = talk(writes(CHUNKED[:cut], CHUNKED[cut:]))
        assert (told.body, told.ending.result()) == (b"abcde", "end"), cut


def test_a_connection_is_used_again_unless_the_server_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.pool, "KEEPALIVE", math.inf)
    _, kept = talk(writes(CHUNKED), times=5)
    assert len(set(kept.carried)) == 1
    told, closed = talk(writes(UNTIL_CLOSED, close=True), times=3)
    assert [one.body for one in told] == [b"abcde"] * 3
    assert len(set(closed.carried)) == 3
    _, said = talk(writes(SIZED.replace(b"A-Header: one", b"connection: close")), times=3)
    assert len(set(said.carried)) == 3


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (writes(b"", close=True), "closed the connection without an answer"),
        (writes(HEAD, close=True), "closed the connection without an answer"),
        (writes(b"SSH-2.0-OpenSSH\r\n"), "not HTTP/1.1"),
        (writes(CHUNKED[:80] + b"zz\r\n"), "not HTTP/1.1"),
    ],
)
def test_what_is_no_answer_is_lost_and_says_why(act: Act, reason: str) -> None:
    (told,), _ = talk(act)
    assert reason in told.ending.result()


def test_idle_connections_are_dropped_before_the_server_closes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> int:
        async with (
            raw(writes(SIZED)) as server,
            ConnectionPool(Address(f"http://127.0.0.1:{server.port}", {}), 1) as pool,
        ):
            await ask(pool)
            before = server.connections
            monkeypatch.setattr(kendall.loadgen.sending.client.pool, "KEEPALIVE", -1.0)
            assert pool.take() is None
            await ask(pool)
            return server.connections - before

    assert asyncio.run(main()) >= 1


def test_the_reserve_is_there_before_the_first_request_and_grows_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.pool, "KEEPALIVE", math.inf)

    async def main() -> None:
        async with (
            raw(writes(SIZED)) as server,
            ConnectionPool(Address(f"http://127.0.0.1:{server.port}", {}), 4) as pool,
        ):
            taken = [pool.take() for _ in range(4)]
            assert None not in taken
            assert pool.take() is None
            await eventually(pool.take)

    asyncio.run(main())


def test_the_reserve_is_filled_again_once_less_than_half_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.pool, "KEEPALIVE", math.inf)

    async def main() -> list[int]:
        async with (
            raw(writes(SIZED)) as server,
            ConnectionPool(Address(f"http://127.0.0.1:{server.port}", {}), 4) as pool,
        ):
            tasks = []
            for _ in range(4):
                before = len(asyncio.all_tasks())
                assert pool.take() is not None
                tasks.append(len(asyncio.all_tasks()) - before)
            return tasks

    assert asyncio.run(main()) == [0, 0, 1, 0], "once"


def test_a_pool_that_is_left_has_closed_its_connections_already() -> None:
    """Idle ones, and one whose answer has not come."""

    async def main() -> list[int]:
        async with raw(writes(b"")) as server:
            async with ConnectionPool(Address(f"http://127.0.0.1:{server.port}", {}), 3) as pool:
                taken = [each for _ in range(3) if (each := pool.take()) is not None]
                taken[0].send(pool.address.message(b"{}", "id-1"), Told())
                pool.put(taken[1], 0.0)
                sockets = [each.transport.get_extra_info("socket") for each in taken]
                assert min(each.fileno() for each in sockets) >= 0
            return [each.fileno() for each in sockets]

    assert asyncio.run(main()) == [-1] * 3


def test_nobody_there_is_the_requests_own_failure() -> None:
    async def main() -> None:
        async with ConnectionPool(Address("http://127.0.0.1:9", {}), 2) as pool:
            assert pool.take() is None
            with pytest.raises(OSError, match="127"):
                await pool.connect()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        Address(url, {})


def test_names_are_resolved_and_ports_default() -> None:
    assert (Address("http://localhost/v1", {}).port, Address("https://a.b", {}).port) == (80, 443)
    assert b"host: [::1]:8080" in Address("http://[::1]:8080/v1", {}).message(b"", "a")

    async def main() -> bytes:
        async with (
            raw(writes(SIZED)) as server,
            ConnectionPool(Address(f"http://localhost:{server.port}", {}), 1) as pool,
        ):
            return (await ask(pool)).body

    assert asyncio.run(main()) == b"abcde"


@pytest.mark.slow  # of real time
def test_two_requests_sent_together_are_microseconds_apart() -> None:
    """Least of fifty pairs: what stands between two requests of one sender, far below the gaps
    of 1,000 requests/s.
    """

    async def main() -> list[float]:
        now, apart = asyncio.get_running_loop().time, []
        async with (
            raw(writes(SIZED)) as server,
            ConnectionPool(Address(f"http://127.0.0.1:{server.port}", {}), 4) as pool,
        ):
            for _ in range(50):
                begins, told = [], [Told(), Told()]
                for receiver, connection in zip(
                    told, [await pool.connect(), await pool.connect()], strict=True
                ):
                    begins.append(now())
                    connection.send(pool.address.message(b"{}", "a"), receiver)
                await asyncio.gather(*(one.ending for one in told))
                apart += [later - earlier for earlier, later in itertools.pairwise(begins)]
        return apart

    assert min(asyncio.run(main())) < 0.0001
