"""Fits of the latency law to designed measurements.

    H = k1 b + k2 + kp sum(prompt) + (k3 b + k4) l_max          (padded)
    H = k1 b + k2 + kp sum(prompt) + k3 sum(l) + k4 l_max       (unpadded)

Least squares with weights 1/fitted, iterated (relative errors count alike, and no weight depends on
the noise of its own measurement), coefficients >= 0 (Lawson-Hanson). On means, not medians: what a
queue feels is the mean. Intervals by bootstrap over the measurements of each cell. b and l must
have been set by the experimenter: fitted on a run's own batches the coefficients are nonsense,
because slow periods grow batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kendall.policies.text import SpecError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed import residual_cv

FloatArray = NDArray[np.float64]
COEFFICIENTS = ("k1", "k2", "kp", "k3", "k4")
ROUNDS = 8  # of reweighting; three suffice in practice
BOOTSTRAP = 200


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured batch."""

    lengths: tuple[int, ...]  # output tokens of every member
    prompt_tokens: int  # sum over the batch
    service_time: float  # seconds


@dataclass(frozen=True, slots=True)
class Fit:
    """A law with how well it fits: R2 on the raw scale, mean absolute percentage error over
    cells' means, 95 % intervals.
    """

    law: LatencyModel
    r2: float
    mape: float  # fraction
    intervals: dict[str, tuple[float, float]]


def fit_law(
    batches: Sequence[Measured],
    rng: np.random.Generator,
    *,
    padded: bool = True,
    bootstrap: int = BOOTSTRAP,
) -> Fit:
    """The law that fits these batches. Raises ValueError where they cannot tell the coefficients
    apart.
    """
    rows = []
    cell_of: dict[tuple[tuple[int, ...], int], list[int]] = {}  # repeats of each designed cell
    for index, batch in enumerate(batches):
        size, longest, total = len(batch.lengths), max(batch.lengths), sum(batch.lengths)
        rows.append([size, 1, batch.prompt_tokens, size * longest if padded else total, longest])
        cell_of.setdefault((batch.lengths, batch.prompt_tokens), []).append(index)
    design = np.array(rows, dtype=float)
    cells = [np.array(indices) for indices in cell_of.values()]
    times = np.array([batch.service_time for batch in batches])
    varied = _varied(design)
    coefficients = reweighted(design, times, varied)
    fitted = design @ coefficients
    draws = []
    for _ in range(bootstrap):
        index = np.concatenate([rng.choice(cell, cell.size) for cell in cells])
        draws.append(reweighted(design[index], times[index], varied))
    low, high = np.percentile(np.array([coefficients, *draws]), [2.5, 97.5], axis=0)
    law = LatencyModel(
        **dict(zip(COEFFICIENTS, map(float, coefficients), strict=True)),
        cv=residual_cv(times, fitted),
    )
    if law.step(1) == 0:
        raise SpecError(
            "got batches whose times do not grow with their lengths; expected steps that take "
            "time: measure batches of other lengths"
        )
    errors = [abs(times[index].mean() / fitted[index].mean() - 1) for index in cells]
    return Fit(
        law=law,
        r2=float(1 - ((times - fitted) ** 2).sum() / ((times - times.mean()) ** 2).sum()),
        mape=float(np.mean(errors)),
        intervals={
            name: (float(a), float(b)) for name, a, b in zip(COEFFICIENTS, low, high, strict=True)
        },
    )


def _varied(design: FloatArray) -> NDArray[np.bool_]:
    """Which coefficients the batches tell: with one prompt length its cost is part of k1."""
    prompts = design[:, 2] / design[:, 0]
    varied = np.array([True, True, prompts.std() > 0, True, True])
    if np.linalg.matrix_rank(design[:, varied]) < np.count_nonzero(varied):
        raise ValueError(
            "got batches whose sizes and lengths vary together; expected a grid of sizes and "
            "lengths"
        )
    return varied


def reweighted(design: FloatArray, times: FloatArray, varied: NDArray[np.bool_]) -> FloatArray:
    """Coefficients >= 0 of the columns that `varied`, 0 of the others: least squares of the
    relative errors.
    """
    weights = np.full(len(times), 1 / times.mean())
    coefficients = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        coefficients[varied], _ = nnls(design[:, varied] * weights[:, None], times * weights)
        weights = 1 / np.maximum(design @ coefficients, 1e-9)
    return coefficients
