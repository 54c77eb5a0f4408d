"""The run file of a serving gateway: one line per request, written as outcomes become known.

A killed gateway loses the records of the last second at most. A run file that was there before is kept under another name.
"""

from __future__ import annotations

import asyncio
import io
import logging
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from queueing.record import Header, Record, to_line
from server.batch import Batch
from server.ticket import Ticket

log = logging.getLogger("kendall")
LONGEST_UNWRITTEN = 1.0  # seconds that a record waits in memory


class Recorder:
    """An observer that appends records to a file; `flush` before somebody reads it at once."""

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kept := keep_old(path):
            log.info("%s was there before: it is kept as %s", path, kept)
        self._path = path
        self._file = io.BufferedWriter(io.FileIO(path, "wb"), 1 << 20)
        self._timer: asyncio.TimerHandle | None = None
        self._failed = False
        self._file.write(to_line(header))
        self._file.flush()

    def on_arrival(self, ticket: Ticket) -> None:
        """Nothing yet."""

    def on_dispatch(self, batch: Batch) -> None:
        """Nothing yet."""

    def on_idle(self, server_id: int, at: float) -> None:
        """Nothing yet."""

    def on_settle(self, ticket: Ticket) -> None:
        """Nothing yet."""

    def on_record(self, record: Record) -> None:
        """One line, in the file within a second."""
        if self._failed:
            return
        try:
            self._file.write(to_line(record))
        except OSError as error:
            self._give_up(error)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LONGEST_UNWRITTEN, self.flush)

    def flush(self) -> None:
        """Everything so far is in the file, if it can be written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._failed:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """The last line is in the file."""
        self.flush()
        if not self._failed:
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        """Requests are served all the same."""
        self._failed = True
        self._file.raw.close()  # what the buffer holds cannot be written either
        log.error("%s cannot be written (%s): no further request is recorded", self._path, error.strerror or error)


def keep_old(path: Path) -> Path | None:
    """Rename a file that holds more than a header, by the time of its last change; its new name."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if len(list(islice(file, 2))) < 2:
            return None
    changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    kept = path.with_name(f"{path.name}.{changed:%Y%m%dT%H%M%S.%fZ}")
    path.rename(kept)
    return kept
