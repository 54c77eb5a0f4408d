"""A streaming server in the test's own process: the seam at the HTTP transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from aiohttp import web

MODELS = ("fake", "a", "b", "lora=0.5")  # that it lists; it serves whatever is asked for
Served = TypeVar("Served")
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def chunk(text: str = "x", finish: str | None = None) -> bytes:
    return event({"id": "a", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def chat_chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    return event({"id": "a", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}
    )


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def stream(
    request: web.Request, parts: list[bytes], gap: float = 0.0, **headers: str
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(gap)
    return response


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As the gateway does: the forced number of tokens, then the usage."""
    tokens = body.get("kendall_forced_output_tokens", body["max_tokens"])
    prompt = len(body["prompt"]) if "prompt" in body else 1
    parts = [chunk()] * (tokens - 1) + [chunk(finish="length"), usage(prompt, tokens), DONE]
    return await stream(request, parts, **{"x-kendall-queueing-delay-ms": "1.5"})


def row_of(request: web.Request) -> int:
    """The number of the request in the run's timetable."""
    return int(request.headers["x-request-id"].rpartition("-")[2])


class FakeServer:
    """Keeps the bodies it got, which rows they were, and the instants at which it got them."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.arrived_at: list[float] = []
        self.rows: list[int] = []  # of the run's timetable
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.arrived_at.append(asyncio.get_running_loop().time())
        body = await request.json()
        self.bodies.append(body)
        self.rows.append(row_of(request))
        return await self.handler(request, body)


@contextlib.asynccontextmanager
async def serving(handler: Handler = answer) -> AsyncIterator[FakeServer]:
    server = FakeServer(handler)
    app = web.Application()
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_post("/v1/chat/completions", server.handle)
    app.router.add_get("/v1/models", _models)
    async with listening(app) as server.url:
        yield server


@contextlib.asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Its URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def serving_in_a_thread(handler: Handler = answer) -> Iterator[str]:
    """The URL of a server on a loop of its own."""
    with in_a_thread(lambda: serving(handler)) as server:
        yield server.url


@contextlib.contextmanager
def in_a_thread(serve: Callable[[], AbstractAsyncContextManager[Served]]) -> Iterator[Served]:
    """What a server is, while it serves on a loop of its own."""
    loop, started, served = asyncio.new_event_loop(), threading.Event(), list[Served]()
    stop = asyncio.Event()

    async def main() -> None:
        async with serve() as server:
            served.append(server)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(60)
    try:
        yield served[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": name} for name in MODELS]})
