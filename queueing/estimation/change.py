"""Has the arrival rate changed, and when: a self-starting CUSUM on the gaps.

With the gaps x_1, x_2, ... since the last change and s_i = x_1 + ... + x_i, under a constant but
unknown rate

    y_i = (i - 1) ln(1 + x_i / s_{i-1})            are independent, exponential with mean 1

(the ratio of a gap to the sum of those before it is a Beta variable that does not depend on the
sum). Two sums look for a rate r times higher and r times lower:

    up_i   = max(0, up_{i-1} + (ln r - (r - 1) y_i) / D)
    down_i = max(0, down_{i-1} + (-ln r + (1 - 1/r) y_i) / D)

and a change is signalled when one exceeds h = ln(2 M). For Poisson arrivals (D = 1) the mean number
of arrivals between two false alarms is then at least M (Lorden 1971: E T >= e^h for each of the
sums). D is the squared coefficient of variation of the gaps judged from neighbours only, so that a
change of rate does not raise it; it is 1 unless significantly above: bursty arrivals of a constant
rate do not alarm either. The instant of the change is the likeliest split of the arrivals since the
last one, if the rate is constant on either side of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
RATIO = 1.3  # r: of the rates that the sums are tuned to tell apart
BETWEEN_FALSE_ALARMS = 100_000.0  # M: arrivals, at least
FEW_CHANGES = 2  # in a window: with more of them, arrivals count as bursty, not as changed
SIGNIFICANT = 3.0  # standard errors of the pairs' mean above PAIR_MEAN
LARGEST_DISPERSION = 100.0  # D, where one gap of each pair of neighbours is 0
# ((x - x') / (x + x'))^2 of exponential gaps: (x - x') / (x + x') is uniform on (-1, 1)
PAIR_MEAN, PAIR_VARIANCE = 1 / 3, 4 / 45


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the arrival rate."""

    at: float  # instant of the last arrival before it, seconds
    detected_at: float  # instant of the arrival that signalled it, seconds
    ratio: float  # the new rate over the old one


def changes(
    instants: Vector,
    *,
    ratio: float = RATIO,
    between_false_alarms: float = BETWEEN_FALSE_ALARMS,
    dispersion: float | None = None,
) -> Sequence[Change]:
    """Every change of rate in the arrivals (seconds, ascending), in order; without `dispersion`, D
    is judged from the gaps.
    """
    gaps = np.diff(instants)
    if dispersion is None:
        dispersion = burstiness(gaps)
    threshold = math.log(2 * between_false_alarms)
    found: list[Change] = []
    start = 0  # of the gaps since the last change
    while (alarm := _first_alarm(gaps[start:], ratio, dispersion, threshold)) is not None:
        end = start + alarm + 1
        split = start + _likeliest_split(gaps[start:end])
        before, after = gaps[start:split].mean(), gaps[split:end].mean()
        found.append(
            Change(
                at=float(instants[split]),
                detected_at=float(instants[end]),
                ratio=float(before / after) if after else math.inf,
            )
        )
        start = split
    return found


def _first_alarm(gaps: Vector, ratio: float, dispersion: float, threshold: float) -> int | None:
    """Index of the first gap at which a sum reaches the threshold."""
    if gaps.size < 3:
        return None
    sums = np.cumsum(gaps)
    earlier = np.maximum(sums[:-1], 1e-300)  # requests of one instant have gaps of 0
    units = np.arange(1, gaps.size) * np.log1p(gaps[1:] / earlier)  # y_2, y_3, ...
    up = (math.log(ratio) - (ratio - 1) * units) / dispersion
    down = (-math.log(ratio) + (1 - 1 / ratio) * units) / dispersion
    over = np.maximum(_reflected_sums(up), _reflected_sums(down)) >= threshold
    return int(np.argmax(over)) + 1 if over.any() else None


def _reflected_sums(steps: Vector) -> Vector:
    """w_i = max(0, w_{i-1} + step_i) from w_0 = 0: the plain sum minus its least value so far."""
    sums = np.cumsum(steps)
    return np.asarray(sums - np.minimum(np.minimum.accumulate(sums), 0.0))


def _likeliest_split(gaps: Vector) -> int:
    """How many of the gaps come before the likeliest change, at least one on either side: the
    largest likelihood of exponential gaps with the mean of each side.
    """
    sums, before = np.cumsum(gaps), np.arange(1, gaps.size)
    after = gaps.size - before
    with np.errstate(divide="ignore"):
        likelihood = -before * np.log(sums[:-1] / before) - after * np.log(
            (sums[-1] - sums[:-1]) / after
        )
    return int(np.argmax(likelihood)) + 1


def burstiness(gaps: Vector) -> float:
    """D of the equations: above 1 only where the gaps say so beyond chance."""
    variation = local_variation(gaps)
    bursty = variation.distance > SIGNIFICANT
    return min(variation.scv, LARGEST_DISPERSION) if bursty else 1.0


@dataclass(frozen=True, slots=True)
class LocalVariation:
    """Squared coefficient of variation of gaps, judged from neighbours."""

    scv: float  # not a number where all pairs are 0; infinite where one gap of each pair is
    distance: float  # of the pairs' statistic above that of exponential gaps, standard errors


def local_variation(gaps: Vector) -> LocalVariation:
    """Judge the variation from pairs of neighbours.

    The mean of ((x - x') / (x + x'))^2 over pairs is 1 / (2 k + 1) for gamma gaps of shape k = 1 /
    SCV, whatever the rate at that moment.
    """
    pairs = gaps[: gaps.size // 2 * 2].reshape(-1, 2)
    total = pairs.sum(axis=1)
    pairs, total = pairs[total > 0], total[total > 0]
    if not total.size:
        return LocalVariation(scv=math.nan, distance=0.0)
    mean = float(np.mean(((pairs[:, 0] - pairs[:, 1]) / total) ** 2))
    return LocalVariation(
        scv=math.inf if mean >= 1 else 2 * mean / (1 - mean),
        distance=(mean - PAIR_MEAN) / math.sqrt(PAIR_VARIANCE / total.size),
    )
