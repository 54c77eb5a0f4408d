"""Energy of the batches of a run, c[b] = beta b + c0 (Inoue 2021, Eq. 17), and per output token,
with intervals.

Unlike k1 .. k4 the line is fitted to the run's own batches where nothing better is there, and the
trap is the same in small: a slow moment makes batches both larger and dearer, so beta errs upwards
where the speed wanders. Designed batches do not have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import NORMAL, Estimate, symmetric
from kendall.queueing.latency.regression import fit_line

FEWEST = 20  # batches


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """Joules per request (`beta`), per batch (`c0`) and per output token on average; R2 of the
    line.
    """

    beta: Estimate
    c0: Estimate
    per_token: Estimate
    r2: float


def energy_estimate(batch_sizes: Vector, joules: Vector, tokens: Vector) -> EnergyEstimate | None:
    """One entry a batch: members, energy (mean power x service time), output tokens; None where
    sizes or batches are too few.
    """
    if batch_sizes.size < FEWEST or not tokens.sum() > 0:
        return None
    try:
        line = fit_line(batch_sizes.tolist(), joules.tolist())
    except SpecError:
        return None
    n = float(batch_sizes.size)
    ends = line.intervals
    ratio = float(joules.sum() / tokens.sum())
    error = (
        NORMAL * float(np.std(joules - ratio * tokens, ddof=1)) / (float(tokens.mean()) * n**0.5)
    )
    return EnergyEstimate(
        beta=Estimate(line.slope, *ends["slope"], n),
        c0=Estimate(line.intercept, *ends["intercept"], n),
        per_token=symmetric(ratio, error, n),
        r2=line.r2,
    )
