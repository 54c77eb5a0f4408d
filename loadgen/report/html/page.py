"""The page: sections in the order in which a reader asks, then everything inlined into one file
that asks nothing of a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import msgspec

from loadgen.report.html.data import ReportData, today
from loadgen.report.html.numbers import typeset
from loadgen.report.html.orders import order_table, ordered, orders_figure
from loadgen.report.html.over_load import over_load_figure
from loadgen.report.html.parts import parts_figure
from loadgen.report.html.style import Figure
from loadgen.report.html.tables import full_table, matrix, missing_table, senders
from loadgen.report.html.tails import tails_figure
from loadgen.report.html.text import LIMITS, ORDERS, READING, captions
from loadgen.report.html.versus import versus_figure
from loadgen.report.html.words import accuracy, causes, facts, headline, steady_state, title
from loadgen.report.report import notes
from policies.text import counted

ROOT = resources.files("loadgen.report.html")


def page(data: ReportData) -> str:
    """The whole HTML document."""
    figures = [
        f
        for f in (
            versus_figure(data.cells),
            orders_figure(data.cells),
            over_load_figure(data.cells),
            parts_figure(data.cells),
            tails_figure(data.cells),
        )
        if f
    ]
    parts = {
        "TITLE": escape(f"Kendall: {title(data)}"),
        "CSS": _asset("assets/page.css"),
        "BODY": "\n".join(_sections(data, figures)),
        "FIGURES": _json(figures),
        "PLOTLY": _asset("vendor/plotly-basic.min.js"),
        "JS": _asset("assets/page.js"),
    }
    document = _asset("assets/page.html")
    for name, text in parts.items():
        head, _, tail = document.partition(f"@{name}@")
        document = head + text + tail
    return document


def _sections(data: ReportData, figures: Sequence[Figure]) -> list[str]:
    names = {figure["name"] for figure in figures}
    return [
        _header(data),
        _verdicts(data),
        _orders(data),
        *(
            _figure(name, heading, caption)
            for name, heading, caption in captions(data.cells)
            if name in names
        ),
        _sent(data),
        _numbers(data),
        _missing(data),
        _section("How to read this", f'<div class="prose">{READING}</div>'),
        _section("Method and limits", f'<div class="prose">{LIMITS}</div>'),
        _section("The run", _facts(data)),
        (
            f"<footer>Made by Kendall on {today()} from the run files. This page needs no "
            "network.</footer>"
        ),
    ]


def _header(data: ReportData) -> str:
    date = f" · {data.date[:10]}" if data.date else ""
    tiles = "".join(
        (
            f"<li><b>{escape(value)}</b><span>median |observed / theory − 1| over "
            f"{_cells(count)}<br>{escape(name)}</span></li>"
        )
        for name, value, count in accuracy(data.cells)
    )
    warning = _warning(data)
    return (
        '<header><p class="kicker">Kendall · observed beside '
        f"predicted{escape(date)}</p><h1>{escape(title(data))}</h1><p "
        f'class="headline">{typeset(headline(data.cells))}</p>{_steady_state(data)}{warning}'
        + (f'<ul class="numbers">{tiles}</ul>' if tiles else "")
        + "</header>"
    )


def _steady_state(data: ReportData) -> str:
    """Below the headline where that is the check."""
    said = steady_state(data.cells)
    return "" if said == headline(data.cells) else f"<p>{typeset(said)}</p>"


def _cells(count: int) -> str:
    return counted(count, "cell")


def _warning(data: ReportData) -> str:
    said = []
    if data.missing:
        said.append(
            f"{len(data.missing)} of {len(data.missing) + len(data.cells)} planned cells have no "
            "result: see “What is missing”."
        )
    invalid = sum(cell.invalid for cell in data.cells)
    if invalid:
        said.append(
            f"INVALID: in {invalid} of {counted(len(data.cells), 'cell')} requests reached "
            "the gateway outside the lateness budget. They do not follow the requested "
            "arrivals and are not compared with the steady state; see “Arrivals and sender”."
        )
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in said)


def _verdicts(data: ReportData) -> str:
    if not data.cells:
        return _section(
            "Verdict",
            _empty(
                "No cell has a result yet. kendall sweep --resume FOLDER continues an interrupted "
                "sweep."
            ),
        )
    rows = "".join(
        f"<li><strong>{escape(name)}</strong>: {typeset(why)}</li>"
        for name, why in causes(data.cells)
    )
    lead = (
        "Per policy and load: the mean as observed with its 95 % interval, the model’s mean of the "
        "same requests with their paired difference, and the steady state predicted before the run."
    )
    return _section(
        "Verdict",
        f"<p>{lead}</p>{matrix(data.cells)}"
        + (
            f'<h3>Where the steady state differs, and why</h3><ul class="prose">{rows}</ul>'
            if rows
            else ""
        ),
    )


def _orders(data: ReportData) -> str:
    if not ordered(data.cells):
        return ""
    return _section("Orders of service", f"<p>{ORDERS}</p>{order_table(data.cells)}")


def _figure(name: str, heading: str, caption: str) -> str:
    save = f'<button type="button" class="save screen" data-figure="{name}">Save as SVG</button>'
    plot = (
        '<figure class="scroll"><div class="plot" '
        f'id="figure-{name}"></div></figure>{_without_script()}'
    )
    return f'<section class="figure">{save}<h2>{heading}</h2><p>{caption}</p>{plot}</section>'


def _without_script() -> str:
    return (
        '<noscript><p class="empty">The plot needs JavaScript; its numbers are in the table '
        "below.</p></noscript>"
    )


def _sent(data: ReportData) -> str:
    if not data.cells:
        return ""
    lead = (
        "Arrivals at the gateway, compared with the requested process. Arrivals that do not "
        "follow it cannot test a theory of it."
    )
    if all(cell.lateness is None for cell in data.cells):
        lead += (
            " The load generator’s own files are missing, or name no request of the gateway’s: "
            "its lateness is unknown."
        )
    return _section("Arrivals and sender", f"<p>{lead}</p>{senders(data.cells)}")


def _numbers(data: ReportData) -> str:
    if not data.cells:
        return ""
    lead = (
        "Means and quantiles; under each theory the observation’s deviation from it. Under "
        "quantiles, batch size and the share of time in use: the prediction at the run’s speed."
    )
    said = "".join(
        f'<p class="legend-note">{escape(line)}</p>'
        for line in notes([cell.comparison for cell in data.cells])[2:]
    )
    return _section(
        "All numbers",
        f'<p>{lead} <span class="screen">A heading sorts.</span></p>{full_table(data.cells)}{said}',
    )


def _missing(data: ReportData) -> str:
    lines = "".join(f"<li>{escape(event)}</li>" for event in data.events)
    happened = f'<h3>Events during the sweep</h3><ul class="prose">{lines}</ul>' if lines else ""
    if not data.missing:
        return (
            _section(
                "What is missing",
                _empty("Nothing: every planned cell has a result.") + happened,
            )
            if data.events
            else ""
        )
    return _section("What is missing", missing_table(data.missing) + happened)


def _facts(data: ReportData) -> str:
    pairs = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(data)
    )
    return (
        f'<dl class="facts">{pairs}</dl>'
        if pairs
        else _empty("The headers of the run files do not say.")
    )


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>"


def _empty(text: str) -> str:
    return f'<div class="empty">{escape(text)}</div>'


def _asset(name: str) -> str:
    return ROOT.joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return msgspec.json.encode(value, enc_hook=float).decode().replace("<", "\\u003c")
