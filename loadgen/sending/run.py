"""A load run: a timetable sent to a target, every answer recorded, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from loadgen.datasets import Prompts, random_prompts
from loadgen.measures.metrics import LATENESS, values
from loadgen.sending.client.client import run_prefix
from loadgen.sending.client.target import LoadError, Target
from loadgen.sending.job import (
    OPEN_LOOP,
    ClosedLoopUsers,
    Counters,
    SendingJob,
    SendOptions,
    row_of,
)
from loadgen.sending.operating_system import raise_file_limit, real_time_permitted
from loadgen.sending.run_writer import RunWriter, replace_run
from loadgen.sending.senders import send_by_processes
from loadgen.sending.sending import send_job
from queueing.arrivals.timetable import Timetable
from queueing.measurement.machine import hardware, versions
from queueing.measurement.paths import cannot_write
from queueing.measurement.record import Header, Record
from queueing.measurement.statistics import Summary, summarise

__all__ = [
    "ClosedLoopUsers",
    "Counters",
    "LoadResult",
    "ProgressDisplay",
    "RunOutput",
    "SendOptions",
    "lateness",
    "run_load",
]

VOCABULARY = range(
    10, 250
)  # above the special tokens of common vocabularies, below the end of the smallest (bytes)
START_DELAY = 0.2  # seconds between the start of the clock and instant 0 of the timetable


class ProgressDisplay(Protocol):
    """Shows the counters now and then until it is cancelled."""

    async def show(self, counters: Counters) -> None:
        """Does not end by itself."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was sent and what came back, in the order of the timetable."""

    header: Header
    records: list[Record]
    lateness: Summary  # of the sender, seconds
    interrupted: bool
    # requests that waited for a place among `max_concurrency`: the loop was partly closed
    held: int = 0
    missing: tuple[str, ...] = ()  # what senders that died have left untold, one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """What is written and shown of a run."""

    path: Path | None = None  # a run file that grows with the run
    configuration: Mapping[str, Any] = field(default_factory=dict)  # for the header
    progress: ProgressDisplay | None = None


NO_OUTPUT = RunOutput()


async def run_load(
    target: Target,
    timetable: Timetable,
    *,
    seed: int,
    prompts: Prompts | None = None,
    options: SendOptions = OPEN_LOOP,
    output: RunOutput = NO_OUTPUT,
) -> LoadResult:
    """Send a timetable. Requests unanswered `drain_limit` seconds after the last was sent are
    cancelled. `max_errors` failures in a row end the run, and `missing` says so.

    A cancellation (Ctrl-C) ends the run early and keeps its records. Runs on asyncio's own event
    loop, not on uvloop. Raises LoadError.
    """
    job = SendingJob(
        target=target,
        timetable=timetable,
        prompts=prompts or random_prompts(timetable, seed, VOCABULARY),
        rows=np.arange(len(timetable)),
        largest=int(timetable.output_tokens.max()),
        seed=seed,
        prefix=run_prefix(),
        options=options,
    )
    raise_file_limit(options.most_at_once)
    header = _header(job, output.configuration)
    counters = Counters(asked=len(timetable))
    async with _shown(output.progress, counters):
        records, interrupted, missing = await _send(job, header, counters, output.path)
    records.sort(key=row_of)
    header = _ended(header, interrupted=interrupted, missing=missing, recorded=len(records))
    missing += _replaced(output.path, header, records)
    return LoadResult(header, records, lateness(records), interrupted, held_back(records), missing)


async def _send(
    job: SendingJob, header: Header, counters: Counters, path: Path | None
) -> tuple[list[Record], bool, tuple[str, ...]]:
    """The records, whether the run was interrupted, and what is missing."""
    if job.options.processes != 1:
        return await send_by_processes(job, header, counters, path)
    records, interrupted = await _send_here(job, header, counters, path)
    return records, interrupted, tuple(filter(None, [counters.missing()]))


def _replaced(path: Path | None, header: Header, records: list[Record]) -> tuple[str, ...]:
    """Why the whole run could not be written."""
    if path is None:
        return ()
    try:
        replace_run(path, header, records)
    except OSError as error:
        why = cannot_write(path, error)
        already = any(why in sentence for sentence in header.configuration["missing"])
        return () if already else (why,)
    return ()


def _ended(header: Header, *, interrupted: bool, missing: tuple[str, ...], recorded: int) -> Header:
    """The header of a run that is over: one that was killed has none of these keys."""
    said = {"interrupted": interrupted, "missing": list(missing), "recorded": recorded}
    return msgspec.structs.replace(header, configuration=header.configuration | said)


async def _send_here(
    job: SendingJob, header: Header, counters: Counters, path: Path | None
) -> tuple[list[Record], bool]:
    records: list[Record] = []
    start_at = asyncio.get_running_loop().time() + START_DELAY
    if path is None:
        return records, await send_job(job, start_at, counters, records.append)
    with _writer(path, header) as writer:

        def keep(record: Record) -> None:
            records.append(record)
            writer.keep(record)

        return records, await send_job(job, start_at, counters, keep)


def _writer(path: Path, header: Header) -> RunWriter:
    try:
        return RunWriter(path, header)
    except OSError as error:
        raise LoadError(
            f"{cannot_write(path, error)}; --output FILE names another place, --no-save writes no "
            "file"
        ) from None


@asynccontextmanager
async def _shown(progress: ProgressDisplay | None, counters: Counters) -> AsyncIterator[None]:
    shown = asyncio.create_task(progress.show(counters)) if progress else None
    try:
        yield
    finally:
        if shown:
            shown.cancel()
            with suppress(asyncio.CancelledError):
                await shown


def held_back(records: Iterable[Record]) -> int:
    """How many requests waited for a place among those at once; what was never sent waited until
    the end.
    """
    return sum(record.held_until is not None or record.sent_at is None for record in records)


def lateness(records: Iterable[Record]) -> Summary:
    """How late the sender was, seconds."""
    return summarise(values(LATENESS, records))


def _header(job: SendingJob, configuration: Mapping[str, Any]) -> Header:
    target = job.target
    limit = target.limit(job.largest, job.largest)
    asked = {key: value for key, value in asdict(target).items() if key != "api_key"}
    sent = {
        "max_tokens": limit
        if limit == target.limit(int(job.timetable.output_tokens.min()), job.largest)
        else None,  # None: each its own
        "lengths": target.lengths,
        "num_prompts": len(job),
        "processes": job.options.processes,
        "max_concurrency": job.options.most_at_once,
        "loop": "closed" if job.options.closed_loop else "open",
        "real_time": real_time_permitted(),  # whether the system wakes the senders at once
    }
    return Header(
        writer="load",
        configuration={**asked, **sent, **configuration},
        seed=job.seed,
        versions=versions(),
        hardware=hardware(),
    )
