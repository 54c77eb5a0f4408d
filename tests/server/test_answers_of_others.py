"""What is read of an answer that passes: tokens, end, usage, whatever the pieces it comes in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.server.engines.http.answers import UpstreamAnswer
from kendall.server.engines.proxied import Answered


def sse(*events: Any) -> bytes:
    """Events as a server writes them."""
    return b"".join(
        b"data: %b\n\n" % (event.encode() if isinstance(event, str) else json.dumps(event).encode())
        for event in events
    )


def chat(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text(words: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
CHAT = [chat(role="assistant", content=""), chat(content="a"), chat(content="b"), chat("stop")]


def read(*events: Any) -> UpstreamAnswer:
    answer = UpstreamAnswer()
    assert answer.feed(sse(*events, "[DONE]")) == answer.tokens
    return answer


@pytest.mark.parametrize(
    ("events", "tokens", "reason"),
    [
        (CHAT, 3, "stop"),
        ([chat(role="assistant", content="a"), chat("length", content="b")], 2, "length"),
        ([chat(role="assistant"), chat(content="a"), chat("length")], 1, "length"),
        ([chat(reasoning="x"), chat(reasoning_content="y"), chat(refusal="z")], 3, "stop"),
        ([chat(tool_calls=[{"index": 0}]), chat("tool_calls")], 2, "tool_calls"),
        ([chat(role="assistant", tool_calls=[{"index": 0}])], 1, "stop"),
        ([chat(role="assistant", tool_calls=[])], 0, "stop"),
        ([text("a"), text(""), text("b", "length")], 3, "length"),
        ([text("a"), text("", "length")], 1, "length"),
        ([text("a"), text("", "stop")], 2, "stop"),
        ([text("a") | {"choices": [{"text": "a"}, {"index": 1, "text": "b"}]}], 2, "stop"),
        ([{"choices": []}], 0, "stop"),
        ([text("a", "content_filter")], 1, "content_filter"),
    ],
)
def test_a_frame_is_a_token_of_each_choice(events: list[Any], tokens: int, reason: str) -> None:
    """But the opening frame of a chat, and a last one that only says `length`."""
    answer = read(*events)
    assert answer.tokens == tokens
    assert answer.end == Answered(reason, None, None)
    assert not answer.has_usage


def test_one_choice_that_was_cut_says_more_than_those_that_ended() -> None:
    for finishes in (("length", "stop"), ("stop", "length")):
        assert read(*[text("a", finish) for finish in finishes]).end.finish_reason == "length"
        together = {"choices": [{"text": "a", "finish_reason": finish} for finish in finishes]}
        assert read(together).end.finish_reason == "length"


def test_usage_replaces_what_was_counted() -> None:
    answer = read(*CHAT, {"choices": [], "usage": USAGE})
    assert answer.tokens == 3
    assert answer.has_usage
    assert answer.end == Answered("stop", 9, 5)


def test_prompt_tokens_that_the_server_had_computed_before_are_read_too() -> None:
    known = {"prompt_tokens_details": {"cached_tokens": 4}}
    assert read({"choices": [], "usage": USAGE | known}).end.cached_tokens == 4
    responses = {"input_tokens": 9, "output_tokens": 1, "input_tokens_details": known}
    responses["input_tokens_details"] = known["prompt_tokens_details"]
    assert read({"response": {"usage": responses}}).end.cached_tokens == 4
    for details in (None, {}, {"cached_tokens": None}, {"audio_tokens": 3}):
        usage = USAGE | {"prompt_tokens_details": details}
        assert read({"choices": [], "usage": usage}).end.cached_tokens == 0
    more = USAGE | {"prompt_tokens_details": {"cached_tokens": 10_000}}
    assert read({"choices": [], "usage": more}).end.cached_tokens == USAGE["prompt_tokens"]


def test_usage_in_every_frame_counts_once() -> None:
    frames = [
        text("a") | {"usage": {"prompt_tokens": 5, "completion_tokens": made}} for made in (1, 2)
    ]
    assert read(*frames).end == Answered("stop", 2, 5)


RESPONSES = [
    {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.reasoning_text.delta", "delta": "b"},
    {"type": "response.function_call_arguments.delta", "delta": "{"},
    {"type": "response.output_text.done", "text": "a"},
]


@pytest.mark.parametrize(
    ("last", "end", "error"),
    [
        (
            {"status": "completed", "usage": {"input_tokens": 4, "output_tokens": 6}},
            Answered("stop", 6, 4),
            False,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            Answered("length", None, None),
            False,
        ),
        ({"status": "failed"}, Answered("stop", None, None), True),
    ],
)
def test_responses(last: dict[str, Any], end: Answered, error: bool) -> None:
    """Streamed, and the whole object by itself."""
    answer = read(*RESPONSES, {"type": "response.completed", "response": last})
    assert (answer.tokens, answer.end, answer.error) == (3, end, error)
    whole = UpstreamAnswer()
    whole.whole(json.dumps({"id": "r", "object": "response", "error": None} | last).encode())
    assert (whole.end, whole.error) == (end, error)


def test_messages() -> None:
    answer = read(
        {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    )
    assert answer.tokens == 2
    assert answer.end == Answered("length", 5, 7)
    whole = UpstreamAnswer()
    whole.whole(b'{"stop_reason": "end_turn", "usage": {"input_tokens": 7, "output_tokens": 2}}')
    assert whole.end == Answered("end_turn", 2, 7)


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (text("abc", "length") | {"usage": USAGE}, Answered("length", 9, 5)),
        ({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}, Answered("stop", 0, 8)),
        (text("abc"), Answered("stop", None, None)),
        (["no object"], Answered("stop", None, None)),
        ("no JSON", Answered("stop", None, None)),
    ],
)
def test_a_whole_answer(body: Any, end: Answered) -> None:
    answer = UpstreamAnswer()
    answer.whole(body.encode() if isinstance(body, str) else json.dumps(body).encode())
    assert answer.end == end
    assert answer.has_usage == (end.output_tokens is not None)


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\r", sse(text("a", "stop"))[:-2]])
def test_the_last_line_of_a_stream_may_have_no_end(last: bytes) -> None:
    answer = UpstreamAnswer()
    answer.feed(sse(text("a")) + last)
    assert not answer.ended
    answer.close()
    assert answer.ended


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"error": {"message": "no"}}, True),
        ({"type": "error", "message": "no"}, True),
        ({"error": None}, False),
    ],
)
def test_an_error_in_the_stream_is_one(event: dict[str, Any], error: bool) -> None:
    assert read(text("a"), event, text("b")).error == error


@given(st.lists(st.integers(0, 600), max_size=8))
def test_the_pieces_of_the_network_change_nothing(cuts: list[int]) -> None:
    """Wherever they are cut; also with CRLF, comments and other fields between."""
    stream = (
        b": keep-alive\r\n\r\nevent: message\r\nid: 1\r\n"
        + sse(*CHAT, "not json", {"choices": [], "usage": USAGE}).replace(b"\n", b"\r\n")
        + b"data:"
        + json.dumps(chat(content="c")).encode()
        + b"\n\ndata: [DONE]\n\n"
    )
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    answer = UpstreamAnswer()
    fed = [answer.feed(stream[start:end]) for start, end in itertools.pairwise(places)]
    assert sum(fed) == answer.tokens == 4
    assert answer.end == Answered("stop", 9, 5)


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"{", b"[1,2]", b'{"choices": 5}', b'{"usage": 1}'])
def test_what_cannot_be_read_counts_nothing(bad: bytes) -> None:
    answer = UpstreamAnswer()
    assert answer.feed(b"data: " + bad + b"\n\n" + sse(text("a"))) == 1
    answer.whole(bad)
    assert answer.end == Answered("stop", None, None)
