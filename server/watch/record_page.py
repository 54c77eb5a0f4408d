"""The track record as one HTML page that asks nothing of a network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

import jinja2

from kendall.policies.durations import rounded_duration
from kendall.queueing.estimation.counters.track_record import RecordRow, TrackRecord
from kendall.queueing.estimation.histogram import round_up
from kendall.server.watch.record_text import (
    COLUMNS,
    basis,
    headline,
    instant,
    mark,
    missed,
    seconds,
)

WIDTH, HEIGHT, LEFT, BELOW = 960, 260, 64, 28  # of a picture, pixels
TICKS, ROOM = 4, 1.3
REFRESH = 15  # seconds, of a record that goes on


class Figure(NamedTuple):
    """What a picture shows of each row: observed, predicted and the interval, seconds."""

    title: str
    name: str  # of the quantity


FIGURES = (
    Figure("Queueing delay", "queueing_delay"),
    Figure("Sojourn time", "sojourn_time"),
)


def page(
    records: Sequence[TrackRecord],
    source: str,
    given_slots: int | None,
    *,
    growing: float | None = None,
) -> str:
    """The whole document; `growing`: seconds of a row of a record that goes on."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("kendall.server.watch").joinpath("record_page.html")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        records=records,
        columns=COLUMNS,
        source=source,
        every=None if growing is None else rounded_duration(growing),
        refresh=REFRESH,
        headline=headline,
        missed=missed,
        basis=lambda record: basis(record, given_slots),
        figures=FIGURES,
        picture=picture,
        mark=mark,
    )


def picture(rows: Sequence[RecordRow], name: str) -> str:
    """An SVG: a bar for each interval, a line for each prediction, a dot for each observation."""
    shown = [_numbers(row, name) for row in rows]
    # an interval may reach far beyond all that happens: it is cut
    top = ROOM * max((v for each in shown for v in each[:2] if math.isfinite(v)), default=0.0)
    if not top > 0:
        return ""
    step = round_up(top / TICKS)
    top = step * math.ceil(top / step)
    width = (WIDTH - LEFT) / len(rows)

    def y(value: float) -> float:
        return round((HEIGHT - BELOW) * (1 - min(value, top) / top) + 8, 1)

    parts = [*_grid(step, top, y)]
    for index, (row, (observed, value, low, high)) in enumerate(zip(rows, shown, strict=True)):
        x, wide = round(LEFT + width * (index + 0.5), 1), round(max(1.0, 0.6 * width), 1)
        about = escape(
            f"{instant(row.start)}: observed {seconds(observed)}, predicted {seconds(value)}"
        )
        parts.append(f"<g><title>{about}</title>")
        if math.isfinite(high):
            parts.append(
                f'<rect class="interval" x="{x - wide / 2:.1f}" y="{y(high)}" width="{wide}" '
                f'height="{max(0.5, y(max(low, 0.0)) - y(high)):.1f}"/>'
            )
        if math.isfinite(value):
            parts.append(f'<path class="predicted" d="M{x - wide / 2:.1f} {y(value)}h{wide}"/>')
        if math.isfinite(observed):
            outside = math.isfinite(high) and not low <= observed <= high
            kind = "observed outside" if outside else "observed"
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{y(observed)}" r="3.2"/>')
        parts.append("</g>")
    parts += _times(rows, width)
    box = f"0 0 {WIDTH} {HEIGHT + 8}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'


def _numbers(row: RecordRow, name: str) -> tuple[float, float, float, float]:
    """Observed, predicted, and the ends of the interval."""
    observed: float = getattr(row.observed, name)
    if row.forecast is None:
        return observed, math.nan, math.nan, math.nan
    found = getattr(row.forecast, name)
    known = found.known
    return (
        observed,
        found.value,
        found.low if known else math.nan,
        found.high if known else math.nan,
    )


def _grid(step: float, top: float, y: object) -> Iterator[str]:
    assert callable(y)
    for index in range(round(top / step) + 1):
        at = y(index * step)
        yield f'<path class="grid" d="M{LEFT} {at}H{WIDTH}"/>'
        text = seconds(index * step) if index else "0"
        yield f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{text}</text>'


def _times(rows: Sequence[RecordRow], width: float) -> Iterator[str]:
    every = math.ceil(len(rows) / 8)
    for index in range(0, len(rows), every):
        x = LEFT + width * (index + 0.5)
        at = instant(rows[index].start)
        yield f'<text x="{x:.1f}" y="{HEIGHT + 4}" text-anchor="middle">{at}</text>'
