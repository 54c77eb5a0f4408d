"""The law of an engine's steps, from counters of stretches under different loads.

With z the mean gap between tokens, lam the arrivals per second, both of one replica:

    z       = k4 + k3 x + u a                    x: sequences in a step, as a token meets them
    prefill = k4 + k3 (d + 1 + v) + (1 + v) a    a = k1 + kp P: what a prompt takes
    u = lam z: admissions that hold up a token;  v: others that enter in the same step

d, the mean number of sequences that make tokens, is the rate of tokens times their gap. A token
meets more of them than that, x = E[n^2] / E[n]: in steady state n is taken to be that of M/M/c with
the same mean, and within a stretch of T seconds it moves by the share

    1 - 2 (T/s - 1 + e^{-T/s}) / (T/s)^2

of that variance, s the mean service (exact for infinitely many slots and exponential services).

A slow moment makes gaps longer and so the sequences in service more: fitted to what was there, the
law would blame the sequences. Therefore x and d are replaced by what the arrivals explain of them,
which know nothing of the engine (two-stage least squares): by the number m that would be in service
with as many slots as needed and exponential services, s their mean in all stretches:

    m' = lam - m / s

Likewise u is lam times the gap that the law itself has there. Least squares with relative errors,
coefficients >= 0, weighted by requests, repeated until both agree. What the stretches cannot
separate is said in `notes` and left out: the law is then right at the loads that were seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.special import gammaln

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.estimation.counters.samples import Totals, one_after_the_other
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed_path import SpeedPath

ROUNDS = 12  # of the fit
FEWEST = 5.0  # requests of a stretch that counts
APART = 0.02  # coefficient of variation of what a coefficient multiplies, to tell it apart
FULL = 0.98  # of the slots
EVEN = 0.04  # standard deviation of the log of the speed that changes no delay


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The law, and what could not be told apart."""

    law: LatencyModel
    stretches: int
    notes: tuple[str, ...] = ()


