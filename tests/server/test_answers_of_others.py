"""What is read of an answer that passes: tokens, end, usage, whatever the pieces it comes in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.server.engines.http.answers import UpstreamAnswer, fits
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


@pytest.mark.parametrize(
    ("line", "events", "readable"),
    [
        (b'data: {"choices": 5}', 1, True),  # JSON of another shape
        (b'data:   {"usage": {}, "choices": [7]}', 1, True),
        (b"data: [1, 2]", 0, False),
        (b"data: 5", 0, False),
        (b"data: {", 0, False),
        (b"data: \xff", 0, False),
        (b"data: [DONE]", 0, True),
        (b"", 0, True),
        (b": a comment", 0, True),
        (b"event: x", 0, True),
        (b"id: 1", 0, True),
        (b"retry: 5", 0, True),
        (b"\xef\xbb\xbfdata: {}", 0, True),
        (b"<html>", 0, False),
        (b"error", 0, False),
    ],
)
def test_a_line_is_an_event_a_field_of_none_or_no_part_of_a_stream(
    line: bytes, events: int, readable: bool
) -> None:
    answer = UpstreamAnswer()
    answer.feed(line + b"\n\n")
    assert (answer.events, answer.readable) == (events, readable)
    assert answer.ended == (line == b"data: [DONE]")


@pytest.mark.parametrize("body", [b'{"choices": 5}', b'  \n{"choices": 5}', b"{}"])
def test_a_whole_answer_of_another_shape_can_be_read_and_other_values_cannot(body: bytes) -> None:
    answer, other = UpstreamAnswer(), UpstreamAnswer()
    answer.whole(body)
    assert (answer.readable, answer.has_usage, answer.size) == (True, False, len(body))
    other.whole(b"[" + body + b"]")
    assert not other.readable


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_stop"},
        {"type": "response.completed"},
        {"type": "response.incomplete"},
        {"type": "response.failed"},
        {"stop_reason": "end_turn"},
        {"status": "completed"},
        {"choices": [{"finish_reason": "stop"}]},
    ],
)
def test_each_route_has_its_last_event(event: dict[str, Any]) -> None:
    answer = UpstreamAnswer()
    answer.feed(sse(text("a")))
    assert not answer.ended
    answer.feed(sse(event))
    assert answer.ended


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_delta"},
        {"type": "response.created"},
        {"delta": {"stop_reason": 5}},
        {"delta": "length"},
        {"status": "incomplete"},
        {"choices": [{"finish_reason": None}]},
        {"choices": [{"finish_reason": ""}]},
    ],
)
def test_other_events_are_no_end(event: dict[str, Any]) -> None:
    answer = UpstreamAnswer()
    answer.feed(sse(event))
    assert (answer.ended, answer.end) == (False, Answered("stop"))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("content_block_delta", 1),
        ("response.output_text.delta", 1),
        ("response.delta", 1),
        ("response.output_text.done", 0),
        ("other.delta", 0),
        ("content_block_start", 0),
    ],
)
def test_events_with_a_delta_are_tokens(kind: str, tokens: int) -> None:
    assert read({"type": kind}).tokens == tokens


def test_the_model_is_the_one_that_is_named_first() -> None:
    assert read(text("a") | {"model": "m"}, text("b") | {"model": "n"}).model == "m"
    assert read(text("a"), {"response": {"model": "r"}}).model == "r"
    assert read({"message": {"model": "a"}}, text("a") | {"model": "m"}).model == "a"
    assert read(text("a") | {"model": 5}, {"message": "no"}).model is None


def counted(usage: Any, size: int = 100, most: int = 20, most_prompt: int = 50) -> UpstreamAnswer:
    """Of an answer of so many bytes."""
    answer, body = UpstreamAnswer(most, most_prompt), json.dumps({"usage": usage}).encode()
    answer.whole(body + b" " * (size - len(body)))
    return answer


@pytest.mark.parametrize(
    ("given", "believed"),
    [
        (0, 0),
        (20, 20),
        (100, 100),  # more than its limit, and a byte for each
        (101, None),
        (7.0, 7),
        (7.5, None),
        (-1, None),
        (True, None),
        ("7", None),
    ],
)
def test_output_tokens_are_believed_within_the_limit_or_the_bytes(
    given: Any, believed: int | None
) -> None:
    answer = counted({"prompt_tokens": 5, "completion_tokens": given})
    assert answer.end == Answered("stop", believed, 5)
    assert answer.unbelieved == (given if believed is None else None)
    assert answer.has_usage == (believed is not None)


def test_a_count_within_the_limit_is_believed_of_fewer_bytes_but_none_beyond_every_context() -> (
    None
):
    assert counted({"completion_tokens": 200}, size=100, most=200).end.output_tokens == 200
    most = {"most": 10**9, "most_prompt": 10**9}
    usage = {"completion_tokens": 10**7, "prompt_tokens": 10**7}
    assert counted(usage, **most).end == Answered("stop", 10**7, 10**7)
    beyond = {name: count + 1 for name, count in usage.items()}
    assert counted(beyond, **most).end == Answered("stop")


def test_prompt_tokens_are_believed_within_the_limit() -> None:
    assert counted({"prompt_tokens": 50}).end == Answered("stop", 0, 50)
    assert counted({"prompt_tokens": 51}).end == Answered("stop")
    both = {"input_tokens": 4, "prompt_tokens": 5, "output_tokens": 6, "completion_tokens": 7}
    assert counted(both).end == Answered("stop", 7, 5), "the last name counts"
    assert counted([1]).end == Answered("stop")


def test_the_largest_count_of_cached_tokens_holds_up_to_the_prompt() -> None:
    def event(cached: Any, prompt: int = 9) -> dict[str, Any]:
        details = {"cached_tokens": cached}
        return {"usage": {"prompt_tokens": prompt, "input_tokens_details": details}}

    assert read(event(4), event(2)).end.cached_tokens == 4
    assert read(event(2), event(4)).end.cached_tokens == 4
    assert read(event(10)).end.cached_tokens == 9
    assert read({"usage": {"prompt_tokens": 9, "prompt_tokens_details": [4]}}).end == Answered(
        "stop", None, 9
    )


@pytest.mark.parametrize(
    ("reasons", "end"),
    [
        (["max_tokens", "stop"], "length"),
        (["stop", "max_output_tokens"], "length"),
        (["length", "stop"], "length"),
        (["stop", "tool_calls"], "tool_calls"),
    ],
)
def test_a_choice_that_was_cut_says_more_in_every_routes_word(reasons: list[str], end: str) -> None:
    assert read(*[text("a", reason) for reason in reasons]).end.finish_reason == end


@pytest.mark.parametrize(
    ("path", "body", "good"),
    [
        ("/v1/completions", {"choices": [{"text": "a"}]}, True),
        ("/v1/completions", {"choices": [{"text": None}]}, True),
        ("/v1/completions", {"choices": [{}]}, False),
        ("/v1/completions", {"choices": []}, False),
        ("/v1/chat/completions", {"choices": [{"message": {}}]}, True),
        ("/v1/chat/completions", {"choices": [{"message": None}]}, False),
        ("/v1/chat/completions", {"choices": []}, False),
        ("/v1/messages", {"content": []}, True),
        ("/v1/messages", {"content": "a"}, False),
        ("/v1/responses", {"output": [1]}, True),
        ("/v1/responses", {}, False),
    ],
)
def test_what_the_clients_of_a_route_read(path: str, body: Any, good: bool) -> None:
    assert fits(path, json.dumps(body).encode()) is good
    assert not fits(path, b"\xff")


def test_a_line_of_4_mib_is_read_and_a_longer_one_passes() -> None:
    most = 4 << 20
    for more in (0, 1):
        answer = UpstreamAnswer()
        line = sse(text("a" * (most - len(sse(text(""))) + 2 + more)))
        assert len(line) == most + 2 + more
        for start in range(0, len(line), 1 << 20):
            answer.feed(line[start : start + (1 << 20)])
        assert (answer.events, answer.tokens, answer.readable) == (1 - more, 1 - more, True)
        answer.feed(sse(text("b")))
        assert answer.events == 2 - more
