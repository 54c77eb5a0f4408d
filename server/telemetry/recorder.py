"""The run file of a serving gateway: one line per request, written by a thread of its own within a
second.

A killed gateway loses the records of the last second at most. A run file that was there before is
kept under another name. Nothing waits for the disk: while it is full or hangs, 4 MiB of lines wait
in memory, further records are dropped and counted, and the file goes on, in whole lines, once there
is room.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from kendall.policies.text import counted
from kendall.queueing.measurement.paths import put_aside
from kendall.queueing.measurement.record import Header, Record, to_line
from kendall.server.queue.observers import Observer

log = logging.getLogger("kendall")
LONGEST_UNWRITTEN = 0.5  # seconds that a record waits in memory
MOST_UNWRITTEN = 1000  # records that wait, where they come faster
QUEUE_BYTES = 4 << 20  # of lines that wait for the disk
PATIENCE = 0.5  # seconds that `flush` waits for the disk
LAST_LINES = 2.0  # seconds that the exit waits for the disk
# the last: a pipe without a reader is an error, no wait
_MODE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class Recorder(Observer):
    """An observer that appends records to a file; `flush` before somebody reads it at once.
    Neither raises nor waits long.
    """

    def __init__(
        self, path: Path, header: Header, dropped: Callable[[int], object] = lambda _: None
    ) -> None:
        self._file = _RunFile(path)
        self._path = path
        self._dropped = dropped
        self._changed = threading.Condition()
        self._lines = [to_line(header)]  # wait to be written
        self._bytes = len(self._lines[0])  # of these and of those that are being written
        self._records = 0  # among them
        self.lost = 0  # dropped in all
        self._missing = 0  # dropped since the last one that was written
        self._writing = self._asked = self._closing = False
        self._failing = False  # the last write failed
        self._hangs = False  # `flush` waited in vain, and no write has ended since
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        self.flush()

    def on_record(self, record: Record) -> None:
        """One line, in the file within a second."""
        line = to_line(record)
        with self._changed:
            if self._bytes + len(line) > QUEUE_BYTES:
                self._drop(1)
                return
            self._lines.append(line)
            self._bytes += len(line)
            self._records += 1
            if len(self._lines) == 1 or self._due():
                self._changed.notify_all()

    def flush(self) -> bool:
        """Whether everything so far is in the file; waits for a disk that answers, and once for
        one that hangs.
        """
        with self._changed:
            if not self._unwritten():
                return True
            if not self._hangs:
                self._asked = True
                self._changed.notify_all()
                self._hangs = not self._changed.wait_for(self._tried, PATIENCE)
            return not self._unwritten()

    def close(self) -> None:
        """The last line is in the file, or counted as dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(LAST_LINES)
        with self._changed:
            left, self._records = self._records, 0
            if left:
                self._drop(left)
                log.error(
                    "the last %s could not be written to %s", counted(left, "record"), self._path
                )

    def _unwritten(self) -> bool:
        return bool(self._lines) or self._writing

    def _tried(self) -> bool:
        return not self._unwritten() or (self._failing and not self._asked and not self._writing)

    @property
    def unwritten(self) -> int:
        """Records that wait for the disk."""
        return self._records

    def _drop(self, records: int) -> None:
        self._missing += records
        self.lost += records
        self._dropped(records)

    def _due(self) -> bool:
        many = len(self._lines) >= MOST_UNWRITTEN or self._bytes >= QUEUE_BYTES // 2
        return self._asked or self._closing or (many and not self._failing)

    def _run(self) -> None:
        while not self._closing or self._lines:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                self._changed.wait_for(self._due, LONGEST_UNWRITTEN)
                lines, self._lines = self._lines, []
                self._writing, self._asked = True, False
            data = b"".join(lines)
            kept, error = self._file.append(data)
            with self._changed:
                self._written(data, kept, error)
                self._changed.notify_all()
                if error is not None and self._closing:
                    break
        self._file.close()

    def _written(self, data: bytes, kept: int, error: OSError | None) -> None:
        self._writing = self._hangs = False
        self._bytes -= kept
        rest = data[kept:]
        if rest:
            self._lines.insert(0, rest)
        self._records -= self._file.records_in(data[:kept])
        if error is None and self._failing:
            log.warning(
                "writing to %s works again; %s dropped in the meantime",
                self._path,
                _were(self._missing),
            )
            self._missing = 0
        elif error is not None and not self._failing:
            log.error(
                "cannot write to %s (%s): each write is retried; see kendall_dropped_records_total",
                self._path,
                error.strerror or error,
            )
        self._failing = error is not None


class _RunFile:
    """A file that ends with a whole line, whatever the disk does. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._regular = True
        self._headed = False  # the header is written

    def append(self, data: bytes) -> tuple[int, OSError | None]:
        """How many bytes are in the file now, and why not all of them."""
        done = 0
        try:
            descriptor = self._open()
            before = os.fstat(descriptor).st_size
            while done < len(data):
                done += os.write(descriptor, data[done:])
        except OSError as error:
            if not self._regular or not done:
                return done, error
            whole = data.rfind(b"\n", 0, done) + 1
            with suppress(OSError):
                os.ftruncate(descriptor, before + whole)
            return whole, error
        return done, None

    def records_in(self, data: bytes) -> int:
        """Lines but for the header, which is the first."""
        lines = data.count(b"\n")
        if lines and not self._headed:
            self._headed = True
            return lines - 1
        return lines

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if kept := keep_old(self._path):
                log.info("%s existed already and was renamed to %s", self._path, kept)
            descriptor = os.open(self._path, _MODE, 0o666)
            self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if self._regular:
                os.ftruncate(descriptor, 0)  # at most a header without records
            self._descriptor = descriptor
        return self._descriptor


def keep_old(path: Path) -> Path | None:
    """Rename a file that holds more than a header, by the time of its last change; its new name."""
    if not path.is_file() or _is_only_a_header(path):
        return None
    return put_aside(path)


def _is_only_a_header(path: Path) -> bool:
    with path.open("rb") as file:
        lines = list(islice(file, 2))
    if not lines:
        return True
    try:
        msgspec.json.decode(lines[0], type=Header)
    except msgspec.MsgspecError:
        return False
    return len(lines) == 1


def _were(count: int) -> str:
    return f"{counted(count, 'record')} {'was' if count == 1 else 'were'}"
