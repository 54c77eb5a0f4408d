"""What the last minutes showed, written and read in one process: a producer with its replica.

Where the reader is another process, the gateway keeps the `WindowProducer` alone and sends what it
takes to the `WindowReplica` there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kendall.queueing.estimation.window.producer import MOST, WindowDelta, WindowProducer
from kendall.queueing.estimation.window.replica import SECONDS, WindowReplica
from kendall.queueing.estimation.window.snapshot import (
    CENSORED,
    COLUMN,
    ENDED,
    FIELDS,
    WIDTH,
    WITHOUT_LENGTH,
    Snapshot,
)
from kendall.queueing.measurement.record import Record, call_of

__all__ = [
    "CENSORED",
    "COLUMN",
    "ENDED",
    "FIELDS",
    "MOST",
    "SECONDS",
    "WIDTH",
    "WITHOUT_LENGTH",
    "Snapshot",
    "Window",
    "WindowDelta",
    "WindowProducer",
    "WindowReplica",
    "snapshot_of",
]


@dataclass(slots=True, kw_only=True)
class Window(WindowProducer):
    """The last `seconds`, at most `most` requests."""

    seconds: float = SECONDS
    _replica: WindowReplica = field(default_factory=WindowReplica)

    def __post_init__(self) -> None:
        self._replica = WindowReplica(seconds=self.seconds, most=self.most)

    def snapshot(
        self,
        policy: str,
        now: float,
        *,
        in_service: tuple[tuple[float, int], ...] = (),
        ended: tuple[tuple[float, int], ...] = (),
        waiting: int = 0,
        servers: int = 1,
    ) -> Snapshot:
        """Arrays of what lies in the window; later requests do not modify them."""
        self._replica.add(self.take())
        return self._replica.snapshot(
            policy, now, in_service=in_service, ended=ended, waiting=waiting, servers=servers
        )


def snapshot_of(
    records: list[Record],
    policy: str,
    start: float,
    now: float,
    *,
    epoch: int = 0,
    servers: int = 1,
) -> Snapshot:
    """The same from a finished run: requests that arrived in (start, now]."""
    window = Window(seconds=math.inf, most=max(1, len(records)), epoch=epoch, epoch_at=start)
    kept = [
        (record.arrived_at, record)
        for record in records
        if record.arrived_at is not None and start < record.arrived_at <= now
    ]
    for at, call in sorted((at, call_of(record.request_id) or "") for at, record in kept):
        window.on_arrival(at, call=call or None)
    for _, record in kept:
        window.on_record(record)
    return window.snapshot(policy, now, servers=servers)
