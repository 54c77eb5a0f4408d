"""A run file that grows while the run goes on, so that a generator that is killed keeps what it
measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Self

from kendall.queueing.measurement.record import Header, Record, to_line, write_run


class RunWriter:
    """Appends each record as one whole line at once: a kill cuts the last line at the most."""

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("wb", buffering=0)
        try:
            self._write(to_line(header))
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, record: Record) -> None:
        """Append one line. Raises OSError with the name of the file."""
        self._write(to_line(record))

    def _write(self, line: bytes) -> None:
        try:
            write_whole(self._file, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def write_whole(file: FileIO, line: bytes) -> None:
    """To a file without a buffer. Raises OSError."""
    while line:  # a file system that is nearly full takes a part
        line = line[file.write(line) :]


def replace_run(path: Path, header: Header, records: Iterable[Record]) -> None:
    """Replace the lines written during the run by the whole run; there is no instant without a
    file. Raises OSError.

    A device or a pipe is not replaced.
    """
    if path.exists() and not path.is_file():
        return
    whole = path.with_name(path.name + ".whole")
    try:
        write_run(whole, header, records)
        os.replace(whole, path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise
