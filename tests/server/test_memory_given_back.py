"""What a burst of clients made the gateway hold is collected and given back to the system
afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.server.gateway import Gateway
from kendall.server.runtime import garbage
from tests.server.asgi import Call, completion, running
from tests.server.counts import resident, tell
from tests.server.processes import gateway
from tests.virtual_time import run_virtual

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3"
KEY = "sk-client-0123456789"
TIMES = 10  # of each attack
KEPT = 20.0  # MiB that may stay
PIECES = 8192  # of 16 KiB: 128 MiB an attack, where it is read
WAITING = 1_000  # callers that leave
MANY = 8_000
LEFT_CALL, LEFT_CALLS = (
    8.0,
    12.0,
)  # KiB that may stay of a call that left (17 while it waits): after one such crowd, after three


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `give_back` did, on virtual time, which knows no threads."""
    done: list[str] = []

    async def here(call: Callable[[], None]) -> None:
        call()

    monkeypatch.setattr(asyncio, "to_thread", here)
    monkeypatch.setattr(garbage, "PERIOD", 0.001)
    monkeypatch.setattr(garbage, "_trim", lambda: done.append("trimmed"))
    monkeypatch.setattr(gc, "collect", lambda *_: done.append("collected"))
    return done


def test_memory_is_given_back_once_after_it_has_grown_and_only_at_a_quiet_moment(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, busy = 100 << 20, True
    monkeypatch.setattr(garbage, "resident", lambda: resident)

    async def main() -> None:
        nonlocal resident, busy
        giving_back = asyncio.create_task(garbage.give_back(lambda: not busy))
        await asyncio.sleep(0.02)
        resident += 2 * garbage.GROWTH
        await asyncio.sleep(0.02)
        assert steps == [], "not while it works"
        busy = False
        await asyncio.sleep(0.05)
        assert steps == ["collected", "trimmed"], "once: the rest is in use"
        resident += garbage.AGAIN
        await asyncio.sleep(0.02)
        assert steps == ["collected", "trimmed"]
        resident += 1
        await asyncio.sleep(0.05)
        assert steps == ["collected", "trimmed"] * 2, (
            "and again, so that many small bursts do not add up"
        )
        resident = 90 << 20
        await asyncio.sleep(0.02)
        resident += garbage.GROWTH + 1
        await asyncio.sleep(0.05)
        assert steps == ["collected", "trimmed"] * 3
        giving_back.cancel()
        await asyncio.gather(giving_back, return_exceptions=True)

    run_virtual(main())


def test_resident_memory_is_this_process_own() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        assert garbage.resident() == 0
        return
    kilobytes = int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0])
    assert garbage.resident() == pytest.approx(kilobytes * 1024, rel=0.1)
    garbage._trim()  # whatever the C library is


# the attacks, each on connections of its own

CHUNKED = (
    b"%b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\ntransfer-encoding: chunked\r\n\r\n"
)
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "empty trailers behind GET /health": (CHUNKED % b"GET /health" + b"0\r\n", b"a:\r\n" * 4096),
    "one trailer": (CHUNKED % b"GET /health" + b"0\r\na: ", b"v" * 16384),
    "one chunk extension": (CHUNKED % b"POST /v1/completions" + b"1;", b"e" * 16384),
    "a body without a key": (
        CHUNKED % b"POST /v1/completions",
        b"4000\r\n" + b"x" * 0x4000 + b"\r\n",
    ),
    "a head": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 2731),
}


async def endless(port: int, name: str) -> None:
    """Send until the gateway closes. Raises AssertionError where it takes all."""
    begin, piece = ENDLESS[name]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = 0
    try:
        writer.write(begin)
        for _ in range(PIECES):
            writer.write(piece)
            await writer.drain()
            taken += 1
    except (ConnectionError, RuntimeError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert taken < PIECES, f"{name}: all of it was read"


HEAD, MESSAGE = b'{"model": "tiny", "prompt": [5], ', b'{"role": "user", "content": "hello there"}'
BOMBS: dict[
    str, tuple[str, Callable[[], bytes]]
] = {  # of a client with a key, each refused: a route and a body
    "131,072 sequences in 5 KB": (
        "completions",
        lambda: json.dumps({"model": "tiny", "prompt": ["a"] * 1024, "n": 128}).encode(),
    ),
    "15 MB in an unknown field": (
        "completions",
        lambda: HEAD + b'"anything": [' + b",".join([b"[]"] * 5_000_000) + b"]}",
    ),
    "one bad word of 15.6 MB": (
        "completions",
        lambda: HEAD + b'"bad_words": ["' + b"x" * 15_600_000 + b'"]}',
    ),
    "a form of 2 MB": (
        "completions",
        lambda: HEAD + b'"guided_json": {"enum": [' + b",".join([b'"choice"'] * 220_000) + b"]}}",
    ),
    "300,000 messages": (
        "chat/completions",
        lambda: b'{"model": "tiny", "messages": [' + b",".join([MESSAGE] * 300_000) + b"]}",
    ),
}


async def bomb(port: int, name: str) -> None:
    """Send it and read the answer to its end. Raises AssertionError where it is not refused as
    the client's own fault.
    """
    path, make = BOMBS[name]
    body = make()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: "
        f"close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode())
    writer.write(body)
    try:
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        await reader.read()
    finally:
        writer.close()
    assert status in (400, 413), name


async def leave_while_waiting(port: int, _: str, callers: int = WAITING) -> None:
    """Many callers at once, all of whom leave when all of them wait or are in service."""
    before = await counted(port, "kendall_requests_received_total")
    body = json.dumps(
        {"model": "tiny", "prompt": [5] * 64, "max_tokens": 1500, "ignore_eos": True}
    ).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        b"%b\r\ncontent-length: %d\r\n\r\n"
    )
    request = head % (KEY.encode(), len(body)) + body
    clients = []
    for _ in range(callers):
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, request)
        clients.append(client)
    async with asyncio.timeout(120):
        while await counted(port, "kendall_requests_received_total") < before + callers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for client in clients:
            client.close()
        while await counted(port, "kendall_requests_in_system"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def counted(port: int, metric: str) -> float:
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=60)).text
    return sum(
        float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    )


