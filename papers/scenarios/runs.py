"""Replications of a scenario: means with standard errors, common random numbers under one seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from papers.sample_paths import LAST, WARM_UP, Replications

__all__ = ["Measured", "Replications", "measured", "unit_exponential"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A mean over replications and its standard error."""

    mean: float
    standard_error: float


def measured(
    run: Callable[[np.random.Generator], tuple[Vector, ...]], runs: Replications
) -> tuple[Measured, ...]:
    """Of each column that `run` returns, one value a request in order of arrival; the first tenth
    and the last twentieth of each run are left out. The generators follow from the seed alone.
    """
    first, last = int(WARM_UP * runs.jobs), int((1 - LAST) * runs.jobs)
    streams = np.random.SeedSequence(runs.seed).spawn(runs.count)
    means = np.array(
        [
            [column[first:last].mean() for column in run(np.random.default_rng(stream))]
            for stream in streams
        ]
    )
    errors = means.std(axis=0, ddof=1) / math.sqrt(runs.count)
    return tuple(
        Measured(float(mean), float(error))
        for mean, error in zip(means.mean(axis=0), errors, strict=True)
    )


def unit_exponential(rng: np.random.Generator, count: int) -> Vector:
    """Instants of a Poisson process of rate 1."""
    return np.asarray(np.cumsum(rng.exponential(size=count)))


def ratio(numerator: Measured, denominator: Measured) -> Measured:
    """Of two independent means, to first order."""
    mean = numerator.mean / denominator.mean
    relative = math.hypot(
        numerator.standard_error / numerator.mean, denominator.standard_error / denominator.mean
    )
    return Measured(mean, mean * relative)
