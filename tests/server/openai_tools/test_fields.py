"""Which calls vLLM's serving objects answer, which fields they may have, and what becomes of vLLM's
sampling parameters.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from kendall.policies import SpecError
from kendall.server.engines.base import EngineStartError, Sampling, Structured
from kendall.server.http.api.checked_call import check_newer
from kendall.server.http.api.newer_endpoints import (
    MessagesRequest,
    ResponsesRequest,
    check_tools,
    served_by_vllm,
)
from kendall.server.http.api.schema import ChatRequest, CompletionRequest
from kendall.server.openai_tools.call import CURRENT, AskedSequence
from kendall.server.openai_tools.endpoints import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    ApiEndpoint,
    dialect_of,
    error_body,
    error_event,
)
from kendall.server.openai_tools.proxy import EngineProxy
from kendall.server.openai_tools.sampling import sampling_of
from kendall.server.openai_tools.serving_objects import ServingObjects, serving_objects_of
from kendall.server.operations.serving import choose_engine
from kendall.server.queue.continuing import resumable, way_to_continue
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from tests.server.mortal import faulty
from tests.server.openai_tools.fake import DELTA, Client, FakeServing, Params, ServedEngine
from tests.server.passed import Scripted
from tests.virtual_time import run_virtual

SETTINGS = Settings(model="tiny", served_model_name="tiny")
PLAIN = Params()
USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
FORM = SimpleNamespace(
    json={"type": "object"},
    regex=None,
    choice=None,
    grammar=None,
    json_object=None,
    structural_tag=None,
    disable_any_whitespace=True,
    disable_additional_properties=False,
    whitespace_pattern=None,
)


def desk(*, every_chat: bool = False, takes_parts: bool = False) -> ServingObjects:
    made = ServingObjects(ServedEngine(), SETTINGS)
    made.every_chat, made.takes_parts = every_chat, takes_parts
    return made


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "tiny", "messages": USER} | fields)


def completions(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "x"} | fields)


def newer(kind: type[Any], **fields: Any) -> Any:
    own = {"input": "x"} if kind is ResponsesRequest else {"messages": USER, "max_tokens": 3}
    return kind.model_validate({"model": "tiny"} | own | fields)


BEYOND: list[tuple[Any, ApiEndpoint | None]] = [
    (chat(), None),
    (chat(tools=[{}]), CHAT),
    (chat(tools=[]), None),
    (chat(tool_choice="required"), CHAT),
    (chat(tool_choice="none"), None),
    (chat(tool_choice=None, best_of=None), None),
    (chat(echo=True), CHAT),
    (chat(prompt_logprobs=0), CHAT),
    (chat(reasoning_effort="low"), CHAT),
    (chat(include_reasoning=False), CHAT),
    (chat(add_special_tokens=True), CHAT),
    (chat(add_special_tokens=False), None),
    (chat(metadata={"a": "b"}, use_beam_search=True), None),
    (chat(messages=IMAGE), None),
    (completions(), None),
    (completions(echo=True, max_tokens=0), COMPLETIONS),
    (completions(echo=False), None),
    (completions(echo=0), COMPLETIONS),
    (completions(suffix="x"), COMPLETIONS),
    (completions(suffix=""), None),
    (completions(prompt_logprobs=1), COMPLETIONS),
    (completions(add_special_tokens=True), None),
    (completions(tools=[{}]), None),
    (newer(ResponsesRequest), RESPONSES),
    (newer(MessagesRequest), MESSAGES),
]


@pytest.mark.parametrize(("asked", "endpoint"), BEYOND)
def test_vllm_answers_what_the_gateway_does_not(asked: Any, endpoint: ApiEndpoint | None) -> None:
    assert served_by_vllm(desk(), asked) is endpoint


def test_images_go_to_vllm_where_the_model_takes_them() -> None:
    assert served_by_vllm(desk(takes_parts=True), chat(messages=IMAGE)) is CHAT
    text = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert served_by_vllm(desk(takes_parts=True), chat(messages=text)) is None
    assert served_by_vllm(desk(takes_parts=True), completions()) is None


def test_a_reasoning_parser_takes_every_chat() -> None:
    assert served_by_vllm(desk(every_chat=True), chat()) is CHAT
    assert served_by_vllm(desk(every_chat=True), completions()) is None
    assert ServingObjects(ServedEngine(), SETTINGS).every_chat is False
    reasons = Settings(model="tiny", served_model_name="tiny", reasoning_parser="qwen3")
    assert ServingObjects(ServedEngine(), reasons).every_chat is True


def test_each_model_of_a_body_has_its_endpoint() -> None:
    models = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    assert [model.endpoint for model in models] == [CHAT, COMPLETIONS, RESPONSES, MESSAGES]


def refusal_of(asked: Any, settings: Settings = SETTINGS) -> tuple[int, str, str | None] | None:
    try:
        check_newer(settings, asked)
    except ApiError as error:
        return error.status, error.code, error.param
    return None


RESPONSE_ROWS: list[tuple[dict[str, Any], tuple[int, str, str | None] | None]] = [
    ({}, None),
    ({"instructions": "x", "text": {}, "reasoning": {}, "store": True, "seed": 1}, None),
    ({"background": True}, (501, "unsupported", "background")),
    ({"background": False, "service_tier": "auto", "conversation": None}, None),
    ({"previous_response_id": "resp_1"}, (404, "not_found", "previous_response_id")),
    ({"conversation": "c"}, (501, "unsupported", "conversation")),
    ({"vllm_xargs": {"a": 1}}, (501, "unsupported", "vllm_xargs")),
    ({"kv_transfer_params": {}}, (501, "unsupported", "kv_transfer_params")),
    ({"use_beam_search": True}, (501, "unsupported", "use_beam_search")),
    ({"n": 2}, (400, "unknown_field", "n")),
    ({"max_tokens": 2}, (400, "unknown_field", "max_tokens")),
    ({"inptu": 2}, (400, "unknown_field", "inptu")),
    ({"model": "other"}, (404, "model_not_found", "model")),
    ({"patience": 1.0, "request_id": "a", "safety_identifier": "u"}, None),
]
MESSAGE_ROWS: list[tuple[dict[str, Any], tuple[int, str, str | None] | None]] = [
    ({"system": "x", "stop_sequences": ["y"], "thinking": {"type": "disabled"}}, None),
    ({"service_tier": "auto", "mcp_servers": []}, None),
    ({"mcp_servers": [{}]}, (501, "unsupported", "mcp_servers")),
    ({"container": "c"}, (501, "unsupported", "container")),
    ({"seed": 1}, (400, "unknown_field", "seed")),
    ({"stop": "x"}, (400, "unknown_field", "stop")),
]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [(ResponsesRequest, *row) for row in RESPONSE_ROWS]
    + [(MessagesRequest, *row) for row in MESSAGE_ROWS],
)
def test_no_field_is_ignored(kind: type[Any], fields: dict[str, Any], expected: Any) -> None:
    """Trap 9: vLLM's models would."""
    assert refusal_of(newer(kind, **fields)) == expected


