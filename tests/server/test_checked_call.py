"""The steps from a call to its requests, each at its bounds, without a queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines import base
from kendall.server.engines.base import (
    BusyError,
    Capabilities,
    EngineRequest,
    InvalidPromptError,
    InvalidSamplingError,
    OverBudgetError,
    PromptTooLongError,
    Sampling,
    Structured,
    UnsupportedError,
)
from kendall.server.http.api.checked_call import (
    Arrival,
    check_size,
    completion_tokens,
    conversation,
    is_retry,
    prompts_of,
    refused_prompt,
    requests_of,
    room_of,
    sampling_of,
    with_sampling_checked,
)
from kendall.server.http.api.schema import ChatMessage, ChatRequest, CompletionRequest
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings

TEXT = {"type": "text", "text": "x"}
CONTEXT = 100
ARRIVAL = Arrival("cmpl-1", "mine", 5.0, 4.5, True, "key", "flow", 64, ())


class Reader:
    """Reads a token a letter, and says of sampling what it was told to say."""

    def __init__(self, says: object = None) -> None:
        self.says = says

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    async def check_sampling(self, sampling: Sampling) -> Any:
        assert base.CALLER.get() == "key", "its budget is the caller's"
        if isinstance(self.says, Exception):
            raise self.says
        return self.says or sampling


def capabilities(**fields: Any) -> Capabilities:
    given: dict[str, Any] = {"engine": "x", "model": "tiny", "max_model_len": CONTEXT}
    given |= {"max_num_seqs": 4, "max_num_batched_tokens": 80, "kv_cache_tokens": 1000}
    return Capabilities(**given, eos_token_ids=frozenset(), vocab_size=200, **fields)


def gateway(most: int | None = None, says: object = None, **fields: Any) -> Any:
    """As far as these steps ask for it; its clock shows 7 s."""
    return SimpleNamespace(
        batcher=SimpleNamespace(capabilities=capabilities(**fields)),
        tokenizer=Reader(says),
        limits=SimpleNamespace(max_output_tokens=most),
        settings=Settings(model="tiny", served_model_name="tiny"),
        now=lambda: 7.0,
    )


def completions(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "abc"} | fields)


def chat(*contents: Any, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents or ("abc",)]
    return ChatRequest.model_validate({"model": "tiny", "messages": messages} | fields)


def refusal(steps: Coroutine[Any, Any, Any]) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as refused:
        asyncio.run(steps)
    return refused.value.status, refused.value.code, refused.value.param


def turns(steps: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """How often it lets others have their turn, and its result."""
    given = 0
    while True:
        try:
            steps.send(None)
        except StopIteration as end:
            return given, end.value
        given += 1


@pytest.mark.parametrize(
    ("call", "sequences"),
    [
        (completions(), 1),
        (completions(n=5), 5),
        (completions(prompt=["a", "b", "c"], n=2), 6),
        (completions(prompt=[[1], [2]], n=128), 256),
        (completions(prompt=[1, 2, 3]), 1),
        (completions(prompt=[], n=3), 3),
        (chat("a", "b", n=4), 4),
        (completions(bad_words=["x" * 4096], n=16), 16),
    ],
)
def test_a_call_has_a_sequence_for_each_prompt_and_choice(call: Any, sequences: int) -> None:
    assert check_size(OverloadSettings(), call) == sequences


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (completions(prompt=["a", "b", "c"], n=2), "prompt"),
        (completions(prompt=["a", "b"], n=3), "n"),
        (completions(prompt=["a", "b", "c"], n=3), "n"),
        (chat(n=6), "n"),
    ],
)
def test_of_a_call_with_too_many_sequences_the_larger_factor_is_named(
    call: Any, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        check_size(OverloadSettings(max_sequences_per_call=5), call)
    assert refused.value.param == param


def test_bad_words_are_bounded_over_all_sequences() -> None:
    with pytest.raises(ApiError) as refused:
        check_size(OverloadSettings(), completions(bad_words=["x" * 4095, "y"], n=17))
    assert refused.value.message == (
        "got bad_words for 17 sequences; expected at most 65536 characters over all of them"
    )
    words = completions(prompt=["a", "b"], bad_words=["x" * 4095, "y"], n=8)
    assert check_size(OverloadSettings(), words) == 16


@pytest.mark.parametrize(
    ("headers", "retry"),
    [
        ([], False),
        ([(b"x-stainless-retry-count", b"0")], False),
        ([(b"x-other", b"1"), (b"x-stainless-retry-count", b"1")], True),
        ([(b"x-other", b"1")], False),
    ],
)
def test_a_client_says_that_it_asks_again(
    headers: list[tuple[bytes, bytes]], *, retry: bool
) -> None:
    assert is_retry(headers) is retry


# prompts


def test_a_text_is_read_and_token_ids_are_taken_within_the_vocabulary() -> None:
    def read(*prompts: Any) -> Any:
        return completion_tokens(Reader(), prompts, 100)

    assert asyncio.run(read("ab", [0, 99])) == [[97, 98], [0, 99]]
    assert len(asyncio.run(read(*["a"] * 1024))) == 1024
    for wrong in (["a"] * 1025, [], [""], ["a", []], [[0, 100]], [[-1, 5]]):
        assert refusal(read(*wrong)) == (400, "invalid_prompt", "prompt")
    with pytest.raises(ApiError, match="expected 0 to 99"):
        asyncio.run(read([100]))


def test_others_have_their_turn_between_long_texts() -> None:
    """After more than 65,536 characters; token ids cost nothing."""

    def read(*sizes: int) -> int:
        return turns(completion_tokens(Reader(), ["a" * size for size in sizes], 100))[0]

    assert [read(65_536), read(65_537), read(65_536, 1)] == [0, 1, 1]
    assert [read(65_536, 1, 65_536), read(65_536, 1, 65_536, 1)] == [1, 2]
    assert turns(completion_tokens(Reader(), [[5] * 70_000, "a" * 65_536], 100))[0] == 0


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (completions(prompt="abcdef"), "abcdef"),
        (completions(prompt="abcdef", truncate_prompt_tokens=2), "ef"),
        (completions(prompt="abcdef", truncate_prompt_tokens=2, truncation_side="left"), "ef"),
        (completions(prompt="abcdef", truncate_prompt_tokens=1, truncation_side="right"), "a"),
        (completions(prompt="abcdef", truncate_prompt_tokens=9), "abcdef"),
        (completions(prompt="a" * 90 + "b" * 90, truncate_prompt_tokens=-1), "b" * 84),
        (
            completions(prompt="a" * 90 + "b" * 90, truncate_prompt_tokens=-1, max_tokens=99),
            "b",
        ),
        (chat("a" * 90, "b" * 90, truncate_prompt_tokens=-1), "a" * 9 + "b" * 90),
        (chat("a" * 90, "b" * 90, truncate_prompt_tokens=-1, max_tokens=60), "b" * 40),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens_or_what_the_context_leaves(
    call: Any, kept: str
) -> None:
    (prompt,) = asyncio.run(prompts_of(Reader(), capabilities(), call))
    assert "".join(map(chr, prompt)) == kept


def test_a_prompt_of_which_nothing_would_be_left_is_refused() -> None:
    for fields in (
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -1, "max_tokens": 100},
    ):
        steps = prompts_of(Reader(), capabilities(), completions(**fields))
        assert refusal(steps) == (400, "invalid_prompt", "prompt")


def test_a_prompt_that_the_engine_refuses_is_the_clients_fault() -> None:
    for error, code in (
        (InvalidPromptError("odd"), "invalid_prompt"),
        (PromptTooLongError("long"), "context_length_exceeded"),
    ):
        made = refused_prompt(error, "messages")
        assert (made.status, made.code, made.message, made.param) == (
            400,
            code,
            str(error),
            "messages",
        )


def test_a_conversation_is_texts_and_what_templates_read() -> None:
    parts = [TEXT | {"cache_control": {}, "prompt_cache_breakpoint": 1}, TEXT]
    given = [{"role": "user", "content": parts}, {"role": "tool", "content": None, "name": "f"}]
    made = conversation([ChatMessage.model_validate(message) for message in given])
    assert made == [given[0], {"role": "tool", "name": "f"}]
    many = ChatMessage(role="user", content=[TEXT] * 1024)
    assert len(conversation([many] * 8)) == 8
    with pytest.raises(ApiError, match="got messages of 8193 parts; expected at most 8192 in all"):
        conversation([many] * 8 + [ChatMessage(role="user", content=[TEXT])])


@pytest.mark.parametrize(
    ("part", "status", "code", "says"),
    [
        ({"type": "image_url"}, 501, "unsupported", "only parts of type text are supported"),
        ({"type": "refusal"}, 501, "unsupported", "only parts of type text are supported"),
        ({"type": "odd", "text": "x"}, 400, "invalid_request", "expected type text and a text"),
        ({"text": "x"}, 400, "invalid_request", "expected type text and a text"),
        ({"type": "text", "text": 5}, 400, "invalid_request", "expected type text and a text"),
        (TEXT | {"b": 1, "a": 1}, 400, "unknown_field", "got 'a'; expected type and text alone"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_place(
    part: dict[str, Any], status: int, code: str, says: str
) -> None:
    messages = [
        ChatMessage(role="user", content="x"),
        ChatMessage(role="user", content=[TEXT, TEXT, part]),
    ]
    with pytest.raises(ApiError) as refused:
        conversation(messages)
    found = refused.value
    where = "messages[1].content[2]"
    assert (found.status, found.code, found.param) == (status, code, where)
    assert found.message == f"{where}: {says}"


# token limits


@pytest.mark.parametrize(
    ("bounds", "longest", "room"),
    [
        ({}, 80, 20),  # of one step
        ({"chunked_prefill": True}, 99, 1),  # leaves room for a token
    ],
)
def test_a_prompt_leaves_room_for_its_answer(
    bounds: dict[str, Any], longest: int, room: int
) -> None:
    of = capabilities(**bounds)
    assert room_of(gateway(), of, longest) == room
    assert room_of(gateway(), of, 1) == 99
    with pytest.raises(ApiError) as refused:
        room_of(gateway(), of, longest + 1)
    assert refused.value.message == (
        f"got a prompt of {longest + 1} tokens; expected at most {longest}: shorten it"
    )


@pytest.mark.parametrize(
    ("call", "most", "limits", "asked"),
    [
        (completions(), None, [16], [16]),
        (completions(), 16, [16], [16]),
        (completions(), 15, [15], [16]),
        (completions(max_tokens=97), None, [97], [97]),
        (chat(), None, [97], [97]),
        (chat(), 40, [40], [97]),
        (chat(max_tokens=3, n=2), 40, [3, 3], [3, 3]),
        (completions(prompt=["a", "bcd"], n=2), 9, [9] * 4, [16] * 4),
    ],
)
def test_a_request_has_the_lesser_of_its_own_limit_and_the_gateways(
    call: Any, most: int | None, limits: list[int], asked: list[int]
) -> None:
    made = asyncio.run(requests_of(gateway(most), call, ARRIVAL, None))
    assert [each.request.max_output_tokens for each in made] == limits
    assert [each.sampling.max_tokens for each in made] == limits
    assert [each.asked_output_tokens for each in made] == asked
    assert [each.request.id for each in made] == [f"cmpl-1-{place}" for place in range(len(made))]


def test_a_limit_beyond_the_context_is_refused() -> None:
    steps = requests_of(gateway(5), completions(max_tokens=98), ARRIVAL, None)
    assert refusal(steps) == (400, "context_length_exceeded", "max_tokens")


@pytest.mark.parametrize(("patience", "deadline"), [(None, math.inf), (2.5, 7.5)])
def test_a_request_has_all_that_its_call_says(patience: float | None, deadline: float) -> None:
    call = completions(
        seed=7,
        n=2,
        priority=3,
        predicted_output_tokens=9.5,
        cache_salt="salt",
        kendall_forced_output_tokens=4,
    )
    made = asyncio.run(requests_of(gateway(), call, ARRIVAL, patience))
    assert [each.sampling.seed for each in made] == [7, 8]
    for each in made:
        request = each.request
        assert (request.arrived_at, request.deadline, request.flow) == (5.0, deadline, "flow")
        assert (request.prompt_tokens, request.priority, request.reserved_tokens) == (3, 3, 64)
        assert (request.predicted_output_tokens, request.sequences) == (9.5, 1)
        assert (each.prompt_token_ids, each.output_token_ids) == ([97, 98, 99], ())
        assert (each.forced_output_tokens, each.cache_salt, each.caller) == (4, "salt", "key")
        assert (each.client_request_id, each.received_at, each.retry) == ("mine", 4.5, True)
        assert (each.call, each.rendered, each.engine_arguments, each.trace) == (None,) * 4


# sampling


def test_what_a_call_leaves_open_is_the_models_own_and_then_the_engines() -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    made = sampling_of(completions(temperature=0.0, top_k=0), 8, own)
    assert made == Sampling(max_tokens=8, temperature=0.0, top_k=0, top_p=0.9)
    assert sampling_of(chat(), 8, {}) == Sampling(max_tokens=8)


CHECKED = completions(stop_token_ids=[5], n=2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnsupportedError("no", "logit_bias"), (501, "unsupported", "logit_bias")),
        (InvalidSamplingError("no", "seed"), (400, "invalid_request", "seed")),
        (InvalidSamplingError("no"), (400, "invalid_request", "guided_regex")),
        (BusyError("busy"), (503, "engine_unavailable", None)),
        (OverBudgetError("over", 2.5), (429, "form_budget_exceeded", None)),
    ],
)
def test_an_engine_that_refuses_sampling_says_why(error: Exception, expected: Any) -> None:
    call = completions(guided_regex="a")
    with pytest.raises(ApiError) as refused:
        asyncio.run(requests_of(gateway(says=error), call, ARRIVAL, None))
    found = refused.value
    assert (found.status, found.code, found.param) == expected
    assert found.message == str(error)
    assert found.retry_after == (2.5 if found.status == 429 else None)


@pytest.mark.parametrize(("patience", "deadline"), [(None, math.inf), (2.5, 9.5)])
def test_requests_arrive_when_their_form_is_compiled(
    patience: float | None, deadline: float
) -> None:
    form = Structured("regex", "a", prepared=object())
    of = gateway(says=Sampling(max_tokens=1, structured=form))
    call = completions(guided_regex="a", n=2, seed=3)
    made = asyncio.run(requests_of(of, call, ARRIVAL, patience))
    assert [each.sampling.structured for each in made] == [form, form]
    assert [(each.sampling.seed, each.sampling.max_tokens) for each in made] == [(3, 16), (4, 16)]
    assert {(each.request.arrived_at, each.request.deadline) for each in made} == {(7.0, deadline)}


def test_requests_that_need_no_form_keep_their_arrival() -> None:
    for call in (CHECKED, completions(n=2)):
        of = gateway(says=None if call is CHECKED else BusyError("it is not asked"))
        made = asyncio.run(requests_of(of, call, ARRIVAL, 2.5))
        assert {each.request.arrived_at for each in made} == {5.0}
        assert {each.request.deadline for each in made} == {7.5}
    requests = cast("list[EngineRequest]", made)
    again = with_sampling_checked(of, requests, call, ARRIVAL, 2.5)
    assert asyncio.run(again) is requests
