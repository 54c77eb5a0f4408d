"""Two good servers and a broken one behind one gateway: what that costs the calls that a good
server could serve.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.server.broken import BROKEN, SERVICE, Broken, good, said, text_for
from tests.server.passing_gateway import Before, before
from tests.server.upstream_stub import Stub, play

SLOTS = 8  # of each server
EVERY = SERVICE / 4  # seconds between two arrivals: the good servers are busy for a fourth
MOST_BEGUN = 4  # answers that had reached their client, and broke off
STUCK = 60.0  # --stuck-timeout
# at most twice at a silent server and once at one that is not
LONGEST = 2 * (STUCK + 2.0) + 10.0


async def asks(kendall: Before, number: int, *, streamed: bool) -> tuple[bool, float]:
    """Whether a call was answered right, and the seconds that it was held."""
    began, prompt = kendall.gateway.now(), f"p{number}"
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 8}
    call = await kendall.answer(body | ({"stream": True} if streamed else {}))
    right = said(call, streamed=streamed) == text_for(prompt)
    return right, kendall.gateway.now() - began


async def asked(
    kendall: Before, calls: int, *, streamed: bool, gap: float = EVERY
) -> list[tuple[bool, float]]:
    """So many calls, one after the other."""
    tasks = []
    for number in range(calls):
        tasks.append(asyncio.create_task(asks(kendall, number, streamed=streamed)))
        await asyncio.sleep(gap)
    return await asyncio.gather(*tasks)


def check_books(kendall: Before, calls: int, right: int) -> None:
    """Each call has one record and one outcome, and nothing is left."""
    assert len({record.request_id for record in kendall.records}) == len(kendall.records) == calls
    outcomes = Counter(record.outcome for record in kendall.records)
    assert outcomes["completed"] + outcomes["failed"] == calls
    assert outcomes["completed"] >= right
    assert kendall.gateway.batcher.idle
    assert kendall.gateway.batcher.unrecorded == 0


def held_by(broken: Broken, calls: int, place: int) -> None:
    async def test(*stubs: Stub) -> None:
        for stub in stubs:
            stub.behave = good
        async with before(*stubs, engine={"max_num_seqs": SLOTS}) as kendall:
            # a law is not known: that of the answers so far holds
            warm = await asked(kendall, 30, streamed=broken.streamed)
            assert all(right for right, _ in warm)
            broken.breaks(stubs[place])
            found = await asked(kendall, calls, streamed=broken.streamed)
            wrong = sum(not right for right, _ in found)
            assert wrong <= max(calls // 100, MOST_BEGUN if broken.begun else 0)
            assert max(held for _, held in found) <= LONGEST
            check_books(kendall, 30 + calls, 30 + calls - wrong)

    play(test, stubs=3)


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_calls_that_a_good_server_could_serve_are_served(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    """None is held beyond its bound, each has one outcome, and no traceback is logged."""
    held_by(broken, 100, place=0)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.slow
@given(
    broken=st.sampled_from(BROKEN),
    others=st.integers(1, 3),
    place=st.integers(0, 3),
    slots=st.sampled_from([1, 2, SLOTS]),
    gap=st.sampled_from([0.0, EVERY, 4 * EVERY]),
    policy=st.sampled_from(["continuous", "single", "elastic", "fixed:batch_size=2,max_wait=1"]),
)
@example(  # three had reached clients before it was put aside, and one after that
    broken=next(each for each in BROKEN if each.name == "cut streams of three in ten"),
    others=1,
    place=0,
    slots=1,
    gap=EVERY,
    policy="elastic",
)
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_what_one_broken_server_fails_is_a_constant_and_no_share(
    broken: Broken, others: int, place: int, slots: int, gap: float, policy: str
) -> None:
    """Whatever the others are, and how calls come: at most what had begun there at its second
    failure, once; nothing of what had not begun.
    """

    async def test(*stubs: Stub) -> None:
        for stub in stubs:
            stub.behave = good
        engine = {"max_num_seqs": slots}
        async with before(*stubs, engine=engine, policy=policy) as kendall:
            await asked(kendall, 30, streamed=broken.streamed)
            broken.breaks(stubs[place % len(stubs)])
            found = await asked(kendall, 80, streamed=broken.streamed, gap=gap)
            wrong = sum(not right for right, _ in found)
            assert wrong <= (1 + slots if broken.begun else 1)
            check_books(kendall, 110, 110 - wrong)

    play(test, stubs=1 + others)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_thousand_calls(broken: Broken, place: int) -> None:
    held_by(broken, 1000, place)
