"""What clients may ask: served, or refused by name; nothing is ignored."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI

from kendall.queueing.choosing.advice.advise import TARGETS
from kendall.queueing.choosing.gain.criterion import BESIDE, FIELDS
from kendall.queueing.choosing.objective import OBJECTIVES
from kendall.server.engines.base import Sampling, Structured
from kendall.server.engines.emulated import UNIFORM
from kendall.server.http.api import openapi
from kendall.server.http.api.checked_call import READ, RETRY_HEADER
from kendall.server.http.api.newer_endpoints import BEYOND
from kendall.server.http.api.parameters import CALL_HEADERS
from kendall.server.http.api.schema import ChatRequest, CompletionRequest
from kendall.server.http.api.structured import StructuredOutputs, form_of
from kendall.server.http.api.unserved import HINTS, UNSERVED
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TEXT = {"type": "text", "text": "x"}


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi there"}],
        "max_tokens": 4,
        "ignore_eos": True,
    } | fields


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if endpoint == "chat" else completion(**{"max_tokens": 4} | fields)


def on_gateway(main: Callable[..., Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run `main(app, gateway)` on virtual time."""

    async def whole() -> None:
        async with running(**settings) as (app, gateway):
            await main(app, gateway)

    run_virtual(whole())


async def post(app: Any, endpoint: str, **fields: Any) -> Call:
    return await call(app, "POST", PATHS[endpoint], body(endpoint, **fields))


def test_every_header_that_says_how_a_call_is_served_is_read() -> None:
    names = [header["name"].encode() for header in CALL_HEADERS]
    assert len(names) == 7
    assert [name for name in (*names, RETRY_HEADER) if not name.startswith(READ)] == []


# refused


@pytest.mark.parametrize("endpoint", PATHS)
def test_every_field_that_others_serve_and_we_do_not_is_refused_by_name(endpoint: str) -> None:
    async def main(app: Any, gateway: Any) -> None:
        for name in UNSERVED:
            asked = await post(app, endpoint, **{name: 3 if name == "best_of" else {"asked": True}})
            error = asked.json()["error"]
            assert (asked.status, error["code"], error["param"]) == (501, "unsupported", name)
        assert gateway.batcher.unanswered == 0

    on_gateway(main)


@pytest.mark.parametrize("endpoint", PATHS)
def test_values_that_ask_for_nothing_and_hints_are_no_reason_to_refuse(endpoint: str) -> None:
    async def main(app: Any, _: Any) -> None:
        for name, harmless in UNSERVED.items():
            for value in (None, *harmless):
                assert (await post(app, endpoint, **{name: value})).status == 200, (name, value)
        assert (await post(app, endpoint, **dict.fromkeys(HINTS, "text"))).status == 200
        assert (await post(app, endpoint, n=2, best_of=2)).status == 200
        assert (
            await post(app, endpoint, add_special_tokens=endpoint == "completions")
        ).status == 200
        assert (await post(app, endpoint, add_special_tokens=endpoint == "chat")).status == 501

    on_gateway(main)


def test_zero_and_false_are_told_apart() -> None:
    """`0 == False` in Python: prompt_logprobs=0 asks for something."""

    async def main(app: Any, _: Any) -> None:
        assert (await post(app, "completions", echo=0)).status == 501
        assert (await post(app, "completions", prompt_logprobs=0)).status == 501

    on_gateway(main)


def test_a_field_that_nobody_knows_is_a_mistake_with_a_suggestion() -> None:
    async def main(app: Any, _: Any) -> None:
        error = (await post(app, "completions", temprature=1)).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_field", "temprature")
        assert "did you mean temperature?" in error["message"]
        assert "leave it out" in (await post(app, "chat", qqqq=1)).json()["error"]["message"]

    on_gateway(main)


@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        ("/v1/chat/completions", "messages", "message"),
        ("/v1/completions", "prompt", "prompts"),
        ("/v1/completions", "model", "model_name"),
        ("/v1/responses", "model", "model_id"),
        ("/detokenize", "tokens", "token"),
    ],
)
def test_a_missing_field_that_is_there_under_nearly_its_name_is_named(
    path: str, right: str, wrong: str, unknown_fields: str
) -> None:
    async def main(app: Any, _: Any) -> None:
        sent = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "x"}],
            "prompt": "x",
            "tokens": [1],
        }
        kept = {name: sent[name] for name in {"model", right} if path != "/v1/responses"}
        kept[wrong] = kept.pop(right, "tiny")
        answer = await call(app, "POST", path, kept)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "unknown_field", wrong)
        assert error["message"].endswith(f": did you mean {right}?")

    on_gateway(main, unknown_fields=unknown_fields)


def test_a_missing_field_is_named_where_no_other_has_nearly_its_name() -> None:
    async def main(app: Any, _: Any) -> None:
        for more in ({"temprature": 1}, {f"message{place}": 1 for place in range(1000)}):
            answer = await call(app, "POST", PATHS["chat"], {"model": "tiny"} | more)
            assert answer.json()["error"]["message"] == "messages: Field required"

    on_gateway(main)


