"""No more is read of a server behind than its client takes, whatever it sends."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.server.engines.http.answers import UpstreamAnswer
from kendall.server.http.proxied.answer import ProxiedPart
from tests.memory import peak_memory
from tests.server.asgi import Call
from tests.server.passing_gateway import Before, before
from tests.server.upstream_stub import USAGE, Asked, Behaviour, Stub, frame, in_turn, play

# bytes
HELD, AHEAD, MOST_LINE = 4 << 20, 256 << 10, 4 << 20
MIB = 1 << 20
PIECE = 1 << 16
BUFFERED = 2 * MIB  # of two sockets, a parser and a writer, beside AHEAD
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 100_000}
LONG = {"id": "m", "max_model_len": 200_000}


class Reader(Call):
    """A client that takes nothing until `reads` is set."""

    def __init__(self, kendall: Before, body: dict[str, Any]) -> None:
        self.reads = asyncio.Event()
        super().__init__(kendall.app, "POST", "/v1/completions", body, {})

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
        await super()._send(message)


class Counted:
    """Sends so many pieces, and counts the bytes of those that left."""

    def __init__(self, first: bytes, piece: bytes, pieces: int, last: bytes) -> None:
        self.first, self.piece, self.pieces, self.last = first, piece, pieces, last
        self.sent = 0

    @property
    def body(self) -> bytes:
        return self.first + self.piece * self.pieces + self.last

    async def __call__(self, asked: Asked) -> None:
        for part in (self.first, *[self.piece] * self.pieces, self.last):
            asked.piece(part)
            await asked.writer.drain()
            self.sent += len(part)
        asked.end()

    async def stream(self, asked: Asked) -> None:
        asked.begin()
        await self(asked)

    async def whole(self, asked: Asked) -> None:
        asked.head(200, content_type="application/json", transfer_encoding="chunked")
        await self(asked)


def large(pieces: int) -> Counted:
    """A whole answer of so many pieces."""
    last = b'", "finish_reason": "stop"}], "usage": %b}' % json.dumps(USAGE).encode()
    return Counted(b'{"choices": [{"text": "', b"a" * PIECE, pieces, last)


def long(pieces: int) -> Counted:
    """A stream of so many events."""
    return Counted(frame("t"), frame("a" * PIECE), pieces, frame("", "stop"))


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_client_does_not_read_stays_with_the_server(streamed: bool) -> None:
    """And all of it comes, unchanged, once it reads; its slot is held meanwhile."""

    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [LONG]})
        source = long(320) if streamed else large(320)
        stub.behave = source.stream if streamed else source.whole
        async with before(stub) as kendall:
            reader = Reader(kendall, PROMPT | {"stream": streamed})
            await asyncio.sleep(1000)
            held = AHEAD if streamed else HELD
            assert source.sent <= held + AHEAD + BUFFERED
            assert kendall.gateway.batcher.in_service == 1, "a pause of the client is no silence"
            reader.reads.set()
            await reader.task
            assert reader.body == source.body
            assert [record.outcome for record in kendall.records] == ["completed"]

    play(test)


def test_no_more_than_256_kib_of_a_stream_are_read_ahead_of_its_client() -> None:
    """Of a whole answer all is taken: it was held already."""
    woken: list[str] = []
    call: Any = SimpleNamespace(
        chunks=[],
        ahead=0,
        streamed=True,
        sleeping=None,
        error=None,
        wake=lambda: woken.append("woken"),
        taken=lambda: "until it is taken",
        failure=lambda code, message: f"{code}: {message}",
    )
    part = ProxiedPart(call)
    assert part.on_bytes(b"a" * (AHEAD - 1)) is None
    assert woken == []
    call.sleeping = "a future"
    assert part.on_bytes(b"b") is None
    assert part.on_bytes(b"c") == "until it is taken"  # type: ignore[comparison-overlap]
    assert (woken, call.ahead, len(call.chunks)) == (["woken"] * 2, AHEAD + 1, 3)
    part.on_head([("a", "b")], streamed=False)
    assert (call.head, call.streamed, len(woken)) == ([("a", "b")], False, 3)
    assert part.on_bytes(b"d") is None
    assert (call.ahead, len(woken)) == (AHEAD + 2, 3)
    part.on_failed("failed", "engine_error", "first")
    part.on_failed("failed", "engine_error", "second")
    assert (call.error, part.done, len(woken)) == ("engine_error: first", False, 5)
    part.on_release()
    assert (part.done, len(woken)) == (True, 6)


def test_a_client_that_leaves_while_its_server_waits_frees_both() -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [LONG]})
        stub.behave = long(320).stream
        async with before(stub) as kendall:
            reader = Reader(kendall, PROMPT | {"stream": True})
            await asyncio.sleep(10)
            reader.leave()
            reader.reads.set()
            await reader.task
            await asyncio.sleep(1)
            assert (stub.now, kendall.gateway.batcher.idle) == (0, True)
            assert [record.outcome for record in kendall.records] == ["cancelled"]

    play(test)


def test_usage_of_an_answer_that_is_too_large_to_be_held_is_read_at_its_end() -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [LONG]})
        source = large(2 * HELD // PIECE)
        stub.behave = source.whole
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT)
            assert call.body == source.body
            (record,) = kendall.records
            assert (record.prompt_tokens, record.output_tokens) == (5, 3)

    play(test)


async def breaks_off(asked: Asked) -> None:
    asked.head(200, content_type="application/json", transfer_encoding="chunked")
    for _ in range(2 * HELD // PIECE):
        asked.piece(b"{" * PIECE)
        await asked.writer.drain()
    asked.abort()


def test_a_large_answer_that_breaks_off_has_no_end_at_its_client() -> None:
    """Nothing is written behind it that could be taken for a part of it."""

    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [LONG]})
        stub.behave = breaks_off
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT)
            assert set(call.body) == set(b"{")
            assert not call.whole
            assert [record.outcome for record in kendall.records] == ["failed"]

    play(test)


@pytest.mark.parametrize(("status", "pieces"), [(200, 40), (500, 40)])
def test_an_answer_beyond_what_its_call_can_have_is_given_up(status: int, pieces: int) -> None:
    """16 tokens, or an error, are no 2.5 MiB."""

    async def floods(asked: Asked) -> None:
        asked.head(status, content_type="application/json", transfer_encoding="chunked")
        for _ in range(pieces):
            asked.piece(b" " * PIECE)
            await asked.writer.drain()
        asked.end()

    async def test(stub: Stub) -> None:
        stub.behave = floods
        async with before(stub) as kendall:
            call = await kendall.answer({"model": "m", "prompt": "hello", "max_tokens": 16})
            assert (call.status, call.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "with more than 1 MiB" in call.json()["error"]["message"]

    play(test)


def test_all_held_answers_together_are_bounded() -> None:
    """Beyond, they flow; their bytes are the same."""
    together = 24

    async def test(stub: Stub) -> None:
        stub.routes["/v1/models"] = (200, {"data": [LONG]})
        sources = [large(3 * MIB // PIECE) for _ in range(together)]
        waits = asyncio.Event()

        def behave(source: Counted) -> Behaviour:
            async def slowly(asked: Asked) -> None:
                asked.head(200, content_type="application/json", transfer_encoding="chunked")
                asked.piece(source.first + source.piece * source.pieces)
                await asked.writer.drain()
                await waits.wait()
                asked.piece(source.last)
                asked.end()

            return slowly

        stub.behave = in_turn(*[behave(source) for source in sources])
        async with before(stub) as kendall:
            engine: Any = kendall.gateway.engine
            calls = [kendall.call(PROMPT) for _ in sources]
            await asyncio.sleep(10)
            assert 0 < engine.held <= 64 * MIB + HELD
            waits.set()
            await asyncio.gather(*(call.task for call in calls))
            assert [len(call.body) for call in calls] == [len(each.body) for each in sources]
            assert engine.held == 0

    play(test)


@pytest.mark.parametrize("size", [12 * MIB, 48 * MIB])
def test_of_a_line_without_an_end_only_so_much_is_kept(size: int) -> None:
    answer, piece = UpstreamAnswer(), b"a" * PIECE

    with peak_memory() as peak:
        answer.feed(b"data: ")
        for _ in range(size // PIECE):
            answer.feed(piece)
    assert peak.value < 2 * MOST_LINE
    assert answer.size == size + len(b"data: ")


@pytest.mark.slow  # of processor time
def test_a_line_without_an_end_costs_time_in_proportion() -> None:
    """Four times as much takes about four times as long; not sixteen times."""

    def seconds(size: int) -> float:
        answer, piece = UpstreamAnswer(), b"a" * PIECE
        began = time.thread_time()
        answer.feed(b"data: ")
        for _ in range(size // PIECE):
            answer.feed(piece)
        return time.thread_time() - began

    seconds(MIB)
    few, many = (min(seconds(size) for _ in range(5)) for size in (12 * MIB, 48 * MIB))
    assert many < 8 * few


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_read() -> None:
    answer = UpstreamAnswer()
    answer.feed(b"data: " + b"a" * (MOST_LINE - 100))
    answer.feed(b"a" * 200)
    answer.feed(b"a" * 200 + b"\n\n" + frame("t"))
    assert (answer.tokens, answer.events) == (1, 1)
