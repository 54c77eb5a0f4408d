"""What arrived: the last instants of the epoch in a ring, audited when somebody asks.

An instant is the kernel's where it has one (`server.wire.transport`), so that the verdict
is about the clients, not about the gateway's event loop. One call is one arrival, however many
sequences it asks for. Seeing one costs about a microsecond; the audit of a full ring costs three to
eight milliseconds of the event loop, once for each state asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kendall.queueing.measurement.arrival_audit import Audit

KEPT = 4096
_SHOWN = (
    "n",
    "span",
    "rate",
    "rate_low",
    "rate_high",
    "gap_variation",
    "dispersion",
    "verdict",
    "poisson",
    "tests",
)


@dataclass(frozen=True, slots=True)
class ArrivalsSummary:
    """What arrived in an epoch, and the audit of the last of it."""

    count: int
    retries: int
    audit: Audit

    def as_dict(self) -> dict[str, object]:
        """As JSON: in one object, without what only a load generator knows."""
        audit = {name: getattr(self.audit, name) for name in _SHOWN}
        return {"count": self.count, "retries": self.retries, **audit}


class ArrivalsSeen:
    """The arrivals of one epoch: the instants of the last KEPT, how many there were, how many
    were retries.
    """

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415 - with the gateway, not with `--help`, and not while requests come in

        from kendall.queueing.measurement.arrival_audit import audit_arrivals  # noqa: PLC0415

        self._audit: Callable[[array[float]], Audit] = lambda instants: audit_arrivals(
            np.array(instants, np.float64)
        )
        self._epoch = 0
        self.instants = array("d")
        self._summary: ArrivalsSummary | None = None
        self.count = 0
        self.retries = 0

    def saw(self, instant: float, epoch: int, *, retry: bool) -> None:
        """One call has arrived and will be queued."""
        if epoch != self._epoch:
            self._begin(epoch)
        self.instants.append(instant)
        if len(self.instants) >= 2 * KEPT:
            del self.instants[:KEPT]
        self.count += 1
        self.retries += retry

    def state(self, epoch: int) -> ArrivalsSummary:
        """Of this epoch."""
        if epoch != self._epoch:
            self._begin(epoch)
        if self._summary is None or self._summary.count != self.count:
            audit = self._audit(self.instants[-KEPT:])
            self._summary = ArrivalsSummary(self.count, self.retries, audit)
        return self._summary

    def _begin(self, epoch: int) -> None:
        self._epoch, self.count, self.retries, self._summary = epoch, 0, 0, None
        self.instants = array("d")
