"""Observed beside predicted as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from loadgen.compare import Comparison

OBSERVED, PREDICTED = "#1f4e79", "#e07b39"


def draw_picture(comparisons: Sequence[Comparison], path: Path) -> Path:
    """One panel per load: the observed mean with its interval, the predicted one beside it, on a logarithmic axis."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    panels = [(load, list(group)) for load, group in groupby(comparisons, key=lambda comparison: comparison.load)]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained")
    for axis, (load, group) in zip(axes[0], panels, strict=True):
        for index, comparison in enumerate(group):
            quantity = comparison.quantity
            mean, half = quantity.observed.mean * 1e3, quantity.observed.half_width * 1e3
            axis.errorbar(index - 0.1, mean, min(half, mean * 0.999), fmt="o", color=OBSERVED, capsize=4, label="observed, 95 % interval")
            if quantity.predicted is not None:
                axis.plot(index + 0.1, quantity.predicted.mean * 1e3, "D", color=PREDICTED, label="predicted")
        stars = ["*" if comparison.compared == "sojourn_time" else "" for comparison in group]
        names = [c.policy.partition(":")[0] + star for c, star in zip(group, stars, strict=True)]
        axis.set_xticks(range(len(group)), names, rotation=30, ha="right")
        axis.set_title(f"load {load}", fontsize=11)
        axis.set_yscale("log")
        axis.grid(axis="y", which="both", alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("mean queueing delay (ms)   * sojourn time")
    handles, labels = axes[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[0][0].legend(unique.values(), unique.keys(), frameon=False, loc="upper left")
    figure.suptitle("Queueing delay on a real engine: observed beside predicted", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
