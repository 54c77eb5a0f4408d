"""Tables 1 and 2: one bit of advice, exact or from an exponential prediction, not interrupted or
preemptive, each at its best threshold; beside FIFO, SRPT and SPRPT.

The slides' numbers are simulated, their thresholds found by experiment; FIFO is a formula. The
single-bit formulas S_{e,n,e} and S_{w,n,e} are checked at several thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import loggamma

from kendall.queueing.models.soap.orders import (
    SHORTEST_REMAINING,
    FifoRanks,
    Order,
    ThresholdRanks,
)
from kendall.queueing.models.soap.queue import EXACT
from kendall.queueing.predictors.laws import Predictor
from kendall.queueing.predictors.sizes import SizeLaw
from papers.closed_forms import (
    Bit,
    best_threshold,
    bit,
    exponential_bit,
    threshold_sojourn,
)
from papers.reproduction.artefact import Artefact, Panel, Say, Statement, curve
from papers.reproduction.slides.cells import (
    EXPONENTIAL,
    PREDICTED,
    SHORT_RUNS,
    WEIBULL,
    Cell,
)

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
NAMES = (
    "FIFO",
    "threshold, no preemption",
    "threshold, preemptive",
    "SRPT",
    "prediction, no preemption",
    "prediction, preemptive",
    "SPRPT",
)
TABLE1 = (
    ("2.000", "1.783", "1.564", "1.425", "1.850", "1.698", "1.659"),
    ("2.500", "2.089", "1.814", "1.604", "2.209", "2.013", "1.940"),
    ("3.333", "2.542", "2.203", "1.875", "2.761", "2.517", "2.369"),
    ("5.000", "3.329", "2.910", "2.355", "3.757", "3.451", "3.143"),
    ("10.00", "5.278", "4.755", "3.552", "6.366", "5.960", "5.097"),
    ("20.00", "8.535", "7.914", "5.532", "10.848", "10.372", "8.424"),
    ("50.00", "16.495", "15.735", "10.436", "22.418", "21.909", "16.696"),
)
TABLE2 = (
    ("4.000", "3.012", "1.608", "1.411", "3.155", "1.736", "1.940"),
    ("5.500", "3.676", "1.867", "1.574", "3.918", "2.062", "2.280"),
    ("8.000", "4.565", "2.258", "1.813", "4.983", "2.568", "2.750"),
    ("13.00", "5.955", "2.951", "2.217", "6.721", "3.481", "3.519"),
    ("29.00", "8.940", "4.649", "3.154", "10.630", "5.790", "5.224"),
    ("58.00", "13.223", "7.448", "4.517", "16.546", "9.846", "7.788"),
    ("148.0", "22.451", "15.194", "7.666", "29.346", "20.918", "13.404"),
)
FAR_THRESHOLD = "above the optimum: the slides' search stopped at a smaller threshold"
MISPRINT = "Pollaczek-Khinchine, 1 + 3 lam / (1 - lam); every other cell of the column keeps it"


def table1(say: Say) -> Artefact:
    """Exponential sizes."""
    return _table("slides-table1", "Table 1: one bit, exponential sizes", EXPONENTIAL, TABLE1, say)


def table2(say: Say) -> Artefact:
    """Weibull sizes, P(X > x) = exp(-sqrt(2 x))."""
    return _table("slides-table2", "Table 2: one bit, Weibull sizes", WEIBULL, TABLE2, say)


def _table(
    name: str, title: str, sizes: SizeLaw, printed: Sequence[Sequence[str]], say: Say
) -> Artefact:
    say("thresholds")
    thresholds = {
        column: [
            best_threshold(sizes, load, PREDICTED if "prediction" in column else EXACT, preemptive)
            for load in LOADS
        ]
        for column, preemptive in ((column, "preemptive" in column) for column in NAMES)
        if "," in column
    }
    statements: list[Statement] = []
    for index, column in enumerate(NAMES):
        for row, load in enumerate(LOADS):
            order = _order(column, thresholds.get(column, [0.0] * len(LOADS))[row])
            told = _predictor(column)
            cell = Cell(
                column, load, printed[row][index], order, sizes, told, sampled=column != "FIFO"
            )
            statements.append(cell.statement(say, _why(column, float(printed[row][index]), cell)))
    say("formulas")
    statements += _formulas(sizes)
    return Artefact(
        name, title, tuple(statements), _panels(statements), remarks=_remarks(thresholds)
    )


def _order(column: str, threshold: float) -> Order:
    if column in ("SRPT", "SPRPT"):
        return SHORTEST_REMAINING
    return FifoRanks() if column == "FIFO" else ThresholdRanks(threshold, "preemptive" in column)


def _predictor(column: str) -> Predictor:
    return PREDICTED if column == "SPRPT" or "prediction" in column else EXACT


def _why(column: str, printed: float, cell: Cell) -> str:
    if column == "FIFO":
        return MISPRINT
    above = "preemptive" in column and printed > cell.mean() * 1.005
    return FAR_THRESHOLD if above else SHORT_RUNS


def _remarks(thresholds: dict[str, list[float]]) -> tuple[str, ...]:
    shown = (
        f"{column}: {', '.join(f'{value:.2f}' for value in values)}"
        for column, values in thresholds.items()
    )
    return (
        f"Best thresholds at lam = {', '.join(f'{load:g}' for load in LOADS)}. "
        + "; ".join(shown)
        + ".",
        "Preemptive means here: a short job interrupts everything, another short job too (last "
        "come first served among short jobs); long jobs in order of arrival. With short jobs "
        "in order of arrival the preemptive cells would not come out.",
    )


def _formulas(sizes: SizeLaw) -> list[Statement]:
    """S_{e,n,e} and S_{w,n,e}: their parts p and m1 as printed against quadrature."""
    exponential = sizes is EXPONENTIAL
    worst = 0.0
    for threshold in (0.5, 1.5, 4.0):
        ours = bit(sizes, threshold, PREDICTED)
        as_printed = exponential_bit(threshold) if exponential else _meijer(threshold)
        for load in (0.5, 0.9):
            right = threshold_sojourn(sizes, load, ours, preemptive=False)
            worst = max(
                worst, abs(threshold_sojourn(sizes, load, as_printed, preemptive=False) / right - 1)
            )
    name = "S_{e,n,e} (Bessel functions)" if exponential else "S_{w,n,e} (Meijer G at T/2)"
    return [
        Statement(
            f"{name} against quadrature (largest relative difference)",
            "in words",
            f"{worst:.0e}",
            holds=worst < 1e-6,
        )
    ]


def _meijer(threshold: float) -> Bit:
    """Weibull sizes as in Table 2, the parts as printed."""
    first = _meijer_g(threshold / 2, -0.5)
    second = _meijer_g(threshold / 2, -1.5)
    return Bit(
        1 - math.sqrt(threshold / (2 * math.pi)) * first,
        1 - math.sqrt(threshold**3 / (2 * math.pi)) * second,
    )


def _meijer_g(z: float, least: float) -> float:
    """G^{3,0}_{0,3}(z | least, 0, 1/2), by its Mellin-Barnes integral on Re s = 2."""
    t = np.linspace(-30, 30, 6001)
    s = 2 + 1j * t
    value = np.exp(sum(loggamma(b + s) for b in (least, 0.0, 0.5)) - s * math.log(z))
    return float(value.real.sum() * (t[1] - t[0]) / (2 * math.pi))


def _panels(statements: Sequence[Statement]) -> tuple[Panel, ...]:
    """Exact and predicted sizes, each beside FIFO."""
    curves = {
        column: curve(
            column,
            LOADS,
            [float(each.ours) for each in statements[k * len(LOADS) : (k + 1) * len(LOADS)]],
        )
        for k, column in enumerate(NAMES)
    }
    return tuple(
        Panel(
            title,
            "load",
            "mean sojourn E[T]",
            (curves["FIFO"], *(curves[name] for name in names)),
            "y",
        )
        for title, names in (("exact sizes", NAMES[1:4]), ("predicted sizes", NAMES[4:]))
    )
