"""Engines that are replicas of each other as one `Engine`: each is one server of the queue and has
a supervisor of its own.

A replica that is lost costs what it had in service, and nothing else: the queue takes that back,
and the others go on. With none left the engine is lost, and starting it again is waiting for one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kendall.server.engines.base import (
    Capabilities,
    Engine,
    EngineGoneError,
    EngineRequest,
    ServingEngine,
    Step,
    TokenStream,
)
from kendall.server.supervision.replicas.replica import ReadByOne, Replica
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.supervision.supervisor import Supervisor

NOT_RUNNING = "no replica serves"


class Replicas(ReadByOne):
    """`make(server_id)` makes an engine. `on_server_down(server_id, reason)` is called when one is
    lost, before its streams fail; `on_server_up` when it serves again.
    """

    tells_of_its_start = True  # each one's supervisor does

    def __init__(
        self, make: Callable[[int], Engine], count: int, settings: SupervisionSettings
    ) -> None:
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self.on_server_down: Callable[[int, str], None] | None = None
        self.on_server_up: Callable[[int], None] | None = None
        self._make, self._count, self._settings = make, count, settings
        self.replicas: dict[int, Replica] = {}
        self.restarts_of_removed = 0
        self._dead = True  # none serves, and whoever starts this engine knows
        self._changed = asyncio.Event()

    # life

    async def start(self) -> Capabilities:
        """The first time all of them, one after the other: the first one fetches the model. After
        that until one serves, which its own supervisor sees to. Raises EngineStartError.
        """
        if not self.replicas:
            await self._start_all()
        elif not self._dead:
            self._dead = True
            for replica in [each for each in self.replicas.values() if each.serves]:
                replica.supervisor.lost("it is replaced")
        while not any(replica.serves for replica in self.replicas.values()):
            if all(replica.hopeless for replica in self.replicas.values()):
                raise EngineGoneError("every replica is lost for good")
            self._changed.clear()
            await self._changed.wait()  # within the limit of whoever starts this
        self._dead = False
        return self.capabilities()

    async def _start_all(self) -> None:
        try:
            for server_id in range(self._count):
                replica = self.add(server_id)
                replica.capabilities = await replica.supervisor.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """See `Engine`. All at once."""
        self._dead = True
        replicas = list(self.replicas.values())
        await asyncio.gather(*(replica.supervisor.stop() for replica in replicas))
        self.replicas.clear()

    async def healthy(self) -> bool:
        """Whether one of them answers."""
        serving = [replica for replica in self.replicas.values() if replica.serves]
        return any(await asyncio.gather(*(replica.engine.healthy() for replica in serving)))

    def capabilities(self) -> Capabilities:
        """Of each of them, with the least memory of all, and how many there are."""
        started = [each for each in self.replicas.values() if each.capabilities is not None]
        staying = [each for each in started if not each.hopeless] or started
        known = [each.capabilities for each in staying if each.capabilities is not None]
        return dataclasses.replace(
            known[0],
            kv_cache_tokens=min(each.kv_cache_tokens for each in known),
            servers=len(known),
        )

    # replicas

    def add(self, server_id: int) -> Replica:
        """One more, not started."""
        engine = self._make(server_id)
        engine.on_step = partial(self._step, server_id)
        supervisor = Supervisor(
            engine,
            self._settings,
            on_down=partial(self._down, server_id),
            on_up=partial(self._up, server_id),
            on_given_up=partial(self._down, server_id),
            name=f"server {server_id}",
        )
        self.replicas[server_id] = Replica(server_id, engine, supervisor)
        return self.replicas[server_id]

    async def remove(self, server_id: int) -> None:
        """It ends now. Takes a bounded time."""
        replica = self.replicas[server_id]
        replica.leaving = replica.ended = True
        self.changed(f"server {server_id} is removed")
        await replica.supervisor.stop()
        self.restarts_of_removed += replica.supervisor.restarts
        del self.replicas[server_id]
        self.changed(f"server {server_id} was removed")

    def changed(self, reason: str) -> None:
        """Replicas came or went: wakes whoever waits for one, tells whoever must know that none
        is left.
        """
        self._changed.set()
        if self._dead or any(replica.serves for replica in self.replicas.values()):
            return
        self._dead = True
        if self.on_death is not None:
            self.on_death(f"no server is left: {reason}")

    def _down(self, server_id: int, reason: str) -> None:
        if self.on_server_down is not None:
            self.on_server_down(server_id, reason)
        self.changed(reason)

    def _up(self, server_id: int, capabilities: Capabilities) -> None:
        self.replicas[server_id].capabilities = capabilities
        self.changed(f"server {server_id} is back")
        if self.on_server_up is not None:
            self.on_server_up(server_id)

    def _step(self, server_id: int, step: Step) -> None:
        if self.on_step is not None:
            self.on_step(dataclasses.replace(step, server_id=server_id))

    # requests

    def dispatch(
        self, server_id: int, requests: Sequence[EngineRequest], *, padded: bool, joining: bool
    ) -> list[TokenStream]:
        """On that replica, whose one server it is."""
        return self.replicas[server_id].engine.dispatch(0, requests, padded=padded, joining=joining)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Wherever they are."""
        for replica in self.replicas.values():
            replica.engine.cancel(request_ids)

    def one(self) -> Replica:
        """The first that serves. Raises RuntimeError where none does."""
        for replica in self.replicas.values():
            if replica.serves:
                return replica
        raise RuntimeError(NOT_RUNNING)


class ServingReplicas(Replicas):
    """Of engines whose library has an API server of its own."""

    def client(self) -> Any:
        """See `ServingEngine`: of one that serves."""
        engine = self.one().engine
        assert isinstance(engine, ServingEngine)
        return engine.client()
