"""The closed loop: never more at once than users, the next request when the answer has come; and
the half-closed open loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import kendall.loadgen.sending.closed_loop
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.job import ClosedLoopUsers, Counters, SendOptions, row_of
from kendall.loadgen.sending.pacing import Clock, Spin, TimerFd
from kendall.loadgen.sending.run import LoadResult, run_load
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.measurement.record import Record
from tests.eventually import eventually
from tests.loadgen.fake_server import FakeServer, answer, serving
from tests.virtual_time import run_virtual

SERVICE = 0.05


class Counting:
    """A server that takes `SERVICE` seconds and keeps the largest number of requests in it; the
    first `together` wait for each other.
    """

    def __init__(self, together: int = 1) -> None:
        self.inside = self.most = 0
        self._together, self._met = together, asyncio.Event()

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside >= self._together:
            self._met.set()
        await asyncio.wait_for(self._met.wait(), 60)
        await asyncio.sleep(SERVICE)
        self.inside -= 1
        return await answer(request, body)


def run(
    n: int, gap: float = 0.0, together: int = 1, **settings: Any
) -> tuple[LoadResult, Counting, FakeServer]:
    async def main() -> tuple[LoadResult, Counting, FakeServer]:
        counting = Counting(together)
        async with serving(counting) as server:
            table = Timetable(np.arange(n) * gap, np.full(n, 3), np.full(n, 2))
            return (
                await run_load(
                    Target(base_url=server.url, model="fake"),
                    table,
                    seed=1,
                    options=SendOptions(**settings),
                ),
                counting,
                server,
            )

    return asyncio.run(main())


def test_users_send_one_request_after_the_other() -> None:
    result, counting, server = run(12, together=3, closed_loop=ClosedLoopUsers(users=3))
    assert counting.most == 3
    assert len(server.bodies) == 12
    assert {r.outcome for r in result.records} == {"completed"}
    ends = sorted(r.released_at for r in result.records if r.released_at is not None)
    intended = sorted(r.intended_at for r in result.records if r.intended_at is not None)
    assert (
        intended[3:] == ends[:-3]
    )  # every request but the first three is intended where an answer ended
    assert result.header.configuration["loop"] == "closed"


@pytest.mark.slow
def test_a_users_next_request_is_not_late() -> None:
    """Needs a calm machine."""
    result, _, _ = run(12, closed_loop=ClosedLoopUsers(users=3))
    assert result.lateness.p50 < 0.01


def test_think_times_pass_before_each_request() -> None:
    result, _, _ = run(4, closed_loop=ClosedLoopUsers(users=1, think_times=np.full(4, 0.03)))
    for previous, record in zip(result.records, result.records[1:], strict=False):
        assert record.intended_at is not None
        assert previous.released_at is not None
        assert record.intended_at - previous.released_at == pytest.approx(0.03)


@pytest.mark.slow
def test_think_times_run_on_the_senders_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm that rings at once: a user who sleeps by another clock would ask for none, and
    take hours.
    """
    clocks: list[Clock] = []
    asked: list[float] = []

    class AtOnce:
        def __init__(self, clock: Clock) -> None:
            clocks.append(clock)

        async def until(self, instant: float) -> None:
            asked.append(instant)

        def close(self) -> None: ...

    monkeypatch.setattr(kendall.loadgen.sending.closed_loop, "Alarms", AtOnce)
    thinking = np.full(4, 3600.0)  # no instant is over before it is asked for
    result, _, _ = run(4, closed_loop=ClosedLoopUsers(users=1, think_times=thinking))
    assert [type(clock) for clock in clocks] == [TimerFd if sys.platform == "linux" else Spin]
    assert asked == [record.intended_at for record in result.records]


@pytest.mark.slow
def test_every_row_is_sent_though_another_user_finds_none_left() -> None:
    """The last row's user still thinks when the other two have nothing more to do."""
    result, _, _ = run(
        10, closed_loop=ClosedLoopUsers(users=3, think_times=np.array([0.0] * 9 + [0.3]))
    )
    assert [row_of(record) for record in result.records] == list(range(10))


def test_a_user_whose_time_is_over_does_not_end_the_others_time() -> None:
    """The first user would think beyond the duration; the other one goes on, here until it has
    sent two.
    """
    closed = ClosedLoopUsers(users=2, think_times=np.array([600.0] + [0.02] * 49), duration=300.0)
    result = interrupted_after(2, Timetable(np.zeros(50), np.full(50, 3), np.full(50, 2)), closed)
    assert row_of(result.records[0]) == 1
    assert len(result.records) >= 2


