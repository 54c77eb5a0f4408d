"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from loadgen.sending.job import Tally

BAR_PERIOD = 0.5  # seconds; drawing takes milliseconds, which the sender waits
LINE_PERIOD = 5.0


class Bar:
    """A bar, refreshed twice a second by the event loop itself: no thread competes with the
    sender.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)

    async def show(self, tally: Tally) -> None:
        """Draw until cancelled."""
        columns = (
            TextColumn("sent {task.fields[sent]}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[answers]}"),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=self._console, auto_refresh=False)
        task = progress.add_task("load", total=tally.asked, sent=0, answers="")
        with progress:
            try:
                while True:
                    self._draw(progress, task, tally)
                    await asyncio.sleep(BAR_PERIOD)
            finally:
                self._draw(progress, task, tally)

    def _draw(self, progress: Progress, task: TaskID, tally: Tally) -> None:
        progress.update(
            task,
            completed=tally.completed + tally.other,
            sent=tally.sent,
            answers=_answers(tally),
            refresh=True,
        )


class Lines:
    """One line every few seconds."""

    def __init__(self, stream: TextIO, period: float = LINE_PERIOD) -> None:
        self._stream, self._period = stream, period

    async def show(self, tally: Tally) -> None:
        """Write until cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        period = min(
            1.0, self._period
        )  # the first line comes early: it says that the run is under way
        while True:
            await asyncio.sleep(period)
            period = self._period
            self._stream.write(
                f"{loop.time() - began:.0f} s: sent {tally.sent}/{tally.asked}, {_answers(tally)}\n"
            )
            self._stream.flush()


def for_stderr() -> Bar | Lines:
    """The form that fits where stderr goes."""
    return Bar(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)


def _answers(tally: Tally) -> str:
    refused = f", {tally.refused} refused" if tally.refused else ""
    return f"{tally.completed} done, {tally.other - tally.refused} failed{refused}"
