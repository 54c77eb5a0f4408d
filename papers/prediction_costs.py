"""SkipPredict and DelayPredict: only some sizes are predicted, because predictions cost something.

SkipPredict: a bit for all jobs, a size for those predicted long; predicted short ones first, the
others by SPRPT. Classes: 0 short jobs, 1 bits, 2 predictions of sizes, 3 long jobs;
preemptive-resume. Bit and size are independent draws given the size of the job. DelayPredict:
everyone first for L seconds, then a predicted size (of the TOTAL service) and SPRPT. Predictions
either come from outside and cost money (`external`, `cost`), or take time on the server.

Source: Shahout and Mitzenmacher, SkipPredict: when to invest in predictions for scheduling (2024);
the slides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.soap import ranks
from kendall.queueing.models.soap.orders import DrawnJobs, Jobs
from kendall.queueing.models.soap.ranks import Ranks
from kendall.queueing.predictors.laws import OneBit, PredictedSizes, Predictor
from kendall.queueing.predictors.sizes import Atoms, SizeGrid


@dataclass(frozen=True, kw_only=True)
class SkipPredict:
    """`bit_cost` (c1) and `size_cost` (c2): seconds on the server, or with `external` money that
    `cost` adds up.
    """

    ties_matter = False
    threshold: float
    bit_cost: float = 0.0
    size_cost: float = 0.0
    external: bool = True
    bit: Predictor | None = None  # None: the bit is right

    def _bit(self) -> OneBit:
        return OneBit(self.threshold, self.bit)

    def _times(self) -> tuple[float, float]:
        return (0.0, 0.0) if self.external else (self.bit_cost, self.size_cost)

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:  # noqa: ARG002 - the protocol's
        """See `Order`."""
        return (self.threshold,)

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        """See `Order`."""
        short = self._bit().short(sizes.sizes)
        law = _given(sizes, 1 - short, predictor, grid)
        joint = np.concatenate([(sizes.weights * short)[None, :], law.joint])
        long = np.append(0.0, np.ones(len(law.predictions)))
        first, second = self._times()
        before = first + second * long
        ranks = self._ranks(long, np.append(0.0, law.predictions))
        return Jobs(sizes.sizes, joint, before, ranks, law.exact)

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:
        """See `Order`."""
        long = (self._bit().sample(rng, sizes) > self.threshold).astype(float)
        first, second = self._times()
        totals = sizes + first + second * long
        return DrawnJobs(totals, self._ranks(long, predictor.sample(rng, sizes)))

    def _ranks(self, long: Vector, predicted: Vector) -> Ranks:
        first, second = self._times()
        begin = first + second * long
        by_size = predicted * long
        pieces: list[ranks.Piece] = [(begin, 3 * long, by_size, -long)]
        if second:
            pieces.insert(0, (first, np.where(long > 0, 2, 0), 0.0, 0.0))
        if first:
            pieces.insert(0, (0.0, 1, 0.0, 0.0))
        found = Ranks.of(len(long), pieces)
        if not second:
            return found
        start = np.where((long == 0)[:, None] & _later(found), ranks.ABSENT, found.start)
        return Ranks(start, found.level, found.value, found.slope)

    def cost(self, sizes: Atoms) -> float:
        """Expected cost of predictions per job in the external model: c1 + c2 P(predicted long)."""
        long = float(sizes.weights @ (1 - self._bit().short(sizes.sizes)))
        return self.bit_cost + self.size_cost * long if self.external else 0.0


def _later(found: Ranks) -> Vector:
    """The last piece, which short jobs do not have where sizes are predicted on the server."""
    return np.asarray(np.arange(found.start.shape[1]) == found.start.shape[1] - 1)[None, :]


@dataclass(frozen=True, kw_only=True)
class DelayPredict:
    """`limit` = L seconds of service in the first class; `size_cost` as in SkipPredict."""

    ties_matter = False
    limit: float
    size_cost: float = 0.0
    external: bool = True

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:  # noqa: ARG002 - the protocol's
        """See `Order`."""
        return (self.limit,)

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        """See `Order`."""
        late = (sizes.sizes > self.limit).astype(float)
        law = _given(sizes, late, predictor, grid)
        joint = np.concatenate([(sizes.weights * (1 - late))[None, :], law.joint])
        long = np.append(0.0, np.ones(len(law.predictions)))
        predicted = np.append(0.0, law.predictions)
        return Jobs(sizes.sizes, joint, self._time() * long, self._ranks(predicted), law.exact)

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:
        """See `Order`."""
        totals = sizes + self._time() * (sizes > self.limit)
        return DrawnJobs(totals, self._ranks(predictor.sample(rng, sizes)))

    def _time(self) -> float:
        return 0.0 if self.external else self.size_cost

    def _ranks(self, predicted: Vector) -> Ranks:
        begin = self.limit + self._time()
        pieces: list[ranks.Piece] = [(0.0, 0, 0.0, 0.0), (begin, 2, predicted - self.limit, -1.0)]
        if self._time():
            pieces.insert(1, (self.limit, 1, 0.0, 0.0))
        return Ranks.of(len(predicted), pieces)

    def cost(self, sizes: Atoms) -> float:
        """Expected cost of predictions per job in the external model: c2 P(X > L)."""
        late = float(sizes.weights @ (sizes.sizes > self.limit))
        return self.size_cost * late if self.external else 0.0


def _given(sizes: Atoms, chance: Vector, predictor: Predictor, grid: SizeGrid) -> PredictedSizes:
    """The joint law of those predicted: a job of size i is, with probability `chance[i]`."""
    share = float(sizes.weights @ chance)
    kept = chance > 0
    some = Atoms(sizes.sizes[kept], (sizes.weights * chance)[kept] / share)
    law = predictor.joint(some, grid)
    joint = np.zeros((len(law.predictions), len(sizes.sizes)))
    joint[:, kept] = share * law.joint
    return PredictedSizes(sizes.sizes, law.predictions, joint, law.exact)
