"""Several sender processes on the ONE timetable: row i goes to sender i mod n, and all count from
the same instant.

CLOCK_MONOTONIC is one clock for the whole machine on Linux and macOS, so the instant at which the
run begins is simply told. Each sender writes its own run file as its requests end; they are merged
in the order of the timetable. A sender that dies loses what it had not written, and what is missing
is said. Senders are children: an interruption or the death of the parent closes their standard
input, and they end and keep what they have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kendall.loadgen.sending.client.target import LoadError
from kendall.loadgen.sending.job import Counters, SendingJob, row_of
from kendall.loadgen.sending.operating_system import undisturbed
from kendall.policies.text import counted
from kendall.queueing.arrivals.timetable import split
from kendall.queueing.measurement.record import Header, Record, read_run, to_line

START_DELAY = 0.3  # seconds between the last sender's readiness and instant 0
PERIOD = 0.25  # seconds between two sums of the senders' counters
STOP_LIMIT = 15.0  # seconds for an interrupted sender to write its last records


def shares(job: SendingJob) -> list[SendingJob]:
    """The job of each of several senders; limits on requests at once are split too. Raises
    LoadError.
    """
    users, processes = job.options.most_at_once, job.options.processes
    if users is not None and users < processes:
        raise LoadError(
            f"got {counted(users, 'request')} at once for {counted(processes, 'sender')}; "
            "expected at least one for each"
        )
    parts = []
    for sender, index in enumerate(split(job.timetable, processes)):
        if not index.size:
            continue
        part = None if users is None else users // processes + (sender < users % processes)
        closed = job.options.closed_loop
        if closed is not None and part is not None:
            thinking = None if closed.think_times is None else closed.think_times[index]
            closed = dataclasses.replace(closed, users=part, think_times=thinking)
        options = dataclasses.replace(
            job.options,
            max_concurrency=None if job.options.max_concurrency is None else part,
            max_errors=-(-job.options.max_errors // processes),
            closed_loop=closed,
        )
        share = dataclasses.replace(
            job,
            timetable=job.timetable.rows(index),
            prompts=job.prompts.rows(index),
            rows=job.rows[index],
            sender_id=sender,
            options=options,
        )
        parts.append(share)
    return parts


async def send_by_processes(
    job: SendingJob, header: Header, counters: Counters, path: Path | None
) -> tuple[list[Record], bool, tuple[str, ...]]:
    """Records of all senders, whether the run was interrupted, and what is missing. Raises
    LoadError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        whole = path or Path(scratch) / "run.jsonl"
        senders = [Sender(share, whole) for share in shares(job)]
        interrupted = await _run(senders, header, counters)
        records = [record for sender in senders for record in sender.records()]
        missing = tuple(why for sender in senders if (why := sender.missing()))
        for sender in senders:
            sender.file.unlink(missing_ok=True)
    return records, interrupted or any(sender.interrupted for sender in senders), missing


async def _run(senders: Sequence[Sender], header: Header, counters: Counters) -> bool:
    async def add_up() -> None:
        while True:
            _add(senders, counters)
            await asyncio.sleep(PERIOD)

    adding = asyncio.create_task(add_up())
    interrupted = False
    try:
        await asyncio.gather(*(sender.start(header) for sender in senders))
        start_at = asyncio.get_running_loop().time() + START_DELAY
        for sender in senders:
            sender.begin(start_at)
        await asyncio.gather(*(sender.ended() for sender in senders))
    except asyncio.CancelledError:
        interrupted = True
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
    finally:
        late = await undisturbed(asyncio.gather(*(sender.stop() for sender in senders)))
        adding.cancel()
        _add(senders, counters)
    return interrupted or late


class Sender:
    """One child: given its job, told the instant, listened to until it ends."""

    def __init__(self, job: SendingJob, whole: Path) -> None:
        self.job = job
        self.file = whole.with_name(f"{whole.stem}.sender{job.sender_id}{whole.suffix}")
        self.counters = Counters(asked=len(job))
        self.interrupted = False
        self._process: Process | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, header: Header) -> None:
        """Start it and wait until it is ready to send. Raises LoadError."""
        command = [sys.executable, "-m", "kendall.loadgen.sending.sender_process"]
        # a session of its own: Ctrl-C reaches the parent, which tells it
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = pickle.dumps((self.job, to_line(header), self.file))
        with suppress(ConnectionError):
            self._process.stdin.write(len(message).to_bytes(8, "big") + message)
            await self._process.stdin.drain()
        if await self._process.stdout.readline() != b"ready\n":
            raise LoadError(f"sender {self.job.sender_id} did not start: {await self._complaint()}")

    def begin(self, start_at: float) -> None:
        """Tell it instant 0 of the timetable on the machine's clock."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{start_at!r}\n".encode())
        self._following = asyncio.create_task(self._follow(self._process))

    async def _follow(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.counters, self.interrupted = msgspec.json.decode(line, type=tuple[Counters, bool])
        await process.wait()

    async def ended(self) -> None:
        """Return when it is over, by itself or not."""
        assert self._following is not None
        await asyncio.shield(self._following)

    async def stop(self) -> None:
        """Have it keep what it has and end; kill it where it does not."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await (self._following or self._process.wait())
        if self._process.returncode is None:
            self._process.kill()
            await (self._following or self._process.wait())

    async def _complaint(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def records(self) -> list[Record]:
        return read_run(self.file)[1] if self.file.exists() and self.file.stat().st_size else []

    def missing(self) -> str | None:
        """The requests without a record, and why; None where none is missing."""
        code = self._process.returncode if self._process else None
        if code == 0 or code is None:
            left = self.counters.missing()
            return None if left is None else f"sender {self.job.sender_id}: {left}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        lost = sorted(set(self.job.rows.tolist()) - {row_of(record) for record in self.records()})
        return (
            f"sender {self.job.sender_id} ended {how}: {len(lost)} of its "
            f"{counted(len(self.job), 'request')} without a record"
        )


def _add(senders: Sequence[Sender], counters: Counters) -> None:
    names = ("sent", "completed", "other", "refused", "cancelled", "held", "uncounted")
    for name in names:
        setattr(counters, name, sum(getattr(sender.counters, name) for sender in senders))
