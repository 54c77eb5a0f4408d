"""Orders of service in the HTML report: their table, the figure of slowdowns, the CSV."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from kendall.loadgen.compare.cells import ReportCell, RunFile, TheoryInputs, cells_of_files
from kendall.loadgen.compare.comparison import OrderResult
from kendall.loadgen.report.html import of_cells, write_csv
from kendall.loadgen.report.html.orders import COLOURS, PALE, order_table, orders_figure
from kendall.loadgen.report.html.page import page
from kendall.policies import parse_policy
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.queueing.predictors.predictor_text import parse_predictor
from tests.kept_values import moved
from tests.loadgen.driver import drive
from tests.loadgen.ordered_runs import AGING, FIRST_COME, LAW, SHORTEST, jobs, records


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> ReportCell:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    found = drive(parse_policy("single"), 6.0, n=4000)
    write_run(path, Header(writer="simulator"), found)
    (made,) = cells_of_files([RunFile.read(path)], TheoryInputs())
    return made


@pytest.fixture(scope="module")
def cells(cell: ReportCell) -> list[ReportCell]:
    def under(policy: str, load: float, order: OrderResult | None) -> ReportCell:
        comparison = dataclasses.replace(
            cell.comparison, policy=policy, load=load, order=order, compared="sojourn_time"
        )
        return dataclasses.replace(cell, comparison=comparison, load=load, max_output_tokens=60)

    return [
        under("continuous:max_batch_size=4", 0.8, FIRST_COME),
        under("continuous:max_batch_size=4,order=spjf", 0.8, SHORTEST),
        under("continuous:max_batch_size=4,order=spjf,aging=0.02", 0.8, AGING),
        under("continuous:max_batch_size=4,order=spjf", 0.5, SHORTEST),
        under("dynamic", 0.8, None),
    ]


def test_the_table_has_a_row_for_each_cell_of_a_policy_with_orders(
    cells: list[ReportCell],
) -> None:
    table = order_table(cells)
    assert table.count("<tr>") == 1 + 4
    assert "dynamic" not in table
    assert "continuous 4 spjf 0.02, limit 60" in table
    assert "*" not in table, "the delay is compared, whatever the cell's own comparison"
    assert "0.62 ± 0.05<br><small>0.60</small>" in table
    assert "2.20 ± 0.30<br><small>2.05</small>" in table
    assert "<td>1.75</td>" in table
    assert "110.0 ± 20.0" in table
    assert "0.70 ± ?" in table


def test_a_panel_for_each_policy_and_load_and_two_traces_for_each_order(
    cells: list[ReportCell],
) -> None:
    figure = orders_figure(cells)
    assert figure is not None
    titles = [each["text"] for each in figure["layout"]["annotations"]]
    assert titles == [
        "<b>continuous 4, limit 60 · load 0.8</b>",
        "<b>continuous 4, limit 60 · load 0.5</b>",
    ]
    traces = figure["data"]
    assert [(each["name"], each["mode"], each["xaxis"]) for each in traces] == [
        ("fcfs", "markers", "x"),
        ("fcfs", "lines", "x"),
        ("spjf", "markers", "x"),
        ("spjf", "lines", "x"),
        ("spjf 0.02", "markers", "x"),
        ("spjf 0.02", "lines", "x"),
        ("spjf", "markers", "x2"),
        ("spjf", "lines", "x2"),
    ]
    points, line, _, theory, _, simulated = traces[:6]
    assert points["x"] == [2.5, 5.0, 33.0]
    assert points["y"] == [3.0, 2.0, 1.5]
    assert points["error_y"]["array"] == pytest.approx([0.3, 0.2, 0.15])
    assert line["y"] == [2.9, 2.1, 1.4]
    assert (line["line"]["dash"], line["line"]["color"]) == ("solid", "$ink")
    assert theory["x"] == [2.5, 33.0]
    assert theory["line"] == {"color": COLOURS[0], "width": 1.5, "dash": "solid"}
    assert simulated["y"] == [1.45, 2.1]
    assert simulated["line"] == {"color": COLOURS[1], "width": 1.5, "dash": "dot"}
    assert [each["showlegend"] for each in traces] == [*[True, False] * 3, False, False]
    assert traces[2]["x"][0] < 2.5 < traces[4]["x"][0], "points of two orders stand apart"
    assert "theory 2.40" in traces[2]["text"][1]
    assert "6-60 tokens" in traces[2]["text"][1]


def test_every_mean_is_in_its_panel(cells: list[ReportCell]) -> None:
    figure = orders_figure(cells)
    assert figure is not None
    for trace in figure["data"]:
        key = trace["xaxis"].removeprefix("x")
        for side in "xy":
            low, high = figure["layout"][f"{side}axis{key}"]["range"]
            assert all(10**low < value < 10**high for value in trace[side])


def test_a_cell_that_is_not_judged_is_pale(cells: list[ReportCell]) -> None:
    disturbed = [
        dataclasses.replace(each, comparison=dataclasses.replace(each.comparison, of_others=3))
        for each in cells
    ]
    judged, other = orders_figure(cells), orders_figure(disturbed)
    assert judged is not None
    assert other is not None
    assert {each["opacity"] for each in judged["data"]} == {1.0}
    assert {each["opacity"] for each in other["data"]} == {PALE}


def test_a_report_without_orders_has_neither(cells: list[ReportCell]) -> None:
    assert orders_figure(cells[4:]) is None
    with_them, without = (page(of_cells(each)) for each in (cells, cells[4:]))
    for text in ("Orders of service", "Slowdown by output length", "figure-orders"):
        assert text in with_them
        assert text not in without


def test_the_csv_has_their_columns_where_there_are_any(
    cells: list[ReportCell], tmp_path: Path
) -> None:
    with write_csv(cells, tmp_path / "with.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["order"] for row in rows] == ["fcfs", "spjf", "spjf:aging=0.02", "spjf", ""]
    assert rows[1]["delay_ratio"] == "0.625"
    assert rows[1]["slowdown_6_to_60_tokens"] == "2.5"
    assert rows[4]["delay_ratio"] == ""
    with write_csv(cells[4:], tmp_path / "without.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert "order" not in row
    assert row["part_predictor_ms"] == ""


def test_runs_of_one_timetable_under_two_orders_are_set_beside_one_another(
    tmp_path: Path,
) -> None:
    """Two epochs of one gateway's file; the load generator's header says the predictor."""
    drawn = jobs(10.0, 100)
    run = [
        *records("single", drawn),
        *records("single:order=spjf", drawn, epoch=1),
    ]
    write_run(tmp_path / "gateway.jsonl", Header(writer="gateway"), run)
    sent = [
        Record(
            request_id=f"run-{job.request.id}",
            outcome="completed",
            intended_at=job.request.arrived_at,
        )
        for job in drawn
    ]
    header = Header(writer="load", configuration={"predictor": "lognormal:sigma=0.3"})
    write_run(tmp_path / "load.jsonl", header, sent)
    files = [RunFile.read(tmp_path / name) for name in ("gateway.jsonl", "load.jsonl")]
    first, shortest = cells_of_files(files, TheoryInputs())
    assert first.comparison.order is not None
    order = shortest.comparison.order
    assert order is not None
    assert order.versus is not None
    assert order.versus.paired
    assert order.versus.delay.value < 0.9
    asked = cells_of_files(files, TheoryInputs(law=LAW, rate=10.0))
    assert [each.comparison.predictor for each in asked] == [None, "lognormal:sigma=0.3"]
    given = cells_of_files(
        files, TheoryInputs(law=LAW, rate=10.0, predictor=parse_predictor("exact"))
    )
    assert given[1].comparison.predictor == "exact"
    assert given[1].comparison.predictor_measured == "exact"


def test_figure_and_table_are_as_kept(cells: list[ReportCell]) -> None:
    """Of three panels in two rows."""
    third = dataclasses.replace(cells[3], load=0.3)
    found = {
        "figure": lambda: orders_figure([*cells, third]),
        "table": lambda: order_table([*cells, third]),
    }
    assert moved("report-orders.json", found) == []
