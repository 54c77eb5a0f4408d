"""Several senders on one timetable: the same requests from one instant, merged; a death or
Ctrl-C keeps what was written.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import kendall.loadgen.sending.senders
from kendall.loadgen.datasets import Prompts
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.job import ClosedLoopUsers, SendingJob, SendOptions, row_of
from kendall.loadgen.sending.run import LoadResult, RunOutput, run_load
from kendall.loadgen.sending.senders import shares
from kendall.queueing.arrivals.timetable import Timetable, draw_prompts
from kendall.queueing.measurement.record import Header, read_run
from tests.eventually import eventually
from tests.loadgen import fake_server
from tests.loadgen.fake_server import FakeServer, serving
from tests.loadgen.growing import completed_in


def timetable(n: int = 40, gap: float = 0.01) -> Timetable:
    return Timetable(
        np.arange(n) * gap, np.arange(n) % 7 + 1, np.arange(n) % 5 + 1, np.arange(n) + 10
    )


async def send(
    server: FakeServer,
    processes: int,
    table: Timetable | None = None,
    path: Path | None = None,
    **settings: Any,
) -> LoadResult:
    return await run_load(
        Target(base_url=server.url, model="fake"),
        table or timetable(),
        seed=5,
        options=SendOptions(processes=processes, **settings),
        output=RunOutput(path=path),
    )


@pytest.mark.parametrize(
    ("limit", "processes", "each"), [(0, 2, 0), (1, 2, 1), (2, 2, 1), (3, 2, 2), (7, 3, 3)]
)
def test_each_sender_ends_at_its_share_of_the_failures_and_at_one_at_least(
    limit: int, processes: int, each: int
) -> None:
    table = timetable()
    job = SendingJob(
        target=Target(base_url="http://127.0.0.1:9", model="fake"),
        timetable=table,
        prompts=Prompts(draw_prompts(table, 5, range(3, 500)), "exact"),
        rows=np.arange(len(table)),
        largest=5,
        seed=5,
        prefix="run",
        options=SendOptions(processes=processes, max_errors=limit),
    )
    assert [share.options.max_errors for share in shares(job)] == [each] * processes


@pytest.mark.slow
def test_each_request_says_whose_it_is() -> None:
    """In its header and in its record, from several processes too."""
    flows = np.array(["heavy", "light"])[np.arange(40) % 3 // 2]
    named: dict[int, str | None] = {}

    async def noting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        named[fake_server.row_of(request)] = request.headers.get("x-llm-d-inference-fairness-id")
        return await fake_server.answer(request, body)

    async def main(table: Timetable) -> LoadResult:
        async with serving(noting) as server:
            return await send(server, 2, table)

    result = asyncio.run(main(dataclasses.replace(timetable(), flow=flows)))
    assert [named[row] for row in range(40)] == flows.tolist()
    assert [record.flow for record in result.records] == flows.tolist()
    result = asyncio.run(main(timetable()))
    assert set(named.values()) == {None}
    assert {record.flow for record in result.records} == {None}


async def received(server: FakeServer, count: int) -> None:
    await eventually(lambda: len(server.bodies) >= count)


def run(
    processes: int, table: Timetable | None = None, **settings: Any
) -> tuple[LoadResult, FakeServer]:
    async def main() -> tuple[LoadResult, FakeServer]:
        async with serving() as server:
            return await send(server, processes, table, **settings), server

    return asyncio.run(main())


@pytest.mark.slow
def test_any_number_of_processes_sends_the_same_requests_at_the_same_instants() -> None:
    found = {}
    for processes in (1, 3):
        result, server = run(processes)
        assert [row_of(record) for record in result.records] == list(range(40))
        assert [r.output_tokens for r in result.records] == timetable().output_tokens.tolist()
        intended = np.array([r.intended_at for r in result.records], dtype=np.float64)
        assert np.diff(intended) == pytest.approx(0.01)
        assert {r.outcome for r in result.records} == {"completed"}
        assert result.missing == ()
        found[processes] = sorted(map(repr, server.bodies))
        assert [r.sender_id for r in result.records] == [row % processes for row in range(40)]
    assert found[1] == found[3]


@pytest.mark.slow
def test_a_senders_death_loses_only_what_it_had_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two senders is killed in mid-run: its first records and all of the other's are
    there, and it is said.

    It waits for its last twenty answers when it is killed.
    """
    started: list[kendall.loadgen.sending.senders.Sender] = []
    begin = kendall.loadgen.sending.senders.Sender.begin

    def watched(sender: kendall.loadgen.sending.senders.Sender, start_at: float) -> None:
        begin(sender, start_at)
        started.append(sender)

    monkeypatch.setattr(kendall.loadgen.sending.senders.Sender, "begin", watched)

    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if fake_server.row_of(request) in range(20, 60, 2):
            await asyncio.Event().wait()
        return await fake_server.answer(request, body)

    async def main() -> LoadResult:
        async with serving(held) as server:
            sending = asyncio.create_task(
                send(server, 2, timetable(60, 0.02), path=tmp_path / "run.jsonl")
            )
            await eventually(lambda: completed_in(tmp_path / "run.sender0.jsonl") == 10, seconds=60)
            process = started[0]._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            return await sending

    result = asyncio.run(main())
    of = {sender: [r for r in result.records if r.sender_id == sender] for sender in (0, 1)}
    assert len(of[1]) == 30
    assert len(of[0]) == 10
    assert not result.interrupted
    assert len(result.missing) == 1
    assert "sender 0 ended by SIGKILL" in result.missing[0]
    assert "20 of its 30 requests" in result.missing[0]
    assert read_run(tmp_path / "run.jsonl")[1] == result.records
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl"]


