"""Runs one cell of a sweep: switches the gateway to the cell's policy, sends the timetable, watches
the run, and collects the records of both sides.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from kendall.loadgen.compare.client_side import inferred
from kendall.loadgen.datasets import Prompts
from kendall.loadgen.gateway.gateway_process import GatewayClient, GatewayError
from kendall.loadgen.measures.stability import Growth, GrowthWatch
from kendall.loadgen.sending.client.server_queue import QueueWatch
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.job import Counters, SendOptions
from kendall.loadgen.sending.run import LoadResult, RunOutput, run_load
from kendall.loadgen.sweep.gateway import (
    Note,
    header_of,
    let_remainder_go,
    records_since,
    until_idle,
)
from kendall.loadgen.sweep.grid import SweepCell
from kendall.loadgen.sweep.status import Status
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.measurement.record import Header, Record

SAMPLE = 0.1  # seconds between looks at the number in the system
# seconds between flushes of the gateway's run file: a killed gateway loses the records of this time
FLUSH = 1.0
ANSWER_LIMIT = 10.0  # seconds that the gateway has for an answer
MISSED = 2  # failed looks in a row after which the gateway is taken for lost
Ended = Literal["complete", "unstable", "lost", "interrupted"]


@dataclass(frozen=True, slots=True)
class StartedCell:
    """Where the gateway's records of a cell are: their epoch, and the run file from `offset` on."""

    epoch: int
    record_file: Path
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """The result of one attempt at a cell."""

    cell: SweepCell
    ended: Ended
    why: str | None
    load: LoadResult | None
    header: Header  # the gateway's, with what was asked
    records: list[Record]  # the gateway's
    growth: Growth | None


