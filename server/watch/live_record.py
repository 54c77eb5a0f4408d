"""`kendall watch URL ...`: the track record of running servers by their metrics, as it grows: one
row after the other, on a page, as JSON and as metrics.

Each server is asked for its metrics once a second. A row is made of them when its time is over, and
then only the last scrape is kept. A server that does not answer leaves a gap.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest

from kendall.policies.durations import rounded_duration
from kendall.policies.text import SpecError, counted
from kendall.queueing.commands.terminal import console, say
from kendall.queueing.errors import CommandError
from kendall.queueing.estimation.counters.track_record import (
    GrowingRecord,
    Hour,
    RecordRow,
    TrackRecord,
)
from kendall.queueing.json_form import to_json
from kendall.server.watch.app import plain_app, serving
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.receiver import set_by_signal
from kendall.server.watch.record_metrics import RecordMetrics
from kendall.server.watch.record_page import page
from kendall.server.watch.record_text import given_law, interval, seconds
from kendall.server.watch.scraping import EVERY, ScrapedServer, by_model, edges_of

log = logging.getLogger("kendall.watch")
ROW = 300.0  # seconds
SHOWN = 288  # rows on the page, the last ones


def _now() -> float:
    return time.time()  # noqa: TID251 - as scrapes have it


@dataclass(eq=False)
class LiveRecord:
    """Of the servers of some URLs."""

    options: WatchOptions
    urls: Sequence[str]
    targets: Sequence[ScrapedServer]
    every: float = ROW  # seconds of a row
    records: dict[tuple[str, str], GrowingRecord] = field(default_factory=dict)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _began: float = field(default_factory=_now)  # of the row
    _silent: set[str] = field(default_factory=set)
    # rows are made in one thread, and shown from others
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics = RecordMetrics(self.registry)

    @classmethod
    def of(cls, options: WatchOptions, urls: Sequence[str]) -> LiveRecord:
        """Raises SpecError, CommandError: a server without metrics, or that is not there."""
        targets = [ScrapedServer.at(url, options) for url in urls]
        return cls(options, urls, targets, options.source.every or ROW)

    def scrape(self) -> None:
        """Every server once."""
        for target in self.targets:
            try:
                target.scrape()
            except (CommandError, SpecError) as error:
                if target.url not in self._silent:
                    log.warning("%s: a gap until it answers", error)
                self._silent.add(target.url)
            else:
                if not target.failed:
                    self._silent.discard(target.url)

    def rows(self) -> list[tuple[str, RecordRow]]:
        """The row of each model that is over now, with the name of the model; none before."""
        now = _now()
        if now < self._began + self.every:
            return []
        with self._changing:
            return list(self._rows_until(now))

    def _rows_until(self, now: float) -> Iterator[tuple[str, RecordRow]]:
        edges, self._began = edges_of(self._began, now), now
        for (server, model), samples in by_model(self.targets):
            key = server, model
            if key not in self.records:
                self.records[key] = GrowingRecord(
                    model=model,
                    server=server,
                    slots=self.options.queue.max_num_seqs,
                    given=given_law(self.options.queue.latency),
                )
            row = self.records[key].add(Hour.of(edges, [each.between(edges) for each in samples]))
            self.metrics.on_row(model, row, self.records[key].record)
            yield model or server, row
        for target in self.targets:
            target.forget()

    def as_json(self) -> dict[str, Any]:
        """One object."""
        records = [record.as_dict() for record in self._kept()]
        return {"source": list(self.urls), "every": self.every, "records": to_json(records)}

    def page(self) -> str:
        """As HTML."""
        return page(
            [record.last(SHOWN) for record in self._kept()],
            ", ".join(self.urls),
            self.options.queue.max_num_seqs,
            growing=self.every,
        )

    def _kept(self) -> list[TrackRecord]:
        with self._changing:
            return [growing.record for growing in self.records.values()]


def create_app(record: LiveRecord) -> FastAPI:
    """Nothing can be changed by it."""
    app = plain_app(lambda: generate_latest(record.registry))

    @app.get("/admin/watch")
    async def watched() -> dict[str, Any]:
        return await asyncio.to_thread(record.as_json)

    @app.get("/", response_class=Response)
    async def shown() -> Response:
        return Response(await asyncio.to_thread(record.page), media_type="text/html")

    return app


def watch_urls(options: WatchOptions, urls: Sequence[str]) -> None:
    """Until a signal. Raises SpecError, CommandError."""
    asyncio.run(_follow(LiveRecord.of(options, urls)))


async def _follow(record: LiveRecord) -> None:
    ended = set_by_signal()
    async with AsyncExitStack() as stack:
        for target in record.targets:
            stack.callback(target.client.close)
        port = await stack.enter_async_context(serving(create_app(record), record.options))
        to = console(sys.stderr)
        say(
            to,
            f"watching {counted(len(record.urls), 'server')}: a row every "
            f"{rounded_duration(record.every)} on http://{record.options.report.host}:{port}/",
        )
        while not ended.is_set():
            began = time.monotonic()  # noqa: TID251 - the pause between scrapes of other machines
            await asyncio.to_thread(record.scrape)
            for name, row in await asyncio.to_thread(record.rows):
                say(console(), _in_words(name, row))
            rest = EVERY - (time.monotonic() - began)  # noqa: TID251 - as above
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, rest))


def _in_words(name: str, row: RecordRow) -> str:
    parts = []
    for what, quantity in (("queueing delay", "queueing_delay"), ("sojourn", "sojourn_time")):
        text = f"{what} {seconds(getattr(row.observed, quantity))}"
        if row.forecast is not None:
            found = getattr(row.forecast, quantity)
            text += f", predicted {seconds(found.value)} ({interval(found)})"
        parts.append(text)
    outside = f"; {row.cause}" if row.cause else ""
    return f"{name}: {row.observed.requests:.0f} requests; {'; '.join(parts)}{outside}"