@pytest.mark.slow
def test_an_interrupt_ends_all_senders_and_keeps_the_records() -> None:
    async def main() -> LoadResult:
        async with serving() as server:
            sending = asyncio.create_task(send(server, 2, timetable(2000, 0.02)))
            await eventually(
                lambda: len(server.rows) >= 20 and {row % 2 for row in server.rows} == {0, 1}
            )
            sending.cancel()
            return await sending

    result = asyncio.run(main())
    assert result.interrupted
    assert 20 <= len(result.records) < 500
    assert {r.sender_id for r in result.records} == {0, 1}
    assert result.missing == ()


def test_an_interrupt_before_the_first_request_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The senders are there, and were not told to begin."""
    ready: list[kendall.loadgen.sending.senders.Sender] = []
    start = kendall.loadgen.sending.senders.Sender.start

    async def held(sender: kendall.loadgen.sending.senders.Sender, header: Header) -> None:
        await start(sender, header)
        ready.append(sender)
        await asyncio.Event().wait()

    monkeypatch.setattr(kendall.loadgen.sending.senders.Sender, "start", held)

    async def main() -> LoadResult:
        async with serving() as server:
            sending = asyncio.create_task(send(server, 2))
            await eventually(lambda: len(ready) == 2)
            sending.cancel()
            return await sending

    result = asyncio.run(main())
    assert result.interrupted
    assert (result.records, result.missing) == ([], ())


def test_the_parents_death_ends_the_senders_and_leaves_their_files(tmp_path: Path) -> None:
    """Nothing but the end of standard input tells them."""

    async def main() -> None:
        async with serving() as server:
            target = Target(base_url=server.url, model="fake")
            table, prompts = (
                timetable(500, 0.02),
                kendall.loadgen.sending.run.random_prompts(timetable(500), 5, range(10, 99)),
            )
            job = kendall.loadgen.sending.job.SendingJob(
                target=target,
                timetable=table,
                prompts=prompts,
                rows=np.arange(500),
                largest=5,
                seed=5,
                prefix="load-x",
            )
            sender = kendall.loadgen.sending.senders.Sender(job, tmp_path / "run.jsonl")
            assert sender.records() == [], "it has no file yet"
            sender.file.touch()
            assert sender.records() == [], "nor a line in it"
            await sender.start(kendall.loadgen.sending.run.Header(writer="load"))
            sender.begin(asyncio.get_running_loop().time() + 0.05)
            await received(server, 10)
            await sender.stop()
            assert sender.interrupted
            assert sender.missing() is None

    asyncio.run(main())
    header, records = read_run(tmp_path / "run.sender0.jsonl")
    assert header.writer == "load"
    assert len(records) >= 10


@pytest.mark.slow
def test_a_tally_and_limits_are_split_and_added() -> None:
    result, _ = run(2, timetable(20, 0.0), max_concurrency=2)
    assert len(result.records) == 20
    assert result.held > 0
    result, _ = run(2, timetable(20, 0.0), closed_loop=ClosedLoopUsers(users=3))
    assert {r.outcome for r in result.records} == {"completed"}
    with pytest.raises(LoadError, match="at least one for each"):
        run(3, closed_loop=ClosedLoopUsers(users=2))


def test_a_sender_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(LoadError, match=r"sender [01] did not start: it said nothing"):
        run(2)
