"""A whole gateway before servers that the test writes, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import FOR_THE_RUN, Call
from tests.server.harness import Collector
from tests.server.upstream_stub import Stub, up

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Before:
    """The gateway, its application and its records."""

    app: FastAPI
    gateway: Gateway
    collector: Collector

    def call(self, body: Any, path: str = COMPLETIONS, **headers: str) -> Call:
        """A call under way; headers with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Call(self.app, "POST", path, body, named)

    async def answer(self, body: Any, path: str = COMPLETIONS, **headers: str) -> Call:
        made = self.call(body, path, **headers)
        await made.task
        return made

    async def get(self, path: str) -> Any:
        made = Call(self.app, "GET", path)
        await made.task
        return made.json()

    @property
    def records(self) -> list[Record]:
        return self.collector.records


@contextlib.asynccontextmanager
async def before(
    *stubs: Stub,
    of: Sequence[Stub] | None = None,
    law: LatencyModel | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Before]:
    """A gateway before these, started."""
    given: dict[str, Any] = {
        "model": "",
        "served_model_name": "http",
        "engine": "http",
        "engine_url": ("http://stub-0",),
        "prediction_interval": 0,
        "security": FOR_THE_RUN,
        "supervision": SupervisionSettings(),
    }
    async with up(*stubs, of=of, **(engine or {})) as behind:
        gateway = Gateway(Settings(**(given | settings)), behind, law)
        ready = asyncio.get_running_loop().create_future()
        app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
        async with app.router.lifespan_context(app):
            await ready
            collector = Collector()
            gateway.batcher.observers.add(collector)
            yield Before(app, gateway, collector)
