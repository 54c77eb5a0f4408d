"""How much memory a piece of code takes at most: a count, where a time would be the machine's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


class Peak:
    """The most bytes that were allocated at once since it began, beyond those held before."""

    value = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """`value` is set at the end."""
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
        peak.value = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
