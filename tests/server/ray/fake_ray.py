"""A stand-in for the package ray: actors in this process, on the loop that calls them. What passes
is pickled both ways, and of two calls made at once the second may begin first, as with Ray's.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kendall.server.engines.ray.cluster import join, leave


class RayError(Exception):
    """Ray's own base."""


class ActorDiedError(RayError):
    """The actor's process has ended."""

    def __str__(self) -> str:
        return "The actor died\nand much more about it"


class GetTimeoutError(RayError, TimeoutError):
    """Of a `get`."""


class RayTaskError(RayError):
    """What the actor raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"in the actor: {cause}")
        self.cause = cause


def travelled(value: Any) -> Any:
    """As it is after a journey to another process."""
    return pickle.loads(pickle.dumps(value))


class Reference:
    """What a call of an actor will have returned."""

    def __init__(self, actor: FakeActor, work: Callable[[], Any]) -> None:
        self.actor, self._work = actor, work
        self.task: asyncio.Task[Any] = asyncio.ensure_future(self._made())
        self.task.add_done_callback(lambda done: done.cancelled() or done.exception())
        actor.calls.add(self.task)
        self.task.add_done_callback(actor.calls.discard)

    async def _made(self) -> Any:
        await self.actor.let_in()
        try:
            made = travelled(await self._work())
        except Exception as error:
            raise RayTaskError(error) from error
        await self.actor.runs.wait()
        return made

    def now(self) -> Any:
        """Of a call that waits for nothing."""
        self.task.cancel()
        try:
            self._work().send(None)
        except StopIteration as end:
            return travelled(end.value)
        except Exception as error:
            raise RayTaskError(error) from error
        raise AssertionError("it waits")

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        await asyncio.wait({self.task, self.actor.death}, return_when=asyncio.FIRST_COMPLETED)
        if self.actor.death.done():
            raise ActorDiedError
        return await asyncio.shield(self.task)


class Streamed:
    """The references that a generator of an actor yields."""

    def __init__(self, actor: FakeActor, work: AsyncIterator[Any]) -> None:
        self._actor, self._work = actor, work

    def __aiter__(self) -> Streamed:
        return self

    async def __anext__(self) -> Reference:
        following = Reference(self._actor, self._next)
        ends = {self._actor.death, self._actor.last_message}
        await asyncio.wait({following.task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if self._actor.last_message.done():
            raise StopAsyncIteration
        return following

    async def _next(self) -> Any:
        return await anext(self._work)


class Method:
    """Of an actor."""

    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Any:
        actor = self._actor
        actor.asked.append(self._name)
        method = getattr(actor.served, self._name)
        if inspect.isasyncgenfunction(method):
            return Streamed(actor, method(*travelled(arguments)))
        return Reference(actor, partial(method, *travelled(arguments)))


class FakeActor:
    """The handle of an actor, and the actor."""

    def __init__(self, kind: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> None:
        self.options, self.asked = options, list[str]()
        self.calls = set[asyncio.Task[Any]]()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_message: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.runs = asyncio.Event()
        self.runs.set()
        self._turn = 0
        self.served: Any = kind(*travelled(arguments))

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    @property
    def dead(self) -> bool:
        return self.death.done()

    async def let_in(self) -> None:
        """Calls begin in another order than they were made in: each second one goes first."""
        self._turn += 1
        for _ in range(1 + 2 * (self._turn % 2)):
            await asyncio.sleep(0)
        await self.runs.wait()

    def hang(self) -> None:
        """No call begins from now on."""
        self.runs.clear()

    def die(self) -> None:
        """Its process ends, with all that is in it."""
        if not self.dead:
            self.death.set_result(None)
            for call in self.calls:
                call.cancel()
            self._end = asyncio.ensure_future(self.served.stop())


class Ray(ModuleType):
    """The module."""

    __version__ = "2.0-fake"

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(
            RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError
        )
        self.actors = list[FakeActor]()
        self.inits = list[dict[str, Any]]()
        self.environments = list[dict[str, str]]()
        self.shutdowns = 0
        self.hang = False  # actors that are made from now on
        self.resources = {"CPU": 4.0, "GPU": 2.0, "a100": 1.0}
        self.connecting: Callable[[], object] = lambda: None

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        self.environments.append({k: v for k, v in os.environ.items() if k.startswith("RAY_")})
        self.connecting()

    def is_initialized(self) -> bool:
        return len(self.inits) > self.shutdowns

    def shutdown(self) -> None:
        self.shutdowns += 1

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.resources)

    def remote(self, kind: type) -> Any:
        def made(options: dict[str, Any], *arguments: Any) -> FakeActor:
            self.actors.append(FakeActor(kind, options, arguments))
            if self.hang:
                self.actors[-1].hang()
            return self.actors[-1]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=partial(made, options))
        )

    def kill(self, actor: FakeActor) -> None:
        actor.die()

    def get(self, reference: Reference, *, timeout: float) -> Any:
        """Of a call that does not wait in the actor; one of an actor that hangs takes `timeout`."""
        actor = reference.actor
        if actor.dead:
            raise ActorDiedError
        if not actor.runs.is_set():
            raise GetTimeoutError(f"Get timed out after {timeout:g} s")
        return reference.now()


@contextmanager
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """`import ray` gives it."""
    module = Ray()
    monkeypatch.setitem(sys.modules, "ray", module)
    yield module
    assert not module.is_initialized(), "a Ray was left behind"


@contextmanager
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """And it is connected to on a loop of its own, so that engines can use it on virtual time."""
    with faked(monkeypatch) as module, asyncio.Runner() as runner:
        user = object()
        runner.run(join(user, None))
        try:
            yield module
        finally:
            runner.run(leave(user))
