"""Energy of batches: joules between dispatch and the server's being free, and the line c[b] = beta
b + c0 through them.

A thread reads the device's energy every PERIOD on the event loop's own clock; a batch's energy is
the difference of that curve between its two ends (linear between readings), minus nothing: what the
device draws while idle is in it. A batch shorter than a few periods is thus its duration times the
power of its neighbourhood. Overlapping intervals share one device and cannot be told apart: they
are counted and left out. For a continuous engine give busy intervals, with the requests served in
each.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kendall.server.telemetry.energy.fit import EnergyEstimate, energy_estimate
from kendall.server.telemetry.energy.sources import Source, nvml_source, rapl_source

log = logging.getLogger("kendall.energy")
PERIOD = 0.05  # seconds between readings
KEPT = 12_000  # readings: ten minutes
BATCHES = 2_000  # the last ones
SHORT = 2.0  # periods: below, a batch's own power is not seen


@dataclass(frozen=True, slots=True)
class _Served:
    """A batch whose energy is not known yet."""

    size: int
    begin: float
    end: float
    tokens: int


class _Curve:
    """Joules since the start over time, as read."""

    def __init__(self) -> None:
        self.instants: list[float] = []
        self.joules: list[float] = []

    def add(self, instant: float, joules: float) -> None:
        """The next reading; the oldest go in larger pieces."""
        self.instants.append(instant)
        self.joules.append(joules)
        if len(self.instants) >= 2 * KEPT:
            del self.instants[:KEPT], self.joules[:KEPT]

    def at(self, instant: float) -> float:
        """Linear between the readings around; within the first and the last."""
        after = min(max(bisect.bisect_right(self.instants, instant), 1), len(self.instants) - 1)
        t0, t1, e0, e1 = *self.instants[after - 1 : after + 1], *self.joules[after - 1 : after + 1]
        return e0 + (e1 - e0) * (instant - t0) / (t1 - t0) if t1 > t0 else e1


class EnergyMeter:
    """The energy of one engine. Without a source nothing runs and `estimate` is None."""

    def __init__(self, source: Source | None, period: float = PERIOD) -> None:
        self.source = source
        self._period = period
        self._curve = _Curve()
        self._pending: deque[_Served] = deque(maxlen=KEPT)
        self._batches: deque[tuple[int, float, int]] = deque(maxlen=BATCHES)  # size, joules, tokens
        self._free_at = -math.inf  # of the last batch
        self._now: Callable[[], float]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.short = self.overlapping = 0

    @classmethod
    def of_machine(cls, *, gpu: bool, devices: int = 1) -> EnergyMeter:
        """For an engine on the first `devices` NVIDIA devices, or on this machine's CPUs;
        without a source where none can be read.
        """
        return cls(nvml_source(devices) if gpu else rapl_source())

    def start(self, now: Callable[[], float]) -> None:
        """Read from here on, in a thread; `now` is the clock of the batches' instants and is
        called there.
        """
        if self.source is None or self._thread is not None:
            return
        self._now = now
        if self.sample():
            self._thread = threading.Thread(target=self._run, name="kendall-energy", daemon=True)
            self._thread.start()

    def on_batch(
        self, batch_size: int, dispatched_at: float, free_at: float, output_tokens: int
    ) -> None:
        """A server became free, in the order in which they did; `output_tokens` of all members.
        Does not wait, reads nothing.
        """
        if self.source is None:
            return
        if dispatched_at < self._free_at:
            self.overlapping += 1
        else:
            self._pending.append(_Served(batch_size, dispatched_at, free_at, output_tokens))
        self._free_at = max(self._free_at, free_at)

    def estimate(self) -> EnergyEstimate | None:
        """From the last batches; None without a source, or where sizes or batches are too few."""
        batches = list(self._batches)
        if not batches:
            return None
        sizes, joules, tokens = np.array(batches, dtype=np.float64).T
        return energy_estimate(sizes, joules, tokens)

    def joules(self) -> float | None:
        """All that was counted since the start."""
        return self._curve.joules[-1] if self._curve.joules else None

    def state(self) -> dict[str, Any]:
        """For `/admin/state`."""
        return {
            "source": None if self.source is None else self.source.name,
            "joules": self.joules(),
            "batches": len(self._batches),
            "short": self.short,
            "overlapping": self.overlapping,
        }

    def described(self) -> dict[str, Any]:
        """The same, and what a batch, a request of it and a token cost."""
        found = self.estimate()
        if found is None:
            return self.state() | {"estimate": None}
        terms = {"beta": found.beta, "c0": found.c0, "per_token": found.per_token}
        return self.state() | {"estimate": terms}

    def close(self) -> None:
        """Stop reading; what was read stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self.source is not None:
            self.source.close()
            self.source = None

    def sample(self) -> bool:
        """One reading, at the middle of the time it took, and the batches that ended before it;
        False where the device is lost.
        """
        assert self.source is not None
        before = self._now()
        try:
            joules = self.source.joules(before)
        except (OSError, ValueError) as error:
            log.warning("energy measurement stopped: %s", error)
            return False
        self._curve.add((before + self._now()) / 2, joules)
        self._weigh_pending()
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            if not self.sample():
                return

    def _weigh_pending(self) -> None:
        """What began before the first reading that is kept is left out."""
        instants = self._curve.instants
        while self._pending and self._pending[0].end <= instants[-1]:
            batch = self._pending.popleft()
            if batch.begin >= instants[0]:
                self._batches.append(
                    (
                        batch.size,
                        self._curve.at(batch.end) - self._curve.at(batch.begin),
                        batch.tokens,
                    )
                )
                self.short += batch.end - batch.begin < SHORT * self._period
