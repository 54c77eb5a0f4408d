"""A cell of a table of the slides: what is printed, what the analysis gives, and where the two
differ by more than the table's own noise, what simulation gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from kendall.queueing.models.soap.orders import Order
from kendall.queueing.models.soap.queue import EXACT, solve_order
from kendall.queueing.predictors.laws import ExponentialPrediction, Predictor
from kendall.queueing.predictors.sizes import SizeLaw, WeibullSizes, exponential_sizes
from papers.reproduction.artefact import FAILED, Say, Statement
from papers.reproduction.simulate import SEED

EXPONENTIAL, WEIBULL = exponential_sizes(), WeibullSizes(0.5, 0.5)
PREDICTED = ExponentialPrediction()
SHORT_RUNS = "the slides' simulation is too short for its load"
# below a load: arrivals of a replication, and replications
LENGTHS = ((0.94, 200_000, 64), (0.97, 800_000, 64), (0.985, 1_250_000, 64), (1.0, 2_000_000, 256))


@dataclass(frozen=True)
class Cell:
    """One number of a table: an order at a load (mean size 1, so the arrival rate)."""

    column: str
    load: float
    printed: str
    order: Order
    sizes: SizeLaw = EXPONENTIAL
    predictor: Predictor = EXACT
    sampled: bool = True  # the slides' number comes from a simulation

    @property
    def name(self) -> str:
        """What the cell is called."""
        return f"{self.column}, lam = {self.load:g}"

    def _cells(self) -> int:
        return 300 if self.load < 0.985 else 500

    def mean(self) -> float:
        """E[T] by the analysis."""
        return solve_order(self.order, self.sizes, self.load, self.predictor, self._cells()).sojourn

    def statement(self, say: Say, why: str) -> Statement:
        """Printed beside ours; a cell that is wrong is simulated too, and `why` is the reason."""
        say(self.name)
        ours = self.mean()
        plain = Statement(self.name, self.printed, ours, sampled=self.sampled)
        if plain.verdict != FAILED:
            return plain
        say(f"{self.name}: simulation")
        mean, error = self.simulated()
        off = abs(float(self.printed) - ours)
        if abs(mean - ours) > 4 * error or 3 * error > off:
            return plain  # a witness that disagrees, or cannot tell, explains nothing
        witness = f"{why}; our simulation {mean:.4f} +- {error:.4f}"
        return Statement(self.name, self.printed, ours, witness, fault=True)

    def simulated(self) -> tuple[float, float]:
        """Mean sojourn time and its standard error."""
        from papers.sample_paths import (  # noqa: PLC0415 - numba: seconds, only where something is simulated
            Replications,
            simulate_order,
        )

        jobs, count = next(each for load, *each in LENGTHS if self.load < load)
        runs = Replications(jobs, count, (SEED, *self.name.encode()))
        found = simulate_order(self.order, self.sizes, self.load, self.predictor, runs)
        return found.mean, found.standard_error
