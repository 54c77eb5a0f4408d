"""The laws of H | b for b = 1 .. B on one lattice: what every prediction for a batch policy reads,
whatever the arrival rate.

Without its residual X the service time is bounded, and its law lies on `_POINTS` lattice instants
(queueing.latency.service_laws). Everything asked of it is an expectation of a smooth function of
the service time, exact to (lam width)^8:

    P(A = j | b) = sum_t P(H = t | b) P(A = j | t),   Poisson; negative binomial where X is gamma
    E exp(-s X H) = sum_t P(H = t | b) (1 + s t cv^2)^(-1/cv^2)

The power of a complex number is taken in polar form, where real functions do: with
1 + s t cv^2 = p (1 + i r),

    |.| = (p^2 (1 + r^2))^(-1/(2 cv^2)),    its angle = -arctan(r) / cv^2

with cos and sin by the tangent of half the angle.

The lattice begins below 0 where the stencils may reach there (queueing.latency.service_laws). Both
functions are analytic at 0, so they are taken at the negative instants too; with a residual these
must stay well inside its pole at -1 / (lam cv^2).

Grids of one period ask for the same s, the coarser one for fewer of them: one table serves both.
The horizon of an unpadded batch is where Bernstein's inequality leaves e^-35 of the sum of its
tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.lattice import Complex, Grid, Vector, blocks
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import SMALLER, OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_laws import MOST_COUNTS, ServiceLaws, likely_sum
from kendall.queueing.latency.stalls import (
    TERMS_OF_A_STALL,
    most_stalls,
    room_for_stalls,
    with_stalls,
)

_POINTS, _UNPADDED_POINTS = (
    1024,
    4096,
)  # at least; the stencils of an unpadded batch's many terms must not reach below 0
_FINENESS = 0.15  # arrivals per lattice width at most: its eighth power is the error
_OWN_FINENESS = 4  # instants of the law of a member's own release in a grid's width
_MARGIN = 64  # lattice points for the stencils of the terms of H beyond its largest value
_REACH = 48  # lattice points that the stencils reach below the shortest H
_NEAREST = 0.25  # share of the way to the residual's pole that the lattice covers at most
_COARSE = 256  # instants that a transform with a residual sums over
_BLOCK = 2_000_000  # numbers made at once
_ROWS = 64  # numbers of arrivals whose likely instants are taken together
_UNLIKELY = -60.0  # log of a probability that is left out
_MOST_NUMBERS = 2**25  # of a table, 270 MB; building it takes up to three times as much
_MOST_TERMS = 2_200_000_000  # that are added up to those numbers: some four seconds
_KEPT, _TERMS_OF_A_SPECTRUM = 1024, 20
_MOST_ARRIVALS = 1_000_000_000  # their probabilities at all instants: some seconds
_CACHED = 16_000  # numbers that stay in a core's cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TabulatedService:
    """What the service time of a batch depends on besides its size, in requests of `unit`
    sequences each: one, or a whole call.
    """

    law: LatencyModel
    outputs: CallLengths
    prompt_tokens: TokenDistribution | None
    padded: bool
    pad_prompts: bool = False
    unit: int = 1

    def range(self, largest: int) -> tuple[float, float]:
        """The longest service time that is likely, and the shortest that is possible, seconds."""
        law, output, prompts = self.law, self.outputs.lengths, self.prompt_tokens
        one, most = self.unit, self.unit * largest  # sequences of the smallest and largest batch
        least, fewest = (
            float(np.flatnonzero(output.pmf)[0]),
            0.0 if prompts is None else float(np.flatnonzero(prompts.pmf)[0]),
        )
        tokens = (
            0.0
            if prompts is None
            else float(most * prompts.longest)
            if self.pad_prompts
            else likely_sum(CallLengths(prompts), most)
        )
        if self.padded:
            shortest = min(law.padded(b, least, b * fewest) for b in (one, most))
            return law.padded(most, output.longest, tokens), shortest
        shortest = min(law.unpadded(b, b * least, least, b * fewest) for b in (one, most))
        total = likely_sum(self.outputs, most)
        return law.unpadded(most, total, output.longest, tokens), shortest

    def lattice(
        self, largest: int, arrivals: float, horizon: float, shortest: float
    ) -> tuple[int, int]:
        """How many points of the lattice lie below 0, none but where stencils may reach there, and
        how many there are.
        """
        least = _POINTS if self.padded else _UNPADDED_POINTS
        points = max(least, _power_of_two(arrivals / _FINENESS))
        if (self.padded and self.prompt_tokens is None) or (
            shortest >= _REACH * horizon / (points - _MARGIN)
        ):
            return 0, points
        finer = max(points, _power_of_two(arrivals * _REACH * self.law.cv**2 / _NEAREST))
        if finer == points or finer * largest <= _MOST_NUMBERS:
            return _REACH, finer
        return 0, points  # the few small batches' stencils wrap round


class ServiceTable:
    """Rate-independent: built once for a service and a largest batch, whose mean service time is
    `mean` seconds.
    """

    def __init__(self, service: TabulatedService, *, largest: int, mean: float) -> None:
        law = service.law
        self.law, self.largest, self._padded = law, largest, service.padded
        prompts = None if law.kp == 0 else service.prompt_tokens
        steady = dataclasses.replace(service, law=law.without_stalls(), prompt_tokens=prompts)
        horizon, shortest = steady.range(largest)
        arrivals = largest * horizon / mean  # at the largest stable rate
        self.origin, points = steady.lattice(largest, arrivals, horizon, shortest)
        self.width = horizon / (points - _MARGIN - self.origin)
        self.most_stalls = most_stalls(law.stall_rate / (1 - law.stall_share) * horizon)
        self._check_size(points, 0 if service.padded else service.outputs.lengths.longest)
        self._builder = ServiceLaws(
            law=steady.law,
            outputs=steady.outputs,
            unit=steady.unit,
            prompt_tokens=steady.prompt_tokens,
            pad_prompts=steady.pad_prompts,
            largest=largest,
            width=self.width,
            points=points,
            origin=self.origin,
        )
        laws = self._builder.padded() if service.padded else self._builder.unpadded()
        self.laws = self._stalled(laws, self.width)  # (B, points): X = 1
        self.instants = self.width * (np.arange(self.laws.shape[1]) - self.origin)
        self._own_laws: tuple[ServiceLaws, Vector] = self._builder, np.empty((0, 0))
        self._transforms: dict[tuple[float, bool, int], Complex] = {}
        self._kernel: tuple[float, Vector, Vector] = (
            0.0,
            np.empty((0, 0)),
            np.empty((0, 0)),
        )  # period, real and imaginary part

    def _check_size(self, points: int, classes: int) -> None:
        """Raises OutOfReachError before a table is built that would take more than seconds and a
        GB; `classes` of output lengths.

        Each length has a spectrum, whatever the batch size; of the powers of more than `_KEPT` of
        them nearly all vanish.
        """
        numbers = self.largest * (points + room_for_stalls(self.law, self.width, self.most_stalls))
        terms = numbers * (min(classes, _KEPT) + TERMS_OF_A_STALL * self.most_stalls)
        terms += points * min(classes, MOST_COUNTS) * _TERMS_OF_A_SPECTRUM
        if numbers > _MOST_NUMBERS or terms > _MOST_TERMS:
            what = (
                f"a table of the service times of 1 to {self.largest} requests at "
                f"{numbers // self.largest} instants"
            )
            raise OutOfReachError(what, SMALLER)

    def arrivals(self, arrival_rate: float, count: int, first: int = 0) -> Vector:
        """`rows[b - 1, j]` = P(A = j | b), j = 0 .. count - 1, for b = first + 1 .. B. Raises
        OutOfReachError.
        """
        if count * len(self.instants) > _MOST_ARRIVALS:
            raise OutOfReachError(
                f"the arrivals during a batch of up to {self.longest:.4g} s ({count} of them)",
                SMALLER,
            )
        laws, none, ratio = (
            self.laws[first:],
            self._no_arrival(arrival_rate),
            self._ratio(arrival_rate),
        )
        ratio_of_j = np.log((1 + np.arange(count - 1) * self.law.cv**2) / np.arange(1, count))
        factors = np.append(
            0.0, np.cumsum(ratio_of_j)
        )  # log of what P(A = j) has beside its power j
        rows = np.zeros((len(laws), count))
        for part in blocks(count, max(1, min(_ROWS, _BLOCK // len(self.instants)))):
            here = self._likely(
                none + part.start * ratio + factors[part.start],
                none + (part.stop - 1) * ratio + factors[part.stop - 1],
            )
            logs = np.multiply.outer(np.arange(part.start, part.stop), ratio[here])
            logs += none[here]
            logs += factors[part, None]
            chunk = np.exp(logs, out=logs)
            chunk[
                1 - part.start % 2 :: 2, : max(0, self.origin - here.start)
            ] *= -1.0  # t^j below 0
            rows[:, part] = laws[:, here] @ chunk.T
        return rows

    def transforms(self, grid: Grid, sizes: int, *, own: bool = False) -> Complex:
        """`table[b - 1]` = E exp(-s H), b = 1 .. `sizes` at least; `own`: the time to a member's
        own release instead.
        """
        own = own and not self._padded
        key = (_period(grid), own, 0 if self.law.cv else grid.points)
        known = self._transforms.get(key)
        if known is None or len(known) < sizes or known.shape[1] <= grid.points:
            known = self._transforms[key] = (
                self._own(sizes, grid)
                if own
                else self._smeared(self.laws[:sizes], self.width, grid)
            )
        return known[:sizes, : grid.points + 1]

    def _own(self, sizes: int, grid: Grid) -> Complex:
        """On fewer instants than the laws where the grid is coarse and no residual makes it
        finer; kept.
        """
        points = most = self._builder.points
        while (
            self.law.cv == 0
            and points > _UNPADDED_POINTS
            and 2 * _OWN_FINENESS * self.width * most / points < grid.width
        ):
            points //= 2
        builder, laws = self._own_laws
        if len(laws) == 0 or builder.points < points:
            width = self.width * (most - _MARGIN - self.origin) / (points - _MARGIN - self.origin)
            builder = dataclasses.replace(self._builder, points=points, width=width)
            laws = self._stalled(builder.unpadded(own=True), width)
            self._own_laws = builder, laws
        return self._smeared(laws[:sizes], builder.width, grid)

    def _stalled(self, laws: Vector, width: float) -> Vector:
        return with_stalls(laws, self.law, width, self.most_stalls, self.origin)

    @property
    def rows_of_a_transform(self) -> int:
        """Rows of numbers, each as long as the grid, that a transform makes beside those it
        returns.
        """
        return 2 * _COARSE if self.law.cv else 0

    def log_generating(self, arrival_rate: float, radius: float, batch_size: int) -> float:
        """log E radius^A | b; infinite beyond the pole of the gamma residual. Far out it grows
        with the rounding errors of the law.
        """
        law = self.laws[batch_size - 1]
        exponent = arrival_rate * (radius - 1) * self.instants
        variance = self.law.cv**2
        if variance:
            inner = 1 - exponent * variance
            if inner.min() <= 0:
                return math.inf
            exponent = -np.log(inner) / variance
        largest = float(
            exponent[law != 0].max()
        )  # beyond the law's end the powers may be larger than all of its terms
        value = float(law @ np.exp(np.minimum(exponent - largest, 0.0)))
        return math.log(abs(value)) + largest if value else math.inf

    @property
    def longest(self) -> float:
        """The largest service time where X = 1, seconds."""
        return float(self.instants[-1])

    def _no_arrival(self, arrival_rate: float) -> Vector:
        mean = arrival_rate * self.instants
        variance = self.law.cv**2
        return np.asarray(-mean if variance == 0 else -np.log1p(mean * variance) / variance)

    def _ratio(self, arrival_rate: float) -> Vector:
        """The part of log P(A = j) - log P(A = j - 1) that is of the service time, not of j."""
        mean = arrival_rate * self.instants
        # of the size: below 0 the signs alternate
        return np.asarray(np.log(np.maximum(np.abs(mean), 1e-300) / (1 + mean * self.law.cv**2)))

    @staticmethod
    def _likely(least: Vector, most: Vector) -> slice:
        """The instants where one of consecutive numbers of arrivals is likely, from the log P of
        the least and of the most.
        """
        early, late = np.flatnonzero(least > _UNLIKELY), np.flatnonzero(most > _UNLIKELY)
        if not len(early):
            return slice(0, 0)  # too many for the longest of service times
        return slice(int(early[0]), int(late[-1]) + 1 if len(late) else len(least))

    def _smeared(self, laws: Vector, width: float, grid: Grid) -> Complex:
        """Transforms of X H on a grid: by the gamma's own transform, on fewer instants (the hat
        of the grid is coarser).
        """
        if self.law.cv == 0:
            before = math.ceil(self.origin * width / grid.width)
            coarse = _rebinned(
                laws, width / grid.width, before - self.origin * width / grid.width, 2 * grid.points
            )
            return np.asarray(grid.transform(coarse) * np.exp(before * grid.width * grid.s))
        before = math.ceil(_COARSE * self.origin * width / self.longest)  # instants before 0
        step = self.longest / (_COARSE - 2 - before)
        coarse = _rebinned(laws, width / step, before - self.origin * width / step, _COARSE)
        real, imaginary = self._gamma(step * (np.arange(_COARSE) - before), grid)
        answer = np.empty((len(laws), grid.points + 1), dtype=complex)
        answer.real, answer.imag = coarse @ real, coarse @ imaginary
        return answer

    def _gamma(self, instants: Vector, grid: Grid) -> tuple[Vector, Vector]:
        """E exp(-s X t), a row for each instant, in its real and imaginary part; the last is
        kept.
        """
        period, *known = self._kernel
        if period != _period(grid) or known[0].shape[1] <= grid.points:
            # (1 + s t v)^(-1/v) for s of one real part
            s, variance = grid.s, self.law.cv**2
            real, imaginary = np.empty((2, len(instants), len(s)))
            p = 1 + float(s[0].real) * variance * instants
            for part in blocks(len(instants), max(1, _CACHED // len(s))):
                r = np.multiply.outer(variance * instants[part] / p[part], s.imag)
                size = p[part, None] ** (-1 / variance) * np.exp(np.log1p(r * r) / (-2 * variance))
                half = np.tan(np.arctan(r) / (2 * variance))
                square = half * half
                size /= 1 + square
                real[part] = size * (1 - square)
                imaginary[part] = -2 * size * half
            known = [real, imaginary]
            self._kernel = (_period(grid), real, imaginary)
        return known[0][:, : grid.points + 1], known[1][:, : grid.points + 1]


def _power_of_two(least: float) -> int:
    return int(2 ** math.ceil(math.log2(max(1.0, least))))


def _period(grid: Grid) -> float:
    """Of the transforms' frequencies, as far as rounding lets it be known: log2 of seconds."""
    return round(math.log2(grid.width * grid.points), 9)


def _rebinned(laws: Vector, ratio: float, first_at: float, points: int) -> Vector:
    """The same laws on a lattice 1 / `ratio` times as coarse, each mass between its two
    neighbours; beyond the last point is none.
    """
    position = first_at + ratio * np.arange(laws.shape[1])
    first = np.floor(position).astype(np.int64)
    share = position - first
    size = max(points, int(first[-1]) + 2)
    answer = np.zeros((len(laws), size))
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    for part in blocks(len(laws), max(1, _BLOCK // laws.shape[1])):
        answer[part, first[starts]] += np.add.reduceat(laws[part] * (1 - share), starts, axis=1)
        answer[part, first[starts] + 1] += np.add.reduceat(laws[part] * share, starts, axis=1)
    return answer[:, :points]
