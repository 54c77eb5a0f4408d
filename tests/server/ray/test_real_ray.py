"""Two real engines in actors: one is killed while both serve, one is added, one removed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from functools import partial

import pytest

from kendall.server.engines.ray.actor import vllm_engine
from tests.eventually import eventually
from tests.server.asgi import call
from tests.server.counts import tell
from tests.server.ray.actors import actors, require_ray

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LIMIT = 500  # seconds; four starts take a minute on a quiet machine
START = 150.0  # of one
TOKENS = 300


def test_two_engines_in_actors_serve_lose_one_gain_one_and_give_one_back() -> None:
    require_ray()

    async def main() -> None:
        make = partial(vllm_engine, "tiny", {}, 5.0)
        async with asyncio.timeout(LIMIT), actors(make) as there:
            loop = asyncio.get_running_loop()
            began = loop.time()
            alone = there.ask(TOKENS)
            await alone.task
            tell("one answer", tokens=TOKENS, seconds=f"{loop.time() - began:.2f}")
            calls = [there.ask(TOKENS, number) for number in range(24)]
            await eventually(lambda: min(there.served(0), there.served(1)) > 20)
            pid = there.engines[0].process_id
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed = loop.time()
            await eventually(lambda: there.gateway.batcher.servers == 1)
            tell("a killed actor", seen_after=f"{loop.time() - killed:.3f} s")
            assert (await call(there.app, "GET", "/ready")).status == 200
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(made.status for made in calls) == {200: 24}
            assert calls[0].json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
            await eventually(lambda: there.gateway.batcher.servers == 2, START)
            assert await there.resize(3) == 200
            await eventually(lambda: there.gateway.batcher.servers == 3, START)
            more = [there.ask(50, number) for number in range(24)]
            await asyncio.gather(*(made.task for made in more))
            assert {r.server_id for r in there.collector.records[25:]} == {0, 1, 2}
            assert await there.resize(1) == 200
            await eventually(lambda: set(there.pool.replicas) == {0})
            last = there.ask(20)
            await last.task
            assert last.status == 200
            outcomes = Counter(record.outcome for record in there.collector.records)
            assert outcomes == {"completed": 50}

    asyncio.run(main())
