"""The tables of a report as HTML: verdicts by policy and load, every number, the senders, what
is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from loadgen.compare.cells import MissingCell, ReportCell
from loadgen.report.html.columns import SHOWN, Column
from loadgen.report.html.numbers import MS, label, load_text, mean_and_half, ms, percent, typeset
from loadgen.report.html.words import chip_class
from queueing.measurement.arrival_audit import Audit

# verdict of the check -> class of the chip, and its text
CHECKED = {
    "agree": ("agree", "agree"),
    "disagree": ("off", "disagree"),
    "too_few": ("short", "too few requests"),
}


def chip(cell: ReportCell) -> str:
    """The verdict of the check; where there is none, that of the prediction before the run, which
    a run that is INVALID has not.
    """
    check = cell.comparison.check
    if check is not None and not cell.comparison.of_others:
        kind, text = CHECKED[check.verdict]
        return f'<span class="chip {kind}">{text}</span>'
    if cell.invalid:
        return '<span class="chip off">INVALID</span>'
    verdict = cell.verdict
    return f'<span class="chip {chip_class(verdict.kind)}">{typeset(verdict.text)}</span>'


def matrix(cells: Sequence[ReportCell]) -> str:
    """Policies by loads, each with its verdict and means."""
    loads = list(
        dict.fromkeys(None if cell.load is None else round(cell.load, 2) for cell in cells)
    )
    names = list(dict.fromkeys(label(cell) for cell in cells))
    found = {
        (label(cell), None if cell.load is None else round(cell.load, 2)): cell for cell in cells
    }
    head = "".join(f'<th scope="col">{escape(load_text(load))}</th>' for load in loads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(_matrix_cell(load, found.get((name, load))) for load in loads)
        + "</tr>"
        for name in names
    )
    style = f"min-width:{13 + 11 * len(loads)}em"
    table = (
        '<table class="matrix" '
        f'style="{style}"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<div class="scroll">{table}</div>'


def _matrix_cell(load: float | None, cell: ReportCell | None) -> str:
    """Names its load itself: a narrow page has no column headings."""
    return f'<td data-load="{escape(load_text(load))}"><div>{_in_matrix(cell)}</div></td>'


def _in_matrix(cell: ReportCell | None) -> str:
    if cell is None:
        return "<small>not measured</small>"
    quantity, check = cell.comparison.quantity, cell.comparison.check
    mean, half = mean_and_half(quantity.observed.mean, quantity.observed.half_width)
    means = f'<span class="whole"><span class="observed">{mean}</span> ± {half} ms</span>'
    if check is not None:
        half = f"{check.relative_half_width * 100:.1f}"
        means += _line(
            f"model {ms(check.modelled)} ms",
            f"({percent(check.ratio - 1)} ± {half}\N{NO-BREAK SPACE}%)",
        )
    if quantity.a_priori is not None:
        means += _line(
            f"steady state {ms(quantity.a_priori.mean)} ms",
            f"({percent(quantity.a_priori.deviation)})",
        )
    return f'{chip(cell)}<span class="means">{means}</span>'


def _line(*parts: str) -> str:
    """Below the observed mean, broken between its parts only."""
    said = " ".join(f'<span class="whole">{part}</span>' for part in parts)
    return f"<br><small>{said}</small>"


TEXT = {"policy", "verdict"}


def full_table(cells: Sequence[ReportCell]) -> str:
    """Every number; sortable by its headings."""
    head = "".join(
        f'<th scope="col"{_kind(c.key)}>{c.heading}'
        f"{f'<small>{c.unit}</small>' if c.unit else ''}</th>"
        for c in SHOWN
    )
    body = "".join(
        "<tr>" + "".join(_data(cell, column) for column in SHOWN) + "</tr>" for cell in cells
    )
    return (
        '<div class="scroll"><table class="sortable '
        f'numbers-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _data(cell: ReportCell, column: Column) -> str:
    value = column.value(cell)
    sort = (
        f' data-value="{round(value, 9) + 0.0:.9g}"'
        if isinstance(value, int | float) and math.isfinite(value)
        else ""
    )
    shown = column.shown(cell) if column.shown else ""
    return f"<td{_kind(column.key)}{sort}>{shown}</td>"


def _kind(key: str) -> str:
    return ' class="text"' if key in TEXT else ""


def simple_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)
) -> str:
    """Rows of ready HTML; `text` are the columns that are not numbers."""
    head = "".join(
        f'<th scope="col"{" class=text" if i in text else ""}>{h}</th>'
        for i, h in enumerate(headings)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{_long(i, text)}>{v}</td>" for i, v in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


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
        rows = [
            [*row, _dispersion(cell.audit), _audit(cell.audit)]
            for row, cell in zip(rows, cells, strict=True)
        ]
    return simple_table(headings, rows, text=text)


def _arrived(cell: ReportCell) -> list[str]:
    asked, rate = cell.comparison.asked_rate, cell.comparison.arrival_rate
    name = f"{escape(label(cell))} · {load_text(cell.load)}"
    return [
        name,
        "–" if asked is None else f"{asked:.2f}/s",
        f"{rate:.2f}/s",
        percent(None if asked is None else rate / asked - 1),
    ]


def _late(cell: ReportCell) -> list[str]:
    late = cell.lateness
    return ["–", "–"] if late is None else [f"{late.mean * MS:.2f} ms", f"{late.p99 * MS:.2f} ms"]


def _dispersion(audit: Audit | None) -> str:
    return (
        "–" if audit is None or not math.isfinite(audit.dispersion) else f"{audit.dispersion:.2f}"
    )


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return "<small>not audited</small>"
    late = audit.lateness
    if audit.valid is False and late is not None:
        budget = f"budget {late.budget.mean * MS:g} and {late.budget.p99 * MS:g} ms"
        said = (
            f"reached the gateway {ms(late.mean)} ms late on average, p99 {ms(late.p99)} ms "
            f"({budget}); {audit.verdict}"
        )
        return f'<span class="chip off">INVALID</span> {escape(said)}'
    kind = "noise" if audit.poisson is None else "agree" if audit.poisson else "off"
    word, _, rest = audit.verdict.partition(": ")
    return (
        f'<span class="chip {kind}">{escape(word)}</span> '
        f"{escape('; '.join(audit.reasons) or rest)}"
    )


def missing_table(missing: Sequence[MissingCell]) -> str:
    """What was planned and has no result."""
    rows = [
        (escape(m.policy), load_text(m.load), escape(m.state), escape(m.reason)) for m in missing
    ]
    return simple_table(("policy", "load", "state", "reason"), rows, text=(0, 1, 2, 3))
