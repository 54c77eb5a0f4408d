"""Energy of batches, and how it falls per request as batches grow.

    c[b] = beta b + c0               joules for a batch of b              (Inoue (2021), Eq. 17)
    eta  = 1 / (beta + c0 / E[B])    requests per joule in steady state   (Eq. 19)
    eta >= 1 / (beta + c0 / max(1, lam tau0 / (1 - lam alpha)))           (Eq. 40)

The bound holds for batches of everything that waits, H[b] = alpha b + tau0 seconds, lam alpha < 1:
E[B] >= max(1, lam tau0 / (1 - lam alpha)) follows from Eq. 38 for random batch times of that mean
too. Only batches in service consume: the energy of an idle device is not counted. Fit: c[b] = power
x batch / throughput, unweighted least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.regression import LineFit, fit_line


@dataclass(frozen=True, slots=True)
class EnergyLaw:
    """c[b] = beta b + c0, joules."""

    beta: float  # per request
    c0: float  # per batch

    def __post_init__(self) -> None:
        if not (0 < self.beta < np.inf and 0 <= self.c0 < np.inf):
            raise SpecError(
                f"got beta={self.beta}, c0={self.c0}; expected joules: beta > 0 and c0 >= 0"
            )

    def batch(self, batch_size: float) -> float:
        """Energy of a batch, joules."""
        return self.beta * batch_size + self.c0

    def efficiency(self, mean_batch_size: float) -> float:
        """Requests per joule when a dispatched batch has this mean size (Eq. 19)."""
        if not mean_batch_size >= 1:
            raise SpecError(f"got a mean batch size of {mean_batch_size}; expected at least 1")
        return 1 / (self.beta + self.c0 / mean_batch_size)

    def power(self, arrival_rate: float, mean_batch_size: float) -> float:
        """Mean power spent on batches, watts: arrival_rate / eta."""
        return arrival_rate / self.efficiency(mean_batch_size)

    def efficiency_bound(self, arrival_rate: float, alpha: float, tau0: float) -> float:
        """At least so many requests per joule (Eq. 40). Raises UnstableQueueError for
        arrival_rate alpha >= 1.
        """
        return self.efficiency(smallest_mean_batch_size(arrival_rate, alpha, tau0))


@dataclass(frozen=True, slots=True)
class EnergyFit:
    """The law and the line it is, in joules over batch size."""

    law: EnergyLaw
    line: LineFit


def smallest_mean_batch_size(arrival_rate: float, alpha: float, tau0: float) -> float:
    """E[B] >= max(1, lam tau0 / (1 - lam alpha)), everything that waits being taken (Remark 5)."""
    load = arrival_rate * alpha
    if load >= 1:
        raise UnstableQueueError(load)
    return max(1.0, arrival_rate * tau0 / (1 - load))


def fit_energy(
    batch_sizes: Sequence[float], watts: Sequence[float], throughputs: Sequence[float]
) -> EnergyFit:
    """From mean power (W) and throughput (requests/s) at each batch size. Raises SpecError."""
    sizes, power, rates = (
        np.asarray(values, dtype=float) for values in (batch_sizes, watts, throughputs)
    )
    if not len(sizes) == len(power) == len(rates) or np.any(rates <= 0):
        raise SpecError(
            f"got {len(sizes)} sizes, {len(power)} powers, {len(rates)} rates; expected as many "
            "of each, rates > 0"
        )
    line = fit_line(sizes.tolist(), (power * sizes / rates).tolist())
    return EnergyFit(EnergyLaw(line.slope, line.intercept), line)
