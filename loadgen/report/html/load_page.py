"""A plain load run as one HTML file that needs no network, and its table of durations as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.measures.metrics import METRICS, WORDS, began_at, percentile_name
from kendall.loadgen.report.html.data import today
from kendall.loadgen.report.html.page import asset, template
from kendall.loadgen.report.html.style import Figure, axis, axis_title, figure
from kendall.loadgen.report.load_verdict import LoadVerdict
from kendall.loadgen.report.numbers import MS
from kendall.loadgen.report.summary import LoadSummary
from kendall.loadgen.report.summary_text import (
    load_heads,
    load_notes,
    load_table,
    status_table,
)
from kendall.loadgen.sending.run import LoadResult
from kendall.queueing.commands.terminal import Table
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.record import Header

OVER_TIME = (("e2el", "$observed"), ("ttft", "$arrivals"))
MOST_POINTS = 5_000  # of a figure; of longer runs every k-th request is drawn
FACTS = (
    "base_url",
    "model",
    "arrivals",
    "request_rate",
    "trace",
    "output_tokens",
    "prompt_tokens",
    "lengths",
    "num_prompts",
    "max_concurrency",
    "predictor",
)


@dataclass(frozen=True, slots=True)
class LoadPage:
    """What the page shows of a run."""

    result: LoadResult
    summary: LoadSummary
    verdict: LoadVerdict
    broken: Sequence[str] = ()

    def html(self) -> str:
        """The whole document."""
        drawn = [one for one in (self._over_time(), self._histogram()) if one is not None]
        summary, header = self.summary, self.result.header
        tables = (load_table(summary), status_table(summary))
        return template("assets/load.html").render(
            title=_title(header),
            invalid=[*self.verdict.why_invalid(), *(f"broken: {one}" for one in self.broken)],
            lines=list(load_heads(summary)),
            captions=[(name, heading, caption) for name, heading, caption, _ in drawn],
            tables=[_table(table) for table in tables if table is not None],
            notes=load_notes(summary),
            facts=_facts(header),
            today=today(),
            css=asset("assets/page.css"),
            plotly=asset("vendor/plotly-basic.min.js"),
            script=asset("assets/page.js"),
            figures=msgspec.json.encode([one for *_, one in drawn], enc_hook=float)
            .decode()
            .replace("<", "\\u003c"),
        )

    def _over_time(self) -> tuple[str, str, str, Figure] | None:
        records = [r for r in self.result.records if r.outcome == "completed"]
        records = records[:: max(1, math.ceil(len(records) / MOST_POINTS))]
        first = min((at for record in records if (at := began_at(record)) is not None), default=0.0)
        traces = []
        for name, colour in OVER_TIME:
            points = [
                (began - first, value * MS)
                for record in records
                if (began := began_at(record)) is not None
                and (value := METRICS[name].of(record)) is not None
            ]
            if points:
                x, y = zip(*points, strict=True)
                marker = {"color": colour, "size": 4, "opacity": 0.6}
                traces.append(
                    {"type": "scatter", "mode": "markers", "name": WORDS[name], "x": x, "y": y}
                    | {"marker": marker}
                )
        if not traces:
            return None
        layout = {
            "xaxis": axis(title=axis_title("due, s after the first")),
            "yaxis": axis(title=axis_title("ms"), rangemode="tozero"),
        }
        drawn = figure("over-time", traces, layout, height=360, min_width=560)
        caption = "Each completed request at the instant at which it was due."
        return "over-time", "Durations over the run", caption, drawn

    def _histogram(self) -> tuple[str, str, str, Figure] | None:
        duration = self.summary.durations.get("e2el")
        if duration is None or not duration.histogram:
            return None
        bins = duration.histogram
        trace = {
            "type": "bar",
            "name": WORDS["e2el"],
            "x": [(one.low + one.high) / 2 * MS for one in bins],
            "width": [(one.high - one.low) * MS for one in bins],
            "y": [one.count for one in bins],
            "marker": {"color": "$observed"},
        }
        layout = {
            "bargap": 0.04,
            "xaxis": axis(title=axis_title("end to end (ms)"), rangemode="tozero"),
            "yaxis": axis(title=axis_title("requests")),
            "showlegend": False,
        }
        drawn = figure("histogram", [trace], layout, height=300, min_width=480)
        return "histogram", "Times end to end", "Of completed requests after the warm-up.", drawn


def write_load_page(page: LoadPage, path: Path) -> Path:
    """Raises CommandError."""
    text = page.html()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def write_load_csv(summary: LoadSummary, path: Path) -> Path:
    """A row per duration, in milliseconds as the columns' names say. Raises CommandError."""
    levels = [percentile_name(percentile) for percentile in summary.percentiles]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("mean", "half_width", "std", *levels, "max")
    writer.writerow(["duration", *(f"{name}_ms" for name in names), "n", "too_short"])
    for name, one in summary.durations.items():
        values = (one.mean, one.half_width, one.std, *(one.quantiles[x] for x in levels), one.max)
        shown = (value * MS if math.isfinite(value) else None for value in values)
        writer.writerow([name, *shown, one.n, one.too_short])
    if (queue := summary.server_queue) is not None and queue.mean is not None:
        nothing = [None] * (len(names) - 1)
        writer.writerow(["queueing_delay", queue.mean * MS, *nothing, queue.requests, None])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.getvalue(), encoding="utf-8")
    return path


def _title(header: Header) -> str:
    configured = header.configuration
    model, url = configured.get("model"), configured.get("base_url")
    return " at ".join(str(part) for part in (model or "load run", url) if part)


def _facts(header: Header) -> list[tuple[str, str]]:
    configured: dict[str, Any] = header.configuration
    pairs = [(name.replace("_", " "), configured.get(name)) for name in FACTS]
    pairs += [("seed", header.seed), ("sender's machine", header.hardware.get("cpu"))]
    pairs.append(("versions", ", ".join(f"{k} {v}" for k, v in header.versions.items())))
    return [(name, str(value)) for name, value in pairs if value not in (None, "")]


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{" class=text" if column.left else ""}>{escape(column.heading)}</th>'
        for column in table.columns
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if column.left else ''}>{escape(cell)}</td>"
            for column, cell in zip(table.columns, row, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )
