"""How long a server behind may say nothing of a call, without any --request-timeout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kendall.policies import Request
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.server.supervision.progress import SilenceLimits
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.passing_gateway import CHAT, before
from tests.server.upstream_stub import Asked, Stub, answers, frame, hangs, in_turn, play, streams

# answers; multiples of lawful times and of the timeout
FEW, TOKENS, UNKNOWN, WHOLE = 20, 20, 10, 5

TIMEOUT = 60.0
LAW = parse_law("k1=0,k2=1,k3=0.01,k4=0.5,kp=0.1")
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 8}


def limit(law: LatencyModel | None = None, beside: int = 1, paces: int = 0, **of: bool) -> float:
    """Of a call of 10 tokens with a limit of 100; answers before it took 2 s a token."""
    limits = SilenceLimits(TIMEOUT, lambda: law)
    for _ in range(paces):
        limits.learn(20.0, 10)
    request = Request(id="a", arrived_at=0.0, prompt_tokens=10, max_output_tokens=100)
    given = {"limited": True, "streams": False, "flows": False} | of
    return limits.seconds(request, beside, **given)


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        # nothing is known
        ({}, UNKNOWN * TIMEOUT),
        ({"limited": False}, UNKNOWN * TIMEOUT),
        ({"streams": True}, UNKNOWN * TIMEOUT),
        ({"streams": True, "flows": True}, TIMEOUT),
        # by the answers before
        ({"paces": FEW - 1}, UNKNOWN * TIMEOUT),
        ({"paces": FEW}, WHOLE * 2.0 * 100),
        ({"paces": FEW, "limited": False}, UNKNOWN * TIMEOUT),
        # by the law
        ({"law": LAW}, WHOLE * LAW.padded(1, 100, 10)),
        ({"law": LAW, "beside": 8}, WHOLE * LAW.padded(8, 100, 80)),
        ({"law": LAW, "limited": False}, UNKNOWN * TIMEOUT),
        ({"law": LAW, "streams": True}, TIMEOUT),
        ({"law": LAW, "streams": True, "beside": 30}, TOKENS * LAW.padded(30, 1, 300)),
        ({"law": LAW, "streams": True, "flows": True, "beside": 300}, TOKENS * LAW.padded(300, 1)),
    ],
)
def test_the_bound_is_that_of_what_is_known(of: dict[str, Any], seconds: float) -> None:
    assert limit(**of) == pytest.approx(seconds)
    assert limit(**of) >= TIMEOUT


def test_the_slowest_of_the_last_hundred_answers_counts() -> None:
    limits = SilenceLimits(TIMEOUT, lambda: None)
    request = Request(id="a", arrived_at=0.0, prompt_tokens=10, max_output_tokens=100)

    def seconds() -> float:
        return limits.seconds(request, 1, limited=True, streams=False, flows=False)

    limits.learn(7.0, 0)  # an answer without a token took as long as one
    for _ in range(99):
        limits.learn(1.0, 10)
    assert seconds() == WHOLE * 7.0 * 100
    limits.learn(1.0, 10)
    assert seconds() == TIMEOUT, "a tenth of a second a token is less than that"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_its_one_server_swallows_fails_at_the_bound(streamed: bool) -> None:
    """The server answers its probes all the time; its slot is free afterwards."""

    async def test(stub: Stub) -> None:
        stub.behave = in_turn(hangs, answers())
        async with before(stub, policy="single") as kendall:
            call = await kendall.answer(PROMPT | {"stream": streamed})
            assert (call.status, call.json()["error"]["code"]) == (504, "sequence_stalled")
            assert "server 0 sent no answer for 601 s" in call.json()["error"]["message"]
            assert kendall.gateway.now() == pytest.approx(UNKNOWN * TIMEOUT, abs=1.1)
            servers = await kendall.get("/admin/servers")
            assert servers["servers"][0]["in_service"] == 0
            assert (await kendall.answer(PROMPT)).status == 200
            outcomes = [record.outcome for record in kendall.records]
            assert outcomes == ["failed", "completed"]

    play(test)


def test_with_another_server_it_goes_there_at_the_bound_and_the_first_one_is_named() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave, other.behave = hangs, answers()
        async with before(one, other, law=LAW) as kendall:
            call = await kendall.answer(PROMPT)
            assert call.status == 200
            bound = WHOLE * LAW.padded(1, 8, 1)
            assert kendall.gateway.now() == pytest.approx(max(TIMEOUT, bound) + 1, abs=1.1)
            assert [record.server_id for record in kendall.records] == [1]
            servers = (await kendall.get("/admin/servers"))["servers"]
            assert servers[0]["last_fault"].startswith("server 0 sent no answer for ")

    play(test, stubs=2)


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_the_option_sets_it(timeout: float) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = hangs
        supervision = SupervisionSettings(stuck_timeout=timeout)
        async with before(stub, supervision=supervision) as kendall:
            call = kendall.call(PROMPT)
            await asyncio.sleep(UNKNOWN * TIMEOUT + 60)
            assert call.task.done() is (timeout > 0)
            if timeout:
                assert call.status == 504
            else:
                call.leave()
                await call.task

    play(test)


async def falls_silent(asked: Asked) -> None:
    """Comments come, and no event."""
    asked.begin()
    asked.piece(frame("t1"))
    for _ in range(40):
        await asyncio.sleep(5)
        asked.piece(b": still here\n\n")


def test_a_stream_whose_events_cease_ends_with_an_error_in_it() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = falls_silent
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            assert kendall.gateway.now() == pytest.approx(TIMEOUT, abs=1.1)
            assert call.events()[-2]["error"]["code"] == "sequence_stalled"
            assert "server 0 sent no event for " in call.events()[-2]["error"]["message"]
            assert call.events()[-1] == "[DONE]"
            assert kendall.records[0].outcome == "failed"
            assert kendall.gateway.batcher.idle

    play(test)


def test_a_stream_that_is_slow_but_goes_on_is_left_alone() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams(tokens=5, gap=50, first=500)
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            assert call.events()[-1] == "[DONE]"
            assert kendall.records[0].outcome == "completed"

    play(test)


def test_the_longest_context_of_a_chat_is_no_bound_by_the_law() -> None:
    """It has no limit of its own: nobody knows how long it may take."""

    async def test(stub: Stub) -> None:
        stub.behave = answers(after=590)
        async with before(stub, law=LAW) as kendall:
            assert (await kendall.answer({"model": "m", "messages": []}, CHAT)).status == 200

    play(test)


def test_a_call_that_needs_no_engine_is_bounded_too() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            del stub.routes["/tokenize"]
            stub.behave = hangs
            call = await kendall.answer({"prompt": "a"}, "/tokenize")
            assert (call.status, call.json()["error"]["code"]) == (503, "engine_unavailable")
            assert call.headers["retry-after"] == "1"
            assert kendall.gateway.now() == pytest.approx(30, abs=1)

    play(test)
