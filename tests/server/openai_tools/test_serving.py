"""What the gateway says to vLLM's serving objects and what it makes of their answers, on stand-ins
for what it imports of vLLM: `test_points` holds the names against vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

import kendall.server.engines.vllm
import kendall.server.openai_tools
from kendall.server.engines.base import Token, TokenLogprob
from kendall.server.openai_tools.call import AskedSequence, SequencePart
from kendall.server.openai_tools.endpoints import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    ApiEndpoint,
)
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings

CORE, POINTS, SERVING = (
    "kendall.server.engines.vllm.core",
    "kendall.server.openai_tools.vllm_imports",
    "kendall.server.openai_tools.serving",
)


class Tool(pydantic.BaseModel):
    name: str


class Body(pydantic.BaseModel):
    """A model of vLLM's."""

    model: str = "tiny"
    tools: list[Tool] = []
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = pydantic.Field(None, alias="maxTokens", le=100)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _checked(cls, given: Any) -> Any:
        if given.get("model") == "odd":
            raise ValueError("got an odd model; expected another")
        if given.get("model") == "broken":
            raise KeyError("role")
        return given


class Refusal(pydantic.BaseModel):
    message: str
    code: int
    param: str | None = None


class ErrorResponse(pydantic.BaseModel):
    error: Refusal


class Answer(pydantic.BaseModel):
    kind: str = pydantic.Field("text", serialization_alias="type")
    usage: None = None


class SaidError(ValueError):
    """An error with words for people."""


class NoTemplateError(Exception):
    """Of a model without a chat template."""


class Parser:
    def parse_args(self, arguments: Sequence[str]) -> Any:
        return SimpleNamespace(given=list(arguments))


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Chat:
    """Of the endpoint, with the words for errors of all."""

    answer: Any = None

    def create_error_response(self, error: Any) -> ErrorResponse:
        code = 501 if isinstance(error, NotImplementedError) else 400
        code = 500 if isinstance(error, RuntimeError) and code == 400 else code
        code = 404 if isinstance(error, LookupError) else code
        return ErrorResponse(error=Refusal(message=f"vLLM: {error}\nand more", code=code))

    async def create_chat_completion(self, request: Any, raw: None) -> Any:
        return self.answer

    async def create_responses(self, request: Any, raw: None) -> Any:
        return self.answer

    async def create_messages(self, request: Any, raw: None) -> Any:
        return self.answer

    async def count_tokens(self, request: Any, raw: None) -> Any:
        return Answer(kind="count")

    async def create_completion(self, request: Any, raw: None) -> Any:
        return Answer(kind="completion")


@dataclass
class There:
    """A serving object, and what vLLM was told when it was built."""

    serving: Any
    chat: Chat
    module: Any
    built: list[tuple[Any, ...]]


