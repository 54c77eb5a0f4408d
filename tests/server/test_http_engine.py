"""The http engine before servers that the test writes: whole conversations over sockets, on virtual
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.server.broken import events
from tests.server.passed import Desk, passed
from tests.server.upstream_stub import (
    USAGE,
    Stub,
    answers,
    dies,
    frame,
    hangs,
    in_turn,
    play,
    streams,
    up,
)

# seconds
EVERY, PROBE = 5.0, 5.0


@contextlib.asynccontextmanager
async def served(*stubs: Stub, policy: str = "continuous", **options: Any) -> AsyncIterator[Desk]:
    """A queue before these."""
    async with up(*stubs, **options) as engine:
        desk = Desk(policy, engine, await engine.start())
        engine.on_death = desk.deaths.append
        engine.on_servers = desk.batcher.use_only
        yield desk


# answers


def test_a_stream_passes_byte_by_byte_at_its_instants() -> None:
    async def test(stub: Stub) -> None:
        async with served(stub) as desk:
            desk.batcher.limit_tokens(100)
            desk.submit("a", asked=1000)
            await desk.batcher.answered()
            record, client = desk.records["a"], desk.clients["a"]
            assert client.data == b"".join(
                (frame("t1"), frame("t2"), frame("t3", "length"), b"data: [DONE]\n\n")
            )
            assert client.head == ([("content-type", "text/event-stream; charset=utf-8")], True)
            assert (record.outcome, record.output_tokens) == ("completed", 100), "its limit"
            assert (record.finish_reason, record.clipped) == ("length", True)
            assert (record.first_token_at, record.last_token_at, record.server_free_at) == (1, 3, 3)
            assert record.service_time == 3

    play(test)


def test_a_whole_answer_passes_with_its_headers_and_its_usage() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(x_own="1", server="them", date="now", x_request_id="theirs")
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            record, client = desk.records["a"], desk.clients["a"]
            assert client.head == ([("content-type", "application/json"), ("x-own", "1")], False)
            assert msgspec.json.decode(client.data)["usage"] == USAGE
            assert (record.prompt_tokens, record.output_tokens) == (5, 3)
            assert (record.finish_reason, record.first_token_at) == ("stop", None)

    play(test)


def test_the_call_arrives_as_it_was_given_with_the_engines_key() -> None:
    async def test(stub: Stub) -> None:
        async with served(stub, key="secret") as desk:
            call = passed("a")
            assert call.call is not None
            body = b'{"odd":  [1,2], "stream":true}'
            headers = [("accept", "x/y"), ("traceparent", "00-1"), ("content-type", "a/json")]
            sent = msgspec.structs.replace(
                call, call=msgspec.structs.replace(call.call, body=body, headers=headers)
            )
            desk.take(sent)
            await desk.batcher.answered()
            (asked,) = stub.calls
            assert (asked.method, asked.path, asked.body) == ("POST", "/v1/completions", body)
            assert asked.headers == {
                "host": "stub-0",
                "authorization": "bearer secret",
                "content-length": str(len(body)),
                "accept": "x/y",
                "traceparent": "00-1",
                "content-type": "a/json",
            }

    play(test)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_request"), (404, "invalid_request"), (500, "engine_error")]
)
def test_an_error_passes_as_it_came(status: int, code: str) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers({"error": {"message": "no"}}, status, x_should_retry="false")
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            refused = desk.clients["a"].refused
            assert refused is not None
            assert (refused.status, refused.body) == (status, b'{"error": {"message": "no"}}')
            assert ("x-should-retry", "false") in refused.headers
            assert desk.clients["a"].failed == ("failed", code)
            assert desk.batcher.servers == 1, "the server is well"
            assert len(stub.calls) == 1, "and was asked once"

    play(test)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_with_no_other_gives_its_answer_to_the_client(status: int) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(b"busy", status, retry_after="7")
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            refused = desk.clients["a"].refused
            assert refused is not None
            assert (refused.status, dict(refused.headers)["retry-after"]) == (status, "7")
            assert desk.batcher.servers == 1

    play(test)


def test_an_error_in_the_stream_is_a_failure_that_the_client_has_read() -> None:
    failure = b'data: {"error": {"message": "oom"}}\n\ndata: [DONE]\n\n'

    async def test(stub: Stub) -> None:
        stub.behave = events(frame("t1") + failure)
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            record, client = desk.records["a"], desk.clients["a"]
            assert (record.outcome, record.output_tokens) == ("failed", 1)
            assert record.error == "the server behind reported an error in its answer"
            assert client.failed == ("failed", "engine_error")
            assert client.refused is not None
            assert client.data.endswith(b"data: [DONE]\n\n")

    play(test)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_last_line_counts_with_and_without_its_end(end: bytes) -> None:
    """It alone says that the answer is whole."""

    last = b"data: [DONE]" + end

    async def test(stub: Stub) -> None:
        stub.behave = events(frame("t1"), last)
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            assert (desk.records["a"].outcome, desk.records["a"].output_tokens) == ("completed", 1)
            assert desk.clients["a"].data == frame("t1") + last

    play(test)


# in flight


def test_in_flight_is_never_above_what_the_server_serves() -> None:
    """The backlog is in the queue; a slot is held until the stream's last byte."""

    async def test(stub: Stub) -> None:
        async with served(stub, max_num_seqs=3) as desk:
            assert desk.batcher.capabilities.max_num_seqs == 3
            desk.submit(*"abcdefgh")
            await asyncio.sleep(0.5)
            assert (desk.batcher.in_service, desk.batcher.queue_length) == (3, 5)
            await desk.batcher.answered()
            assert stub.most == 3
            assert sorted(record.released_at for record in desk.records.values()) == [
                *(3, 3, 3, 6, 6, 6, 9, 9)
            ]

    play(test)


