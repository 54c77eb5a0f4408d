"""What a client sizes is bounded before the code of any endpoint, and a large call is checked and
rendered in a thread: the event loop serves others meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextvars import copy_context
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kendall.server.http.api.newer_endpoints import check_tools
from kendall.server.http.openai_tools.engine_requests import apart_of
from kendall.server.openai_tools import apart
from kendall.server.openai_tools.apart import HERE, Apart, Rest
from kendall.server.openai_tools.endpoints import CHAT, COMPLETIONS, ApiEndpoint
from kendall.server.openai_tools.serving_objects import ServingObjects
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.turns import Turns
from kendall.server.settings import Settings
from tests.memory import peak_memory
from tests.server.asgi import OPERATOR, Call, call
from tests.server.openai_tools.fake import TOOL, FakeServing, ServedEngine, fronted

MESSAGE = {"role": "user", "content": "hi"}
LARGE = [MESSAGE] * 100
SETTINGS = Settings(model="tiny", served_model_name="tiny")


def posts(app: FastAPI) -> list[str]:
    """Every path that takes a POST."""
    routes = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }
    return sorted(routes | set(app.direct))  # type: ignore[attr-defined]


def test_every_post_route_refuses_a_body_of_too_many_objects_at_once() -> None:
    """Whatever the field is: of 400 KB, 100,000 objects."""
    bodies = [
        json.dumps({"model": "tiny", "max_tokens": 4, name: [{}] * 100_000}).encode()
        for name in ("messages", "input", "tools", "prompt", "tokens", "metadata", "x")
    ]
    reads_nothing = {"/v1/embeddings", "/admin/drain"}

    async def main() -> None:
        async with fronted() as (app, gateway, serving, _):
            paths = posts(app)
            assert {"/v1/responses", "/tokenize", "/admin/calibrate"} < set(paths)
            for path in paths:
                if path in reads_nothing:
                    continue
                for body in bodies:
                    headers = {"authorization": f"Bearer {OPERATOR}"}
                    with peak_memory() as peak:
                        refused = await call(app, "POST", path, body, headers)
                    error = refused.json()["error"]
                    assert (refused.status, error["code"]) == (413, "too_many_values"), path
                    assert peak.value < 4 * len(body), (path, "its objects were built")
            assert (serving.bodies, gateway.batcher.unanswered) == ([], 0)

    asyncio.run(main())


class SlowServing(FakeServing):
    """Renders in Python, and awaits something in between, as vLLM does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.threads: list[int] = []

    def request(self, endpoint: ApiEndpoint, body: Mapping[str, Any]) -> Any:
        self.threads.append(threading.get_ident())
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            sum(range(100))
        return super().request(endpoint, body)

    async def create(self, endpoint: ApiEndpoint, request: Any) -> bytes | AsyncIterator[str]:
        await asyncio.get_running_loop().run_in_executor(None, int)
        await asyncio.sleep(0.001)
        return await super().create(endpoint, request)


async def turns_beside(work: asyncio.Task[Any]) -> int:
    """Of the event loop while the work goes on; a handful where it is done on the loop."""
    turns = 0
    while not work.done():
        await asyncio.sleep(0.001)
        turns += 1
    return turns


CASES = {
    "/v1/responses": {"model": "tiny", "input": LARGE, "max_output_tokens": 6},
    "/v1/messages": {"model": "tiny", "messages": LARGE, "max_tokens": 6},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": LARGE},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": LARGE,
        "tools": [TOOL] * 50,
        "max_tokens": 6,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CASES)
def test_a_large_call_is_rendered_in_a_thread_and_answered_as_a_small_one(
    path: str, stream: bool
) -> None:
    async def main() -> None:
        serving = SlowServing(1.0)
        async with fronted(serving=serving) as (app, gateway, _, records):
            streamed = stream and not path.endswith("count_tokens")
            asked = Call(app, "POST", path, CASES[path] | ({"stream": True} if streamed else {}))
            assert await turns_beside(asked.task) > 20
            await asked.task
            assert asked.status == 200, asked.body
            assert threading.get_ident() not in serving.threads
            if not path.endswith("count_tokens"):
                (record,) = records
                assert (record.outcome, record.output_tokens) == ("completed", 6)
                assert serving.ended == 1
            assert gateway.batcher.unanswered == 0

    asyncio.run(main())