ENGINE = SimpleNamespace(
    renderer=SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda numbers: f"<{'+'.join(map(str, numbers))}>")
    ),
    model_config=SimpleNamespace(model="/models/tiny"),
    input_processor=None,
    vllm_config=SimpleNamespace(structured_outputs_config="structured"),
)
SETTINGS = Settings(
    model="tiny",
    served_model_name="tiny",
    served_model_aliases=("small",),
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    chat, built = Chat(), list[tuple[Any, ...]]()

    async def init_app_state(proxy: Any, state: Any, arguments: Any, tasks: Any) -> None:
        built.append((proxy, arguments, tasks))
        for name in ("chat", "completion", "responses"):
            setattr(state, f"openai_serving_{name}", chat)
        state.anthropic_serving_messages = chat

    points = ModuleType(POINTS)
    names = "ChatCompletion Completion Responses AnthropicMessages AnthropicCountTokens"
    vars(points).update(
        {f"{name}Request": Body for name in names.split()},
        EngineClient=SimpleNamespace(register=lambda kind: built.append((kind,))),
        EngineDeadError=RuntimeError,
        FlexibleArgumentParser=Parser,
        make_arg_parser=lambda parser: parser,
        init_app_state=init_app_state,
        SamplingParams=SimpleNamespace,
        RequestOutput=SimpleNamespace,
        CompletionOutput=SimpleNamespace,
        Logprob=Logprob,
    )
    core = ModuleType(CORE)
    vars(core).update(
        NO_CHAT_TEMPLATE="got a chat without a template",
        PROMPT_ERRORS=(ValueError, KeyError, NotImplementedError),
        lacks_template=lambda error: isinstance(error, NoTemplateError),
        speaker=lambda error: error.__cause__ if isinstance(error.__cause__, SaidError) else None,
    )
    for name, module in ((POINTS, points), (CORE, core)):
        package, _, own = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules[package], own, module, raising=False)
    monkeypatch.delitem(sys.modules, SERVING, raising=False)
    monkeypatch.delattr(kendall.server.openai_tools, "serving", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm.tool_parsers"), "level", logging.INFO)
    import kendall.server.openai_tools.serving as module

    serving = asyncio.run(module.VllmServing.build(ENGINE, SETTINGS))
    yield There(serving, chat, module, built)
    sys.modules.pop(SERVING, None)  # it holds the stand-ins
    if hasattr(kendall.server.openai_tools, "serving"):
        del kendall.server.openai_tools.serving


PROMPT = {"prompt": "one two", "prompt_token_ids": [1, 2]}


def refused(there: There, endpoint: ApiEndpoint, body: dict[str, Any]) -> tuple[Any, ...]:
    with pytest.raises(ApiError) as caught:
        there.serving.request(endpoint, body)
    error = caught.value
    return error.status, error.code, error.message, error.param


def asked(**params: Any) -> AskedSequence:
    given = {"n": 1, "output_kind": SimpleNamespace(name="DELTA"), "logprobs": None} | params
    return AskedSequence(PROMPT, SimpleNamespace(**given), "cmpl-1", {})


def part(
    *tokens: Token, prompt_logprobs: Sequence[Any] | None = None, index: int = 0
) -> SequencePart:
    return SequencePart(
        index, "".join(each.text for each in tokens), tokens, prompt_logprobs, "stop", 7
    )


def test_vllm_is_told_of_names_tools_and_structured_outputs(there: There) -> None:
    (kind,), (proxy, arguments, tasks) = there.built
    assert isinstance(proxy, kind), "it passes for an engine of vLLM's"
    assert proxy.renderer is ENGINE.renderer
    assert tasks == ("generate",)
    assert arguments.given == ["--model", "/models/tiny"]
    assert arguments.served_model_name == ["tiny", "small", *SETTINGS.own_names]
    assert arguments.enable_auto_tool_choice is True
    assert arguments.tool_call_parser == "hermes"
    assert arguments.tool_strict_level == "parameter"
    assert arguments.structured_outputs_config == "structured"
    assert arguments.fingerprint_mode == "none"
    assert logging.getLogger("vllm.tool_parsers").level == logging.CRITICAL


def test_fields_have_the_names_that_clients_write(there: There) -> None:
    assert there.serving.fields(CHAT) == {"model", "tools", "messages", "maxTokens"}


def test_a_body_is_read_without_the_gateways_own_fields(there: There) -> None:
    made = there.serving.request(CHAT, {"model": "small", "maxTokens": 5, "kendall_tenant": "a"})
    assert (made.model, made.max_tokens) == ("small", 5)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"messages": [{}, 5]},
            (
                400,
                "invalid_request",
                "messages[1]: Input should be a valid dictionary",
                "messages[1]",
            ),
        ),
        (
            {"maxTokens": 101},
            (
                400,
                "invalid_request",
                "maxTokens: Input should be less than or equal to 100",
                "maxTokens",
            ),
        ),
        (
            {"tools": [{"name": "a"}, {}]},
            (400, "invalid_request", "tools[1].name: Field required", "tools[1].name"),
        ),
        (
            {"model": "odd"},
            (400, "invalid_request", "got an odd model; expected another", None),
        ),
        # Python failed in the middle of it
        ({"model": "broken"}, (400, "invalid_prompt", None, "messages")),
    ],
)
def test_a_body_that_vllm_refuses_is_refused_with_its_place(
    there: There, body: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    status, code, said, param = expected
    said = said or there.module.NOT_RENDERED
    assert refused(there, CHAT, body) == (status, code, said, param)


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (CHAT, {"kind": "text", "usage": None}),
        (RESPONSES, {"type": "text", "usage": None}),  # in the names of the wire
        (MESSAGES, {"kind": "text"}),  # without what is not there
    ],
)
def test_a_whole_answer_is_the_json_of_its_dialect(
    there: There, endpoint: ApiEndpoint, text: dict[str, Any]
) -> None:
    there.chat.answer = Answer()
    assert json.loads(asyncio.run(there.serving.create(endpoint, None))) == text


def test_each_endpoint_has_its_own_method(there: There) -> None:
    made = asyncio.run(there.serving.create(COMPLETIONS, None))
    assert json.loads(made)["kind"] == "completion"
    made = asyncio.run(there.serving.create(COUNT_TOKENS, None))
    assert json.loads(made)["kind"] == "count"


def test_a_stream_passes_as_it_is_and_that_of_responses_as_events(there: There) -> None:
    class Event(pydantic.BaseModel):
        type: str = "response.created"
        number: int = pydantic.Field(1, serialization_alias="sequence_number")

    class Nameless(pydantic.BaseModel):
        pass

    async def stream(*events: Any) -> AsyncIterator[Any]:
        for each in events:
            yield each

    async def read(endpoint: ApiEndpoint) -> list[Any]:
        return [each async for each in await there.serving.create(endpoint, None)]

    there.chat.answer = stream("data: 1\n\n", "data: [DONE]\n\n")
    assert asyncio.run(read(CHAT)) == ["data: 1\n\n", "data: [DONE]\n\n"]
    there.chat.answer = stream(Event(), Nameless())
    assert asyncio.run(read(RESPONSES)) == [
        'event: response.created\ndata: {"type":"response.created","sequence_number":1}\n\n',
        "event: unknown\ndata: {}\n\n",
    ]


