"""The run file of a serving gateway: one line per request, written as outcomes become known."""

from __future__ import annotations

from pathlib import Path

from queueing.record import Header, Record, to_line
from server.batch import Batch
from server.ticket import Ticket


class Recorder:
    """An observer that appends records to a file; `flush` before somebody reads it."""

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=1 << 20)
        self._file.write(to_line(header))
        self.flush()

    def on_arrival(self, ticket: Ticket) -> None:
        """Nothing yet."""

    def on_dispatch(self, batch: Batch) -> None:
        """Nothing yet."""

    def on_idle(self, server_id: int, at: float) -> None:
        """Nothing yet."""

    def on_settle(self, ticket: Ticket) -> None:
        """Nothing yet."""

    def on_record(self, record: Record) -> None:
        """One line."""
        self._file.write(to_line(record))

    def flush(self) -> None:
        """Everything so far is in the file."""
        self._file.flush()

    def close(self) -> None:
        """The last line is in the file."""
        self._file.close()
