"""The columns of the full table and of its CSV."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from loadgen.compare.cells import ReportCell
from loadgen.compare.comparison import TheoryEstimate
from loadgen.report.html.numbers import MS, label, mean_and_half, ms, percent
from loadgen.report.html.words import chip_class
from policies.text import short_number


class Column(NamedTuple):
    """A column of the full table: heading, unit, the number, how it is shown."""

    key: str  # of CSV and JSON
    heading: str
    unit: str
    value: Callable[[ReportCell], float | str | None]
    shown: Callable[[ReportCell], str] | None  # None: not in the page


def _estimate(key: str) -> Callable[[ReportCell], float | None]:
    def mean(cell: ReportCell) -> float | None:
        found: TheoryEstimate | None = getattr(cell.comparison.quantity, key)
        return None if found is None else found.mean * MS

    return mean


def _with_deviation(key: str) -> Callable[[ReportCell], str]:
    def text(cell: ReportCell) -> str:
        found: TheoryEstimate | None = getattr(cell.comparison.quantity, key)
        return (
            "–"
            if found is None
            else f"{ms(found.mean)}<br><small>{percent(found.deviation)}</small>"
        )

    return text


def _level(level: str, theory: str | None) -> Callable[[ReportCell], float | None]:
    def value(cell: ReportCell) -> float | None:
        quantity = cell.comparison.quantity
        found = quantity.quantiles if theory is None else quantity.theory_quantiles.get(theory, {})
        return None if level not in found else found[level] * MS

    return value


def _levels(level: str) -> Callable[[ReportCell], str]:
    observed, predicted = _level(level, None), _level(level, "predicted")

    def text(cell: ReportCell) -> str:
        seen, said = observed(cell), predicted(cell)
        beside = "" if said is None else f"<br><small>{ms(said / MS)}</small>"
        return ("–" if seen is None else ms(seen / MS)) + beside

    return text


def _plain(value: Callable[[ReportCell], float | None], form: str) -> Callable[[ReportCell], str]:
    def text(cell: ReportCell) -> str:
        found = value(cell)
        return "–" if found is None or not math.isfinite(found) else format(found, form)

    return text


def _of(name: str) -> Callable[[ReportCell], float | None]:
    return lambda cell: getattr(cell.comparison, name)


def _speed(cell: ReportCell) -> float | None:
    return cell.comparison.speed.factor if cell.comparison.speed else None


def _cv(cell: ReportCell) -> float | None:
    return cell.comparison.speed.cv if cell.comparison.speed else None


def _with_prediction(observed: str, predicted: str, form: str) -> Callable[[ReportCell], str]:
    seen, said = _plain(_of(observed), form), _plain(_of(predicted), form)
    return lambda cell: (
        seen(cell) + ("" if said(cell) == "–" else f"<br><small>{said(cell)}</small>")
    )


def _observed(cell: ReportCell) -> str:
    observed = cell.comparison.quantity.observed
    mean, half = mean_and_half(observed.mean, observed.half_width)
    return f'<span class="observed">{mean}</span><br><small>± {half}</small>'


def _check(name: str, factor: float) -> Callable[[ReportCell], float | None]:
    def value(cell: ReportCell) -> float | None:
        check = cell.comparison.check
        return None if check is None else getattr(check, name) * factor

    return value


def _check_verdict(cell: ReportCell) -> str | None:
    return None if cell.comparison.check is None else cell.comparison.check.verdict


def _difference(cell: ReportCell) -> str:
    check = cell.comparison.check
    if check is None:
        return "–"
    half = check.relative_half_width
    width = f"{half * 100:.1f} %" if math.isfinite(half) else "∞"
    return f"{percent(check.ratio - 1)}<br><small>± {width}</small>"


def _rate(cell: ReportCell) -> str:
    return (
        f"{cell.comparison.n:,}<br><small>{short_number(cell.comparison.arrival_rate, 3)}/s</small>"
    )


def _speed_shown(cell: ReportCell) -> str:
    speed = cell.comparison.speed
    return "–" if speed is None else f"{speed.factor:.3f}<br><small>cv {speed.cv:.2f}</small>"


def _short(cell: ReportCell) -> str:
    kind = "INVALID" if cell.invalid else cell.verdict.kind
    return f'<span class="chip {chip_class(kind)}">{escape(SHORT.get(kind, kind))}</span>'


SHORT = {"sampling noise": "chance"}
# `shown` None: in CSV only
COLUMNS = (
    Column(
        "policy",
        "policy",
        "",
        lambda cell: cell.comparison.policy,
        lambda cell: escape(label(cell)),
    ),
    Column("load", "load", "", lambda cell: cell.load, _plain(lambda cell: cell.load, ".2f")),
    Column("max_output_tokens", "limit", "", lambda cell: cell.max_output_tokens, None),
    Column("n", "n<br>rate", "", _of("n"), _rate),
    Column("arrival_rate", "rate", "1/s", _of("arrival_rate"), None),
    Column(
        "observed_ms",
        "observed",
        "ms",
        lambda cell: cell.comparison.quantity.observed.mean * MS,
        _observed,
    ),
    Column(
        "half_width_ms",
        "±",
        "ms",
        lambda cell: cell.comparison.quantity.observed.half_width * MS,
        None,
    ),
    Column(
        "same_arrivals_ms",
        "model, same<br>requests",
        "ms",
        _estimate("same_arrivals"),
        lambda cell: ms(check.modelled) if (check := cell.comparison.check) else "–",
    ),
    Column("check_difference_ms", "difference", "", _check("difference", MS), _difference),
    Column("check_half_width_ms", "±", "ms", _check("half_width", MS), None),
    Column("check_verdict", "check", "", _check_verdict, None),
    Column(
        "measured_service_ms",
        "gateway’s<br>share",
        "",
        _estimate("measured_service"),
        lambda cell: percent(
            None
            if (found := cell.comparison.quantity.measured_service) is None
            else found.deviation
        ),
    ),
    Column("live_ms", "live", "ms", _estimate("live"), _with_deviation("live")),
    Column(
        "predicted_ms", "run’s<br>speed", "ms", _estimate("predicted"), _with_deviation("predicted")
    ),
    Column("a_priori_ms", "a priori", "ms", _estimate("a_priori"), _with_deviation("a_priori")),
    Column("paper_ms", "as<br>printed", "ms", _estimate("paper"), _with_deviation("paper")),
    Column("p50_ms", "p50", "ms", _level("p50", None), _levels("p50")),
    Column("p90_ms", "p90", "ms", _level("p90", None), _levels("p90")),
    Column("p99_ms", "p99", "ms", _level("p99", None), _levels("p99")),
    Column("predicted_p50_ms", "p50", "ms", _level("p50", "predicted"), None),
    Column("predicted_p90_ms", "p90", "ms", _level("p90", "predicted"), None),
    Column("predicted_p99_ms", "p99", "ms", _level("p99", "predicted"), None),
    Column(
        "batch_size",
        "batch<br>size",
        "",
        _of("batch_size"),
        _with_prediction("batch_size", "predicted_batch_size", ".2f"),
    ),
    Column(
        "utilisation",
        "in use",
        "",
        _of("utilisation"),
        _with_prediction("utilisation", "predicted_utilisation", ".2f"),
    ),
    Column("speed", "speed", "", _speed, _speed_shown),
    Column("cv", "cv", "", _cv, None),
    Column(
        "verdict",
        "verdict",
        "",
        lambda cell: "INVALID" if cell.invalid else cell.verdict.text,
        _short,
    ),
)
SHOWN = tuple(column for column in COLUMNS if column.shown is not None)