class Prompt:
    """Stands for requests in flight on virtual time, whose every answer takes `SERVICE` seconds;
    and for their job.
    """

    def __init__(self, closed: ClosedLoopUsers) -> None:
        self.job, self.options = self, SendOptions(closed_loop=closed)
        ones = np.ones(len(self), dtype=np.int64)
        self.timetable = Timetable(np.zeros(len(self)), ones, ones)
        self.intended: list[float] = []
        self.counters = Counters(asked=len(self))

    def __len__(self) -> int:
        return 1000

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        return asyncio.create_task(work)

    def exchange(self, index: int, instant: float) -> int:
        self.intended.append(instant)
        return index

    async def send(self, index: int) -> Record:
        await asyncio.sleep(SERVICE)
        return Record(
            request_id=f"r-{index}",
            outcome="completed",
            released_at=asyncio.get_running_loop().time(),
        )


def test_users_send_until_the_duration_is_over() -> None:
    in_flight = Prompt(ClosedLoopUsers(users=2, duration=1.52))

    async def main() -> None:
        await kendall.loadgen.sending.closed_loop.closed_loop(in_flight, 0.0)  # type: ignore[arg-type]
        await asyncio.sleep(10.0)  # until the last is answered, and longer

    run_virtual(main())
    assert in_flight.intended == pytest.approx(np.repeat(np.arange(31) * SERVICE, 2))


@pytest.mark.slow
def test_nobody_sends_after_the_duration() -> None:
    result, _, server = run(1000, closed_loop=ClosedLoopUsers(users=2, duration=1.5))
    instants = [record.intended_at for record in result.records if record.intended_at is not None]
    assert not instants or max(instants) - min(instants) < 1.5
    assert len(result.records) <= 62  # a machine that stands still sends fewer, or none, never more
    assert len(server.bodies) == len(result.records)
    assert not result.interrupted


def interrupted_after(requests: int, table: Timetable, closed: ClosedLoopUsers) -> LoadResult:
    """A run that is cancelled when the server has got so many."""

    async def main() -> LoadResult:
        async with serving() as server:
            sending = asyncio.create_task(
                run_load(
                    Target(base_url=server.url, model="fake"),
                    table,
                    seed=1,
                    options=SendOptions(closed_loop=closed),
                )
            )
            await eventually(lambda: len(server.bodies) >= requests)
            sending.cancel()
            return await sending

    return asyncio.run(main())


@pytest.mark.slow
def test_an_interrupt_keeps_the_records_of_a_closed_loop() -> None:
    result = interrupted_after(
        2, Timetable(np.zeros(5000), np.full(5000, 3), np.full(5000, 2)), ClosedLoopUsers(users=2)
    )
    assert result.interrupted
    assert 2 <= len(result.records) < 5000


@pytest.mark.slow
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
    late = [
        (r.sent_at or 0.0) - max(r.intended_at or 0.0, r.held_until or 0.0) for r in result.records
    ]
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
    assert {(r.outcome, r.error) for r in unsent} == {
        ("cancelled", "the run ended before it was sent")
    }


def test_more_users_than_files_is_one_line() -> None:
    with pytest.raises(LoadError, match="ulimit"):
        run(3, closed_loop=ClosedLoopUsers(users=1 << 30))


def test_a_bug_in_one_request_ends_the_run_loudly() -> None:
    class Broken(Target):
        @property
        def url(self) -> str:
            raise RuntimeError("a bug")

    async def main() -> None:
        table = Timetable(np.zeros(4), np.full(4, 3), np.full(4, 2))
        await run_load(
            Broken(base_url="http://127.0.0.1:9", model="m"),
            table,
            seed=1,
            options=SendOptions(closed_loop=ClosedLoopUsers(users=2)),
        )

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(main())


def test_failures_end_a_run_only_where_so_many_follow_one_another() -> None:
    """Two, then an answer, then three: the seventh of ten is not sent."""
    broken = {0, 1, 3, 4, 5, 6}

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.bodies) - 1 in broken:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        return await answer(request, body)

    server: FakeServer

    async def main() -> LoadResult:
        nonlocal server
        async with serving(handler) as server:
            table = Timetable(np.zeros(10), np.full(10, 3), np.full(10, 2))
            target = Target(base_url=server.url, model="fake")
            return await run_load(
                target,
                table,
                seed=1,
                options=SendOptions(closed_loop=ClosedLoopUsers(users=1), max_errors=3),
            )

    result = asyncio.run(main())
    sent = [record for record in result.records if record.sent_at is not None]
    assert [record.outcome for record in sent] == [
        *("failed", "failed", "completed", "failed", "failed", "failed")
    ]
