"""Observed against predicted, one panel per policy: means over load, with intervals and the band
of the wander.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.live.judgement import Judged, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OBSERVED, PREDICTED, BAND = "#0b5fb0", "#16191d", "#c9ced6"
COLUMNS = 3


def draw(cells: Sequence[Judged], path: Path) -> Path:
    """Pale marks: the machine was not quiet."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    policies = list(dict.fromkeys(cell.result["policy"] for cell in cells))
    rows = -(-len(policies) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(4.2 * COLUMNS, 3.3 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(policies) :]:
        axis.set_visible(False)
    for axis, policy in zip(axes.flat, policies, strict=False):
        _panel(axis, [cell for cell in cells if cell.result["policy"] == policy])
        axis.set_title(policy, fontsize=10)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        loc="outside lower center",
        ncols=3,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _panel(axis: Axes, cells: Sequence[Judged]) -> None:
    for cell in cells:
        live, load = source_of(cell.result), cell.result["load"]
        alpha = 1.0 if cell.quiet else 0.45
        band = cell.result.get("stated_band")
        if band is not None and band["low"] is not None and band["high"] is not None:
            axis.plot(
                [load + 0.008] * 2,
                [band["low"] * 1e3, band["high"] * 1e3],
                color=BAND,
                linewidth=7,
                solid_capstyle="butt",
            )
        half = min(cell.half_width, cell.observed * 0.95) if math.isfinite(cell.half_width) else 0.0
        axis.errorbar(
            load - 0.008,
            cell.observed * 1e3,
            half * 1e3,
            fmt="o",
            color=OBSERVED,
            alpha=alpha,
            capsize=4,
            label="observed, 95 %",
        )
        _predicted(axis, load + 0.008, live["interval"], alpha)
    compared = "sojourn" if cells[0].result["compared"] == "sojourn_time" else "queueing delay"
    loads = sorted({cell.result["load"] for cell in cells})
    axis.set_xticks(loads, [f"{load:g}" for load in loads])
    axis.set_xlim(min(loads) - 0.06, max(loads) + 0.06)
    axis.set_xlabel("load")
    axis.set_ylabel(f"mean {compared} (ms)")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _predicted(axis: Axes, load: float, interval: dict[str, float | None], alpha: float) -> None:
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    if value is None:
        return
    below = 0.0 if low is None else value - low
    above = 0.0 if high is None else high - value
    label = "predicted live, 95 %; grey: band stated before the cell"
    axis.errorbar(
        load,
        value * 1e3,
        [[below * 1e3], [above * 1e3]],
        fmt="D",
        color=PREDICTED,
        alpha=alpha,
        markersize=5,
        capsize=3,
        label=label,
    )