def test_a_client_that_leaves_cancels_its_call_at_the_server() -> None:
    async def test(stub: Stub) -> None:
        async with served(stub, max_num_seqs=1) as desk:
            desk.submit("a", "b")
            await asyncio.sleep(1.5)
            desk.clients["a"].sequence.cancel()
            await desk.batcher.answered()
            assert stub.closed == 1
            assert desk.records["a"].outcome == "cancelled"
            assert desk.records["b"].dispatched_at == 1.5
            assert desk.records["b"].outcome == "completed"

    play(test)


# servers that are lost


def test_an_answer_that_breaks_off_fails_and_the_server_stays() -> None:
    """It answers its probe: one connection was lost, not the server."""

    async def test(stub: Stub) -> None:
        stub.behave = dies(tokens=2)
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            record = desk.records["a"]
            assert (record.outcome, record.output_tokens) == ("failed", 2)
            assert desk.clients["a"].failed == ("failed", "engine_unavailable")
            assert "server 0 was lost" in record.error
            assert desk.batcher.servers == 1
            assert len(stub.calls) == 1

    play(test)


def test_before_the_first_byte_a_call_is_sent_once_more() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = in_turn(dies(), streams())
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            record = desk.records["a"]
            assert (record.outcome, record.interruptions) == ("completed", 1)
            assert record.dispatched_at == 1
            assert len(stub.calls) == 2

    play(test)


def test_and_not_a_third_time() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = dies()
        async with served(stub) as desk:
            desk.submit("a")
            await desk.batcher.answered()
            assert desk.records["a"].outcome == "failed"
            assert desk.records["a"].error.endswith("also when it was sent again")
            assert len(stub.calls) == 2

    play(test)


def test_the_calls_of_a_server_that_is_killed_are_served_by_the_other() -> None:
    """Those without an answer: with or without its head. Those that wait lose nothing."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = streams(first=10)
        async with served(one, other, max_num_seqs=2) as desk:
            desk.submit(*"abcdef")
            await asyncio.sleep(0.5)
            assert desk.batcher.in_service == 4
            one.down()
            await asyncio.sleep(0.1)
            assert desk.batcher.servers == 1
            assert desk.deaths == []
            await desk.batcher.answered()
            outcomes = {name: record.outcome for name, record in desk.records.items()}
            assert outcomes == dict.fromkeys("abcdef", "completed")
            assert {record.server_id for record in desk.records.values()} == {1}
            assert other.most == 2
            assert len(desk.collector.records) == 6

    play(test, stubs=2)


def test_a_server_that_hangs_is_found_by_its_probes() -> None:
    """As by SIGSTOP: connections are accepted, nothing comes."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = hangs
        async with served(one, other, max_num_seqs=1) as desk:
            desk.submit("a", "b")
            one.frozen = True
            await desk.batcher.answered()
            record = desk.records["a"]
            assert (record.outcome, record.server_id, record.interruptions) == ("completed", 1, 1)
            # two probes without an answer
            assert 2 * EVERY < record.dispatched_at <= 2 * (EVERY + PROBE) + 1

    play(test, stubs=2)


def test_a_slow_probe_of_a_server_whose_tokens_flow_says_nothing() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams(tokens=40)
        async with served(stub) as desk:
            desk.submit("a")
            await asyncio.sleep(0.5)
            stub.frozen = True
            await desk.batcher.answered()
            assert desk.records["a"].outcome == "completed"

    play(test)


