"""Tools and the newer endpoints on the real engine, through the official clients. The tiny model
is random: a grammar forces its tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kendall.server.engines.tiny import EOS
from tests.server.openai_tools.tooled import (
    CITIES,
    COMPACT,
    DAYS,
    END,
    PARAMETERS,
    USER,
    WEATHER,
    Served,
    serving,
)

pytestmark = [pytest.mark.engine, pytest.mark.left_out, pytest.mark.timeout(900)]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("front"), "--policy", "continuous:max_batch_size=4") as it:
        yield it


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "max_tokens": 200,
        "tools": [WEATHER],
        "seed": 1,
    }
    return client.chat.completions.create(**(arguments | fields))


def check_arguments(text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(text)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in CITIES
    assert arguments["days"] in DAYS
    return arguments


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_call_goes_round(served: Served, choice: Any) -> None:
    """Called, answered, and the conversation goes on."""
    with served.openai() as client:
        asked = chat(client, tool_choice=choice, logit_bias=END)
        (called,) = asked.choices[0].message.tool_calls
        assert called.function.name == "weather"
        check_arguments(called.function.arguments)
        assert asked.choices[0].finish_reason == ("stop" if choice is NAMED else "tool_calls")
        history = [
            *USER,
            asked.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": called.id, "content": "sunny"},
        ]
        for tools in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
            answered = chat(client, messages=history, max_tokens=5, **tools)
            assert answered.usage.completion_tokens == 5
            assert not answered.choices[0].message.tool_calls


def test_the_model_may_call_a_tool_or_not(served: Served) -> None:
    with served.openai() as client:
        asked = chat(client, max_tokens=6, tool_choice="auto")
        assert asked.choices[0].finish_reason == "length"
        assert asked.choices[0].message.content
        assert asked.choices[0].message.tool_calls is None


def test_tool_calls_are_parallel_unless_one_is_wanted(served: Served) -> None:
    with served.openai() as client:
        for seed in range(1, 40):
            asked = chat(
                client, tool_choice="required", seed=seed, max_tokens=400, logit_bias=COMPACT
            )
            calls = asked.choices[0].message.tool_calls or []
            if asked.choices[0].finish_reason == "tool_calls" and len(calls) > 1:
                break
        assert len(calls) > 1
        assert len({each.id for each in calls}) == len(calls)
        for each in calls:
            check_arguments(each.function.arguments)
        one = chat(
            client,
            tool_choice="required",
            seed=seed,
            max_tokens=400,
            logit_bias=COMPACT,
            parallel_tool_calls=False,
        )
        assert len(one.choices[0].message.tool_calls) == 1


def test_a_streamed_tool_call_is_the_whole_one(served: Served) -> None:
    with served.openai() as client:
        whole = chat(client, tool_choice="required", logit_bias=END)
        text, name, reasons = "", "", []
        for chunk in chat(
            client,
            tool_choice="required",
            logit_bias=END,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if not chunk.choices:
                assert chunk.usage.completion_tokens == whole.usage.completion_tokens
                continue
            reasons.append(chunk.choices[0].finish_reason)
            for part in chunk.choices[0].delta.tool_calls or []:
                text += part.function.arguments or ""
                name += part.function.name or ""
        assert name == "weather"
        called = whole.choices[0].message.tool_calls[0].function.arguments
        assert check_arguments(text) == check_arguments(called)
        assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_each_choice_calls_its_tool_and_is_a_sequence(served: Served) -> None:
    with served.openai() as client:
        asked = chat(client, tool_choice="required", logit_bias=END, n=3)
        for choice in asked.choices:
            check_arguments(choice.message.tool_calls[0].function.arguments)
    ids = {f"{asked.id}-{place}" for place in range(3)}
    found = [record for record in served.records() if record.request_id in ids]
    assert [record.outcome for record in found] == ["completed"] * 3
    assert sum(record.output_tokens for record in found) == asked.usage.completion_tokens


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["fixed:batch_size=1", "capped:max_batch_size=4", "single"])
def test_a_tool_call_is_the_same_under_every_policy(served: Served, policy: str) -> None:
    """Padded, an answer under a grammar ends where it ends alone."""
    with served.openai() as client:
        alone = chat(client, tool_choice="required", logit_bias=END, temperature=0)
        served.ask("PUT", "/admin/policy", {"policy": policy})
        try:
            other = chat(client, tool_choice="required", logit_bias=END, temperature=0)
        finally:
            served.ask("PUT", "/admin/policy", {"policy": "continuous:max_batch_size=4"})
    assert (
        other.choices[0].message.tool_calls[0].function
        == alone.choices[0].message.tool_calls[0].function
    )


def test_trap_3_the_arguments_of_a_tool_that_is_not_strict_keep_its_schema(served: Served) -> None:
    loose = {"type": "function", "function": {**WEATHER["function"], "strict": False}}
    with served.openai() as client:
        for seed in range(3):
            asked = chat(
                client, tools=[loose], tool_choice="required", logit_bias=END, seed=seed, n=2
            )
            for choice in asked.choices:
                check_arguments(choice.message.tool_calls[0].function.arguments)


def test_trap_6_what_vllm_refuses_is_400_and_names_the_field(served: Served) -> None:
    unknown = {"type": "function", "function": {"name": "other"}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="does not match any"):
            chat(client, tool_choice=unknown)
        wrong = {"name": "x", "parameters": {"type": "nonsense"}}
        with pytest.raises(openai.BadRequestError):
            chat(client, tool_choice="required", tools=[{"type": "function", "function": wrong}])
        with pytest.raises(openai.BadRequestError, match=r"^.*tools.*$"):
            chat(client, tools=[{"type": "function"}])
        with pytest.raises(openai.BadRequestError, match="context"):
            chat(client, messages=[{"role": "user", "content": "word " * 3000}])
        shortened = chat(client, max_tokens=2000, logit_bias={str(EOS): 100.0})
        assert shortened.usage.completion_tokens < 2048, "as vLLM has it: what the context leaves"
        with pytest.raises(openai.InternalServerError, match="only parts of type text") as caught:
            chat(client, messages=image)
        assert caught.value.status_code == 501
        with pytest.raises(openai.BadRequestError, match="suffix is only supported"):
            client.completions.create(model="tiny", prompt="x", suffix="y")


def test_trap_7_a_tool_call_that_is_cut_is_text_and_no_traceback(served: Served) -> None:
    with served.openai() as client:
        cut = chat(client, tool_choice="required", max_tokens=12)
    assert cut.choices[0].finish_reason == "length"
    assert "<tool_call>" in cut.choices[0].message.content
    assert "Traceback" not in served.log


def test_trap_10_an_echo_without_an_answer_is_one_token_of_work(served: Served) -> None:
    with served.openai() as client:
        echoed = client.completions.create(
            model="tiny", prompt="hello there", max_tokens=0, echo=True, logprobs=1
        )
        assert echoed.choices[0].text == "hello there"
        logprobs = echoed.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert all(each is not None and each < 0 for each in logprobs.token_logprobs[1:])
        record = next(each for each in served.records() if each.request_id == f"{echoed.id}-0")
        assert (record.output_tokens, record.max_output_tokens, record.clipped) == (1, 1, False)
        with_answer = client.completions.create(
            model="tiny", prompt=["one", "two"], max_tokens=3, echo=True, stream=True, n=2
        )
        texts = {}
        for chunk in with_answer:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert [texts[index][:3] for index in range(4)] == ["one", "one", "two", "two"]


def test_the_log_probabilities_of_a_prompt(served: Served) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "prompt_logprobs": 1}
    told = served.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert [str(token) in position for token, position in zip((6, 7), told[1:], strict=True)] == [
        True,
        True,
    ]
    assert all(entry["decoded_token"] for position in told[1:] for entry in position.values())


def test_responses_whole_and_streamed(served: Served) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "input": "hello",
        "max_output_tokens": 6,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    with served.openai() as client:
        whole = client.responses.create(**arguments)
        assert whole.id.startswith("resp_")
        assert whole.status == "incomplete"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 6
        events = list(client.responses.create(**arguments, stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert text == whole.output_text
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        called = client.responses.create(
            model="tiny",
            input="hello",
            tools=[tool],
            tool_choice="required",
            extra_body={"logit_bias": END},
        )
        (item,) = [each for each in called.output if each.type == "function_call"]
        check_arguments(item.arguments)


def test_trap_9_responses_say_what_this_gateway_does_not_keep_or_run(served: Served) -> None:
    with served.openai() as client:
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
        for fields in ({"background": True}, {"tools": [{"type": "web_search"}]}):
            with pytest.raises(openai.InternalServerError) as caught:
                client.responses.create(model="tiny", input="x", **fields)  # type: ignore[call-overload]
            assert caught.value.status_code == 501
        assert client.responses.create(model="tiny", input="x", max_output_tokens=2, store=True)


def test_messages_whole_streamed_with_a_tool_and_counted(served: Served) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": USER}
    with served.anthropic() as client:
        whole = client.messages.create(**arguments)
        assert whole.stop_reason == "max_tokens"
        assert whole.usage.output_tokens == 6
        counted = client.messages.count_tokens(model="tiny", messages=USER)
        assert counted.input_tokens == whole.usage.input_tokens
        with client.messages.stream(**arguments) as stream:
            text = "".join(stream.text_stream)
            assert text
            assert stream.get_final_message().usage.output_tokens == 6
        called = client.messages.create(
            model="tiny",
            max_tokens=2000,
            messages=USER,
            tools=[{"name": "weather", "input_schema": PARAMETERS}],  # type: ignore[typeddict-item]
            tool_choice={"type": "tool", "name": "weather"},
        )
        used = [block for block in called.content if block.type == "tool_use"]
        assert used
        check_arguments(json.dumps(used[0].input))
        with pytest.raises(anthropic.NotFoundError, match="serves 'tiny'"):
            client.messages.create(**(arguments | {"model": "other"}))
        with pytest.raises(anthropic.BadRequestError, match="nonsense"):
            client.messages.create(**arguments, extra_body={"nonsense": 1})


def test_embeddings_are_refused_by_name(served: Served) -> None:
    with served.openai() as client, pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="tiny", input="x")
    assert "but tiny generates text" in str(caught.value)


def test_every_call_has_one_outcome_and_nothing_is_left(served: Served) -> None:
    with served.openai() as client:
        chat(client, max_tokens=3)
    records = served.records()
    assert len({record.request_id for record in records}) == len(records)
    assert {record.outcome for record in records} <= {"completed"}
    assert served.ask("GET", "/admin/state")["unanswered"] == 0
    assert "Traceback" not in served.log
