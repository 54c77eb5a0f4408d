"""An emulated engine that can die, hang, refuse to start again and answer differently; and a
gateway on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    EngineStartError,
    Token,
    TokenStream,
)
from kendall.server.engines.emulated import VOCABULARY, EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import FOR_THE_RUN, LAW
from tests.server.harness import Collector


class SilentOnProofs(EmulatedEngine):
    """Makes no token of the gateway's own request."""

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        if requests[0].request.id.startswith("proof"):
            return [TokenStream(requests[0].request.id)]
        return super().dispatch(server_id, requests, padded=padded, joining=joining)


@dataclass(frozen=True)
class Given:
    """One dispatch as the engine saw it."""

    life: int
    requests: tuple[EngineRequest, ...]
    padded: bool
    joining: bool


class MortalEngine(EmulatedEngine):
    """`start_takes` seconds a start (the first is at once); `start_fails` starts fail after the
    first.
    """

    def __init__(
        self, law: LatencyModel, *, start_takes: float = 2.0, start_fails: int = 0, **bounds: Any
    ) -> None:
        super().__init__(law, **bounds)
        self.start_takes, self.start_fails = start_takes, start_fails
        self.life = 0
        self.alive = False
        self.given: list[Given] = []

    async def start(self) -> Capabilities:
        await self.stop()
        for server in self._servers:
            vars(server).pop("_schedule", None)
        if self.life:
            await asyncio.sleep(self.start_takes)
            if self.start_fails:
                self.start_fails -= 1
                raise EngineStartError("got no memory; expected some")
        self.life += 1
        self.alive = True
        return await super().start()

    async def stop(self) -> None:
        self.alive = False
        await super().stop()

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        if not self.alive:
            raise RuntimeError("the engine is not running")
        return await super().encode(text, special_tokens=special_tokens)

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        assert self.alive, "a dispatch to an engine that is down"
        self.given.append(Given(self.life, tuple(requests), padded, joining))
        return super().dispatch(server_id, requests, padded=padded, joining=joining)

    def kill(self, reason: str = "killed") -> None:
        """As the real one: it says so, then the streams fail that still have a listener."""
        if not self.alive:
            return
        self.alive = False
        streams = [answer.stream for server in self._servers for answer in server._answers.values()]
        for server in self._servers:
            server.drop()
        if self.on_death is not None:
            self.on_death(reason)
        for stream in streams:
            stream.fail(reason)

    def hang(self) -> None:
        """No more steps, and nobody is told."""
        for server in self._servers:
            if server._timer is not None:
                server._timer.cancel()
            server._schedule = lambda: None  # type: ignore[method-assign]


class Forgetful(MortalEngine):
    """Its second life answers differently."""

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        streams = super().dispatch(server_id, requests, padded=padded, joining=joining)
        if self.life > 1:
            for stream in streams:
                answer = self._servers[server_id]._answers[stream.request_id]
                answer.token = lambda: Token(255, "other")  # type: ignore[method-assign]
        return streams


@asynccontextmanager
async def faulty(
    policy: str = "continuous:max_batch_size=4",
    engine: MortalEngine | None = None,
    law: LatencyModel | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[FastAPI, Gateway, MortalEngine, list[Record]]]:
    """A gateway on a mortal engine, started, and the records it writes."""
    defaults = {
        "model": "tiny",
        "served_model_name": "tiny",
        "policy": policy,
        "prediction_interval": 0,
        "allow_forced_lengths": True,
    }
    engine = engine or MortalEngine(parse_law(LAW))
    settings = {
        "supervision": SupervisionSettings(stuck_timeout=0),
        "security": FOR_THE_RUN,
    } | settings
    gateway = Gateway(Settings(**(defaults | settings)), engine, law or parse_law(LAW))
    ready = asyncio.Event()
    app = create_app(gateway, on_ready=lambda _: ready.set())
    collector = Collector()
    async with app.router.lifespan_context(app):
        await ready.wait()
        gateway.batcher.observers.add(collector)
        yield app, gateway, engine, collector.records


def words(count: int) -> str:
    """What the emulated engine answers with so many tokens: each position has its word."""
    return "".join(
        VOCABULARY[1 + position % (len(VOCABULARY) - 1)] for position in range(1, count + 1)
    )
