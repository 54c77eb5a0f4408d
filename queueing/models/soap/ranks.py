"""Ranks: who is served first, as a function of a job's prediction and its age (service received).

A rank is a class and a value; a smaller class goes first, within a class a smaller value; equal
ranks in order of arrival (in class `last_come`, the last arrival first). For each kind of job the
rank is piecewise linear in the age: piece p begins at age `start[p]`, in class `level[p]`, with
`value[p] + slope[p] (age - start[p])`. A first piece of no length is the rank of a job that has not
been served yet. Simulation and analysis read the same ranks.

Source: Scully, Harchol-Balter and Scheller-Wolf, SOAP: one clean analysis of all age-based
scheduling policies (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector

FIRST = -1  # the class of what is never interrupted
Piece = tuple[Vector | float, Vector | float, Vector | float, Vector | float]


@dataclass(frozen=True, eq=False)
class Ranks:
    """Arrays [kinds, pieces]; a piece that a kind does not have begins at infinity."""

    start: Vector
    level: Vector
    value: Vector
    slope: Vector
    last_come: int | None = None

    @classmethod
    def of(cls, kinds: int, pieces: Sequence[Piece], last_come: int | None = None) -> Ranks:
        """From (start, level, value, slope) of each piece, scalars or a number for each kind."""
        columns = [
            np.stack([np.broadcast_to(np.asarray(row, float), kinds) for row in rows], axis=1)
            for rows in zip(*pieces, strict=True)
        ]
        start, level, value, slope = columns
        return cls(start, level, value, slope, last_come)

    def keys(self, longest: float) -> Vector:
        """`level` and `value` as one number that orders as they do, for ages up to `longest`."""
        return np.asarray(self.level * self.width(longest) + self.value)

    def width(self, longest: float) -> float:
        """What separates two classes in `keys`."""
        return 4.0 * (float(np.abs(self.value).max()) + longest + 1.0)


def never_interrupted(value: Vector) -> Ranks:
    """By `value` [kinds] before the service, which is not interrupted."""
    return Ranks.of(len(value), [(0.0, 0, value, 0.0), (0.0, FIRST, 0.0, 0.0)])


def constant(value: Vector) -> Ranks:
    """`value` [kinds] all the time: preemptive where values differ."""
    return moving(value)


def moving(
    value: Vector, slope: float = 0.0, setup: float = 0.0, settled: Vector | None = None
) -> Ranks:
    """`value` [kinds] + `slope` x age; from the age `settled` on it is not interrupted. The first
    `setup` seconds of an age do not count.
    """
    pieces: list[Piece] = [(0.0, 0, value, 0.0 if setup else slope)]
    if setup and slope:
        pieces.append((setup, 0, value, slope))
    if settled is not None:
        pieces.append((settled, FIRST, 0.0, 0.0))
    return Ranks.of(len(value), pieces)


def bouncing(predicted: Vector, setup: float = 0.0) -> Ranks:
    """min(|prediction - age|, prediction): down to 0, up again, then constant (SRPT-B). The first
    `setup` seconds of an age and of a prediction do not count.
    """
    value = predicted - setup
    pieces: list[Piece] = [(0.0, 0, value, 0.0)] if setup else []
    pieces += [(setup, 0, value, -1.0), (predicted, 0, 0.0, 1.0)]
    again = predicted + value
    # one bit higher than a new job of its prediction, all of these would go before it
    again = np.where(again - predicted > value, np.nextafter(again, 0.0), again)
    return Ranks.of(len(predicted), [*pieces, (again, 0, value, 0.0)])


def age(kinds: int) -> Ranks:
    """The age: the least attained service first; equal ages share the server."""
    return Ranks.of(kinds, [(0.0, 0, 0.0, 1.0)])


def levels(kinds: int, quanta: Sequence[float]) -> Ranks:
    """Class k from the age quanta[0] + .. + quanta[k - 1] on."""
    starts = np.concatenate([[0.0], np.cumsum(quanta)])
    return Ranks.of(kinds, [(float(at), k, 0.0, 0.0) for k, at in enumerate(starts)])


def steps(ages: Sequence[float], values: Vector) -> Ranks:
    """`values[:, i]` [kinds] from the age `ages[i]` on."""
    pieces: list[Piece] = [(at, 0, value, 0.0) for at, value in zip(ages, values.T, strict=True)]
    return Ranks.of(len(values), pieces)


def two_classes(long: Vector, preemptive: bool, last_come: bool = True) -> Ranks:
    """Predicted long (1) behind predicted short (0) [kinds].

    Preemptive as in the slides' tables: a short job interrupts everything, other short jobs too;
    without `last_come` long jobs only.
    """
    if not preemptive:
        return never_interrupted(long)
    if not last_come:
        return constant(long)
    return Ranks.of(len(long), [(0.0, long, 0.0, 0.0)], last_come=0)


ABSENT = math.inf
