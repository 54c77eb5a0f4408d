"""Predictions with costs: SkipPredict and DelayPredict beside SPRPT, one bit and FIFO, at the costs
of the slides' two figures: a large gap (c1 = 0.5, c2 = 4) and a small one (c1 = 3.5, c2 = 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.models.soap.orders import SHORTEST_REMAINING, ThresholdRanks
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.predictors.sizes import SizeGrid
from papers.closed_forms import best_threshold
from papers.prediction_costs import DelayPredict, SkipPredict
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve
from papers.reproduction.slides.cells import EXPONENTIAL, PREDICTED

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)
LIMITS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GAPS = {"large cost gap": (0.5, 4.0), "small cost gap": (3.5, 4.0)}
SCALE = 0.01  # of the costs where they are seconds on the server
CELLS = 60
COARSE = 40


def costs(say: Say) -> Artefact:
    """Total cost per job in the external model, sojourn time in the model of server time."""
    panels, found = [], {}
    for external in (True, False):
        for gap, (first, second) in GAPS.items():
            scale = 1.0 if external else SCALE
            rows: dict[str, list[float]] = {}
            for load in LOADS:
                say(f"{'external' if external else 'server time'}, {gap}, load {load:g}")
                for name, value in _totals(load, first * scale, second * scale, external).items():
                    rows.setdefault(name, []).append(value)
            found[external, gap] = rows
            panels.append(_panel(gap, (first * scale, second * scale), external, rows))
    return Artefact(
        "slides-costs",
        "Predictions with costs: SkipPredict and DelayPredict",
        _statements(found),
        tuple(panels),
        assumed=(
            "exponential sizes of mean 1, exponential predictions, thresholds T and L the best of "
            + ", ".join(f"{limit:g}" for limit in LIMITS),
            f"server time: the same costs x {SCALE:g} seconds (as they are, every load would be "
            "above 1)",
        ),
        remarks=(
            "The figures' curves carry no numbers; which of the two cost models and which sizes "
            "they show is not in the text.",
        ),
    )


def _totals(load: float, first: float, second: float, external: bool) -> dict[str, float]:
    def skip(limit: float) -> float:
        order = SkipPredict(
            threshold=limit, bit_cost=first, size_cost=second, external=external, bit=PREDICTED
        )
        return _sum(order, load)

    def delay(limit: float) -> float:
        return _sum(DelayPredict(limit=limit, size_cost=second, external=external), load)

    found = {"FIFO": 1 / (1 - load), "SPRPT": _everyone(load, second, external)}
    found |= {"SkipPredict": _best(skip), "DelayPredict": _best(delay)}
    if external:
        limit = best_threshold(EXPONENTIAL, load, PREDICTED, preemptive=True)
        order = ThresholdRanks(limit, preemptive=True)
        found["one bit"] = first + solve_order(order, EXPONENTIAL, load, PREDICTED, CELLS).sojourn
    return found


def _best(total: Callable[[float], float]) -> float:
    return min(total(limit) for limit in LIMITS)


def _sum(order: SkipPredict | DelayPredict, load: float) -> float:
    """Mean sojourn time and cost; infinite where there is no steady state."""
    try:
        sojourn = solve_order(order, EXPONENTIAL, load, PREDICTED, COARSE).sojourn
    except UnstableQueueError:
        return math.inf
    return sojourn + order.cost(EXPONENTIAL.cells(SizeGrid(400, order.boundaries(PREDICTED))))


def _everyone(load: float, cost: float, external: bool) -> float:
    """SPRPT; on the server every job is predicted first, as DelayPredict with L near 0 does."""
    if external:
        return cost + solve_order(SHORTEST_REMAINING, EXPONENTIAL, load, PREDICTED, CELLS).sojourn
    return _sum(DelayPredict(limit=1e-9, size_cost=cost, external=False), load)


def _statements(found: dict[tuple[bool, str], dict[str, list[float]]]) -> tuple[Statement, ...]:
    statements = []
    for (external, gap), rows in found.items():
        for name in ("SkipPredict", "DelayPredict"):
            better = [
                load
                for load, ours, other in zip(LOADS, rows[name], rows["SPRPT"], strict=True)
                if ours < other
            ]
            shown = f"{', '.join(f'{load:g}' for load in better) or 'none'}"
            model = "external costs" if external else "server time"
            statements.append(
                Statement(
                    f"{name} better than SPRPT, {model}, {gap} (loads)",
                    "in words" if better else "",
                    shown,
                    holds=bool(better),
                )
            )
    try:
        solve_order(
            SkipPredict(threshold=1.0, bit_cost=0.1, size_cost=0.1, external=False),
            EXPONENTIAL,
            0.9,
        )
        overloaded = "no"
    except UnstableQueueError as error:
        overloaded = f"load {error.load:.3f}"
    statements.append(
        Statement(
            "'predictions could overload a heavily loaded system' (lam = 0.9, 0.1 s each)",
            "in words",
            overloaded,
            holds=overloaded != "no",
        )
    )
    return tuple(statements)


def _panel(
    gap: str, cost: tuple[float, float], external: bool, rows: dict[str, list[float]]
) -> Panel:
    curves = tuple(
        curve(name, LOADS, [value if math.isfinite(value) else None for value in values])
        for name, values in rows.items()
    )
    model = "external costs" if external else "server time"
    label = "E[T] + cost" if external else "E[T]"
    return Panel(f"{gap}, {model} {cost[0]:g}, {cost[1]:g}", "load", label, curves, "y")
