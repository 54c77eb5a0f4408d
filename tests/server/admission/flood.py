"""An open-loop flood of small calls over many connections, cheap enough to offer 20 times what a
gateway serves from one core.

Each connection sends at its own instants of a fixed period and never waits for an answer to be due;
a call whose connection is still busy (its last one waits in the queue) is counted as held back, not
sent late.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import cast

import uvloop


@dataclass
class Flood:
    """What came back: latencies in seconds by status, the queueing delays that the gateway
    states (ms), what went wrong.
    """

    sent: int = 0
    held_back: int = 0
    lost: int = 0  # connections that broke
    latencies: dict[int, list[float]] = field(default_factory=dict)
    delays: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    lateness: list[float] = field(
        default_factory=list
    )  # of the sending, seconds: the sender has little to do, so this is the machine

    @property
    def answered(self) -> int:
        return sum(len(each) for each in self.latencies.values())

    def quantile(self, status: int, level: float) -> float:
        return _quantile(self.latencies[status], level)

    def late(self, level: float) -> float:
        return _quantile(self.lateness, level)


def _quantile(values: list[float], level: float) -> float:
    found = sorted(values)
    return found[min(len(found) - 1, int(level * len(found)))]


def request_bytes(**fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True} | fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: flood\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, flood: Flood, request: bytes) -> None:
        self._flood = flood
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._sent_at: float | None = None
        self._buffer = b""
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from it

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._flood.lost += 1
        self._transport = None

    def fire(self) -> None:
        if self._transport is None:
            return
        if self._sent_at is not None:
            self._flood.held_back += 1
            return
        self._sent_at = self._loop.time()
        self._flood.sent += 1
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
        if len(rest) >= int(headers[b"content-length"]):
            self._answer(int(head[9:12]), headers)

    def _answer(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert self._sent_at is not None
        self._flood.latencies.setdefault(status, []).append(self._loop.time() - self._sent_at)
        if b"x-kendall-queueing-delay-ms" in headers:
            self._flood.delays.append(float(headers[b"x-kendall-queueing-delay-ms"]))
        if b"retry-after-ms" in headers:
            self._flood.retry_after.append(float(headers[b"retry-after-ms"]))
        self._sent_at, self._buffer = None, b""

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()


async def _accepted(port: int) -> None:
    """Connections are taken in their order: one that is answered says that those before it are
    taken, and the storm of connecting over.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /version HTTP/1.1\r\nhost: flood\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()


async def flood(
    port: int, *, connections: int, rate: float, seconds: float, request: bytes
) -> Flood:
    """Offer `rate` calls per second, evenly over the connections; returns when every call is
    answered, or 30 s later.
    """
    loop, found = asyncio.get_running_loop(), Flood()
    protocols = []
    for _ in range(connections):
        _, protocol = await loop.create_connection(
            lambda: _Connection(found, request), "127.0.0.1", port
        )
        protocols.append(protocol)
    await _accepted(port)
    start, total = loop.time(), round(rate * seconds)
    for index in range(total):
        due = start + index / rate
        if due > loop.time() + 0.001:
            await asyncio.sleep(due - loop.time())
        elif index % 50 == 0:
            await asyncio.sleep(0)
        found.lateness.append(loop.time() - due)
        protocols[index % connections].fire()
    for _ in range(300):
        if found.answered + found.lost >= found.sent:
            break
        await asyncio.sleep(0.1)
    for protocol in protocols:
        protocol.close()
    await asyncio.sleep(0.05)
    return found


def run_flood(port: int, **options: object) -> Flood:
    """In a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(flood(port, **options))  # type: ignore[arg-type]
