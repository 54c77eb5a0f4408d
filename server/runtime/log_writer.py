"""Log lines leave through a thread of their own: a reader that stops reading stderr costs lines,
and never stops the gateway.

A line is formatted where it is logged and waits in a bounded queue; the thread writes it to the
file descriptor itself, because a thread that is blocked inside `sys.stderr` holds its lock at the
exit of the interpreter. Lines that find the queue full are dropped and counted, and once the reader
reads again a line says how many. Lines of one kind (logger, level, template) are limited to a rate,
so that a client that sends malformed requests cannot fill a disk.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

QUEUE_BYTES = 4 << 20  # of lines that wait for the reader
LAST_LINES = 2.0  # seconds that the exit waits for the reader
WINDOW = 10.0  # seconds over which the lines of one kind are counted
LINES_OF_A_KIND = 50  # in one window; the others are counted, and one line says how many there were
MOST_KINDS = 500
REASONS = ("blocked", "repeated", "unwritable")
PROMPT = "request %s: %r"
EVERY_LINE = frozenset({PROMPT})  # templates without a limit: what --log-prompts asks for

Write = Callable[[bytes], object]


Kind = tuple[str, int, str]  # logger, level, template


class Repeats:
    """Lines of each kind within its window."""

    def __init__(self) -> None:
        self._windows: dict[Kind, tuple[float, int]] = {}  # end of the window, lines in it
        self._left_out: Counter[Kind] = Counter()  # in windows that are over

    def admit(self, record: logging.LogRecord, now: float) -> bool:
        """Whether this one is within the rate of its kind."""
        template = str(record.msg)[:200]
        if template in EVERY_LINE:
            return True
        kind = record.name, record.levelno, template
        if kind not in self._windows and len(self._windows) >= MOST_KINDS:
            self._close_windows(now)
            if len(self._windows) >= MOST_KINDS:
                kind = record.name, record.levelno, "(lines of many kinds)"
        end, count = self._windows.get(kind, (now + WINDOW, 0))
        if end <= now:
            self._close(kind, count)
            end, count = now + WINDOW, 0
        self._windows[kind] = end, count + 1
        return count < LINES_OF_A_KIND

    def left_out(self, now: float) -> dict[Kind, int]:
        """Lines that were not admitted in windows that are over; told once."""
        self._close_windows(now)
        found, self._left_out = dict(self._left_out), Counter()
        return found

    def next_end(self) -> float | None:
        """When there is something to tell."""
        if self._left_out:
            return -math.inf
        return min(
            (end for end, count in self._windows.values() if count > LINES_OF_A_KIND), default=None
        )

    def _close_windows(self, now: float) -> None:
        for kind, (_, count) in [
            (kind, window) for kind, window in self._windows.items() if window[0] <= now
        ]:
            self._close(kind, count)

    def _close(self, kind: Kind, count: int) -> None:
        del self._windows[kind]
        if count > LINES_OF_A_KIND:
            self._left_out[kind] += count - LINES_OF_A_KIND


class LogWriter(logging.Handler):
    """Does not wait for whoever reads. `dropped` counts lines by reason."""

    def __init__(self, write: Write, *, now: Callable[[], float] | None = None) -> None:
        super().__init__()
        self._write_out = write
        self._now = now or partial(time.clock_gettime, time.CLOCK_MONOTONIC)
        self.begin()
        os.register_at_fork(
            after_in_child=_renewing(weakref.ref(self))
        )  # the thread stays with the parent

    def begin(self) -> None:
        """With nothing to write, and no thread yet."""
        self.dropped = Counter[str]()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._writing = False
        self._missing = 0  # lines dropped since one got through
        self._given_up = False
        self._repeats = Repeats()
        self._to_tell = False  # lines of a kind were left out, and the thread knows when to say so
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Put it into the queue, if there is room."""
        with self._changed:
            if not self._repeats.admit(record, self._now()):
                self.dropped["repeated"] += 1
                if not self._to_tell:
                    self._to_tell = True
                    self._changed.notify_all()
                return
        self._put(self._encoded(record))

    def _encoded(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - the line of somebody's mistake
            text = (
                f"a log line of {record.name} could not be formatted ({type(error).__name__}): "
                f"{record.msg!r:.200}"
            )
        return text.encode(errors="backslashreplace") + b"\n"

    def _put(self, line: bytes) -> None:
        with self._changed:
            if self._lines and self._bytes + len(line) > QUEUE_BYTES:
                self._drop("blocked")
                return
            self._lines.append(line)
            self._bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        self._missing += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait(self._until_summary())
                    self._summarise()
                line = self._lines.popleft()
                self._bytes -= len(line)
                self._writing = True
            written = self._try(line)
            with self._changed:
                self._writing = False
                if not written:
                    self._drop("unwritable")
                elif self._missing and not self._lines:
                    missing, self._missing = self._missing, 0
                    self._say(
                        logging.WARNING,
                        "%d log lines were dropped because they could not be written",
                        missing,
                    )
                self._changed.notify_all()

    def _try(self, line: bytes) -> bool:
        try:
            self._write_out(line)
        except (
            OSError,
            ValueError,
        ):  # a terminal that is gone, a full disk, a stream that was closed
            return False
        return True

    def _until_summary(self) -> float | None:
        end = self._repeats.next_end()
        return None if end is None else max(0.0, end - self._now())  # seconds

    def _summarise(self) -> None:
        for (name, level, template), count in self._repeats.left_out(self._now()).items():
            self._say(
                level,
                "%d more lines of %s like this within %g s: %s",
                count,
                name,
                WINDOW,
                template,
            )

        self._to_tell = self._repeats.next_end() is not None

    def _say(self, level: int, template: str, *arguments: Any) -> None:
        line = self._encoded(logging.LogRecord("kendall", level, "", 0, template, arguments, None))
        self._lines.append(line)
        self._bytes += len(line)

    def flush(self, longest: float = LAST_LINES) -> None:
        """Wait until everything is written, for so long at most."""
        self.written(longest)

    def written(self, longest: float) -> bool:
        """Whether everything is, after waiting so long at most."""
        with self._changed:
            return self._changed.wait_for(self._is_done, 0.0 if self._given_up else longest)

    def _is_done(self) -> bool:
        return not (self._lines or self._writing) and self._until_summary() != 0.0

    def give_up(self) -> None:
        """Nothing waits any more for whoever does not read."""
        self._given_up = True

    def close(self) -> None:
        """Only a flush: `logging.config.dictConfig`, which vLLM calls, closes every handler, and
        this one goes on.
        """
        self.flush()


def _renewing(writer: weakref.ref[LogWriter]) -> Callable[[], None]:
    def renew() -> None:
        if (alive := writer()) is not None:
            alive.begin()

    return renew


def to_stream(stream: TextIO) -> Write:
    """To its file descriptor, past its buffers and locks; to the stream itself where it has
    none.
    """
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return lambda data: (stream.write(data.decode()), stream.flush())
    return partial(write_all, descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """All of it, also where whoever started this process made the descriptor one that does not
    block.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def let_go(writer: LogWriter, stream: TextIO) -> None:
    """The end of a process: the last lines, if somebody reads; else whatever is written to the
    stream from here on goes nowhere.
    """
    if not writer.written(LAST_LINES):
        writer.give_up()
        with suppress(AttributeError, OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
