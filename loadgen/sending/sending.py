"""One sender: a job sent from beginning to end in this process.

Open loop: row i leaves at its instant whatever has become of the others. A limit on the requests in
flight makes the loop partly closed: a request that must wait for a place keeps its intended
instant, so that the wait counts in its delay; its record says when the place became free, so that
the wait is not taken for lateness of the sender. The closed loop is in
loadgen/sending/closed_loop.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from kendall.loadgen.sending.client.client import address_of
from kendall.loadgen.sending.client.pool import KEEPALIVE, RESERVE, ConnectionPool
from kendall.loadgen.sending.closed_loop import closed_loop
from kendall.loadgen.sending.conversations import talk
from kendall.loadgen.sending.in_flight import InFlightRequests, Keep
from kendall.loadgen.sending.job import Counters, SendingJob
from kendall.loadgen.sending.operating_system import real_time_scheduling, undisturbed
from kendall.loadgen.sending.pacing import pace, quiet_garbage_collector


async def send_job(job: SendingJob, start_at: float, counters: Counters, keep: Keep) -> bool:
    """Send everything, instant 0 of the timetable being `start_at` on the loop's clock; whether it
    was interrupted.

    Too many failures in a row end it too: `counters.stopped` then says so.
    A cancellation (Ctrl-C) ends it early. Every request that was begun has a record when this
    returns.
    """
    address, target = address_of(job.target), job.target
    tls = target.trust.context() if address.tls else None
    pool = ConnectionPool(address, reserve_for(job), tls)
    in_flight = InFlightRequests(job, pool, counters, keep)
    interrupted, stack = False, AsyncExitStack()
    sending = asyncio.current_task()
    assert sending is not None
    in_flight.on_stop = sending.cancel
    try:
        with quiet_garbage_collector(), real_time_scheduling():
            await stack.enter_async_context(pool)
            stack.push_async_callback(in_flight.close)
            send_all = open_loop if job.timetable.turn is None else talk
            if job.options.closed_loop:
                send_all = closed_loop
            await send_all(in_flight, start_at)
            await in_flight.drain(job.options.drain_limit)
    except asyncio.CancelledError:
        interrupted = counters.stopped is None
        sending.uncancel()
    finally:
        in_flight.on_stop = None
        late = await undisturbed(stack.aclose())
    return interrupted or late


def reserve_for(job: SendingJob) -> int:
    """Idle connections to keep: no more than the job will use before a server closes them."""
    if job.options.closed_loop is not None:
        return min(RESERVE, job.options.closed_loop.users)
    rate = job.timetable.rate
    return min(RESERVE, len(job), math.ceil(rate * KEEPALIVE) if math.isfinite(rate) else RESERVE)


async def open_loop(in_flight: InFlightRequests, start_at: float) -> None:
    """Every row at its own instant; returns when the last one has left."""

    def prepare(index: int, instant: float) -> Callable[[], None]:
        return partial(in_flight.start, in_flight.exchange(index, instant))

    await pace(start_at + in_flight.job.timetable.intended_at, prepare)
