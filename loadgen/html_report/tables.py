"""The tables of a report as HTML: verdicts by policy and load, every number, the senders, what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from loadgen.cells import MissingCell, ReportCell
from loadgen.comparison import Estimate
from loadgen.html_report.style import MS, label, load_text, mean_and_half, ms, percent
from loadgen.html_report.words import chip_class
from queueing.arrival_audit import Audit


class Column(NamedTuple):
    """A column of the full table: heading, unit, the number, how it is shown."""

    key: str  # of CSV and JSON
    heading: str
    unit: str
    value: Callable[[ReportCell], float | str | None]
    shown: Callable[[ReportCell], str] | None  # None: not in the page


def chip(cell: ReportCell) -> str:
    """A cell's verdict."""
    verdict = cell.verdict
    return f'<span class="chip {chip_class(verdict.kind)}">{escape(verdict.text)}</span>'


def matrix(cells: Sequence[ReportCell]) -> str:
    """Policies by loads, each with its verdict and means."""
    loads = list(dict.fromkeys(None if cell.load is None else round(cell.load, 2) for cell in cells))
    names = list(dict.fromkeys(label(cell) for cell in cells))
    found = {(label(cell), None if cell.load is None else round(cell.load, 2)): cell for cell in cells}
    head = "".join(f'<th scope="col">{escape(load_text(load))}</th>' for load in loads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{_in_matrix(found.get((name, load)))}</td>" for load in loads) + "</tr>"
        for name in names
    )
    return f'<div class="scroll"><table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _in_matrix(cell: ReportCell | None) -> str:
    if cell is None:
        return "<small>not measured</small>"
    quantity = cell.comparison.quantity
    mean, half = mean_and_half(quantity.observed.mean, quantity.observed.half_width)
    means = f'<span class="observed">{mean}</span> ± {half} ms'
    if quantity.a_priori is not None:
        means += f"<br><small>predicted {ms(quantity.a_priori.mean)} ms ({percent(quantity.a_priori.deviation)})</small>"
    return f'{chip(cell)}<span class="means">{means}</span>'


def _estimate(key: str) -> Callable[[ReportCell], float | None]:
    def mean(cell: ReportCell) -> float | None:
        found: Estimate | None = getattr(cell.comparison.quantity, key)
        return None if found is None else found.mean * MS

    return mean


def _beside(key: str) -> Callable[[ReportCell], str]:
    def text(cell: ReportCell) -> str:
        found: Estimate | None = getattr(cell.comparison.quantity, key)
        return "–" if found is None else f"{ms(found.mean)}<br><small>{percent(found.deviation)}</small>"

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
    return lambda cell: seen(cell) + ("" if said(cell) == "–" else f"<br><small>{said(cell)}</small>")


def _observed(cell: ReportCell) -> str:
    observed = cell.comparison.quantity.observed
    mean, half = mean_and_half(observed.mean, observed.half_width)
    return f'<span class="observed">{mean}</span><br><small>± {half}</small>'


def _rate(cell: ReportCell) -> str:
    return f"{cell.comparison.n:,}<br><small>{cell.comparison.arrival_rate:.3g}/s</small>"


def _speed_shown(cell: ReportCell) -> str:
    speed = cell.comparison.speed
    return "–" if speed is None else f"{speed.factor:.3f}<br><small>cv {speed.cv:.2f}</small>"


def _short(cell: ReportCell) -> str:
    kind = cell.verdict.kind
    return f'<span class="chip {chip_class(kind)}">{escape(SHORT.get(kind, kind))}</span>'


SHORT = {"sampling noise": "chance"}
# `shown` None: in CSV only
COLUMNS = (
    Column("policy", "policy", "", lambda cell: cell.comparison.policy, lambda cell: escape(label(cell))),
    Column("load", "load", "", lambda cell: cell.load, _plain(lambda cell: cell.load, ".2f")),
    Column("max_output_tokens", "limit", "", lambda cell: cell.max_output_tokens, None),
    Column("n", "n<br>rate", "", _of("n"), _rate),
    Column("arrival_rate", "rate", "1/s", _of("arrival_rate"), None),
    Column("observed_ms", "observed", "ms", lambda cell: cell.comparison.quantity.observed.mean * MS, _observed),
    Column("half_width_ms", "±", "ms", lambda cell: cell.comparison.quantity.observed.half_width * MS, None),
    Column("measured_service_ms", "measured<br>service", "ms", _estimate("measured_service"), _beside("measured_service")),
    Column("same_arrivals_ms", "same<br>arrivals", "ms", _estimate("same_arrivals"), _beside("same_arrivals")),
    Column("live_ms", "live", "ms", _estimate("live"), _beside("live")),
    Column("predicted_ms", "run’s<br>speed", "ms", _estimate("predicted"), _beside("predicted")),
    Column("a_priori_ms", "a priori", "ms", _estimate("a_priori"), _beside("a_priori")),
    Column("paper_ms", "as<br>printed", "ms", _estimate("paper"), _beside("paper")),
    Column("p50_ms", "p50", "ms", _level("p50", None), _levels("p50")),
    Column("p90_ms", "p90", "ms", _level("p90", None), _levels("p90")),
    Column("p99_ms", "p99", "ms", _level("p99", None), _levels("p99")),
    Column("predicted_p50_ms", "p50", "ms", _level("p50", "predicted"), None),
    Column("predicted_p90_ms", "p90", "ms", _level("p90", "predicted"), None),
    Column("predicted_p99_ms", "p99", "ms", _level("p99", "predicted"), None),
    Column("batch_size", "batch<br>size", "", _of("batch_size"), _with_prediction("batch_size", "predicted_batch_size", ".2f")),
    Column("utilisation", "in use", "", _of("utilisation"), _with_prediction("utilisation", "predicted_utilisation", ".2f")),
    Column("speed", "speed", "", _speed, _speed_shown),
    Column("cv", "cv", "", _cv, None),
    Column("verdict", "verdict", "", lambda cell: cell.verdict.text, _short),
)
SHOWN = tuple(column for column in COLUMNS if column.shown is not None)
TEXT = {"policy", "verdict"}


