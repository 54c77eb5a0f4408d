"""Designed batches on servers behind the gateway: lengths are asked for with `ignore_eos`, and a
server that does not keep to them is found out.
"""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from policies import Request
from server.calibration.designed import Cell, DesignedBatches
from server.calibration.turnaround import ClosedLoop
from server.engines.base import EngineRequest, Sampling
from server.engines.http.stream import own_call, wanted_tokens
from server.runtime.errors import ApiError
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
    assert json.loads(own_call("m", plain, 9).body)["prompt"] == [1, 2]
