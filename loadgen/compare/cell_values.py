"""The numbers of a cell by the names that conditions use (loadgen.compare.assertions): seconds,
shares, counts.
"""

from __future__ import annotations

from loadgen.compare.cells import ReportCell
from loadgen.compare.comparison import Quantity
from queueing.result import LEVELS

QUANTITIES = ("queueing_delay", "sojourn_time")


def values_of(cell: ReportCell) -> dict[str, float | None]:
    """None where the run or the theory does not say."""
    comparison, late = cell.comparison, cell.lateness
    a_priori = comparison.quantity.a_priori
    found: dict[str, float | None] = {
        "prediction_error": comparison.prediction_error,
        "a_priori_error": None if a_priori is None else a_priori.deviation,
        "half_width": comparison.quantity.observed.relative,
        "arrival_rate": comparison.arrival_rate,
        "load": cell.load,
        "utilisation": comparison.utilisation,
        "batch_size": comparison.batch_size,
        "speed": comparison.speed.factor if comparison.speed else None,
        "requests": comparison.n,
        "mean_send_lateness": None if late is None else late.mean,
        "p99_send_lateness": None if late is None else late.p99,
    }
    for name in QUANTITIES:
        quantity: Quantity = getattr(comparison, name)
        found[f"mean_{name}"] = quantity.observed.mean
        found |= {f"{level}_{name}": quantity.quantiles.get(level) for level in LEVELS}
    return found
