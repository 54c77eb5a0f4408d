"""The closed loop, for comparison: a fixed number of users, each sends when the answer to its last request has come.

The next free user takes the next row. A request is intended at the instant at which its user is ready: the end of the
user's last answer, and a think time after it. The offered rate is whatever the server allows: a closed loop never
shows what happens to customers who do not wait for one another (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadgen.outbox import Outbox


async def closed_loop(outbox: Outbox, start_at: float) -> None:
    """Let the users send every row; returns when no row is left or the time is over."""
    job = outbox.job
    assert job.closed_loop is not None
    loop = asyncio.get_running_loop()
    rows = iter(range(len(job)))
    thinking = job.closed_loop.think_times
    ends_at = start_at + (math.inf if job.closed_loop.duration is None else job.closed_loop.duration)

    async def user() -> None:
        ready_at = start_at
        for index in rows:
            ready_at += 0.0 if thinking is None else float(thinking[index])
            if ready_at >= ends_at:
                break
            await asyncio.sleep(ready_at - loop.time())
            record = await outbox.send(outbox.exchange(index, ready_at))
            if record.outcome == "cancelled":  # the run is ended: a record keeps it, and so hides it from this task
                break
            ready_at = loop.time() if record.released_at is None else record.released_at

    users = [outbox.spawn(user()) for _ in range(job.closed_loop.users)]
    await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)  # nobody ends before there is nothing left to send
