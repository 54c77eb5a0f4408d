"""Has the arrival rate changed, and when: a self-starting CUSUM on the gaps.

With the gaps x_1, x_2, ... since the last change and s_i = x_1 + ... + x_i, under a constant but
unknown rate

    y_i = (i - 1) ln(1 + x_i / s_{i-1})            are independent, exponential with mean 1

(the ratio of a gap to the sum of those before it is a Beta variable that does not depend on the
sum). Two sums look for a rate `ratio` times higher and lower:

    up_i   = max(0, up_{i-1} + (ln r - (r - 1) y_i) / D)
    down_i = max(0, down_{i-1} + (-ln r + (1 - 1/r) y_i) / D)

and a change is signalled when one exceeds h = ln(2 M). For Poisson arrivals (D = 1) the mean number
of arrivals between two false alarms is then at least M (Lorden 1971: E T >= e^h for each of the
sums). D is the squared coefficient of variation of the gaps judged from neighbours only, so that a
change of rate does not raise it; it is 1 unless significantly above: bursty arrivals of a constant
rate do not alarm either. The instant of the change is the likeliest split of the arrivals since the
last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
RATIO = 1.3  # of the rates that the sums are tuned to tell apart
BETWEEN_FALSE_ALARMS = 100_000.0  # arrivals, at least
PAIR_VARIANCE = 4 / 45  # of ((x - x') / (x + x'))^2 for exponential gaps
SIGNIFICANT = 3.0  # standard errors
FEW_CHANGES = 2  # in a window; a rate that changes more often does not change, it bursts


@dataclass(frozen=True, slots=True)
class Change:
    """Instant of the change, instant of the arrival that gave it away (s), and the new rate over
    the old one.
    """

    at: float
    detected_at: float
    ratio: float


def local_scv(gaps: Vector) -> tuple[float, float]:
    """Squared coefficient of variation of the gaps from pairs of neighbours, and its distance from
    1 in standard errors.

    m = mean of ((x - x') / (x + x'))^2 over pairs is 1 / (2 k + 1) for gamma gaps of shape k = 1 /
    SCV, whatever the rate at that moment.
    """
    pairs = gaps[: gaps.size // 2 * 2].reshape(-1, 2)
    total = pairs.sum(axis=1)
    pairs, total = pairs[total > 0], total[total > 0]
    if not total.size:
        return math.nan, 0.0
    mean = float(np.mean(((pairs[:, 0] - pairs[:, 1]) / total) ** 2))
    scv = math.inf if mean >= 1 else 2 * mean / (1 - mean)
    return scv, (mean - 1 / 3) / math.sqrt(PAIR_VARIANCE / total.size)


def burstiness(gaps: Vector) -> float:
    """D of the equations: above 1 only where the gaps say so beyond chance."""
    scv, distance = local_scv(gaps)
    return min(scv, 100.0) if distance > SIGNIFICANT else 1.0


def changes(
    instants: Vector,
    *,
    ratio: float = RATIO,
    between_false_alarms: float = BETWEEN_FALSE_ALARMS,
    dispersion: float | None = None,
) -> Sequence[Change]:
    """Every change of rate in the arrivals (seconds, ascending), in order; `dispersion` is D,
    else judged from the gaps.
    """
    gaps = np.diff(instants)
    scale = burstiness(gaps) if dispersion is None else dispersion
    threshold = math.log(2 * between_false_alarms)
    found: list[Change] = []
    first = 0
    while (alarm := _alarm(gaps[first:], ratio, scale, threshold)) is not None:
        split = _split(gaps[first : first + alarm + 1])
        at = first + split
        before, after = gaps[first:at].mean(), gaps[at : first + alarm + 1].mean()
        found.append(
            Change(
                float(instants[at]),
                float(instants[first + alarm + 1]),
                float(before / after) if after else math.inf,
            )
        )
        first = at
    return found


def _alarm(gaps: Vector, ratio: float, scale: float, threshold: float) -> int | None:
    """Index of the first gap at which a sum is over the threshold."""
    if gaps.size < 3:
        return None
    sums = np.cumsum(gaps)
    units = np.arange(1, gaps.size) * np.log1p(gaps[1:] / np.maximum(sums[:-1], 1e-300))
    up = (math.log(ratio) - (ratio - 1) * units) / scale
    down = (-math.log(ratio) + (1 - 1 / ratio) * units) / scale
    over = np.maximum(_reflected(up), _reflected(down)) >= threshold
    return int(np.argmax(over)) + 1 if over.any() else None


def _reflected(steps: Vector) -> Vector:
    """max(0, previous + step), from 0."""
    walk = np.cumsum(steps)
    return np.asarray(walk - np.minimum(np.minimum.accumulate(walk), 0.0))


def _split(gaps: Vector) -> int:
    """How many of the gaps come before the likeliest change: at least one on either side."""
    sums, count = np.cumsum(gaps), np.arange(1, gaps.size)
    rest = gaps.size - count
    with np.errstate(divide="ignore"):
        likelihood = -count * np.log(sums[:-1] / count) - rest * np.log(
            (sums[-1] - sums[:-1]) / rest
        )
    return int(np.argmax(likelihood)) + 1
