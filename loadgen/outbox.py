"""The requests of a sender that are under way: each ends in one record, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from loadgen.client import Exchange
from loadgen.job import Job, Tally
from queueing.record import Record

Keep = Callable[[Record], None]


class Outbox:
    """Sends exchanges side by side; `keep` gets every record as it ends."""

    def __init__(self, job: Job, session: aiohttp.ClientSession, tally: Tally, keep: Keep) -> None:
        self.job = job
        self._session, self._tally, self._keep = session, tally, keep
        self._begun: dict[str, Exchange] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._places = asyncio.Semaphore(job.max_concurrency) if job.max_concurrency else None
        self._bug: BaseException | None = None

    def start(self, exchange: Exchange) -> None:
        """Send it beside the rest; from now on it has a record, whatever happens."""
        self._begun[exchange.request_id] = exchange
        self.spawn(self.send(exchange))

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run it beside the rest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    async def send(self, exchange: Exchange) -> Record:
        """Send it, after a wait for a place where there is a limit, and keep its record."""
        self._begun[exchange.request_id] = exchange
        if self._places is None:
            return await self._send(exchange)
        self._tally.held += self._places.locked()
        async with self._places:
            return await self._send(exchange)

    async def _send(self, exchange: Exchange) -> Record:
        self._tally.sent += 1
        record = await exchange.run(self._session, self.job.target.url)
        if record.outcome == "completed":
            self._tally.completed += 1
        else:
            self._tally.other += 1
        self._end(record)
        return record

    def _end(self, record: Record) -> None:
        del self._begun[record.request_id]
        self._keep(record)

    async def drain(self, limit: float) -> None:
        """Wait at most `limit` seconds for what is under way. Raises what a request raised: a bug, not an outcome."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit)
        if self._bug is not None:
            raise self._bug

    async def close(self) -> None:
        """Cancel what is under way; afterwards all that was begun has a record."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for exchange in list(self._begun.values()):  # cancelled before the first step, or waiting for a place
            self._end(exchange.record())
