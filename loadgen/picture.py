"""Observed beside predicted as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OBSERVED, PREDICTED = "#1f4e79", "#e07b39"
FADED = 0.35  # of a cell that is too short to say anything


def draw_picture(comparisons: Sequence[Comparison], path: Path) -> Path:
    """One panel per load: the observed mean with its interval, the predicted one beside it, on a logarithmic axis."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    panels = [(load, list(group)) for load, group in groupby(comparisons, key=lambda comparison: comparison.load)]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 4.4), sharey=True, squeeze=False, layout="constrained")
    for axis, (load, group) in zip(axes[0], panels, strict=True):
        _panel(axis, group)
        axis.set_title(f"load {load}", fontsize=11)
    axis = axes[0][0]
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("mean queueing delay (ms)")
    found = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle("A real engine: observed beside predicted", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _panel(axis: Axes, group: Sequence[Comparison]) -> None:
    for index, comparison in enumerate(group):
        quantity, alpha = comparison.quantity, FADED if comparison.too_short else 1.0
        mean, half = quantity.observed.mean * 1e3, quantity.observed.half_width * 1e3
        label = "observed, 95 % interval (pale: too short)"
        axis.errorbar(index - 0.1, mean, min(half, mean * 0.95), fmt="o", color=OBSERVED, alpha=alpha, capsize=4, label=label)
        if quantity.predicted is not None:
            axis.plot(index + 0.1, quantity.predicted.mean * 1e3, "D", color=PREDICTED, alpha=alpha, label="predicted")
    stars = ["\n(sojourn)" if comparison.compared == "sojourn_time" else "" for comparison in group]
    names = [comparison.policy.partition(":")[0] + star for comparison, star in zip(group, stars, strict=True)]
    axis.set_xticks(range(len(group)), names, fontsize=9)
    axis.set_yscale("log")
    axis.grid(axis="y", which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
