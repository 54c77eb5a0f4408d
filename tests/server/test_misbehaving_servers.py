"""Servers behind the gateway that fail some calls, or answer oddly: what that costs the others,
and what the gateway says of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter

import pytest

from kendall.server.operations import serving
from tests.server.asgi import Call
from tests.server.passing_gateway import before
from tests.server.upstream_stub import Asked, Stub, answers, play, streams

PROMPT = {"model": "m", "prompt": "hello"}
BAD = PROMPT | {"prompt": "bad"}


async def fails_bad_calls(asked: Asked) -> None:
    """Their connections are closed; all other calls and all probes are answered."""
    if b'"bad"' in asked.body:
        asked.abort()
    else:
        await answers(after=0.1)(asked)


@pytest.mark.parametrize("bad", [2, 4, 16])
def test_calls_that_a_server_cannot_bear_take_no_server_from_the_others(bad: int) -> None:
    """At once, again and again; all servers stay."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = fails_bad_calls
        async with before(one, other) as kendall:
            for _ in range(12):
                calls = [kendall.call(body) for body in [BAD] * bad + [PROMPT] * 4]
                await asyncio.gather(*(call.task for call in calls))
                assert [call.status for call in calls] == [503] * bad + [200] * 4
            assert kendall.gateway.supervisor.restarts == 0
            assert kendall.gateway.batcher.servers == 2
            servers = Call(kendall.app, "GET", "/admin/servers")
            await servers.task
            assert [(each["state"], each["last_fault"]) for each in servers.json()["servers"]] == [
                ("serving", None)
            ] * 2
            ended = Counter(record.outcome for record in kendall.records)
            assert ended == {"failed": 12 * bad, "completed": 48}

    play(test, stubs=2)


def test_one_that_fails_calls_and_probes_is_lost_at_once() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other) as kendall:
            one.behave = fails_bad_calls
            other.behave = streams()
            one.routes["/health"] = (500, None)
            await kendall.call(BAD).task
            await asyncio.sleep(0.1)
            servers = Call(kendall.app, "GET", "/admin/servers")
            await servers.task
            assert [each["state"] for each in servers.json()["servers"]] == ["lost", "serving"]

    play(test, stubs=2)


def test_servers_that_are_lost_again_and_again_serve_as_soon_as_one_answers() -> None:
    """The waits before a restart are for engines that the gateway starts."""

    async def test(stub: Stub) -> None:
        stub.behave = answers(after=0.1)
        async with before(stub) as kendall:
            for _ in range(6):
                stub.down()
                call = kendall.call(PROMPT)
                await asyncio.sleep(3)
                assert not call.task.done()
                await stub.up()
                began = kendall.gateway.now()
                await call.task
                assert call.status == 200
                assert kendall.gateway.now() - began < 2.5

    play(test)


def test_service_counts_to_the_flow_that_a_call_names() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(after=1.0)
        async with before(stub, policy="single:order=vtc") as kendall:
            header = "x_llm_d_inference_fairness_id"
            heavy = [kendall.call(PROMPT, **{header: "heavy"}) for _ in range(8)]
            await asyncio.sleep(0.5)
            light = kendall.call(PROMPT, **{header: "light"})
            await asyncio.gather(*(call.task for call in [*heavy, light]))
            assert [record.flow for record in kendall.records].index("light") < 3

    play(test)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_request"), (404, "invalid_request"), (422, "invalid_request")]
    + [(each, "engine_error") for each in (401, 403, 429, 500)],
)
def test_what_is_no_fault_of_the_call_is_not_counted_as_one(status: int, code: str) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers({"error": {}}, status)
        async with before(stub) as kendall:
            call = kendall.call(PROMPT)
            await call.task
            assert call.status == status, "the client has the server's own answer"
            assert kendall.gateway.batcher.failures == {code: 1}

    play(test)