@pytest.mark.parametrize(
    ("code", "param", "said", "expected"),
    [
        (400, "tools", "no tool", (400, "invalid_request", "no tool", "tools")),
        (404, "model", "no model", (404, "not_found", "no model", "model")),
        (501, None, "no audio", (501, "unsupported", "no audio", None)),
        (409, None, "odd", (400, "invalid_request", "odd", None)),
        (
            400,
            "input_tokens",
            "beyond the context",
            (400, "context_length_exceeded", "beyond the context", "input_tokens"),
        ),
        (400, "input_tokens", "too few", (400, "invalid_request", "too few", "input_tokens")),
        (400, "tools", "context", (400, "invalid_request", "context", "tools")),
    ],
)
def test_an_error_in_place_of_an_answer_keeps_its_words(
    there: There, code: int, param: str | None, said: str, expected: tuple[Any, ...]
) -> None:
    there.chat.answer = ErrorResponse(error=Refusal(message=said, code=code, param=param))
    with pytest.raises(ApiError) as caught:
        asyncio.run(there.serving.create(CHAT, None))
    error = caught.value
    assert (error.status, error.code, error.message, error.param) == expected


@pytest.mark.parametrize("code", [500, 502, 503])
def test_a_fault_of_vllms_own_stays_in_its_log(there: There, code: int) -> None:
    there.chat.answer = ErrorResponse(error=Refusal(message="/srv/secret", code=code))
    with pytest.raises(ApiError) as caught:
        asyncio.run(there.serving.create(CHAT, None))
    assert (caught.value.status, caught.value.code) == (500, "internal_error")
    assert caught.value.message == "vLLM's API server failed; its log has the details"


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "early", "expected"),
    [
        # before the queue: the words of whoever speaks to people, in one line
        (
            _caused(ValueError("inner"), SaidError("roles must alternate\nuser")),
            True,
            (400, "invalid_request", "roles must alternate", None),
        ),
        (ValueError("odd"), True, (400, "invalid_prompt", "not rendered", "messages")),
        (KeyError("role"), True, (400, "invalid_prompt", "not rendered", "messages")),
        (
            NoTemplateError("see v4.44"),
            True,
            (400, "invalid_prompt", "got a chat without a template", "messages"),
        ),
        (
            TypeError("odd\nkind"),
            True,
            (400, "invalid_request", "odd", None),
        ),
        # after it: what vLLM makes of it
        (
            ValueError("odd"),
            False,
            (400, "invalid_request", "vLLM: odd\nand more", None),
        ),
        (
            NoTemplateError("see v4.44"),
            False,
            (400, "invalid_request", "vLLM: see v4.44\nand more", None),
        ),
        (
            RuntimeError("/srv/secret"),
            True,
            (500, "internal_error", "vLLM's API server failed; its log has the details", None),
        ),
    ],
)
def test_what_vllm_raises_becomes_words_for_the_client(
    there: There, error: Exception, early: bool, expected: tuple[Any, ...]
) -> None:
    made = there.serving.refusal(error, early=early)
    said = made.message.replace(there.module.NOT_RENDERED, "not rendered")
    assert (made.status, made.code, said, made.param) == expected


def test_an_error_of_the_gateways_own_is_that(there: There) -> None:
    own = ApiError(429, "queue_full", "full")
    assert there.serving.refusal(own, early=True) is own


def test_tokens_reach_vllm_in_its_own_form(there: There) -> None:
    first = Token(5, "a", logprobs={5: TokenLogprob("a", -0.5, 1), 9: TokenLogprob("b", -2.5, 2)})
    made = there.serving.output(
        asked(logprobs=2), [part(first, Token(6, "c")), part(Token(7, "d"), index=1)]
    )
    assert (made.request_id, made.prompt, made.prompt_token_ids) == ("cmpl-1", "one two", [1, 2])
    assert made.prompt_logprobs is None
    assert made.finished is False
    one, other = made.outputs
    assert (one.index, one.text, one.token_ids) == (0, "ac", [5, 6])
    assert (one.cumulative_logprob, one.finish_reason, one.stop_reason) == (None, "stop", 7)
    assert one.logprobs == [{5: Logprob(-0.5, 1, "a"), 9: Logprob(-2.5, 2, "b")}, {}]
    assert (other.index, other.text) == (1, "d")


def test_log_probabilities_that_nobody_asked_for_are_not_made(there: There) -> None:
    (made,) = there.serving.output(asked(), [part(Token(5, "a"))]).outputs
    assert made.logprobs is None


def test_log_probabilities_of_a_prompt_get_the_texts_of_their_tokens(there: There) -> None:
    positions = [None, {5: Logprob(-0.5), 6: Logprob(-1.5)}, {5: Logprob(-0.1)}]
    made = there.serving.output(
        asked(), [part(Token(1, "a")), part(Token(2, "b"), prompt_logprobs=positions)]
    )
    assert made.prompt_logprobs == [
        None,
        {5: Logprob(-0.5, None, "<5>"), 6: Logprob(-1.5, None, "<6>")},
        {5: Logprob(-0.1, None, "<5>")},
    ]
