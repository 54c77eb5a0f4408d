"""Options of `kendall plan` as a picture: what they cost, and the duration that the first SLO
bounds. Beside them the bill: what each rule attained, and what it cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kendall.queueing.choosing.plan import CapacityPlan
from kendall.queueing.measurement.paths import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kendall.queueing.choosing.slo_bill import SloBill

COLOURS = ("#0b5fb0", "#c2571a", "#3c7d3a", "#7a4da3", "#8a939e")
BOUND = "#16191d"


def draw_plan(found: CapacityPlan, path: Path, bill: SloBill | None = None) -> Path:
    """One mark for each option, labelled with its servers and slots; the frontier as a line. With a
    bill one for each of its rules beside them.
    """
    import matplotlib as mpl  # noqa: PLC0415 - half a second, and only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    slo = found.goal.slo
    assert slo is not None
    panels = 1 if bill is None else 2
    figure, axes = plt.subplots(
        1, panels, figsize=(7.2 * panels, 4.6), layout="constrained", squeeze=False
    )
    axis = axes[0, 0]
    if bill is not None:
        draw_bill(axes[0, 1], bill)
    limited = _marks(axis, found, slo.name)
    axis.axhline(slo.seconds, color=BOUND, linestyle=":", linewidth=1, label=str(slo))
    axis.set_xlabel("cost of the fewest servers that keep the SLOs")
    axis.set_ylabel(f"{slo.name.replace('_', ' ')} (s)")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, 1.12 * axis.get_xlim()[1])  # labels stand to the right of their marks
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(f"servers x slots{' / token limit' if limited else ''}", fontsize=11)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def draw_bill(axis: Axes, bill: SloBill) -> None:
    """One mark for each rule, by its cost and the share of the requests within the bounds."""
    for number, line in enumerate(bill.lines):
        cost, attained = 100 * line.cost, 100 * line.attained
        kept = "o" if line.kept else "x"
        axis.plot(cost, attained, kept, color=COLOURS[number % len(COLOURS)], label=line.rule)
    axis.set_xlabel("server-seconds, % of the peak pool's")
    axis.set_ylabel("requests within the SLO (%)")
    axis.set_xlim(left=0)
    axis.set_ylim(0, 104)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(f"{bill.slo}, start-up {bill.terms.start_up:g} s", fontsize=11)


def _marks(axis: Axes, found: CapacityPlan, name: str) -> bool:
    """Whether any has a token limit."""
    possible = [each for each in found.options if each["servers"] is not None]
    for number, kind in enumerate(dict.fromkeys(each["latency"] for each in found.options)):
        own = [each for each in possible if each["latency"] == kind]
        costs, values = [each["cost"] for each in own], [each[name] for each in own]
        axis.plot(costs, values, "o", color=COLOURS[number % len(COLOURS)], label=kind)
    edge = sorted((each["cost"], each[name]) for each in possible if each["frontier"])
    if edge:
        axis.step(
            *zip(*edge, strict=True), where="post", color=BOUND, linewidth=0.8, label="frontier"
        )
    for each in possible:
        limit = "" if each["max_output_tokens"] is None else f" / {each['max_output_tokens']}"
        axis.annotate(
            f"{each['servers']} x {each['max_num_seqs']}{limit}",
            (each["cost"], each[name]),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize=8,
            fontweight="bold" if each is found.best else "normal",
        )
    return any(each["max_output_tokens"] is not None for each in possible)
