"""A sender of several, as a process: takes its job from standard input, writes its counters to
standard output.

`python -m loadgen.sending.sender_process`, started by loadgen/sending/senders.py alone. The end of
standard input ends the run.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from contextlib import suppress

import msgspec

from kendall.loadgen.sending.job import Counters, SendingJob
from kendall.loadgen.sending.operating_system import raise_file_limit
from kendall.loadgen.sending.run_writer import RunWriter
from kendall.loadgen.sending.sending import send_job
from kendall.queueing.measurement.record import Header

PERIOD = 0.25  # seconds between two reports of the counters


def main() -> None:
    """Read the job, report that it is there, send it from the instant that the parent names."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    job, header, file = pickle.loads(sys.stdin.buffer.read(size))
    raise_file_limit()
    with RunWriter(file, msgspec.json.decode(header, type=Header)) as writer:
        print("ready", flush=True)  # noqa: T201 - the protocol
        if start_at := sys.stdin.buffer.readline():
            asyncio.run(_send(job, float(start_at), writer))


async def _send(job: SendingJob, start_at: float, writer: RunWriter) -> None:
    counters = Counters(asked=len(job))
    sending = asyncio.create_task(send_job(job, start_at, counters, writer.keep))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(sys.stdin.fileno())
        sending.cancel()

    loop.add_reader(sys.stdin.fileno(), stop)

    async def report() -> None:
        while True:
            await asyncio.sleep(PERIOD)
            _say(counters, interrupted=False)

    reporting = asyncio.create_task(report())
    interrupted = await sending
    reporting.cancel()
    _say(counters, interrupted=interrupted)


def _say(counters: Counters, *, interrupted: bool) -> None:
    with suppress(BrokenPipeError):  # the parent is gone; the records are what counts
        sys.stdout.buffer.write(msgspec.json.encode((counters, interrupted)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
