"""Whether the server kept up with a load run: the queue's growth while requests were sent, from the
run's own records.

The rule is that of a sweep's unstable points (loadgen.measures.stability). Where the server reports
queueing delays, those who wait are counted: long answers fill the server at the beginning of every
run, and are no growth of a queue. Elsewhere the number in the system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.measures.metrics import began_at
from loadgen.measures.stability import LEAST_SECONDS, Growth, growth
from queueing.measurement.record import Record

SAMPLES = 1000


def backlog(records: Sequence[Record]) -> Growth | None:
    """Between the first and the last intended instant; None where those are too near each other
    to say anything.
    """
    known = [(at, record) for record in records if (at := began_at(record)) is not None]
    begin = np.sort(np.array([at for at, _ in known]))
    if begin.size < 2 or begin[-1] - begin[0] < LEAST_SECONDS:
        return None
    reported = any(record.queueing_delay is not None for _, record in known)
    end = np.sort(np.array([_left_at(at, record, reported=reported) for at, record in known]))
    instants = np.linspace(begin[0], begin[-1], SAMPLES)
    number = np.searchsorted(begin, instants, side="right") - np.searchsorted(
        end, instants, side="right"
    )
    return growth(
        instants - begin[0],
        number.astype(np.float64),
        (begin.size - 1) / float(begin[-1] - begin[0]),
    )


def _left_at(began: float, record: Record, *, reported: bool) -> float:
    """When it left the queue, or the system; what was never answered stays."""
    if reported and record.queueing_delay is not None:
        return (began if record.sent_at is None else record.sent_at) + record.queueing_delay
    return math.inf if record.released_at is None else record.released_at
