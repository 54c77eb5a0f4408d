"""A gateway on several emulated engines, each of which can die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import FOR_THE_RUN, LAW, Call, call
from tests.server.harness import Collector
from tests.server.mortal import MortalEngine

QUIET = SupervisionSettings(stuck_timeout=0)


@dataclass
class Pooled:
    """A gateway that serves, its engines by server, and the records it writes."""

    app: FastAPI
    gateway: Gateway
    pool: Replicas
    engines: dict[int, MortalEngine]
    records: list[Record] = field(default_factory=list)

    def ask(self, tokens: int, number: int = 0, **fields: Any) -> Call:
        body = {
            "model": "tiny",
            "prompt": [5, number],
            "max_tokens": 1000,
            "kendall_forced_output_tokens": tokens,
        }
        return Call(self.app, "POST", "/v1/completions", body | fields)

    async def resize(self, replicas: object) -> Call:
        return await call(self.app, "PUT", "/admin/servers", {"replicas": replicas})

    async def servers(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await call(self.app, "GET", "/admin/servers")).json()
        return answer

    async def states(self) -> dict[int, str]:
        return {each["id"]: each["state"] for each in (await self.servers())["servers"]}

    @property
    def in_service(self) -> list[int]:
        return [len(server) for server in self.gateway.batcher.running()]


@asynccontextmanager
async def pooled(
    replicas: int = 2,
    policy: str = "continuous:max_batch_size=4",
    *,
    law: str = LAW,
    start_takes: float = 2.0,
    engine: type[MortalEngine] = MortalEngine,
    **settings: Any,
) -> AsyncIterator[Pooled]:
    """Its first start takes no time, every later one of an engine `start_takes`."""
    engines: dict[int, MortalEngine] = {}

    def make(server_id: int) -> MortalEngine:
        engines[server_id] = engine(parse_law(law), seed=server_id, start_takes=start_takes)
        return engines[server_id]

    settings = {
        "model": "tiny",
        "served_model_name": "tiny",
        "policy": policy,
        "prediction_interval": 0,
        "allow_forced_lengths": True,
        "supervision": QUIET,
        "security": FOR_THE_RUN,
        "replicas": replicas,
    } | settings
    asked = Settings(**settings)
    pool = Replicas(make, replicas, asked.supervision)
    gateway = Gateway(asked, pool, parse_law(law))
    ready = asyncio.get_running_loop().create_future()
    app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
    async with app.router.lifespan_context(app):
        await ready
        collector = Collector()
        gateway.batcher.observers.add(collector)
        yield Pooled(app, gateway, pool, engines, collector.records)