def test_unknown_fields_may_be_ignored() -> None:
    lenient = Settings(model="tiny", served_model_name="tiny", unknown_fields="ignore")
    assert refusal_of(newer(ResponsesRequest, inptu=2), lenient) is None
    assert refusal_of(newer(ResponsesRequest, background=True), lenient) is not None


def test_the_clients_limit_is_the_endpoints_own() -> None:
    assert newer(ResponsesRequest, max_output_tokens=7).client_limit == 7
    assert newer(ResponsesRequest).client_limit is None
    assert newer(MessagesRequest).client_limit == 3
    assert newer(MessagesRequest).formless is False
    assert newer(MessagesRequest).wanted_logprobs is None


def test_tools_that_a_server_would_run_are_refused_by_name() -> None:
    check_tools(None)
    check_tools("what vLLM refuses")
    check_tools([{"type": "function"}, {"type": "custom"}, {"name": "anthropic"}, 7])
    with pytest.raises(ApiError) as caught:
        check_tools([{"type": "function"}, {"type": "web_search"}])
    assert (caught.value.status, caught.value.param) == (501, "tools[1].type")
    assert "web_search" in caught.value.message


def test_max_tokens_may_be_zero_for_the_prompt_alone() -> None:
    assert completions(max_tokens=0, echo=True).client_limit == 0
    assert completions().client_limit == 16
    for fields in ({}, {"echo": False}):
        with pytest.raises(ValueError, match="got max_tokens=0; expected at least 1, or echo=true"):
            completions(max_tokens=0, **fields)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        chat(max_tokens=0)


# sampling


