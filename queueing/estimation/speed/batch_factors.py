"""How many times as long as the law says each batch took, for the model to serve its own batches
with: the machine's slow moments come when they came. Of one server that is a speed at each moment
(queueing.latency.speed_path); of several, and where a policy waits by the clock, the factors of the
batches of each server in the order of dispatch.

    measured    factor = speed of the server * (1 + what depends on size and lengths + the rest)
    drawn       factor = speed of the server * (1 + error of that dependence + the rest)

What depends on the size, the lengths and the prompts of the batch is the law's affair, so it is
taken out: a law of another shape than the engine's keeps its own times, and parts from what is
observed. It is found by least squares over the window's batches, and so has an error: each draw has
another one. The rest is the machine's: it stays as it was, and in sum the batches take as long as
they did.

A machine that is slow for a while grows its batches in that time, which looks as if large ones were
slow. So the dependence is that within blocks of neighbours, of as many batches as show no change of
the machine's speed: halved as long as parts of 8 differ within them by more than their own scatter
explains (F test).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import fdtri

from kendall.queueing.estimation.change import Vector
from kendall.queueing.latency.speed_path import SpeedPath, block_begins, path_of_batches

EACH = 10  # batches for each coefficient, at least
SMALL = 1e-6  # of a column that others make up
LEAST = 8  # batches in a block
SHORTEST = 0.05  # factor
SURE = 0.999
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchFactors:
    """One value for each batch, server by server in the order of dispatch."""

    server: npt.NDArray[np.intp]
    place: npt.NDArray[np.intp]  # among those of its server
    begun: Vector  # seconds
    ended: Vector
    speed: Vector  # of its server
    weight: Vector  # seconds by the law
    rest: Vector
    dependence: Matrix  # a row for each batch: times the errors
    errors: Matrix  # square root of their covariance

    @classmethod
    def of(
        cls,
        server: npt.NDArray[np.intp],
        at: Vector,
        measured: Vector,
        lawful: Vector,
        about: tuple[Vector, Vector, Vector],
    ) -> BatchFactors | None:
        """`measured`: seconds, not a number where a batch was not served whole; `about`: sizes,
        longest outputs and sums of prompt tokens. None where no batch was.
        """
        order = np.lexsort((at, server))
        server, measured, lawful = server[order], measured[order], lawful[order]
        begun = at[order]
        known = np.isfinite(measured) & (measured > 0) & (lawful > 0)
        if not known.any():
            return None
        weight, took = np.where(known, lawful, 0.0), np.where(known, measured, 0.0)
        each = np.bincount(server, weight)
        mean = float(took.sum() / weight.sum())
        speeds = np.where(each > 0, np.bincount(server, took) / np.maximum(each, 1e-300), mean)
        speed = speeds[server]
        rest = np.where(known, took / np.where(known, speed * lawful, 1.0) - 1, 0.0)
        size, longest, prompts = (each[order] for each in about)
        columns = _columns(size, longest, prompts, weight)
        span = _span(rest[known], columns[known], weight[known])
        found, errors = _within(rest, columns, weight, span)
        begins = np.flatnonzero(np.diff(server, prepend=-1) != 0)
        place = np.arange(server.size) - np.repeat(begins, np.diff(np.append(begins, server.size)))
        return cls(
            server=server,
            place=place,
            begun=begun,
            ended=begun + np.nan_to_num(measured),
            speed=speed,
            weight=weight,
            rest=np.where(known, rest - columns @ found, 0.0),
            dependence=columns,
            errors=errors,
        )

    def path(self, rng: np.random.Generator) -> SpeedPath:
        """The same of one server as its speed at each moment: that of the batch that was served
        then, and the mean one between batches.
        """
        return path_of_batches(self.begun, self.ended, self._drawn(rng), float(self.speed[0]))

    def drawn(self, rng: np.random.Generator) -> Matrix:
        """Rows of servers; 1 where there was no batch."""
        rows = np.ones((int(self.server[-1]) + 1, int(self.place.max()) + 1))
        rows[self.server, self.place] = self._drawn(rng)
        return rows

    def _drawn(self, rng: np.random.Generator) -> Vector:
        errors = self.errors @ rng.standard_normal(self.errors.shape[1])
        factors = np.maximum(1 + self.rest + self.dependence @ errors, SHORTEST)
        mean = float(np.average(factors, weights=self.weight))
        drawn: Vector = self.speed * factors / mean
        return drawn


def _columns(size: Vector, longest: Vector, prompts: Vector, weight: Vector) -> Matrix:
    """What a time may depend on, centred, orthogonal and of one scale under the weights; those that
    others make up are left out.
    """
    most = np.count_nonzero(weight) // EACH
    given = (size, longest, size * longest, prompts, size**2, np.log(longest), 1 / size)
    found: list[Vector] = []
    for column in given[:most]:
        centred = column - np.average(column, weights=weight)
        for other in found:
            centred = centred - other * np.average(centred * other, weights=weight)
        scale = float(np.sqrt(np.average(centred**2, weights=weight)))
        if scale > SMALL * float(np.abs(column).max()):
            found.append(centred / scale)
    return np.stack(found, axis=1) if found else np.empty((size.size, 0))


def _within(rest: Vector, columns: Matrix, weight: Vector, span: int) -> tuple[Vector, Matrix]:
    """The dependence within blocks, and a square root of its covariance, which holds for batches
    that scatter differently.
    """
    width = columns.shape[1]
    if not width:
        return np.empty(0), np.empty((0, 0))
    both = np.column_stack([columns, rest])
    both = both - _block_means(both, weight, span)
    columns, rest = both[:, :-1], both[:, -1]
    scores = columns * weight[:, None]
    inverse = np.linalg.pinv(scores.T @ columns)
    found: Vector = inverse @ (scores.T @ rest)
    scores = scores * (rest - columns @ found)[:, None]
    count = np.count_nonzero(weight)
    spare = max(1, count - width - count // span)
    values, vectors = np.linalg.eigh(inverse @ (scores.T @ scores) @ inverse * (count / spare))
    return found, vectors * np.sqrt(np.maximum(values, 0.0))


def _span(rest: Vector, columns: Matrix, weight: Vector) -> int:
    """Batches in a block."""
    count = span = rest.size
    found, _ = _within(rest, columns, weight, span)
    left = rest - columns @ found
    parts, within = _squares(left, weight, LEAST)
    while span > LEAST:
        blocks, between = _squares(left, weight, span)
        freedom = parts - blocks, count - parts
        if min(freedom) < 1:
            break
        allowed = within * freedom[0] / freedom[1] * float(fdtri(*freedom, SURE))
        if between - within <= allowed:
            break
        span = max(LEAST, span // 2)
    return span


def _squares(values: Vector, weight: Vector, span: int) -> tuple[int, float]:
    """How many blocks there are, and the squares about their means."""
    about = values - _block_means(values[:, None], weight, span)[:, 0]
    return len(block_begins(values.size, span)), float(weight @ about**2)


def _block_means(values: Matrix, weight: Vector, span: int) -> Matrix:
    begins = block_begins(weight.size, span)
    sizes = np.diff([*begins, weight.size])
    sums = np.add.reduceat(values * weight[:, None], begins)
    means = sums / np.maximum(np.add.reduceat(weight, begins), 1e-300)[:, None]
    return np.repeat(means, sizes, axis=0)
