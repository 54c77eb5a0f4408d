"""Calls that the queue does not see: tokenizing and counting count against rates and take turns;
other host names are refused where there are no keys, and a revoked key ends its stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.base import Engine
from kendall.server.security.guard import Guard
from kendall.server.security.keys import read_keys
from tests.server.asgi import FOR_THE_RUN, Call, call, completion, running
from tests.server.openai_tools.fake import fronted
from tests.virtual_time import run_virtual

MESSAGES = [{"role": "user", "content": "hi"}]
UNQUEUED: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "some words"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
]


@pytest.mark.parametrize(("path", "body"), UNQUEUED)
def test_calls_without_the_queue_count_against_the_rate_of_their_key(
    path: str, body: dict[str, Any]
) -> None:
    limits = OverloadSettings(rate_limit=0.01, rate_limit_burst=300.0)  # three at once

    async def main() -> None:
        async with fronted(overload=limits) as (app, gateway, _, _):
            statuses = [(await call(app, "POST", path, body)).status for _ in range(3)]
            assert statuses == [200] * 3
            refused = await call(app, "POST", path, body)
            assert refused.status == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) > 0
            assert (await call(app, "POST", "/v1/completions", completion())).status == 429
            received = gateway.metrics.registry.get_sample_value("kendall_requests_received_total")
            assert received == 1, "a call without the queue is no arrival"

    asyncio.run(main())


def test_calls_without_the_queue_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = read_keys("--api-key", ["a-key-of-these-tests", "another-of-these-tests"], None)
    security = dataclasses.replace(FOR_THE_RUN, api_keys=keys)

    async def main() -> None:
        async with running(security=security) as (app, gateway):
            at_once = most = 0
            go = asyncio.Event()
            engine: Engine = gateway.engine
            encode = engine.encode

            async def slow(*arguments: Any, **options: Any) -> list[int]:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await go.wait()
                at_once -= 1
                return await encode(*arguments, **options)

            monkeypatch.setattr(engine, "encode", slow)

            def asked(key: str) -> Call:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                return Call(app, "POST", "/tokenize", {"prompt": "x"}, headers)

            many = [asked("a-key-of-these-tests") for _ in range(60)]
            await asyncio.sleep(0.05)
            assert at_once == 3
            other = asked("another-of-these-tests")
            await asyncio.sleep(0.05)
            assert at_once == 4, "one place is left to another key"
            late = [asked("a-key-of-these-tests") for _ in range(20)]
            await asyncio.sleep(0.05)
            assert sum(each.status == 429 for each in late) == 13
            go.set()
            for each in (*many, other, *late):
                await each.task
            assert {each.status for each in (*many, other)} == {200}
            assert most == 4

    asyncio.run(main())


def test_a_revoked_key_ends_its_stream_of_events() -> None:
    key = "a-key-of-these-tests"
    keys = read_keys("--api-key", [key], None)
    security = dataclasses.replace(FOR_THE_RUN, api_keys=keys, metrics_need_key=True)

    async def main() -> None:
        async with running(security=security) as (app, _):
            headers = {"authorization": f"Bearer {key}"}
            follows = Call(app, "GET", "/live/events", None, headers)
            await asyncio.sleep(3)
            assert follows.status == 200
            assert (len(follows.chunks) > 1, follows.whole, b"" in follows.chunks) == (
                True,
                False,
                False,
            )
            app.guard = Guard(  # type: ignore[attr-defined]
                dataclasses.replace(security, api_keys=read_keys("--api-key", ["o" * 20], None))
            )
            seen = len(follows.chunks)
            await asyncio.sleep(3)
            assert (follows.whole, follows.chunks[seen:]) == (True, [b""])
            follows.leave()
            await follows.task

    run_virtual(main())


@pytest.mark.parametrize("path", [path for path, _ in UNQUEUED if "count_tokens" in path])
def test_tokens_are_not_counted_once_the_gateway_leaves(path: str) -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, *_):
            body = dict(UNQUEUED)[path]
            assert (await call(app, "POST", path, body)).status == 200
            gateway.begin_drain()
            refused = await call(app, "POST", path, body)
            assert refused.status == 503, refused.body

    asyncio.run(main())
