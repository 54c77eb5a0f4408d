"""Which probe to run next in an idle moment, how long to rest after it, and when to fit the law
again. No clock and no engine.

A probe is a designed cell or the closed loop. It is run only where it is expected to take at most
`longest`, by a bound that needs no fitted law: under any law with coefficients >= 0 a batch of b'
requests, l' tokens and prompts of p' tokens takes at most (b'/b)(l'/l)(p'/p) times as long as one
of b, l and p, where b <= b', l <= l', p <= p'. The smallest cell is measured first, and each
measured cell may admit larger ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kendall.policies import SpecError
from kendall.queueing.latency.fit import Measured
from kendall.server.calibration.designed import Cell
from kendall.server.calibration.turnaround import ClosedLoop


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Bounds on idle probes."""

    quiet: float = 2.0  # seconds without arrival or outcome before a probe
    longest: float = 0.25  # seconds that a probe may be expected to take
    share: float = 0.2  # of idle time, while the law is being learned
    upkeep: float = 0.02  # of idle time, once every cell has `kept` measurements
    fewest: int = 3  # measurements of each cell before a law is fitted
    kept: int = 8  # newest measurements of each cell
    retry: float = 60.0  # seconds until the smallest cell is tried again after it took too long

    def __post_init__(self) -> None:
        if not (
            0 < self.upkeep <= self.share <= 1
            and self.longest > 0
            and 2 <= self.fewest <= self.kept
            and self.quiet >= 0
        ):
            raise SpecError(
                f"got {self}; expected 0 < upkeep <= share <= 1, longest > 0 and 2 <= fewest <= "
                "kept"
            )


class ProbedCell:
    """A designed cell, whose members are alike, with its newest measurements."""

    def __init__(self, cell: Cell, kept: int) -> None:
        self.cell = cell
        self.batch_size = len(cell.lengths)
        self.length = max(cell.lengths)
        self.prompt_tokens = cell.prompt_tokens
        self.measured: deque[Measured] = deque(maxlen=kept)
        self.count = 0  # measurements so far, with those no longer kept

    def add(self, measured: Measured) -> None:
        """Keep one measurement."""
        self.measured.append(measured)
        self.count += 1

    @property
    def service_time(self) -> float | None:
        """Median of the kept measurements, seconds."""
        if not self.measured:
            return None
        return median(batch.service_time for batch in self.measured)

    def bound_on(self, other: ProbedCell) -> float:
        """Seconds that another cell takes at most, by the measurements of this one; infinite
        without measurements, or where the other is smaller in any respect.
        """
        service_time = self.service_time
        if (
            service_time is None
            or other.batch_size < self.batch_size
            or other.length < self.length
            or other.prompt_tokens < self.prompt_tokens
        ):
            return math.inf
        return (
            service_time
            * (other.batch_size / self.batch_size)
            * (other.length / self.length)
            * (other.prompt_tokens / self.prompt_tokens)
        )


class ProbedLoop:
    """The closed loop with its newest measurements."""

    def __init__(self, loop: ClosedLoop, kept: int) -> None:
        self.loop = loop
        self.slot_times: deque[float] = deque(maxlen=kept)  # seconds
        self.count = 0  # measurements so far, with those no longer kept

    def add(self, slot_time: float) -> None:
        """Keep one measurement, the mean time that a slot was held, seconds."""
        self.slot_times.append(slot_time)
        self.count += 1


class ProbeSchedule:
    """The newest measurements of every cell and of the closed loop, and what follows from them."""

    def __init__(self, grid: Sequence[Cell], loop: ClosedLoop, limits: ProbeLimits) -> None:
        self.grid = list(grid)
        self.loop = loop
        self._limits = limits
        self.clear()

    def clear(self) -> None:
        """Forget everything that was measured."""
        kept = self._limits.kept
        self._cells = [ProbedCell(cell, kept) for cell in self.grid]
        self._smallest = min(
            self._cells, key=lambda cell: (cell.batch_size, cell.length, cell.prompt_tokens)
        )
        self._loop = ProbedLoop(self.loop, kept)
        self._fitted_rounds = self._limits.fewest - 1  # rounds at the last fit; none so far

    def next(self, rng: np.random.Generator) -> ProbedCell | ProbedLoop | None:
        """One of the probes run least often, at random; None where not even the smallest cell is
        short enough.
        """
        admitted = self.admitted()
        if not admitted:
            return None
        fewest = min(probe.count for probe in admitted)
        due = [probe for probe in admitted if probe.count == fewest]
        return due[int(rng.choice(len(due)))]

    def admitted(self) -> list[ProbedCell | ProbedLoop]:
        """The probes that are expected to take at most `longest`."""
        longest = self._limits.longest
        admitted: list[ProbedCell | ProbedLoop] = [
            cell for cell in self._cells if self._expected(cell) <= longest
        ]
        if self._loop_expected() <= longest:
            admitted.append(self._loop)
        return admitted

    def _expected(self, cell: ProbedCell) -> float:
        """Seconds by the cell's own measurements, else the least bound by those of smaller cells.
        The smallest cell has no bound: 0 admits it.
        """
        service_time = cell.service_time
        if service_time is not None:
            return service_time
        if cell is self._smallest:
            return 0.0
        return min(smaller.bound_on(cell) for smaller in self._cells)

    def _loop_expected(self) -> float:
        """Seconds that the loop's requests would take one after the other, each at its bound by the
        cells with a batch of one: a request that is longer than the cell's takes at most so many
        times as long, a shorter one no longer.
        """
        alone = [
            (cell.length, cell.service_time)
            for cell in self._cells
            if cell.batch_size == 1 and cell.service_time is not None
        ]
        return math.fsum(
            min((time * max(1.0, length / known) for known, time in alone), default=math.inf)
            for length in self.loop.lengths
        )

    def forget_smallest(self) -> None:
        """Admit the smallest cell again: it was too slow, and may have been so by chance."""
        self._smallest.measured.clear()

    @property
    def rounds(self) -> int:
        """Measurements that every admitted probe has."""
        return min((probe.count for probe in self.admitted()), default=0)

    @property
    def full(self) -> bool:
        """Whether every admitted probe has as many measurements as are kept."""
        return self.rounds >= self._limits.kept

    def rest(self, took: float) -> float:
        """Seconds to leave the engine alone after a probe of `took`, so that the share of idle
        time is kept.
        """
        share = self._limits.upkeep if self.full else self._limits.share
        return took * (1 / share - 1)

    @property
    def is_due_for_fit(self) -> bool:
        """Whether a round, the `fewest`-th or a later one, has ended since the last fit."""
        return self.rounds > self._fitted_rounds

    def mark_fitted(self) -> None:
        """The law is fitted to all rounds so far."""
        self._fitted_rounds = self.rounds

    def measured(self) -> list[Measured]:
        """The kept measurements of the cells that have `fewest` or more."""
        return [
            batch
            for cell in self._cells
            if len(cell.measured) >= self._limits.fewest
            for batch in cell.measured
        ]

    def slot_time(self) -> float | None:
        """Mean of the loop's kept measurements, seconds; None below `fewest`."""
        times = self._loop.slot_times
        return sum(times) / len(times) if len(times) >= self._limits.fewest else None
