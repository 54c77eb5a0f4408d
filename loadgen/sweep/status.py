"""The state of a sweep and the time that is left: one line on stderr.

On a terminal the line is rewritten in place, never older than a second; elsewhere a new one is
written every `LINE_PERIOD` seconds. A line costs microseconds: the sender shares this loop.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from typing import Self, TextIO

from kendall.loadgen.sending.job import Counters

LINE_PERIOD = 10.0  # seconds
DRAW_PERIOD = 0.5


class Status:
    """Also a `loadgen.sending.run.ProgressDisplay`: shows the counters of a load run. With
    `notes_only` nothing but the notes is written outside of a terminal.
    """

    def __init__(
        self, stream: TextIO, period: float | None = None, *, notes_only: bool = False
    ) -> None:
        self._stream = stream
        self._in_place = stream.isatty()
        self._notes_only = notes_only
        self._period = period or (DRAW_PERIOD if self._in_place else LINE_PERIOD)
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._phase = "starting"
        self._counters: Counters | None = None
        self._phase_ends = 0.0  # on the loop's clock
        self.left_after = 0.0  # seconds planned after the present phase

    async def __aenter__(self) -> Self:
        self._began = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._clear()

    def phase(self, text: str, seconds: float = 0.0) -> None:
        """Show a phase and its expected duration, seconds."""
        self._phase, self._phase_ends = text, asyncio.get_running_loop().time() + seconds
        self._draw()

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self._clear()
        self._stream.write(f"{self._elapsed():6.0f} s  {text}\n")
        self._stream.flush()

    async def show(self, counters: Counters) -> None:
        """Show the counters until cancelled."""
        self._counters = counters
        try:
            await asyncio.Event().wait()
        finally:
            self._counters = None

    @property
    def line(self) -> str:
        loop = asyncio.get_running_loop()
        parts = [self._phase]
        if (counters := self._counters) is not None:
            answered = counters.completed + counters.other
            parts.append(
                f"sent {counters.sent}/{counters.asked}, {counters.sent - answered} unanswered"
            )
            parts += [f"{counters.other} failed"] if counters.other else []
        left = max(0.0, self._phase_ends - loop.time()) + self.left_after
        parts += [f"about {duration(left)} still"] if left else []
        return "; ".join(parts)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            self._draw(wanted=True)

    def _draw(self, *, wanted: bool = False) -> None:
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[2K" + f"{self._elapsed():6.0f} s  {self.line}"[:width])
        elif wanted and not self._notes_only:
            self._stream.write(f"{self._elapsed():6.0f} s  {self.line}\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._in_place:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._began


def duration(seconds: float) -> str:
    """A duration as text, rounded."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
