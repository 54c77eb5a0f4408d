"""The closed loop, for comparison: a fixed number of users, each sends when the answer to its last
request has come.

The next free user takes the next row. A request is intended at the instant at which its user is
ready: the end of the user's last answer, and a think time after it, which the sender's clock keeps
(loadgen/sending/pacing.py). The offered rate is whatever the server allows: a closed loop never
shows what happens to customers who do not wait for one another (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from typing import TYPE_CHECKING

from kendall.loadgen.sending.conversations import Conversation, conversations
from kendall.loadgen.sending.pacing import Alarms, pacing_clock

if TYPE_CHECKING:
    from kendall.loadgen.sending.in_flight import InFlightRequests


async def closed_loop(in_flight: InFlightRequests, start_at: float) -> None:
    """Let the users send every row; returns when the last row was sent or the time is over."""
    closed = in_flight.job.options.closed_loop
    assert closed is not None
    loop = asyncio.get_running_loop()
    duration = closed.duration
    ends_at = math.inf if duration is None else start_at + duration
    with pacing_clock() as clock, closing(Alarms(clock)) as alarms:
        rows = _Rows(in_flight, alarms, ends_at)
        users = {in_flight.spawn(rows.user(start_at)) for _ in range(closed.users)}
        last = in_flight.spawn(rows.all_sent.wait())
        while users and not last.done() and (left := ends_at - loop.time()) > 0:
            timeout = None if math.isinf(left) else left
            done, waiting = await asyncio.wait(
                {last, *users}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.exception() for task in done):
                break  # `InFlightRequests.drain` raises it
            users &= waiting


class _Rows:
    """The rows that no user has taken yet, and the number of rows not sent."""

    def __init__(self, in_flight: InFlightRequests, alarms: Alarms, ends_at: float) -> None:
        closed = in_flight.job.options.closed_loop
        assert closed is not None
        self._in_flight, self._alarms, self._ends_at = in_flight, alarms, ends_at
        self._think_times = closed.think_times
        self._untaken = iter(conversations(in_flight.job.timetable))
        self._unsent = len(in_flight.job)
        self.all_sent = asyncio.Event()

    async def user(self, ready_at: float) -> None:
        """One user: thinks, sends, waits for the answer, until no row is left or the time is
        over.
        """
        loop = asyncio.get_running_loop()
        for rows in self._untaken:
            conversation = Conversation(self._in_flight)
            for index in rows:
                ready_at += 0.0 if self._think_times is None else float(self._think_times[index])
                if ready_at >= self._ends_at:
                    return
                if ready_at > loop.time():
                    await self._alarms.until(ready_at)
                self._sent(1)
                exchange = conversation.exchange(index, ready_at)
                record = await self._in_flight.send(exchange)
                # the run is ended: a record keeps it, and so hides it from this task
                if record.released_at is None or self._in_flight.counters.stopped is not None:
                    return
                ready_at = record.released_at
                if record.outcome != "completed":
                    left = rows.stop - index - 1
                    self._in_flight.counters.asked -= left
                    self._sent(left)
                    break
                conversation.answered(exchange)

    def _sent(self, rows: int) -> None:
        self._unsent -= rows
        if not self._unsent:
            self.all_sent.set()