def test_a_small_call_is_rendered_where_it_is() -> None:
    async def main() -> None:
        serving = SlowServing(0.0)
        async with fronted(serving=serving) as (app, _, _, _):
            asked = await call(
                app, "POST", "/v1/messages", CASES["/v1/messages"] | {"messages": [MESSAGE]}
            )
            assert (asked.status, serving.threads) == (200, [threading.get_ident()])

    asyncio.run(main())


def test_a_call_that_takes_too_long_to_render_is_refused_and_keeps_its_place_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert apart.LONGEST == 10.0
    monkeypatch.setattr(apart, "LONGEST", 0.2)

    async def main() -> None:
        serving = SlowServing(1.0)
        async with fronted(serving=serving) as (app, gateway, _, records):
            first = await call(app, "POST", "/v1/messages", CASES["/v1/messages"])
            assert first.status == 400
            assert "take more than 0.2 s to render" in first.json()["error"]["message"]
            assert gateway.serving_objects is not None
            serving.seconds = 0.0
            began = time.perf_counter()
            second = await call(app, "POST", "/v1/messages", CASES["/v1/messages"])
            assert second.status == 200, "served once the first one's thread has ended"
            assert time.perf_counter() - began > 0.3
            assert (gateway.batcher.unanswered, len(records)) == (0, 1)

    asyncio.run(main())


def test_a_client_that_leaves_while_its_call_is_rendered_costs_no_place() -> None:
    async def main() -> None:
        serving = SlowServing(0.5)
        async with fronted(serving=serving) as (app, gateway, _, records):
            gone = Call(app, "POST", "/v1/messages", CASES["/v1/messages"])
            await asyncio.sleep(0.1)
            gone.leave()
            await gone.task
            serving.seconds = 0.0
            asked = await call(app, "POST", "/v1/messages", CASES["/v1/messages"])
            assert (asked.status, len(records), gateway.batcher.unanswered) == (200, 1, 0)

    asyncio.run(main())


def test_a_refusal_in_the_thread_is_the_clients() -> None:
    async def main() -> None:
        async with fronted() as (app, _, serving, _):
            serving.fault = ValueError("no such thing")
            refused = await call(app, "POST", "/v1/messages", CASES["/v1/messages"])
            assert (refused.status, refused.json()["error"]["message"]) == (400, "no such thing")

    asyncio.run(main())


@pytest.mark.parametrize(
    "tools",
    [[TOOL] * 1025, [TOOL | {"function": {"name": "f", "description": "x" * (1 << 20)}}]],
    ids=["many", "large"],
)
def test_more_tools_than_a_call_needs_are_refused(tools: list[Any]) -> None:
    async def main() -> None:
        async with fronted() as (app, _, serving, _):
            for path, body in CASES.items():
                refused = await call(app, "POST", path, body | {"tools": tools})
                assert refused.status == 400, path
                assert "expected at most 1024 tools of 1048576 bytes" in refused.body.decode(), path
            assert serving.bodies == []

    asyncio.run(main())


def test_a_coroutine_that_is_cancelled_behind_its_first_part_ends() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await HERE
            await asyncio.sleep(100)
        finally:
            ended.append(threading.get_ident())

    async def main() -> None:
        rest = Rest(work())
        await Apart(Turns(2), "").run(rest, copy_context())
        task = asyncio.create_task(rest.here())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [threading.get_ident()]

    asyncio.run(main())


