"""Little's law on a run's own records: L = lambda W, up to what crosses the edges of the window.

L is the time average of the number in the system, from the intended and the final instants; lambda
W is the rate of the window times the mean time AS RECORDED. They must agree once the edges are
counted, or the records are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.loadgen.measures.metrics import began_at
from kendall.queueing.measurement.little import little
from kendall.queueing.measurement.record import Record

TOLERANCE = 1e-6  # of L: instants are doubles, of seconds since a machine's start
ROUNDING = 1e-12  # of lambda W, which the edges of a window far shorter than its requests cancel


@dataclass(frozen=True, slots=True)
class LittleCheck:
    """Both sides of the law, and the part of their difference that the edges of the window
    explain; in requests.
    """

    number_in_system: float
    rate_times_time: float
    edges: float  # brought in from before the window, less taken out of it

    @property
    def residual(self) -> float:
        """The difference that the edges do not explain."""
        return self.number_in_system - self.rate_times_time - self.edges

    @property
    def holds(self) -> bool:
        """Whether the residual is rounding."""
        return abs(self.residual) <= max(
            TOLERANCE * max(self.number_in_system, 1.0), ROUNDING * abs(self.rate_times_time)
        )


def little_check(records: Sequence[Record], left_out: int = 0) -> LittleCheck | None:
    """Check records in order of the intended instant, from the first that is not left out to the
    last; None below two instants.

    A request that never ended stays in the system until the last one leaves.
    """
    known = [(at, record) for record in records if (at := began_at(record)) is not None]
    if len(known) - left_out < 2 or known[left_out][0] >= known[-1][0]:
        return None
    begin = np.array([since for since, _ in known])
    last = max(float(begin.max()), *(record.released_at or 0.0 for _, record in known))
    end = np.array(
        [last if record.released_at is None else record.released_at for _, record in known]
    )
    times = np.array(
        [
            until - since if record.sojourn_time is None else record.sojourn_time
            for (since, record), until in zip(known, end.tolist(), strict=True)
        ]
    )
    start, stop = float(begin[left_out]), float(begin[-1])
    # an end before its beginning then shows as a residual
    balance = little(begin, np.maximum(begin, end), start, stop)
    inside = (begin >= start) & (begin < stop)
    edges = (balance.carried_in - balance.carried_out) / (stop - start)
    return LittleCheck(
        balance.number_in_system, balance.arrival_rate * float(times[inside].mean()), edges
    )
