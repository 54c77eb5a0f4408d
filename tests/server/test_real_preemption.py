"""Requests that were taken out of the real engine again and again say what they would have said
without.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from server.engines.tiny import make_tiny
from server.engines.vllm.engine import VllmEngine, prepare
from server.gateway import Gateway
from server.http.app import create_app
from server.settings import Settings
from tests.server.asgi import FOR_THE_RUN, Call, completion
from tests.server.counts import tell
from tests.server.harness import Collector

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make setup)"
    ),
    # raised inside vLLM and what it imports; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # vLLM leaves the zmq context of its start-up handshake to the garbage collector
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
COUNT, TOGETHER = 1000, 24
TURNS = "continuous:max_batch_size=4,order=fb,quantum=8"
EXACT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, repetitions less likely": {"temperature": 0, "repetition_penalty": 1.2},
    "greedy, with a stop string": {"temperature": 0, "stop": ["zzzz"]},
}
KEPT: dict[str, dict[str, Any]] = {
    "a seed": {"temperature": 1.0, "seed": 7},
    "a penalty of the output": {"temperature": 0, "presence_penalty": 0.5},
    "a form": {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}},
}


def test_a_thousand_preempted_answers_equal_the_others_token_for_token() -> None:
    prepare(str(make_tiny()))
    asyncio.run(compared(COUNT, EXACT["greedy"]))


@pytest.mark.parametrize("kind", list(EXACT)[1:])
def test_what_can_go_on_exactly_does(kind: str) -> None:
    prepare(str(make_tiny()))
    asyncio.run(compared(60, EXACT[kind]))


@pytest.mark.parametrize("kind", KEPT)
def test_what_cannot_is_never_taken_out(kind: str) -> None:
    prepare(str(make_tiny()))
    asyncio.run(kept(KEPT[kind]))


async def compared(count: int, sampling: dict[str, Any]) -> None:
    """The same calls first come first served and in turns of a few tokens."""
    alone, records = await answers("continuous:max_batch_size=4", count, sampling)
    assert {record.preemptions for record in records} == {0}
    turns, records = await answers(TURNS, count, sampling)
    preemptions = [record.preemptions for record in records]
    tell(
        "preempted", count=count, preempted=sum(n > 0 for n in preemptions), times=sum(preemptions)
    )
    assert min(preemptions) > 0, "a request was not preempted"
    assert turns == alone


async def kept(sampling: dict[str, Any]) -> None:
    _, records = await answers(TURNS, 40, sampling)
    assert {record.preemptions for record in records} == {0}


async def answers(policy: str, count: int, sampling: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Token ids of each answer, and the records."""
    engine = VllmEngine(str(make_tiny()), engine_args={"dtype": "float32"})
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        policy=policy,
        prediction_interval=0,
        security=FOR_THE_RUN,
    )
    ready = asyncio.Event()
    gateway = Gateway(settings, engine)
    app = create_app(gateway, on_ready=lambda _: ready.set())
    collector = Collector()
    async with asyncio.timeout(1500), app.router.lifespan_context(app):
        await ready.wait()
        gateway.batcher.observers.add(collector)
        return await asked(app, count, sampling), collector.records


async def asked(app: FastAPI, count: int, sampling: dict[str, Any]) -> list[Any]:
    """So many calls, a few at once, so that in turns each waits in between."""
    rng = np.random.default_rng(5)
    bodies: Iterator[dict[str, Any]] = iter(
        [
            completion(
                prompt=rng.integers(10, 200, 12).tolist(),
                max_tokens=24,
                return_token_ids=True,
                ignore_eos="structured_outputs" not in sampling,
            )
            | sampling
            for _ in range(count)
        ]
    )
    found: dict[int, Any] = {}

    async def client() -> None:
        for place, body in numbered:
            made = Call(app, "POST", "/v1/completions", body)
            await made.task
            assert made.status == 200, made.body
            found[place] = made.json()["choices"][0]["token_ids"]

    numbered = enumerate(bodies)
    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    return [found[place] for place in range(count)]
