"""The real engine with its prefix cache: what it had computed before is in the records."""

from __future__ import annotations

import asyncio

import pytest

from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import VllmEngine, prepare
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from tests.server.asgi import FOR_THE_RUN, call, completion
from tests.server.harness import Collector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    # raised inside vLLM and what it imports; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BLOCK = 32  # tokens


def test_the_second_call_with_the_same_begin_has_its_whole_blocks_cached() -> None:
    async def main() -> None:
        engine = VllmEngine(str(make_tiny()), engine_args={"enable_prefix_caching": True})
        settings = Settings(
            model="tiny", served_model_name="tiny", prediction_interval=0, security=FOR_THE_RUN
        )
        gateway = Gateway(settings, engine, None)
        ready = asyncio.get_running_loop().create_future()
        app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
        collector = Collector()
        async with app.router.lifespan_context(app):
            await ready
            gateway.batcher.observers.add(collector)
            begin = [300 + n for n in range(5 * BLOCK)]
            for prompt in ([*begin, 7], [*begin, 8, 9], [5, *begin]):
                body = completion(prompt=prompt, max_tokens=2)
                assert (await call(app, "POST", "/v1/completions", body)).status == 200
        cached = [record.cached_tokens for record in collector.records]
        assert cached == [None, 5 * BLOCK, None]
        assert [r.computed_tokens for r in collector.records] == [161, 2, 161]

    prepare(str(make_tiny()))
    asyncio.run(main())
