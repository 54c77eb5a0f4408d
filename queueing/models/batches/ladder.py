"""A random walk with steps A - b (A arrivals while b leave), E[A] < b: its Wiener-Hopf factors from
one FFT.

    -log(1 - w^{-b} E w^A) = sum_j c_j w^j    on a circle |w| = r > 1

    E[(sup S)] = sum_{j>0} j c_j                            (Spitzer): requests left behind by
                                                            fixed batches
    1 - sum_{j=1}^b g_j w^{-j} = exp(-sum_{j<0} c_j w^j)    g = law of the descending ladder heights
    1 - sum ...        w^j     = exp(-sum_{j>0} c_j w^j)    the ascending factor

The circle is the r that makes r^{-b} E r^A smallest: there it is below 1, the logarithm is
single-valued, and the error falls geometrically with the number of points, which doubles until
E[sup] stands still and the ladder heights sum to 1. No roots of z^b = E z^A are looked for (their
solvers fail above b = 24, THEORY: numerical pitfalls). Conditions: E[A] < b, E r^A finite for some
r > 1. Source: Spitzer (1956); cepstral method: Oppenheim and Schafer, ch. 12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.lattice import Complex, Vector
from kendall.queueing.errors import NotConvergedError

_FIRST, _LAST = 512, 2**21


@dataclass(frozen=True, eq=False)
class Ladder:
    """Coefficients c_j of one walk. `rising[j]` = c_j (j > 0), `falling[j]` = c_{-j}, `still` =
    c_0.
    """

    size: int  # b
    radius: float
    rising: Vector
    falling: Vector
    still: float
    residual: float  # of sum g = 1

    @property
    def mean_supremum(self) -> float:
        """E[sup S], S_0 = 0."""
        return float(self.rising @ np.arange(len(self.rising)))

    @property
    def heights(self) -> Vector:
        """`heights[j]` = P(the walk falls by j at its first strict descent), j = 0 .. b."""
        return np.append(0.0, -self.falling_factor[1:])

    @property
    def falling_factor(self) -> Vector:
        """Coefficients of w^0, w^-1, ..., w^-b of exp(-sum_{j<0} c_j w^j)."""
        factor = np.zeros(self.size + 1)
        factor[0] = 1.0
        weighted = self.falling[: self.size + 1] * np.arange(self.size + 1)
        for n in range(1, self.size + 1):
            factor[n] = -(weighted[1 : n + 1] @ factor[n - 1 :: -1][:n]) / n
        return factor

    def supremum_transform(self, w: Complex, powers: Complex) -> Complex:
        """E w^{sup S}; `powers` = w^{-b} E w^A at the same w. Inside the circle by the rising
        factor, outside by the falling one.
        """
        total = math.exp(
            -float(self.rising.sum())
        )  # exp(-sum_{j>0} c_j): the rising factor at w = 1
        answer = np.empty(len(w), dtype=complex)
        inside = np.abs(w) < (1 + self.radius) / 2
        answer[inside] = total * np.exp(np.polynomial.polynomial.polyval(w[inside], self.rising))
        outside = ~inside
        falling = np.polynomial.polynomial.polyval(1 / w[outside], self.falling_factor)
        answer[outside] = total * math.exp(-self.still) * falling / (1 - powers[outside])
        return answer


def solve_ladder(arrivals: Vector, size: int, radius: float) -> Ladder:
    """From P(A = j), j = 0, 1, ... (complete: what is missing beyond must be negligible times
    r^j). Raises NotConvergedError.
    """
    scaled = arrivals * radius ** np.arange(len(arrivals))
    points = max(_FIRST, 2 ** math.ceil(math.log2(2 * len(arrivals))))
    previous = residual = math.inf
    while points <= _LAST:
        ladder = _at(scaled, size, radius, points)
        moved = abs(ladder.mean_supremum - previous)
        residual = abs(float(ladder.falling_factor.sum()))
        if moved <= 1e-11 * (ladder.mean_supremum + size) and residual < 1e-9:
            return ladder
        points, previous = 2 * points, ladder.mean_supremum
    raise NotConvergedError("the Wiener-Hopf factors of the queue", residual)


def _at(scaled: Vector, size: int, radius: float, points: int) -> Ladder:
    angle = 2 * np.pi * np.arange(points // 2 + 1) / points
    on_circle = np.conj(np.fft.rfft(scaled, n=points))  # sum_j a_j r^j e^{+i j angle}
    log = -np.log1p(-on_circle * (radius ** -float(size)) * np.exp(-1j * size * angle))
    coefficients = np.fft.irfft(np.conj(log), n=points)
    half = points // 2
    j = np.arange(half)
    told = np.flatnonzero(np.abs(coefficients[1:half]) > 1e-18)  # beyond, rounding errors
    rising = (coefficients[:half] * radius**-j)[: int(told[-1]) + 2 if len(told) else 1]
    falling = np.zeros(max(half, size + 1))
    shown = min(half, size + 1)
    falling[1:shown] = coefficients[:-shown:-1] * radius ** j[1:shown].astype(float)
    still = float(rising[0])
    rising[0] = 0.0
    ladder = Ladder(size, radius, rising, falling, still, 0.0)
    return Ladder(size, radius, rising, falling, still, abs(float(ladder.falling_factor.sum())))
