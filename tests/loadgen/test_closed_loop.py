"""The closed loop: never more at once than users, the next request when the answer has come; and the half-closed open loop."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from loadgen.client import Target
from loadgen.job import row_of
from loadgen.run import ClosedLoop, LoadResult, run_load
from loadgen.target import LoadError
from loadgen.timetable import Timetable
from tests.loadgen.fake_server import FakeServer, answer, serving

SERVICE = 0.05


class Counting:
    """A server that takes `SERVICE` seconds and keeps the largest number of requests in it."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(SERVICE)
        self.inside -= 1
        return await answer(request, body)


def run(n: int, gap: float = 0.0, **settings: Any) -> tuple[LoadResult, Counting, FakeServer]:
    async def main() -> tuple[LoadResult, Counting, FakeServer]:
        counting = Counting()
        async with serving(counting) as server:
            table = Timetable(np.arange(n) * gap, np.full(n, 3), np.full(n, 2))
            return await run_load(Target(base_url=server.url, model="fake"), table, seed=1, **settings), counting, server

    return asyncio.run(main())


def test_users_send_one_request_after_the_other() -> None:
    result, counting, server = run(12, closed_loop=ClosedLoop(users=3))
    assert counting.most == 3
    assert len(server.bodies) == 12
    assert {r.outcome for r in result.records} == {"completed"}
    ends = sorted(r.released_at for r in result.records if r.released_at is not None)
    intended = sorted(r.intended_at for r in result.records if r.intended_at is not None)
    assert intended[3:] == ends[:-3]  # every request but the first three is intended where an answer ended
    assert result.header.configuration["loop"] == "closed"


@pytest.mark.slow
def test_a_users_next_request_is_not_late() -> None:
    """Needs a calm machine."""
    result, _, _ = run(12, closed_loop=ClosedLoop(users=3))
    assert result.lateness.p50 < 0.01


def test_think_times_pass_before_each_request() -> None:
    result, _, _ = run(4, closed_loop=ClosedLoop(users=1, think_times=np.full(4, 0.03)))
    for previous, record in zip(result.records, result.records[1:], strict=False):
        assert record.intended_at is not None
        assert previous.released_at is not None
        assert record.intended_at - previous.released_at == pytest.approx(0.03)


def test_every_row_is_sent_though_another_user_finds_none_left() -> None:
    """The last row's user still thinks when the other two have nothing more to do."""
    result, _, _ = run(10, closed_loop=ClosedLoop(users=3, think_times=np.array([0.0] * 9 + [0.3])))
    assert [row_of(record) for record in result.records] == list(range(10))


def test_a_user_whose_time_is_over_does_not_end_the_others_time() -> None:
    """The first user would think beyond the duration; the other one goes on until it."""
    result, _, _ = run(50, closed_loop=ClosedLoop(users=2, think_times=np.array([90.0] + [0.02] * 49), duration=3.0))
    assert row_of(result.records[0]) == 1
    assert len(result.records) >= 2


def test_nobody_sends_after_the_duration() -> None:
    result, _, server = run(1000, closed_loop=ClosedLoop(users=2, duration=1.5))
    instants = [record.intended_at for record in result.records if record.intended_at is not None]
    assert max(instants) - min(instants) < 1.5
    assert 2 <= len(result.records) <= 62  # a machine that stands still sends fewer, never more
    assert len(server.bodies) == len(result.records)
    assert not result.interrupted


def test_an_interrupt_keeps_the_records_of_a_closed_loop() -> None:
    async def main() -> LoadResult:
        async with serving() as server:
            table = Timetable(np.zeros(5000), np.full(5000, 3), np.full(5000, 2))
            closed = ClosedLoop(users=2)
            sending = asyncio.create_task(run_load(Target(base_url=server.url, model="fake"), table, seed=1, closed_loop=closed))
            await asyncio.sleep(0.6)
            sending.cancel()
            return await sending

    result = asyncio.run(main())
    assert result.interrupted
    assert 2 <= len(result.records) < 5000


def test_a_limit_in_an_open_loop_counts_the_wait_as_delay_and_says_so() -> None:
    """Ten at once through one place: the last waits nine service times, and its delay says so."""
    result, counting, _ = run(10, max_concurrency=1)
    assert counting.most == 1
    assert result.held == 9
    last = max(result.records, key=lambda r: r.sent_at or 0.0)
    assert last.sent_at is not None
    assert last.intended_at is not None
    assert last.sent_at - last.intended_at > 8.9 * SERVICE
    assert last.sojourn_time is not None
    assert last.sojourn_time > 9.9 * SERVICE
    assert last.held_until is not None
    assert last.held_until - last.intended_at > 8.9 * SERVICE
    assert sum(record.held_until is not None for record in result.records) == 9
    late = [(r.sent_at or 0.0) - max(r.intended_at or 0.0, r.held_until or 0.0) for r in result.records]
    assert result.lateness.max == pytest.approx(max(late))  # the sender's own, without the wait
    assert min(late) >= 0


def test_a_limit_that_nobody_meets_holds_nobody() -> None:
    result, _, _ = run(5, max_concurrency=5)
    assert result.held == 0


def test_who_waited_for_a_place_until_the_end_has_a_record() -> None:
    result, _, server = run(6, max_concurrency=1, drain_limit=0.02)
    assert len(result.records) == 6
    assert len(server.bodies) < 6
    unsent = [r for r in result.records if r.sent_at is None]
    assert unsent
    assert {(r.outcome, r.error) for r in unsent} == {("cancelled", "the run ended before it was sent")}


def test_more_users_than_files_is_one_line() -> None:
    with pytest.raises(LoadError, match="ulimit"):
        run(3, closed_loop=ClosedLoop(users=1 << 30))


def test_a_bug_in_one_request_ends_the_run_loudly() -> None:
    class Broken(Target):
        @property
        def url(self) -> str:
            raise RuntimeError("a bug")

    async def main() -> None:
        table = Timetable(np.zeros(4), np.full(4, 3), np.full(4, 2))
        await run_load(Broken(base_url="http://127.0.0.1:9", model="m"), table, seed=1, closed_loop=ClosedLoop(users=2))

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(main())
