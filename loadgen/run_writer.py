"""A run file that grows while the run goes on, so that a generator that is killed keeps what it measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from queueing.record import Header, Record, to_line, write_run


class RunWriter:
    """Appends each record as one whole line at once: a kill cuts the last line at the most."""

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(to_line(header))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, record: Record) -> None:
        """One line more."""
        self._file.write(to_line(record))


def replace_run(path: Path, header: Header, records: Iterable[Record]) -> None:
    """Put the whole run in the place of what was written on the way; there is no instant without a file."""
    whole = path.with_name(path.name + ".whole")
    write_run(whole, header, records)
    os.replace(whole, path)
