"""The lattice law of a batch's service time without its residual, P(H = t | b) for b = 1 .. B at instants t.

    padded    max N of b sequences, put on the instants setup(b) + step(b) m
    unpadded  E w^H = sum_m w^{k4 m} (C_m^b - C_{m-1}^b),  C_m = sum_{n <= m} p_n w^{k3 n}
    own       E w^T = sum_n p_n w^{(k3 + k4) n} D_n^{b-1},  D_n = sum_i p_i w^{k3 min(i, n)}:  a member's own release, unpadded
    prompts   the convolution power b of the law of kp P

at the roots of unity w; each power w^t stands for the lattice law of the point t (queueing.lattice, order 8), so that the result
is a lattice law again, whatever the ratio of the coefficients. Unpadded lengths beyond 1024 classes are merged to classes of one width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from queueing.distributions import TokenDistribution
from queueing.latency import LatencyModel
from queueing.lattice import Complex, Vector, blocks, spectra, spread

ORDER = 8
_CLASSES = 1024
_CACHED = 16_000  # complex numbers that stay in a core's cache: three times as quick


@dataclass(frozen=True, eq=False, kw_only=True)
class ServiceLaws:
    """Builder of the laws on `points` instants, `width` seconds apart."""

    law: LatencyModel
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None
    largest: int
    width: float
    points: int

    def padded(self) -> Vector:
        """P(H = t | b), a row for each b."""
        laws = np.array([self._padded(b) for b in range(1, self.largest + 1)])
        if self.prompt_tokens is None:
            return laws
        prompts = self._prompts()
        return self._laws(np.array([row * prompts**b for b, row in enumerate(np.fft.rfft(laws, axis=1), start=1)]))

    def unpadded(self, *, own: bool = False) -> Vector:
        """P(H = t | b), or the time to a member's own release."""
        counts, pmf = classes(self.output_tokens, _CLASSES)
        speed = self.law.speed
        of_shared, of_alone = (self._spectra(speed * each * counts) for each in (self.law.k3, self.law.k4))
        table = np.empty((self.largest, self.points // 2 + 1), dtype=complex)
        survival = np.append(np.cumsum(pmf[::-1])[::-1][1:], 0.0)
        for part in blocks(table.shape[1], max(1, _CACHED // len(counts))):
            shared, alone = of_shared(part), of_alone(part)
            weighted = pmf * shared
            cumulative = np.cumsum(weighted, axis=1)
            if own:
                others = cumulative + survival * shared
                _power_sums(weighted * alone, others, table[:, part], first=0)
            else:
                drop = alone - np.append(alone[:, 1:], np.zeros((len(alone), 1)), axis=1)  # summation by parts over m
                _power_sums(drop, cumulative, table[:, part], first=1)
        setups = self._powers(np.array([self.law.setup(b) for b in range(1, self.largest + 1)])).T
        if self.prompt_tokens is not None:
            setups = setups * self._prompts() ** np.arange(1, self.largest + 1)[:, None]
        return self._laws(table * setups)

    def _padded(self, b: int) -> Vector:
        longest = self.output_tokens.maximum(b)
        support = np.flatnonzero(longest.pmf > 1e-20)
        seconds = self.law.setup(b) + self.law.step(b) * longest.counts[support]
        return spread(seconds, longest.pmf[support], self.width, self.points, ORDER)

    def _prompts(self) -> Complex:
        assert self.prompt_tokens is not None
        counts, pmf = classes(self.prompt_tokens, _CLASSES)
        return np.asarray(self._powers(self.law.speed * self.law.kp * counts) @ pmf)

    def _powers(self, seconds: Vector) -> Complex:
        """`powers[i, k]`: w_i^t at t = `seconds[k]`."""
        return self._spectra(seconds)(slice(0, self.points // 2 + 1))

    def _spectra(self, seconds: Vector) -> Callable[[slice], Complex]:
        return spectra(seconds, self.width, self.points, ORDER)

    def _laws(self, spectra: Complex) -> Vector:
        return np.asarray(np.fft.irfft(spectra, n=self.points, axis=1))


def _power_sums(terms: Complex, base: Complex, table: Complex, first: int) -> None:
    """`table[b - 1, i]` = sum_m terms[i, m] base[i, m]^(b - 1 + first)."""
    power = base**first
    for number, row in enumerate(table):
        if number % 16 == 15 and np.abs(power).max() < 1e-18:  # high frequencies vanish in long sums
            table[number:] = 0.0
            return
        row[:] = np.matmul(power[:, None, :], terms[:, :, None])[:, 0, 0]
        power *= base


def classes(lengths: TokenDistribution, most: int) -> tuple[Vector, Vector]:
    """Counts and their probabilities; more than `most` are merged to classes of equal width, at their conditional means."""
    support = np.flatnonzero(lengths.pmf)
    if len(support) <= most:
        return lengths.counts[support], np.asarray(lengths.pmf[support], dtype=float)
    label = (support * most) // len(lengths.pmf)
    mass = np.bincount(label, lengths.pmf[support], minlength=most)
    total = np.bincount(label, lengths.pmf[support] * support, minlength=most)
    kept = mass > 0
    return np.asarray(total[kept] / mass[kept], dtype=float), np.asarray(mass[kept], dtype=float)


def likely_sum(lengths: TokenDistribution, count: int) -> float:
    """A total of `count` lengths that is exceeded with probability e^-35 at most (Bernstein), or never."""
    deviation = math.sqrt(70 * count * lengths.variance) + 24 * lengths.longest
    return min(count * lengths.longest, count * lengths.mean + deviation)
