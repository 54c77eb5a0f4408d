"""A law fitted to what was measured in idle moments, set against the law in force: does it say
something else?

The law in force is compared as a shape, at its best factor f: the machine's speed now, which the
live model takes from the traffic itself.

    F = ((S_old - S_new) / 4) / (S_new / (n - 5))
    S = sum of squared relative residuals of n measurements

It is replaced only where the new fit is good and was measured as widely, F is beyond its LEVEL (the
intervals of five coefficients one by one would be left by chance in every fourth comparison; those
left are named) and some cell's time differs by more than MATERIAL. Pure; the fit with its bootstrap
takes up to a second, so it is run in a process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import fdtrc

from kendall.queueing.latency.fit import BOOTSTRAP, COEFFICIENTS, Fit, Measured, fit_law
from kendall.queueing.latency.identifiability import ILL, Identifiability, of_cells
from kendall.queueing.latency.law import LatencyModel
from kendall.server.calibration.turnaround import ClosedLoop, solve_turnaround

POOR = 0.10  # mean absolute error of the cells' means
LEVEL = 0.001  # of chance, in one comparison of many
MATERIAL = 0.03  # of a cell's time
NARROW = 2.0  # times as large a batch or length in the calibration in force
Verdict = Literal["first", "replaces", "agrees", "poor", "narrow"]


@dataclass(frozen=True, slots=True)
class KnownLaw:
    """The law in force, and the largest batch and longest answer it was measured on (0: not
    known).
    """

    law: LatencyModel
    largest_batch: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLaw:
    """A fit with its doubts; `factor` is its times over those in force, `gap` the largest
    relative difference beside that.
    """

    fit: Fit
    doubts: tuple[str, ...]
    verdict: Verdict
    says: str
    factor: float | None = None
    gap: float | None = None


def weigh(
    measured: Sequence[Measured],
    in_force: KnownLaw | None,
    loop: ClosedLoop,
    slot_time: float | None,
    seed: int,
    *,
    bootstrap: int = BOOTSTRAP,
) -> CandidateLaw:
    """Fit and compare. Raises ValueError where the cells cannot tell the coefficients apart."""
    fit = fit_law(measured, np.random.default_rng(seed), bootstrap=bootstrap)
    turnaround, more = _turnaround(fit.law, in_force, loop, slot_time)
    law = dataclasses.replace(fit.law, turnaround=turnaround)
    law = law.resuming_as(None if in_force is None else in_force.law)
    fit = dataclasses.replace(fit, law=law)
    known = of_cells(measured, fit.intervals)
    doubts = known.doubts + more
    if fit.mape > POOR or known.condition > ILL:
        says = (
            f"the cells' means differ by {fit.mape:.1%} from the best law (condition number "
            f"{known.condition:.3g}): no law is taken from them"
        )
        return CandidateLaw(fit=fit, doubts=doubts, verdict="poor", says=says)
    if in_force is None:
        return CandidateLaw(fit=fit, doubts=doubts, verdict="first", says="no law was known")
    found = compare(measured, fit.law, in_force.law)
    verdict, says = verdict_of(found, fit, measured, known, in_force)
    return CandidateLaw(
        fit=fit, doubts=doubts, verdict=verdict, says=says, factor=found.factor, gap=found.gap
    )


@dataclass(frozen=True, slots=True)
class LawComparison:
    """The new law's times over the old one's (`factor`), the largest relative difference beside
    that, and how likely by chance.
    """

    factor: float
    gap: float
    chance: float


def compare(measured: Sequence[Measured], new: LatencyModel, old: LatencyModel) -> LawComparison:
    """Compare two laws on the same measurements, to which the new one was fitted (an F test)."""
    times = np.array([one.service_time for one in measured])
    fitted, lawful = (np.array([_time(law, one) for one in measured]) for law in (new, old))
    relative, shape = times / fitted, lawful / fitted
    factor = float(shape @ relative / (shape @ shape))
    free = len(COEFFICIENTS)
    old_squares, new_squares = (
        float(np.sum((relative - factor * shape) ** 2)),
        float(np.sum((relative - 1) ** 2)),
    )
    spare = len(times) - free
    ratio = (
        (old_squares - new_squares) / (free - 1) / (new_squares / spare)
        if new_squares > 0
        else np.inf
    )
    return LawComparison(
        factor,
        float(np.abs(factor * shape - 1).max()),
        float(fdtrc(free - 1, spare, max(ratio, 0.0))),
    )


def _time(law: LatencyModel, one: Measured) -> float:
    return law.padded(len(one.lengths), max(one.lengths), one.prompt_tokens)


def _turnaround(
    law: LatencyModel, in_force: KnownLaw | None, loop: ClosedLoop, slot_time: float | None
) -> tuple[float, tuple[str, ...]]:
    """Solved where the loop was measured; otherwise the one in force, or none."""
    if slot_time is not None:
        return solve_turnaround(law, loop, slot_time), ()
    doubt = (
        "the turnaround of a continuous engine was not measured: its closed loop takes too "
        "long for a probe"
    )
    return (0.0 if in_force is None else in_force.law.turnaround * in_force.law.speed), (doubt,)


def verdict_of(
    found: LawComparison,
    fit: Fit,
    measured: Sequence[Measured],
    known: Identifiability,
    in_force: KnownLaw,
) -> tuple[Verdict, str]:
    if found.chance > LEVEL or found.gap <= MATERIAL:
        return (
            "agrees",
            (
                f"the law in force has this shape (cells within {found.gap:.1%}), at "
                f"{found.factor:.3g} of its times"
            ),
        )
    outside = (
        " and ".join(_outside(fit, in_force.law, found.factor, measured)) or "the times of cells"
    )
    differs = (
        f"{outside} differ from the law in force beyond their intervals, cells by up to "
        f"{found.gap:.1%}"
    )
    if (
        max(in_force.largest_batch / known.largest_batch, in_force.longest / known.longest)
        >= NARROW
    ):
        reach = f"batches up to {in_force.largest_batch} and {in_force.longest} tokens"
        return (
            "narrow",
            f"{differs}; it stays, because it was measured on {reach}: calibrate in full",
        )
    return "replaces", differs


def _outside(fit: Fit, old: LatencyModel, factor: float, measured: Sequence[Measured]) -> list[str]:
    """Coefficients of the law in force that lie outside the intervals of the new fit."""
    prompts = {one.prompt_tokens / len(one.lengths) for one in measured}
    found = {name: getattr(old, name) for name in COEFFICIENTS}
    if len(prompts) == 1:
        found["k1"] += (
            found.pop("kp") * prompts.pop()
        )  # as the fit has it: one prompt length, its cost is part of k1
    return [
        name
        for name, value in found.items()
        if not _covers(fit.intervals[name], value * old.speed * factor)
    ]


def _covers(interval: tuple[float, float], value: float) -> bool:
    return interval[0] <= value <= interval[1]
