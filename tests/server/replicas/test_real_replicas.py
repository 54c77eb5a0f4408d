"""Two real engines in one gateway: one is killed while both serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import prepare
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.operations.serving import choose_engine
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import ServingReplicas
from tests.eventually import eventually
from tests.server.asgi import FOR_THE_RUN, Call, call
from tests.server.counts import tell
from tests.server.harness import Collector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    # raised inside vLLM and what it imports; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),  # of engines that were killed
]
LIMIT = 400  # seconds; two starts and a restart take 20 on a quiet machine
TOKENS = 300


def ask(app: Any, number: int, tokens: int = TOKENS) -> Call:
    body = {
        "model": "tiny",
        "prompt": [301, 302, 300 + number],
        "max_tokens": 1000,
        "temperature": 0,
        "kendall_forced_output_tokens": tokens,
    }
    return Call(app, "POST", "/v1/completions", body)


def test_a_killed_engine_costs_no_answer_and_two_serve_again() -> None:
    async def main() -> None:
        settings = Settings(
            model="tiny",
            served_model_name="tiny",
            engine="vllm",
            policy="continuous:max_batch_size=8",
            prediction_interval=0,
            allow_forced_lengths=True,
            security=FOR_THE_RUN,
            replicas=2,
        )
        engine, law = choose_engine(settings)
        assert isinstance(engine, ServingReplicas)
        gateway = Gateway(settings, engine, law)
        ready = asyncio.get_running_loop().create_future()
        app = create_app(gateway, ready.set_exception, lambda _: ready.set_result(None))
        collector = Collector()
        async with asyncio.timeout(LIMIT), app.router.lifespan_context(app):
            await ready
            gateway.batcher.observers.add(collector)
            pids = {each.id: each.engine.process_id for each in engine.replicas.values()}  # type: ignore[attr-defined]
            assert len(set(pids.values())) == 2
            alone = ask(app, 0)
            await alone.task
            calls = [ask(app, number) for number in range(24)]
            batcher = gateway.batcher
            await eventually(
                lambda: all(
                    any(running.output_tokens_so_far > 20 for running in server)
                    for server in batcher.running()
                )
            )
            os.kill(pids[0], signal.SIGKILL)
            await eventually(lambda: batcher.servers == 1)
            assert (await call(app, "GET", "/ready")).status == 200
            await asyncio.gather(*(made.task for made in calls))
            records = collector.records
            outcomes = Counter(record.outcome for record in records)
            interruptions = Counter(record.interruptions for record in records)
            tell("replicas on vLLM", outcomes=outcomes, interruptions=interruptions)
            assert Counter(made.status for made in calls) == {200: 24}
            assert [made.json()["usage"]["completion_tokens"] for made in calls] == [TOKENS] * 24
            assert calls[0].json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
            assert (outcomes, len({record.request_id for record in records})) == (
                {"completed": 25},
                25,
            )
            assert set(interruptions) == {0, 1}
            assert {r.server_id for r in records if r.interruptions} == {1}
            await eventually(lambda: batcher.servers == 2)
            more = [ask(app, number, 50) for number in range(16)]
            await asyncio.gather(*(made.task for made in more))
            assert Counter(made.status for made in more) == {200: 16}
            assert {record.server_id for record in records[25:]} == {0, 1}
            assert (batcher.unanswered, batcher.in_service, batcher.queue_length) == (0, 0, 0)
            metrics = (await call(app, "GET", "/metrics")).body.decode()
            assert "kendall_engine_restarts 1.0" in metrics
            removed = await call(app, "PUT", "/admin/servers", {"replicas": 1})
            assert removed.status == 200
            await eventually(lambda: len(engine.replicas) == 1)
            assert set(engine.replicas) == {0}
            await eventually(lambda: not Path(f"/proc/{pids[1]}").exists())
            last = ask(app, 3, 20)
            await last.task
            assert last.status == 200

    prepare(str(make_tiny()))
    asyncio.run(main())
