"""Looks at a running cell: the gateway's run file read on as it grows, the mean so far with its
interval, the live prediction.

Reading happens in a thread, a few thousand records a look: the sender shares this loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.gateway.gateway_process import GatewayClient
from queueing.measurement.record import Record
from queueing.measurement.statistics import Interval, mean_interval, warm_up


@dataclass(slots=True)
class Follower:
    """The delays (or sojourns) of one epoch's completed requests, from a file that grows."""

    path: Path
    offset: int
    epoch: int
    sojourn: bool
    _values: list[tuple[float, float]] = field(default_factory=list)  # arrival, value

    def read(self) -> Interval:
        """What was written since the last time; the interval of all, warm-up left out."""
        decoder = msgspec.json.Decoder(Record)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self.offset += whole
        for line in content[:whole].splitlines():
            record = decoder.decode(line)
            value = record.sojourn_time if self.sojourn else record.queueing_delay
            if (
                record.epoch == self.epoch
                and record.outcome == "completed"
                and value is not None
                and record.arrived_at is not None
            ):
                self._values.append((record.arrived_at, value))
        self._values.sort()
        values = np.array([value for _, value in self._values])
        return mean_interval(values[warm_up(values.size) :])


@dataclass(frozen=True, slots=True)
class Look:
    """One of them."""

    observed: Interval
    live: dict[str, Any] | None  # the prediction of this epoch, where the gateway has one
    reason: str | None  # why it has none

    def __str__(self) -> str:
        mean, half = self.observed.mean * 1e3, self.observed.relative
        predicted = None if self.live is None else self.live["interval"]["value"]
        shown = (
            "no live prediction yet" if predicted is None else f"predicted {predicted * 1e3:.3g} ms"
        )
        return f"observed {mean:.3g} ms +-{half:.0%} ({self.observed.n}), {shown}"


async def look(client: GatewayClient, follower: Follower) -> Look:
    """Now. Raises GatewayError."""
    await client.ask("GET", "/admin/state")  # flushes the run file
    observed = await asyncio.to_thread(follower.read)
    answer = await client.ask("GET", "/admin/prediction")
    found = answer.get("prediction")
    # without its epoch it is that of a gateway whose live model says nothing of windows
    usable = (
        found is not None
        and found.get("epoch") == follower.epoch
        and found.get("window")
        and found.get("interval")
    )
    return Look(
        observed,
        found if usable else None,
        None if usable else str(answer.get("reason") or "none of this epoch yet"),
    )


def enough(seen: Look, seconds: float, *, half_width: float, least: float) -> bool:
    """Whether the mean is known well enough, by a run that is not too short to say so, and there
    is a prediction to set beside it.
    """
    known = seen.observed.relative <= half_width and not seen.observed.too_short
    return seconds >= least and known and seen.live is not None
