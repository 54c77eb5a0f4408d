"""stdout of the command, watched: an OSError of writing it can be told from one of a file or a
connection.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class _WatchedStdout(io.FileIO):
    """Keeps its first error. Without a buffer above it (PYTHONUNBUFFERED) nothing is left that
    would fail again.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def watch() -> None:
    """Put a watched stream of the same kind in the place of `sys.stdout`; one that a test has
    put there stays.
    """
    stream = sys.stdout
    if stream is None or stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return
    raw = _WatchedStdout(stream.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def flush() -> None:
    """Write what is still buffered: a full disk or a closed pipe may show only now. Raises
    OSError.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def failure() -> OSError | None:
    """Why stdout could not be written; None where it could."""
    buffer = getattr(sys.stdout, "buffer", None)
    found = getattr(getattr(buffer, "raw", buffer), "error", None)
    return found if isinstance(found, OSError) else None


def discard() -> None:
    """Send what is still buffered nowhere: it would fail once more, with a traceback, when the
    process ends.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
