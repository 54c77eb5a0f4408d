"""Every figure in one style: lines are computed, dashes are approximations, dots are printed
formulas, points are simulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kendall.queueing.measurement.paths import writing
from papers.reproduction.artefact import Artefact, Curve, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f4e79", "#d1762c", "#3c8d5a", "#8e4b9e", "#b03a48", "#5f6b76")
LINES = {
    "exact": "-",
    "approximation": "--",
    "printed": ":",
    "simulated": "none",
    "measured": "none",
}
WIDTH, HEIGHT, DPI, COLOUR_COUNT = 4.9, 3.9, 100, 64


def draw_artefact(artefact: Artefact, path: Path) -> Path:
    """One PNG with all panels, at most two beside one another."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    count = len(artefact.panels)
    columns = min(count, 2)
    rows = -(-count // columns)
    size = (WIDTH * columns, HEIGHT * rows + 0.3)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", dpi=DPI
    )
    for axis, panel in zip(grid.flat, artefact.panels, strict=False):
        _draw_panel(axis, panel)
    for axis in list(grid.flat)[count:]:
        axis.set_visible(False)
    figure.suptitle(artefact.title, fontsize=11)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    plt.close(figure)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).quantize(COLOUR_COUNT).save(
            path, optimize=True
        )  # a third of the size of true colours
    return path


def _draw_panel(axis: Axes, panel: Panel) -> None:
    lines = [item.label for item in panel.curves if item.kind != "simulated"]
    series = _series_of_their_own(panel, lines)
    shades = dict(zip([*lines, *series], COLOURS * 3, strict=False))
    for item in panel.curves:
        _draw_curve(axis, item, shades.get(item.label, "#222222"), joined=item.label in series)
    for place, label in panel.marks:
        axis.axvline(place, color="#999999", linewidth=0.8, zorder=0)
        axis.annotate(
            label,
            (place, 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=7.5,
            color="#666666",
        )
    for letter in panel.logarithmic:
        _make_logarithmic(axis, letter)
    if panel.top is not None:
        axis.set_ylim(top=panel.top)
    axis.set_title(panel.title, fontsize=9.5)
    axis.set_xlabel(panel.x_label, fontsize=9)
    axis.set_ylabel(panel.y_label, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none")


def _series_of_their_own(panel: Panel, lines: list[str]) -> list[str]:
    """Simulated series that belong to no line, where they are several: joined, in colours."""
    alone = [
        item.label
        for item in panel.curves
        if item.kind == "simulated" and not any(_belongs(item.label, line) for line in lines)
    ]
    return alone if len(alone) > 1 else []


def _make_logarithmic(axis: Axes, letter: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    axis.set(**{f"{letter}scale": "log"})
    scale = axis.xaxis if letter == "x" else axis.yaxis
    low, high = axis.get_xlim() if letter == "x" else axis.get_ylim()
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    scale.set_major_formatter("{x:g}")
    scale.set_minor_formatter(NullFormatter())


def _draw_curve(axis: Axes, item: Curve, colour: str, *, joined: bool) -> None:
    y = [float("nan") if value is None else value for value in item.y]
    if item.kind == "simulated":
        bars = [2 * error for error in item.error] or None
        theirs = (
            line.get_color()
            for line in axis.get_lines()
            if not joined and _belongs(item.label, str(line.get_label()))
        )
        axis.errorbar(
            item.x,
            y,
            bars,
            fmt="o-" if joined else "o",
            markersize=4,
            linewidth=0.9,
            color=next(theirs, colour),
            markerfacecolor="white",
            capsize=2,
            label=item.label,
            zorder=4,
        )
        return
    marker = "D" if item.kind == "measured" else None
    axis.plot(
        item.x,
        y,
        LINES[item.kind],
        marker=marker,
        markersize=5,
        color=colour,
        linewidth=2.0 if item.kind == "exact" else 1.5,
        label=item.label,
    )


def _belongs(label: str, other: str) -> bool:
    """Points take the colour of the first line whose label begins like theirs."""
    return label.partition(",")[0].partition(":")[0] == other.partition(",")[0] or label.startswith(
        other
    )
