"""Which cell to measure next in an idle moment, when, and when to look at the law again. Pure: no
clock, no engine.

A cell is measured only where it is expected to take at most `longest`. Nobody's law is asked for
that: under any law with coefficients >= 0 a batch of (b', l', p') takes at most (b'/b)(l'/l)(p'/p)
times as long as one of (b, l, p), b <= b', l <= l', p <= p'. So the smallest cell comes first, and
each measured one may admit larger ones.
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

LOOP = -1  # the closed loop, among the indices of cells


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Bounds of the probing; seconds and fractions of idle time."""

    quiet: float = 2.0  # without arrival or outcome before anything is measured
    longest: float = 0.25  # that a cell may be expected to take
    share: float = 0.2  # of idle time, while the law is being learned
    upkeep: float = 0.02  # of idle time, once every cell has `kept` measurements
    fewest: int = 3  # measurements of each cell before a law is fitted
    kept: int = 8  # last measurements of each cell
    retry: float = 60.0  # until the smallest cell is tried again after it took too long

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


class ProbeSchedule:
    """The last measurements of every cell, and of the closed loop."""

    def __init__(self, grid: Sequence[Cell], loop: ClosedLoop, limits: ProbeLimits) -> None:
        self.grid = list(grid)
        self.loop = loop
        self._limits = limits
        self._smallest = min(range(len(self.grid)), key=lambda index: _size(self.grid[index]))
        self.clear()

    def clear(self) -> None:
        """Forget everything that was measured."""
        self._kept: list[deque[Measured]] = [deque(maxlen=self._limits.kept) for _ in self.grid]
        self._counts = [0] * len(self.grid)
        self._slot_times: deque[float] = deque(maxlen=self._limits.kept)
        self._loops = 0
        self._fitted_at = self._limits.fewest - 1  # rounds seen by the last fit

    def next(self, rng: np.random.Generator) -> int | None:
        """One of the cells measured least often, at random; None where not even the smallest is
        short enough.
        """
        due = self.admitted()
        if not due:
            return None
        counts = [self._count(index) for index in due]
        return int(
            rng.choice(
                [index for index, count in zip(due, counts, strict=True) if count == min(counts)]
            )
        )

    def add(self, index: int, found: Measured | float) -> None:
        """One measurement: of a cell, or the slot time of the loop."""
        if isinstance(found, Measured):
            self._kept[index].append(found)
            self._counts[index] += 1
        else:
            self._slot_times.append(found)
            self._loops += 1

    def admitted(self) -> list[int]:
        """Cells, and the loop, that are expected to take at most `longest`."""
        found = [
            index for index in range(len(self.grid)) if self.expected(index) <= self._limits.longest
        ]
        return found + ([LOOP] if self._loop_expected() <= self._limits.longest else [])

    def expected(self, index: int) -> float:
        """Seconds: its own median, or the least bound from smaller cells. The smallest has 0
        until it is measured.
        """
        own = self._kept[index]
        if own:
            return median(one.service_time for one in own)
        if index == self._smallest:
            return 0.0
        size, length, prompt = _size(self.grid[index])
        bound = math.inf
        for cell, kept in zip(self.grid, self._kept, strict=True):
            b, n, p = _size(cell)
            if kept and b <= size and n <= length and p <= prompt:
                times = median(one.service_time for one in kept)
                bound = min(bound, times * (size / b) * (length / n) * (prompt / p))
        return bound

    def forget_smallest(self) -> None:
        """Try it again: it was too slow, and may have been so by chance."""
        self._kept[self._smallest].clear()

    @property
    def rounds(self) -> int:
        """Measurements that every admitted cell has."""
        return min((self._count(index) for index in self.admitted()), default=0)

    @property
    def full(self) -> bool:
        """Whether every admitted cell has as many as are kept."""
        return self.rounds >= self._limits.kept

    def due_for_fit(self) -> bool:
        """Once a round, from `fewest` on; asking marks the round as seen."""
        rounds = self.rounds
        if rounds <= self._fitted_at:
            return False
        self._fitted_at = rounds
        return True

    def measured(self) -> list[Measured]:
        """What is kept of the cells that have `fewest` or more."""
        return [one for kept in self._kept if len(kept) >= self._limits.fewest for one in kept]

    def slot_time(self) -> float | None:
        """Mean over the loops that are kept, if there are `fewest`."""
        times = self._slot_times
        return sum(times) / len(times) if len(times) >= self._limits.fewest else None

    def rest(self, took: float) -> float:
        """Seconds to leave the engine alone after a probe of `took`, so that the share of idle
        time is kept.
        """
        share = self._limits.upkeep if self.full else self._limits.share
        return took * (1 / share - 1)

    def _count(self, index: int) -> int:
        return self._loops if index == LOOP else self._counts[index]

    def _loop_expected(self) -> float:
        """All of its requests one after the other, each bounded by a batch of one that was
        measured.
        """
        single = [
            (_size(cell)[1], median(one.service_time for one in kept))
            for cell, kept in zip(self.grid, self._kept, strict=True)
            if kept and _size(cell)[0] == 1
        ]
        bounds = [
            min((time * max(1.0, length / n) for n, time in single), default=math.inf)
            for length in self.loop.lengths
        ]
        return math.fsum(bounds)


def _size(cell: Cell) -> tuple[int, int, int]:
    """Batch size, length and prompt of a designed cell, whose members are alike."""
    return len(cell.lengths), max(cell.lengths), cell.prompt_tokens
