"""An adaptive limit on the sequences in the system: additive increase, multiplicative decrease on
the standing queue.

The rule is that of TCP's congestion avoidance (Chiu and Jain 1989). The signal is that of CoDel
(Nichols and Jacobson 2012), the least queueing delay of a window: a queue that empties now and then
only absorbs bursts, one that never empties only adds delay.

At the end of a window (two mean service times, at least 0.1 s):

    least delay in it > one mean service time        limit <- max(floor, 0.9 limit)
    else, if a call was rejected at the limit        limit <- limit + 1

The floor is twice what policy and engine can have in service: with a smaller limit too few requests
would wait to fill a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kendall.queueing.measurement.record import Record
from kendall.server.queue.sequence import Batch

DECREASE = 0.9  # factor on the limit
SHORTEST_WINDOW = 0.1  # seconds
NEWEST_WEIGHT = 0.1  # of the newest service time in the exponentially weighted mean


class AdaptiveLimit:
    """The limit in force, learned from dispatches, records and rejections; `floor` is read anew at
    each use, because policy and servers change.
    """

    def __init__(self, floor: Callable[[], int], now: float) -> None:
        self._floor = floor
        self._learned = 0  # the floor holds until the first increase
        self.service_time: float | None = None  # mean, seconds
        self._window_began_at = now
        self._least_delay = math.inf  # in the window, seconds
        self._reached = False  # in the window

    @property
    def limit(self) -> int:
        """Sequences that may be in the system now."""
        return max(self._floor(), self._learned)

    def on_rejection(self) -> None:
        """A call was rejected because the limit was reached."""
        self._reached = True

    def on_record(self, record: Record) -> None:
        """Update the mean service time."""
        newest, mean = record.service_time, self.service_time
        if newest is not None:
            self.service_time = newest if mean is None else mean + NEWEST_WEIGHT * (newest - mean)

    def on_dispatch(self, batch: Batch) -> None:
        """Update the least delay, which in a batch is that of its youngest member, and change the
        limit if the window is over.
        """
        now = batch.dispatched_at
        youngest = max(sequence.engine_request.request.arrived_at for sequence in batch.sequences)
        self._least_delay = min(self._least_delay, now - youngest)
        service_time, elapsed = self.service_time, now - self._window_began_at
        if service_time is None or elapsed < max(SHORTEST_WINDOW, 2 * service_time):
            return
        if self._least_delay > service_time:
            self._learned = max(self._floor(), int(DECREASE * self.limit))
        elif self._reached:
            self._learned = self.limit + 1
        self._window_began_at, self._least_delay, self._reached = now, math.inf, False
