"""Fixed batching, M/G^b/1: the server waits until exactly b are present (no max_wait).

R = requests left behind when a batch starts is a Lindley recursion R' = (R + A - b)^+, A the arrivals during H, so by Spitzer

    E[R] = sum_n E[(S_n)^+] / n,   S_n = sum of n copies of A - b
         = sum_{j > 0} j c_j,      -log(1 - w^{-b} E w^A) = sum_j c_j w^j   on a circle |w| = r > 1
    lam E[Wq] = E[R] + (b - 1) / 2                            (the wait of the formed batch, plus the forming delay)
    E[W] = E[Wq] + E[H(b)]

Conditions: Poisson arrivals, one server, lam E[H] < b. The circle is the r > 1 that makes r^{-b} E r^A smallest: there it is below 1, the
logarithm is single-valued and its Laurent coefficients come from one FFT, with an error that falls geometrically; the number
of points doubles until E[R] stands still. Equals Bailey's (1954) sum over the roots of
z^b = E z^A inside the unit circle (THEORY d), needs none of them.
Bailey's mean is the queue at departures: the queueing delay is that minus lam E[H], plus the forming delay.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar

from queueing.batch_chain import BatchQueue
from queueing.batch_time import BatchTime
from queueing.errors import NotConvergedError, UnstableQueueError


def solve_fixed_batches(time: BatchTime, arrival_rate: float, batch_size: int) -> BatchQueue:
    """The stationary means. Raises UnstableQueueError, NotConvergedError."""
    service = time.mean(batch_size)
    load = arrival_rate * service / batch_size
    if load >= 1:
        raise UnstableQueueError(load)
    behind, residual, points = _mean_left_behind(time, arrival_rate, batch_size)
    delay = (behind + (batch_size - 1) / 2) / arrival_rate
    return BatchQueue(delay, delay + service, float(batch_size), load, residual, points)


def _mean_left_behind(time: BatchTime, arrival_rate: float, batch_size: int) -> tuple[float, float, int]:
    radius = _radius(time, arrival_rate, batch_size)
    points, previous = 256, math.inf
    while points <= 2**18:
        w = radius * np.exp(2j * np.pi * np.arange(points) / points)
        log = -np.log1p(-(w ** -float(batch_size)) * time.transform(arrival_rate * (1 - w), batch_size))
        coefficients = np.fft.fft(log).real[1 : points // 2] / points  # c_j r^j
        j = np.arange(1, points // 2)
        behind = float(np.sum(j * coefficients * radius ** -j.astype(float)))
        residual = abs(behind - previous)
        if residual <= 1e-11 * (behind + batch_size):
            return behind, residual, points
        points, previous = 2 * points, behind
    raise NotConvergedError("the Laurent series of the queue", residual)


def _radius(time: BatchTime, arrival_rate: float, batch_size: int) -> float:
    """The circle on which |w^{-b} E w^A| is smallest, found in u = log r > 0."""
    slack = batch_size - arrival_rate * time.mean(batch_size)
    spread = arrival_rate**2 * time.second_moment(batch_size) + arrival_rate * time.mean(batch_size)

    def height(u: float) -> float:
        point = np.array([arrival_rate * (1 - math.exp(u)) + 0j])
        return float(np.log(time.transform(point, batch_size)[0].real)) - batch_size * u

    # the transform of the gamma residual has its pole at w = 1 + 1 / (lam h cv^2)
    pole = math.log1p(0.9 / (arrival_rate * time.longest(batch_size) * time.law.cv**2)) if time.law.cv else math.inf
    widest = min(pole, 4 * slack / (spread - (batch_size - slack) ** 2), 3.0)  # twice the minimum of the parabola at 0
    return math.exp(float(minimize_scalar(height, bounds=(0.0, widest), method="bounded").x))
