"""Calls through the whole gateway to a server that the test writes: what arrives there, what comes
back, and how each ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
from typing import Any

import pytest

from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.http.exchange import UpstreamExchange
from kendall.server.http.proxied.answer import ProxiedAnswer, ProxiedPart
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.logs import LogSettings
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings
from tests.server.asgi import FOR_THE_RUN, OPERATOR, Call
from tests.server.broken import events
from tests.server.passing_gateway import CHAT, COMPLETIONS, before
from tests.server.upstream_stub import (
    Asked,
    Stub,
    answers,
    dies,
    frame,
    hangs,
    in_turn,
    play,
    streams,
)

PROMPT = {"model": "m", "prompt": "hello"}


# what comes back


def test_a_stream_comes_back_byte_by_byte_with_the_gateways_headers() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            body = PROMPT | {"stream": True, "max_tokens": 3}
            call = kendall.call(body, x_request_id="mine")
            await asyncio.sleep(1.5)
            assert call.body == frame("t1"), "as it comes"
            await call.task
            assert call.body == frame("t1") + frame("t2") + frame("t3", "length") + (
                b"data: [DONE]\n\n"
            )
            assert call.whole
            assert call.status == 200
            assert call.headers == {
                "x-kendall-queueing-delay-ms": "0.0",
                "x-llm-d-flow-queue-duration-ms": "0",
                "server-timing": "queue;dur=0.0",
                "x-request-id": "mine",
                "x-kendall-queue-position": "0",
                "content-type": "text/event-stream; charset=utf-8",
                "x-accel-buffering": "no",
            }
            (record,) = kendall.records
            assert (record.outcome, record.output_tokens) == ("completed", 3)
            assert (record.client_request_id, record.sojourn_time) == ("mine", 3)
            assert stub.calls[0].headers["x-request-id"] == "mine"

    play(test)


def test_a_whole_answer_comes_back_with_both_delays() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(b'{"any":  "bytes"}', x_own="theirs")
        async with before(stub, engine={"max_num_seqs": 1}) as kendall:
            first = kendall.call(PROMPT)
            second = await kendall.answer(PROMPT)
            assert first.body == second.body == b'{"any":  "bytes"}'
            assert second.headers["server-timing"] == "queue;dur=1000.0, service;dur=1000.0"
            assert second.headers["x-own"] == "theirs"
            assert second.headers["content-length"] == "17"
            assert second.headers["content-type"] == "application/json"
            assert second.headers["x-request-id"].startswith("call-")

    play(test)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
def test_an_error_of_the_server_behind_comes_back(status: int) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers({"error": {"message": "no", "code": 7}}, status)
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT, x_request_id="mine")
            assert call.status == status
            assert call.body == b'{"error": {"message": "no", "code": 7}}'
            assert call.headers["x-request-id"] == "mine"
            assert [record.outcome for record in kendall.records] == ["failed"]

    play(test)


def test_an_error_within_a_good_answer_comes_back_as_it_is() -> None:
    streamed = frame("t1") + b'data: {"error": {"message": "oom"}}\n\n'

    async def test(stub: Stub) -> None:
        stub.behave = in_turn(events(streamed), answers({"error": {"message": "oom"}}))
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            assert call.body == streamed
            call = await kendall.answer(PROMPT)
            assert (call.status, call.body) == (200, b'{"error": {"message": "oom"}}')
            assert [record.outcome for record in kendall.records] == ["failed"] * 2

    play(test)


@pytest.mark.parametrize(
    ("path", "tail"),
    [
        (COMPLETIONS, b"data: %b\n\ndata: [DONE]\n\n"),
        (CHAT, b"data: %b\n\ndata: [DONE]\n\n"),
        ("/v1/messages", b"event: error\ndata: %b\n\n"),
        ("/v1/responses", b"event: error\ndata: %b\n\n"),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error_in_it(path: str, tail: bytes) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = dies(tokens=2)
        async with before(stub) as kendall:
            call = await kendall.answer({"model": "m", "stream": True}, path)
            begin = frame("t1") + frame("t2")
            assert call.status == 200
            assert call.body.startswith(begin)
            written = call.body.removeprefix(begin)
            event = next(line for line in written.splitlines() if line.startswith(b"data: {"))
            assert written == tail % event[6:]
            error = json.loads(event[6:])
            assert error["error"]["code"] == "engine_unavailable"
            assert error.get("type") == ("error" if b"event" in tail else None)
            assert "server 0 was lost" in error["error"]["message"]
            assert "stub-0" not in call.body.decode(), "addresses are the operator's"
            assert call.whole

    play(test)


def test_an_internal_error_ends_the_call_with_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: UpstreamExchange) -> None:
        raise ZeroDivisionError(self.call.path)

    monkeypatch.setattr(UpstreamExchange, "_run", broken)

    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            answer = await kendall.answer(PROMPT)
            assert (answer.status, stub.calls) == (503, [])
            (record,) = kendall.records
            assert record.outcome == "failed"

    play(test)
    assert "internal error while a call was passed on" in caplog.text


def test_a_whole_answer_that_breaks_off_is_an_error() -> None:
    async def behave(asked: Asked) -> None:
        asked.head(200, content_type="application/json", content_length="100")
        asked.writer.write(b'{"half')
        await asyncio.sleep(1)
        asked.abort()

    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT)
            assert call.status == 503
            assert call.json()["error"]["code"] == "engine_unavailable"
            assert "also when it was sent again" in call.json()["error"]["message"]
            assert int(call.headers["retry-after"]) >= 1
            assert len(stub.calls) == 2

    play(test)


# what arrives there


@pytest.mark.parametrize(
    "path",
    [
        *(COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/rerank", "/v1/score"),
    ],
)
def test_every_route_is_passed_on_as_bytes(path: str) -> None:
    raw = b'{ "model" : "m","odd":{"\\u0061":[1, 2.50]}, "a":"\\u0061","max_tokens":10}'

    async def test(stub: Stub) -> None:
        stub.behave = answers()
        async with before(stub) as kendall:
            call = await kendall.answer(raw, path, accept="x/y", anthropic_version="1")
            assert call.status == 200
            (asked,) = stub.calls
            assert (asked.path, asked.body) == (path, raw)
            assert asked.headers["accept"] == "x/y"
            assert asked.headers["anthropic-version"] == "1"
            assert asked.headers["content-type"] == "application/json"

    play(test)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_kserves_routes_too(path: str) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers()
        async with before(stub) as kendall:
            assert (await kendall.answer(PROMPT, f"/openai{path}")).status == 200
            assert [asked.path for asked in stub.calls] == [path]

    play(test)


def test_keys_and_the_connection_stay_at_the_gateway() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers()
        async with before(stub, engine={"key": "theirs"}) as kendall:
            headers = {"authorization": "Bearer mine", "x_api_key": "mine", "cookie": "mine"}
            await kendall.answer(
                PROMPT, **headers, te="trailers", accept_encoding="gzip", api_key="mine"
            )
            (asked,) = stub.calls
            assert "mine" not in " ".join(asked.headers.values())
            assert asked.headers["authorization"] == "bearer theirs"
            assert asked.headers["host"] == "stub-0"
            assert not {"te", "accept-encoding", "cookie"} & asked.headers.keys()

    play(test)


def test_the_token_limit_in_force_is_sent_and_clips() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        async with before(stub, max_output_tokens=3) as kendall:
            for body in ({"max_tokens": 5}, {"max_tokens": 3}, {"max_tokens": 2}, {}):
                await kendall.answer(PROMPT | body | {"stream": True})
            limits = [asked.fields["max_tokens"] for asked in stub.calls]
            assert limits == [3, 3, 2, 3], "without a limit OpenAI's is 16"
            assert [record.clipped for record in kendall.records] == [True, False, False, True]
            assert [record.max_output_tokens for record in kendall.records] == [3, 3, 2, 3]

    play(test)


def test_without_a_limit_in_force_nothing_is_clipped() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        async with before(stub) as kendall:
            for body in ({"max_tokens": 3}, {}):
                await kendall.answer(PROMPT | body | {"stream": True})
            await kendall.answer({"model": "m", "messages": [], "stream": True}, CHAT)
            assert [record.clipped for record in kendall.records] == [False] * 3
            assert [record.max_output_tokens for record in kendall.records] == [3, 16, 999]
            assert "max_tokens" not in stub.calls[1].fields

    play(test)


def test_calls_count_their_sequences_and_are_not_split() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        policy = "continuous:max_batch_size=4"
        async with before(stub, policy=policy) as kendall:
            calls = [
                kendall.call(PROMPT | {"n": 3}),
                kendall.call({"model": "m", "prompt": ["a", "b"]}),
                kendall.call(PROMPT),
            ]
            await asyncio.sleep(0.5)
            assert len(stub.calls) == 1
            await asyncio.gather(*(call.task for call in calls))
            assert [record.batch_size for record in kendall.records] == [3, 3, 3]
            state = await kendall.get("/admin/policy")
            assert state["policy"] == policy

    play(test)


@pytest.mark.parametrize("policy", ["capped:max_batch_size=2", "fixed:batch_size=2", "dynamic"])
def test_padded_policies_are_served_unpadded_and_say_so(policy: str) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = in_turn(streams(tokens=1), streams(tokens=3), streams(tokens=1))
        async with before(stub, policy=policy) as kendall:
            if policy == "dynamic":
                stub.behave = in_turn(*[streams(tokens=1)] * 3)
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.gather(*(call.task for call in calls))
            state = await kendall.get("/admin/policy")
            assert (state["policy"], state["padded"]) == (policy, False)
            assert {record.policy for record in kendall.records} == {policy}
            if policy == "fixed:batch_size=2":
                assert sorted(record.sojourn_time for record in kendall.records) == [1, 3]
                assert {record.service_time for record in kendall.records} == {3}

    play(test)


def test_the_priority_of_a_call_that_is_passed_on_orders_the_queue() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(b"{}")
        async with before(
            stub, engine={"max_num_seqs": 1}, policy="single:order=priority"
        ) as kendall:
            first = kendall.call(PROMPT)
            await asyncio.sleep(0.1)
            calls = [kendall.call(PROMPT | {"priority": each}) for each in (5, -5, 0)]
            await asyncio.sleep(0.1)
            waiting = [each.request.priority for each in kendall.gateway.batcher.waiting]
            assert waiting == [-5, 0, 5]
            await asyncio.gather(first.task, *(each.task for each in calls))

    play(test)


def test_what_the_body_says_to_the_gateway_is_heard() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        async with before(stub, policy="single:order=spjf") as kendall:
            fields = {"predicted_output_tokens": 7, "priority": -2, "odd": 1}
            for body in (fields, {"predicted_output_tokens": "x", "priority": "y"}):
                await kendall.answer(PROMPT | body)
            heard = [record.predicted_output_tokens for record in kendall.records]
            assert heard == [7, None], "what cannot be read is for the server behind"
            assert [record.outcome for record in kendall.records] == ["completed"] * 2

    play(test)


def test_prompts_are_logged_only_where_that_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers()
        async with before(stub, logs=LogSettings(prompts=True)) as kendall:
            await kendall.answer(PROMPT, x_request_id="mine")
        stub.asked.clear()
        async with before(stub) as kendall:
            await kendall.answer(PROMPT | {"prompt": "secret"})

    with caplog.at_level(logging.INFO, "kendall"):
        play(test)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "mine" in text
    assert '"hello"' in text
    assert "secret" not in text


# what is refused here


@pytest.mark.parametrize(
    ("body", "settings", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[1]", {}, 400, "invalid_json"),
        (b"\xff", {}, 400, "invalid_json"),
        ({"prompt": "a", "n": 300}, {}, 400, "too_many_sequences"),
        ({"prompt": "a", "n": "300"}, {}, 400, "too_many_sequences"),
        ({"prompt": "a", "n": 300.0}, {}, 400, "too_many_sequences"),
        ({"prompt": "a", "n": "many"}, {}, 400, "invalid_request"),
        (b'{"prompt": "a", "max_tokens": 1e400}', {}, 400, "invalid_request"),
        ({"prompt": ["a"] * 300}, {}, 400, "too_many_sequences"),
        (
            {"prompt": [5] * 9},
            {"security": dataclasses.replace(FOR_THE_RUN, max_prompt_tokens=8)},
            400,
            "context_length_exceeded",
        ),
        (
            {"prompt": "a" * 2000},
            {"security": dataclasses.replace(FOR_THE_RUN, max_body_bytes=1024)},
            413,
            "body_too_large",
        ),
    ],
)
def test_what_never_reaches_the_queue(
    body: Any, settings: dict[str, Any], status: int, code: str
) -> None:
    async def test(stub: Stub) -> None:
        async with before(stub, **settings) as kendall:
            call = await kendall.answer(body)
            assert (call.status, call.json()["error"]["code"]) == (status, code)
            assert stub.calls == []
            assert kendall.records == []

    play(test)


def test_patience_and_the_bound_of_the_queue_hold() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams(tokens=9)
        overload = OverloadSettings(max_num_queued_reqs=3)
        async with before(stub, policy="single", overload=overload) as kendall:
            calls = [kendall.call(PROMPT), kendall.call(PROMPT | {"patience": 2.5})]
            await asyncio.sleep(0.1)
            calls.append(kendall.call(PROMPT, x_llm_d_inference_ttl="3s"))
            await asyncio.sleep(0.1)
            full = await kendall.answer(PROMPT)
            assert (full.status, full.json()["error"]["code"]) == (429, "queue_full")
            told = (await kendall.answer(PROMPT, "/v1/messages")).json()
            assert (told["type"], told["error"]["type"]) == ("error", "rate_limit_error")
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200, 429, 429]
            assert calls[1].json()["error"]["code"] == "queue_timeout"
            outcomes = [record.outcome for record in kendall.records]
            assert outcomes == ["rejected", "rejected", "abandoned", "abandoned", "completed"]

    play(test)


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        ({"request_timeout": 2.5}, {}, "deadline_exceeded"),
        ({"first_token_timeout": 2.5}, {}, "first_token_timeout"),
        ({}, {"x_envoy_upstream_rq_timeout_ms": "2500"}, "deadline_exceeded"),
    ],
)
def test_time_limits_end_the_call_there_too(
    body: dict[str, Any], headers: dict[str, str], code: str
) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = hangs
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | body, **headers)
            assert (call.status, call.json()["error"]["code"]) == (504, code)
            assert asyncio.get_running_loop().time() == pytest.approx(2.5, abs=0.01)
            await asyncio.sleep(0.1)
            assert stub.closed == 1

    play(test)


@pytest.mark.parametrize("body", [PROMPT, PROMPT | {"stream": True}])
def test_a_client_that_leaves_takes_its_call_along(body: dict[str, Any]) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams(tokens=9)
        async with before(stub) as kendall:
            call = kendall.call(body)
            await asyncio.sleep(2.5)
            call.leave()
            await call.task
            await asyncio.sleep(0.1)
            assert stub.closed == 1
            assert [record.outcome for record in kendall.records] == ["cancelled"]
            assert kendall.gateway.batcher.idle

    play(test)


def test_a_drain_finishes_what_is_there_and_refuses_what_comes() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub, policy="single") as kendall:
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.sleep(0.5)
            draining = Call(kendall.app, "POST", "/admin/drain")
            await asyncio.sleep(0.1)
            for path in (COMPLETIONS, "/tokenize"):
                refused = await kendall.answer(PROMPT, path)
                assert (refused.status, refused.json()["error"]["code"]) == (503, "shutting_down")
            await draining.task
            assert [call.status for call in calls] == [200, 200]
            outcomes = [record.outcome for record in kendall.records]
            assert outcomes == ["rejected", "completed", "completed"]

    play(test)


def test_with_no_server_left_calls_wait_for_one() -> None:
    """Nothing is lost; the gateway is not ready meanwhile."""

    async def test(stub: Stub) -> None:
        stub.behave = streams(first=5)
        async with before(stub) as kendall:
            calls = [kendall.call(PROMPT)]
            await asyncio.sleep(1)
            stub.down()
            await asyncio.sleep(1)
            assert not kendall.gateway.lifecycle.ready
            calls.append(kendall.call(PROMPT))
            relayed = await kendall.answer({}, "/tokenize")
            assert (relayed.status, relayed.headers["retry-after"]) == (503, "1")
            await asyncio.sleep(60)
            assert not any(call.task.done() for call in calls)
            await stub.up()
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200, 200]
            assert sorted(record.interruptions for record in kendall.records) == [0, 1]
            assert kendall.gateway.supervisor.restarts == 1

    play(test)


def test_another_number_of_servers_begins_an_epoch() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other) as kendall:
            epoch = kendall.gateway.batcher.epoch
            one.down()
            await asyncio.sleep(12)
            assert kendall.gateway.batcher.servers == 1
            assert kendall.gateway.batcher.epoch == epoch + 1
            await one.up()
            await asyncio.sleep(12)
            assert kendall.gateway.batcher.servers == 2
            assert kendall.gateway.batcher.epoch == epoch + 2
            await asyncio.sleep(12)
            assert kendall.gateway.batcher.epoch == epoch + 2

    play(test, stubs=2)


def test_what_a_server_that_came_back_gets_at_once_belongs_to_the_new_epoch() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = answers(after=100)
        async with before(one, other, policy="single") as kendall:
            epoch = kendall.gateway.batcher.epoch
            calls = [kendall.call(PROMPT) for _ in range(2)]
            await asyncio.sleep(1)
            one.down()
            await asyncio.sleep(12)
            assert (kendall.gateway.batcher.servers, kendall.gateway.batcher.queue_length) == (1, 1)
            await one.up()
            await asyncio.sleep(12)
            assert (kendall.gateway.batcher.servers, kendall.gateway.batcher.queue_length) == (2, 0)
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200, 200]
            found = {record.interruptions: record.epoch for record in kendall.records}
            assert found == {0: epoch, 1: epoch + 2}

    play(test, stubs=2)


def test_what_a_server_gets_when_it_is_there_belongs_to_the_epoch_that_begins_with_it() -> None:
    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = streams(tokens=30)
        async with before(one, of=(one, other), policy="single") as kendall:
            calls = [kendall.call(PROMPT | {"stream": True}) for _ in range(2)]
            await asyncio.sleep(1)
            epoch = kendall.gateway.batcher.epoch
            assert kendall.gateway.batcher.queue_length == 1
            await other.up()
            await asyncio.gather(*(call.task for call in calls))
            found = {record.server_id: record.epoch for record in kendall.records}
            assert found == {0: epoch, 1: epoch + 1}

    play(test, stubs=2)


def test_a_server_that_is_not_there_at_the_start_gets_no_call_until_it_is() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, of=(one, other)) as kendall:
            assert kendall.gateway.batcher.servers == 1
            calls = [kendall.call(PROMPT) for _ in range(4)]
            await asyncio.gather(*(call.task for call in calls))
            assert [call.status for call in calls] == [200] * 4
            assert {record.server_id for record in kendall.records} == {0}
            assert [record.interruptions for record in kendall.records] == [0] * 4
            await other.up()
            await asyncio.sleep(12)
            assert kendall.gateway.batcher.servers == 2

    play(test, stubs=2)


def test_an_answer_that_comes_whole_after_minutes_is_no_stuck_engine() -> None:
    """Of a whole answer nothing is seen until it comes; --stuck-timeout is 60 s."""

    async def test(stub: Stub) -> None:
        stub.behave = answers(after=300)
        async with before(stub) as kendall:
            assert (await kendall.answer(PROMPT)).status == 200
            assert kendall.gateway.supervisor.restarts == 0

    play(test)


# what else is there


def test_what_needs_no_engine_is_relayed_at_once() -> None:
    async def test(stub: Stub) -> None:
        stub.routes |= {"/detokenize": (418, {"prompt": "a"}), "/tokenize": (200, {"count": 3})}
        stub.behave = hangs
        async with before(stub, policy="single") as kendall:
            waiting = kendall.call(PROMPT)
            await asyncio.sleep(1)
            call = await kendall.answer(b'{"tokens":  [1]}', "/detokenize", x_request_id="mine")
            assert (call.status, call.body) == (418, b'{"prompt": "a"}')
            assert call.headers["x-request-id"] == "mine"
            assert stub.asked[-1].body == b'{"tokens":  [1]}'
            assert (await kendall.answer({}, "/tokenize")).json() == {"count": 3}
            waiting.leave()

    play(test)


def test_the_names_are_those_of_the_server_behind() -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [{"id": "m"}, {"id": "lora"}]})
        stub.behave = answers()
        async with before(stub) as kendall:
            models = (await kendall.get("/v1/models"))["data"]
            assert [model["id"] for model in models] == ["m", "lora"]
            assert {model["root"] for model in models} == {"m"}
            assert models[0]["pads"] is False
            assert models[0]["output_length_fields"] == ["ignore_eos"]
            assert (await kendall.get("/admin/state"))["engine"]["engine"] == "http"
            assert (await kendall.answer({"model": "unknown"})).status == 200, "it decides"

    play(test)


def test_the_document_has_the_routes_and_other_methods_are_refused() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            paths = (await kendall.get("/openapi.json"))["paths"]
            assert {"/v1/responses", "/v1/messages", "/v1/embeddings", COMPLETIONS} <= set(paths)
            call = Call(kendall.app, "GET", "/v1/responses")
            await call.task
            assert call.status == 405

    play(test)


def test_keys_of_the_gateway_are_asked_for_on_every_route() -> None:
    security = SecuritySettings(
        api_keys=read_keys("--api-key", ["a-key-of-some-length"], None),
        admin_keys=read_keys("--admin-key", [OPERATOR], None),
    )

    async def test(stub: Stub) -> None:
        stub.behave = answers()
        async with before(stub, security=security) as kendall:
            for path in ("/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/messages"):
                assert (await kendall.answer(PROMPT, path)).status == 401
                allowed = {"authorization": "Bearer a-key-of-some-length"}
                assert (await kendall.answer(PROMPT, path, **allowed)).status == 200
            assert len(stub.calls) == 4

    play(test)


def test_a_page_elsewhere_cannot_make_the_server_behind_work() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            for path in ("/v1/responses", "/v1/embeddings", "/v1/messages/count_tokens"):
                headers = {"content_type": "text/plain", "origin": "http://elsewhere"}
                assert (await kendall.answer(PROMPT, path, **headers)).status in (400, 403, 415)
            assert stub.calls == []

    play(test)


def test_conservation_with_every_kind_of_end() -> None:
    """Each call has one outcome and one record."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = in_turn(*[streams(), dies(), dies(tokens=1), answers({}, 400), answers()] * 8)
        other.behave = in_turn(
            *[answers(b"busy", 503), streams(), dies(tokens=2), answers({}, 500)] * 20
        )
        async with before(one, other, engine={"max_num_seqs": 2}) as kendall:
            calls: list[Call] = []
            for number in range(40):
                calls.append(kendall.call(PROMPT | {"stream": number % 2 == 0}))
                await asyncio.sleep(0.3)
                if number % 7 == 0:
                    calls[-1].leave()
            await asyncio.gather(*(call.task for call in calls))
            await asyncio.sleep(1)
            assert len(kendall.records) == 40
            assert len({record.request_id for record in kendall.records}) == 40
            batcher = kendall.gateway.batcher
            assert batcher.unanswered == batcher.in_service == batcher.queue_length == 0
            assert max(one.most, other.most) <= 2
            assert one.now == other.now == 0
            metrics = Call(kendall.app, "GET", "/metrics")
            await metrics.task
            assert b"kendall_requests_received_total 40.0" in metrics.body

    play(test, stubs=2)


