"""A token limit that changes while requests wait: it holds for them too, never below the tokens
that they have already; one that is raised, up to what their client asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from tests.server.asgi import OPERATOR, Call, call, completion, running
from tests.server.harness import Collector, engine_request_of, mortal, submitted
from tests.server.passing_gateway import CHAT, COMPLETIONS, before
from tests.server.upstream_stub import Stub, answers, dies, in_turn, play, streams
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.0, k2=0.001, k3=0.0, k4=0.01)
LONG = 100  # tokens that each answer would have without a limit


def served(
    policy: str,
    own: list[int | None],
    limits: list[int | None],
    *,
    start: int | None,
    **fields: Any,
) -> list[Record]:
    """Records of calls that ask for these limits, in the order of service. The first is in service
    when `limits` come into force, one after the other; all others wait.
    """

    async def main() -> list[Record]:
        async with running(policy, max_output_tokens=start) as (app, gateway):
            collector = Collector()
            gateway.batcher.observers.add(collector)
            calls = []
            for limit in own:
                body = completion(max_tokens=limit) | fields
                calls.append(Call(app, "POST", COMPLETIONS, body))
                await asyncio.sleep(0.0001)
            assert gateway.batcher.in_service == 1
            for limit in limits:
                changed = await call(app, "PUT", "/admin/policy", {"max_output_tokens": limit})
                assert changed.status == 200
            for each in calls:
                await each.task
                assert each.status == 200
            return sorted(collector.records, key=lambda record: record.batch_id or 0)

    return run_virtual(main())


@pytest.mark.parametrize(
    "policy",
    [
        *("single", "dynamic", "capped:max_batch_size=2", "elastic", "fixed:batch_size=1"),
        *("continuous:max_batch_size=1", "single:order=spjf", "single:order=vtc"),
    ],
)
def test_a_limit_that_is_lowered_holds_for_those_who_wait(policy: str) -> None:
    """They are counted in the epoch of the new limit: with the old one its figures would be of
    neither.
    """
    records = served(policy, [LONG] * 5, [16], start=64)
    assert [record.output_tokens for record in records] == [64, 16, 16, 16, 16]
    assert [record.max_output_tokens for record in records] == [64, 16, 16, 16, 16]
    assert [record.epoch for record in records] == [0, 1, 1, 1, 1]
    assert all(record.clipped for record in records)


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ([32], [8, 32, 32, 20]),
        ([None], [8, 50, 100, 20]),
        ([4, 32], [8, 32, 32, 20]),
        ([4, 8], [8, 8, 8, 8]),
    ],
)
def test_a_limit_that_is_raised_holds_up_to_what_each_client_asked(
    limits: list[int | None], tokens: list[int]
) -> None:
    asked = [LONG, 50, 100, 20]
    records = served("single", asked, limits, start=8)
    assert [record.output_tokens for record in records] == tokens
    clipped = [made < most for made, most in zip(tokens, asked, strict=True)]
    assert [record.clipped for record in records] == clipped


def test_without_a_limit_of_its_own_a_request_gets_the_new_one_and_the_context_at_most() -> None:
    """A chat without one has what its prompt leaves of 2048 tokens, clipped by nothing of ours."""

    async def main() -> None:
        async with running("single", max_output_tokens=8) as (app, gateway):
            collector = Collector()
            gateway.batcher.observers.add(collector)
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            calls = [Call(app, "POST", CHAT, chat | {"ignore_eos": True}) for _ in range(3)]
            await asyncio.sleep(0.001)
            await limited(app, 24)
            await calls[0].task
            await asyncio.sleep(0.001)
            await limited(app, None)
            for each in calls:
                await each.task
            records = collector.records
            room = 2048 - (records[0].prompt_tokens or 0)
            assert [record.output_tokens for record in records] == [8, 24, room]
            assert [record.clipped for record in records] == [True, True, False]

    run_virtual(main())


def test_every_choice_of_a_call_that_waits_has_the_new_limit() -> None:
    """And the least length that its client asked for, once there is room for it again."""
    records = served("single", [LONG, LONG], [4, 30], start=8, n=3, min_tokens=20)
    assert [record.output_tokens for record in records] == [8, 30, 30, 30, 30, 30]


def test_the_longest_that_is_known_goes_first_by_the_new_limit() -> None:
    """`spjf` goes by the limit where nothing is predicted: with one limit for all, by arrival."""
    asked = [LONG, 60, 50, 40]
    records = served("single:order=spjf", asked, [16], start=None)
    arrivals = [record.arrived_at for record in records]
    assert arrivals == sorted(arrivals)
    assert [record.output_tokens for record in records] == [LONG, 16, 16, 16]


@pytest.mark.parametrize(("limit", "tokens"), [(30, 30), (5, None), (None, LONG), (80, 80)])
def test_a_preempted_request_keeps_what_it_has(limit: int | None, tokens: int | None) -> None:
    """It waits with some 10 tokens behind a shorter one. A limit below them ends it with its next
    token.
    """

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        policy = parse_policy("single:order=sprpt")
        batcher = Batcher(engine, await engine.start(), policy, [collector])
        batcher.limit_tokens(90)
        submitted(batcher, [asking("long", 0.0, predicted=90)])
        await asyncio.sleep(0.105)
        submitted(batcher, [asking("short", 0.105, asked=50, predicted=10)])
        await asyncio.sleep(0.05)
        (waits,) = batcher.waiting
        assert waits.output_tokens_so_far >= 9
        batcher.limit_tokens(limit)
        batcher.switch()
        await batcher.answered()
        (long,) = [record for record in collector.records if record.request_id == "long"]
        most = waits.output_tokens_so_far + 1 if tokens is None else tokens
        assert (long.output_tokens, long.clipped) == (most, most < LONG)
        await engine.stop()

    run_virtual(main())


def test_what_is_in_service_keeps_its_limit_and_has_the_new_one_once_it_waits_again() -> None:
    """Preempted after the change; an engine that is started again continues under the old one."""

    async def main() -> None:
        engine, die = mortal(LAW)
        collector = Collector()
        policy = parse_policy("single:order=sprpt")
        batcher = Batcher(engine, await engine.start(), policy, [collector], suspect_after=9)
        submitted(batcher, [asking("kept", 0.0, asked=60, predicted=1)])
        await asyncio.sleep(0.1)
        batcher.limit_tokens(20)
        die(batcher, 1.0)
        await batcher.answered()
        batcher.limit_tokens(None)
        submitted(batcher, [asking("long", 5.0, predicted=90)])
        await asyncio.sleep(0.1)
        batcher.limit_tokens(20)
        submitted(batcher, [asking("short", 5.1, predicted=5)])
        await batcher.answered()
        made = {record.request_id: record.output_tokens for record in collector.records}
        assert made == {"kept": 60, "long": 20, "short": 20}
        await engine.stop()

    run_virtual(main())


def asking(name: str, at: float, *, asked: int = LONG, predicted: float) -> Any:
    """One request whose client asks for so many tokens, and would get them."""
    request = Request(
        id=name,
        arrived_at=at,
        prompt_tokens=1,
        max_output_tokens=asked,
        predicted_output_tokens=predicted,
    )
    return msgspec.structs.replace(engine_request_of(request, 1000), asked_output_tokens=asked)


# calls that are passed on


def test_a_passed_call_is_sent_with_the_limit_in_force_at_its_dispatch() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        async with before(stub, policy="single", max_output_tokens=64) as kendall:
            prompt = {"model": "m", "prompt": "hello", "stream": True}
            bodies = [{"max_tokens": 100}, {"max_tokens": 100}, {"max_tokens": 9}, {}, {"n": 2}]
            calls = [kendall.call(prompt | body) for body in bodies]
            await asyncio.sleep(0.5)
            for limit in (128, 12):
                changed = await limited(kendall.app, limit)
                assert changed.status == 200
            for each in calls:
                await each.task
            assert [asked.fields.get("max_tokens") for asked in stub.calls] == [64, 12, 9, 12, 12]
            assert [record.max_output_tokens for record in kendall.records] == [64, 12, 9, 12, 12]
            clips = [record.clipped for record in kendall.records]
            assert clips == [True, True, False, True, True], "without a limit OpenAI's is 16"
            assert [record.epoch for record in kendall.records] == [0, 2, 2, 2, 2]

    play(test)


def test_a_passed_call_goes_as_it_came_once_the_limit_is_lifted() -> None:
    raw = b'{ "model" : "m","max_tokens" :  9,"messages":[]}'

    async def test(stub: Stub) -> None:
        stub.behave = in_turn(streams(), answers(), answers())
        async with before(stub, policy="single", max_output_tokens=4) as kendall:
            calls = [
                kendall.call({"model": "m", "prompt": "x", "stream": True}),
                kendall.call(raw, CHAT),
                kendall.call({"model": "m", "input": "x"}, "/v1/embeddings"),
            ]
            await asyncio.sleep(0.5)
            await limited(kendall.app, None)
            for each in calls:
                await each.task
            assert stub.calls[1].body == raw
            assert "max_tokens" not in stub.calls[2].fields, "an embedding has no tokens to limit"
            assert [record.max_output_tokens for record in kendall.records] == [4, 9, 1]

    play(test)


def test_a_passed_call_that_is_sent_again_has_the_limit_of_that_time() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = in_turn(dies(), streams())
        async with before(stub, policy="single") as kendall:
            made = kendall.call({"model": "m", "prompt": "x", "stream": True, "max_tokens": 50})
            await asyncio.sleep(0.5)
            await limited(kendall.app, 3)
            await made.task
            assert [asked.fields["max_tokens"] for asked in stub.calls] == [50, 3]
            assert [record.max_output_tokens for record in kendall.records] == [3]

    play(test)


async def limited(app: Any, limit: int | None) -> Call:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return await call(app, "PUT", "/admin/policy", {"max_output_tokens": limit}, headers)