def test_every_parameter_is_mirrored() -> None:
    """Trap 1."""
    params = Params(
        temperature=0.5,
        top_p=0.4,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=9,
        logprobs=2,
        prompt_logprobs=1,
        thinking_token_budget=11,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stop=["a"],
        stop_token_ids=[4],
        bad_words=["b"],
        max_tokens=50,
        min_tokens=12,
        logit_bias={1: 2.0},
        allowed_token_ids=[1, 2],
        structured_outputs=FORM,
    )
    assert sampling_of(params, PLAIN, 20) == Sampling(
        max_tokens=20,
        min_tokens=12,
        temperature=0.5,
        top_p=0.4,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=9,
        logit_bias={1: 2.0},
        logprobs=2,
        prompt_logprobs=1,
        thinking_token_budget=11,
        stop=("a",),
        stop_token_ids=(4,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        structured=Structured("json", {"type": "object"}, {"disable_any_whitespace": True}),
        allowed_token_ids=(1, 2),
        bad_words=("b",),
    )
    assert sampling_of(PLAIN, PLAIN, 16) == Sampling(max_tokens=16)
    assert sampling_of(params, PLAIN, 5).min_tokens == 12, "the limit may be raised while it waits"


@pytest.mark.parametrize(
    ("name", "value"),
    [("watermarking", True), ("repetition_detection", {}), ("extra_args", {"a": 1})],
)
def test_a_parameter_that_is_not_ours_refuses_the_call_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_of(Params(**{name: value}), PLAIN, 5)
    assert (caught.value.status, caught.value.code) == (501, "unsupported")
    assert caught.value.param == name


def test_values_that_change_nothing_are_no_reason_to_refuse() -> None:
    params = Params(stream_interval=1, extra_args={}, n=4, output_kind=DELTA, _eos_token_id=3)
    assert sampling_of(params, PLAIN, 5) == Sampling(max_tokens=5)
    with pytest.raises(ApiError):
        sampling_of(Params(stream_interval=2), PLAIN, 5)


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"thinking_token_budget": 5}, {"structured_outputs": FORM}]
)
def test_what_lives_in_the_output_alone_is_never_continued_behind_it(fields: Any) -> None:
    sampling = sampling_of(Params(**fields), PLAIN, 5)
    assert not resumable(sampling)
    assert sampling.needs_check
    assert [way_to_continue(sampling, made) for made in (0, 1)] == ["behind", "none"]
    greedy = sampling_of(Params(temperature=0.0, **fields), PLAIN, 5)
    assert way_to_continue(greedy, 1) == "again"


# outputs


def test_a_reader_gets_news_of_each_sequence_and_ends_with_the_last() -> None:
    async def main() -> list[Any]:
        asked = AskedSequence({}, Params(n=2, output_kind=DELTA), "id", {})
        first, second = asked.outlets
        found = []

        async def read() -> None:
            async for parts in asked.parts():
                found.extend(
                    (part.index, part.text, part.finish_reason, part.prompt_logprobs)
                    for part in parts
                )
                if len(found) == 2:
                    second.end("stop", 7)  # while the reader is busy with its last part

        first.add("a", (), ["p"])
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        first.add("b", ())
        first.add("c", ())
        first.end("length", None)
        await reading
        assert (first.written, second.written) == (True, True)
        return found

    assert asyncio.run(main()) == [
        (0, "a", None, ["p"]),
        (0, "bc", "length", None),
        (1, "", "stop", None),
    ]


def test_a_reader_of_the_whole_gets_all_sequences_once() -> None:
    async def main() -> None:
        asked = AskedSequence({}, Params(n=2), "id", {})
        reader = asked.parts()
        reading = asyncio.ensure_future(anext(reader))
        for place, outlet in enumerate(asked.outlets):
            outlet.add(f"{place}", ())
            await asyncio.sleep(0)
            outlet.add("!", ())
            assert not reading.done()
            outlet.end("stop", "x" if place else None)
        parts = await reading
        assert [(part.text, part.stop_reason) for part in parts] == [("0!", None), ("1!", "x")]
        assert not asked.outlets[0].written
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        assert asked.outlets[0].written

    asyncio.run(main())


# errors


def test_each_endpoint_says_errors_in_its_own_words() -> None:
    error = ApiError(503, "engine_unavailable", "gone", param="x")
    assert error_body("openai", error) == error_body("responses", error) == error.body()
    assert error_body("anthropic", error) == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "gone",
            "code": "engine_unavailable",
            "param": "x",
        },
    }
    assert error_body("anthropic", ApiError(500, "x", "y"))["error"]["type"] == "api_error"
    said = error.body()["error"]
    of_responses = {name: said[name] for name in ("code", "message", "param")}
    of_responses |= {"error": said, "type": "error", "sequence_number": 3}
    for dialect, body, begin, end in (
        ("openai", error.body(), b"data: ", b"\n\ndata: [DONE]\n\n"),
        ("responses", of_responses, b"event: error\ndata: ", b"\n\n"),
        ("anthropic", error_body("anthropic", error), b"event: error\ndata: ", b"\n\n"),
    ):
        event = error_event(dialect, error, 3)  # type: ignore[arg-type]
        assert event.startswith(begin + b"{")
        assert event.endswith(b"}" + end)
        assert json.loads(event.removeprefix(begin).removesuffix(end)) == body
    assert dialect_of("/v1/messages") == dialect_of("/v1/messages/count_tokens") == "anthropic"
    assert dialect_of("/v1/responses") == dialect_of("/nowhere") == "openai"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "invalid_request_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_clients_read_their_own_kinds_of_errors(status: int, kind: str) -> None:
    assert error_body("anthropic", ApiError(status, "x", "y"))["error"]["type"] == kind


