"""A gateway on emulated engines, each in an actor of a Ray of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.ray.engine import RayEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import FOR_THE_RUN, LAW, Call, call
from tests.server.harness import Collector
from tests.support import missing

HANG = 3.0  # seconds


def require_ray() -> None:
    """Go on only where Ray can be imported."""
    try:
        import ray  # noqa: F401
    except ImportError:
        missing("ray", "`make setup-ray` installs it")


@dataclass
class Actors:
    """A gateway that serves, and the engines by server."""

    app: FastAPI
    gateway: Gateway
    pool: Replicas
    engines: dict[int, RayEngine]
    collector: Collector = field(default_factory=Collector)

    def ask(self, tokens: int, number: int = 0, **fields: Any) -> Call:
        body = {
            "model": "tiny",
            "prompt": [305, 300 + number],
            "max_tokens": 1000,
            "temperature": 0,
            "kendall_forced_output_tokens": tokens,
        }
        return Call(self.app, "POST", "/v1/completions", body | fields)

    async def resize(self, replicas: int) -> int:
        return (await call(self.app, "PUT", "/admin/servers", {"replicas": replicas})).status

    def served(self, server_id: int) -> int:
        """Tokens so far of the furthest request in service there."""
        return max((each.output_tokens_so_far for each in self.on(server_id)), default=0)

    def on(self, server_id: int) -> Any:
        return self.gateway.batcher.running()[server_id]


@asynccontextmanager
async def actors(make: Any = None, replicas: int = 2, **settings: Any) -> AsyncIterator[Actors]:
    engines: dict[int, RayEngine] = {}
    made = make or partial(EmulatedEngine, parse_law(LAW))

    def engine(server_id: int) -> RayEngine:
        engines[server_id] = RayEngine(made, hang_timeout=HANG)
        return engines[server_id]

    supervision = SupervisionSettings(stuck_timeout=0)
    given: dict[str, Any] = {
        "model": "tiny",
        "served_model_name": "tiny",
        "engine": "ray",
        "policy": "continuous:max_batch_size=8",
        "prediction_interval": 0,
        "allow_forced_lengths": True,
        "security": FOR_THE_RUN,
        "supervision": supervision,
    }
    pool = Replicas(engine, replicas, supervision)
    gateway = Gateway(Settings(**(given | settings)), pool, parse_law(LAW))
    ready = asyncio.get_running_loop().create_future()
    app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
    async with app.router.lifespan_context(app):
        await ready
        found = Actors(app, gateway, pool, engines)
        gateway.batcher.observers.add(found.collector)
        yield found
