"""The lattice law of a batch's service time without its residual, P(H = t | b) for b = 1 .. B at
instants t.

    padded    max N of b sequences, put on the instants setup(b) + step(b) m
    unpadded  E w^H = sum_m w^{k4 m} (C_m^b - C_{m-1}^b),  C_m = sum_{n <= m} p_n w^{k3 n}
    own       a member's own release, unpadded:
              E w^T = sum_n p_n w^{(k3 + k4) n} D_n^{b-1},  D_n = sum_i p_i w^{k3 min(i, n)}
    prompts   the convolution power b of the law of kp P; padded ones: the law of kp b max P

at the roots of unity w. Where a whole call of n sequences stands for a request (`unit`), b n take
the place of b in the setup and in the steps, and C_m is that of the call, whose lengths are equal
with probability r (queueing.distributions.call_lengths); likewise D_n:

    C_m  ->  r sum_{i <= m} p_i w^{k3 n i} + (1 - r) C_m^n

Each power w^t stands for the lattice law of the point t
(queueing.distributions.lattice, order 8), so that the result is a lattice law again, whatever the
ratio of the coefficients.

The stencils of short terms reach below 0: those of b equal terms by about 40 instants (1e-13 of the
mass) whatever b is, because all cumulants below the eighth vanish. So the lattice begins `origin`
instants before 0; the mass there continues the law analytically. More than `MOST_COUNTS` different
unpadded lengths are thinned (`thinned`); the moments must be those of the thinned law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.lattice import Complex, Vector, blocks, cyclic, spectra, spread
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.latency.law import LatencyModel

ORDER = 8
MOST_COUNTS = 4096
# of a Fourier transform; what is left of a law beyond its last larger mass is not the law
_NOISE = 1e-16
_VANISHED = 1e-18
_CACHED = 16_000  # complex numbers that stay in a core's cache: three times as quick


@dataclass(frozen=True, eq=False, kw_only=True)
class ServiceLaws:
    """Builder of the laws on `points` instants, `width` seconds apart."""

    law: LatencyModel
    outputs: CallLengths
    prompt_tokens: TokenDistribution | None
    pad_prompts: bool = False
    unit: int = 1  # sequences of each request: one, or those of a call
    largest: int
    width: float
    points: int
    origin: int = 0  # instants before 0

    def padded(self) -> Vector:
        """P(H = t | b), a row for each b."""
        sizes = range(1, self.largest + 1)
        if self.prompt_tokens is None:
            laws = np.empty((self.largest, self.points))  # row by row: a table has up to 0.3 GB
            for row, b in zip(laws, sizes, strict=True):
                row[:] = self._padded(b)
            return laws
        prompts, table = (
            self._prompts(),
            np.empty((self.largest, self.points // 2 + 1), dtype=complex),
        )
        for row, b in zip(table, sizes, strict=True):
            row[:] = np.fft.rfft(self._padded(b)) * prompts(b)
        return self._laws(table)

    def unpadded(self, *, own: bool = False) -> Vector:
        """P(H = t | b), or the time to a member's own release."""
        lengths = self.outputs.lengths
        support = np.flatnonzero(lengths.pmf)
        counts, pmf = lengths.counts[support], lengths.pmf[support]
        speed = self.law.speed
        of_shared, of_alone = (
            self._spectra(speed * each * counts) for each in (self.law.k3, self.law.k4)
        )
        start = self.origin * self.width
        of_setup = self._spectra(
            np.array([start + self.law.setup(self.unit * b) for b in range(1, self.largest + 1)])
        )
        table = np.empty((self.largest, self.points // 2 + 1), dtype=complex)
        survival = np.append(np.cumsum(pmf[::-1])[::-1][1:], 0.0)
        for part in blocks(table.shape[1], max(1, _CACHED // max(len(counts), self.largest))):
            shared, alone = of_shared(part), of_alone(part)
            weighted = pmf * shared
            cumulative = np.cumsum(weighted, axis=1)
            if own:
                others = cumulative + survival * shared
                ends, beside = self._own_call(pmf, shared, others, survival)
                _power_sums(ends * alone, beside, table[:, part], first=0)
            else:
                drop = alone - np.append(
                    alone[:, 1:], np.zeros((len(alone), 1)), axis=1
                )  # summation by parts over m
                _power_sums(drop, self._call(pmf, shared, cumulative), table[:, part], first=1)
            table[:, part] *= of_setup(part).T
        if self.prompt_tokens is not None:
            prompts = self._prompts()
            for b in range(1, self.largest + 1):
                table[b - 1] *= prompts(b)
        return self._laws(table)

    def _call(self, pmf: Vector, shared: Complex, cumulative: Complex) -> Complex:
        """Of a request with no length above m, a column for each: C_m."""
        if self.unit == 1:
            return cumulative
        equal = np.cumsum(pmf * shared**self.unit, axis=1)
        return self.outputs.mixed(equal, cumulative**self.unit)

    def _own_call(
        self, pmf: Vector, shared: Complex, others: Complex, survival: Vector
    ) -> tuple[Complex, Complex]:
        """Of the request in which one has length n, a column for each, and of every other one up
        to there: D_n.
        """
        if self.unit == 1:
            return pmf * shared, others
        whole = shared**self.unit
        equal = np.cumsum(pmf * whole, axis=1) + survival * whole
        own = self.outputs.mixed(whole, shared * others ** (self.unit - 1))
        return pmf * own, self.outputs.mixed(equal, others**self.unit)

    def _padded(self, b: int) -> Vector:
        b = self.unit * b
        longest = self.outputs.longest(b)
        support = np.flatnonzero(longest.pmf > 1e-20)
        seconds = (
            self.origin * self.width
            + self.law.setup(b)
            + self.law.step(b) * longest.counts[support]
        )
        return spread(seconds, longest.pmf[support], self.width, self.points, ORDER)

    def _prompts(self) -> Callable[[int], Complex]:
        """The prompts of a batch of b, at the roots of unity."""
        assert self.prompt_tokens is not None
        given, each, unit = self.prompt_tokens, self.law.speed * self.law.kp, self.unit
        if self.pad_prompts:
            return lambda b: self._of_prompts(each * unit * b, given.maximum(unit * b))
        one = self._of_prompts(each, given)
        return lambda b: np.asarray(one ** (unit * b))

    def _of_prompts(self, seconds: float, counts: TokenDistribution) -> Complex:
        support = np.flatnonzero(counts.pmf > 1e-20)
        law = cyclic(
            seconds * counts.counts[support], counts.pmf[support], self.width, self.points, ORDER
        )
        return np.asarray(np.fft.rfft(law))

    def _spectra(self, seconds: Vector) -> Callable[[slice], Complex]:
        return spectra(seconds, self.width, self.points, ORDER)

    def _laws(self, spectra: Complex) -> Vector:
        """Back from the roots of unity, each law in the memory of its spectrum."""
        laws = spectra.view(float)[:, : self.points]
        for row, spectrum in zip(laws, spectra, strict=True):
            row[:] = np.fft.irfft(spectrum, n=self.points)
            row[int(np.flatnonzero(np.abs(row) > _NOISE)[-1]) + 1 :] = 0.0
        return np.asarray(laws)


def _power_sums(terms: Complex, base: Complex, table: Complex, first: int) -> None:
    """`table[b - 1, i]` = sum_m terms[i, m] base[i, m]^(b - 1 + first); `base` grows with m, and
    what vanishes from it is left out.
    """
    power = base**first
    number = 0
    while number < len(table):
        if number % 16 == 15:
            kept = np.flatnonzero(np.abs(power).max(axis=0) > _VANISHED)
            if not len(kept):
                table[number:] = 0.0
                return
            power, base, terms = (array[:, kept[0] :] for array in (power, base, terms))
        end = min(number + 16 - (number + 1) % 16, len(table))
        if 16 * power.size > _CACHED:
            for row in table[number:end]:
                row[:] = np.matmul(power[:, None, :], terms[:, :, None])[:, 0, 0]
                power = power * base
        else:
            powers = np.multiply.accumulate([power, *[base] * (end - number)])
            np.einsum("bim,im->bi", powers[:-1], terms, out=table[number:end])
            power = powers[-1]
        number = end


def thinned(lengths: TokenDistribution, most: int = MOST_COUNTS) -> TokenDistribution:
    """At most `most` different counts: those between two that are kept are shared out to both, so
    that the mean stays.

    The counts kept lie as densely as the cube root of the probability's density, for which the
    variance grows least: by about 2 / most^2.
    """
    support = np.flatnonzero(lengths.pmf)
    if len(support) <= most:
        return lengths
    weight = np.cumsum(np.cbrt(lengths.pmf[support] * np.diff(support, prepend=support[0]) ** 2.0))
    knots = np.unique(
        np.append(np.searchsorted(weight, np.linspace(0.0, weight[-1], most - 1)), len(support) - 1)
    )
    position = np.interp(support, support[knots], np.arange(len(knots)))
    left = np.minimum(position.astype(np.int64), len(knots) - 2)
    pmf = np.zeros(len(lengths.pmf))
    for side, share in ((left, left + 1 - position), (left + 1, position - left)):
        pmf += np.bincount(support[knots[side]], lengths.pmf[support] * share, minlength=len(pmf))
    return TokenDistribution(pmf)


def likely_sum(outputs: CallLengths, count: int) -> float:
    """A total of `count` lengths that is exceeded with probability e^-35 at most (Bernstein), or
    never.
    """
    lengths, largest = outputs.lengths, outputs.lengths.longest
    if not outputs.independent:
        assert outputs.sequences is not None  # those of one call are alike
        largest *= outputs.sequences.longest
    deviation = math.sqrt(70 * outputs.total_variance(count)) + 24 * largest
    return min(count * lengths.longest, count * lengths.mean + deviation)
