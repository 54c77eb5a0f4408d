"""H | b, the service time of a batch of b requests under the latency law: moments and Laplace transform.

    padded    H = X (k1 b + k2 + kp sum P_i + (k3 b + k4) max N_i)
    unpadded  H = X (k1 b + k2 + kp sum P_i + k3 sum N_i + k4 max N_i)

N_i output tokens, P_i prompt tokens, X the gamma residual (mean 1, SCV cv^2), all independent. Moments are exact. The
transform at a point s needs, for X = 1,

    padded    E exp(-s d max N),  d = k3 b + k4: Gauss nodes of the law of max N (Lanczos), as many as s d (range) asks
    unpadded  sum_m exp(-s k4 m) (C_m^b - C_{m-1}^b),  C_m = sum_{n <= m} p_n exp(-s k3 n): exact

and a Gauss-Laguerre rule over X (Golub-Welsch), doubled until the transform stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh_tridiagonal
from scipy.special import gammaln

from queueing.distributions import TokenDistribution, Vector
from queueing.errors import NotConvergedError
from queueing.latency import LatencyModel

Complex = npt.NDArray[np.complexfloating[Any, Any]]
_BLOCK = 400_000  # numbers held at once
_CACHED = 16_000  # complex numbers that stay in a core's cache: three times as quick


@dataclass(frozen=True, eq=False)
class BatchTime:
    """The law of H given the batch size."""

    law: LatencyModel
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None
    padded: bool

    def mean(self, batch_size: int) -> float:
        """E[H | b]."""
        return self._decode_mean(batch_size) + self._setup_mean(batch_size)

    def second_moment(self, batch_size: int) -> float:
        """E[H^2 | b]."""
        prompts = 0.0 if self.prompt_tokens is None else self.prompt_tokens.variance
        variance = self._decode_variance(batch_size) + batch_size * (self.law.speed * self.law.kp) ** 2 * prompts
        return (1 + self.law.cv**2) * (variance + self.mean(batch_size) ** 2)

    def own_mean(self, batch_size: int) -> float:
        """Mean time from dispatch to one member's own release: H where padded, its own last token where not."""
        if self.padded:
            return self.mean(batch_size)
        lengths, law = self.output_tokens, self.law
        shorter = float(np.sum((1 - lengths.cdf[:-1]) ** 2))  # E min(N1, N2)
        decode = law.k3 * (lengths.mean + (batch_size - 1) * shorter) + law.k4 * lengths.mean
        return self._setup_mean(batch_size) + law.speed * decode

    def largest_stable_rate(self, bound: int | None) -> float:
        """lim b / E[H(b)] at the bound: more than this cannot be served."""
        if bound is not None:
            return bound / self.mean(bound)
        each = self.output_tokens.longest if self.padded else self.output_tokens.mean
        seconds = self.law.admission(1, self._prompt_mean) + self.law.speed * self.law.k3 * each
        return 1 / seconds if seconds > 0 else float("inf")

    def arrivals_table(self, arrival_rate: float, largest: int, states: int) -> Vector:
        """`table[b - 1, j]` = P(A = j | b), A = Poisson arrivals during H, b = 1 .. largest, j <= states at least.

        Padded: a mixture of Poisson (cv = 0) or negative binomial laws over max N, summed directly. Unpadded, or with random prompts: the
        transform at the roots of unity, their number doubled until every row has the right mean. Raises NotConvergedError.
        """
        if self.padded and self._prompts_are_fixed:
            return np.array([self._padded_arrivals(arrival_rate, b, states) for b in range(1, largest + 1)])
        size = 2 * states
        means = arrival_rate * np.array([self.mean(b) for b in range(1, largest + 1)])
        while True:
            points = arrival_rate * (1 - np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size))
            rows = np.fft.irfft(self._checked_table(points, largest), n=size, axis=1)
            error = float(np.max(np.abs(rows @ np.arange(size) - means) / means))
            if error < 1e-9:
                return np.asarray(rows / rows.sum(axis=1, keepdims=True))
            size *= 2
            if size > 2**15:
                raise NotConvergedError("the law of the arrivals during a batch", error)

    def _padded_arrivals(self, arrival_rate: float, batch_size: int, states: int) -> Vector:
        step = self.law.step(batch_size)
        swing = 2 * arrival_rate * step * self.output_tokens.longest
        counts, weights = condensed(self.output_tokens.maximum(batch_size), nodes=32 + int(swing))
        means = arrival_rate * (self._setup_mean(batch_size) + step * counts)
        row = np.zeros(states + 1)
        j = np.arange(states + 1)
        for part, mass in _blocks(means, weights, states + 1):
            row += mass @ _mixed_poisson(j, part[:, None], self.law.cv)
        return row

    def _checked_table(self, s: Complex, largest: int) -> Complex:
        """`table[b - 1, i]` = E[exp(-s_i H) | b] for b = 1 .. largest. Raises NotConvergedError."""
        if self.law.cv == 0:
            return self._table(s, range(1, largest + 1))
        nodes, probe, error = 4, s[:: max(1, len(s) // 16)], np.inf
        while nodes <= 128:
            rough = self._mixed(probe, *gamma_rule(self.law.cv, nodes), [largest])
            error = float(np.abs(rough - self._mixed(probe, *gamma_rule(self.law.cv, 2 * nodes), [largest])).max())
            if error < 1e-11:
                return self._mixed(s, *gamma_rule(self.law.cv, nodes), range(1, largest + 1))
            nodes *= 2
        raise NotConvergedError("the quadrature over the residual", error)

    def transform(self, s: Complex, batch_size: int) -> Complex:
        """E[exp(-s H) | b] at the points s."""
        if self.law.cv == 0:
            return np.asarray(self._table(s, [batch_size])[0])
        if not (self.padded and self._prompts_are_fixed):
            return np.asarray(self._mixed(s, *gamma_rule(self.law.cv, 64), [batch_size])[0])
        step, variance = self.law.step(batch_size), self.law.cv**2
        swing = float(np.abs(s).max()) * step * self.output_tokens.longest
        counts, weights = condensed(self.output_tokens.maximum(batch_size), nodes=32 + int(swing))
        seconds = self._setup_mean(batch_size) + step * counts
        terms = (weight * np.exp(-np.log1p(s * second * variance) / variance) for second, weight in zip(seconds, weights, strict=True))
        return np.asarray(np.sum(list(terms), axis=0))  # E exp(-s X h) = (1 + s h cv^2)^(-1/cv^2)

    def longest(self, batch_size: int) -> float:
        """The largest service time where X = 1."""
        prompts = 0 if self.prompt_tokens is None else batch_size * self.prompt_tokens.longest
        return self.law.padded(batch_size, self.output_tokens.longest, prompts)

    @property
    def _prompts_are_fixed(self) -> bool:
        return self.prompt_tokens is None or self.law.kp == 0 or self.prompt_tokens.variance == 0

    def _mixed(self, s: Complex, x: Vector, weights: Vector, sizes: range | list[int]) -> Complex:
        points = np.multiply.outer(x, s)
        table = self._table(points.ravel(), sizes).reshape(len(sizes), *points.shape)
        return np.asarray(np.einsum("i,bis->bs", weights, table))

    def _table(self, s: Complex, sizes: range | list[int]) -> Complex:
        decode = self._padded_decode if self.padded else self._unpadded_decode
        table = decode(self.law.speed * s, sizes)
        setup = np.exp(-s * self.law.setup(0))
        each = np.exp(-s * self.law.speed * self.law.k1) * self._prompt_transform(s)
        for row, size in enumerate(sizes):
            table[row] *= setup * each**size
        return table

    def _prompt_transform(self, s: Complex) -> Complex:
        kp = self.law.speed * self.law.kp
        if self.prompt_tokens is None or kp == 0:
            return np.ones_like(s)
        support = np.flatnonzero(self.prompt_tokens.pmf)
        terms = [self.prompt_tokens.pmf[n] * np.exp(-s * (kp * n)) for n in support]
        return np.asarray(np.sum(terms, axis=0, dtype=complex))

    def _padded_decode(self, s: Complex, sizes: range | list[int]) -> Complex:
        table = np.empty((len(sizes), len(s)), dtype=complex)
        for row, size in enumerate(sizes):
            step = self.law.k3 * size + self.law.k4
            longest = self.output_tokens.maximum(size)
            swing = float(np.abs(s).max()) * step * self.output_tokens.longest
            counts, weights = condensed(longest, nodes=32 + int(swing))
            table[row] = sum(np.exp(np.multiply.outer(-step * part, s)).T @ mass for part, mass in _blocks(counts, weights, len(s)))
        return table

    def _unpadded_decode(self, s: Complex, sizes: range | list[int]) -> Complex:
        table = np.empty((len(sizes), len(s)), dtype=complex)
        chunk = max(1, _CACHED // len(self.output_tokens.pmf))
        for start in range(0, len(s), chunk):
            table[:, start : start + chunk] = self._unpadded_chunk(s[start : start + chunk], sizes)
        return table

    def _unpadded_chunk(self, s: Complex, sizes: range | list[int]) -> Complex:
        counts, pmf = self.output_tokens.counts[1:], self.output_tokens.pmf[1:]
        cumulative = np.cumsum(pmf * np.exp(np.multiply.outer(-s * self.law.k3, counts)), axis=1)
        longest = np.exp(np.multiply.outer(-s * self.law.k4, counts))
        drop = longest - np.append(longest[:, 1:], np.zeros((len(s), 1)), axis=1)  # summation by parts over m
        power = cumulative ** sizes[0]
        rows = np.zeros((len(sizes), len(s)), dtype=complex)
        bound = np.log(pmf @ np.exp(-np.multiply.outer(counts, s.real * self.law.k3))) - s.real * self.law.k1  # |row b| <= exp(b bound)
        for row, size in enumerate(sizes):
            if size * bound.max() < -40:  # e^-40: below the last digit, and so are all larger sizes
                break
            rows[row] = np.einsum("sm,sm->s", power, drop)
            power *= cumulative
        return rows

    @property
    def _prompt_mean(self) -> float:
        return 0.0 if self.prompt_tokens is None else self.prompt_tokens.mean

    def _setup_mean(self, batch_size: int) -> float:
        return self.law.setup(batch_size, batch_size * self._prompt_mean)

    def _decode_mean(self, batch_size: int) -> float:
        longest = self.output_tokens.maximum(batch_size).mean
        if self.padded:
            return self.law.step(batch_size) * longest
        return self.law.speed * (self.law.k3 * batch_size * self.output_tokens.mean + self.law.k4 * longest)

    def _decode_variance(self, batch_size: int) -> float:
        lengths, law = self.output_tokens, self.law
        longest = lengths.maximum(batch_size)
        if self.padded:
            return law.step(batch_size) ** 2 * longest.variance
        partial = batch_size * np.cumsum((lengths.counts - lengths.mean) * lengths.pmf) * lengths.cdf ** (batch_size - 1)
        covariance = float(np.diff(partial, prepend=0.0) @ (longest.counts - longest.mean))  # Cov(sum, max)
        own = law.k3**2 * batch_size * lengths.variance + law.k4**2 * longest.variance
        return law.speed**2 * (own + 2 * law.k3 * law.k4 * covariance)


def _mixed_poisson(j: npt.NDArray[np.int64], mean: Vector, cv: float) -> Vector:
    """P(A = j) for A Poisson with mean `mean` times a gamma residual of SCV cv^2: negative binomial, Poisson where cv = 0."""
    if cv == 0:
        return np.asarray(np.exp(j * np.log(mean) - mean - gammaln(j + 1)))
    shape = cv**-2
    odds = mean / shape
    log = gammaln(j + shape) - gammaln(shape) - gammaln(j + 1) + j * np.log(odds) - (j + shape) * np.log1p(odds)
    return np.asarray(np.exp(log))


def gamma_rule(cv: float, nodes: int) -> tuple[Vector, Vector]:
    """Gauss nodes and weights of the gamma law with mean 1 and SCV cv^2 (generalised Laguerre; Golub and Welsch 1969)."""
    shape = cv**-2
    n = np.arange(nodes)
    points, vectors = eigh_tridiagonal(2 * n + shape, np.sqrt(n[1:] * (n[1:] + shape - 1)))
    return points / shape, vectors[0] ** 2


def condensed(lengths: TokenDistribution, nodes: int) -> tuple[Vector, Vector]:
    """Gauss nodes of a length law: `nodes` points with its first 2 nodes - 1 moments; the law itself where it has no more.

    Lanczos with full reorthogonalisation on diag(counts), started at sqrt(pmf) (Golub and Welsch 1969; Gautschi 2004).
    """
    support = np.flatnonzero(lengths.pmf > 1e-22)
    counts, pmf = lengths.counts[support], lengths.pmf[support]
    if nodes >= len(support):
        return counts, pmf
    basis = np.zeros((nodes, len(support)))
    basis[0] = np.sqrt(pmf)
    diagonal, off = np.zeros(nodes), np.zeros(nodes)
    for k in range(nodes):
        diagonal[k] = counts @ basis[k] ** 2
        residual = counts * basis[k]
        for _ in range(2):  # once is not enough in floating point
            residual -= basis[: k + 1].T @ (basis[: k + 1] @ residual)
        off[k] = np.linalg.norm(residual)
        if k + 1 < nodes:
            basis[k + 1] = residual / off[k]
    points, vectors = eigh_tridiagonal(diagonal, off[:-1])
    return points, vectors[0] ** 2


def _blocks(counts: Vector, weights: Vector, width: int) -> list[tuple[Vector, Vector]]:
    size = max(1, _BLOCK // width)
    return [(counts[i : i + size], weights[i : i + size]) for i in range(0, len(counts), size)]