def full_table(cells: Sequence[ReportCell]) -> str:
    """Every number; sortable by its headings."""
    head = "".join(f'<th scope="col"{_kind(c.key)}>{c.heading}{f"<small>{c.unit}</small>" if c.unit else ""}</th>' for c in SHOWN)
    body = "".join("<tr>" + "".join(_data(cell, column) for column in SHOWN) + "</tr>" for cell in cells)
    return f'<div class="scroll"><table class="sortable numbers-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _data(cell: ReportCell, column: Column) -> str:
    value = column.value(cell)
    sort = f' data-value="{value:.9g}"' if isinstance(value, int | float) and math.isfinite(value) else ""
    shown = column.shown(cell) if column.shown else ""
    return f"<td{_kind(column.key)}{sort}>{shown}</td>"


def _kind(key: str) -> str:
    return ' class="text"' if key in TEXT else ""


def simple_table(headings: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """Rows of ready HTML; `text` are the columns that are not numbers."""
    head = "".join(f'<th scope="col"{" class=text" if i in text else ""}>{h}</th>' for i, h in enumerate(headings))
    body = "".join("<tr>" + "".join(f"<td{_long(i, text)}>{v}</td>" for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _long(index: int, text: Sequence[int]) -> str:
    return "" if index not in text else ' class="text long"' if index else ' class="text"'


def senders(cells: Sequence[ReportCell]) -> str:
    """Arrivals and lateness, a row per cell; columns of which nothing is known are left out."""
    headings = ["cell", "asked", "arrived", "against<br>asked"]
    rows = [_arrived(cell) for cell in cells]
    if any(cell.lateness is not None for cell in cells):
        headings += ["lateness,<br>mean", "<br>p99"]
        rows = [row + _late(cell) for row, cell in zip(rows, cells, strict=True)]
    text = [0]
    if any(cell.audit is not None for cell in cells):
        text.append(len(headings) + 1)
        headings += ["dispersion", "audit of the arrivals"]
        rows = [[*row, _dispersion(cell.audit), _audit(cell.audit)] for row, cell in zip(rows, cells, strict=True)]
    return simple_table(headings, rows, text=text)


def _arrived(cell: ReportCell) -> list[str]:
    asked, rate = cell.comparison.asked_rate, cell.comparison.arrival_rate
    name = f"{escape(label(cell))} · {load_text(cell.load)}"
    return [name, "–" if asked is None else f"{asked:.2f}/s", f"{rate:.2f}/s", percent(None if asked is None else rate / asked - 1)]


def _late(cell: ReportCell) -> list[str]:
    late = cell.lateness
    return ["–", "–"] if late is None else [f"{late.mean * MS:.2f} ms", f"{late.p99 * MS:.2f} ms"]


def _dispersion(audit: Audit | None) -> str:
    return "–" if audit is None or not math.isfinite(audit.dispersion) else f"{audit.dispersion:.2f}"


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return "<small>not audited</small>"
    if audit.valid is False:
        return f'<span class="chip off">INVALID</span> {escape(audit.verdict)}'
    kind = "noise" if audit.poisson is None else "agree" if audit.poisson else "off"
    word, _, rest = audit.verdict.partition(": ")
    return f'<span class="chip {kind}">{escape(word)}</span> {escape("; ".join(audit.reasons) or rest)}'


def missing_table(missing: Sequence[MissingCell]) -> str:
    """What was planned and has no result."""
    rows = [(escape(m.policy), load_text(m.load), escape(m.state), escape(m.reason)) for m in missing]
    return simple_table(("policy", "load", "state", "reason"), rows, text=(0, 1, 2, 3))
