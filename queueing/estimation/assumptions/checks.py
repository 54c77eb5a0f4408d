"""Laws that hold whatever the queue: where one of these breaks, the measurement is wrong, not the
theory.

    conservation      arrived = ended + waiting + in service                         counts, exactly
    Little's law      time average of the number in the system, as the gateway's own counter had it,
                      = seconds of presence in the window, added up from the records, / T
    utilisation law   busy time as the servers' own counters had it
                      = union of service intervals from the records, / T / servers

The sums over records are cut at the window's edges, so both sides measure the same thing and no
edge effect is left; what may differ is the instant at which a counter and a record saw the same
event: `slack` seconds per event. tolerance = slack x events / T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kendall.queueing.estimation.change import Vector

SLACK = 0.0005  # seconds between a counter and a record, per event


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`holds` is |measured - expected| <= tolerance."""

    name: str
    expected: float
    measured: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """False also where a side is not a number."""
        return abs(self.measured - self.expected) <= self.tolerance

    def as_dict(self) -> dict[str, str | float]:
        """As JSON."""
        sides = {"by_counters": self.measured, "by_records": self.expected}
        return {"name": self.name, "holds": self.holds, **sides}


def conservation(
    arrived: int, ended: Mapping[str, int], waiting: int, in_service: int
) -> SelfCheck:
    """`ended` by outcome: completed, failed, rejected, abandoned, cancelled; all since the
    process began.
    """
    return SelfCheck(
        "conservation", float(arrived), float(sum(ended.values()) + waiting + in_service), 0.0
    )


def little_law(
    counted: float,
    arrived_at: Vector,
    left_at: Vector,
    start: float,
    end: float,
    *,
    slack: float = SLACK,
) -> SelfCheck:
    """`counted`: time average of the number in the system by the counter. `left_at` inf for who
    is still there.
    """
    if not start < end:
        return SelfCheck("little", math.nan, counted, 0.0)
    present = np.minimum(left_at, end) - np.maximum(arrived_at, start)
    inside = present > 0
    events = 2.0 * int(np.count_nonzero(inside))
    return SelfCheck(
        "little",
        float(present[inside].sum()) / (end - start),
        counted,
        slack * events / (end - start),
    )


def utilisation_law(
    counted: float,
    intervals: tuple[Vector, Vector, Vector],
    start: float,
    end: float,
    *,
    servers: int = 1,
    slack: float = SLACK,
) -> SelfCheck:
    """`counted`: fraction of time that a server was busy, averaged over servers, by their counters.

    `intervals`: dispatch, instant at which the server was free (inf while in service) and server of
    every request.
    """
    if not start < end:
        return SelfCheck("utilisation", math.nan, counted, 0.0)
    begun_at, free_at, server_id = intervals
    begins, ends = np.maximum(begun_at, start), np.minimum(free_at, end)
    inside = ends > begins
    busy, stretches = 0.0, 0
    for server in np.unique(server_id[inside]):
        mine = inside & (server_id == server)
        order = np.argsort(begins[mine], kind="stable")
        begin, covered = begins[mine][order], np.maximum.accumulate(ends[mine][order])
        before = np.append(-math.inf, covered[:-1])
        busy += float(np.sum(np.maximum(0.0, covered - np.maximum(begin, before))))
        stretches += int(np.count_nonzero(begin > before))
    share = (end - start) * servers
    return SelfCheck("utilisation", busy / share, counted, 2 * slack * stretches / share)