@pytest.mark.parametrize("name", ["predicted_output_tokens", "patience", "priority"])
def test_a_number_beyond_all_that_can_be_read_is_left_to_the_server_behind(name: str) -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            call = kendall.call(b'{"model": "m", "prompt": "x", "%s": 1e400}' % name.encode())
            await call.task
            assert call.status == 200, call.body

    play(test)


def test_an_order_that_interrupts_is_refused_and_the_one_in_force_goes_on() -> None:
    async def test(stub: Stub) -> None:
        async with before(stub) as kendall:
            asked = {"policy": "single:order=sprpt"}
            refused = Call(kendall.app, "PUT", "/admin/policy", asked)
            await refused.task
            assert refused.status == 400
            message = refused.json()["error"]["message"]
            assert message.startswith(
                "got order sprpt, which interrupts requests, for an engine that continues no "
                "answer (http); expected fcfs, spjf, "
            )
            call = kendall.call(PROMPT)
            await call.task
            assert call.status == 200

    play(test)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "streamed", "refused"])
def test_an_answered_call_leaves_nothing_to_the_collector(kind: str) -> None:
    """A thousand calls a second would stop the event loop for milliseconds each second."""
    kinds = (ProxiedAnswer, ProxiedPart, SequenceState, UpstreamExchange)

    def there() -> list[object]:
        return [each for each in gc.get_objects() if issubclass(type(each), kinds)]

    async def test(stub: Stub) -> None:
        if kind == "refused":
            stub.behave = answers(b"{}", 400)
        async with before(stub) as kendall:
            body = PROMPT | {"stream": kind == "streamed", "max_tokens": 3}
            gc.collect()
            gc.disable()
            others = {id(each) for each in there()}
            try:
                for _ in range(3):
                    await kendall.answer(body)
                await asyncio.sleep(1)
                left = [type(each).__name__ for each in there() if id(each) not in others]
            finally:
                gc.enable()
            assert left == []

    play(test)
