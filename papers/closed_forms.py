"""Orders with predictions in closed form: what the analysis is checked against, and the best
threshold of one bit.

One bit, p = P(short), m1 = E[X; short], rho_s = lam m1, W0 = lam E[X^2] / 2:

    not interrupted  E[T] = E[X] + W0 (1 - rho p) / ((1 - rho) (1 - rho_s)),   rho = lam E[X]
    preemptive       E[T] = E[X] / (1 - rho_s) + (1 - p) W0 / ((1 - rho_s) (1 - rho))

(preemptive: a short job interrupts everything, other short jobs too; long ones in order of
arrival). Exponential sizes of mean 1 and exponential predictions, K Bessel functions:

    p(T) = 1 - 2 sqrt(T) K1(2 sqrt T),   rho_y = lam (1 - 2 y K2(2 sqrt y))
    SPJF     E[T] = 1 + lam int_0^inf 2 K0(2 sqrt y) / (1 - rho_y)^2 dy
    SPRPT    E[T] = int lam (a + b) / (2 (1 - rho_y)^2) 2 K0(2 sqrt y) dy + residence,
             a + b = 2 - (4/e) y^{3/2} K3(2 sqrt y)

Sources: Mitzenmacher, Queues with small advice (2020), Scheduling with predictions and the price of
misprediction (2020); the slides, whose S_{e,n,e} and S_{w,n,e} are the first formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import kv

from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.predictors.laws import ExactPrediction, Predictor
from kendall.queueing.predictors.sizes import SizeGrid, SizeLaw

_CELLS = 400


@dataclass(frozen=True)
class Bit:
    """p = P(predicted short) and m1 = E[X; predicted short] of a law of sizes."""

    short: float
    short_work: float


def bit(sizes: SizeLaw, threshold: float, predictor: Predictor) -> Bit:
    """At this threshold, seconds."""
    boundaries = (threshold,) if isinstance(predictor, ExactPrediction) else ()
    atoms = sizes.cells(SizeGrid(_CELLS, boundaries))
    chance = predictor.at_most(np.array(threshold), atoms.sizes)
    return Bit(float(atoms.weights @ chance), float((atoms.weights * atoms.sizes) @ chance))


def threshold_sojourn(sizes: SizeLaw, arrival_rate: float, told: Bit, preemptive: bool) -> float:
    """E[T], seconds. Raises UnstableQueueError."""
    load = arrival_rate * sizes.mean
    if load >= 1:
        raise UnstableQueueError(load)
    spare, waiting = 1 - arrival_rate * told.short_work, arrival_rate * sizes.second_moment / 2
    if preemptive:
        return sizes.mean / spare + (1 - told.short) * waiting / (spare * (1 - load))
    return sizes.mean + waiting * (1 - load * told.short) / ((1 - load) * spare)


def best_threshold(
    sizes: SizeLaw, arrival_rate: float, predictor: Predictor, preemptive: bool
) -> float:
    """The threshold with the least mean sojourn time, within 0.1 %; seconds."""

    def sojourn(log_threshold: float) -> float:
        told = bit(sizes, math.exp(log_threshold), predictor)
        return threshold_sojourn(sizes, arrival_rate, told, preemptive)

    places = math.log(sizes.mean) + np.linspace(-3, 5, 33)
    best = int(np.argmin([sojourn(float(place)) for place in places]))
    ends = float(places[max(best - 1, 0)]), float(places[min(best + 1, len(places) - 1)])
    found = minimize_scalar(sojourn, bounds=ends, method="bounded", options={"xatol": 1e-3})
    return math.exp(float(found.x))


def exponential_bit(threshold: float) -> Bit:
    """Exponential sizes of mean 1, exponential predictions: Bessel functions."""
    root = 2 * math.sqrt(threshold)
    return Bit(1 - root * float(kv(1, root)), 1 - 2 * threshold * float(kv(2, root)))


def exponential_spjf(arrival_rate: float) -> float:
    """E[T] of SPJF, exponential sizes of mean 1 and exponential predictions."""
    return 1 + _over_predictions(lambda y: arrival_rate / _spare(arrival_rate, y) ** 2)


def exponential_sprpt(arrival_rate: float) -> float:
    """E[T] of SPRPT, exponential sizes of mean 1 and exponential predictions."""

    def wait(y: float) -> float:
        work = 2 - 4 / math.e * y * math.sqrt(y) * float(kv(3, 2 * math.sqrt(y)))
        return arrival_rate * work / (2 * _spare(arrival_rate, y) ** 2)

    # those served in turn at the rank r = y - s > 0: P(X > s, Y = r + s) over all s; and those
    # who have outlived their prediction, at rate 1
    def ranked(z: float) -> float:
        return 2 * z * _in_service_at(z * z) / _spare(arrival_rate, z * z)

    residence = float(quad(ranked, 0, 60, limit=400, epsabs=1e-12)[0]) + 1 / math.e
    return _over_predictions(wait) + residence


def _in_service_at(rank: float) -> float:
    """int_0^inf ds int_s^inf e^-x (1/x) e^{-(rank + s)/x} dx = int e^{-x} e^{-rank/x} (1 - 1/e)
    dx.
    """
    root = 2 * math.sqrt(rank)
    share = root * float(kv(1, root)) if rank > 0 else 1.0
    return (1 - 1 / math.e) * share


def _spare(arrival_rate: float, y: float) -> float:
    return 1 - arrival_rate * (1 - 2 * y * float(kv(2, 2 * math.sqrt(y)))) if y > 0 else 1.0


def _over_predictions(value: Callable[[float], float]) -> float:
    """E value(Y): Y has the density 2 K0(2 sqrt y)."""

    def at(z: float) -> float:
        return value(z * z) * 2 * float(kv(0, 2 * z)) * 2 * z

    return float(quad(at, 0, 60, limit=400, epsabs=1e-12, epsrel=1e-10)[0])
