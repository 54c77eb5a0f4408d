"""Calls that are passed on, in the queue: what they count for, how they end, and where they go when
their server is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kendall.server.engines.base import Token
from kendall.server.engines.proxied import Answered, Refused
from kendall.server.queue.continuing import detach
from kendall.server.queue.observers import Observer
from kendall.server.queue.proxied import BEGUN
from tests.server.passed import Desk, Scripted, passed
from tests.virtual_time import run_virtual

HEAD = [("content-type", "text/event-stream")]


def test_an_answer_passes_as_it_comes_and_counts_what_it_holds() -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a")
        await asyncio.sleep(1)
        answer = desk.engine.answer("a")
        answer.on_head(HEAD, streamed=True)
        await asyncio.sleep(1)
        answer.on_bytes(b"role", 0)
        await asyncio.sleep(1)
        answer.on_bytes(b"one", 1)
        await asyncio.sleep(1)
        answer.on_bytes(b"two-three", 2)
        assert desk.batcher.running()[0][0].output_tokens_so_far == 3
        answer.on_answered(Answered("tool_calls", prompt_tokens=12))
        client, record = desk.clients["a"], desk.records["a"]
        assert client.head == (HEAD, True)
        assert client.data == b"roleonetwo-three"
        assert (record.outcome, record.finish_reason) == ("completed", "tool_calls")
        assert (record.prompt_tokens, record.output_tokens) == (12, 3)
        assert (record.first_token_at, record.last_token_at, record.released_at) == (3, 4, 4)
        assert (record.clipped, record.error) == (False, None)

    run_virtual(run())


@pytest.mark.parametrize(("sequences", "gaps"), [(1, [2.0, 1.0]), (2, [])])
def test_the_gaps_of_one_answer_are_observed(sequences: int, gaps: list[float]) -> None:
    """Pieces of several answers follow each other: what is between them says nothing."""

    async def run() -> None:
        desk, found = Desk("continuous"), list[float]()
        desk.submit("a", sequences=sequences)
        answer = desk.engine.answer("a")
        ((sequence,),) = desk.batcher.in_service_sequences()
        sequence.on_gap = found.append
        answer.on_head(HEAD, streamed=True)
        for seconds, tokens in ((1, 1), (1, 0), (1, 2), (1, 1)):
            await asyncio.sleep(seconds)
            answer.on_bytes(b"x", tokens)
        answer.on_answered(Answered("stop"))
        assert found == gaps
        assert desk.records["a"].first_token_at == 1

    run_virtual(run())


def test_what_the_other_server_counted_holds() -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a", "b")
        desk.answer("a", tokens=3, output_tokens=7)
        desk.answer("b", tokens=3)
        assert [desk.records[name].output_tokens for name in "ab"] == [7, 3]
        assert [desk.records[name].prompt_tokens for name in "ab"] == [10, 10]

    run_virtual(run())


@pytest.mark.parametrize(
    ("reason", "call", "tokens"),
    [
        ("length", {}, 100),
        ("stop", {}, 3),
        ("length", {"limited": False}, 3),
        ("length", {"sequences": 2}, 3),
        ("length", {"limit": 2}, 3),
    ],
)
def test_without_a_count_an_answer_that_was_cut_has_as_many_tokens_as_its_limit(
    reason: str, call: dict[str, Any], tokens: int
) -> None:
    """Of one sequence whose call has a limit: a piece may hold several tokens."""

    async def run() -> None:
        desk = Desk("continuous")
        desk.take(passed("a", **call))
        desk.answer("a", tokens=3, finish_reason=reason)
        assert desk.records["a"].output_tokens == tokens

    run_virtual(run())


@pytest.mark.parametrize(
    ("reason", "asked", "clipped"),
    [
        ("length", 4086, True),
        ("length", 101, True),
        ("length", 100, False),
        ("stop", 4086, False),
    ],
)
def test_clipped_is_what_ended_at_the_gateways_limit(
    reason: str, asked: int, clipped: bool
) -> None:
    """The limit in force is 100."""

    async def run() -> None:
        desk = Desk("continuous")
        desk.batcher.limit_tokens(100)
        desk.submit("a", asked=asked)
        desk.answer("a", finish_reason=reason)
        assert desk.records["a"].clipped == clipped

    run_virtual(run())


def test_batch_sizes_count_sequences_and_a_call_is_one_record() -> None:
    async def run() -> None:
        desk = Desk("continuous:max_batch_size=4")
        desk.submit("a", sequences=3)
        desk.submit("b", sequences=2)
        desk.submit("c")
        assert [ids for _, ids, _ in desk.engine.dispatched] == [["a"]], "b has no room, c waits"
        assert desk.batcher.queue_length == 2
        desk.answer("a")
        assert [ids for _, ids, _ in desk.engine.dispatched] == [["a"], ["b", "c"]]
        desk.answer("b")
        desk.answer("c")
        assert [desk.records[name].batch_size for name in "abc"] == [3, 3, 3]
        assert len(desk.collector.records) == 3

    run_virtual(run())


def test_a_fixed_batch_forms_until_its_sequences_are_enough() -> None:
    async def run() -> None:
        desk = Desk("fixed:batch_size=4")
        desk.submit("a", sequences=3)
        await asyncio.sleep(2)
        desk.submit("b")
        desk.answer("a")
        desk.answer("b")
        assert [desk.records[name].batch_forming_delay for name in "ab"] == [2, 0]

    run_virtual(run())


@pytest.mark.parametrize("policy", ["dynamic", "capped:max_batch_size=4", "fixed:batch_size=2"])
def test_a_padded_policy_is_served_unpadded(policy: str) -> None:
    """Each leaves when it is complete; the server is free after the last. The text stays."""

    async def run() -> None:
        desk = Desk(policy)
        desk.submit("a", "b")
        if policy != "fixed:batch_size=2":  # a alone, then what came meanwhile
            desk.answer("a")
            desk.answer("b")
            desk.submit("c", "d")
            desk.answer("c")
            desk.submit("e")
            first, second = "d", "e"
        else:
            desk.submit("e", "f")
            await asyncio.sleep(1)
            desk.answer("a")
            first, second = "b", "e"
        assert all(padded is False for _, _, padded in desk.engine.dispatched)
        assert second not in desk.engine.streams
        await asyncio.sleep(1)
        desk.answer(first)
        assert second in desk.engine.streams
        assert desk.batcher.policy_text == policy
        assert all(record.policy == policy for record in desk.collector.records)
        if policy == "fixed:batch_size=2":
            assert [desk.records[name].released_at for name in "ab"] == [1, 2]
            assert [desk.records[name].server_free_at for name in "ab"] == [2, 2]

    run_virtual(run())


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((status, "invalid_request") for status in (400, 402, 404, 406, 409, 422, 428, 499)),
        # of the gateway's own key and of the server's load: no fault of the call
        *((status, "engine_error") for status in (401, 403, 407, 408, 429)),
        *((status, "engine_error") for status in (302, 399, 500, 503)),
    ],
)
def test_an_error_of_the_other_server_is_the_clients_answer(status: int, code: str) -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a")
        answer = Refused(status, [("x", "y")], b"no")
        desk.engine.answer("a").on_refused(answer)
        client, record = desk.clients["a"], desk.records["a"]
        assert client.refused == answer
        assert client.failed == ("failed", code)
        assert (record.outcome, record.error) == ("failed", f"the server behind answered {status}")
        assert desk.batcher.failures == {code: 1}
        assert desk.batcher.in_service == 0

    run_virtual(run())


@pytest.mark.parametrize("policy", ["continuous:max_batch_size=2", "elastic:max_batch_size=2"])
def test_a_returned_call_is_the_first_of_the_queue(policy: str) -> None:
    """It goes to another server; the one that it left is free of it."""

    async def run() -> None:
        desk = Desk(policy, Scripted(servers=2, max_num_seqs=1))
        desk.submit("a", "b", "c")
        assert [(server, ids) for server, ids, _ in desk.engine.dispatched] == [
            (0, ["a"]),
            (1, ["b"]),
        ]
        await asyncio.sleep(1)
        desk.batcher.withhold({0})
        desk.engine.answer("a").on_returned("gone")
        assert desk.batcher.queue_length == 2
        assert [waiting.request.id for waiting in desk.batcher.waiting] == ["a", "c"]
        assert desk.engine.cancelled == ["a"]
        assert desk.batcher.servers == 1
        await asyncio.sleep(1)
        desk.answer("b")
        assert desk.engine.dispatched[2][:2] == (1, ["a"])
        await asyncio.sleep(1)
        desk.answer("a")
        record = desk.records["a"]
        assert (record.outcome, record.server_id) == ("completed", 1)
        assert (record.interruptions, record.preemptions) == (1, 1)
        assert (record.first_dispatched_at, record.dispatched_at) == (0, 2)
        assert (record.queueing_delay, record.service_time) == (1, 2), "waits and stints add up"
        assert desk.clients["a"].failed is None
        assert desk.engine.dispatched[3][:2] == (1, ["c"])
        desk.batcher.withhold(())
        assert desk.batcher.servers == 2

    run_virtual(run())


def test_a_server_that_takes_work_again_is_asked_for_at_once() -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.batcher.withhold({0})
        desk.submit("a")
        assert desk.engine.dispatched == []
        desk.batcher.withhold(())
        assert desk.engine.dispatched == [(0, ["a"], False)]

    run_virtual(run())


def test_a_call_is_returned_once_and_fails_the_second_time() -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a")
        desk.engine.answer("a").on_returned("the connection was reset")
        assert desk.clients["a"].dispatches == 1, "it hears once that it is in service"
        desk.engine.answer("a").on_returned("the connection was reset")
        record = desk.records["a"]
        assert desk.clients["a"].failed == ("failed", "engine_unavailable")
        assert record.error == "the connection was reset, also when it was sent again"
        assert (record.outcome, record.interruptions) == ("failed", 2)
        assert desk.batcher.idle

    run_virtual(run())


def test_a_busy_server_that_is_asked_again_gives_the_client_its_answer() -> None:
    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a")
        busy = Refused(503, [("retry-after", "1")], b"busy")
        desk.engine.answer("a").on_returned("busy", busy)
        assert desk.clients["a"].refused is None
        desk.engine.answer("a").on_returned("busy", busy)
        assert desk.clients["a"].refused == busy
        assert desk.records["a"].interruptions == 1

    run_virtual(run())


def test_the_last_of_a_batch_that_returns_frees_the_server() -> None:
    """The others of its batch have left; what it took is known."""

    async def run() -> None:
        desk = Desk("elastic:max_batch_size=2")
        desk.batcher.withhold({0})
        desk.submit("a", "b")
        desk.batcher.withhold(())
        await asyncio.sleep(1)
        desk.answer("a")
        desk.submit("c")
        desk.batcher.withhold({0})
        desk.engine.answer("b").on_returned("gone")
        assert desk.records["a"].server_free_at == 1
        assert desk.batcher.in_service == 0
        desk.batcher.withhold(())
        assert desk.engine.dispatched[-1] == (0, ["b", "c"], False)

    run_virtual(run())


async def _answered(desk: Desk) -> None:
    desk.answer("a")


async def _cancelled(desk: Desk) -> None:
    desk.clients["a"].sequence.cancel()  # type: ignore[union-attr]


async def _failed(desk: Desk) -> None:
    desk.engine.answer("a").on_refused(Refused(503, [], b""))


@pytest.mark.parametrize("end", [_answered, _cancelled, _failed])
def test_what_comes_after_the_end_changes_nothing(end: Callable[[Desk], Awaitable[None]]) -> None:
    """Each call has exactly one outcome."""

    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a")
        late: Any = desk.engine.answer("a")
        await end(desk)
        client = desk.clients["a"]
        before = client.data, client.refused, client.failed, client.head
        late.on_head([], streamed=False)
        late.on_bytes(b"late", 1)
        late.on_answered(Answered())
        late.on_refused(Refused(500, [], b"late"))
        late.on_returned("late")
        late.on_failure("late")
        assert (client.data, client.refused, client.failed, client.head) == before
        assert len(desk.collector.records) == 1
        assert desk.batcher.unanswered == desk.batcher.in_service == desk.batcher.queue_length == 0

    run_virtual(run())


def test_an_answer_that_began_is_not_continued_by_another_engine() -> None:
    """One of which no byte came is."""

    async def run() -> None:
        desk = Desk("continuous")
        desk.submit("a", "b")
        desk.engine.answer("a").on_head(HEAD, streamed=True)
        begun, fresh = (desk.clients[name].sequence for name in "ab")
        assert begun is not None
        assert fresh is not None
        assert detach(begun) == BEGUN
        assert detach(fresh) is None

    run_virtual(run())


def test_nothing_in_service_is_preempted() -> None:
    async def run() -> None:
        desk = Desk("single:order=sprpt")
        desk.submit("a")
        assert not desk.batcher.running()[0][0].preemptible

    run_virtual(run())


class Idle(Observer):
    """Notes when a server holds nothing any more."""

    def __init__(self) -> None:
        self.events: list[tuple[int, float]] = []

    def on_idle(self, server_id: int, at: float) -> None:
        self.events.append((server_id, at))


@pytest.mark.parametrize("policy", ["continuous:max_batch_size=2", "elastic:max_batch_size=2"])
def test_a_server_is_idle_when_its_last_call_returns(policy: str) -> None:
    """Who waits for an idle engine hears of it, though the call has no outcome yet."""

    async def run() -> None:
        desk, idle = Desk(policy), Idle()
        desk.batcher.observers.add(idle)
        desk.submit("a")
        waiting = asyncio.ensure_future(desk.batcher.served())
        await asyncio.sleep(1)
        desk.batcher.withhold({0})
        assert (idle.events, waiting.done()) == ([], False)
        desk.engine.answer("a").on_returned("gone")
        assert idle.events == [(0, 1.0)]
        await asyncio.sleep(0.001)
        assert waiting.done()
        assert desk.batcher.queue_length == 1

    run_virtual(run())


def test_what_a_lost_server_had_goes_on_at_once_and_what_waits_when_it_is_back() -> None:
    async def run() -> None:
        desk = Desk("single", Scripted(servers=2))
        recovery = desk.batcher.recovery
        desk.submit("a")
        assert recovery.interrupt_server(0, "gone", 3, comes_back=True) is None
        desk.submit("b")
        assert desk.engine.dispatched == [(0, ["a"], False), (1, ["a"], False)]
        recovery.resume_server(0)
        assert desk.engine.dispatched[2:] == [(0, ["b"], False)]

    run_virtual(run())


def test_a_loss_is_forgiven_to_the_server_that_died_however_often_it_did() -> None:
    """A hundred times before, of nothing."""

    async def run() -> None:
        desk = Desk("single", Scripted(servers=2))
        recovery, forgiven = desk.batcher.recovery, list[tuple[int, int]]()
        recovery.on_forgiven = lambda server_id, losses: forgiven.append((server_id, losses))
        for _ in range(100):
            recovery.interrupt_server(0, "gone", 3, comes_back=True)
            recovery.resume_server(0)
        desk.submit("deadly")
        assert recovery.interrupt_server(0, "gone", 3, comes_back=True) is None
        guilty = recovery.interrupt_server(1, "gone", 3, comes_back=True)
        assert guilty is desk.clients["deadly"].sequence
        recovery.resume_server(1)
        server_id, (proof,), _ = desk.engine.dispatched[-1]
        assert (server_id, forgiven) == (1, [])
        desk.engine.streams[proof].push([Token(5, "x")] * 16)
        assert sorted(forgiven) == [(0, 1), (1, 1)]

    run_virtual(run())
