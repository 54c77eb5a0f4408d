"""The JSON of answers, piece by piece, as OpenAI's clients and vLLM's read it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kendall.server.engines.base import Token, TokenLogprob
from kendall.server.http.formats import (
    DONE,
    ChatFormat,
    CompletionFormat,
    chat_logprobs,
    completion_logprobs,
    encode,
    usage_of,
    with_usage,
)
from kendall.server.queue.sequence import SequenceState

IDENTITY = {"id": "call", "created": 5, "model": "tiny"}
BEST, SECOND = TokenLogprob("é", -0.5, 1), TokenLogprob("ab", -2.0, 2)
TOKENS = [  # the one that was drawn is the second best, and the best one
    Token(7, "ab", logprobs={7: TokenLogprob("ab", -1.0, 2), 8: BEST}),
    Token(
        8, "é", logprobs={8: BEST, 9: TokenLogprob("x", -3.0, 2), 7: TokenLogprob("ab", -2.0, 3)}
    ),
]
CHAT_ITEMS = {
    "ab": {"token": "ab", "logprob": -1.0, "bytes": [97, 98]},
    "é": {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
}
PLAIN = [Token(7, "ab"), Token(8, "é")]
COMPLETION = {
    "text_offset": [4, 6],
    "token_logprobs": [-1.0, -0.5],
    "tokens": ["ab", "é"],
    "top_logprobs": [{"é": -0.5, "ab": -1.0}, {"é": -0.5, "ab": -2.0, "x": -3.0}],
}
CHAT = {
    "content": [
        CHAT_ITEMS["ab"] | {"top_logprobs": [CHAT_ITEMS["é"]]},
        CHAT_ITEMS["é"] | {"top_logprobs": [CHAT_ITEMS["é"]]},
    ]
}


def form(kind: type[Any], top: int | None = None, *, token_ids: bool = False) -> Any:
    return kind("call", 5, "tiny", top, token_ids=token_ids)


def choice(chunk: bytes, kind: str) -> Any:
    """The one choice of an event, which is of this kind and nothing else."""
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"}\n\n")
    event = json.loads(chunk[6:])
    (found,) = event.pop("choices")
    assert event == IDENTITY | {"object": kind}
    return found


def test_candidates_are_in_the_order_of_their_probability() -> None:
    made = completion_logprobs(TOKENS, 4)
    assert made == COMPLETION
    assert [list(each) for each in made["top_logprobs"]] == [["é", "ab"], ["é", "ab", "x"]]
    assert chat_logprobs(TOKENS, 1) == CHAT
    both = chat_logprobs(TOKENS, 2)
    assert both is not None
    tops = [[item["token"] for item in each["top_logprobs"]] for each in both["content"]]
    assert tops == [["é", "ab"], ["é", "ab"]]
    for none in ([], PLAIN):
        assert completion_logprobs(none, 0) is chat_logprobs(none, 1) is None
    assert form(CompletionFormat, 1).logprobs(TOKENS, 4) == COMPLETION
    assert form(ChatFormat, 1).logprobs(TOKENS, 4) == CHAT
    assert form(ChatFormat).logprobs(TOKENS, 4) is None


@pytest.mark.parametrize(
    ("top", "token_ids", "tokens", "more"),
    [
        (None, False, PLAIN, {"logprobs": None}),
        (None, True, PLAIN, {"logprobs": None, "token_ids": [7, 8]}),
        (1, False, TOKENS, {"logprobs": True}),
        (1, True, TOKENS, {"logprobs": True, "token_ids": [7, 8]}),
    ],
)
def test_a_chunk_has_its_text_and_what_was_asked_for(
    top: int | None, token_ids: bool, tokens: list[Token], more: dict[str, Any]
) -> None:
    for kind, name in (
        (CompletionFormat, "text_completion"),
        (ChatFormat, "chat.completion.chunk"),
    ):
        of = form(kind, top, token_ids=token_ids)
        assert of.every_token is (top is not None or token_ids)
        logprobs = (COMPLETION if kind is CompletionFormat else CHAT) if more["logprobs"] else None
        own = {"text": 'a"b'} if kind is CompletionFormat else {"delta": {"content": 'a"b'}}
        end: dict[str, Any] = {"finish_reason": None}
        if kind is CompletionFormat:
            end["stop_reason"] = None
        for index in (2, 2, 0):  # the second one of a choice is made from the first one
            made = choice(of.text(index, 'a"b', tokens, 4), name)
            assert made == {"index": index} | own | end | more | {"logprobs": logprobs}


def test_what_opens_and_ends_a_choice() -> None:
    older, chat = form(CompletionFormat), form(ChatFormat)
    assert older.first(1, None) == b""
    assert choice(older.first(1, [5, 6]), "text_completion") == {
        "index": 1,
        "text": "",
        "logprobs": None,
        "finish_reason": None,
        "prompt_token_ids": [5, 6],
    }
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert choice(chat.first(1, None), "chat.completion.chunk") == {"index": 1} | role
    assert choice(chat.first(2, (5, 6)), "chat.completion.chunk") == (
        {"index": 2, "prompt_token_ids": [5, 6]} | role
    )
    end = {"index": 3, "logprobs": None, "finish_reason": "stop", "stop_reason": 9}
    assert choice(older.finish(3, "stop", 9), "text_completion") == end | {"text": ""}
    assert choice(chat.finish(3, "stop", 9), "chat.completion.chunk") == end | {"delta": {}}
    assert choice(chat.finish(0, "stop", "x"), "chat.completion.chunk")["stop_reason"] == "x"


def test_a_whole_answer_has_its_choices_and_its_usage() -> None:
    older, chat = form(CompletionFormat), form(ChatFormat)
    common = {"index": 1, "logprobs": {"a": 1}, "finish_reason": "length", "stop_reason": None}
    raw = msgspec.Raw(b'{"a":1}')
    made = older.choice(1, "t", raw, "length", None)
    assert json.loads(encode(made)) == common | {"text": "t"}
    said = {"role": "assistant", "content": "t", "refusal": None}
    talk = chat.choice(1, "t", raw, "length", None)
    assert json.loads(encode(talk)) == common | {"message": said}
    assert older.with_ids(made, PLAIN, None) is made
    ids = {"token_ids": [7, 8], "prompt_token_ids": [5]}
    assert older.with_ids({"index": 1}, PLAIN, (5,)) == {"index": 1} | ids
    for of, kind in ((older, "text_completion"), (chat, "chat.completion")):
        whole = json.loads(of.whole([b'{"index":0}', b'{"index":1}'], {"total_tokens": 3}))
        assert whole == IDENTITY | {
            "object": kind,
            "choices": [{"index": 0}, {"index": 1}],
            "usage": {"total_tokens": 3},
        }
    last = json.loads(chat.usage({"total_tokens": 3})[6:])
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})
    assert DONE == b"data: [DONE]\n\n"


def test_usage_counts_each_prompt_once_and_stands_at_the_end_of_a_chunk() -> None:
    def sequence(prompt: int, output: int) -> SequenceState:
        request = SimpleNamespace(prompt_tokens=prompt)
        return cast(
            "SequenceState",
            SimpleNamespace(
                engine_request=SimpleNamespace(request=request),
                stop_detector=SimpleNamespace(output_tokens=output),
                batch_size=6,
            ),
        )

    two = [sequence(10, 1), sequence(10, 2), sequence(300, 4), sequence(300, 8)]
    usage = usage_of(two, 2, (1.5, 2.5))
    assert usage == {
        "prompt_tokens": 310,
        "completion_tokens": 15,
        "total_tokens": 325,
        "kendall": {"queueing_delay_ms": 1.5, "service_ms": 2.5, "batch_size": 6},
    }
    chunk = form(ChatFormat).finish(0, "stop", None)
    assert json.loads(with_usage(chunk, usage)[6:]) == json.loads(chunk[6:]) | {"usage": usage}
    assert with_usage(chunk, usage).endswith(b"}\n\n")
