"""Laws of durations on an equidistant lattice: putting mass on it, and reading a law from its
Laplace transform.

`spread` puts mass at arbitrary points onto the lattice with Lagrange weights over `order`
neighbours, which keeps the moments below `order` (2: mass between its two neighbours; 8 makes E
f(T) exact to (width f')^8 for smooth f, at the price of small negative weights).

`Grid` inverts a transform f(s) known at s_j = tilt + i pi j / horizon by one FFT: the tilt e^{-8}
weakens what lies beyond twice the horizon and wraps round, and the hat kernel turns a density into
lattice masses (mean-preserving, error O(width^2)). Conditions: mass on [0, infinity). Source: Abate
and Whitt (1992), section 5, in its lattice form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.queueing.result import LEVELS, Levels

Vector = npt.NDArray[np.floating[Any]]
Complex = npt.NDArray[np.complexfloating[Any, Any]]
_TILT = 8.0


def spread(values: Vector, weights: Vector, width: float, points: int, order: int = 2) -> Vector:
    """The lattice law (`points` masses at 0, width, ...) of mass `weights` at `values` (seconds,
    inside the lattice).
    """
    position = values / width
    first = np.minimum(
        np.maximum(np.floor(position).astype(np.int64) - (order // 2 - 1), 0), points - order
    )
    shares = _lagrange(position - first, order)
    places = np.add.outer(np.arange(order), first)
    return np.asarray(
        np.bincount(places.ravel(), (weights * shares).ravel(), minlength=points), float
    )


def cyclic(values: Vector, weights: Vector, width: float, points: int, order: int) -> Vector:
    """`spread` with every stencil centred: what reaches below 0 is at the end of the lattice."""
    position = values / width
    first = np.floor(position).astype(np.int64) - (order // 2 - 1)
    shares = _lagrange(position - first, order)
    places = np.add.outer(np.arange(order), first) % points
    return np.asarray(
        np.bincount(places.ravel(), (weights * shares).ravel(), minlength=points), float
    )


def spectra(
    values: Vector, width: float, points: int, order: int = 2
) -> Callable[[slice], Complex]:
    """`spectra(part)[i, k]`: frequency `part.start + i` of the cyclic lattice law of the point
    `values[k]`; `points` is a power of 2.

    Never above 1, so that powers of it are safe.
    """
    position = values / width
    first = np.floor(position).astype(np.int64) - (
        order // 2 - 1
    )  # centred, below 0 if need be: off its centre a stencil exceeds 1
    shares, nodes = _lagrange(position - first, order), np.arange(order)
    roots = np.exp(-2j * np.pi * np.arange(points) / points)

    def rows(part: slice) -> Complex:
        frequencies = np.arange(part.start, part.stop)
        turns = roots[np.multiply.outer(frequencies, nodes) & (points - 1)]
        answer = np.empty((len(turns), len(values)), dtype=complex)
        answer.real, answer.imag = (
            turns.real @ shares,
            turns.imag @ shares,
        )  # of real shares: half the work of complex ones
        answer *= roots[np.multiply.outer(frequencies, first) & (points - 1)]
        return answer

    return rows


def _lagrange(offset: Vector, order: int) -> Vector:
    """`shares[node]`: the products over the nodes before it and after it."""
    nodes = np.arange(order)
    apart = offset - nodes[:, None]
    shares = np.ones_like(apart)
    for node in nodes[1:]:
        np.multiply(shares[node - 1], apart[node - 1], out=shares[node])
    after = np.ones_like(offset)
    for node in nodes[-2::-1]:
        after *= apart[node + 1]
        shares[node] *= after
    shares /= np.array(
        [[math.prod(int(node - other) for other in nodes if other != node)] for node in nodes]
    )
    return shares


def fitted_width(horizon: float, points: int) -> float:
    """A lattice width that covers the horizon, from a ladder of factors sqrt 2: neighbouring
    horizons share one lattice.
    """
    return float(math.sqrt(2) ** math.ceil(2 * math.log2(horizon / points)))


@dataclass(frozen=True)
class Grid:
    """A lattice of `points` instants `width` seconds apart."""

    width: float
    points: int

    @cached_property
    def instants(self) -> Vector:
        """0, width, ..., seconds."""
        return self.width * np.arange(self.points)

    @cached_property
    def s(self) -> Complex:
        """Where transforms are asked for, 1/s."""
        period = 2 * self.points * self.width
        return (_TILT + 2j * np.pi * np.arange(self.points + 1)) / period

    @cached_property
    def hat(self) -> Complex:
        """Transform of the hat of half-width `width` about 0, divided by its mass."""
        half = self.s * self.width / 2
        return np.asarray((np.sinh(half) / half) ** 2)

    @cached_property
    def _decay(self) -> Vector:
        return np.exp(-_TILT * np.arange(2 * self.points) / (2 * self.points))

    def transform(self, masses: Vector) -> Complex:
        """f(s) of lattice masses, along the last axis; at most twice `points` of them."""
        return np.asarray(
            np.fft.rfft(masses * self._decay[: masses.shape[-1]], n=2 * self.points, axis=-1)
        )

    def masses(self, transform: Complex) -> Vector:
        """The lattice masses inside the horizon, along the last axis."""
        return np.asarray(
            (np.fft.irfft(transform, n=2 * self.points, axis=-1) / self._decay)[..., : self.points]
        )

    def quantiles(
        self, masses: Vector, atom: float = 0.0, levels: Levels = LEVELS, *, end: bool = False
    ) -> tuple[float | None, ...]:
        """At the levels, of a law with `atom` at 0 and lattice masses for the rest; None beyond the
        horizon. `end`: what the masses have too much or too little lies at their beginning; counted
        from there, where nothing is beyond the horizon.
        """
        cumulative = atom + np.cumsum(masses)
        if end:
            cumulative += 1 - cumulative[-1]
        middle = cumulative - masses / 2  # mass at a point lies half on either side of it
        return tuple(self._quantile(level, atom, cumulative, middle) for level in levels.values())

    def _quantile(
        self, level: float, atom: float, cumulative: Vector, middle: Vector
    ) -> float | None:
        if atom >= level:
            return 0.0
        index = int(np.searchsorted(cumulative, level))
        if index >= len(cumulative) - 1:
            return None
        low = max(index - 2, 0)
        rising = np.maximum.accumulate(middle[low : index + 3])
        return float(self.width * np.interp(level, rising, np.arange(low, low + len(rising))))


def mean_of(masses: Vector, grid: Grid) -> float:
    """Seconds; the masses need not sum to one."""
    return float(masses @ grid.instants)


def blocks(count: int, size: int) -> Sequence[slice]:
    """Consecutive slices of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
