"""Calls through vLLM's serving objects, which are fakes here, on an emulated engine and on virtual
time: queued, batched, clipped and counted as any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.queueing.measurement.record import Record
from kendall.server.admission.settings import OverloadSettings
from kendall.server.gateway import Gateway
from kendall.server.openai_tools.call import CURRENT
from kendall.server.openai_tools.sampling import KINDS, OPTIONS
from kendall.server.security.routes import access_of
from tests.server.asgi import FOR_THE_RUN, Call, call, completion, running
from tests.server.mortal import words
from tests.server.openai_tools.fake import TOOL, FakeServing, Params, ServedEngine, fronted
from tests.virtual_time import run_virtual

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "tools": [TOOL], "max_tokens": 8} | fields


def responses(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "max_output_tokens": 8} | fields


def messages(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 8} | fields


def parts(stream: Call) -> list[Any]:
    """What vLLM was given, in order; its first event is its own."""
    return [each for event in stream.events()[1:] for each in event]


def outcomes(records: list[Record]) -> list[str]:
    return sorted(record.outcome for record in records)


def test_a_whole_answer_is_vllms_with_the_gateways_headers_and_one_record() -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            asked = await call(app, "POST", CHAT, chat(patience=9.0, user="me", temperature=None))
            assert asked.status == 200
            assert asked.json() == [[{"index": 0, "text": words(8), "tokens": 8, "end": "length"}]]
            assert float(asked.headers["x-kendall-queueing-delay-ms"]) == 0.0
            assert "service;dur=" in asked.headers["server-timing"]
            assert asked.headers["content-length"] == str(len(asked.body))
            (record,) = records
            assert (record.outcome, record.output_tokens, record.prompt_tokens) == (
                "completed",
                8,
                4,
            )
            assert record.request_id.startswith("chatcmpl-")
            assert (gateway.batcher.unanswered, serving.ended) == (0, 1)
            (body,) = serving.bodies
            assert "patience" not in body
            assert "temperature" not in body, "null is the default"
            assert body["tools"] == [TOOL]
            assert record.request_id == f"chatcmpl-{body['request_id']}-0"

    run_virtual(main())


def test_a_stream_writes_each_token_as_it_comes_and_its_headers_at_its_dispatch() -> None:
    async def main() -> None:
        async with fronted("single") as (app, gateway, _, records):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=50))
            await asyncio.sleep(0.01)
            asked = Call(app, "POST", CHAT, chat(stream=True))
            await asyncio.sleep(0.01)
            assert asked.status is None
            assert gateway.batcher.queue_length == 1
            await first.task
            await asked.started.wait()
            assert float(asked.headers["x-kendall-queueing-delay-ms"]) > 10
            assert asked.headers["content-type"].startswith("text/event-stream")
            await asked.task
            assert "".join(part["text"] for part in parts(asked)) == words(8)
            assert [part["tokens"] for part in parts(asked)] == [1] * 8
            assert [part.get("end") for part in parts(asked)] == [None] * 7 + ["length"]
            assert outcomes(records) == ["completed", "completed"]
            delay = records[1].queueing_delay
            assert delay is not None
            assert asked.headers["x-kendall-queueing-delay-ms"] == str(round(delay * 1e3, 3))

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_every_sequence_of_a_call_is_queued_at_once_and_counted(stream: bool) -> None:
    """vLLM asks for two prompts one after the other; each has three sequences."""

    async def main() -> None:
        async with fronted("capped:max_batch_size=6") as (app, _, serving, records):
            asked = await call(
                app,
                "POST",
                CHAT,
                chat(n=3, seed=5, stream=stream, temperature=0.5, tool_choice="none"),
            )
            assert asked.status == 200
            assert [record.batch_size for record in records] == [3, 3, 3]
            found = parts(asked) if stream else asked.json()[0]
            assert sorted({part["index"] for part in found}) == [0, 1, 2]
            assert sum(part["tokens"] for part in found) == 24
            assert serving.bodies[0]["tool_choice"] == "none"
            assert len({record.request_id for record in records}) == 3

    run_virtual(main())


def test_sequences_of_several_prompts_wait_and_run_together() -> None:
    async def main() -> None:
        async with fronted("capped:max_batch_size=6") as (app, gateway, _, records):
            body = completion(prompt=["a", "b"], n=3, echo=True, prompts=2)
            gateway.settings = gateway.settings.__class__(
                **{**vars(gateway.settings), "unknown_fields": "ignore"}
            )
            asked = await call(app, "POST", "/v1/completions", body)
            assert asked.status == 200
            assert [record.batch_size for record in records] == [6] * 6
            assert len(asked.json()) == 2
            assert {record.request_id[-2:] for record in records} == {f"-{i}" for i in range(6)}

    run_virtual(main())


def test_seeds_of_a_calls_choices_follow_one_another_as_vllm_counts_them() -> None:
    async def main() -> None:
        engine = ServedEngine()
        async with fronted(engine=engine) as (app, _, _, _):
            await call(app, "POST", CHAT, chat(n=3, seed=5))
            await call(app, "POST", CHAT, chat(n=2))
        given = [
            request.sampling.seed for dispatch in engine.given for request in dispatch.requests
        ]
        assert given == [5, 6, 7, None, None]

    run_virtual(main())


def test_the_gateways_limit_clips_what_vllm_asks_for() -> None:
    async def main() -> None:
        async with fronted(max_output_tokens=3) as (app, _, _, records):
            asked = await call(app, "POST", RESPONSES, responses())
            assert asked.json()[0][0]["tokens"] == 3
            unlimited = responses()
            del unlimited["max_output_tokens"]
            await call(app, "POST", RESPONSES, unlimited)
            await call(app, "POST", RESPONSES, responses(max_output_tokens=3))
            assert [record.clipped for record in records] == [True, True, False]
            assert [record.max_output_tokens for record in records] == [3, 3, 3]

    run_virtual(main())


def test_a_padded_answer_flows_to_its_own_end_and_leaves_with_its_batch() -> None:
    async def main() -> None:
        async with fronted("fixed:batch_size=2") as (app, _, _, records):
            short = Call(app, "POST", CHAT, chat(stream=True, max_tokens=2))
            long = Call(app, "POST", RESPONSES, responses(stream=True, max_output_tokens=40))
            await asyncio.sleep(0.02)
            assert not short.whole
            assert [part.get("end") for part in parts(short)] == [None, None]
            await short.task
            assert parts(short)[2] == {"index": 0, "text": "", "tokens": 0, "end": "length"}
            await long.task
            assert len({record.released_at for record in records}) == 1
            assert {record.batch_size for record in records} == {2}

    run_virtual(main())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_takes_every_sequence_and_vllms_task_with_it(
    waits: bool, stream: bool
) -> None:
    async def main() -> None:
        async with fronted("single") as (app, gateway, serving, records):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=200))
            await asyncio.sleep(0.01)
            if not waits:
                await first.task
            asked = Call(app, "POST", CHAT, chat(max_tokens=500, n=2, stream=stream))
            await asyncio.sleep(0.05)
            asked.leave()
            await asked.task
            assert gateway.batcher.in_service == (1 if waits else 0)
            await first.task
            assert outcomes(records) == ["cancelled", "cancelled", "completed"]
            assert gateway.batcher.unanswered == 0
            await asyncio.sleep(0.01)
            assert serving.ended == 1
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "front-call"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (RESPONSES, responses()), (MESSAGES, messages())]
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_comes_before_the_headers_of_a_stream(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """A wait that is too long: vLLM has begun its stream by then."""

    async def main() -> None:
        async with fronted("single") as (app, gateway, _, records):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.01)
            asked = await call(app, "POST", path, body | {"patience": 0.05, "stream": stream})
            assert asked.status == 429
            assert int(asked.headers["retry-after"]) >= 1
            assert asked.headers["content-type"] == "application/json"
            error = asked.json()["error"]
            assert "patience" in error["message"]
            if path == MESSAGES:
                assert asked.json()["type"] == "error"
                assert error["type"] == "rate_limit_error"
            assert error["code"] == "queue_timeout"
            first.leave()
            await first.task
            assert outcomes(records) == ["abandoned", "cancelled"]
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_a_call_of_more_sequences_than_the_queue_has_room_for_is_rejected_as_one() -> None:
    overload = OverloadSettings(max_num_queued_reqs=3)

    async def main() -> None:
        async with fronted("single", overload=overload) as (app, _, serving, records):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.01)
            asked = await call(app, "POST", CHAT, chat(n=3, stream=True))
            assert (asked.status, asked.json()["error"]["code"]) == (429, "queue_full")
            await asyncio.sleep(0.001)
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "front-call"]
            assert outcomes(records) == ["rejected"] * 3
            assert serving.taken == []
            first.leave()
            await first.task

    run_virtual(main())


def test_a_precheck_speaks_the_words_of_the_endpoint() -> None:
    overload = OverloadSettings(max_num_queued_reqs=1)

    async def main() -> None:
        async with fronted("single", overload=overload) as (app, _, _, _):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.01)
            asked = await call(app, "POST", MESSAGES, messages())
            assert (asked.status, asked.json()["type"]) == (429, "error")
            first.leave()
            await first.task

    run_virtual(main())


def test_exceptions_of_vllm_before_the_queue_are_the_clients_and_leave_no_record() -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            serving.fault = ValueError("no such tool")
            for path, body in ((CHAT, chat()), (MESSAGES, messages(stream=True))):
                asked = await call(app, "POST", path, body)
                assert asked.status == 400
                assert asked.json()["error"]["message"] == "no such tool"
            assert records == []
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


LAST = {
    CHAT: b'data: {"error":{"message":"a parser fails",',
    RESPONSES: b'event: error\ndata: {"error":{"message":"a parser fails",',
    MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"api_error",',
}


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (RESPONSES, responses()), (MESSAGES, messages())]
)
def test_a_fault_of_vllm_in_mid_stream_ends_the_call_with_an_error(
    path: str, body: dict[str, Any]
) -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            serving.break_after = 3
            asked = await call(app, "POST", path, body | {"stream": True})
            assert asked.status == 200
            events = asked.body.split(b"\n\n")
            assert len(events) - 1 == 1 + 3 + (2 if path == CHAT else 1)
            assert events[4].startswith(LAST[path])
            assert asked.body.endswith(b"data: [DONE]\n\n" if path == CHAT else b"}\n\n")
            if path == RESPONSES:
                said = json.loads(events[4].partition(b"data: ")[2])
                assert (said["type"], said["sequence_number"]) == ("error", 4)
                assert said["code"] == "internal_error"
            assert outcomes(records) == ["failed"]
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_vllm_ends_before_its_sequences_fails(stream: bool) -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            serving.stop_after = 2 if stream else 0
            asked = await call(app, "POST", CHAT, chat(n=2, stream=stream))
            if stream:
                assert asked.events()[-2]["error"]["code"] == "internal_error"
                assert outcomes(records) == ["failed", "failed"]
            else:  # it had them all, and makes nothing of them
                assert outcomes(records) == ["completed", "completed"]
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def test_a_whole_answer_that_vllm_cannot_write_is_500() -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            serving.break_after = 0
            asked = await call(app, "POST", CHAT, chat())
            assert (asked.status, asked.json()["error"]["code"]) == (500, "internal_error")
            assert outcomes(records) == ["cancelled"]
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


def engine_of(gateway: Gateway) -> ServedEngine:
    assert isinstance(gateway.engine, ServedEngine)
    return gateway.engine


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_lost_in_mid_answer_is_replaced_where_the_rest_is_exact(stream: bool) -> None:
    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            asked = Call(app, "POST", CHAT, chat(stream=stream, max_tokens=40))
            await asyncio.sleep(0.03)
            engine_of(gateway).kill()
            await asked.task
            assert asked.status == 200
            found = parts(asked) if stream else asked.json()[0]
            assert "".join(part["text"] for part in found) == words(40)
            assert (outcomes(records), records[0].interruptions) == (["completed"], 1)
            assert serving.ended == 1

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_lost_within_an_answer_that_has_a_state_ends_it_with_an_error(
    stream: bool,
) -> None:
    """Trap 1: such as one under a grammar; here a penalty, which the emulated engine knows."""

    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            body = chat(stream=stream, max_tokens=40, presence_penalty=1.0)
            asked = Call(app, "POST", CHAT, body)
            await asyncio.sleep(0.03)
            engine_of(gateway).kill()
            await asked.task
            error = asked.events()[-2]["error"] if stream else asked.json()["error"]
            assert error["code"] == "engine_unavailable"
            assert "presence_penalty" in error["message"]
            assert asked.status == (200 if stream else 503)
            assert outcomes(records) == ["failed"]
            await asyncio.sleep(0.01)
            assert serving.ended == 1

    run_virtual(main())


def test_serving_objects_are_built_anew_for_each_engine_and_calls_wait_for_it() -> None:
    """Trap 2: those of a lost engine have a renderer that takes no work."""

    async def main() -> None:
        async with fronted() as (app, gateway, serving, records):
            assert serving.lives == [1]
            await call(app, "POST", CHAT, chat())
            assert serving.lives == [1]
            engine_of(gateway).kill()
            asked = Call(app, "POST", MESSAGES, messages())
            await asyncio.sleep(0.5)
            assert asked.status is None
            await asked.task
            assert asked.status == 200
            await call(app, "POST", RESPONSES, responses())
            assert serving.lives == [1, 2]
            assert outcomes(records) == ["completed"] * 3

    run_virtual(main())


def test_time_limits_hold_for_these_calls_too() -> None:
    async def main() -> None:
        async with fronted("single") as (app, _, _, records):
            asked = await call(
                app, "POST", RESPONSES, responses(max_output_tokens=900, request_timeout=0.2)
            )
            assert (asked.status, asked.json()["error"]["code"]) == (504, "deadline_exceeded")
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=500))
            await asyncio.sleep(0.01)
            late = await call(app, "POST", MESSAGES, messages(first_token_timeout=0.1))
            assert late.status == 504
            assert late.json()["error"]["type"] == "timeout_error"
            first.leave()
            await first.task
            assert outcomes(records) == ["cancelled", "failed", "failed"]

    run_virtual(main())


def test_a_stream_may_speak_while_it_waits() -> None:
    overload = OverloadSettings(queue_events=True, sse_keep_alive_interval=0.05)

    async def main() -> None:
        async with fronted("single", overload=overload) as (app, _, _, records):
            first = Call(app, "POST", "/v1/completions", completion(max_tokens=200))
            await asyncio.sleep(0.01)
            asked = await call(app, "POST", CHAT, chat(stream=True))
            lines = asked.body.split(b"\n\n")
            assert lines[0].startswith(b': queue {"queue_position":')
            assert b": keep-alive" in lines
            assert "".join(part["text"] for part in parts(asked)) == words(8)
            await first.task
            assert outcomes(records) == ["completed", "completed"]

    run_virtual(main())


def test_what_the_engine_says_of_the_prompt_comes_with_the_first_tokens_alone() -> None:
    class Telling(ServedEngine):
        def dispatch(self, *arguments: Any, **options: Any) -> Any:
            streams = super().dispatch(*arguments, **options)
            for stream in streams:
                stream.prompt_logprobs = [None, "a position"]
            return streams

    async def main() -> None:
        async with fronted(engine=Telling()) as (app, _, _, _):
            asked = await call(app, "POST", CHAT, chat(stream=True, prompt_logprobs=1))
            told = [part.get("prompt") for part in parts(asked)]
            assert told == [[None, "a position"]] + [None] * 7

    run_virtual(main())


def test_an_image_reaches_the_engine_as_it_was_rendered_and_text_as_its_ids() -> None:
    async def main() -> None:
        engine = ServedEngine()
        async with fronted(engine=engine) as (app, gateway, serving, _):
            assert gateway.serving_objects is not None
            image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
            seen = chat(messages=[{"role": "user", "content": image}])
            refused = await call(app, "POST", CHAT, seen)
            assert (refused.status, refused.json()["error"]["code"]) == (501, "unsupported")
            assert refused.json()["error"]["param"] == "messages[0].content[0]"
            gateway.serving_objects.takes_parts = True
            serving.prompt_type = "multimodal"
            assert (await call(app, "POST", CHAT, seen)).status == 200
            serving.prompt_type = "token"
            serving.arguments = {"reasoning_ended": False, "trace_headers": {}, "priority": 3}
            await call(app, "POST", CHAT, chat())
            serving.arguments = {"reasoning_parser_kwargs": {"a": 1}, "reasoning_ended": None}
            await call(app, "POST", CHAT, chat())
            serving.prompt_type = "embeds"
            strange = await call(app, "POST", CHAT, chat())
            assert strange.status == 501
        given = [dispatch.requests[0] for dispatch in engine.given]
        assert [each.rendered for each in given] == [
            {"type": "multimodal", "prompt_token_ids": [7] * 4},
            None,
            None,
        ]
        assert [each.engine_arguments for each in given] == [
            None,
            {"reasoning_ended": False},
            {"reasoning_parser_kwargs": {"a": 1}},
        ]

    run_virtual(main())


FUNCTION = {"type": "function", "function": {"name": "f"}}


SENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tools": [], "tool_choice": "auto", "echo": True}, {"echo": True}),
    ({"tools": None, "tool_choice": "none", "echo": True}, {"echo": True}),
    ({"tools": [], "tool_choice": "required"}, {"tool_choice": "required"}),
    ({"tools": [], "tool_choice": FUNCTION}, {"tool_choice": FUNCTION}),
    ({"tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "auto"}),
    (
        {"guided_regex": "a+", "priority": 3},
        {"tools": [TOOL], "structured_outputs": {"regex": "a+"}},
    ),
    (
        {"guided_choice": ["a"], "tools": None, "tool_choice": "required", "seed": None},
        {"tool_choice": "required", "structured_outputs": {"choice": ["a"]}},
    ),
    (
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
    ),
]


def test_vllm_gets_what_the_client_sent_without_what_says_nothing_and_what_is_kendalls() -> None:
    async def main() -> None:
        async with fronted() as (app, _, serving, records):
            for fields, sent in SENT:
                assert (await call(app, "POST", CHAT, chat(**fields))).status == 200
                name = records.pop().request_id.removeprefix("chatcmpl-").removesuffix("-0")
                plain = {"model": "tiny", "messages": USER, "max_tokens": 8, "request_id": name}
                assert serving.bodies.pop() == plain | sent

    run_virtual(main())


def test_ids_of_the_newer_endpoints_are_written_as_theirs() -> None:
    async def main() -> None:
        async with fronted() as (app, _, serving, records):
            for path, body in ((RESPONSES, responses()), (MESSAGES, messages())):
                assert (await call(app, "POST", path, body)).status == 200
            named = [body["request_id"] for body in serving.bodies]
            assert [name[:5] for name in named] == ["resp_", "msg_" + named[1][4]]
            ids = [record.request_id.replace("-", "_", 1) for record in records]
            assert ids == [f"{name}-0" for name in named]

    run_virtual(main())


def test_a_limit_is_the_least_of_vllms_the_contexts_and_the_gateways() -> None:
    class Limiting(FakeServing):
        async def create(self, endpoint: Any, request: Any) -> bytes:
            prompt = {"type": "token", "prompt_token_ids": [7] * 4}
            params: Any = Params(ignore_eos=True)
            params.max_tokens = limits.pop()
            asked = CURRENT.get().ask(prompt, params, "id", {})
            return json.dumps([each async for each in self._read([asked])]).encode()

    limits = [2, 3, 4, 2044, 2045, None]

    async def main() -> None:
        engine = ServedEngine()
        serving = Limiting()
        async with fronted(engine=engine, serving=serving, max_output_tokens=3) as (app, _, _, _):
            for _ in range(len(limits)):
                assert (await call(app, "POST", CHAT, chat())).status == 200
        given = [dispatch.requests[0] for dispatch in engine.given]
        in_force = [3, 3, 3, 3, 3, 2]
        assert [each.request.max_output_tokens for each in given] == in_force
        assert [each.sampling.max_tokens for each in given] == in_force
        assert [each.asked_output_tokens for each in given] == [2044, 2044, 2044, 4, 3, 2]

    run_virtual(main())


def test_a_call_for_which_vllm_asks_nothing_is_a_fault_of_ours() -> None:
    async def main() -> None:
        async with fronted(unknown_fields="ignore") as (app, gateway, _, records):
            asked = await call(app, "POST", CHAT, chat(prompts=0))
            assert asked.status == 500, asked.body
            assert asked.json()["error"]["code"] == "internal_error"
            assert (records, gateway.batcher.unanswered) == ([], 0)

    run_virtual(main())


def test_a_form_beyond_the_gateways_limit_is_refused_before_it_is_compiled() -> None:
    async def main() -> None:
        for most, code in ((7, "unsupported"), (6, "form_too_large")):
            security = dataclasses.replace(FOR_THE_RUN, max_form_bytes=most)
            async with fronted(security=security) as (app, _, serving, records):
                serving.form = SimpleNamespace(
                    **dict.fromkeys(KINDS + OPTIONS) | {"regex": "12345"}
                )
                asked = await call(app, "POST", CHAT, chat())
                assert asked.json()["error"]["code"] == code
                assert records == []

    run_virtual(main())


def test_the_priority_and_prediction_of_a_call_reach_the_policy() -> None:
    async def main() -> None:
        engine = ServedEngine()
        async with fronted(engine=engine, allow_forced_lengths=True) as (app, _, _, _):
            body = responses(
                priority=-3, predicted_output_tokens=5.0, kendall_forced_output_tokens=3
            )
            asked = await call(app, "POST", RESPONSES, body)
            assert asked.json()[0][0]["tokens"] == 3
            (given,) = engine.given
            request = given.requests[0].request
            assert (request.priority, request.predicted_output_tokens) == (-3, 5.0)
            assert request.id.startswith("resp-")

    run_virtual(main())


def test_forced_lengths_need_their_flag_here_too() -> None:
    async def main() -> None:
        async with fronted(allow_forced_lengths=False) as (app, _, _, _):
            asked = await call(app, "POST", RESPONSES, responses(kendall_forced_output_tokens=3))
            assert asked.json()["error"]["code"] == "forced_lengths_not_allowed"

    run_virtual(main())


def test_counting_tokens_queues_nothing() -> None:
    async def main() -> None:
        async with fronted() as (app, _, _, records):
            path = "/v1/messages/count_tokens"
            body = {"model": "tiny", "messages": USER}
            asked = await call(app, "POST", path, body)
            assert (asked.status, asked.json()) == (200, {"input_tokens": 3})
            wrong = await call(app, "POST", path, body | {"model": "other"})
            assert (wrong.status, wrong.json()["error"]["type"]) == (404, "not_found_error")
            unknown = await call(app, "POST", path, body | {"nonsense": 1})
            assert unknown.json()["error"]["code"] == "unknown_field"
            assert records == []
        async with running() as (app, _):
            asked = await call(app, "POST", path, body)
            assert (asked.status, asked.json()["type"]) == (501, "error")

    run_virtual(main())


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, responses()), (MESSAGES, messages())])
def test_an_engine_without_an_api_server_refuses_the_newer_endpoints(
    path: str, body: dict[str, Any]
) -> None:
    async def main() -> None:
        async with running() as (app, _):
            for place in (path, "/openai" + path):
                assert access_of(place) == "client"
                asked = await call(app, "POST", place, body)
                assert (asked.status, asked.json()["error"]["code"]) == (501, "unsupported")
                assert path in asked.json()["error"]["message"]
            assert (await call(app, "GET", path)).status == 405

    run_virtual(main())


def test_embeddings_are_refused_by_name() -> None:
    async def main() -> None:
        async with running() as (app, _):
            body = {"model": "tiny", "input": "x"}
            asked = await call(app, "POST", "/v1/embeddings", body)
            assert (asked.status, asked.json()["error"]["code"]) == (404, "not_found")
            assert "tiny generates text" in asked.json()["error"]["message"]

    run_virtual(main())


def test_plain_calls_stay_on_the_gateways_own_path() -> None:
    plain = [
        ("/v1/completions", completion(echo=False, suffix="", prompt_logprobs=None)),
        (CHAT, chat(tools=[], tool_choice="auto", parallel_tool_calls=True)),
        (CHAT, chat(tools=None, reasoning_effort="none", add_special_tokens=False)),
    ]

    async def main() -> None:
        async with fronted() as (app, _, serving, _):
            for path, body in plain:
                assert (await call(app, "POST", path, body)).json()["object"]
            assert serving.bodies == []

    run_virtual(main())


def test_a_reasoning_parser_looks_at_every_chat_and_at_nothing_else() -> None:
    async def main() -> None:
        async with fronted(reasoning_parser="qwen3") as (app, _, serving, _):
            body = chat()
            del body["tools"]
            await call(app, "POST", CHAT, body)
            await call(app, "POST", "/v1/completions", completion())
            assert [each["messages"] for each in serving.bodies] == [USER]

    run_virtual(main())
