"""A load run: a timetable sent to a target, every answer recorded, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from kendall.loadgen.datasets import Prompts, random_prompts
from kendall.loadgen.measures.metrics import LATENESS, values
from kendall.loadgen.sending.client.client import run_prefix
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.job import (
    OPEN_LOOP,
    Counters,
    SendingJob,
    SendOptions,
    order_of,
)
from kendall.loadgen.sending.operating_system import raise_file_limit, real_time_permitted
from kendall.loadgen.sending.run_writer import RunWriter, replace_run
from kendall.loadgen.sending.senders import send_by_processes
from kendall.loadgen.sending.sending import send_job
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.measurement.machine import hardware, versions
from kendall.queueing.measurement.paths import cannot_write
from kendall.queueing.measurement.record import Header, Record
from kendall.queueing.measurement.statistics import Summary, summarise

# above the special tokens of common vocabularies, below the end of the smallest (bytes)
VOCABULARY = range(10, 250)
# fields of a target that a run file does not have as they are: a value may be a key
UNSAID = frozenset({"api_key", "headers", "extra_body", "models"})
START_DELAY = 0.2  # seconds between the start of the clock and instant 0 of the timetable


class ProgressDisplay(Protocol):
    """Shows the counters now and then until it is cancelled."""

    async def show(self, counters: Counters) -> None:
        """Does not end by itself."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records of a run in the order of its timetable."""

    header: Header
    records: list[Record]
    lateness: Summary  # of the sender, seconds
    interrupted: bool
    # requests that waited for a place among `max_concurrency`: the loop was partly closed
    held: int = 0
    missing: tuple[str, ...] = ()  # what is not recorded, one sentence for each cause


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """The run file, its header's configuration, and the progress display of a run."""

    path: Path | None = None  # a run file that grows with the run
    configuration: Mapping[str, Any] = field(default_factory=dict)  # for the header
    # more of it, asked for when so many requests have completed and the run is over
    at_end: Callable[[int], Awaitable[Mapping[str, Any]]] | None = None
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
    shown = asyncio.create_task(output.progress.show(counters)) if output.progress else None
    send = _send_here if options.processes == 1 else send_by_processes
    try:
        records, interrupted, missing = await send(job, header, counters, output.path)
    finally:
        if shown:
            shown.cancel()
            with suppress(asyncio.CancelledError):
                await shown
    records.sort(key=order_of)
    # one that was killed has none of these keys
    ended: dict[str, Any] = {
        "interrupted": interrupted,
        "missing": list(missing),
        "recorded": len(records),
        "uncounted": counters.uncounted,
    }
    if output.at_end is not None:
        ended |= await output.at_end(counters.completed)
    header = msgspec.structs.replace(header, configuration=header.configuration | ended)
    if output.path is not None:
        try:
            replace_run(output.path, header, records)
        except OSError as error:
            why = cannot_write(output.path, error)
            if not any(why in sentence for sentence in missing):
                missing = (*missing, why)
    return LoadResult(header, records, lateness(records), interrupted, held_back(records), missing)


async def _send_here(
    job: SendingJob, header: Header, counters: Counters, path: Path | None
) -> tuple[list[Record], bool, tuple[str, ...]]:
    """The records, whether the run was interrupted, and what is missing: as `send_by_processes`."""
    records: list[Record] = []
    start_at = asyncio.get_running_loop().time() + START_DELAY
    try:
        writer = None if path is None else RunWriter(path, header)
    except OSError as error:
        raise LoadError(
            f"{cannot_write(path or '', error)}; --output FILE names another place, --no-save "
            "writes no file"
        ) from None

    def keep(record: Record) -> None:
        records.append(record)
        if writer is not None:
            writer.keep(record)

    with writer or nullcontext():
        interrupted = await send_job(job, start_at, counters, keep)
    return records, interrupted, tuple(filter(None, [counters.missing()]))


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
    asked = {key: value for key, value in asdict(target).items() if key not in UNSAID}
    if target.models:
        asked["model"] = ", ".join(target.models)
    if target.headers:
        asked["headers"] = [name for name, _ in target.headers]
    if target.extra_body:
        asked["extra_body"] = target.extra_body
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
