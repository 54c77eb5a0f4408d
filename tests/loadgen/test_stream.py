"""The reader of streams: instants, counts and ends, however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.loadgen.sending.client.stream import StreamedAnswer, StreamError, read_error
from tests.loadgen.fake_server import DONE, chat_chunk, chunk, event, usage

WHOLE = (
    chunk() * 3
    + b": a comment\n\n"
    + chunk(finish="stop")
    + usage(7, 4, kendall={"queueing_delay_ms": 1.0, "service_ms": 12.5, "batch_size": 3})
    + DONE
)


def read(*parts: bytes) -> StreamedAnswer:
    """Each part comes at the instant of its index."""
    answer = StreamedAnswer()
    for instant, part in enumerate(parts):
        answer.feed(part, float(instant))
    return answer


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8), st.booleans())
def test_cuts_do_not_matter(cuts: list[int], crlf: bool) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    whole = WHOLE.replace(b"\n", b"\r\n") if crlf else WHOLE
    scale = len(whole) / len(WHOLE)
    answer = read(*(whole[int(a * scale) : int(b * scale)] for a, b in itertools.pairwise(edges)))
    assert answer.done
    assert (
        answer.token_chunks,
        answer.output_tokens,
        answer.prompt_tokens,
        answer.finish_reason,
    ) == (4, 4, 7, "stop")
    assert (answer.service_time, answer.batch_size) == (0.0125, 3)


def test_first_and_last_token_have_their_instants() -> None:
    answer = read(b": queue\n\n", chunk(), chunk(), chunk(finish="length"), usage(1, 3), DONE)
    assert (answer.first_token_at, answer.last_token_at) == (1.0, 3.0)


def test_the_empty_end_of_a_padded_answer_is_no_token() -> None:
    answer = read(chunk(), chunk(), chunk("", finish="length"), DONE)
    assert (answer.last_token_at, answer.token_chunks) == (1.0, 2)


def test_a_token_without_text_is_a_token() -> None:
    answer = read(chunk(""), chunk(""), chunk("é"), DONE)
    assert (answer.first_token_at, answer.last_token_at, answer.token_chunks) == (0.0, 2.0, 3)


def test_the_role_of_a_chat_is_no_token() -> None:
    opening = chat_chunk({"role": "assistant", "content": ""})
    answer = read(
        opening,
        chat_chunk({"content": "a"}),
        chat_chunk({"content": "b"}),
        chat_chunk({}, "stop"),
        DONE,
    )
    assert (
        answer.first_token_at,
        answer.last_token_at,
        answer.token_chunks,
        answer.finish_reason,
    ) == (1.0, 2.0, 2, "stop")


def test_an_answer_of_one_token_with_its_finish() -> None:
    answer = read(chunk(finish="length"), DONE)
    assert (answer.first_token_at, answer.last_token_at, answer.token_chunks) == (0.0, 0.0, 1)


def test_a_finish_reason_quoted_in_the_text_does_not_hide_the_end() -> None:
    answer = read(chunk(), chunk('"finish_reason":null', finish="stop"))
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"data: {broken\n\n", "completion chunk"),
        (b"<html>no</html>\n\n", "begins with 'data:'"),
        (b"data: " + b"x" * 2_000_000, "end of an event"),
        (
            event({"error": {"message": "engine died", "code": "engine_unavailable"}}),
            "engine_unavailable: engine died",
        ),
        (b"data: [1]\n\n", "completion chunk"),
    ],
)
def test_what_is_no_stream_is_said(data: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read(data)


def test_error_bodies_of_every_form_are_read() -> None:
    assert read_error(b'{"error":{"message":"full","code":"queue_full"}}') == (
        "queue_full",
        "queue_full: full",
    )
    assert read_error(b'{"error":"no"}') == (None, "no")
    assert read_error(b"Bad Gateway") == (None, "Bad Gateway")
    assert read_error(b'{"detail":1}') == (None, '{"detail":1}')
