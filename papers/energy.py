"""A bound of the energy per request that needs no model of the queue (Inoue (2021), Eq. 40).

    eta >= 1 / (beta + c0 / max(1, lam tau0 / (1 - lam alpha)))

It holds for batches of everything that waits, H[b] = alpha b + tau0 seconds, lam alpha < 1: E[B] >=
max(1, lam tau0 / (1 - lam alpha)) follows from Eq. 38 for random batch times of that mean too. Only
batches in service consume: the energy of an idle device is not counted.
"""

from __future__ import annotations

from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.energy import EnergyLaw


def efficiency_bound(law: EnergyLaw, arrival_rate: float, alpha: float, tau0: float) -> float:
    """At least so many requests per joule (Eq. 40). Raises UnstableQueueError for arrival_rate
    alpha >= 1.
    """
    return law.efficiency(smallest_mean_batch_size(arrival_rate, alpha, tau0))


def smallest_mean_batch_size(arrival_rate: float, alpha: float, tau0: float) -> float:
    """E[B] >= max(1, lam tau0 / (1 - lam alpha)), everything that waits being taken (Remark 5)."""
    load = arrival_rate * alpha
    if load >= 1:
        raise UnstableQueueError(load)
    return max(1.0, arrival_rate * tau0 / (1 - load))
