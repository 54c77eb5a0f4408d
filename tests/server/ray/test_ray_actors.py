"""Engines in actors: what passes both ways, and actors that die, hang, come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.ray.engine import RayEngine
from kendall.server.settings import Settings
from tests.eventually import eventually
from tests.server.asgi import call
from tests.server.counts import tell
from tests.server.ray.actors import Actors, actors, require_ray

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own sockets and processes
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LIMIT = 120  # seconds


@pytest.fixture(autouse=True)
def _ray() -> Iterator[None]:
    require_ray()
    yield
    import ray

    assert not ray.is_initialized(), "a Ray was left behind"


def run(main: Callable[[], object]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT):
            await main()  # type: ignore[misc]

    asyncio.run(limited())


async def whole(there: Actors, calls: int) -> None:
    """That many calls end once, each as a whole, and nothing is left."""
    records = there.collector.records
    assert Counter(record.outcome for record in records) == {"completed": calls}
    assert len({record.request_id for record in records}) == calls
    batcher = there.gateway.batcher
    assert (batcher.unanswered, batcher.in_service, batcher.queue_length) == (0, 0, 0)


def test_two_actors_serve_one_queue_under_every_kind_of_policy() -> None:
    async def main() -> None:
        async with actors() as there:
            for policy in ("continuous:max_batch_size=8", "capped:max_batch_size=4", "single"):
                switched = await call(there.app, "PUT", "/admin/policy", {"policy": policy})
                assert switched.status == 200
                calls = [there.ask(20 + number, number) for number in range(12)]
                await asyncio.gather(*(made.task for made in calls))
                told = [made.json()["usage"]["completion_tokens"] for made in calls]
                assert told == [20 + number for number in range(12)]
            await whole(there, 36)
            assert {record.server_id for record in there.collector.records} == {0, 1}
            assert (await call(there.app, "GET", "/admin/state")).json()["engine"]["servers"] == 2

    run(main)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_that_dies_or_hangs_costs_no_answer(number: signal.Signals) -> None:
    async def main() -> None:
        async with actors() as there:
            alone = there.ask(300)
            await alone.task
            calls = [there.ask(300, each) for each in range(16)]
            await eventually(lambda: min(there.served(0), there.served(1)) > 20)
            pid = there.engines[0].process_id
            assert pid is not None
            os.kill(pid, number)
            await eventually(lambda: there.gateway.batcher.servers == 1)
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(made.status for made in calls) == {200: 16}
            await eventually(lambda: there.gateway.batcher.servers == 2)
            assert there.engines[0].process_id != pid
            await eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or dead(pid))
            interruptions = Counter(r.interruptions for r in there.collector.records)
            tell("actors", signal=number.name, interruptions=interruptions)
            assert set(interruptions) == {0, 1}
            await whole(there, 17)

    run(main)


def dead(pid: int) -> bool:
    """Whether it is a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_actors_come_and_go_while_they_serve() -> None:
    async def main() -> None:
        async with actors() as there:
            calls = [there.ask(200, each) for each in range(40)]
            assert await there.resize(3) == 200
            await eventually(lambda: there.gateway.batcher.servers == 3)
            calls += [there.ask(50, each) for each in range(24)]
            await eventually(lambda: there.served(2) > 0)
            assert await there.resize(1) == 200
            await asyncio.gather(*(made.task for made in calls))
            await eventually(lambda: set(there.pool.replicas) == {0})
            await there.ask(10).task
            await whole(there, 65)

    run(main)


def test_streams_and_cancelled_calls_pass_too() -> None:
    async def main() -> None:
        async with actors(replicas=1) as there:
            gone, stays = there.ask(900, stream=True), there.ask(40, 1, stream=True)
            await eventually(lambda: there.served(0) > 10)
            gone.leave()
            await stays.task
            assert stays.body.count(b"data: ") > 30
            await eventually(lambda: there.gateway.batcher.in_service == 0)
            outcomes = Counter(record.outcome for record in there.collector.records)
            assert outcomes == {"completed": 1, "cancelled": 1}

    run(main)


def test_what_the_cluster_lacks_is_said_at_once() -> None:
    async def main() -> None:
        engine = RayEngine(EmulatedEngine, needs={"a100": 4.0})
        try:
            with pytest.raises(EngineStartError, match=r"needs 4 a100 where the cluster has 0 in"):
                await engine.start()
        finally:
            await engine.stop()

    run(main)


def test_a_cluster_that_is_not_there_is_said() -> None:
    async def main() -> None:
        engine = RayEngine(EmulatedEngine, address="127.0.0.1:1")
        try:
            with pytest.raises(EngineStartError, match=r"--ray-address 127.0.0.1:1"):
                await engine.start()
        finally:
            await engine.stop()

    run(main)


def test_an_engine_that_does_not_start_says_why() -> None:
    async def main() -> None:
        engine = RayEngine(refusing)
        try:
            with pytest.raises(EngineStartError, match="got no model"):
                await engine.start()
        finally:
            await engine.stop()

    run(main)


class Refusing(EmulatedEngine):
    async def start(self):  # type: ignore[no-untyped-def]
        raise EngineStartError("got no model; expected one")


def refusing() -> EmulatedEngine:
    from kendall.queueing.latency.law import parse_law
    from tests.server.asgi import LAW

    return Refusing(parse_law(LAW))


def test_settings_are_those_of_the_other_engines() -> None:
    assert Settings(model="tiny", served_model_name="tiny", engine="ray").ray_address is None
