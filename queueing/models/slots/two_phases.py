"""The delay before slots whose times are hyperexponential, exactly: a level-dependent quasi birth
and death chain.

A slot time is long (mean a S(n), probability p) or short (mean b S(n)), exponential both, where n
slots are taken; p, a, b by three moments. State: n requests, j of those in service long.

    level n < c   up lam (j + 1 with p), down j / (a S(n)) and (n - j) / (b S(n))
    level n >= c  up lam, down with the next in the queue in the slot that became free: the blocks
                  do not change any more, pi_{n+1} = pi_n R, R = lam (-(A1 + lam G))^-1, G by
                  logarithmic reduction (Latouche and Ramaswami 1993)
    below c       R_n = U_n (-(L_{n+1} + R_{n+1} D_{n+2}))^-1 from c - 1 down (linear level
                  reduction)

    Wq = pi_c R (I - R)^-2 1 / lam

Levels that exponential slot times visit with less than e^-35 of the most likely one are left out.
Conditions: squared coefficient of variation above 1; a third moment below that of any such mixture
counts as the least one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.models.slots.processor_sharing import log_weights

_NEGLIGIBLE = 35.0
_RARE = 1e-6  # chance of a wait
_LEAST_THIRD = 1.5 * 1.001  # of the second moment's square


class Phases(NamedTuple):
    """Chance of a long one; means of long and short ones, of all 1."""

    chance: float
    long: float
    short: float

    @property
    def fourth(self) -> float:
        """E[X^4]."""
        return 24 * (self.chance * self.long**4 + (1 - self.chance) * self.short**4)


def fitted(scv: float, third: float) -> Phases:
    """Of mean 1, that squared coefficient of variation (> 1) and third moment."""
    second = (1 + scv) / 2
    sixth = max(third, _LEAST_THIRD * (1 + scv) ** 2) / 6
    total = (sixth - second) / (second - 1)
    root = math.sqrt(total * total - 4 * (total - second))
    long = (total + root) / 2
    short = (total - second) / long
    return Phases((1 - short) / (long - short), long, short)


def delay_ratio(arrival_rate: float, stays: Sequence[float], phases: Phases) -> float:
    """Mean delay over that of exponential slot times. `stays[n - 1]`: mean slot time S(n) with n
    slots taken, seconds; the last one while requests wait. Raises NotConvergedError.
    """
    slots, means = len(stays), np.asarray(stays)
    weights = log_weights(arrival_rate, np.arange(1, slots + 1) / means)
    least = int(np.flatnonzero(weights > weights.max() - _NEGLIGIBLE)[0])
    chances = np.exp(weights[least:] - weights.max())
    chances[-1] /= 1 - arrival_rate * means[-1] / slots
    waiting = float(chances[-1] / chances.sum())
    if waiting < _RARE:
        return 1.0  # nothing to speak of
    exponential = waiting / (slots / means[-1] - arrival_rate)
    return float(_delay(arrival_rate, means, phases, least) / exponential)


def _delay(arrival_rate: float, means: Vector, phases: Phases, least: int) -> float:
    slots = len(means)
    again = _full_level(arrival_rate, slots, means[-1], phases)
    ratio = arrival_rate * np.linalg.inv(-(again.local + arrival_rate * again.first_passage))
    block, upward = again.local + ratio @ again.down, list[Vector]()
    for n in range(slots - 1, least - 1, -1):
        step = _up(arrival_rate, n, phases.chance) @ np.linalg.inv(-block)
        upward.append(step)
        down = _down(n + 1, means[n], phases)
        leaves = _ends(n, means[n - 1], phases) if n > least else np.zeros((2, n + 1))
        block = step @ down - np.diag(arrival_rate + leaves.sum(axis=0))
    state = _start(block)
    total = float(state.sum())
    for step in reversed(upward):
        state = state @ step
        total += float(state.sum())
    beyond = np.linalg.inv(np.eye(slots + 1) - ratio)
    total += float((state @ ratio @ beyond).sum())
    waiting = float((state @ ratio @ beyond @ beyond).sum())
    return waiting / total / arrival_rate


class _FullLevel(NamedTuple):
    """Blocks of a level with all slots taken, and G: where the level below is entered first."""

    local: Vector
    down: Vector
    first_passage: Vector


def _full_level(arrival_rate: float, slots: int, mean: float, phases: Phases) -> _FullLevel:
    ends, place = _ends(slots, mean, phases), np.arange(slots + 1)
    down = np.diag(phases.chance * ends[0] + (1 - phases.chance) * ends[1])
    down[place[1:], place[:-1]] = (1 - phases.chance) * ends[0, 1:]
    down[place[:-1], place[1:]] = phases.chance * ends[1, :-1]
    out = arrival_rate + ends.sum(axis=0)
    up, low = np.diag(arrival_rate / out), down / out[:, None]
    passage, reach, one = low.copy(), up.copy(), np.eye(slots + 1)
    for _ in range(64):
        mixed = np.linalg.inv(one - (up @ low + low @ up))
        up, low = mixed @ (up @ up), mixed @ (low @ low)
        more = reach @ low
        passage += more
        reach = reach @ up
        if np.abs(more).max() < 1e-14:
            return _FullLevel(-np.diag(out), down, passage)
    raise NotConvergedError("the chain of two phases in slots", float(np.abs(more).max()))


def _ends(taken: int, mean: float, phases: Phases) -> Vector:
    """Rates at which long and short ones end, for 0 .. `taken` long ones."""
    if not taken:
        return np.zeros((2, 1))
    long = np.arange(taken + 1)
    return np.array([long / (phases.long * mean), (taken - long) / (phases.short * mean)])


def _up(arrival_rate: float, level: int, chance: float) -> Vector:
    place, block = np.arange(level + 1), np.zeros((level + 1, level + 2))
    block[place, place] = arrival_rate * (1 - chance)
    block[place, place + 1] = arrival_rate * chance
    return block


def _down(level: int, mean: float, phases: Phases) -> Vector:
    """From a level of no more requests than slots: none takes the slot again."""
    ends, place = _ends(level, mean, phases), np.arange(level)
    block = np.zeros((level + 1, level))
    block[place + 1, place] = ends[0, 1:]
    block[place, place] += ends[1, :-1]
    return block


def _start(block: Vector) -> Vector:
    """The least level's vector up to a factor: what its closed block keeps."""
    if len(block) == 1:
        return np.ones(1)
    system = block.T.copy()
    system[-1] = 1.0
    right = np.zeros(len(block))
    right[-1] = 1.0
    return np.linalg.solve(system, right)
