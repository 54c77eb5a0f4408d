"""Event-driven points beside the curves: independent replications, a mean and its standard
error, every seed a function of its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from papers.reproduction.artefact import Curve, curve
from papers.reproduction.lengths import Lengths, Vector

SEED = 2407
REPLICATIONS = 8
WARM_UP = 0.1  # share of each replication
Constants = tuple[float, float, float, float]  # k1, k2, k3, k4


@dataclass(frozen=True, slots=True)
class Simulated:
    """A mean over replications."""

    mean: float
    standard_error: float


def replicate(
    name: str, run: Callable[[np.random.Generator], tuple[float, ...]]
) -> tuple[Simulated, ...]:
    """Each number that a run gives; the seed is (SEED, the letters of `name`)."""
    streams = np.random.SeedSequence([SEED, *name.encode()]).spawn(REPLICATIONS)
    found = np.array([run(np.random.default_rng(stream)) for stream in streams])
    errors = found.std(axis=0, ddof=1) / math.sqrt(REPLICATIONS)
    return tuple(
        Simulated(float(mean), float(error))
        for mean, error in zip(found.mean(axis=0), errors, strict=True)
    )


def simulate_single(
    name: str,
    lam: float,
    service: Callable[[np.random.Generator, int], Vector],
    patience: float = math.inf,
    requests: int = 200_000,
) -> tuple[Simulated, ...]:
    """M/G/1(+D): lost share, mean delay of the served, mean delay of all (the lost counted at
    the patience).
    """
    from papers.reproduction.sample_kernels import single_server  # noqa: PLC0415 - numba: seconds, only where something is simulated

    def run(rng: np.random.Generator) -> tuple[float, ...]:
        delays = single_server(
            rng.exponential(1 / lam, requests), service(rng, requests), patience
        )[int(WARM_UP * requests) :]
        served = delays[np.isfinite(delays)]
        loss = 1 - len(served) / len(delays)
        mean = float(served.mean())
        return loss, mean, mean if math.isinf(patience) else (1 - loss) * mean + loss * patience

    return replicate(name, run)


def points(label: str, x: Sequence[float], found: Sequence[Simulated]) -> Curve:
    """Simulated means as a curve."""
    return curve(
        label,
        x,
        [point.mean for point in found],
        "simulated",
        [point.standard_error for point in found],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """A batch server to simulate: dynamic up to `bound`, or fixed batches of exactly `bound`."""

    constants: Constants
    lengths: Lengths | None  # None: no tokens, H = k1 b + k2
    bound: int = 2**40
    fixed: bool = False
    padded: bool = True
    constant_time: bool = False  # H replaced by its mean, the D of M/D^b/1

    def path(
        self, rng: np.random.Generator, lam: float, requests: int
    ) -> tuple[Vector, Vector, Vector, Vector]:
        """Arrival, dispatch, end of the batch and its size, of each request that got into a
        batch.
        """
        from papers.reproduction.sample_kernels import (  # noqa: PLC0415
            BatchServer,
            batch_server,
        )

        arrived = np.cumsum(rng.exponential(1 / lam, requests))
        lengths = np.zeros(requests) if self.lengths is None else self.lengths.sample(rng, requests)
        means = np.zeros(0)
        if self.constant_time and self.lengths is not None:
            means = np.array(
                [0.0, *(self.lengths.longest_mean(b) for b in range(1, self.bound + 1))]
            )
        wait_for = self.bound if self.fixed else 1
        server = BatchServer(*self.constants, self.bound, wait_for, self.padded)
        dispatched, ended, sizes = batch_server(arrived, lengths, means, server)
        kept = sizes > 0
        return arrived[kept], dispatched[kept], ended[kept], sizes[kept]


def simulate_batches(
    name: str, system: BatchRun, lam: float, requests: int = 200_000
) -> tuple[Simulated, ...]:
    """Mean queueing delay, mean time from arrival to the batch's end, and the same from the
    instant the batch was complete (fixed).
    """

    def run(rng: np.random.Generator) -> tuple[float, ...]:
        arrived, dispatched, ended, _ = system.path(rng, lam, requests)
        first = int(WARM_UP * len(arrived))
        formed = arrived
        if system.fixed:
            formed = np.repeat(arrived[system.bound - 1 :: system.bound], system.bound)
        return tuple(
            float(np.mean(value[first:]))
            for value in (dispatched - arrived, ended - arrived, ended - formed)
        )

    return replicate(name, run)
