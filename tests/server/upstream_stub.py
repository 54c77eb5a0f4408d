"""A server with OpenAI's API, written by the test: raw HTTP/1.1 over a Unix socket, so that a whole
conversation runs on virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kendall.server.engines.http.engine import HttpEngine
from kendall.server.engines.http.pool import HttpOptions
from tests.virtual_time import run_with_sockets

MODEL = "m"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def fields(self) -> Any:
        return json.loads(self.body)

    def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    def whole(self, body: Any = None, status: int = 200, **headers: str) -> None:
        """An answer with a length."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"content_type": "application/json", "content_length": str(len(data))}
        self.head(status, **(kind | headers))
        self.writer.write(data)

    def begin(self, **headers: str) -> None:
        """A stream of events."""
        kind = {"content_type": "text/event-stream; charset=utf-8", "transfer_encoding": "chunked"}
        self.head(200, **(kind | headers))

    def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """As where the process is killed."""
        self.writer.transport.abort()


Behaviour = Callable[[Asked], Awaitable[None]]


def frame(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()


def streams(tokens: int = 3, gap: float = 1.0, first: float = 1.0) -> Behaviour:
    """A token every `gap` seconds, after `first`; the last one ends it."""

    async def behave(asked: Asked) -> None:
        asked.begin()
        for number in range(1, tokens + 1):
            await asyncio.sleep(first if number == 1 else gap)
            asked.piece(frame(f"t{number}", "length" if number == tokens else None))
        asked.piece(b"data: [DONE]\n\n")
        asked.end()

    return behave


def answers(body: Any = None, status: int = 200, after: float = 1.0, **headers: str) -> Behaviour:
    """One whole answer."""

    async def behave(asked: Asked) -> None:
        await asyncio.sleep(after)
        given = {"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": USAGE}
        asked.whole(given if body is None else body, status, **headers)

    return behave


def dies(after: float = 1.0, tokens: int = 0) -> Behaviour:
    """The connection is reset, before an answer or behind some tokens."""

    async def behave(asked: Asked) -> None:
        if tokens:
            asked.begin()
        for number in range(tokens):
            await asyncio.sleep(after)
            asked.piece(frame(f"t{number + 1}"))
        await asyncio.sleep(after)
        asked.abort()

    return behave


async def hangs(asked: Asked) -> None:
    """Nothing, ever."""
    del asked
    await asyncio.get_running_loop().create_future()


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One for each call."""
    left = iter(behaviours)

    async def behave(asked: Asked) -> None:
        await next(left)(asked)

    return behave


@dataclass
class Stub:
    """`behave` answers the calls; `routes` what is asked with GET, and /tokenize."""

    path: str
    behave: Behaviour = field(default_factory=streams)
    routes: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    closed: int = 0  # calls whose connection was closed before their answer's end
    most: int = 0  # calls at once, at most
    now: int = 0
    frozen: bool = False  # as by SIGSTOP: it accepts, and says nothing
    _server: asyncio.Server | None = None

    def __post_init__(self) -> None:
        models = {"data": [{"id": MODEL, "max_model_len": 1000}]}
        given = {"/v1/models": (200, models), "/health": (200, None), "/tokenize": (404, None)}
        self.routes = given | self.routes

    @property
    def calls(self) -> list[Asked]:
        return [
            asked
            for asked in self.asked
            if asked.method == "POST" and asked.path not in self.routes
        ]

    async def up(self) -> Stub:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    def down(self) -> None:
        """As where the process is killed: nobody listens, every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        Path(self.path).unlink(missing_ok=True)
        for asked in self.asked:
            asked.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(method, path, headers, body, writer)
        self.asked.append(asked)
        if self.frozen:
            await hangs(asked)
        if path in self.routes or method == "GET":
            status, said = self.routes.get(path, (404, None))
            asked.whole(said, status)
            return
        await self._answer(asked, reader)

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        """Until it is whole, or nobody waits for it."""
        self.now += 1
        self.most = max(self.most, self.now)
        answering = asyncio.ensure_future(self.behave(asked))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        self.now -= 1
        if not answering.done():
            answering.cancel()
            self.closed += 1
            raise ConnectionError
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        answering.result()


@contextlib.contextmanager
def sockets(count: int = 1) -> Iterator[list[Stub]]:
    """Stubs that are not up yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield [Stub(f"{folder}/{index}") for index in range(count)]


def play(test: Callable[..., Awaitable[None]], *, stubs: int = 1) -> None:
    """The test with so many stubs that are not up yet, on virtual time."""
    with sockets(stubs) as made:
        run_with_sockets(test(*made))


@contextlib.asynccontextmanager
async def up(
    *stubs: Stub, of: Sequence[Stub] | None = None, **options: Any
) -> AsyncIterator[HttpEngine]:
    """These are up, and there is an engine before all `of` them; nothing is left afterwards."""
    engine = engine_of(*(stubs if of is None else of), **options)
    for stub in stubs:
        await stub.up()
    try:
        yield engine
    finally:
        await engine.stop()
        for stub in stubs if of is None else of:
            stub.down()
        await asyncio.sleep(0.1)


def engine_of(*stubs: Stub, at_first: int | None = None, **options: Any) -> HttpEngine:
    """An engine before these, or before so many of them; it reaches all."""
    by_url = {f"http://stub-{index}": stub.path for index, stub in enumerate(stubs)}
    given = HttpOptions(urls=tuple(by_url)[:at_first], **options)
    return HttpEngine(given, lambda url: aiohttp.UnixConnector(by_url[url], limit=0))
