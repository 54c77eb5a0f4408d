"""An adaptive bound on the requests in the system: additive increase, multiplicative decrease on
the standing delay.

The rule is Chiu and Jain's (1989), which every TCP ends up at; what it reacts to is CoDel's
(Nichols and Jacobson 2012): the least queueing delay of a window, because a queue that empties now
and then is a buffer at work and one that never does only adds delay.

    a window (two mean service times, at least 0.1 s) is over:
        least delay in it > one mean service time           limit <- max(floor, 0.9 limit)
        else, if the limit was met in it                    limit <- limit + 1

The floor is what policy and engine can have in service and as much again: a smaller limit would
starve batches (an outer limit below the batch size is the classic way never to fill one).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kendall.queueing.measurement.record import Record
from kendall.server.queue.sequence import Batch

DECREASE = 0.9
SHORTEST = 0.1  # seconds of a window
WEIGHT = 0.1  # of the newest service time in the mean


class AdaptiveLimit:
    """Fed with dispatches and records; `limit` is what may be in the system."""

    def __init__(self, floor: Callable[[], int], now: float) -> None:
        self._floor = floor
        self._window_from = now
        self._least = math.inf  # delay in this window, seconds
        self._met = False
        self.service_time: float | None = None  # mean, seconds
        self.limit = 0.0  # the floor holds until something has been seen

    @property
    def bound(self) -> int:
        """Sequences that may be in the system now."""
        return max(self._floor(), int(self.limit))

    def refused(self) -> None:
        """The limit was met."""
        self._met = True

    def on_dispatch(self, batch: Batch) -> None:
        """The least delay; the youngest member's."""
        youngest = max(sequence.engine_request.request.arrived_at for sequence in batch.sequences)
        self._least = min(self._least, batch.dispatched_at - youngest)
        self._judge(batch.dispatched_at)

    def on_record(self, record: Record) -> None:
        """The mean service time."""
        if record.service_time is not None:
            mean = self.service_time
            self.service_time = (
                record.service_time
                if mean is None
                else mean + WEIGHT * (record.service_time - mean)
            )

    def _judge(self, now: float) -> None:
        if self.service_time is None or now - self._window_from < max(
            SHORTEST, 2 * self.service_time
        ):
            return
        if self._least > self.service_time:
            self.limit = max(self._floor(), DECREASE * self.bound)
        elif self._met:
            self.limit = self.bound + 1.0
        self._window_from, self._least, self._met = now, math.inf, False
