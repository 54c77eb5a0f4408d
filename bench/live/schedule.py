"""How long each cell may take: its advised length, more where others ended early, less where the
time is too short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.live.cell import model_of
from bench.live.design import Point, Rules
from loadgen.sweep.grid import Basis
from policies.text import SpecError
from queueing.simulation.run_length import ASSURANCE, advise_model


@dataclass(slots=True)
class Schedule:
    """Seconds of load by cell name, from `queueing.simulation.run_length` at the calibrated law."""

    basis: Basis
    rules: Rules
    advised: dict[str, float] = field(default_factory=dict)

    def plan(self, points: Iterable[Point]) -> None:
        """A pilot simulation each: seconds for them all."""
        for point in points:
            typical = self._advised(point) if self.rules.pilots else 0.0
            most = self.rules.most_longer if point.longer else self.rules.most
            self.advised[point.name] = min(
                most, max(self.rules.planned, typical * (ASSURANCE if point.longer else 1))
            )

    def _advised(self, point: Point) -> float:
        """Seconds after which half of the runs know their mean: nine of ten would take
        `ASSURANCE` times as long.
        """
        model = model_of(self.basis, point)
        rate = point.load * model.largest_stable_rate
        try:
            advice = advise_model(model, rate, relative=self.rules.half_width)
        except SpecError:  # hardly anybody waits
            advice = advise_model(
                model, rate, relative=self.rules.half_width, quantity="sojourn_time"
            )
        return advice.seconds / ASSURANCE

    def seconds(self, point: Point) -> float:
        """That a cell takes, about, with all that belongs to it."""
        return self.advised[point.name] + self.rules.overhead

    def allowed(self, point: Point, left: float, later: float) -> float:
        """Seconds of load, when `left` seconds are left for all and the cells after it take
        `later`.

        Where the time is too short for them all, each gives up the same share; where others ended
        early, it may take more. A longer cell takes what it was advised.
        """
        if point.longer:
            return self.advised[point.name]
        share = min(self.rules.share, left / (self.seconds(point) + later))
        return min(self.rules.most, max(self.rules.least, share * self.advised[point.name]))
