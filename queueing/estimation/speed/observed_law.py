"""The latency law of a continuous engine from the requests that it served, where nobody can set
batch and lengths: by regression on what shared the engine with each request.

    decode of a request    k4 (l - 1) + k3 N + k1 A + kp P
    prefill of a request   k4 + k3 n + k1 m + kp p

N: tokens that the engine made meanwhile, its own included; A: requests that began, P: tokens of
their prompts; n, m, p: the same of its own first step. Each request's tokens are taken as evenly
spread over its decoding. Seconds at speed 1; coefficients >= 0; relative errors count alike
(`queueing.latency.fit`). Intervals by bootstrap over stretches of neighbours, which share their
fate.

Not a designed measurement: where the number in service hardly varied, k3 and k4 trade against each
other, and where prompts are alike kp is a part of k1. `doubts` says so; the times that the law
gives near what was observed are right all the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.served_times import ObservedLaw, ServedTimes
from kendall.queueing.latency.fit import reweighted
from kendall.queueing.latency.identifiability import ILL
from kendall.queueing.latency.law import LatencyModel

NAMES = ("k1", "k3", "k4", "kp")
FEWEST = 60  # requests
MOST = 4000  # the last ones
DRAWS, STRETCHES = 60, 20  # of the bootstrap
APART = 0.25  # of a prefill: first tokens closer than that are of one step
TRADING = 0.3  # part of the weakest direction from which on a coefficient is named
VAGUE = 0.5  # half width of an interval over the value
VARIED = 0.02  # coefficient of variation of the number in service that tells k3 from k4
HALF = 0.5  # of a step, until the next begins


def observed_law(served: ServedTimes, rng: np.random.Generator) -> ObservedLaw | None:
    """None where too few requests were served, or their steps take no time."""
    parts = [_design(own) for own in served.of_servers()]
    design, times = (np.concatenate(each) for each in zip(*parts, strict=True))
    if times.size < 2 * FEWEST:
        return None
    prompts = served.prompts
    beside = design[:, 1] / np.maximum(design[:, 2], 1.0)  # in service at a step
    alone = float(beside.std()) <= VARIED * float(beside.mean())
    varied = np.array([True, not alone, True, float(prompts.std()) > 0])
    found = reweighted(design, times, varied)
    if found[1] + found[2] <= 0:
        return None
    draws = np.array([found, *_bootstrap(design, times, varied, rng)])
    low, high = np.percentile(draws, (2.5, 97.5), axis=0)
    intervals = {name: (float(a), float(b)) for name, a, b in zip(NAMES, low, high, strict=True)}
    law = LatencyModel(**dict(zip(NAMES, found.tolist(), strict=True)))
    return ObservedLaw(
        law=dataclasses.replace(law, turnaround=_turnaround(served.of_servers(), law)),
        intervals=intervals,
        error=float(np.mean(np.abs(times / np.maximum(design @ found, 1e-12) - 1))),
        requests=int(served.started.size),
        doubts=_doubts(design, found, intervals, varied=varied),
    )


def _design(served: ServedTimes) -> tuple[npt.NDArray[np.float64], Vector]:
    """Rows of NAMES, and times, of one engine; without those whose neighbours may not be known, at
    both ends.
    """
    order = np.argsort(served.first, kind="stable")[-MOST:]
    served = served.part(order)
    if served.first.size < 2:
        return np.empty((0, len(NAMES))), np.empty(0)
    started, first, last = served.started, served.first, served.last
    longest = float((last - started).max())
    inner = (started >= started.min() + longest) & (last <= last.max() - longest)
    if np.count_nonzero(inner) < FEWEST:
        inner = np.ones(first.size, dtype=bool)
    made = _made_by(served)
    begun = np.searchsorted(first, last, "right") - np.searchsorted(first, first, "right")
    prompts = np.concatenate([[0.0], np.cumsum(served.prompts)])
    asked = prompts[np.searchsorted(first, last, "right")]
    asked = asked - prompts[np.searchsorted(first, first, "right")]
    tokens = served.outputs - 1
    decodes = inner & (tokens >= 1) & (last > first)
    decode = np.column_stack([begun, made(last) - made(first), tokens, asked])[decodes]
    near = APART * (first - started)
    a, b = (
        np.searchsorted(first, first - near, "left"),
        np.searchsorted(first, first + near, "right"),
    )
    running = np.searchsorted(first, first, "left") - np.searchsorted(np.sort(last), first, "left")
    together = b - a
    at_once = np.maximum(running, 0) + together
    prefills = inner & (first > started)
    prefill = np.column_stack([together, at_once, np.ones(first.size), prompts[b] - prompts[a]])
    return (
        np.concatenate([decode, prefill[prefills]]).astype(np.float64),
        np.concatenate([(last - first)[decodes], (first - started)[prefills]]),
    )


class _made_by:  # noqa: N801 - a function of time
    """Tokens that an engine had made by an instant: one at each first token, the others evenly
    until the last.
    """

    def __init__(self, served: ServedTimes) -> None:
        spans = np.maximum(served.last - served.first, 1e-9)
        pace = (served.outputs - 1) / spans
        at = np.concatenate([served.first, served.first + spans])
        order = np.argsort(at, kind="stable")
        self._at = at[order]
        rate = np.cumsum(np.concatenate([pace, -pace])[order])
        self._made = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(self._at))])
        self._first = np.sort(served.first)

    def __call__(self, at: Vector) -> Vector:
        evenly = np.interp(at, self._at, self._made)
        found: Vector = evenly + np.searchsorted(self._first, at, "right")
        return found


def _bootstrap(
    design: npt.NDArray[np.float64],
    times: Vector,
    varied: npt.NDArray[np.bool_],
    rng: np.random.Generator,
) -> list[Vector]:
    stretches = np.array_split(np.arange(times.size), STRETCHES)
    draws = []
    for _ in range(DRAWS):
        chosen = rng.integers(len(stretches), size=len(stretches))
        index = np.concatenate([stretches[each] for each in chosen])
        draws.append(reweighted(design[index], times[index], varied))
    return draws


def _turnaround(servers: Sequence[ServedTimes], law: LatencyModel) -> float:
    """Mean seconds of a slot outside steps: what was held longer than the engine's steps, but for
    the wait for the next of them where others were in service there.
    """
    outside = []
    for own in servers:
        others = np.searchsorted(np.sort(own.first), own.started) - np.searchsorted(
            np.sort(own.last), own.started
        )
        wait = np.where(others > 0, HALF * (law.k3 * others + law.k4), 0.0)
        outside.append(own.held - (own.last - own.started) - wait)
    return max(0.0, float(np.concatenate(outside).mean()))


def _doubts(
    design: npt.NDArray[np.float64],
    found: Vector,
    intervals: Mapping[str, tuple[float, float]],
    *,
    varied: npt.NDArray[np.bool_],
) -> tuple[str, ...]:
    doubts = [] if varied[-1] else ["prompts are alike: kp is a part of k1"]
    if not varied[1]:
        doubts.append(
            "the number in service never varied: k3 is taken as 0, and what more slots would bring "
            "is not known"
        )
    names = [name for name, each in zip(NAMES, varied, strict=True) if each]
    columns = design[:, varied]
    scale = np.linalg.norm(columns, axis=0)
    _, sizes, directions = np.linalg.svd(columns / np.where(scale > 0, scale, 1.0))
    condition = float(sizes[0] / sizes[-1]) if sizes[-1] > 0 else math.inf
    if condition > ILL:
        trading = [
            name for name, part in zip(names, np.abs(directions[-1]), strict=True) if part > TRADING
        ]
        doubts.append(
            f"{' and '.join(trading)} trade against each other (condition number {condition:.3g}): "
            "the number in service varied too little"
        )
    for name, value, mean in zip(NAMES, found, design.mean(axis=0), strict=True):
        low, high = intervals[name]
        if name in names and (high - low) / 2 > VAGUE * max(value, 1e-12) and mean > 0:
            doubts.append(f"{name} is between {low:.2g} and {high:.2g} s only")
    return tuple(doubts)
