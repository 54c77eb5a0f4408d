"""Designed batches on servers behind the gateway: lengths are asked for with `ignore_eos`, and a
server that does not keep to them is found out.
"""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from kendall.policies import Request
from kendall.server.calibration.designed import Cell, DesignedBatches
from kendall.server.calibration.turnaround import ClosedLoop
from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.engines.http.own_calls import OwnForm, wanted_tokens
from kendall.server.runtime.errors import ApiError
from tests.server.upstream_stub import Asked, Behaviour, Stub, answers, dies, frame, sockets, up
from tests.virtual_time import run_with_sockets

STEP = 0.5


def obeys(*, extra: int = 0, usage: bool = True, together: int = 1) -> Behaviour:
    """As many tokens as were asked for, `together` in a frame, one every STEP seconds."""

    async def behave(asked: Asked) -> None:
        tokens = asked.fields["max_tokens"] + extra
        asked.begin()
        for made in range(0, tokens, together):
            now = min(together, tokens - made)
            await asyncio.sleep(now * STEP)
            asked.piece(frame("t", "length" if made + now == tokens else None))
        if usage:
            counts = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
            asked.piece(b"data: " + json.dumps(counts).encode() + b"\n\n")
        asked.piece(b"data: [DONE]\n\n")
        asked.end()

    return behave


def measured(behave: Behaviour, cell: Cell) -> tuple[float, Stub]:
    async def test(stub: Stub) -> float:
        stub.behave = behave
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            found = await batches.measure(cell, np.random.default_rng(1))
            assert batches.batcher.idle
            assert found.lengths == cell.lengths
            return found.service_time

    with sockets() as (stub,):
        return run_with_sockets(test(stub)), stub


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    "behave",
    [obeys(), obeys(usage=False), obeys(together=3)],
    ids=["usage", "counted", "frames of three tokens"],
)
def test_a_batch_is_served_until_its_longest_member_has_ended(
    behave: Behaviour, padded: bool
) -> None:
    seconds, stub = measured(behave, Cell((2, 6, 4), 5, padded=padded))
    assert seconds == pytest.approx(6 * STEP)
    assert sorted(asked.fields["max_tokens"] for asked in stub.calls) == [2, 4, 6]


def test_what_is_asked_of_the_server() -> None:
    """A greedy completion over token ids, of exactly so many tokens."""
    _, stub = measured(obeys(), Cell((3,), 5))
    (asked,) = stub.calls
    assert asked.headers["content-type"] == "application/json"
    prompt = asked.fields.pop("prompt")
    assert len(prompt) == 5
    assert all(5 <= token < 256 for token in prompt)
    given = asked.fields
    del given["prompt"]
    assert given == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_closed_loop_of_a_continuous_engine() -> None:
    async def test(stub: Stub) -> float:
        stub.behave = obeys()
        async with up(stub, max_num_seqs=2) as engine:
            batches = DesignedBatches(engine, await engine.start())
            return await batches.slot_time(ClosedLoop(2, (2, 4, 6), 5), np.random.default_rng(1))

    with sockets() as (stub,):
        assert run_with_sockets(test(stub)) == pytest.approx(4 * STEP)
        assert stub.most == 2


@pytest.mark.parametrize(
    ("behave", "line"),
    [
        (
            obeys(extra=-1),
            "got an answer of 2 tokens; expected 3: the server must honour ignore_eos",
        ),
        (obeys(extra=1), "got an answer of 4 tokens; expected 3"),
        (obeys(extra=-1, usage=False), "got an answer of 2 tokens; expected 3"),
        (obeys(extra=1, usage=False), "got an answer of 4 tokens; expected 3"),
        (answers({"error": "no ids"}, 400), 'the server answered 400: {"error": "no ids"}'),
        (dies(), "server 0 was lost"),
        (dies(tokens=1), "server 0 was lost"),
    ],
)
def test_a_server_that_does_not_keep_to_it_ends_the_calibration(
    behave: Behaviour, line: str
) -> None:
    with pytest.raises(ApiError) as caught:
        measured(behave, Cell((3, 3), 5))
    assert line in str(caught.value)


def test_a_batch_that_is_given_up_leaves_nothing_at_the_server() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = obeys()
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            cell = Cell((50, 50), 5)
            running = asyncio.ensure_future(batches.measure(cell, np.random.default_rng(1)))
            await asyncio.sleep(3)
            batches.interrupt()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert (stub.closed, stub.now) == (2, 0)
            assert batches.batcher.idle

    with sockets() as (stub,):
        run_with_sockets(test(stub))


def test_the_gateways_own_request_has_its_limit_where_no_length_is_forced() -> None:
    request = Request(id="a", arrived_at=0.0, prompt_tokens=2, max_output_tokens=9)
    plain = EngineRequest(request, [1, 2], Sampling(max_tokens=9))
    assert wanted_tokens(plain) == 9
    assert wanted_tokens(EngineRequest(request, [1, 2], Sampling(max_tokens=9), 4)) == 4
    assert json.loads(OwnForm().call("m", plain).passed.body)["prompt"] == [1, 2]


