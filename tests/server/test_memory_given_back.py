"""What a burst of clients made the gateway hold is collected and given back to the system afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from loadgen.gateway_process import GatewayProcess
from server import garbage
from tests.server.counts import tell
from tests.server.processes import gateway

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3"
KEY = "sk-client-0123456789"
TIMES = 10  # of each attack
KEPT = 20.0  # MiB that may stay
PIECES = 2048  # of 16 KiB: 32 MiB an attack, where it is read
WAITING = 1_000  # callers that leave


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `give_back` did, on a clock of milliseconds."""
    done: list[str] = []
    monkeypatch.setattr(garbage, "PERIOD", 0.001)
    monkeypatch.setattr(garbage, "_trim", lambda: done.append("trimmed"))
    monkeypatch.setattr(gc, "collect", lambda *_: done.append("collected"))
    return done


def test_memory_is_given_back_once_after_it_has_grown_and_only_at_a_quiet_moment(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert steps == ["collected", "trimmed"] * 2, "and again, so that many small bursts do not add up"
        resident = 90 << 20
        await asyncio.sleep(0.02)
        resident += garbage.GROWTH + 1
        await asyncio.sleep(0.05)
        assert steps == ["collected", "trimmed"] * 3
        giving_back.cancel()
        await asyncio.gather(giving_back, return_exceptions=True)

    asyncio.run(main())


def test_resident_memory_is_this_process_own() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        assert garbage.resident() == 0
        return
    kilobytes = int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0])
    assert garbage.resident() == pytest.approx(kilobytes * 1024, rel=0.1)
    garbage._trim()  # whatever the C library is


# the attacks, each on connections of its own

CHUNKED = b"%b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "empty trailers behind GET /health": (CHUNKED % b"GET /health" + b"0\r\n", b"a:\r\n" * 4096),
    "one trailer": (CHUNKED % b"GET /health" + b"0\r\na: ", b"v" * 16384),
    "one chunk extension": (CHUNKED % b"POST /v1/completions" + b"1;", b"e" * 16384),
    "a body without a key": (CHUNKED % b"POST /v1/completions", b"4000\r\n" + b"x" * 0x4000 + b"\r\n"),
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


async def leave_while_waiting(port: int, _: str) -> None:
    """Many callers at once, all of whom leave before they are served."""
    body = json.dumps({"model": "tiny", "prompt": [5] * 64, "max_tokens": 2000, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    request = head % (KEY.encode(), len(body)) + body
    clients = []
    for _ in range(WAITING):
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, request)
        clients.append(client)
    await asyncio.sleep(1.0)
    for client in clients:
        client.close()
    await asyncio.sleep(0.5)


def resident(pid: int) -> float:
    """MiB."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


async def settled(pid: int, before: float) -> float:
    """What is resident once the gateway had its quiet moment; waits no longer than for that."""
    for _ in range(80):
        if resident(pid) - before < KEPT / 2:
            break
        await asyncio.sleep(0.25)
    return resident(pid)


ATTACKS: dict[str, Callable[[int, str], Awaitable[None]]] = {**dict.fromkeys(ENDLESS, endless), "callers that leave": leave_while_waiting}


@pytest.mark.slow
def test_trap_the_memory_of_every_attack_comes_back(tmp_path: Path) -> None:
    """Unauthenticated but for the last. Each is made once before, so that what is made once is there."""
    running = gateway(tmp_path, "tiny", "--engine", "emulated", "--latency", LAW, "--policy", "single", "--api-key", KEY)

    async def play(process: GatewayProcess) -> dict[str, float]:
        await process.ready()
        port = int(process.url.rpartition(":")[2])
        kept = {}
        for name, attack in ATTACKS.items():
            await attack(port, name)
            await asyncio.sleep(3 * garbage.PERIOD)
            before = resident(process.pid)
            for _ in range(TIMES):
                await attack(port, name)
            kept[name] = await settled(process.pid, before) - before
            assert await process.is_healthy(), name
        return kept

    async def main() -> dict[str, float]:
        async with running:
            return await play(running)

    kept = asyncio.run(main())
    tell("memory kept after attacks, MiB", **{name: round(mebibytes, 1) for name, mebibytes in kept.items()})
    assert {name: mebibytes for name, mebibytes in kept.items() if mebibytes > KEPT} == {}