async def settled(pid: int, before: float) -> float:
    """What is resident once the gateway had its quiet moment; waits no longer than for that."""
    for _ in range(80):
        if mebibytes_of(pid) - before < KEPT / 2:
            break
        await asyncio.sleep(0.25)
    return mebibytes_of(pid)


def mebibytes_of(pid: int) -> float:
    return resident(pid) / 2**20


ATTACKS: dict[str, Callable[[int, str], Awaitable[None]]] = {
    **dict.fromkeys(ENDLESS, endless),
    **dict.fromkeys(BOMBS, bomb),
    "callers that leave": leave_while_waiting,
}


@pytest.mark.slow
def test_trap_the_memory_of_every_attack_comes_back(tmp_path: Path) -> None:
    """The endless ones without a key. Each is made once before, so that what is made once is
    there.
    """
    running = gateway(
        tmp_path,
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        LAW,
        "--policy",
        "single",
        "--api-key",
        KEY,
    )

    async def play(process: GatewayProcess) -> dict[str, float]:
        await process.ready()
        port = int(process.url.rpartition(":")[2])
        kept = {}
        for name, attack in ATTACKS.items():
            await attack(port, name)
            await asyncio.sleep(3 * garbage.PERIOD)
            before = mebibytes_of(process.pid)
            for _ in range(TIMES):
                await attack(port, name)
            kept[name] = await settled(process.pid, before) - before
            assert await process.is_healthy(), name
        return kept

    async def main() -> dict[str, float]:
        async with running:
            return await play(running)

    kept = asyncio.run(main())
    tell(
        "memory kept after attacks, MiB",
        **{name: round(mebibytes, 1) for name, mebibytes in kept.items()},
    )
    assert {name: mebibytes for name, mebibytes in kept.items() if mebibytes > KEPT} == {}


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Room for as many sockets in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, max(soft, MANY + 500)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (MANY + 500, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_callers_that_left_keep_no_objects() -> None:
    """Nor do what is kept of the last minute's arrivals and of busy times: objects between
    theirs would hold whole arenas of memory.
    """

    async def crowd(app: FastAPI, gateway: Gateway) -> int:
        calls = [
            Call(app, "POST", "/v1/completions", completion(max_tokens=1500))
            for _ in range(WAITING)
        ]
        while gateway.batcher.unanswered < WAITING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for call in calls:
            call.leave()
        await asyncio.gather(*(call.task for call in calls))
        del calls, call
        await asyncio.sleep(0.01)
        gc.collect()
        return sys.getallocatedblocks()

    async def main() -> int:
        async with running("single") as (app, gateway):
            await crowd(app, gateway)
            return -await crowd(app, gateway) + await crowd(app, gateway)

    assert run_virtual(main()) < 0.1 * WAITING


@pytest.mark.slow
def test_trap_8000_callers_that_left_at_once_are_not_held_three_times(tmp_path: Path) -> None:
    """What stays after the third such crowd is little more than after the first: it is used
    again.
    """
    running = gateway(
        tmp_path,
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        LAW,
        "--policy",
        "single",
        "--api-key",
        KEY,
    )

    async def burst(port: int, callers: int) -> float:
        await leave_while_waiting(port, "", callers)
        await asyncio.sleep(3 * garbage.PERIOD)
        return mebibytes_of(running.pid)

    async def main() -> list[float]:
        async with running:
            await running.ready()
            port = int(running.url.rpartition(":")[2])
            before = await burst(port, 10)
            return [await burst(port, MANY) - before for _ in range(3)]

    with many_files():
        kept = asyncio.run(main())
    tell(
        "memory kept after 8,000 callers left, MiB",
        bursts=[round(mebibytes, 1) for mebibytes in kept],
    )
    assert kept[0] * 1024 / MANY <= LEFT_CALL
    assert max(kept) * 1024 / MANY <= LEFT_CALLS
