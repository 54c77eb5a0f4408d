"""A call that a server returned goes to another one, and what the first one gets meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.server.passed import Desk, Scripted
from tests.virtual_time import run_virtual

ELSEWHERE, UNDECIDED = 30.0, 3  # seconds; calls without an answer


def dispatched(desk: Desk) -> list[tuple[int, list[str]]]:
    """Servers and calls, one dispatch after the other."""
    return [(server, ids) for server, ids, _ in desk.engine.dispatched]


def desk_of(policy: str, servers: int = 2, slots: int = 1) -> Desk:
    return Desk(policy, Scripted(servers=servers, max_num_seqs=slots))


def returns(desk: Desk, *names: str) -> None:
    for name in names:
        desk.engine.answer(name).on_returned("no")


def test_it_waits_for_another_server_though_the_first_is_free() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("a", "b")
        returns(desk, "a")
        assert dispatched(desk) == [(0, ["a"]), (1, ["b"])]
        await asyncio.sleep(1)
        desk.answer("b")
        assert dispatched(desk)[2:] == [(1, ["a"])]
        desk.answer("a")
        assert desk.records["a"].outcome == "completed"

    run_virtual(run())


def test_the_first_one_serves_others_meanwhile_in_their_order() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("a", "b", "c", "d")
        returns(desk, "a")
        assert dispatched(desk)[2:] == [(0, ["c"])]
        desk.answer("c")
        assert dispatched(desk)[3:] == [(0, ["d"])]
        desk.answer("b")
        assert dispatched(desk)[4:] == [(1, ["a"])]

    run_virtual(run())


def test_a_server_with_several_of_them_gets_nothing_new_until_they_are_decided() -> None:
    """However many wait: each would be gone as quickly."""

    async def run() -> None:
        desk = desk_of("continuous")
        names = [f"c{number}" for number in range(20)]
        desk.submit("b", *names)  # b goes to server 0
        for number in range(UNDECIDED):
            assert dispatched(desk)[-1] == (1, [names[number]])
            returns(desk, names[number])
        assert len(dispatched(desk)) == 1 + UNDECIDED
        await asyncio.sleep(1)
        desk.answer("b")
        for name in reversed(names[:UNDECIDED]):  # each went to the head of the queue
            assert (0, [name]) in dispatched(desk)
            desk.answer(name)
        assert (1, [names[UNDECIDED]]) in dispatched(desk), "new ones again, when one was decided"

    run_virtual(run())


def test_what_another_server_returned_goes_to_one_that_gets_nothing_new() -> None:
    """Calls that no server can bear do not wait for ever, nor keep the servers from others."""

    async def run() -> None:
        desk = desk_of("continuous", slots=4)
        bad = [f"bad{number}" for number in range(8)]
        desk.submit(*bad, "good")
        returns(desk, *bad)
        desk.answer("good")
        returns(desk, *bad)
        assert {desk.records[name].outcome for name in bad} == {"failed"}
        for name in bad:
            assert {server for server, ids in dispatched(desk) if name in ids} == {0, 1}
        assert desk.records["good"].interruptions == 0

    run_virtual(run())


@pytest.mark.parametrize(
    "policy",
    [
        *("single", "dynamic", "capped:max_batch_size=2", "elastic", "continuous:max_batch_size=2"),
        *("fixed:batch_size=2,max_wait=3", "continuous:order=ljf", "single:order=vtc"),
        *("continuous:route=prefix", "dynamic:order=priority"),
    ],
)
def test_under_every_policy(policy: str) -> None:
    async def run() -> None:
        desk = desk_of(policy, slots=2)
        desk.submit("a")
        await asyncio.sleep(4)
        ((first, _),) = dispatched(desk)
        returns(desk, "a")
        await asyncio.sleep(4)
        assert dispatched(desk)[-1] == (1 - first, ["a"])
        desk.answer("a")
        assert desk.records["a"].outcome == "completed"

    run_virtual(run())


def test_with_no_other_server_it_goes_back_to_the_first() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.batcher.withhold({1})
        desk.submit("a")
        returns(desk, "a")
        assert dispatched(desk) == [(0, ["a"])] * 2

    run_virtual(run())


@pytest.mark.parametrize("gone", [frozenset({1}), frozenset({0, 1})])
def test_also_where_the_others_are_lost_later(gone: Sequence[int]) -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("a", "b")
        returns(desk, "a")
        desk.batcher.withhold(gone)
        desk.batcher.withhold({1})
        assert dispatched(desk)[2:] == [(0, ["a"])]

    run_virtual(run())


def test_it_does_not_wait_for_another_server_for_ever() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("a", "b")
        returns(desk, "a")
        await asyncio.sleep(ELSEWHERE - 0.1)
        assert len(dispatched(desk)) == 2
        await asyncio.sleep(0.2)
        assert dispatched(desk)[2:] == [(0, ["a"])]

    run_virtual(run())


def test_a_server_that_was_gone_may_have_it_again() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("a", "b")
        desk.batcher.withhold({0})
        desk.engine.answer("a").on_returned("killed", cause="gone")
        desk.batcher.withhold(())
        assert dispatched(desk)[2:] == [(0, ["a"])]

    run_virtual(run())


def test_a_server_on_trial_gets_as_much_as_it_is_trusted_with() -> None:
    async def run() -> None:
        desk = desk_of("continuous", slots=4)
        desk.batcher.trust(0, 1)
        desk.submit(*"abcdefgh")
        assert desk.batcher.in_service == 5
        desk.batcher.trust(0, 2)
        assert desk.batcher.in_service == 6
        desk.batcher.trust(0, None)
        assert desk.batcher.in_service == 8

    run_virtual(run())


def test_those_that_leave_the_queue_are_forgotten() -> None:
    async def run() -> None:
        desk = desk_of("continuous")
        desk.submit("x", *"abcd")
        for name in "abc":
            assert dispatched(desk)[-1] == (1, [name])
            returns(desk, name)
        for name in "abc":
            sequence = desk.clients[name].sequence
            assert sequence is not None
            sequence.cancel()
        assert dispatched(desk)[-1] == (1, ["d"])

    run_virtual(run())
