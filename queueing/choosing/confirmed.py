"""The choice of a search by the values that `kendall predict` says of it.

A search asks for dozens of predictions, which are cheap: of short simulations on the same arrivals,
whose noise is that of one. What it chooses is predicted once more at full length. Where the two
differ, they do at the neighbours too, by about the same factor: the search goes on with the bounds
of the SLOs moved by it, and what it reports keeps them by the full values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.search import Optimum, Point, bisected, choose

MOST = 3  # full predictions of one search, where the first ones keep the SLOs
CLOSE = 0.002  # of a bound: nearer, nothing is gained by another one
SAFE = 0.002  # of a bound, below which the next attempt stays after one that broke it


@dataclass
class Moved:
    """The bounds of an objective's SLOs for quick values, each times its factor in `factors`."""

    objective: Objective
    factors: dict[str, float] = field(default_factory=dict)

    def kept(self, point: Point) -> bool:
        """Whether its quick values keep the moved bounds."""
        return self.excess(point) <= 1

    def excess(self, point: Point) -> float:
        """The largest of its values over its moved bound; infinite without a steady state."""
        values = [(point.get(slo.name), slo) for slo in self.objective.slos]
        return max(
            float("inf")
            if value is None
            else value / (slo.seconds * self.factors.get(slo.name, 1.0))
            for value, slo in values
        )

    def learn(self, quick: Point, full: Point) -> bool:
        """Move the bounds by the ratio of both values of one choice; whether they changed."""
        safe = 1.0 if full["score"] is not None else 1 - SAFE
        before = dict(self.factors)
        for slo in self.objective.slos:
            one, other = quick.get(slo.name), full.get(slo.name)
            if one and other:
                self.factors[slo.name] = safe * one / other
        return any(
            abs(factor / before.get(name, 1.0) - 1) > CLOSE for name, factor in self.factors.items()
        )


def confirmed_choice(
    target: str,
    objective: Objective,
    curve: list[Point],
    full: Callable[[Point], Point] | None,
    note: str | None = None,
    *,
    by_sojourn: bool = False,
    learns: bool = True,
) -> Optimum:
    """The choice of `choose`, whose best point keeps the objective by its `full` values too;
    without `full`, by those it has. With `learns`, a point that fails moves the bounds by which the
    other points are judged. Raises NoStableChoiceError.
    """
    moved, points = Moved(objective), list(curve)
    while True:
        found = choose(target, objective, points, note, by_sojourn=by_sojourn)
        if full is None or objective.name == "throughput":
            return found
        quick, at = found.best, next(i for i, each in enumerate(points) if each is found.best)
        best = full(quick)
        points[at] = best
        if best["score"] is not None:
            return Optimum(target, objective.name, best, points, note)
        if not learns:
            continue
        moved.learn(quick, best)
        points = [
            point | {"score": None} if point is not best and not moved.kept(point) else point
            for point in points
        ]


@dataclass(frozen=True)
class Rising:
    """Choices in a row, of which the larger break the SLOs: loads, token limits. `points`: those
    that were asked for quickly; `between`: the one to try between one that keeps them and one that
    does not, None where they are near enough; `ceiling`: larger than any.
    """

    objective: Objective
    points: dict[float, Point]
    quick: Callable[[float], Point]
    full: Callable[[float], Point]
    between: Callable[[float, float], float | None]
    ceiling: float

    def confirmed(self, start: float) -> dict[float, Point]:
        """Full points about the largest choice that keeps the SLOs, as it seemed to be `start`."""
        moved, found, at = Moved(self.objective), dict[float, Point](), start
        while True:
            found[at] = self.full(at)
            kept = found[at]["score"] is not None
            learnt = moved.learn(self.quick(at), found[at])
            if (kept and (not learnt or len(found) >= MOST)) or len(found) >= 3 * MOST:
                return found
            following = self._largest(moved, found)
            if following is None or following in found or (kept and following < at):
                return found
            at = following

    def _largest(self, moved: Moved, found: Mapping[float, Point]) -> float | None:
        """By bisection from the choices that were asked for; None where none of them is kept."""
        ceiling = min([self.ceiling, *(at for at in found if found[at]["score"] is None)])
        below = [at for at in self.points if at < ceiling]
        low = max((at for at in below if moved.kept(self.points[at])), default=None)
        if low is None:
            return None
        high = min([ceiling, *(at for at in below if at > low)])
        return bisected(lambda at: moved.kept(self.quick(at)), low, high, self.between)

    def curve(self, found: Mapping[float, Point]) -> list[Point]:
        """All points, in order: larger ones than those confirmed are no choice."""
        best = max((at for at in found if found[at]["score"] is not None), default=-1.0)
        every = {
            at: point if at < best else point | {"score": None} for at, point in self.points.items()
        }
        return [point for _, point in sorted((every | dict(found)).items())]
