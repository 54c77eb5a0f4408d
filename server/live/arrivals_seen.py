"""What arrived: the last instants of the epoch in a ring, audited when somebody asks.

An instant is the kernel's where it has one (`server.http.arrival_timestamps`), so that the verdict
is about the clients, not about the gateway's event loop. One call is one arrival, however many
sequences it asks for. Seeing one costs about a microsecond; the audit of a full ring costs three to
eight milliseconds of the event loop, once for each state asked for.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
)


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
        self._known: tuple[tuple[int, int], dict[str, Any]] | None = None
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

    def state(self, epoch: int) -> dict[str, Any]:
        """For `/admin/state`: what arrived in this epoch, and the audit of the last of it."""
        if epoch != self._epoch:
            self._begin(epoch)
        key = self._epoch, self.count
        if self._known is None or self._known[0] != key:
            self._known = key, _described(self._audit(self.instants[-KEPT:]))
        return {"count": self.count, "retries": self.retries} | self._known[1]

    def _begin(self, epoch: int) -> None:
        self._epoch, self.count, self.retries = epoch, 0, 0
        self.instants = array("d")


def _described(audit: Audit) -> dict[str, Any]:
    """Without what only a load generator knows; null where nothing can be said."""
    shown = {name: getattr(audit, name) for name in _SHOWN}
    shown = {name: None if value != value else value for name, value in shown.items()}  # noqa: PLR0124 - JSON knows no NaN
    return shown | {"tests": [dataclasses.asdict(test) for test in audit.tests]}