def test_too_many_large_calls_of_one_caller_are_refused_and_other_callers_have_their_turn() -> None:
    async def main() -> None:
        turns = Turns(2)
        order: list[str] = []

        async def work(caller: str) -> None:
            await turns.take(caller)
            try:
                order.append(caller)
                await asyncio.sleep(0.001)
            finally:
                turns.give(caller)

        many = [asyncio.create_task(work("many")) for _ in range(20)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(work(name)) for name in ("a", "b")]
        await asyncio.gather(*many, *others)
        assert {"a", "b"} <= set(order[:4]), "one place is never the first caller's"
        leaving = [asyncio.create_task(work("many")) for _ in range(5)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert turns.waiting == 0
        await asyncio.wait_for(work("many"), 1)
        full = [asyncio.create_task(work("many")) for _ in range(64)]  # one has its turn
        await asyncio.sleep(0)
        assert turns.waiting_of("many") == 63
        last = asyncio.create_task(Apart(turns, "many").run(Rest(asyncio.sleep(0)), copy_context()))
        await asyncio.sleep(0)
        refused = asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many large calls"):
            await Apart(turns, "many").run(Rest(refused), copy_context())
        assert inspect.getcoroutinestate(refused) == inspect.CORO_CLOSED
        await asyncio.gather(*full, last)
        assert (turns.waiting, last.exception()) == (0, None)

    asyncio.run(main())


def test_a_call_that_leaves_while_it_waits_for_a_thread_is_not_begun() -> None:
    async def main() -> None:
        turns = Turns(1)
        await turns.take("other")
        work = asyncio.sleep(0)
        running = asyncio.create_task(Apart(turns, "one").run(Rest(work), copy_context()))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
        assert turns.waiting == 0

    asyncio.run(main())


def test_a_coroutine_goes_on_here_where_its_thread_left_it() -> None:
    """Errors of what it awaits are its own, in either part; once it is over nothing is left."""
    steps: list[tuple[str, int]] = []

    async def step(name: str) -> None:
        await asyncio.sleep(0)
        steps.append((name, threading.get_ident()))
        raise ValueError(name)

    async def work(*, then: Exception | None = None) -> None:
        for name in ("there", "here"):
            with pytest.raises(ValueError, match=name):
                await step(name)
            if name == "there":
                await HERE
            if then is not None:
                raise then

    async def main() -> None:
        rest = Rest(work())
        await Apart(Turns(2), "").run(rest, copy_context())
        assert [name for name, _ in steps] == ["there"]
        for _ in range(2):
            await rest.here()
            assert [name for name, _ in steps] == ["there", "here"]
        assert steps[0][1] != steps[1][1] == threading.get_ident()
        broken = Rest(work(then=KeyError("x")))
        await Apart(Turns(2), "").run(broken, copy_context())
        with pytest.raises(KeyError):
            await broken.here()
        await broken.here()
        refused = Rest(step("alone"))
        with pytest.raises(ValueError, match="alone"):
            await Apart(Turns(2), "").run(refused, copy_context())
        await refused.here()
        closed = Rest(step("never"))
        closed.close()
        await closed.here()
        assert "never" not in dict(steps)

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_call_that_waits_in_its_thread_is_ended_there(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its time is over, or its client has left; then its place is free."""
    monkeypatch.setattr(apart, "LONGEST", 100.0 if leaves else 0.02)
    begun, ended = threading.Event(), list[int]()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(100)
        finally:
            ended.append(threading.get_ident())

    async def main() -> None:
        turns = Turns(1)
        running = asyncio.create_task(Apart(turns, "one").run(Rest(work()), copy_context()))
        await asyncio.to_thread(begun.wait)
        if leaves:
            running.cancel()
        with pytest.raises(asyncio.CancelledError if leaves else ApiError):
            await running
        await asyncio.wait_for(turns.take("two"), 30)
        assert len(ended) == 1
        assert ended != [threading.get_ident()]

    asyncio.run(main())


def test_two_large_calls_of_two_callers_are_rendered_at_once() -> None:
    async def main() -> None:
        turns = ServingObjects(ServedEngine(), SETTINGS).large_calls
        others = [asyncio.create_task(turns.take(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert (turns.waiting_of("a"), turns.waiting_of("b"), turns.waiting_of("c")) == (0, 0, 1)
        others[2].cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (b"{" * 64 + b" " * (16_384 - 64), True),
        (b" " * 16_385, False),
        (b"{" * 65, False),
        (b"[" * 100, True),
    ],
)
def test_a_call_is_large_by_its_bytes_or_its_objects(body: bytes, *, small: bool) -> None:
    objects = ServingObjects(ServedEngine(), SETTINGS)
    assert (apart_of(objects, CHAT, body, "key") is None) is small
    assert apart_of(objects, COMPLETIONS, body, "key") is None, "vLLM has threads for those"


@pytest.mark.parametrize(
    ("tools", "got"),
    [
        ([{}] * 1024, None),
        ([{}] * 1025, "1025 tools"),
        ([{"d": "x" * (1_048_576 - 10)}], None),
        ([{"d": "x" * (1_048_576 - 9)}], "tools of 1048577 bytes"),
    ],
)
def test_tools_are_bounded_by_number_and_size(tools: list[Any], got: str | None) -> None:
    if got is None:
        check_tools(tools)
        return
    with pytest.raises(ApiError) as refused:
        check_tools(tools)
    assert refused.value.message == (
        f"got {got}; expected at most 1024 tools of 1048576 bytes together: leave out those that "
        "this call does not need"
    )