def met(mean: Vector, slots: int | None) -> Vector:
    """E[n^2] / E[n] of the sequences in service of M/M/c, from their mean number.

    >>> met(np.array([2.0]), None), met(np.array([0.5]), 1)
    (array([3.]), array([1.]))
    """
    if slots is None:
        return mean + 1
    n = np.arange(slots + 1.0)
    load = np.clip(mean, 1e-12, FULL * slots)[:, None]
    logs = n * np.log(load) - gammaln(n + 1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    weights[:, -1] /= 1 - load[:, 0] / slots  # with the states in which some wait
    found = weights @ n**2 / (weights @ n)
    return np.where(mean >= FULL * slots, float(slots), found)


def moved(ratio: Vector) -> Vector:
    """The share of the variance of the number in service that is within a stretch, which is so many
    services long.
    """
    within = np.maximum(ratio, 1e-3)
    return np.where(ratio > 1e-3, 1 - 2 * (within - 1 + np.exp(-within)) / within**2, 0.0)


def step_law(stretches: Sequence[Totals], slots: int | None) -> StepLaw | None:
    """From stretches of single replicas. None where none has enough requests and times."""
    seen = _Stretches.of(stretches)
    if not seen.gap.size:
        return None
    gap = np.full(seen.gap.size, float(np.average(seen.gap, weights=seen.requests)))
    kept, notes = _told_apart(seen, slots, gap)
    times = np.concatenate([seen.gap, seen.prefill[seen.whole]])
    weights = np.sqrt(np.concatenate([seen.requests, seen.requests[seen.whole]]))
    scale, found = 1 / times, np.zeros(len(kept))
    for _ in range(ROUNDS):
        design = seen.design(slots, gap, explained=True)[:, kept]
        factor = weights * scale
        found, _ = nnls(design * factor[:, None], times * factor)
        fitted = np.maximum(design @ found, 1e-9)
        scale, gap = 1 / fitted, fitted[: gap.size]
    names = ("k4", "k3", "k1", "kp")
    values = {names[index]: float(value) for index, value in zip(kept, found, strict=True)}
    if not (values.get("k4", 0.0) or values.get("k3", 0.0)):
        return None
    return StepLaw(LatencyModel(**values), int(seen.gap.size), notes)


def pace_of(stretches: Sequence[Totals], law: LatencyModel, slots: int | None) -> SpeedPath | None:
    """The speed in each of successive stretches over that of them all, a token each alike: the gap
    between tokens beside the one that the law has for the sequences that were there. None where it
    hardly changed.
    """
    seen = _Stretches.of(stretches, fewest=0.0)
    gaps = seen.design(slots, seen.gap)[: seen.gap.size]
    fitted = gaps @ np.array([law.k4, law.k3, law.k1, law.kp])
    if seen.gap.size < 2 or not (fitted > 0).all():
        return None
    speed = seen.gap / fitted
    if float(np.log(speed).std()) < EVEN:
        return None
    mean = float(np.average(speed, weights=seen.tokens * seen.seconds))
    return SpeedPath(np.append(0.0, np.cumsum(seen.seconds)), speed / mean, 1.0)


@dataclass(frozen=True, eq=False)
class _Stretches:
    """Those that tell something, a number of each."""

    gap: Vector  # seconds
    prefill: Vector  # seconds; not a number where it is not known
    tokens: Vector  # a second of one replica
    arrivals: Vector
    prompt: Vector  # tokens that are computed; 0 where they are not known
    services: Vector  # length of the stretch in mean services
    requests: Vector
    seconds: Vector

    @classmethod
    def of(cls, stretches: Sequence[Totals], fewest: float = FEWEST) -> _Stretches:
        """Those in which so many requests finished; where none did, a service takes as long as in
        all of them, and so many tokens of a prompt.
        """
        together = one_after_the_other(stretches)
        rows = [
            (
                each.gap,
                each.prefill,
                each.decoding / each.gap,
                each.rate("arrived"),
                _known(each.mean_computed, together.mean_computed),
                each.seconds / _known(each.service, together.service),
                each.total("finished"),
                each.seconds,
            )
            for each in stretches
            if each.total("finished") >= fewest and each.gap > 0
        ]
        columns = np.array(rows, dtype=float).reshape(-1, 8).T
        columns[4] = np.nan_to_num(columns[4])
        return cls(*columns[:, np.isfinite(columns[[0, 2, 3, 5]]).all(axis=0)])

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Where a time of prefill is known."""
        return np.isfinite(self.prefill) & (self.prefill > 0)

    def expected(self) -> Vector:
        """Mean number in service in each, by the arrivals until then."""
        service = float(np.average(self.seconds / self.services, weights=self.requests))
        found: list[float] = []
        present = math.nan
        for seconds, rate in zip(self.seconds, self.arrivals, strict=True):
            steady, services = rate * service, seconds / service
            above = (present if found else steady) - steady
            found.append(steady - above * math.expm1(-services) / services)
            present = steady + above * math.exp(-services)
        return np.array(found)

    def design(self, slots: int | None, gap: Vector, *, explained: bool = False) -> Vector:
        """What k4, k3, k1 and kp multiply: rows of gaps between tokens, then of prefills; for the
        sequences that were there, or what the arrivals explain of them.
        """
        most = math.inf if slots is None else float(slots)
        decoding, entering = np.minimum(self.tokens * self.gap, most), self.arrivals * gap
        sequences = decoding + moved(self.services) * (met(decoding, slots) - decoding)
        if explained:
            known = np.stack([np.ones(gap.size), self.expected(), entering, entering * self.prompt])
            decoding, sequences = (
                _explained(each, known.T, self.requests) for each in (decoding, sequences)
            )
        own = np.maximum(1.0, sequences) + entering
        gaps = np.stack([np.ones(gap.size), own, entering, entering * self.prompt], axis=1)
        # none enters beside one who finds the engine idle
        together = 1 + entering * -np.expm1(-decoding)
        first = (np.ones(gap.size), decoding + together, together, together * self.prompt)
        return np.concatenate([gaps, np.stack(first, axis=1)[self.whole]])


def _explained(values: Vector, known: Vector, weights: Vector) -> Vector:
    """What a linear regression on these columns says of the values, none below 0."""
    root = np.sqrt(weights)
    found, *_ = np.linalg.lstsq(known * root[:, None], values * root, rcond=None)
    explained: Vector = np.maximum(0.0, known @ found)
    return explained


def _known(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) and value > 0 else otherwise


def _told_apart(
    seen: _Stretches, slots: int | None, gap: Vector
) -> tuple[list[int], tuple[str, ...]]:
    """The columns whose coefficients the stretches tell, and what is said of the others."""
    kept, notes, whole = [0], [], seen.whole
    design = seen.design(slots, gap, explained=True)
    if _varies(design[: gap.size, 1], seen.requests):
        kept.append(1)
    else:
        notes.append(
            "the number of sequences in service hardly varied: what one more costs in a step is "
            "not known, and counts as nothing"
        )
    prompts = seen.prompt[whole]
    if not prompts.size:
        notes.append("no time of a prefill is counted: prompts count as taking none")
    elif not prompts.any():
        kept.append(2)
        notes.append("no prompt lengths are counted: each prompt counts as taking the same time")
    elif _varies(prompts, seen.requests[whole]):
        kept += [2, 3]
    else:
        kept.append(3)
        notes.append(
            "prompts were of one mean length: what a request costs whatever its prompt is not told "
            "apart from what its tokens cost"
        )
    return kept, tuple(notes)


def _varies(values: Vector, weights: Vector) -> bool:
    if values.size < 2:
        return False
    mean = float(np.average(values, weights=weights))
    return math.sqrt(float(np.average((values - mean) ** 2, weights=weights))) > APART * mean
