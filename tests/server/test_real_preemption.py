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

from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import VllmEngine, prepare
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from tests.server.asgi import FOR_THE_RUN, Call, completion
from tests.server.counts import tell
from tests.server.harness import Collector
from tests.server.sampling_kinds import EXACT, KEPT, PLAIN, SAMPLED, Body

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
]
COUNT, TOGETHER = 1000, 24
EACH = 30  # calls of each kind
LIMIT = 24
ALONE = "continuous:max_batch_size=4"
TURNS = "continuous:max_batch_size=4,order=fb,quantum=8"


def test_a_thousand_preempted_answers_equal_the_others_token_for_token() -> None:
    prepare(str(make_tiny()))
    asyncio.run(compared(COUNT, [PLAIN]))


def test_every_kind_that_can_go_on_exactly_does() -> None:
    prepare(str(make_tiny()))
    asyncio.run(compared(EACH * len(EXACT) // 2, list(EXACT.values())))


def test_what_is_sampled_without_a_seed_is_preempted_and_ends_as_asked() -> None:
    prepare(str(make_tiny()))
    asyncio.run(sampled(list(SAMPLED.values())))


def test_what_cannot_go_on_exactly_is_never_taken_out() -> None:
    prepare(str(make_tiny()))
    asyncio.run(kept(list(KEPT.values())))


async def compared(count: int, kinds: list[Body]) -> None:
    """The same calls first come first served and in turns of a few tokens; who comes last has
    nobody left to make way for, so a few more are sent.
    """
    asked = count + 4 * TOGETHER
    alone, records = await answers(ALONE, asked, kinds)
    assert {record.preemptions for record in records} == {0}
    turns, records = await answers(TURNS, asked, kinds)
    preemptions = [record.preemptions for record in records]
    preempted = sum(number > 0 for number in preemptions)
    tell("preempted", count=len(records), preempted=preempted, times=sum(preemptions))
    assert preempted >= count
    assert turns == alone


async def sampled(kinds: list[Body]) -> None:
    found, records = await answers(TURNS, EACH * len(kinds), kinds)
    assert sum(record.preemptions > 0 for record in records) > len(records) // 2
    assert {(len(answer["token_ids"]), answer["finish_reason"]) for answer in found} == {
        (LIMIT, "length")
    }


async def kept(kinds: list[Body]) -> None:
    _, records = await answers(TURNS, EACH * len(kinds), kinds)
    assert len(records) == EACH * len(kinds)
    assert {record.preemptions for record in records} == {0}


async def answers(policy: str, count: int, kinds: list[Body]) -> tuple[list[Any], list[Any]]:
    """What each answer says, and the records; the kinds in turn."""
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
        return await asked(app, count, kinds), collector.records


async def asked(app: FastAPI, count: int, kinds: list[Body]) -> list[Any]:
    """So many calls, a few at once, so that in turns each waits in between."""
    rng = np.random.default_rng(5)
    bodies: Iterator[Body] = iter(
        [
            completion(
                prompt=rng.integers(10, 200, 12).tolist(),
                max_tokens=LIMIT,
                return_token_ids=True,
                ignore_eos="structured_outputs" not in kinds[place % len(kinds)],
            )
            | kinds[place % len(kinds)]
            for place in range(count)
        ]
    )
    found: dict[int, Any] = {}

    async def client() -> None:
        for place, body in numbered:
            made = Call(app, "POST", "/v1/completions", body)
            await made.task
            assert made.status == 200, made.body
            choice = made.json()["choices"][0]
            found[place] = {name: choice[name] for name in ("token_ids", "text", "finish_reason")}

    numbered = enumerate(bodies)
    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    return [found[place] for place in range(count)]