async def begin(
    client: GatewayClient, record_file: Path, cell: SweepCell, note: Note
) -> StartedCell:
    """Wait until the gateway is idle, then put the cell's policy and token limit in force. Raises
    GatewayError.
    """
    await until_idle(client, note)
    offset = os.stat(record_file).st_size
    in_force = await client.ask(
        "PUT", "/admin/policy", {"policy": cell.policy, "max_output_tokens": cell.max_output_tokens}
    )
    return StartedCell(int(in_force["epoch"]), record_file, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSender:
    """Sends one cell: what to send, where to, and whether to end it early."""

    client: GatewayClient
    begun: StartedCell
    cell: SweepCell
    timetable: Timetable
    target: Target
    seed: int
    configuration: Mapping[str, Any]  # for the headers
    progress: Status
    stop_unstable: bool
    prompts: Prompts | None = None  # for the timetable's rows; None: random tokens
    path: Path | None = None  # the sender's run file, written as the run goes on
    processes: int = 1
    slots: int | None = None  # of a server that records no dispatch
    why_lost: Callable[[], Awaitable[str | None]] | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The configuration that goes into the run file's header on both sides."""
        cell = self.cell
        asked = {
            "policy": cell.policy,
            "load": cell.load,
            "request_rate": cell.rate,
            "max_output_tokens": cell.max_output_tokens,
        }
        return asked | dict(self.configuration)

    async def run(self) -> CellRun:
        """Send the cell and collect its records. Ends early where the gateway is lost, the task is
        cancelled or, with `stop_unstable`, the queue grows without end.

        A cancellation while the cell is being sent is an ending, not an exception: what was
        measured is returned. Raises GatewayError where nothing could be sent.
        """
        guard = CellGuard(
            self.client,
            self.progress,
            self.cell.rate,
            stop_unstable=self.stop_unstable,
            why_lost=self.why_lost,
        )
        load, ended, why = await self._until_end(guard)
        try:
            async with asyncio.timeout(None if ended in ("complete", "unstable") else ANSWER_LIMIT):
                # the gateway flushes its run file when it is asked
                await until_idle(self.client, self.progress.note)
        except (GatewayError, TimeoutError) as error:
            if ended in ("complete", "unstable"):
                known = await self.why_lost() if self.why_lost else None
                ended, why = "lost", known or str(error)
        header, records = self._served(load)
        return CellRun(
            cell=self.cell,
            ended=ended,
            why=why,
            load=load,
            header=header,
            records=records,
            growth=guard.growth,
        )

    def _served(self, load: LoadResult | None) -> tuple[Header, list[Record]]:
        """The gateway's records, or what the clients' own tell of a server that has none."""
        if self.slots is None:
            return gateway_side(self.begun, self.asked, self.seed)
        if load is None:
            return Header(writer="load", configuration=self.asked, seed=self.seed), []
        return load.header, inferred(load.records, self.slots).records

    async def _until_end(self, guard: CellGuard) -> tuple[LoadResult | None, Ended, str | None]:
        watch = None if self.slots is None else await QueueWatch.begin(self.target)
        load = run_load(
            self.target,
            self.timetable,
            seed=self.seed,
            prompts=self.prompts,
            options=SendOptions(processes=self.processes),
            output=RunOutput(
                path=self.path,
                configuration=self.asked,
                at_end=None if watch is None else watch.at_end,
                progress=guard,
            ),
        )
        sending, watching = asyncio.create_task(load), asyncio.create_task(guard.run())
        ended: Ended = "complete"
        why: str | None = None
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not sending.done():
                ended, why = watching.result()
        except asyncio.CancelledError:
            ended, why = "interrupted", "interrupted"
        watching.cancel()
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        try:
            result = await sending
        except asyncio.CancelledError:  # before it began
            return None, ended, why
        except LoadError as error:
            raise GatewayError(str(error)) from None
        if result.interrupted and ended == "complete":
            ended, why = "interrupted", "interrupted"
        return result, ended, why


def gateway_side(
    begun: StartedCell, asked: Mapping[str, Any], seed: int
) -> tuple[Header, list[Record]]:
    """The gateway's records of a cell, with a header that says what was asked."""
    header = header_of(begun.record_file)
    header = Header(
        **{
            **msgspec.structs.asdict(header),
            "configuration": header.configuration | dict(asked),
            "seed": seed,
        }
    )
    return header, records_since(begun.record_file, begun.offset, begun.epoch)


class CellGuard:
    """Watches a running cell by its counters: whether the number in the system grows without end,
    and whether the gateway still answers.
    """

    def __init__(
        self,
        client: GatewayClient,
        status: Status,
        rate: float,  # the cell's arrival rate
        *,
        stop_unstable: bool,
        why_lost: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self._client, self._status, self._why_lost = client, status, why_lost
        self._stop_unstable = stop_unstable
        self._watch = GrowthWatch(rate)
        self._counters: Counters | None = None  # the run's, once it has begun
        self._missed = 0

    @property
    def growth(self) -> Growth | None:
        """The growth of the number in the system so far; None where it is not known yet."""
        return self._watch.so_far()

    async def show(self, counters: Counters) -> None:
        """Give the guard the run's counters, and show them until cancelled."""
        self._counters = counters
        await self._status.show(counters)

    async def run(self) -> tuple[Ended, str]:
        """Wait until the cell should be ended early; returns how it ends, and why."""
        loop = asyncio.get_running_loop()
        began, flush_at = loop.time(), loop.time() + FLUSH
        while True:
            await asyncio.sleep(SAMPLE)
            counters = self._counters
            # between the first arrival and the last
            if counters is not None and 0 < counters.sent < counters.asked:
                unanswered = counters.sent - counters.completed - counters.other
                growth = self._watch.observe(loop.time() - began, unanswered)
                if growth is not None and growth.unstable and self._stop_unstable:
                    return "unstable", str(growth)
            if loop.time() >= flush_at:
                flush_at = loop.time() + FLUSH
                if (why := await self._lost()) is not None:
                    return "lost", why

    async def _lost(self) -> str | None:
        """Why the gateway is taken for lost; None while it is not. Each look also has it flush its
        run file and, once all is sent, dispatch a remainder that would wait for ever.
        """
        why, counters = None, self._counters
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                state = await self._client.ask("GET", "/admin/state")  # flushes its run file
                if counters is not None and counters.sent >= counters.asked:
                    await let_remainder_go(self._client, state, self._status.note)
        except (GatewayError, TimeoutError) as error:
            why = str(error) or f"no answer within {ANSWER_LIMIT:.0f} s"
        if self._why_lost is not None:
            why = await self._why_lost() or why
        self._missed = self._missed + 1 if why else 0
        return why if self._missed >= MISSED else None
