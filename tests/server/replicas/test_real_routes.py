"""Two real engines with their prefix caches on: `route=prefix` finds more there than
`least_loaded`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import prepare
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.operations.serving import choose_engine
from kendall.server.settings import Settings
from tests.server.asgi import FOR_THE_RUN, Call, call, completion
from tests.server.counts import tell
from tests.server.harness import Collector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    # raised inside vLLM and what it imports; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LIMIT = 300  # seconds; two starts take 20 on a quiet machine
BLOCK = 32  # tokens of vLLM's on a CPU
BEGIN = 6 * BLOCK
SESSIONS, TURNS = 8, 5
POLICY = "continuous:max_batch_size=8"


def test_more_of_the_prompts_is_cached_where_they_go_to_the_server_that_has_them() -> None:
    async def main() -> None:
        settings = Settings(
            model="tiny",
            served_model_name="tiny",
            engine="vllm",
            policy=POLICY,
            prediction_interval=0,
            allow_forced_lengths=True,
            security=FOR_THE_RUN,
            replicas=2,
            engine_args={"enable_prefix_caching": True},
        )
        engine, law = choose_engine(settings)
        gateway = Gateway(settings, engine, law)
        ready = asyncio.get_running_loop().create_future()
        app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
        async with asyncio.timeout(LIMIT), app.router.lifespan_context(app):
            await ready
            collector, cached = Collector(), dict[str, int]()
            gateway.batcher.observers.add(collector)
            for number, route in enumerate(("least_loaded", "prefix")):
                put = {"policy": f"{POLICY},route={route}"}
                assert (await call(app, "PUT", "/admin/policy", put)).status == 200
                before = len(collector.records)
                await turns(app, 100 * number)
                records = collector.records[before:]
                cached[route] = sum(record.cached_tokens or 0 for record in records)
                assert len(records) == SESSIONS * TURNS
                assert {record.server_id for record in records} == {0, 1}
            tell("cached prompt tokens by route", **cached)
            assert cached["prefix"] == SESSIONS * (TURNS - 1) * BEGIN
            assert cached["least_loaded"] < cached["prefix"]

    prepare(str(make_tiny()))
    asyncio.run(main())


async def turns(app: Any, first: int) -> None:
    """Those of a turn at once, in another order each time; a session's prompts share a prefix."""
    for turn in range(TURNS):
        asked = []
        for place in range(SESSIONS):
            session = (place * (2 * turn + 1) + turn) % SESSIONS
            prompt = [300 + first + session] * BEGIN + [500 + turn] * 8
            body = completion(prompt=prompt, max_tokens=8)
            asked.append(Call(app, "POST", "/v1/completions", body))
            await asyncio.sleep(0.002)  # else the first server takes all that came together
        await asyncio.gather(*(each.task for each in asked))
        assert {each.status for each in asked} == {200}