def test_with_none_left_the_engine_is_lost_and_starts_when_one_is_there() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams(first=5)
        async with served(stub) as desk:
            desk.submit("a")
            await asyncio.sleep(1)
            stub.down()
            await asyncio.sleep(0.1)
            assert len(desk.deaths) == 1
            assert desk.deaths[0].startswith("no server is left; server 0: ")
            assert desk.batcher.queue_length == 1, "it waits, first of all"
            assert desk.batcher.servers == 0
            again = asyncio.ensure_future(desk.engine.start())
            await asyncio.sleep(20)
            assert not again.done()
            await stub.up()
            assert (await again).max_model_len == 1000
            await desk.batcher.answered()
            assert desk.records["a"].outcome == "completed"
            assert desk.records["a"].interruptions == 1

    play(test)


def test_a_server_that_comes_back_gets_work_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with served(one, other, max_num_seqs=1) as desk:
            one.down()
            await asyncio.sleep(2 * EVERY + 1)
            assert desk.batcher.servers == 1
            await one.up()
            await asyncio.sleep(10)
            assert desk.batcher.servers == 2
            desk.submit("a", "b")
            await desk.batcher.answered()
            assert {record.server_id for record in desk.records.values()} == {0, 1}

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test, stubs=2)
    words = [record.getMessage() for record in caplog.records]
    assert any("server 0 (http://stub-0) is lost: " in each for each in words)
    assert any("server 0 (http://stub-0) serves: it answers again" in each for each in words)


def test_a_server_that_comes_back_with_another_model_gets_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with served(one, other) as desk:
            one.down()
            await asyncio.sleep(2 * EVERY + 1)
            one.routes["/v1/models"] = (200, {"data": [{"id": "another"}]})
            await one.up()
            await asyncio.sleep(20)
            assert desk.batcher.servers == 1

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test, stubs=2)
    expected = "got model 'another' from http://stub-0; expected model 'm'"
    assert any(expected in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("status", "asks"), [(429, "3"), (503, "3"), (502, "3"), (504, "3")])
def test_a_busy_server_is_left_alone_and_its_call_goes_elsewhere(status: int, asks: str) -> None:
    """For as long as it asks; what it has in service stays there."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = in_turn(streams(first=9), answers(b"busy", status, retry_after=asks))
        async with served(one, other, max_num_seqs=2) as desk:
            desk.batcher.withhold({1})
            desk.submit("a", "b")
            desk.batcher.withhold(())
            await asyncio.sleep(1.5)
            assert desk.batcher.servers == 1
            await asyncio.sleep(2.4)
            assert desk.batcher.servers == 1
            await asyncio.sleep(0.2)
            assert desk.batcher.servers == 2
            await desk.batcher.answered()
            records = desk.records
            assert [records[name].server_id for name in "ab"] == [0, 1]
            assert [records[name].interruptions for name in "ab"] == [0, 1]
            assert [records[name].outcome for name in "ab"] == ["completed"] * 2
            assert desk.deaths == []

    play(test, stubs=2)


# what is wrong with an answer


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, []),
        (
            {"choices": [{"text": "abc", "finish_reason": "stop"}]},
            [
                "got an answer of http://stub-0/v1/completions without usage; expected "
                "usage.completion_tokens: its tokens count as 0 (said once)"
            ],
        ),
        (
            {
                "choices": [{"text": "a " * 101}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 101},
            },
            [
                "got 101 tokens of http://stub-0/v1/completions; expected at most 100, the limit "
                "that was sent: this server ignores it, and --max-output-tokens does not hold "
                "(said once)"
            ],
        ),
        (
            {
                "choices": [{"text": ""}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 10_000},
            },
            [
                "got 10000 tokens in the usage of an answer of 86 bytes of "
                "http://stub-0/v1/completions; expected a count that can be true: the limit, or "
                "what was counted, is taken (said once)"
            ],
        ),
        (
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 1, "completion_tokens": 100}},
            [],
        ),
    ],
)
def test_what_is_wrong_with_answers_is_said_once(
    body: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is lost."""

    async def test(stub: Stub) -> None:
        stub.behave = answers(body)
        async with served(stub) as desk:
            desk.submit("a", "b")
            await desk.batcher.answered()
            assert [record.outcome for record in desk.records.values()] == ["completed"] * 2

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test)
    assert [
        each.getMessage() for each in caplog.records if "assumed" not in each.getMessage()
    ] == said
