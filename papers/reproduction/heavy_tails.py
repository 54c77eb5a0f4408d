"""Batch queues whose lengths have no exponential moment (lognormal without a token limit):
truncated chains.

queueing.models.batches.batch_chain and queueing.models.batches.mgb1 need E r^A < infinity for some
r > 1, which a lognormal batch time has not. Here:

    P(A = j | b) = FFT of E e^{-lam (1 - w) H} at the roots of unity,
                   H padded or elastic as in queueing.latency.batch_time
    dynamic   Q' = max(Q - b + A, 1), b = min(Q, B);   fixed   R' = (R + A - b)^+

on a number of states that doubles, what lands above put into the last one. Means come from the
drifts of Q, Q^2 and R^2 with exact moments of H and the low states only, so the cut enters by the
low states' probabilities alone: where it matters, the drift of the whole chain (`residual`) does
not vanish. Equations: docstrings of the two modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from papers.reproduction.lengths import Lengths, Vector
from papers.reproduction.simulate import Constants

Complex = npt.NDArray[np.complex128]
_BLOCK = 256  # frequencies at a time
_TOLERANCE = 1e-6
_MOST = 4096  # states


@dataclass(frozen=True, slots=True)
class BatchMeans:
    """Means of a batch queue; seconds."""

    delay: float
    batch_size: float
    residual: float


@dataclass(frozen=True)
class HeavyTailedTime:
    """H | b for continuous lengths."""

    constants: Constants
    lengths: Lengths
    padded: bool = True

    def mean(self, b: int) -> float:
        """E[H | b]."""
        k1, k2, k3, k4 = self.constants
        total = b * (self.lengths.longest_mean(b) if self.padded else self.lengths.longest_mean(1))
        return k1 * b + k2 + k3 * total + k4 * self.lengths.longest_mean(b)

    def second_moment(self, b: int) -> float:
        """E[H^2 | b]."""
        k1, k2, k3, k4 = self.constants
        setup, longest, square = (
            k1 * b + k2,
            self.lengths.longest_mean(b),
            self.lengths.longest_mean(b, 2),
        )
        if self.padded:
            step = k3 * b + k4
            return setup**2 + 2 * setup * step * longest + step**2 * square
        mean = self.lengths.longest_mean(1)
        total_square = b * self.lengths.longest_mean(1, 2) + b * (b - 1) * mean**2
        tokens = k3**2 * total_square + 2 * k3 * k4 * self._sum_times_longest(b) + k4**2 * square
        return setup**2 + 2 * setup * (k3 * b * mean + k4 * longest) + tokens

    def arrivals(self, lam: float, sizes: range, count: int) -> Vector:
        """P(A = j | b), j < `count`, a row for each b in `sizes`."""
        circle = 2 * count
        s = lam * (1 - np.exp(-2j * np.pi * np.arange(circle // 2 + 1) / circle))
        table = np.empty((len(sizes), len(s)), dtype=complex)
        for first in range(0, len(s), _BLOCK):
            part = slice(first, first + _BLOCK)
            table[:, part] = self._transform(s[part], sizes)
        return np.asarray(np.fft.irfft(table, n=circle, axis=1)[:, :count])

    def _transform(self, s: Complex, sizes: range) -> Complex:
        k1, k2, k3, k4 = self.constants
        values, F, weights = self.lengths.nodes()
        rows = np.empty((len(sizes), len(s)), dtype=complex)
        if self.padded:
            for row, b in enumerate(sizes):
                rows[row] = np.exp(-(k3 * b + k4) * np.outer(s, values)) @ (
                    b * F ** (b - 1) * weights
                )
        else:
            shared = np.exp(-k3 * np.outer(s, values))
            below = cumulative(shared * weights)
            power = weights * shared * np.exp(-k4 * np.outer(s, values)) * below ** (sizes[0] - 1)
            for row, b in enumerate(sizes):
                rows[row] = b * power.sum(axis=1)
                power *= below
        setups = np.multiply.outer(k1 * np.array(sizes) + k2, s)
        return np.asarray(rows * np.exp(-setups))

    def _sum_times_longest(self, b: int) -> float:
        """E[M (M + the others)], the others being i.i.d. below M."""
        values, F, weights = self.lengths.nodes()
        others = (
            b
            * (b - 1)
            * float((values * cumulative(values * weights) * F ** max(b - 2, 0)) @ weights)
        )
        return self.lengths.longest_mean(b, 2) + others


def cumulative(terms: Any) -> Any:
    """Integral up to each node, along the last axis: trapezoid with two Euler-Maclaurin terms
    (error of sixth order).
    """
    first, third = np.zeros_like(terms), np.zeros_like(terms)
    near, far = terms[..., 3:-1] - terms[..., 1:-3], terms[..., 4:] - terms[..., :-4]
    first[..., 2:-2] = (8 * near - far) / 12
    third[..., 2:-2] = (far - 2 * near) / 2
    return np.cumsum(terms, axis=-1) - terms / 2 - first / 12 + third / 720


def dynamic_batches(time: HeavyTailedTime, lam: float, bound: int) -> BatchMeans:
    """At most `bound` together. Raises UnstableQueueError, NotConvergedError."""
    load = lam * time.mean(bound) / bound
    if load >= 1:
        raise UnstableQueueError(load)
    return _converged(lambda states: _dynamic(time, lam, bound, states))


def unlimited_batches(time: HeavyTailedTime, lam: float) -> BatchMeans:
    """Everything that waits is taken. Raises NotConvergedError; padded lengths without a largest
    have no steady state.
    """
    return _converged(lambda largest: _unlimited(time, lam, largest), first=32)


def fixed_batches(time: HeavyTailedTime, lam: float, b: int) -> BatchMeans:
    """Exactly b together, the forming delay included. Raises UnstableQueueError,
    NotConvergedError.
    """
    load = lam * time.mean(b) / b
    if load >= 1:
        raise UnstableQueueError(load)
    return _converged(lambda states: _fixed(time, lam, b, states))


def _converged(solve: Callable[[int], BatchMeans], first: int = 512) -> BatchMeans:
    states = first
    while True:
        found = solve(states)
        if found.residual < _TOLERANCE:
            return found
        states *= 2
        if states > _MOST:
            raise NotConvergedError("the truncated chain of batch sizes (drift)", found.residual)


def _dynamic(time: HeavyTailedTime, lam: float, bound: int, states: int) -> BatchMeans:
    first = np.array([time.mean(b) for b in range(1, bound + 1)])
    second = np.array([time.second_moment(b) for b in range(1, bound + 1)])
    rows = time.arrivals(lam, range(1, bound + 1), states)
    chain = np.zeros((states, states))  # index q - 1
    for q in range(1, states + 1):
        behind = max(q - bound, 0)
        _land(chain[q - 1], rows[min(q, bound) - 1], behind - 1)
    visits = _stationary(chain)
    sizes = np.arange(1.0, bound + 1)
    state = np.append(visits[: bound - 1], visits[bound - 1 :].sum())
    empty = float(visits[:bound] @ rows[:, 0])
    served = float(state @ sizes)
    residual = abs(float(state @ (lam * first - sizes)) + empty) / served
    arrivals = float(state @ (lam * first + lam**2 * second))
    left = (arrivals + empty - float(state @ sizes**2)) / (2 * (bound - lam * first[-1]))
    return _means(float(left * first[-1] + lam * state @ second / 2) / served, served, residual)


def _unlimited(time: HeavyTailedTime, lam: float, largest: int) -> BatchMeans:
    sizes = np.arange(1.0, largest + 1)
    rows = time.arrivals(lam, range(1, largest + 1), largest + 1)
    chain = np.zeros((largest, largest))
    for row, landing in zip(chain, rows, strict=True):
        _land(row, landing, -1)
    visits = _stationary(chain)
    first, second = (
        np.array([moment(b) for b in range(1, largest + 1)])
        for moment in (time.mean, time.second_moment)
    )
    served = float(visits @ sizes)
    residual = abs(
        float(visits @ (lam * first - sizes)) + float(visits @ rows[:, 0])
    ) / served + float(visits[-1])
    return _means(lam * float(visits @ second) / (2 * served), served, residual)


def _fixed(time: HeavyTailedTime, lam: float, b: int, states: int) -> BatchMeans:
    mean, second = time.mean(b), time.second_moment(b)
    slack = b - lam * mean
    row = time.arrivals(lam, range(b, b + 1), states)[0]
    chain = np.zeros((states, states))
    for behind in range(states):
        _land(chain[behind], row, behind - b)
    visits = _stationary(chain)
    missing = np.maximum(
        b - np.add.outer(np.arange(b), np.arange(b)), 0
    )  # places that stay empty, walk below 0
    step_square = lam * mean + lam**2 * second - 2 * b * lam * mean + b**2
    empty_places = visits[:b] @ missing @ row[:b]
    left = (step_square - float(visits[:b] @ missing**2 @ row[:b])) / (2 * slack)
    return _means((left + (b - 1) / 2) / lam, float(b), abs(float(empty_places) / slack - 1))


def _land(target: Vector, row: Vector, shift: int) -> None:
    """Add the law of (index j + shift), everything below 0 at 0 and beyond the end at the end."""
    size = len(target)
    if shift >= 0:
        target[shift:] += row[: size - shift]
    else:
        target[: len(row) + shift] += row[-shift : size - shift]
        target[0] += row[:-shift].sum()
    target[-1] += 1 - target.sum()


def _stationary(chain: Vector) -> Vector:
    equations = chain.T - np.eye(len(chain))
    equations[0] = 1.0
    right = np.zeros(len(chain))
    right[0] = 1.0
    return np.asarray(np.linalg.solve(equations, right))


def _means(delay: float, batch_size: float, residual: float) -> BatchMeans:
    return BatchMeans(float(delay), float(batch_size), float(residual))
