"""The live feed: once a second the state is put together and encoded, once for all; every viewer is
written the same bytes.

A viewer who comes, or who was too slow for a second, gets every topic; who keeps up gets the topics
that changed. Nothing waits for a viewer, and nothing is kept for one: a slow one misses seconds,
and its page fills the gap from the history.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec

from kendall.queueing.json_form import json_object
from kendall.server.page.assets import load_assets
from kendall.server.page.history import CHART, History, short
from kendall.server.page.host import PageHost
from kendall.server.page.minute import NOTHING, LastMinute
from kendall.server.page.state import COLUMNS, topics
from kendall.server.runtime.clock import clock_of

if TYPE_CHECKING:
    from kendall.queueing.estimation.summaries import SecondMeans
    from kendall.queueing.latency.law import LatencyModel

log = logging.getLogger("kendall.page")
PERIOD = 1.0  # seconds
SWITCHES = 60  # marks on the charts
MOST_VIEWERS, MOST_FROM_ONE = (
    1024,
    64,
)  # in all, and from one address: each is a connection, and is written to every second
_encode = msgspec.json.encode


class Feed:
    """The state by the second, its history, and who follows it."""

    def __init__(self, gateway: PageHost) -> None:
        self._gateway = gateway
        self._history = History(COLUMNS)
        self._switches: deque[dict[str, Any]] = deque(maxlen=SWITCHES)
        self._epoch: int | None = None
        self._law: LatencyModel | None = None
        self._events: dict[str, bytes] = {}  # the newest of each topic, as sent
        self._news = b""  # those that changed with the last tick
        self._tick = 0
        self._ticked = asyncio.Event()
        self._viewers = 0
        self._seats: Counter[str] = Counter()  # by address
        self._drawing: asyncio.Task[None] | None = None
        self._drawn_at: float | None = None  # the look whose distribution is known
        self._distribution: dict[str, Any] | None = None
        self._pairs: dict[str, Any] | None = None
        self._ahead: float | None = None  # seconds of Unix time before the gateway's clock
        self._zipped: tuple[int, bytes] | None = None  # of the history, and when
        self._minute = LastMinute(gateway)
        self._restarts = 0
        born = round(datetime.now(UTC).timestamp(), 3)
        self._hello = {
            "born": born,
            "page": load_assets().version,
            "version": metadata.version("kendall"),
            "columns": COLUMNS,
        }
        self._failed = False

    @property
    def viewers(self) -> int:
        """Pages that follow now."""
        return self._viewers

    def enter(self, address: str) -> bool:
        """Take a seat for a viewer from there; False where there is none left."""
        if self._seats[address] >= MOST_FROM_ONE or self._seats.total() >= MOST_VIEWERS:
            return False
        self._seats[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Give it back."""
        self._seats[address] -= 1
        self._seats += Counter()  # forgets addresses without a viewer

    @property
    def over(self) -> bool:
        """Whether nothing more is to be seen: the gateway leaves, and must not wait for its
        viewers.
        """
        gateway = self._gateway
        return gateway.lifecycle.draining and not (
            gateway.lifecycle.started and gateway.batcher.unanswered
        )

    async def run(self) -> None:
        """A tick every second, on absolute instants."""
        now = clock_of(asyncio.get_running_loop())
        due = now()
        try:
            while True:
                self._tick_safely()
                due = max(due + PERIOD, now())
                await asyncio.sleep(due - now())
        finally:
            if self._drawing is not None:
                self._drawing.cancel()

    def tick(self) -> None:
        """Put the state together, keep it, and wake who follows."""
        at = datetime.now(UTC).timestamp()
        found = topics(
            self._gateway, at, self._minute.read() if self._gateway.lifecycle.started else NOTHING
        )
        self._note_switch(found["gateway"].get("in_force"), at)
        if self._gateway.lifecycle.started:
            self._history.add(found["now"]["row"])
            self._draw(found["look"]["prediction"])
        found |= {
            "hello": self._hello,
            "switches": list(self._switches),
            "distribution": self._distribution,
            "pairs": self._pairs,
        }
        events = {name: _event(name, value) for name, value in found.items()}
        self._news = b"".join(
            event
            for name, event in events.items()
            if name == "now" or self._events.get(name) != event
        )
        self._events = events
        self._tick += 1
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def everything(self) -> bytes:
        """Every topic, the greeting first."""
        first = self._events.get("hello", b"")
        return first + b"".join(event for name, event in self._events.items() if name != "hello")

    async def follow(self) -> AsyncIterator[bytes]:
        """Server-sent events, until the gateway leaves."""
        self._viewers += 1
        try:
            seen = self._tick
            yield b"retry: 2000\n\n" + self.everything()
            while not self.over:
                if seen == self._tick:
                    await self._ticked.wait()
                late, seen = self._tick - seen > 1, self._tick
                yield self.everything() if late else self._news
        finally:
            self._viewers -= 1

    async def history(self) -> bytes:
        """JSON, gzipped; made in a thread, once for all who ask within a second."""
        if self._zipped is None or self._zipped[0] != self._tick:
            shown = self._history.shown()
            self._zipped = (
                self._tick,
                await asyncio.to_thread(lambda: gzip.compress(_encode(shown), 5, mtime=0)),
            )
        return self._zipped[1]

    def _tick_safely(self) -> None:
        try:
            self.tick()
            self._failed = False
        except Exception:
            if not self._failed:  # once, not every second
                log.exception(
                    "the state of the live page could not be computed; the next attempt is in one "
                    "second"
                )
            self._failed = True

    def _note_switch(self, in_force: dict[str, Any] | None, at: float) -> None:
        if in_force is None or in_force["epoch"] == self._epoch:
            return
        first, self._epoch = self._epoch is None, in_force["epoch"]
        restarts = self._gateway.supervisor.restarts
        restarted, self._restarts = restarts > self._restarts, restarts
        law = self._gateway.latency.law
        calibrated, self._law = not first and law is not self._law, law
        self._distribution = self._pairs = self._drawn_at = None
        self._switches.append(
            {
                "at": round(at, 1),
                "first": first,
                "restarted": restarted,
                "calibrated": calibrated,
                **in_force,
            }
        )

    def _draw(self, look: dict[str, Any] | None) -> None:
        """Have the histogram and the pairs computed, where somebody looks and there is a new
        look.
        """
        if (
            look is None
            or not self._viewers
            or (self._drawing is not None and not self._drawing.done())
        ):
            return
        if look["window"]["end"] != self._drawn_at:
            self._drawn_at = look["window"]["end"]
            self._drawing = asyncio.create_task(self._drawn())

    async def _drawn(self) -> None:
        epoch = self._epoch
        with suppress(
            Exception
        ):  # the predicting process died or is late: the next look has another one
            drawn = await self._gateway.live_model().drawn()
            if epoch == self._epoch and drawn is not None:
                self._distribution = self._pairs = None
                if (histogram := drawn.histogram) is not None:
                    modelled = {"modelled": drawn.modelled}
                    self._distribution = json_object(histogram) | drawn.about | modelled
                if drawn.pairs is not None:
                    self._pairs = json_object(self._shown(drawn.pairs)) | drawn.about

    def _shown(self, pairs: SecondMeans) -> SecondMeans:
        """With Unix time, and as many digits as a chart shows."""
        if self._ahead is None:  # once: a second has one instant, whenever it is drawn
            self._ahead = datetime.now(UTC).timestamp() - self._gateway.now()
        ahead = self._ahead
        return replace(
            pairs,
            at=[round(each + ahead, 1) for each in pairs.at],
            observed=_chart(pairs.observed),
            modelled=_chart(pairs.modelled),
            low=pairs.low and _chart(pairs.low),
            high=pairs.high and _chart(pairs.high),
        )


def _chart(values: list[float]) -> list[float]:
    return [short(value, CHART) for value in values]


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"
