"""The requests of a sender that are under way: each ends in one record, whatever ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from kendall.loadgen.datasets import Prompt
from kendall.loadgen.measures.failures import hung_up, is_failure
from kendall.loadgen.sending.client.client import LoadExchange
from kendall.loadgen.sending.client.pool import ConnectionPool
from kendall.loadgen.sending.job import Counters, SendingJob
from kendall.queueing.measurement.paths import cannot_write
from kendall.queueing.measurement.record import Record
from kendall.remote import reason

Keep = Callable[[Record], None]


class InFlightRequests:
    """Sends exchanges side by side; `keep` gets every record as it ends."""

    def __init__(
        self, job: SendingJob, pool: ConnectionPool, counters: Counters, keep: Keep
    ) -> None:
        self.job = job
        self._pool, self.counters, self._keep = pool, counters, keep
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[LoadExchange, asyncio.Future[Record] | None] = {}
        self._held: deque[LoadExchange] = deque()  # wait for a place among `max_concurrency`
        self._places = job.options.max_concurrency
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended = asyncio.Event()
        self._bug: BaseException | None = None
        self._failures = 0  # in a row
        # ends the run after too many failures in a row, or where its file cannot be written
        self.on_stop: Callable[[], object] | None = None

    def exchange(self, index: int, instant: float, prompt: Prompt | None = None) -> LoadExchange:
        """The request of one row, ready to be sent; with its own prompt, or another."""
        exchange = self.job.exchange(index, instant, self._pool.address, prompt)
        exchange.ended = self._end
        return exchange

    def start(self, exchange: LoadExchange) -> None:
        """Send it now, or as soon as there is a place; from now on it has a record, whatever
        happens. Does not wait.
        """
        self._under_way.setdefault(exchange)
        if self._places is not None and len(self._under_way) - len(self._held) > self._places:
            self.counters.held += 1
            self._held.append(exchange)
        else:
            self._send(exchange)

    async def send(self, exchange: LoadExchange) -> Record:
        """Send it and wait for its record."""
        return await self.begin(exchange)

    def begin(self, exchange: LoadExchange) -> asyncio.Future[Record]:
        """As `start`, with a future of its record."""
        recorded: asyncio.Future[Record] = self._loop.create_future()
        self._under_way[exchange] = recorded
        self.start(exchange)
        return recorded

    def _send(self, exchange: LoadExchange) -> None:
        self.counters.sent += 1
        connection = self._pool.take()
        exchange.begin(self._loop.time())
        if connection is None:
            self.spawn(self._connect(exchange))
        else:
            exchange.send(connection)

    async def _connect(self, exchange: LoadExchange) -> None:
        try:
            connection = await self._pool.connect()
        except OSError as error:
            exchange.on_lost(f"{self._pool.address}: {reason(error)}", self._loop.time())
        else:
            exchange.send(connection)

    def _end(self, exchange: LoadExchange) -> None:
        recorded = self._under_way.pop(exchange)
        record = exchange.record()
        if record.outcome == "completed":
            self.counters.completed += 1
            self.counters.uncounted += not exchange.counted
        elif hung_up(record):
            self.counters.cancelled += 1
        elif record.sent_at is not None:
            self.counters.other += 1
            self.counters.refused += not is_failure(record)
        try:
            self._keep(record)
        except OSError as error:
            self._stop(cannot_write(error.filename, error))
        self._count_failures(record)
        if recorded is not None and not recorded.done():
            recorded.set_result(record)
        self._ended.set()
        if self._held and record.sent_at is not None:
            following = self._held.popleft()
            following.held_until = record.released_at
            self._send(following)

    def _count_failures(self, record: Record) -> None:
        """A refusal (429, 503) is an answer of a server that is there: it ends the row, as a
        completed request does.
        """
        if record.outcome == "cancelled" or self.counters.stopped is not None:
            return
        self._failures = self._failures + 1 if record.outcome == "failed" else 0
        if self._failures == self.job.options.max_errors > 0:
            self._stop(
                f"the run stopped after {self._failures} failures in a row (--max-errors), the "
                f"last: {record.error}"
            )

    def _stop(self, why: str) -> None:
        if self.counters.stopped is None:
            self.counters.stopped = why
            if self.on_stop is not None:
                self.on_stop()

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run it beside the rest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    async def drain(self, limit: float) -> None:
        """Wait at most `limit` seconds for what is under way. Raises what one of our own tasks
        raised: a bug, no outcome.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._under_way and self._bug is None:
                    self._ended.clear()
                    await self._ended.wait()
        if self._bug is not None:
            raise self._bug

    async def close(self) -> None:
        """Cancel what is under way; afterwards all that was begun has a record."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.clear()
        for exchange in list(self._under_way):
            exchange.cancel()
