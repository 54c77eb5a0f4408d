"""The slow wander of the machine's speed, as a process: log speed = mean + x(t), x an
Ornstein-Uhlenbeck process (AR(1) in time).

    Cov(x(s), x(t)) = sigma^2 e^(-|s - t| / tau)

Seen through the means y_j of the log ratios in blocks of d seconds, which add the noise of their
batches, v_j:

    Cov(y_j, y_{j+k}) = sigma^2 (tau/d)^2 (1 - e^(-d/tau))^2 e^(-(k-1) d/tau),          k >= 1
    Var(y_j)          = 2 sigma^2 (tau/d) (1 - (tau/d) (1 - e^(-d/tau))) + v_j

v_j is the variance of neighbouring batches' differences, halved, over the number of batches in the
block: what neighbours do not share is not slow. sigma and tau maximise the normal likelihood on a
grid; the interval of sigma is that of the profile likelihood (drop of 1.92). It is significant
where sigma = 0 is less likely by more than 6.5: with tau free as well, no more than one steady run
in 100 is accused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.summaries import NO_WANDER, SpeedDrift

BLOCKS = 60
FEWEST_PER_BLOCK = 4  # batches
FEWEST_BLOCKS = 8
SIGMAS = np.concatenate([[0.0], np.geomspace(0.003, 0.6, 28)])
ROUNDING = 1e-9  # of log likelihoods
INTERVAL_DROP, SIGNIFICANT_DROP = 1.92, 6.5
TauLikelihoods = npt.NDArray[np.float64]  # a row for each tau, a column for each of `SIGMAS`


@dataclass(frozen=True, eq=False)
class BlockSpeeds:
    """Mean log ratio of consecutive blocks, its noise variance and middle (s); `width` seconds
    each on average.
    """

    at: Vector
    level: Vector
    noise: Vector
    width: float
    fast_cv: float

    def likelihoods(self, taus: Vector) -> TauLikelihoods:
        """Log likelihood at every pair of a tau and a sigma of `SIGMAS`."""
        return np.array([self.likelihoods_of(float(tau)) for tau in taus])

    def likelihoods_of(self, tau: float) -> Vector:
        """The log likelihood at each sigma of `SIGMAS`, with the mean estimated and integrated out
        (restricted likelihood).

        In units of the noise, N^-1/2 (sigma^2 R + N) N^-1/2 = U (sigma^2 Lambda + 1) U^T: one
        eigenvalue problem serves all sigmas.
        """
        unit = 1 / np.sqrt(self.noise)
        values, vectors = np.linalg.eigh(unit[:, None] * self.covariance(tau) * unit)
        spread = np.outer(SIGMAS**2, np.maximum(values, 0.0)) + 1
        ones, levels = vectors.T @ unit, vectors.T @ (unit * self.level)
        weight = (ones**2 / spread).sum(axis=1)
        mean = (ones * levels / spread).sum(axis=1) / weight
        rest = ((levels - mean[:, None] * ones) ** 2 / spread).sum(axis=1)
        return np.asarray(-0.5 * (np.log(spread).sum(axis=1) + rest + np.log(weight)))

    def covariance(self, tau: float) -> npt.NDArray[np.float64]:
        """Of the block means without their noise, at sigma 1."""
        share = tau / self.width
        lost = -math.expm1(-1 / share)  # 1 - e^(-d / tau)
        apart = np.abs(np.subtract.outer(self.at, self.at))
        covariance = share**2 * lost**2 * np.exp(-(apart - self.width) / tau)
        np.fill_diagonal(covariance, 2 * share * (1 - share * lost))
        return np.asarray(covariance)


def block_speeds(times: BatchTimes, blocks: int = BLOCKS) -> BlockSpeeds | None:
    """Equal stretches of time; None where there are too few batches."""
    parts = min(blocks, times.count // FEWEST_PER_BLOCK)
    if parts < FEWEST_BLOCKS:
        return None
    logs = np.log(times.ratio)
    steps = np.diff(logs)
    fast = float(np.mean(steps**2)) / 2
    edges = np.linspace(times.at[0], times.at[-1] + 1e-9, parts + 1)
    block = np.clip(np.searchsorted(edges, times.at, "right") - 1, 0, parts - 1)
    number = np.bincount(block, minlength=parts)
    kept = number > 0
    level = np.bincount(block, logs, parts)[kept] / number[kept]
    middle = ((edges[1:] + edges[:-1]) / 2)[kept]
    return BlockSpeeds(
        middle, level, fast / number[kept], float(edges[1] - edges[0]), math.sqrt(fast)
    )


def wander(times: BatchTimes) -> SpeedDrift:
    """The slow part of the speed."""
    blocks = block_speeds(times)
    if blocks is None or blocks.fast_cv == 0:
        return NO_WANDER
    span = float(blocks.at[-1] - blocks.at[0])
    taus = np.geomspace(blocks.width / 2, span / 3, 12)
    return most_likely(blocks.likelihoods(taus), taus, span=span, fast_cv=blocks.fast_cv)


def most_likely(
    likelihood: TauLikelihoods, taus: Vector, *, span: float, fast_cv: float
) -> SpeedDrift:
    """The process at the maximum of the log likelihood; `span`: seconds that it rests on."""
    best = likelihood.max()
    profile = likelihood.max(axis=0)
    inside = np.flatnonzero(profile >= best - INTERVAL_DROP)
    # without a slow part every tau is as likely, but for rounding: the first of them
    row, column = np.argwhere(likelihood >= best - ROUNDING)[0]
    steps = max(2.0, span / float(2 * taus[row]))
    high = float(SIGMAS[min(inside[-1] + 1, SIGMAS.size - 1)])
    sigma = Estimate(float(SIGMAS[column]), float(SIGMAS[max(0, inside[0] - 1)]), high, steps)
    return SpeedDrift(
        sigma,
        float(taus[row]),
        fast_cv,
        significant=bool(best - likelihood[0, 0] > SIGNIFICANT_DROP),
    )