def test_a_count_beyond_every_context_is_not_believed() -> None:
    async def test(stub: Stub) -> None:
        said = {
            "choices": [{"text": "abc", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 999_999_999_999},
        }
        stub.behave = answers(said)
        async with before(stub) as kendall:
            call = kendall.call(PROMPT | {"max_tokens": 8})
            await call.task
            assert call.json() == said, "the client has what the server wrote"
            (record,) = kendall.records
            assert record.output_tokens == 8

    play(test)


def test_a_status_that_is_none_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers({}, 999)
        async with before(stub) as kendall:
            call = kendall.call(PROMPT)
            await call.task
            assert (call.status, call.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "the status 999" in call.json()["error"]["message"]
            stub.routes["/tokenize"] = (999, {})
            relayed = await kendall.answer({}, "/tokenize")
            assert (relayed.status, relayed.json()["error"]["code"]) == (503, "engine_unavailable")

    play(test)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_the_delays_in_the_headers_are_of_the_gateway_that_answers() -> None:
    async def test(stub: Stub) -> None:
        told = {"X-Kendall-Queueing-Delay-Ms": "99", "X-Own": "1"}
        told["Server-Timing"] = "queue;dur=99, db;dur=3, service;dur=8"
        stub.behave = answers(**told)
        async with before(stub) as kendall:
            call = kendall.call(PROMPT)
            await call.task
            assert call.headers["x-kendall-queueing-delay-ms"] == "0.0"
            assert call.headers["x-own"] == "1"
            timing = [value for name, value in call.pairs if name == "server-timing"]
            assert timing[0].startswith("queue;dur=0.0, service;dur=")
            assert timing[1:] == [" db;dur=3"]

    play(test)


def test_a_large_head_passes() -> None:
    async def test(stub: Stub) -> None:
        many = {f"X-{number}": "v" for number in range(500)}
        stub.behave = answers(**{"X-Large": "v" * 60_000}, **many)
        async with before(stub) as kendall:
            call = kendall.call(PROMPT)
            await call.task
            assert (call.status, len(call.headers["x-large"])) == (200, 60_000)
            assert call.headers["x-499"] == "v"

    play(test)


def test_who_leaves_while_an_answer_pauses_is_noticed() -> None:
    """By the questions that the system asks on a silent connection: a minute and a half after the
    last byte.
    """
    asked = serving.KEEPALIVE
    silence, between, questions = (asked[f"TCP_KEEP{name}"] for name in ("IDLE", "INTVL", "CNT"))
    assert silence + between * questions == 90
    with (
        serving.bind("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        taken, _ = listening.accept()
        with taken:
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for name, value in asked.items():
                assert taken.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_the_log_says_in_a_word_what_became_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        other.behave = answers(after=0.1)
        async with before(one, other) as kendall:
            one.behave = answers({}, 503, after=0.1)
            assert (await kendall.answer(PROMPT)).status == 200
            states = [each["state"] for each in (await kendall.get("/admin/servers"))["servers"]]
            assert states == ["busy", "serving"]
            await asyncio.sleep(2)
            one.behave = answers({}, 500, after=0.1)
            for _ in range(12):
                await asyncio.gather(*(kendall.answer(PROMPT) for _ in range(2)))
                states = [
                    each["state"] for each in (await kendall.get("/admin/servers"))["servers"]
                ]
                if states[0] != "serving":
                    break
            assert states == ["put aside", "serving"]
            one.behave = other.behave
            await asyncio.sleep(6)
            one.down()
            await asyncio.sleep(11)

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test, stubs=2)
    said = [text for text in caplog.messages if text.startswith("server 0 (http://stub-0) ")]
    assert [text.removeprefix("server 0 (http://stub-0) ") for text in said] == [
        "is busy: it answers 503",
        "serves: it answers again",
        "is put aside: its calls fail, and other servers answer them",
        "serves: it answers again",
        "is lost: no such file or directory",
    ]
