"""The tables of a report as HTML: verdicts by policy and load, every number, the senders, what
is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from kendall.loadgen.compare.cells import MissingCell, ReportCell
from kendall.loadgen.report.columns import ON_PAGE
from kendall.loadgen.report.numbers import (
    MS,
    NO_NUMBER,
    chip_class,
    label,
    load_text,
    mean_and_half,
    ms,
    number,
    percent,
    typeset,
    with_small,
)
from kendall.queueing.measurement.arrival_audit import Audit

TEXT = {"policy", "verdict"}  # columns that are no numbers
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
    """Policies by loads, each with its verdict and means. A field names its load itself: a narrow
    page has no column headings.
    """
    places = {
        (label(cell), None if cell.load is None else round(cell.load, 2)): cell for cell in cells
    }
    names = dict.fromkeys(name for name, _ in places)
    loads = dict.fromkeys(load for _, load in places)
    head = "".join(f'<th scope="col">{escape(load_text(load))}</th>' for load in loads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(
            f'<td data-load="{escape(load_text(load))}"><div>{means(places.get((name, load)))}'
            "</div></td>"
            for load in loads
        )
        + "</tr>"
        for name in names
    )
    style = f"min-width:{13 + 11 * len(loads)}em"
    table = (
        '<table class="matrix" '
        f'style="{style}"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<div class="scroll">{table}</div>'


def means(cell: ReportCell | None) -> str:
    """The verdict of a cell, the observed mean, and below it those of the model and of the theory;
    a line breaks between its parts only.
    """
    if cell is None:
        return "<small>not measured</small>"
    quantity, check = cell.comparison.quantity, cell.comparison.check
    mean, half = mean_and_half(quantity.observed.mean, quantity.observed.half_width)
    text = f'<span class="whole"><span class="observed">{mean}</span> ± {half} ms</span>'
    lines = []
    if check is not None:
        off = f"{percent(check.ratio - 1)} ± {check.relative_half_width * 100:.1f}"
        lines.append((f"model {ms(check.modelled)} ms", f"({off}\N{NO-BREAK SPACE}%)"))
    if (theory := quantity.a_priori) is not None:
        lines.append((f"steady state {ms(theory.mean)} ms", f"({percent(theory.deviation)})"))
    for parts in lines:
        whole = " ".join(f'<span class="whole">{part}</span>' for part in parts)
        text = with_small(text, whole)
    return f'{chip(cell)}<span class="means">{text}</span>'


def full_table(cells: Sequence[ReportCell]) -> str:
    """Every number; sortable by its headings."""
    kinds = ["" if column.key not in TEXT else ' class="text"' for column in ON_PAGE]
    head = "".join(
        f'<th scope="col"{kind}>{column.title}'
        f"{f'<small>{column.unit}</small>' if column.unit else ''}</th>"
        for column, kind in zip(ON_PAGE, kinds, strict=True)
    )
    body = []
    for cell in cells:
        body.append("<tr>")
        for column, kind in zip(ON_PAGE, kinds, strict=True):
            value = None if column.value is None else column.value(cell)
            sort = ""
            if isinstance(value, int | float) and math.isfinite(value):
                sort = f' data-value="{round(value, 9) + 0.0:.9g}"'
            body.append(f"<td{kind}{sort}>{column.page(cell)}</td>")
        body.append("</tr>")
    return (
        '<div class="scroll"><table class="sortable numbers-table"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def simple_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)
) -> str:
    """Rows of ready HTML; `text` are the columns that are not numbers."""
    kinds = [
        "" if i not in text else ' class="text long"' if i else ' class="text"'
        for i in range(len(headings))
    ]
    head = "".join(
        f'<th scope="col"{" class=text" if i in text else ""}>{heading}</th>'
        for i, heading in enumerate(headings)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{value}</td>" for kind, value in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def senders(cells: Sequence[ReportCell]) -> str:
    """Arrivals and lateness, a row per cell; columns of which nothing is known are left out."""
    timed = any(cell.lateness is not None for cell in cells)
    audited = any(cell.audit is not None for cell in cells)
    headings = ["cell", "asked", "arrived", "against<br>asked"]
    headings += ["lateness,<br>mean", "<br>p99"] if timed else []
    headings += ["dispersion", "audit of the arrivals"] if audited else []
    rows = []
    for cell in cells:
        asked, rate = cell.comparison.asked_rate, cell.comparison.arrival_rate
        row = [
            f"{escape(label(cell))} · {load_text(cell.load)}",
            NO_NUMBER if asked is None else f"{asked:.2f}/s",
            f"{rate:.2f}/s",
            percent(None if asked is None else rate / asked - 1),
        ]
        if timed:
            late = cell.lateness
            times = (None, None) if late is None else (late.mean, late.p99)
            row += [NO_NUMBER if time is None else f"{time * MS:.2f} ms" for time in times]
        if audited:
            dispersion = None if cell.audit is None else cell.audit.dispersion
            row += [number(dispersion, ".2f", NO_NUMBER), _audit(cell.audit)]
        rows.append(row)
    return simple_table(headings, rows, text=(0, len(headings) - 1) if audited else (0,))


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return "<small>not audited</small>"
    late = audit.lateness
    if audit.valid is False and late is not None:
        budget = f"budget {late.budget.mean * MS:g} and {late.budget.p99 * MS:g} ms"
        text = (
            f"reached the gateway {ms(late.mean)} ms late on average, p99 {ms(late.p99)} ms "
            f"({budget}); {audit.verdict}"
        )
        return f'<span class="chip off">INVALID</span> {escape(text)}'
    kind = "noise" if audit.poisson is None else "agree" if audit.poisson else "off"
    word, _, rest = audit.verdict.partition(": ")
    return (
        f'<span class="chip {kind}">{escape(word)}</span> '
        f"{escape('; '.join(audit.reasons) or rest)}"
    )


def missing_table(missing: Sequence[MissingCell]) -> str:
    """List the cells that were planned and have no result."""
    rows = [
        (escape(m.policy), load_text(m.load), escape(m.state), escape(m.reason)) for m in missing
    ]
    return simple_table(("policy", "load", "state", "reason"), rows, text=(0, 1, 2, 3))
