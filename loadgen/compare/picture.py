"""Observed beside predicted as a picture: PNG, SVG or PDF by the name of the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.compare.comparison import Comparison
from queueing.measurement.paths import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OBSERVED, PREDICTED, A_PRIORI = "#0b5fb0", "#16191d", "#8a939e"
FADED = 0.35  # of a cell that is too short to say anything
TITLE = "Observed beside predicted"


def draw_picture(comparisons: Sequence[Comparison], path: Path, title: str = TITLE) -> Path:
    """One panel per load: the observed mean with its interval, the predicted ones beside it, on
    a logarithmic axis.
    """
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    panels = _panels(comparisons)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.8 * len(panels), 4.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    all_pale = all(comparison.too_short for comparison in comparisons)
    for axis, (heading, group) in zip(axes[0], panels, strict=True):
        _panel(axis, group, all_pale=all_pale)
        axis.set_title(heading, fontsize=11)
    _label_delays(axes[0][0])
    _add_legend(figure, axes[0])
    figure.suptitle(title, fontsize=12)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _label_delays(axis: Axes) -> None:
    """Of all panels: they share their vertical axis."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("mean queueing delay (ms)")


def _add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Each mark once, whichever panel has it."""
    marks = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        marks.values(), marks.keys(), frameon=False, loc="outside lower center", ncols=3, fontsize=9
    )


def _panels(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    by_load: dict[float | None, list[Comparison]] = {}
    for comparison in comparisons:
        by_load.setdefault(
            None if comparison.load is None else round(comparison.load, 2), []
        ).append(comparison)
    loads = sorted(by_load, key=lambda load: load or 0.0)
    return [
        ("load not known" if load is None else f"load {load:g}", by_load[load]) for load in loads
    ]


def _panel(axis: Axes, group: Sequence[Comparison], *, all_pale: bool) -> None:
    for index, comparison in enumerate(group):
        # the legend shows full colours
        _draw_marks(axis, index, comparison, named=all_pale or not comparison.too_short)
    names = [
        comparison.policy.partition(":")[0]
        + ("\n(sojourn)" if comparison.compared == "sojourn_time" else "")
        for comparison in group
    ]
    axis.set_xticks(range(len(group)), names, fontsize=9)
    axis.set_xlim(-0.5, len(group) - 0.5)
    axis.set_yscale("log")
    axis.grid(axis="y", which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_marks(axis: Axes, index: int, comparison: Comparison, *, named: bool) -> None:
    """The marks of one policy, left to right; without a name they are not in the legend."""
    quantity, alpha = comparison.quantity, FADED if comparison.too_short else 1.0
    mean, half = quantity.observed.mean * 1e3, quantity.observed.half_width * 1e3
    axis.errorbar(
        index - 0.15,
        mean,
        min(half, mean * 0.95),
        fmt="o",
        color=OBSERVED,
        alpha=alpha,
        capsize=4,
        label="observed, 95 % interval (pale: too short)" if named else None,
    )
    if quantity.predicted is not None:
        axis.plot(
            index + 0.05,
            quantity.predicted.mean * 1e3,
            "D",
            color=PREDICTED,
            alpha=alpha,
            markersize=5,
            label="predicted at the run's speed" if named else None,
        )
    if quantity.a_priori is not None:
        axis.plot(
            index + 0.22,
            quantity.a_priori.mean * 1e3,
            "D",
            color=A_PRIORI,
            alpha=alpha,
            mfc="none",
            markersize=6,
            label="predicted before the run" if named else None,
        )
