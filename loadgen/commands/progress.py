"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kendall.loadgen.sending.job import Counters

BAR_PERIOD = 0.5  # seconds; drawing takes milliseconds, which the sender waits
LINE_PERIOD = 5.0


class Bar:
    """A bar, refreshed twice a second by the event loop itself: no thread competes with the
    sender.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)

    async def show(self, counters: Counters) -> None:
        """Draw until cancelled."""
        columns = (
            TextColumn("sent {task.fields[sent]}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[answers]}"),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=self._console, auto_refresh=False)
        task = progress.add_task("load", total=counters.asked, sent=0, answers="")
        with progress:
            try:
                while True:
                    self._draw(progress, task, counters)
                    await asyncio.sleep(BAR_PERIOD)
            finally:
                self._draw(progress, task, counters)

    def _draw(self, progress: Progress, task: TaskID, counters: Counters) -> None:
        progress.update(
            task,
            completed=counters.completed + counters.other + counters.cancelled,
            sent=counters.sent,
            answers=_answers(counters),
            refresh=True,
        )


class Lines:
    """One line every few seconds."""

    def __init__(self, stream: TextIO, period: float = LINE_PERIOD) -> None:
        self._stream, self._period = stream, period

    async def show(self, counters: Counters) -> None:
        """Write until cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        # the first line comes early: it says that the run is under way
        period = min(1.0, self._period)
        while True:
            await asyncio.sleep(period)
            period = self._period
            sent = f"sent {counters.sent}/{counters.asked}"
            self._stream.write(f"{loop.time() - began:.0f} s: {sent}, {_answers(counters)}\n")
            self._stream.flush()


def for_stderr() -> Bar | Lines:
    """The form that fits where stderr goes."""
    return Bar(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)


def _answers(counters: Counters) -> str:
    refused = f", {counters.refused} refused" if counters.refused else ""
    cancelled = f", {counters.cancelled} cancelled" if counters.cancelled else ""
    failed = counters.other - counters.refused
    return f"{counters.completed} done, {failed} failed{refused}{cancelled}"
