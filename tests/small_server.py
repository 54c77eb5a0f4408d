"""A small server with OpenAI's API, as a user may have one: three slots, and `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.loadgen.fake_server import in_a_thread, listening

SLOTS, STEP = 3, 0.02  # seconds of a token


@dataclass
class SmallServer:
    """Some thirty lines of a server: what it tells of itself, and which key it wants."""

    key: str | None = None
    others: int = 0  # requests of others in it
    ended_of_others: int = 0  # for each of ours
    metrics: bool = True
    url: str = ""
    ended: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    def _refused(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"

    async def models(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "small", "owned_by": "me"}]})

    async def counters(self, _: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        ended = self.ended * (1 + self.ended_of_others)
        values = {
            "num_requests_running": self.others,
            "num_requests_waiting": 0,
            "request_queue_time_seconds_sum": 0,
            "request_queue_time_seconds_count": ended,
        }
        return web.Response(text="".join(f"vllm:{key} {value}\n" for key, value in values.items()))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        async with self._slots:
            await response.prepare(request)
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(STEP)
                choice = {"index": 0, "text": "t", "finish_reason": None}
                await response.write(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())
            self.ended += 1
        usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        await response.write(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def _serving(server: SmallServer) -> AsyncIterator[SmallServer]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.counters)
    app.router.add_post("/v1/completions", server.complete)
    async with listening(app) as server.url:
        yield server


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[SmallServer]:
    """On a loop of its own."""
    with in_a_thread(lambda: _serving(SmallServer(**settings))) as server:
        yield server
