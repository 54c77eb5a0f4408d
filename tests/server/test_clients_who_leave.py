"""Clients that leave at any instant, between a connection and the queue, and the grammar of
streams. Which test is for which trap: tests/test_traps.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from kendall.server.gateway import Gateway
from kendall.server.http.connection import StampedProtocol
from kendall.server.wire import transport
from kendall.server.wire.listener import ListeningServer
from tests.eventually import eventually
from tests.server.asgi import SLOW, Call, call, completion, running
from tests.virtual_time import run_virtual

POLICIES = (
    "single",
    "fixed:batch_size=2,max_wait=0.002",
    "capped:max_batch_size=4",
    "elastic",
    "continuous:max_batch_size=2",
)


def outcomes(gateway: Gateway) -> dict[str, float]:
    samples = [sample for metric in gateway.metrics.requests.collect() for sample in metric.samples]
    return {
        sample.labels["outcome"]: sample.value
        for sample in samples
        if sample.name.endswith("_total") and sample.value
    }


def held(gateway: Gateway) -> tuple[int, int, int]:
    return gateway.batcher.unanswered, gateway.batcher.queue_length, gateway.batcher.in_service


# 1. A task cancelled before its first step never runs its `finally`: the batcher owns the table of
# unanswered callers.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_trap_1_a_call_whose_task_is_cancelled_at_any_step_leaves_nothing_behind(
    policy: str, stream: bool
) -> None:
    async def main() -> None:
        async with running(policy) as (app, gateway):
            for pause in (0.0, 0.0005, 0.003, 0.0051):
                for steps in range(12):
                    made = Call(
                        app, "POST", "/v1/completions", completion(max_tokens=3, stream=stream)
                    )
                    if pause:
                        await asyncio.sleep(pause)
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    made.task.cancel()
                    await asyncio.gather(made.task, return_exceptions=True)
                    assert held(gateway) == (0, 0, 0), (pause, steps)
            assert set(outcomes(gateway)) <= {"completed", "cancelled"}
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200

    run_virtual(main())


def test_trap_1_the_table_is_emptied_even_where_no_caller_ever_runs_again() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):
            calls = [
                Call(app, "POST", "/v1/completions", completion(max_tokens=500)) for _ in range(3)
            ]
            await asyncio.sleep(0.01)
            gateway.batcher.fail_all("shutting_down", "over")  # no caller's task has run since
            assert held(gateway)[0] == 0
            assert outcomes(gateway) == {"failed": 3}
            for made in calls:
                await made.task
                assert made.json()["error"]["code"] == "shutting_down"
            assert outcomes(gateway) == {"failed": 3}

    run_virtual(main())


# 2. On disconnect uvicorn cancels a streaming response but not a plain handler.


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """The app behind a real socket, with the protocol that the gateway uses; its port."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=StampedProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = ListeningServer(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
        len(raw),
        raw,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_trap_2_a_connection_that_closes_frees_queue_and_engine_streamed_or_not(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sockets and real time; it is noticed by its closing, not by a question later."""
    monkeypatch.setattr(transport, "ASK_EVERY", 3600.0)

    async def main() -> None:
        async with running("single", law=SLOW) as (app, gateway), listening(app) as port:
            clients = []
            for expected in ((1, 0, 1), (2, 1, 1)):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request(completion(max_tokens=2000, stream=stream)))
                await eventually(lambda expected=expected: held(gateway) == expected)
                clients.append(writer)
            for writer, left in zip(reversed(clients), ((1, 0, 1), (0, 0, 0)), strict=True):
                writer.close()
                await eventually(lambda left=left: held(gateway) == left)
            assert outcomes(gateway) == {"cancelled": 2}

    asyncio.run(main())


def test_trap_2_a_client_that_resets_in_the_middle_of_its_body_never_arrived() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway), listening(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(completion())[:-5])
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            await asyncio.sleep(0.05)
            assert held(gateway) == (0, 0, 0)
            assert outcomes(gateway) == {}

    asyncio.run(main())


# 3. Check before settling: a caller may leave at the very instant its batch ends.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_trap_3_a_caller_who_leaves_at_the_instant_of_any_token_or_of_the_end_breaks_nothing(
    policy: str, stream: bool
) -> None:
    async def main() -> None:
        async with running(policy) as (app, gateway):
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await call(app, "POST", "/v1/completions", completion(max_tokens=4, stream=stream))
            took = loop.time() - begun
            instants = sorted(
                {took * part for part in (0.25, 0.5, 0.75)} | {took, took - 1e-9, took + 1e-9}
            )
            for at in instants:
                for late in range(
                    4
                ):  # before and behind the engine's own callbacks of that instant
                    begun = loop.time()
                    pair = [
                        Call(
                            app, "POST", "/v1/completions", completion(max_tokens=4, stream=stream)
                        )
                        for _ in range(2)
                    ]
                    loop.call_at(begun + at, _leave_after, loop, pair[0], late)
                    for made in pair:
                        await made.task
                    assert pair[1].status == 200
                    assert held(gateway) == (0, 0, 0)
            counted = outcomes(gateway)
            assert sum(counted.values()) == 1 + 2 * 4 * len(instants), "one outcome each"
            assert set(counted) <= {"completed", "cancelled"}

    run_virtual(main())


def _leave_after(loop: asyncio.AbstractEventLoop, made: Call, turns: int) -> None:
    if turns:
        loop.call_soon(_leave_after, loop, made, turns - 1)
    else:
        made.leave()


# what a stream is made of


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_stream_keeps_to_the_grammar_that_clients_parse(endpoint: str) -> None:
    """One id; chat opens with the role; one finish_reason a choice and nothing of it behind;
    usage without choices; [DONE].
    """

    async def main() -> None:
        async with running() as (app, _):
            given = completion(
                n=2, stream=True, stream_options={"include_usage": True}, max_tokens=3
            )
            del given["prompt"]
            asked = (
                {"prompt": [5]}
                if endpoint == "completions"
                else {"messages": [{"role": "user", "content": "hi"}]}
            )
            made = await call(app, "POST", f"/v1/{endpoint}", given | asked)
            assert made.body.endswith(b"data: [DONE]\n\n")
            assert all(line.startswith(b"data: ") for line in made.body.split(b"\n\n")[:-1])
            *events, usage, done = made.events()
            assert done == "[DONE]"
            assert usage["choices"] == []
            assert len({event["id"] for event in [*events, usage]}) == 1
            for index in (0, 1):
                choices = [
                    event["choices"][0] for event in events if event["choices"][0]["index"] == index
                ]
                assert [choice["finish_reason"] for choice in choices] == [None] * (
                    len(choices) - 1
                ) + ["length"]
                if endpoint != "completions":
                    assert choices[0]["delta"]["role"] == "assistant"

    run_virtual(main())


def test_a_stream_whose_engine_is_lost_ends_with_an_error_event_and_done() -> None:
    """The status line has gone out as 200: clients raise on an event with `error`."""

    async def main() -> None:
        async with running("continuous:max_batch_size=4") as (app, gateway):
            made = Call(app, "POST", "/v1/completions", completion(max_tokens=500, stream=True))
            await asyncio.sleep(0.05)
            gateway.batcher.fail_all("engine_unavailable", "the engine is gone")
            await made.task
            *before, error, done = made.events()
            assert (made.status, made.whole, done) == (200, True, "[DONE]")
            assert len(before) > 5
            assert (error["error"]["code"], set(error)) == ("engine_unavailable", {"error"})
            assert outcomes(gateway) == {"failed": 1}

    run_virtual(main())