# the proxy


def test_vllm_is_told_nothing_of_the_engine_but_how_prompts_are_rendered() -> None:
    """Trap 5: it must not refuse, and must not see that an engine was lost."""
    names = ("renderer", "model_config", "input_processor", "vllm_config")
    client = SimpleNamespace(**{name: object() for name in names}, secret=1)
    proxy = EngineProxy(client, EOFError)
    assert all(getattr(proxy, name) is getattr(client, name) for name in names)
    assert not hasattr(proxy, "secret")
    assert (proxy.errored, proxy.is_running, proxy.is_stopped) == (False, True, False)
    assert isinstance(proxy.dead_error, EOFError)
    proxy.check_admission(10**9)
    assert asyncio.run(proxy.is_tracing_enabled()) is False
    with pytest.raises(ApiError):
        proxy.encode()

    calls = []
    CURRENT.set(SimpleNamespace(ask=lambda *arguments: calls.append(arguments)))  # type: ignore[arg-type]
    proxy.generate({"a": 1}, PLAIN, "id", priority=3)
    assert calls == [({"a": 1}, PLAIN, "id", {"priority": 3})]


# the desk


def test_serving_objects_are_built_once_for_one_client_even_if_two_ask() -> None:
    async def main() -> None:
        engine, built = ServedEngine(), []

        async def build(client: Client) -> FakeServing:
            built.append(client.life)
            await asyncio.sleep(0.01)
            return FakeServing()

        made = ServingObjects(engine, SETTINGS, build)
        with pytest.raises(RuntimeError):
            await made.serving()
        await engine.start()
        first, second = await asyncio.gather(made.serving(), made.serving())
        assert first is second
        made.close()
        assert await made.serving() is not first
        assert built == [1, 1]

    asyncio.run(main())


def test_an_engine_whose_library_has_an_api_server_has_serving_objects() -> None:
    assert isinstance(serving_objects_of(ServedEngine(), SETTINGS), ServingObjects)
    assert serving_objects_of(Scripted(), SETTINGS) is None


@pytest.mark.slow
def test_what_was_built_on_an_engine_goes_with_it() -> None:
    """It holds parts of the engine: with the lost one, and with the last one at the end."""
    built: list[weakref.ref[FakeServing]] = []

    async def build(client: Client) -> FakeServing:
        made = FakeServing()
        built.append(weakref.ref(made))
        return made

    def held() -> list[bool]:
        gc.collect()
        return [each() is not None for each in built]

    async def main() -> None:
        engine = ServedEngine()
        with patch(
            "kendall.server.gateway.serving_objects_of",
            lambda *given: ServingObjects(*given, build),
        ):
            async with faulty(engine=engine) as (_, gateway, _, _):
                assert gateway.serving_objects is not None
                assert held() == [True]
                engine.kill()
                assert held() == [False]
                await asyncio.sleep(5.0)
                await gateway.serving_objects.serving()
                assert held() == [False, True]
            assert held() == [False, False]

    run_virtual(main())


def test_a_parser_that_vllm_does_not_have_ends_the_start_in_one_line() -> None:
    async def build(client: Client) -> FakeServing:
        raise KeyError("no parser hermse; there is hermes")

    async def main() -> None:
        engine = ServedEngine()
        await engine.start()
        parsers = Settings(model="tiny", served_model_name="tiny", tool_call_parser="hermse")
        await ServingObjects(engine, parsers, build).open()

    with pytest.raises(EngineStartError, match=r"got --tool-call-parser hermse.*there is hermes"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"engine": "emulated", "tool_call_parser": "hermes"},
            "--tool-call-parser with --engine emulated, which has no tools",
        ),
        (
            {"engine": "emulated", "reasoning_parser": "qwen3"},
            "--reasoning-parser with --engine emulated, which has no tools",
        ),
        ({"engine": "emulated", "enable_auto_tool_choice": True}, "--enable-auto-tool-choice with"),
        ({"engine": "vllm", "enable_auto_tool_choice": True}, "without --tool-call-parser"),
    ],
)
def test_parsers_need_an_engine_and_one_another(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        choose_engine(Settings(model="tiny", served_model_name="tiny", **fields))