REFUSED = [
    ("completions", {"n": "1"}, 400, "n"),
    ("completions", {"n": True}, 400, "n"),
    ("completions", {"stream": "yes"}, 400, "stream"),
    ("completions", {"temperature": 2.5}, 400, "temperature"),
    ("completions", {"top_k": 2**40}, 400, "top_k"),
    ("completions", {"seed": 2**70}, 400, "seed"),
    ("completions", {"min_tokens": 5}, 400, "min_tokens"),
    ("completions", {"stop": ["x"] * 17}, 400, "stop"),
    ("completions", {"logit_bias": {"foo": 0}}, 400, "logit_bias"),
    ("completions", {"logit_bias": {str(2**31): 0}}, 400, "logit_bias"),
    ("completions", {"request_id": "spaces are not for headers"}, 400, "request_id"),
    ("completions", {"response_format": {"type": "xml"}}, 400, "response_format"),
    ("completions", {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (
        "completions",
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        400,
        "structured_outputs",
    ),
    ("completions", {"structured_outputs": {}}, 400, "structured_outputs"),
    (
        "completions",
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        400,
        "response_format",
    ),
    ("completions", {"structured_outputs": {"choice": ["b"]}}, 501, "structured_outputs"),
    ("completions", {"response_format": {"type": "json_object"}}, 501, "structured_outputs"),
    ("completions", {"guided_choice": ["b"]}, 501, "structured_outputs"),
    ("completions", {"allowed_token_ids": [1]}, 501, "allowed_token_ids"),
    ("completions", {"bad_words": ["x"]}, 501, "bad_words"),
    (
        "completions",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        501,
        "stream_options.include_obfuscation",
    ),
    ("completions", {"prompt": ["a"] * 1025}, 400, "prompt"),
    ("chat", {"top_logprobs": 3}, 400, "top_logprobs"),
    ("chat", {"continue_final_message": True}, 400, "continue_final_message"),
    ("chat", {"messages": []}, 400, "messages"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        400,
        "messages[0].tool_calls",
    ),
    ("chat", {"messages": [{"role": "user"}, {"content": "x"}]}, 400, "messages[1].role"),
    ("completions", {"cache_salt": ""}, 400, "cache_salt"),
    ("completions", {"cache_salt": "s" * 1025}, 400, "cache_salt"),
    ("completions", {"bad_words": ["x", 5]}, 400, "bad_words[1]"),
    ("completions", {"prompt": [1, "x"]}, 400, "prompt"),
    (
        "completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        400,
        "response_format.json_schema.schema",
    ),
    ("completions", {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    (
        "chat",
        {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
        501,
        "chat_template_kwargs",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        501,
        "messages[0].content[0]",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0].content[0]",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}]},
        400,
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("endpoint", "fields", "status", "param"), REFUSED)
def test_what_cannot_be_is_refused_before_it_queues(
    endpoint: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    async def main(app: Any, gateway: Any) -> None:
        asked = await post(app, endpoint, **fields)
        error = asked.json()["error"]
        assert asked.status == status, error
        assert error["param"] is None if param is None else error["param"].startswith(param)
        totals = [
            sample.value
            for sample in gateway.metrics.requests.collect()[0].samples
            if sample.name.endswith("_total")
        ]
        assert sum(totals) == gateway.batcher.unanswered == 0

    on_gateway(main)


# field, and the last value that is taken with the first that is not
BOUNDS: list[tuple[str, str, Any, Any]] = [
    ("completions", "n", 1, 0),
    ("completions", "n", 128, 129),
    ("completions", "stop", ["x"] * 16, ["x"] * 17),
    ("completions", "stop", "x" * 1024, "x" * 1025),
    ("chat", "stop", ["x" * 512, "y" * 512], ["x" * 512, "y" * 513]),
    ("completions", "stop_token_ids", [0], [-1]),
    ("completions", "stop_token_ids", [2**31 - 1], [2**31]),
    ("completions", "stop_token_ids", [5] * 1024, [5] * 1025),
    ("completions", "min_tokens", 0, -1),
    ("completions", "min_tokens", 4, 5),
    ("completions", "seed", -(2**63), -(2**63) - 1),
    ("completions", "seed", 2**63 - 1, 2**63),
    ("completions", "temperature", 0, -0.001),
    ("completions", "temperature", 2, 2.001),
    ("completions", "top_p", 0.001, 0),
    ("completions", "top_p", 1, 1.001),
    ("completions", "top_k", -1, -2),
    ("completions", "top_k", 2**31 - 1, 2**31),
    ("completions", "min_p", 0, -0.001),
    ("completions", "min_p", 1, 1.001),
    *(
        ("chat", name, bound, 1.001 * bound)
        for name in ("presence_penalty", "frequency_penalty")
        for bound in (-2, 2)
    ),
    ("completions", "repetition_penalty", 0.001, 0),
    ("completions", "repetition_penalty", 100, 100.1),
    ("completions", "logit_bias", {"0": -100}, {"0": -100.1}),
    ("completions", "logit_bias", {str(2**31 - 1): 100}, {str(2**31 - 1): 100.1}),
    *(
        ("completions", "logit_bias", *({str(n): 1 for n in range(size)} for size in pair))
        for pair in [(4096, 4097)]
    ),
    ("completions", "allowed_token_ids", [0], []),
    ("completions", "bad_words", ["x"], [""]),
    ("completions", "bad_words", ["x"] * 128, ["x"] * 129),
    ("completions", "bad_words", ["x" * 4096], ["x" * 4095, "yy"]),
    ("completions", "guided_choice", ["x"], []),
    ("completions", "guided_choice", ["x"] * 1024, ["x"] * 1025),
    ("completions", "guided_choice", ["x"], [""]),
    ("completions", "truncate_prompt_tokens", -1, -2),
    ("completions", "truncate_prompt_tokens", 2**31 - 1, 2**31),
    ("completions", "priority", -(2**63), -(2**63) - 1),
    ("completions", "priority", 2**63 - 1, 2**63),
    *(
        ("chat", name, 0.5, 0)
        for name in (
            *("patience", "request_timeout", "first_token_timeout"),
            "predicted_output_tokens",
        )
    ),
    ("completions", "cache_salt", "s" * 1024, "s" * 1025),
    ("completions", "request_id", "i" * 128, "i" * 129),
    ("completions", "kendall_forced_output_tokens", 1, 0),
    ("completions", "max_tokens", 1, -1),
    ("completions", "max_tokens", 2**31 - 1, 2**31),
    ("chat", "max_tokens", 1, 0),
    ("chat", "max_completion_tokens", 1, 0),
    ("completions", "logprobs", 0, -1),
    ("completions", "logprobs", 20, 21),
    ("chat", "messages", [{"role": "user"}] * 4096, [{"role": "user"}] * 4097),
    *(
        ("chat", "messages", *([{"role": "user", "content": [TEXT] * size}] for size in pair))
        for pair in [(1024, 1025)]
    ),
]


def test_the_last_value_of_a_field_is_taken_and_the_next_is_not() -> None:
    """Taken: it gets past the check of the fields, whatever the engine says of it."""

    async def main(app: Any, _: Any) -> None:
        async def code(endpoint: str, **fields: Any) -> str | None:
            asked = await post(app, endpoint, **fields)
            return None if asked.status == 200 else asked.json()["error"]["code"]

        for endpoint, name, taken, refused in BOUNDS:
            assert await code(endpoint, **{name: taken}) != "invalid_request", (name, taken)
            assert await code(endpoint, **{name: refused}) == "invalid_request", (name, refused)
        for top, expected in ((-1, "invalid_request"), (0, None), (20, None)):
            assert await code("chat", logprobs=True, top_logprobs=top) == expected
        assert await code("chat", logprobs=True, top_logprobs=21) == "invalid_request"
        for name in ("min_tokens", "max_tokens"):  # neither is a context that there is
            beyond = {"min_tokens": 2**31 - 1, "max_tokens": 2**31 - 1}
            assert await code("completions", **beyond) == "context_length_exceeded"
            assert await code("completions", **beyond | {name: 2**31}) == "invalid_request"

    on_gateway(main)


def test_what_a_client_leaves_out_has_openais_and_vllms_defaults() -> None:
    nothing: dict[str, Any] = {"stream_options": None, "prompt": "x", "model": "tiny"}
    sampled = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"}
    given = {"n": 1, "stream": False, "min_tokens": 0, "priority": 0, "skip_special_tokens": True}
    off = {"include_stop_str_in_output", "ignore_eos", "return_token_ids"}
    zero = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

    async def main(app: Any, gateway: Any) -> None:
        engine, given_to_it = gateway.engine, list[Any]()
        dispatch = engine.dispatch
        engine.dispatch = lambda server, requests, **how: (
            given_to_it.extend(requests) or dispatch(server, requests, **how)
        )
        assert (await call(app, "POST", PATHS["completions"], nothing)).status == 200
        assert [each.sampling for each in given_to_it] == [Sampling(max_tokens=16)]

    made = CompletionRequest.model_validate(nothing)
    expected = given | zero | dict.fromkeys(off, False) | dict.fromkeys(sampled)
    assert {name: getattr(made, name) for name in expected} == expected
    others = type(made).model_fields.keys() - expected.keys() - nothing.keys()
    assert {getattr(made, name) for name in others} == {None}
    nulls = dict.fromkeys(["n", "stream", "priority", "return_token_ids", *zero])
    assert CompletionRequest.model_validate(nothing | nulls) == made
    usage = CompletionRequest.model_validate(nothing | {"stream": True, "stream_options": {}})
    assert usage.stream_options is not None
    assert set(usage.stream_options.model_dump().values()) == {False}
    talk = ChatRequest.model_validate({"model": "tiny", "messages": [{"role": "user"}]})
    assert (talk.add_generation_prompt, talk.continue_final_message) == (True, False)
    assert (talk.client_limit, talk.wanted_logprobs, talk.logprobs) == (None, None, False)
    on_gateway(main)


@pytest.mark.parametrize("salt", ["s", "s" * 1024, "any character \N{SNOWMAN}\n/"])
def test_a_cache_salt_is_any_text_as_vllm_takes_it(salt: str) -> None:
    async def main(app: Any, gateway: Any) -> None:
        requests: list[Any] = []
        dispatch = gateway.engine.dispatch
        gateway.engine.dispatch = lambda server, given, **how: (
            requests.extend(given) or dispatch(server, given, **how)
        )
        assert (await post(app, "completions", cache_salt=salt)).status == 200
        assert [engine_request.cache_salt for engine_request in requests] == [salt]

    on_gateway(main)


def test_the_place_of_an_error_names_no_kind_of_the_schemas() -> None:
    """`messages[0].content`, not `messages.0.content.str`; a list among several kinds by its
    index.
    """

    async def main(app: Any, _: Any) -> None:
        for fields, param in (
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            ({"bad_words": ["x", 5]}, "bad_words[1]"),
        ):
            error = (await post(app, "chat", **fields)).json()["error"]
            assert error["param"] == param
            assert error["message"].startswith(f"{param}: ")

    on_gateway(main)


def test_ids_of_answers_are_random_and_tell_no_count() -> None:
    async def main(app: Any, _: Any) -> None:
        for endpoint, prefix in (("completions", "cmpl-"), ("chat", "chatcmpl-")):
            ids = [(await post(app, endpoint)).json()["id"] for _ in range(50)]
            assert len(set(ids)) == 50
            assert all(re.fullmatch(prefix + "[0-9a-f]{24}", each) for each in ids)
            assert len({each[: len(prefix) + 12] for each in ids}) == 50, (
                "no number that begins alike"
            )

    on_gateway(main)


def test_a_path_with_a_slash_too_many_is_not_redirected_to_the_clients_host() -> None:
    async def main(app: Any, _: Any) -> None:
        for path in ("/v1/models/", "/health/", "/metrics/"):
            asked = await call(app, "GET", path, None, {"host": "elsewhere.example"})
            assert asked.status in (404, 405), path
            assert "location" not in asked.headers
            assert b"elsewhere" not in asked.body

    on_gateway(main)


def test_a_model_was_created_when_the_gateway_started() -> None:
    async def main(app: Any, gateway: Any) -> None:
        entry = (await call(app, "GET", "/v1/models")).json()["data"][0]
        assert entry["created"] == gateway.created
        assert entry["created"] > 1_700_000_000

    on_gateway(main)


def test_probes_are_told_whether_it_lives_and_whether_it_takes_calls() -> None:
    async def main(app: Any, gateway: Any) -> None:
        async def told() -> list[int | None]:
            return [(await call(app, "GET", path)).status for path in ("/health", "/ready")]

        assert await told() == [200, 200]
        assert (await call(app, "GET", "/load")).json() == {"server_load": 0}
        gateway.begin_drain()
        assert await told() == [200, 503]

    on_gateway(main)


def test_an_error_stays_small_whatever_came_in() -> None:
    """A list of wrong items in a union of lists is an error an item and kind, each with its
    input.
    """

    async def main(app: Any, _: Any) -> None:
        wrong = [{"x": "y" * 50}] * 20_000
        for fields in (
            {"prompt": wrong},
            {"stop_token_ids": wrong},
            {"model": "m" * 100_000},
            {"x" * 100_000: 1},
        ):
            asked = await post(app, "completions", **fields)
            assert asked.status in (400, 404, 413)
            assert len(asked.body) < 2500

    on_gateway(main)


# served


def test_null_stands_for_the_default_where_openai_has_it_so() -> None:
    async def main(app: Any, _: Any) -> None:
        nothing = dict.fromkeys(
            (
                "n",
                "stream",
                "stop",
                "temperature",
                "top_p",
                "presence_penalty",
                "frequency_penalty",
                "seed",
                "logit_bias",
                "logprobs",
            )
        )
        for endpoint in PATHS:
            assert (await post(app, endpoint, **nothing)).json()["choices"][0][
                "finish_reason"
            ] == "length"

    on_gateway(main)


def test_prompts_in_every_form_give_their_choices_in_order() -> None:
    async def main(app: Any, _: Any) -> None:
        for prompt, count in (("a b", 1), ([5, 6], 1), (["a", "b c"], 2), ([[5], [6, 7]], 2)):
            for stream in (False, True):
                asked = await post(
                    app, "completions", prompt=prompt, n=2, stream=stream, return_token_ids=True
                )
                if stream:
                    events = [event["choices"][0] for event in asked.events()[:-1]]
                    prompts = {
                        event["index"]: event["prompt_token_ids"]
                        for event in events
                        if "prompt_token_ids" in event
                    }
                else:
                    prompts = {
                        choice["index"]: choice["prompt_token_ids"]
                        for choice in asked.json()["choices"]
                    }
                assert sorted(prompts) == list(range(2 * count))
                assert all(prompts[2 * place] == prompts[2 * place + 1] for place in range(count))
                if isinstance(prompt, list) and isinstance(prompt[-1], list):
                    assert [prompts[0], prompts[2]] == prompt

    on_gateway(main)


@pytest.mark.parametrize("endpoint", PATHS)
def test_token_ids_are_returned_once_each_streamed_or_not(endpoint: str) -> None:
    async def main(app: Any, _: Any) -> None:
        whole = (await post(app, endpoint, return_token_ids=True)).json()["choices"][0]
        events = (await post(app, endpoint, return_token_ids=True, stream=True)).events()[:-1]
        streamed = [token for event in events for token in event["choices"][0].get("token_ids", [])]
        assert streamed == whole["token_ids"]
        assert len(streamed) == 4
        for stream in (False, True):
            plain = await post(app, endpoint, stream=stream)
            assert b"token_ids" not in plain.body

    on_gateway(main)


def test_offsets_of_a_stream_are_the_whole_answers_where_a_stop_string_holds_text_back() -> None:
    async def main(app: Any, _: Any) -> None:
        whole = (await post(app, "completions", logprobs=1)).json()["choices"][0]
        for end in range(1, len(whole["text"])):
            stop = whole["text"][end - 1] + "\x00"
            events = (
                await post(app, "completions", logprobs=1, stop=[stop], stream=True)
            ).events()[:-1]
            logprobs = [
                event["choices"][0]["logprobs"]
                for event in events
                if event["choices"][0]["logprobs"]
            ]
            assert [offset for each in logprobs for offset in each["text_offset"]] == whole[
                "logprobs"
            ]["text_offset"], stop

    on_gateway(main)


def test_every_word_of_the_emulated_engine_is_as_likely() -> None:
    async def main(app: Any, _: Any) -> None:
        (choice,) = (await post(app, "completions", logprobs=1)).json()["choices"]
        found = choice["logprobs"]["token_logprobs"]
        assert found
        assert set(found) == {-math.log(256)}

    on_gateway(main)


def test_logprobs_have_each_endpoints_own_form() -> None:
    async def main(app: Any, _: Any) -> None:
        given = (await post(app, "completions", logprobs=3)).json()["choices"][0]["logprobs"]
        assert given["token_logprobs"] == pytest.approx([UNIFORM] * 4)
        assert [len(top) for top in given["top_logprobs"]] == [3] * 4
        assert given["text_offset"] == [0, 6, 12, 18]
        content = (await post(app, "chat", logprobs=True, top_logprobs=2)).json()["choices"][0][
            "logprobs"
        ]["content"]
        assert [len(item["top_logprobs"]) for item in content] == [2] * 4
        assert content[0]["bytes"] == list(content[0]["token"].encode())
        none = (await post(app, "chat", logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert [item["top_logprobs"] for item in none] == [[]] * 4
        assert (await post(app, "chat")).json()["choices"][0]["logprobs"] is None

    on_gateway(main)


def test_continuous_usage_counts_up_in_every_chunk() -> None:
    async def main(app: Any, _: Any) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await post(app, "completions", stream=True, stream_options=options)).events()[:-1]
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4, 4]
        assert {event["usage"]["prompt_tokens"] for event in events} == {3}
        alone = (
            await post(
                app, "completions", stream=True, stream_options={"continuous_usage_stats": True}
            )
        ).events()[:-1]
        assert not any("usage" in event for event in alone), "as vLLM: with include_usage only"

    on_gateway(main)


def test_a_prompt_is_cut_where_that_is_asked_for() -> None:
    async def main(app: Any, _: Any) -> None:
        async def kept(**fields: Any) -> list[int]:
            made = await post(
                app, "completions", prompt=list(range(1, 2101)), return_token_ids=True, **fields
            )
            return list(made.json()["choices"][0]["prompt_token_ids"])

        assert await kept(truncate_prompt_tokens=3) == [2098, 2099, 2100]
        assert await kept(truncate_prompt_tokens=3, truncation_side="right") == [1, 2, 3]
        assert len(await kept(truncate_prompt_tokens=-1)) == 2048 - 4
        refused = await post(app, "completions", truncate_prompt_tokens=0)
        assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_prompt")

    on_gateway(main)


def test_text_parts_are_a_message_like_any_other() -> None:
    async def main(app: Any, _: Any) -> None:
        parts = [
            {"type": "text", "text": "hi"},
            {"type": "text", "text": "there", "cache_control": {"type": "ephemeral"}},
        ]
        assert (
            await post(app, "chat", messages=[{"role": "user", "content": parts}])
        ).status == 200

    on_gateway(main)


def test_the_model_answers_to_all_of_its_names() -> None:
    async def main(app: Any, _: Any) -> None:
        for name in ("tiny", "second", "org/third"):
            asked = await post(app, "chat", model=name)
            assert (asked.status, asked.json()["model"]) == (200, "tiny")
            assert (await call(app, "GET", f"/v1/models/{name}")).json()["id"] == name
        listed = (await call(app, "GET", "/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["tiny", "second", "org/third"]
        missing = await call(app, "GET", "/v1/models/other")
        assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")

    on_gateway(main, served_model_aliases=("second", "org/third"))


@pytest.mark.parametrize("given", ["/data/own/model-1", "./model-1/", "owner/model-1"])
def test_a_folder_answers_to_its_last_part_and_to_the_path_that_is_served(given: str) -> None:
    """As vLLM's own server does where no other name is given."""

    async def main(app: Any, _: Any) -> None:
        for name in ("model-1", given, given.rstrip("/")):
            asked = await post(app, "chat", model=name)
            assert (asked.status, asked.json()["model"]) == (200, "model-1")
        listed = (await call(app, "GET", "/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["model-1"]

    on_gateway(main, model=given, served_model_name="model-1")


def test_with_a_name_of_its_own_a_folder_does_not_answer_to_its_path() -> None:
    async def main(app: Any, _: Any) -> None:
        refused = await post(app, "chat", model="/data/own/model-1")
        assert (refused.status, refused.json()["error"]["message"]) == (
            404,
            "got model '.../model-1'; this gateway serves 'assistant'",
        )

    on_gateway(main, model="/data/own/model-1", served_model_name="assistant")


def test_kserves_paths_are_the_same_routes() -> None:
    async def main(app: Any, _: Any) -> None:
        for endpoint, path in PATHS.items():
            assert (await call(app, "POST", "/openai" + path, body(endpoint))).status == 200
        assert (await call(app, "GET", "/openai/v1/models")).json() == (
            await call(app, "GET", "/v1/models")
        ).json()

    on_gateway(main)


def test_tokenize_says_what_the_model_sees_and_detokenize_reverses_it() -> None:
    async def main(app: Any, gateway: Any) -> None:
        made = (
            await call(
                app,
                "POST",
                "/tokenize",
                {"model": "tiny", "prompt": "one two", "return_token_strs": True},
            )
        ).json()
        assert (
            made["count"],
            len(made["tokens"]),
            len(made["token_strs"]),
            made["max_model_len"],
        ) == (2, 2, 2, 2048)
        text = (await call(app, "POST", "/detokenize", {"tokens": made["tokens"]})).json()["prompt"]
        assert text == "".join(made["token_strs"])
        talk = (
            await call(
                app, "POST", "/tokenize", {"messages": [{"role": "user", "content": "hi there"}]}
            )
        ).json()
        usage = (await post(app, "chat")).json()["usage"]
        assert talk["count"] == usage["prompt_tokens"]
        for bad in ({}, {"prompt": "a", "messages": [{"role": "user"}]}, {"prompt": 3}):
            assert (await call(app, "POST", "/tokenize", bad)).status == 400
        assert (await call(app, "POST", "/detokenize", {"tokens": [2**31]})).status == 400
        assert (await call(app, "POST", "/detokenize", {"tokens": [0, 255]})).status == 200
        assert (await call(app, "POST", "/detokenize", {"tokens": []})).json() == {"prompt": ""}
        few = dataclasses.replace(gateway.batcher.capabilities, vocab_size=256)
        gateway.batcher.recovery.resume(few)
        assert (await call(app, "POST", "/detokenize", {"tokens": [255]})).status == 200
        beyond = (await call(app, "POST", "/detokenize", {"tokens": [256, 5]})).json()["error"]
        assert (beyond["code"], beyond["param"]) == ("invalid_prompt", "tokens")
        assert beyond["message"].endswith("expected 0 to 255")
        end = {"add_generation_prompt": False, "continue_final_message": True}
        for field, more in (
            ("chat_template_kwargs", {"chat_template_kwargs": {"a": 1}}),
            ("continue_final_message", end),
        ):
            told = await call(app, "POST", "/tokenize", {"prompt": "x"} | more)
            assert (told.status, told.json()["error"]["param"]) == (400, field)
        assert (
            await call(app, "POST", "/detokenize", {"model": "other", "tokens": []})
        ).status == 404

    on_gateway(main)


def test_tokenize_takes_vllms_fields_and_refuses_by_name_what_would_change_the_tokens() -> None:
    async def main(app: Any, _: Any) -> None:
        talk = {"messages": [{"role": "user", "content": "hi there"}]}
        plain = {
            "add_special_tokens": False,
            "chat_template": None,
            "tools": None,
            "mm_processor_kwargs": {},
            "media_io_kwargs": {},
        }
        end = {
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for taken in (
            {"prompt": "one"} | plain,
            {"prompt": "one", "add_special_tokens": True},
            talk | plain | end,
        ):
            assert (await call(app, "POST", "/tokenize", taken)).status == 200
        for field, value in {
            "add_special_tokens": True,
            "chat_template": "{{ 1 }}",
            "tools": [{"type": "function"}],
        }.items():
            refused = await call(app, "POST", "/tokenize", talk | {field: value})
            assert (refused.status, refused.json()["error"]["param"]) == (501, field)
        both = await call(app, "POST", "/tokenize", talk | {"continue_final_message": True})
        assert (both.status, both.json()["error"]["param"]) == (400, "continue_final_message")
        unknown = await call(app, "POST", "/tokenize", talk | {"add_special_token": True})
        assert (unknown.status, unknown.json()["error"]["code"]) == (400, "unknown_field")
        assert "did you mean add_special_tokens?" in unknown.json()["error"]["message"]

    on_gateway(main)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", PATHS)
def test_unknown_fields_are_refused_or_ignored_as_the_operator_says_and_others_extras_are_taken(
    endpoint: str,
) -> None:
    extras = {
        "provider": {"order": ["x"]},
        "route": "fallback",
        "models": ["tiny"],
        "cache_prompt": True,
        "keep_alive": "5m",
    }

    async def refusing(app: Any, _: Any) -> None:
        assert (await call(app, "POST", PATHS[endpoint], body(endpoint) | extras)).status == 200
        refused = await call(app, "POST", PATHS[endpoint], body(endpoint) | {"tempratur": 1})
        assert (refused.status, refused.json()["error"]["code"]) == (400, "unknown_field")
        assert "did you mean temperature?" in refused.json()["error"]["message"]

    async def ignoring(app: Any, _: Any) -> None:
        assert (
            await call(
                app, "POST", PATHS[endpoint], body(endpoint) | {"tempratur": 1, "zzz": {"a": [1]}}
            )
        ).status == 200
        assert (await call(app, "POST", "/tokenize", {"prompt": "one", "zzz": 1})).status == 200
        unserved = await call(
            app, "POST", PATHS[endpoint], body(endpoint) | {"zzz": 1, "use_beam_search": True}
        )
        assert (unserved.status, unserved.json()["error"]["param"]) == (501, "use_beam_search")

    on_gateway(refusing)
    on_gateway(ignoring, unknown_fields="ignore")


def test_every_answer_carries_a_request_id_the_callers_own_if_it_is_fit() -> None:
    async def main(app: Any, _: Any) -> None:
        async def given(path: str, content: object = None, **headers: str) -> str:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (
                await call(app, "POST" if content is not None else "GET", path, content, named)
            ).headers["x-request-id"]

        for path, content in (
            ("/v1/completions", completion()),
            ("/v1/completions", {}),
            ("/v1/models", None),
            ("/nowhere", None),
        ):
            assert await given(path, content, x_request_id="mine-1") == "mine-1"
            made = {
                await given(path, content),
                await given(path, content, x_request_id="not fit"),
                await given(path, content),
            }
            assert len(made) == 3
            assert "" not in made
        assert await given("/v1/completions", completion(request_id="in-the-body")) == "in-the-body"
        assert (
            await given(
                "/v1/completions", completion(request_id="in-the-body"), x_request_id="mine-2"
            )
            == "mine-2"
        )

    on_gateway(main)


# the way to the engine


def test_every_constraint_reaches_the_engine_under_vllms_names() -> None:
    schema = {"type": "object"}
    asked = [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured("json_object", True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                }
            },
            Structured("json", schema),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"a": 1}}},
            Structured("structural_tag", '{"type": "structural_tag", "format": {"a": 1}}'),
        ),
        ({"structured_outputs": {"json": schema}}, Structured("json", schema)),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            Structured("regex", "a", {"whitespace_pattern": " "}),
        ),
        (
            {"structured_outputs": {"grammar": "root ::= [a]"}},
            Structured("grammar", "root ::= [a]"),
        ),
        ({"guided_json": schema}, Structured("json", schema)),
        ({"guided_regex": "a+"}, Structured("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Structured("choice", ["a", "b"])),
        ({"guided_grammar": "g"}, Structured("grammar", "g")),
    ]
    for fields, expected in asked:
        for model, endpoint in ((CompletionRequest, "completions"), (ChatRequest, "chat")):
            made = model.model_validate_json(json.dumps(body(endpoint, **fields)))
            assert made.form() == expected


def test_one_answer_has_one_form() -> None:
    outputs = StructuredOutputs.model_validate({"regex": "a"})
    with pytest.raises(ValueError, match="expected one"):
        form_of(None, outputs, {"json": {}})


def test_all_that_a_client_says_of_sampling_reaches_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "seed": 11,
        "logprobs": 4,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }

    async def main(app: Any, gateway: Any) -> None:
        seen: list[Any] = []
        dispatch = gateway.engine.dispatch
        gateway.engine.dispatch = lambda server, requests, **how: (
            seen.extend(requests) or dispatch(server, requests, **how)
        )
        asked = await post(
            app,
            "completions",
            n=2,
            stop_token_ids=[9],
            logit_bias={"3": -5},
            cache_salt="salt",
            priority=4,
            **fields,
        )
        assert asked.status == 200
        for engine_request, seed in zip(seen, (11, 12), strict=True):
            sampling = engine_request.sampling
            for name, value in (fields | {"seed": seed, "stop": ("a", "b")}).items():
                assert getattr(sampling, name) == value
            assert (sampling.stop_token_ids, sampling.logit_bias, sampling.max_tokens) == (
                (9,),
                {3: -5.0},
                4,
            )
            assert (engine_request.cache_salt, engine_request.request.priority) == ("salt", 4)

    on_gateway(main)


# the document


def test_the_document_says_what_the_two_hot_routes_take_and_all_references_lead_somewhere() -> None:
    async def main(app: Any, _: Any) -> None:
        document = (await call(app, "GET", "/openapi.json")).json()
        schemas = document["components"]["schemas"]
        text = json.dumps(document)
        for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
            assert reference in schemas
        for name in ("CompletionRequest", "ChatRequest"):
            assert schemas[name]["additionalProperties"] is False
            assert "kendall_forced_output_tokens" not in schemas[name]["properties"]
            assert not set(schemas[name]["properties"]) & set(UNSERVED)
        for path in PATHS.values():
            operation = document["paths"][path]["post"]
            assert set(operation["responses"]) >= {
                "200",
                "400",
                "401",
                "404",
                "413",
                "429",
                "500",
                "501",
                "503",
            }
            assert set(operation["responses"]["200"]["content"]) == {
                "application/json",
                "text/event-stream",
            }
            assert operation["requestBody"]["required"] is True
            assert {"x-llm-d-inference-ttl", "x-llm-d-slo-ttft-ms"} <= {
                each["name"] for each in operation["parameters"]
            }
            assert (
                "patience"
                in schemas[
                    operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split(
                        "/"
                    )[-1]
                ]["properties"]
            )
        asked = {
            each["name"]: each["schema"]
            for each in document["paths"]["/admin/advice"]["get"]["parameters"]
        }
        assert set(asked) == {*FIELDS, *BESIDE}
        assert (set(asked["objective"]["enum"]), set(asked["target"]["enum"])) == (
            set(OBJECTIVES),
            set(TARGETS),
        )
        assert '"422"' not in text

    on_gateway(main)


ANSWERED = "400 401 404 413 429 500 501 503 504"  # of the routes that carry answers
STATUSES = {  # beside 200
    "POST /v1/completions": ANSWERED,
    "POST /v1/chat/completions": ANSWERED,
    "POST /v1/responses": ANSWERED,
    "POST /v1/messages": ANSWERED,
    "POST /v1/messages/count_tokens": ANSWERED,
    "POST /v1/embeddings": "401 404 413",
    "POST /tokenize": "400 401 404 413 429 500 501 503",
    "POST /detokenize": "400 401 404 413 429 500 503",
    "GET /v1/models": "401 500",
    "GET /v1/models/{name}": "401 404 500",
    "GET /health": "503 508",
    "GET /ready": "503",
    "GET /version": "",
    "GET /metrics": "401",
    "GET /load": "401",
    "GET /admin/state": "401 403 500 503",
    "GET /admin/policy": "401 403 500 503",
    "PUT /admin/policy": "400 401 403 413 500 503",
    "GET /admin/servers": "401 403 500 503",
    "PUT /admin/servers": "400 401 403 409 413 500 503",
    "GET /admin/prediction": "400 401 403 500 503 504",
    "GET /admin/advice": "400 401 403 500 503 504",
    "PUT /admin/autopilot": "400 401 403 409 413 500 503",
    "POST /admin/calibrate": "400 401 403 409 413 500 503 504",
    "DELETE /admin/calibrate": "401 403 500",
    "POST /admin/drain": "401 403 500",
    "DELETE /admin/drain": "401 403 409 500",
}


def check_statuses(document: dict[str, Any]) -> None:
    retry = {"required": True, "schema": {"type": "integer", "minimum": 1, "maximum": 120}}
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert operations.keys() == STATUSES.keys()
    for name, operation in operations.items():
        found = dict(operation["responses"])
        streams = "text/event-stream" in found.pop("200").get("content", {})
        assert streams == (STATUSES[name] == ANSWERED and "count" not in name), name
        assert " ".join(sorted(found)) == STATUSES[name], name
        for status, response in found.items():
            plain = name in {"GET /health", "GET /ready"} or status not in {"429", "503"}
            assert response.get("headers") == (None if plain else {"Retry-After": retry})
        if "requestBody" in operation:
            assert operation["requestBody"]["required"] is True
    for name in ("parameters", "requestBody"):
        assert name not in operations["POST /v1/embeddings"]
    for path in ("/v1/responses", "/v1/messages/count_tokens"):
        body = operations[f"POST {path}"]["requestBody"]["content"]["application/json"]["schema"]
        assert (body["additionalProperties"], body["properties"]["model"]) == (
            False,
            {"type": "string"},
        )
        assert body["properties"]["tools"] == {}
    for path in ("/v1/completions", "/v1/responses"):
        asked = operations[f"POST {path}"]["parameters"]
        assert len(asked) == 7
        assert {(each["in"], each["required"]) for each in asked} == {("header", False)}
        least = {each["name"]: each["schema"].get("minimum") for each in asked}
        assert least["x-envoy-upstream-rq-timeout-ms"] == 0
    components = document["components"]["schemas"]
    assert not {"HTTPValidationError", "ValidationError"} & components.keys()


def test_the_document_has_every_status_and_the_bounds_of_the_fields() -> None:
    """Those of `BOUNDS`, where a number is bounded; texts and lists of tokens as JSON has them."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
    prompts = [{"type": "array", "items": each, "minItems": 1} for each in ({"type": "string"},)]

    async def main(app: Any, _: Any) -> None:
        whole = (await call(app, "GET", "/openapi.json")).json()
        check_statuses(whole)
        document = whole["components"]["schemas"]
        fields = document["CompletionRequest"]["properties"]
        bound = {"n": ("integer", 1, 128)} | dict.fromkeys(
            ("presence_penalty", "frequency_penalty"), ("number", -2, 2)
        )
        for name, (kind, low, high) in bound.items():
            number, null = fields[name]["anyOf"]
            assert (number["type"], number["minimum"], number["maximum"]) == (kind, low, high)
            assert null == {"type": "null"}
        limit, _ = fields["max_tokens"]["anyOf"]
        assert limit == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
        bias, _ = fields["logit_bias"]["anyOf"]
        assert bias == {
            "type": "object",
            "maxProperties": 4096,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
        one = ids | {"minItems": 1}
        many = [*prompts, {"type": "array", "items": one, "minItems": 1}]
        assert fields["prompt"]["anyOf"] == [{"type": "string"}, one, *many]
        text, parts, _ = document["ChatMessage"]["properties"]["content"]["anyOf"]
        assert (text, parts["maxItems"], parts["items"]) == (
            {"type": "string"},
            1024,
            {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        )
        assert "include_obfuscation" not in document["StreamOptions"]["properties"]

    on_gateway(main)


def test_a_wrong_method_is_told_the_right_ones_of_all_routes_of_the_path() -> None:
    async def main(app: Any, _: Any) -> None:
        for path, allowed in (
            ("/admin/policy", "GET, PUT"),
            ("/v1/completions", "POST"),
            ("/v1/models/tiny", "GET"),
        ):
            asked = await call(app, "PATCH", path)
            assert (asked.status, asked.headers["allow"]) == (405, allowed)

    on_gateway(main)


def test_a_bad_query_is_a_400_and_a_bug_in_an_admin_route_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(app: Any, gateway: Any) -> None:
        made = Call(app, "GET", "/admin/prediction", query=b"what_if=perhaps")
        await made.task
        assert (made.status, made.json()["error"]["param"]) == (400, "what_if")
        monkeypatch.setattr(gateway.limits, "state", lambda: 1 / 0)
        broken = Call(app, "GET", "/admin/policy")
        with pytest.raises(
            ZeroDivisionError
        ):  # Starlette hands it on to the server, whose log shows it
            await broken.task
        assert (broken.status, broken.json()["error"]["code"]) == (500, "internal_error")
        await asyncio.sleep(0)

    on_gateway(main)


def test_the_document_has_every_route_that_answers_and_its_fields() -> None:
    async def main(app: Any, gateway: Any) -> None:
        document = (await call(app, "GET", "/openapi.json")).json()
        newer = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings")
        assert set(newer) < set(document["paths"])
        asked = document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]
        schema = asked["application/json"]["schema"]
        assert schema["required"] == ["model", "input"]
        assert {"tools", "max_output_tokens", "patience"} < set(schema["properties"])
        assert "previous_input_messages" not in schema["properties"]
        wrong = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]
        shape = wrong["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        assert document["components"]["schemas"][shape]["required"] == ["type", "error"]
        assert "kendall_forced_output_tokens" not in schema["properties"]

    on_gateway(main)


def test_with_vllm_the_document_has_the_fields_that_vllm_reads() -> None:
    app = FastAPI()
    for model in (ChatRequest, CompletionRequest):
        app.post(f"/{model.__name__}", openapi_extra=openapi.body(model))(lambda: None)
    openapi.document(app, BEYOND)
    bodies = app.openapi()["components"]["schemas"]
    assert {"tools", "tool_choice", "echo"} < set(bodies["ChatRequest"]["properties"])
    assert "suffix" in bodies["CompletionRequest"]["properties"]


def test_a_document_without_a_body_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openapi, "_BODIES", [])
    app = FastAPI()
    openapi.document(app, {})
    assert app.openapi()["paths"] == {}
