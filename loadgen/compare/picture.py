"""Observed beside predicted as a picture: PNG, SVG or PDF by the name of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kendall.loadgen.compare.comparison import Comparison
from kendall.queueing.measurement.check import AGREE
from kendall.queueing.measurement.paths import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OBSERVED, PREDICTED, A_PRIORI = "#0b5fb0", "#16191d", "#8a939e"
FARTHEST = 0.5  # deviation at the end of the axis of differences
UNBOUNDED = 100.0  # half width of an interval that is drawn across the axis
TITLE = "Observed beside predicted"


def draw_picture(comparisons: Sequence[Comparison], path: Path, title: str = TITLE) -> Path:
    """A column per load. Above, on a logarithmic axis: the observed mean, the model's of the same
    requests, and the predictions; below, where there is a model: their paired difference.
    """
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    by_load: dict[float | None, list[Comparison]] = {}
    for comparison in comparisons:
        load = None if comparison.load is None else round(comparison.load, 2)
        by_load.setdefault(load, []).append(comparison)
    loads = sorted(by_load, key=lambda load: load or 0.0)
    paired = any(comparison.check for comparison in comparisons)
    figure, axes = plt.subplots(
        2 if paired else 1,
        len(loads),
        figsize=(4.8 * len(loads), 6.4 if paired else 4.4),
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=[3, 2] if paired else [1],
    )
    for column, load in enumerate(loads):
        upper, group = axes[0][column], by_load[load]
        for index, comparison in enumerate(group):
            (_draw_pair if paired else _draw_marks)(upper, index, comparison)
        _name_policies(upper, group)
        upper.set_yscale("log")
        upper.grid(axis="y", which="major", alpha=0.25)
        upper.set_title("load not known" if load is None else f"load {load:g}", fontsize=11)
        if paired:
            _draw_differences(axes[1][column], group)
    delays = axes[0][0]  # all panels share its vertical axis
    delays.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    delays.yaxis.set_major_formatter("{x:g}")
    delays.yaxis.set_minor_formatter(NullFormatter())
    delays.set_ylabel("mean queueing delay (ms)")
    if paired:
        axes[1][0].set_ylabel("observed / model - 1 (%)")
    marks = {
        label: handle  # each mark once, whichever panel has it
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        marks.values(), marks.keys(), frameon=False, loc="outside lower center", ncols=3, fontsize=9
    )
    figure.suptitle(title, fontsize=12)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _name_policies(axis: Axes, group: Sequence[Comparison]) -> None:
    names = [
        comparison.policy.partition(":")[0]
        + ("\n(sojourn)" if comparison.compared == "sojourn_time" else "")
        for comparison in group
    ]
    axis.set_xticks(range(len(group)), names, fontsize=9)
    axis.set_xlim(-0.5, len(group) - 0.5)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_pair(axis: Axes, index: int, comparison: Comparison) -> None:
    """Observed, and the model's of the same requests, joined; the steady state beside them."""
    quantity, check = comparison.quantity, comparison.check
    if check is not None:
        means = [quantity.observed.mean * 1e3, check.modelled * 1e3]
        axis.plot([index - 0.12, index + 0.12], means, "-", color=A_PRIORI, linewidth=1)
        axis.plot(
            index + 0.12, means[1], "D", color=PREDICTED, markersize=6, label="model, same requests"
        )
    axis.plot(index - 0.12, quantity.observed.mean * 1e3, "o", color=OBSERVED, label="observed")
    if quantity.a_priori is not None:
        axis.plot(
            index + 0.3,
            quantity.a_priori.mean * 1e3,
            "D",
            color=A_PRIORI,
            alpha=0.7,
            mfc="none",
            markersize=5,
            label="steady state, before the run",
        )


def _draw_differences(axis: Axes, group: Sequence[Comparison]) -> None:
    """Differences of the pairs in percent, with 95 % intervals, which the panel may cut."""
    axis.axhspan(-100 * AGREE, 100 * AGREE, color=A_PRIORI, alpha=0.15, linewidth=0)
    axis.axhline(0, color=PREDICTED, linewidth=0.8)
    for index, check in enumerate(comparison.check for comparison in group):
        if check is None:
            continue
        axis.errorbar(
            index,
            100 * (check.ratio - 1),
            100 * min(check.relative_half_width, UNBOUNDED),
            fmt="o",
            color=OBSERVED,
            capsize=4,
            label="difference of the pairs, 95 % interval (band: 10 %)",
        )
    _name_policies(axis, group)
    axis.set_ylim(-100 * FARTHEST, 100 * FARTHEST)
    axis.grid(axis="y", alpha=0.25)


def _draw_marks(axis: Axes, index: int, comparison: Comparison) -> None:
    """The marks of one policy, left to right."""
    quantity = comparison.quantity
    mean, half = quantity.observed.mean * 1e3, quantity.observed.half_width * 1e3
    axis.errorbar(
        index - 0.15,
        mean,
        min(half, mean * 0.95),
        fmt="o",
        color=OBSERVED,
        capsize=4,
        label="observed, 95 % interval",
    )
    if quantity.predicted is not None:
        axis.plot(
            index + 0.05,
            quantity.predicted.mean * 1e3,
            "D",
            color=PREDICTED,
            markersize=5,
            label="predicted at the run's speed",
        )
    if quantity.a_priori is not None:
        axis.plot(
            index + 0.22,
            quantity.a_priori.mean * 1e3,
            "D",
            color=A_PRIORI,
            mfc="none",
            markersize=6,
            label="predicted before the run",
        )
