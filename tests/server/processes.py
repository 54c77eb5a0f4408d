"""A gateway as a process of its own, its descendants, and clients on plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.server.engines.vllm.process import descendants
from tests.eventually import eventually


def gateway(
    folder: Path, *arguments: str, kind: type[GatewayProcess] = GatewayProcess
) -> GatewayProcess:
    """`kendall serve`, not yet started; its log and records lie in `folder`."""
    records = [
        "--record-file",
        str(folder / "records.jsonl"),
        "--prediction-interval",
        "0",
        "--allow-forced-lengths",
    ]
    return kind([*records, *arguments], free_port(0), folder / "gateway.log")


def engine_process(pid: int) -> int:
    """vLLM's EngineCore below a gateway. Raises LookupError where there is none."""
    for candidate in descendants(pid):
        with contextlib.suppress(OSError):
            if b"EngineCore" in Path(f"/proc/{candidate}/cmdline").read_bytes():
                return candidate
    raise LookupError("no EngineCore")


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def command(pid: int) -> str:
    """The words of its command line between zero bytes; "" where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


async def arrived(
    running: GatewayProcess, calls: int, sent: Iterable[asyncio.Task[Any]] = ()
) -> None:
    """The gateway has had so many, whatever became of them. Raises what one of the `sent` failed
    with, and where they do not come, what the gateway said of itself.
    """
    state: dict[str, Any] = {}

    async def there() -> bool:
        for call in sent:
            if call.done():
                call.result()
        state.update(await running.ask("GET", "/admin/state"))
        return int(state["arrivals"]["count"]) >= calls

    try:
        await eventually(there)
    except AssertionError as error:
        error.add_note(f"expected {calls} calls; {state}\n{running.log()[-4000:]}")
        raise


async def gone(pids: list[int]) -> list[int]:
    """Those that still run when all had the time to end."""
    with contextlib.suppress(AssertionError):
        await eventually(lambda: not any(map(alive, pids)))
    return [pid for pid in pids if alive(pid)]


class SocketCall:
    """One POST on a connection of its own."""

    def __init__(
        self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._body = json.dumps(body).encode()
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def send(self, *, limit: int = 1 << 16) -> SocketCall:
        """The whole request."""
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=limit)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(self._body)}\r\n"
        )
        self.writer.write(f"{head}{self._headers}connection: close\r\n\r\n".encode() + self._body)
        await self.writer.drain()
        return self

    async def answer(self) -> tuple[int, bytes]:
        """Status and body to the connection's end; status 0 where none came."""
        raw = bytearray()
        with contextlib.suppress(ConnectionError):
            while chunk := await self.reader.read(1 << 16):
                raw += chunk
        self.close()
        head, _, body = bytes(raw).partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0), body

    def close(self) -> None:
        """The client goes."""
        self.writer.close()


@dataclass
class ClosedLoop:
    """Clients that make calls one after the other; a subclass says how many, and what a call is,
    whose status it counts.
    """

    calls: ClassVar[int]
    clients: ClassVar[int]
    url: str
    statuses: Counter[int] = field(default_factory=Counter, kw_only=True)

    async def run(self) -> None:
        """All calls."""
        numbers = iter(range(self.calls))

        async def client() -> None:
            for number in numbers:
                await self.call(number)

        await asyncio.gather(*(client() for _ in range(self.clients)))

    async def call(self, number: int) -> None:
        """One, to the end of its answer."""
        raise NotImplementedError

    async def answered(self, count: int) -> None:
        """Return when so many calls have their answer."""
        while self.statuses.total() < count:  # noqa: ASYNC110 - a count only
            await asyncio.sleep(0.02)


def events(body: bytes) -> list[dict[str, Any]]:
    """The data of a stream (chunked or not), without its `[DONE]`."""
    lines = [line[6:].strip() for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def stream_text(body: bytes) -> tuple[str, bool]:
    """The text of a stream (chunked or not), and whether it came to its end without an error."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    text, error = "", False
    for line in lines:
        if line.strip() == b"[DONE]":
            return text, not error
        event = json.loads(line)
        error = error or "error" in event
        text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, False
