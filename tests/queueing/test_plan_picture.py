"""What stands in the picture of a plan: a mark for each option and each rule, where it is and what
it is called.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.plan import CapacityPlan
from kendall.queueing.choosing.slo_bill import BillLine, SloBill, Terms
from kendall.queueing.commands.plan_picture import BOUND, COLOURS, draw_bill, draw_plan


def option(
    latency: str, slots: int, servers: int | None, cost: float, delay: float, **more: Any
) -> dict[str, Any]:
    plain = {"max_output_tokens": None, "frontier": False}
    found = {"latency": latency, "max_num_seqs": slots, "servers": servers}
    return plain | found | {"cost": cost, "queueing_delay": delay} | more


OPTIONS = [
    option("slow", 16, 3, 3.0, 0.2, frontier=True),
    option("slow", 32, 2, 2.0, 0.4, frontier=True, max_output_tokens=100),
    option("fast", 16, 1, 4.0, 0.3),
    option("fast", 32, None, 9.0, 9.0, frontier=True),
]
GOAL = Objective(name="slo", **parse_slos("mean_queueing_delay<=500ms,p99_sojourn_time<=3s"))
PLAN = CapacityPlan(goal=GOAL, options=OPTIONS, best=OPTIONS[1])
BILL = SloBill(
    slo="p99_queueing_delay=2",
    requests=9,
    terms=Terms(start_up=40.0),
    lines=[
        BillLine(
            rule=f"rule {number}",
            attained=0.9 + number / 100,
            kept=number % 2 == 0,
            replica_seconds=5.0,
            cost=1 - number / 10,
            fewest=1,
            mean=1.5,
            most=2,
        )
        for number in range(len(COLOURS) + 1)
    ],
)


def marks(axis: Axes) -> list[tuple[Any, ...]]:
    """Label, points, marker or line with its width, colour."""
    return [
        (
            line.get_label(),
            [tuple(point) for point in line.get_xydata().round(9).tolist()],
            line.get_marker()
            if line.get_linestyle() == "None"
            else f"{line.get_linestyle()} {line.get_linewidth():g}",
            to_hex(line.get_color()),
        )
        for line in axis.get_lines()
    ]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws a plan; its axes, which are closed behind the test."""
    closed: list[Any] = []
    close = plt.close
    monkeypatch.setattr(plt, "close", closed.append)

    def draw(*plan: Any) -> list[Axes]:
        draw_plan(*plan)
        (figure,) = closed
        return list(figure.axes)

    yield draw
    for figure in closed:
        close(figure)
    assert plt.get_fignums() == []


def test_each_kind_has_its_marks_the_frontier_is_a_line_and_the_bill_stands_beside(
    drawn: Any, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "folder" / "plan.svg"
    axis, beside = drawn(PLAN, path, BILL)
    assert beside.get_title() == "p99_queueing_delay=2, start-up 40 s"
    assert marks(axis) == [
        ("slow", [(3.0, 0.2), (2.0, 0.4)], "o", COLOURS[0]),
        ("fast", [(4.0, 0.3)], "o", COLOURS[1]),
        ("frontier", [(2.0, 0.4), (3.0, 0.2)], "- 0.8", BOUND),
        ("mean_queueing_delay=0.5", [(0.0, 0.5), (1.0, 0.5)], ": 1", BOUND),
    ]
    assert [(each.get_text(), each.xy, each.get_fontweight()) for each in axis.texts] == [
        ("3 x 16", (3.0, 0.2), "normal"),
        ("2 x 32 / 100", (2.0, 0.4), "bold"),
        ("1 x 16", (4.0, 0.3), "normal"),
    ]
    assert {(each.xyann, each.get_fontsize()) for each in axis.texts} == {((6, 4), 8.0)}
    assert axis.title.get_fontsize() == 11
    legend = axis.get_legend()
    assert (legend.get_frame_on(), legend.get_texts()[0].get_fontsize()) == (False, 9)
    assert axis.get_xlabel() == "cost of the fewest servers that keep the SLOs"
    assert (axis.get_ylabel(), axis.get_title()) == (
        "queueing delay (s)",
        "servers x slots / token limit",
    )
    assert axis.get_ylim()[0] == 0
    assert axis.get_xlim() == (0.0, pytest.approx(1.12 * (4 + 0.05 * (4 - 2))))
    assert axis.get_figure().get_size_inches().tolist() == [14.4, 4.6]
    assert path.read_text().count("<svg") == 1


def test_without_token_limits_and_options_the_bound_stands_alone(
    drawn: Any, tmp_path: Path
) -> None:
    nothing = CapacityPlan(goal=GOAL, options=OPTIONS[3:], best=None)
    (axis,) = drawn(nothing, tmp_path / "plan.png")
    assert struct.unpack(">II", (tmp_path / "plan.png").read_bytes()[16:24]) == (936, 598)
    assert [label for label, points, *_ in marks(axis) if points] == ["mean_queueing_delay=0.5"]
    assert axis.get_title() == "servers x slots"


def test_each_rule_has_a_mark_that_says_whether_it_kept_the_slo() -> None:
    figure, axis = plt.subplots()
    draw_bill(axis, BILL)
    plt.close(figure)
    legend = axis.get_legend()
    assert (legend.get_frame_on(), legend.get_texts()[0].get_fontsize()) == (False, 9)
    assert axis.title.get_fontsize() == 11
    assert marks(axis) == [
        (
            f"rule {number}",
            [(100.0 - 10 * number, 90.0 + number)],
            "o" if number % 2 == 0 else "x",
            COLOURS[number % len(COLOURS)],
        )
        for number in range(len(BILL.lines))
    ]
    assert axis.get_xlabel() == "server-seconds, % of the peak pool's"
    assert axis.get_ylabel() == "requests within the SLO (%)"
    assert (axis.get_xlim()[0], axis.get_ylim()) == (0.0, (0.0, 104.0))