def in_words(*, tokens_per_word: int = 1, marks: int = 0, ends_early: bool = False) -> Behaviour:
    """A server that takes neither token ids nor `ignore_eos`, as `transformers serve`; `marks`:
    tokens around each prompt.
    """

    async def behave(asked: Asked) -> None:
        fields = asked.fields
        if "ignore_eos" in fields:
            await answers({"detail": "Unexpected fields"}, 422, after=0.0)(asked)
            return
        counted = marks + tokens_per_word * len(fields["prompt"].split())
        tokens = fields["max_tokens"] - ends_early
        asked.begin()
        await asyncio.sleep(tokens * STEP)
        usage = {"prompt_tokens": counted, "completion_tokens": tokens}
        asked.piece(frame("t", "length"))
        asked.piece(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        asked.end()

    return behave


def test_a_server_without_token_ids_and_ignore_eos_is_asked_in_words() -> None:
    seconds, stub = measured(in_words(), Cell((2, 6, 4), 32))
    assert seconds == pytest.approx(6 * STEP)
    served = [asked.fields for asked in stub.calls if "ignore_eos" not in asked.fields]
    assert len(served) == 3
    assert all(len(fields["prompt"].split()) == 32 for fields in served)
    assert sorted(fields["max_tokens"] for fields in served) == [2, 4, 6]


def test_the_number_of_words_follows_what_the_server_counts() -> None:
    """Two tokens to a word: half as many words from the second batch on; the first form is not
    tried again.
    """

    async def test(stub: Stub) -> None:
        stub.behave = in_words(tokens_per_word=2)
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            for _ in range(3):
                await batches.measure(Cell((2, 2), 32), np.random.default_rng(1))

    with sockets() as (stub,):
        run_with_sockets(test(stub))
    forms = [
        len(asked.fields["prompt"].split()) if "ignore_eos" not in asked.fields else "ids"
        for asked in stub.calls
    ]
    assert forms == ["ids", "ids", 32, 32, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("tokens_per_word", "marks", "words"),
    [
        (1, 10, [32, 118, 22, 118, 22, 502]),
        (2, 0, [32, 64, 16, 64, 16, 256]),
        (2, 10, [32, 55, 11, 59, 11, 251]),  # until a second length is known
    ],
)
def test_marks_and_words_of_several_tokens_are_told_apart_by_two_lengths(
    tokens_per_word: int, marks: int, words: list[int]
) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = in_words(tokens_per_word=tokens_per_word, marks=marks)
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            for prompt_tokens in (32, 128, 32, 128, 32, 512):
                await batches.measure(Cell((2,), prompt_tokens), np.random.default_rng(1))

    with sockets() as (stub,):
        run_with_sockets(test(stub))
    sent = [asked.fields["prompt"] for asked in stub.calls if "ignore_eos" not in asked.fields]
    assert [len(each.split()) for each in sent] == words


def test_a_refusal_of_both_forms_changes_nothing() -> None:
    """The prompt was too long, say: the next one is token ids again; both answers are told."""

    async def behave(asked: Asked) -> None:
        if len(asked.fields["prompt"]) > 40:
            form = "ids" if "ignore_eos" in asked.fields else "words"
            await answers({"detail": f"too many {form}"}, 400, after=0.0)(asked)
            return
        await obeys()(asked)

    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            with pytest.raises(ApiError) as caught:
                await batches.measure(Cell((2,), 50), np.random.default_rng(1))
            assert 'answered 400: {"detail": "too many words"}' in str(caught.value)
            assert 'ignore_eos 400: {"detail": "too many ids"}' in str(caught.value)
            await batches.measure(Cell((2,), 20), np.random.default_rng(1))

    with sockets() as (stub,):
        run_with_sockets(test(stub))
    assert ["ignore_eos" in asked.fields for asked in stub.calls] == [True, False, True]


def test_short_prompts_teach_nothing_about_words() -> None:
    """Marks around a prompt count too."""

    async def test(stub: Stub) -> None:
        stub.behave = in_words(tokens_per_word=2)
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            for prompt_tokens in (15, 15, 40):
                await batches.measure(Cell((2,), prompt_tokens), np.random.default_rng(1))

    with sockets() as (stub,):
        run_with_sockets(test(stub))
    words = [asked.fields["prompt"] for asked in stub.calls if "ignore_eos" not in asked.fields]
    assert [len(each.split()) for each in words] == [15, 15, 40]


def test_an_answer_in_words_that_ends_by_itself_says_what_to_do() -> None:
    with pytest.raises(ApiError, match="takes no ignore_eos, so the model must not end its"):
        measured(in_words(ends_early=True), Cell((3, 3), 32))


def test_a_batch_in_words_that_is_given_up_leaves_nothing_at_the_server() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = in_words()
        async with up(stub) as engine:
            batches = DesignedBatches(engine, await engine.start())
            running = asyncio.ensure_future(
                batches.measure(Cell((50, 50), 5), np.random.default_rng(1))
            )
            await asyncio.sleep(3)
            batches.interrupt()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert stub.now == 0
            assert batches.batcher.idle

    with sockets() as (stub,):
        run_with_sockets(test(stub))
