"""The HTML report: right numbers in every figure, nothing from a network, drawn by a real
browser without a complaint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kendall.loadgen.report.html.page
from kendall.loadgen.compare.cells import MissingCell, ReportCell, RunFile, TheoryInputs
from kendall.loadgen.compare.comparison import DifferencePart, Split
from kendall.loadgen.compare.epoch_sample import EpochSample
from kendall.loadgen.compare.residual import cause_of
from kendall.loadgen.report.columns import IN_CSV
from kendall.loadgen.report.html import ReportData, of_files, of_folder, write_report
from kendall.loadgen.report.html.marks import Panel, hover
from kendall.loadgen.report.html.over_load import BEYOND, curve_of, over_load_figure
from kendall.loadgen.report.html.page import ROOT, page
from kendall.loadgen.report.html.parts import PALE, parts_figure
from kendall.loadgen.report.html.style import columns, log_axis, rows
from kendall.loadgen.report.html.tables import matrix
from kendall.loadgen.report.html.tails import tails_figure
from kendall.loadgen.report.html.versus import versus_figure
from kendall.loadgen.report.html.words import (
    accuracy,
    causes,
    headline,
    steady_state,
    title,
)
from kendall.loadgen.sweep.grid import SweepCell
from kendall.loadgen.sweep.report.results import CellResult
from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.arrival_audit import audit_arrivals
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.queueing.measurement.recursion import served
from kendall.queueing.measurement.statistics import summarise
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from tests.golden_files import is_as_kept
from tests.loadgen.driver import LAW, LENGTHS, drive
from tests.page.browser import chromium
from tests.support import require_program

SPEEDS = {"dynamic": 1.2, "capped:max_batch_size=4": 1.0, "continuous:max_batch_size=8": 1.0}
RATES = {
    "dynamic": (15.0, 28.0),
    "capped:max_batch_size=4": (7.0, 14.0),
    "continuous:max_batch_size=8": (30.0, 60.0),
}
ERRANDS = (
    ".gvt1.com",
    ".google.com",
    ".googleapis.com",
    ".gstatic.com",
)  # the browser's own, on any page
MISSING = MissingCell(
    name="lost",
    policy="single",
    load=0.5,
    state="missing",
    reason="the gateway was killed <b>twice</b>",
)


def run_file(folder: Path, policy: str, rate: float, load: float, **configuration: Any) -> Path:
    asked = {
        "engine": "emulated",
        "model": "tiny",
        "max_num_seqs": 16,
        "output_tokens": "uniform:low=1,high=60",
        "request_rate": rate,
    }
    records = drive(
        parse_policy(policy), rate, n=700, law=LAW.at_speed(SPEEDS[policy]), max_num_seqs=16
    )
    path = folder / f"{load}-{policy.partition(':')[0]}.jsonl"
    header = Header(
        writer="simulator",
        configuration=asked | {"load": load, **configuration},
        seed=4,
        hardware={"cpu": "a CPU", "cores": 2},
    )
    write_run(path, header, records)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    folder = tmp_path_factory.mktemp("runs")
    files = [
        run_file(folder, policy, rate, load)
        for policy in SPEEDS
        for rate, load in zip(RATES[policy], (0.3, 0.6), strict=True)
    ]
    found = of_files([RunFile.read(path) for path in files], TheoryInputs(law=LAW))
    return dataclasses.replace(found, missing=[MISSING])


@pytest.fixture(scope="module")
def report(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(None, data, tmp_path_factory.mktemp("report") / "report.html")


def traces(figure: dict[str, Any] | None, group: str) -> Iterator[dict[str, Any]]:
    assert figure is not None
    return (trace for trace in figure["data"] if trace.get("legendgroup", trace["name"]) == group)


def test_the_page_says_what_was_measured_and_why_cells_differ(report: Path) -> None:
    shown = report.read_text(encoding="utf-8").partition('<script type="application/json"')[0]
    for words in (
        "4 policies at 2 loads on emulated (tiny)",
        "machine slower than calibrated by 20\N{NO-BREAK SPACE}%",
        "Where the steady state differs, and why",
    ):
        assert words in shown
    for words in (
        "continuous 8*",
        "capped 4",
        "a CPU, 2 core(s)",
        "k1 2 ms",
        "1 of 7 planned cells have no result",
        " ms",
        "seed",
    ):
        assert words in shown
    assert "killed &lt;b&gt;twice&lt;/b&gt;" in shown


def test_the_page_needs_nothing_from_outside(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href|action|data)\s*=\s*["']?(?!data:)[a-z]+:""", own)
    assert "@import" not in own
    assert "url(" not in own
    assert "default-src 'none'" in own
    assert "connect-src" not in own
    assert not re.search(r"@[A-Z]{2,}@", own)
    assert len(text) < 1_700_000


def test_the_vendored_library_is_the_one_that_its_readme_names() -> None:
    vendor = Path(str(ROOT)) / "vendor"
    library = (vendor / "plotly-basic.min.js").read_bytes()
    readme = (vendor / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(library).hexdigest() in readme
    assert f"{len(library):,} bytes" in readme
    version = re.search(rb"v(\d+\.\d+\.\d+)", library[:200])
    assert version is not None
    assert version[1].decode() in readme
    assert b"</script" not in library.lower()  # it stands inside one
    assert "MIT" in (vendor / "LICENSE-plotly.txt").read_text(encoding="utf-8")


def test_hostile_names_stay_text(data: ReportData) -> None:
    hostile = "</script><script>alert(1)</script>"
    text = page(
        dataclasses.replace(
            data, cells=data.cells[:1], configuration={"engine": hostile, "model": hostile}
        )
    )
    assert "<script>alert" not in text


def test_observed_means_stand_where_they_were_measured(data: ReportData) -> None:
    figure = versus_figure(data.cells)
    drawn = sorted(
        x for group in ("observed", "short") for trace in traces(figure, group) for x in trace["x"]
    )
    assert drawn == pytest.approx(
        sorted(cell.comparison.quantity.observed.mean * 1e3 for cell in data.cells)
    )
    assert figure is not None
    assert [key for key in figure["layout"] if key.startswith("xaxis")] == ["xaxis", "xaxis2"]
    assert figure["layout"]["yaxis"]["automargin"] is True, "names of any length have room"


def test_the_bars_of_a_cell_add_up_to_its_deviation(data: ReportData) -> None:
    figure = parts_figure(data.cells)
    assert figure is not None
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    sums = [trace for trace in figure["data"] if trace["type"] == "scatter"]
    totals = {
        name: total for trace in sums for name, total in zip(trace["y"], trace["x"], strict=True)
    }
    assert len(totals) == len(data.cells)
    for index, name in enumerate(bars[0]["y"]):
        assert sum(bar["x"][index] for bar in bars) == pytest.approx(totals[name], abs=1e-9)
    (slow,) = (trace for trace in bars if trace["name"] == "service law: speed")
    assert max(slow["x"]) > 20


@pytest.mark.parametrize(("off", "ends"), [(0.3, (-5, 30)), (-0.3, (-30, 5))])
def test_the_axis_of_the_bars_has_room_on_both_sides_of_zero(
    data: ReportData, off: float, ends: tuple[float, float]
) -> None:
    """Percent, and 8 % more; a cell that is beyond zero whole, with a narrow interval."""
    first = data.cells[0]
    parts = (DifferencePart("speed", 1e6 * off, 0.0),)
    split = Split(predicted=1e6, observed=1e6 * (1 + off), parts=parts)
    comparison = dataclasses.replace(first.comparison, split=split)
    figure = parts_figure([dataclasses.replace(first, comparison=comparison)])
    assert figure is not None
    assert figure["layout"]["xaxis"]["range"] == pytest.approx([1.08 * end for end in ends])


def test_an_outlier_does_not_hide_the_other_bars(data: ReportData) -> None:
    (first, *others) = data.cells
    split, quantity = first.comparison.split, first.comparison.quantity
    assert split is not None
    assert quantity.a_priori is not None
    tiny = dataclasses.replace(split, predicted=split.predicted / 1000)
    figure = parts_figure(
        [
            dataclasses.replace(
                first, comparison=dataclasses.replace(first.comparison, split=tiny)
            ),
            *others,
        ]
    )
    assert figure is not None
    assert figure["layout"]["xaxis"]["range"][1] < 1000
    (note,) = figure["layout"]["annotations"]
    assert "→" in note["text"]


def test_the_curve_is_the_prediction(data: ReportData) -> None:
    figure = over_load_figure(data.cells)
    lines = list(traces(figure, "line"))
    assert len(lines) == 3
    assert figure is not None
    assert {
        tuple(axis["range"]) for name, axis in figure["layout"].items() if name.startswith("xaxis")
    } == {(0, 1)}
    for line, policy in zip(lines, SPEEDS, strict=True):
        cells = [cell for cell in data.cells if cell.comparison.policy == policy]
        for cell in cells:
            a_priori, load = cell.comparison.quantity.a_priori, cell.comparison.load
            assert a_priori is not None
            assert load is not None
            nearest = min(
                zip(line["x"], line["y"], strict=True), key=lambda point: abs(point[0] - load)
            )
            assert nearest[1] == pytest.approx(a_priori.mean * 1e3, rel=0.05)


def test_a_curve_begins_and_ends_where_it_was_solved(data: ReportData) -> None:
    (line,) = traces(
        over_load_figure([cell for cell in data.cells if cell.comparison.policy == "dynamic"]),
        "line",
    )
    assert (line["x"][0], line["x"][-1]) == (0.05, 0.97)


def test_the_band_is_open_above_from_where_the_slowest_machine_has_no_steady_state(
    data: ReportData,
) -> None:
    """Up and down again without a slope; the curve is known to a load of 0.97."""
    (band,) = traces(
        over_load_figure([cell for cell in data.cells if cell.comparison.policy == "dynamic"]),
        "band",
    )
    up, down = (place for place, y in enumerate(band["y"]) if y == BEYOND)
    assert band["x"][up - 1] == band["x"][up] == pytest.approx(0.97 / 1.2, abs=0.01)
    assert band["x"][down] == band["x"][down + 1] == 0.97


def test_a_wide_interval_does_not_stretch_the_axes(data: ReportData) -> None:
    """Three times the mean and three tenths of it beside the prediction, eight times over load;
    8 % of a decade more.
    """
    cell = next(cell for cell in data.cells if cell.comparison.policy == "dynamic")
    observed = cell.comparison.queueing_delay.observed
    wide = dataclasses.replace(
        cell.comparison.queueing_delay,
        observed=dataclasses.replace(observed, half_width=10 * observed.mean),
    )
    cells = [
        dataclasses.replace(
            cell, comparison=dataclasses.replace(cell.comparison, queueing_delay=wide)
        )
    ]
    beside, over_load = versus_figure(cells), over_load_figure(cells)
    assert beside is not None
    assert over_load is not None
    low, high = beside["layout"]["xaxis"]["range"]
    mean = math.log10(observed.mean * 1e3)
    assert low == pytest.approx(mean + math.log10(0.3) - 0.08)
    assert high == pytest.approx(mean + math.log10(3) + 0.08)
    assert over_load["layout"]["yaxis"]["range"][1] == pytest.approx(mean + math.log10(8) + 0.08)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((1.0, 100.0), "1 2 5 10 20 50 100"),
        ((1.0, 120.0), "1 10 100"),
        ((0.3, math.inf, 0.0, -2.0, 0.6), "0.5"),
        ((), "1 2 5 10"),
    ],
)
def test_a_logarithmic_axis_is_labelled_within_decades_where_they_are_few(
    values: Sequence[float], labels: str
) -> None:
    found = log_axis(values)
    assert " ".join(found["ticktext"]) == labels
    assert found["tickvals"] == pytest.approx([float(label) for label in labels.split()])


def test_every_number_of_the_csv_is_the_comparisons(data: ReportData) -> None:
    for cell in data.cells:
        row, comparison = {key: value(cell) for key, value in IN_CSV}, cell.comparison
        quantity, speed = comparison.quantity, comparison.speed
        assert speed is not None
        assert (row["speed"], row["cv"]) == (speed.factor, speed.cv)
        assert row["speed"] == pytest.approx(SPEEDS[comparison.policy], rel=0.1)
        assert (row["policy"], row["load"], row["n"], row["arrival_rate"]) == (
            comparison.policy,
            cell.load,
            comparison.n,
            comparison.arrival_rate,
        )
        assert (row["observed_ms"], row["half_width_ms"]) == (
            quantity.observed.mean * 1e3,
            quantity.observed.half_width * 1e3,
        )
        assert quantity.predicted is not None
        assert row["predicted_ms"] == quantity.predicted.mean * 1e3
        assert quantity.live is not None
        assert row["live_ms"] == quantity.live.mean * 1e3
        assert (
            0 <= float(row["p50_ms"] or 0) <= float(row["p90_ms"] or 0) <= float(row["p99_ms"] or 0)
        )
        assert 0 < float(row["p90_ms"] or 0) < 10 * quantity.observed.mean * 1e3
        assert (row["batch_size"], row["utilisation"]) == (
            comparison.batch_size,
            comparison.utilisation,
        )
        assert row["verdict"] == cell.verdict.text


def test_a_hover_names_the_mean_that_was_compared(data: ReportData) -> None:
    cell = data.cells[0]
    assert cell.comparison.compared == "queueing_delay"
    assert "mean queueing delay: " in hover(cell)
    sojourn = dataclasses.replace(
        cell, comparison=dataclasses.replace(cell.comparison, compared="sojourn_time")
    )
    assert "mean sojourn: " in hover(sojourn)


@pytest.mark.parametrize(
    "policy", ["capped:max_batch_size=4", "single", "elastic:max_batch_size=4"]
)
def test_a_slower_machine_is_the_same_curve_scaled_in_both_directions(policy: str) -> None:
    """W(s, x) = s W(1, s x): what the band rests on."""
    model = Queue.read(parse_policy(policy), LENGTHS, LAW)
    curve = curve_of(model, "queueing_delay")
    assert curve is not None
    slow = model.but(law=LAW.at_speed(1.25))
    expected = predict_model(slow, 0.5 * model.largest_stable_rate).queueing_delay.mean
    assert 1.25 * curve(1.25 * 0.5) == pytest.approx(expected, rel=0.01)


def test_the_distribution_falls_from_everyone_to_the_slowest(data: ReportData) -> None:
    figure = tails_figure(data.cells)
    curves = [*traces(figure, "observed"), *traces(figure, "short")]
    assert len(curves) == len(data.cells)
    for curve in curves:
        assert curve["x"] == sorted(curve["x"])
        assert curve["y"] == sorted(curve["y"], reverse=True)
    assert any(trace["x"] for trace in traces(figure, "predicted"))


def test_a_report_of_nothing_says_so() -> None:
    text = page(ReportData(cells=[], missing=[MISSING]))
    assert "No cell has a result yet" in text
    assert "Nothing was measured." in text
    assert '<div class="plot"' not in text


def test_runs_without_a_law_are_shown_without_predictions(data: ReportData, tmp_path: Path) -> None:
    path = run_file(tmp_path, "dynamic", 20.0, 0.3)
    bare = of_files([RunFile.read(path)], TheoryInputs())
    text = page(bare)
    assert "no prediction" in text
    assert 'id="figure-parts"' not in text
    assert 'id="figure-beside"' in text


def test_the_headline_counts(data: ReportData) -> None:
    cells = list(data.cells)
    agree = sum(cell.verdict.kind == "agree" for cell in cells)
    assert f"agrees with {agree} of {len(cells)} cells" in steady_state(cells)
    requests = sum(cell.comparison.n for cell in cells)
    assert headline(cells).startswith(f"{requests:,} requests under three policies: observed")
    assert headline([]) == steady_state([]) == "Nothing was measured."


def test_without_a_law_the_headline_is_that_of_the_steady_state(data: ReportData) -> None:
    cells = [unchecked(cell) for cell in data.cells]
    assert headline(cells) == steady_state(cells)
    assert headline(list(data.cells)) != steady_state(cells)


def unchecked(cell: ReportCell) -> ReportCell:
    """The same without a model of its requests."""
    comparison = cell.comparison
    quantity = dataclasses.replace(comparison.quantity, same_arrivals=None)
    return dataclasses.replace(
        cell, comparison=dataclasses.replace(comparison, **{comparison.compared: quantity})
    )


def widened(cell: ReportCell) -> ReportCell:
    """The same with an interval that is too wide, yet far from the prediction."""
    comparison = cell.comparison
    observed = dataclasses.replace(
        comparison.quantity.observed, half_width=0.26 * comparison.quantity.observed.mean
    )
    quantity = dataclasses.replace(comparison.quantity, observed=observed)
    return dataclasses.replace(
        cell, comparison=dataclasses.replace(comparison, **{comparison.compared: quantity})
    )


def test_a_short_cell_differs_by_a_part_beyond_chance_and_an_invalid_one_is_judged_nowhere(
    data: ReportData,
) -> None:
    slow = next(cell for cell in data.cells if cell.verdict.kind == "speed")
    agreeing = next(cell for cell in data.cells if cell.verdict.kind == "agree")
    assert slow.comparison.split is not None
    assert cause_of(slow.comparison.split) is not None
    short, invalid = widened(slow), dataclasses.replace(slow, audit=SimpleNamespace(valid=False))  # type: ignore[arg-type]
    cells = [agreeing, short, invalid]
    assert short.verdict.kind == "speed"
    assert steady_state(cells) == (
        "The steady state predicted before the run agrees with 1 of 2 cells; 1 differs for an "
        "identified cause: machine\u2019s speed (1). 1 of 3 cannot be judged: 1 invalid."
    )
    assert len(causes(cells)) == 1
    assert {name: count for name, _, count in accuracy(cells)} == {
        "model, same requests": 3,  # needs neither a long run nor the requested arrivals
        "recursion on measured services": 3,
        "steady state at the run’s speed": 2,
        "steady state a priori": 2,
    }
    assert "machine slower" in matrix([unchecked(short)])
    for shown in (matrix([unchecked(invalid)]), hover(invalid)):
        assert "INVALID" in shown
        assert "machine slower" not in shown
    for each in (short, invalid):
        assert '<span class="chip agree">agree</span>' in matrix([each])
        assert "machine slower" not in matrix([each])
    assert IN_CSV[-1][1](invalid) == "INVALID", "the verdict of the CSV too"


COLOUR_OF = {"observed": {"$observed", "$ink"}, "short": {"$pale"}}


@pytest.mark.parametrize("draw", [versus_figure, over_load_figure, parts_figure, tails_figure])
def test_every_figure_draws_a_cell_that_is_not_judged_pale(
    data: ReportData, draw: Callable[..., dict[str, Any] | None]
) -> None:
    slow = next(cell for cell in data.cells if cell.verdict.kind == "speed")
    agreeing = next(cell for cell in data.cells if cell.verdict.kind == "agree")
    short, invalid = widened(slow), dataclasses.replace(slow, audit=SimpleNamespace(valid=False))  # type: ignore[arg-type]
    figure = draw([agreeing, short, invalid])
    for group, count in (("observed", 2), ("short", 1)):
        drawn = [trace for trace in traces(figure, group) if trace["x"]]
        assert sum(1 if trace["mode"] == "lines" else len(trace["x"]) for trace in drawn) == count
        looks = [
            trace[key]
            for trace in drawn
            for key in ("line", "marker", "error_x", "error_y")
            if key in trace
        ]
        assert looks
        assert {look["color"] for look in looks} <= COLOUR_OF[group]
    assert figure is not None
    for bar in (trace for trace in figure["data"] if trace["type"] == "bar"):
        assert bar["marker"]["opacity"][2:] == [PALE]
        assert ["not judged" in text for text in bar["text"]] == [False, False, True]


@pytest.mark.parametrize(("other", "said"), [(0.3049, "at 1 load "), (0.3151, "at 2 loads ")])
def test_loads_that_round_alike_are_one(data: ReportData, other: float, said: str) -> None:
    first = dataclasses.replace(data.cells[0], load=0.3)
    cells = [first, dataclasses.replace(first, load=other)]
    assert said in title(dataclasses.replace(data, cells=cells, missing=[]))


def test_a_part_beyond_chance_is_drawn_in_full_colour(data: ReportData) -> None:
    slow = next(cell for cell in data.cells if cell.verdict.kind == "speed")
    figure = parts_figure([slow])
    assert figure is not None
    (speed,) = (trace for trace in figure["data"] if trace["name"] == "service law: speed")
    assert speed["marker"]["opacity"] == [1.0]


def test_the_medians_say_over_how_many_cells_and_the_rule_is_one_sentence(data: ReportData) -> None:
    judged = sum(cell.counts for cell in data.cells)
    text = page(data)
    assert f"over {judged} cells<br>steady state a priori" in text


@pytest.mark.slow
def test_a_folder_of_runs_with_a_profile_is_a_report(tmp_path: Path) -> None:
    run_file(tmp_path, "capped:max_batch_size=4", 14.0, 0.6)
    Profile(name="x", law=LAW, date="2026-01-02T03:04:05+00:00").save(tmp_path / "profile.json")
    found = of_folder(tmp_path)
    assert found.cells[0].comparison.quantity.a_priori is not None
    target = write_report(tmp_path)
    assert target == tmp_path / "report.html"
    assert "2026-01-02" in target.read_text(encoding="utf-8")
    assert (tmp_path / "report.csv").read_text(encoding="utf-8").startswith("policy,load,")
    with pytest.raises(SpecError, match="run files"):
        of_folder(tmp_path / "nothing")


def test_a_sender_outside_its_budget_is_called_invalid(tmp_path: Path) -> None:
    path = run_file(tmp_path, "dynamic", 20.0, 0.3)
    file = RunFile.read(path)
    seen = [
        Record(**{**{f: getattr(r, f) for f in r.__struct_fields__}, "client_request_id": f"c{i}"})
        for i, r in enumerate(file.records)
    ]
    sent = [
        Record(
            request_id=f"c{i}",
            outcome="completed",
            intended_at=(r.arrived_at or 0.0) - 0.2,
            sent_at=r.arrived_at,
        )
        for i, r in enumerate(seen)
    ]
    both = [RunFile(path, file.header, seen), RunFile(path, Header(writer="load"), sent)]
    text = page(of_files(both, TheoryInputs(law=LAW)))
    assert (
        "INVALID: in 1 of 1 cell requests reached the gateway outside the lateness budget" in text
    )
    assert "reached the gateway 200.0 ms late on average" in text
    assert "none can be judged" in text


def browser(page_url: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    chromium = require_program("chromium")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        "--enable-logging=stderr",
        "--window-size=1200,4000",
    ]
    command += ["--virtual-time-budget=5000", *arguments, page_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_figure_without_a_complaint_or_a_request(
    report: Path, tmp_path: Path, theme: str
) -> None:
    log = tmp_path / "net.json"
    done = browser(
        f"{report.as_uri()}?theme={theme}", tmp_path, "--dump-dom", f"--log-net-log={log}"
    )
    assert 'data-drawn="4"' in done.stdout
    for name in ("beside", "over-load", "parts", "tails"):
        place = done.stdout.partition(f'id="figure-{name}"')[2][:3000]
        assert 'class="main-svg"' in place
    assert done.stdout.count('class="point"') > 40
    assert "CONSOLE" not in done.stderr
    assert "plotly-graph-div" in done.stdout or "js-plotly-plot" in done.stdout
    asked = re.findall(
        r'"url":"([a-z]+)://([^/"]*)', log.read_text(encoding="utf-8", errors="replace")
    )
    assert not [
        host
        for scheme, host in asked
        if scheme not in ("file", "chrome", "data", "blob") and not host.endswith(ERRANDS)
    ]


@pytest.mark.slow
def test_a_browser_complains_where_a_page_is_broken(report: Path, tmp_path: Path) -> None:
    """The check above can fail: a library that is not there shows on the console, and so does a
    request.
    """
    text = report.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("Plotly.react", "Plotly.absent"), encoding="utf-8")
    assert "CONSOLE" in browser(broken.as_uri(), tmp_path, "--dump-dom").stderr
    broken.write_text(
        text.replace("</main>", '<img src="https://example.invalid/x.png"></main>'),
        encoding="utf-8",
    )
    assert "CONSOLE" in browser(broken.as_uri(), tmp_path, "--dump-dom").stderr


# Texts that stand on each other, or reach beyond their cell or tile; texts in plots are plotly's.
COLLISIONS = """(() => {
  const found = [], rects = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest(".plot, noscript, script")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = element.closest("td, th, li, p, dd, dt, h1, h2, h3")?.getBoundingClientRect();
    for (const rect of range.getClientRects()) {
      if (rect.width < 1 || rect.height < 1) continue;
      if (box && (rect.left < box.left - 1 || rect.right > box.right + 1))
        found.push("beyond its cell: " + node.data);
      rects.push([rect, node.data]);
    }
  }
  rects.sort((one, other) => one[0].top - other[0].top);
  for (let i = 0; i < rects.length; i++) {
    const [a, text] = rects[i];
    for (let j = i + 1; j < rects.length && rects[j][0].top < a.bottom - 3; j++) {
      const b = rects[j][0];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
          && Math.min(a.bottom, b.bottom) - b.top > 3)
        found.push(text.trim() + " on " + rects[j][1].trim());
    }
  }
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  return wide > 0 ? [...found, `the page is ${wide} px too wide`] : found;
})()"""
SWEEP = Path(__file__).parents[2] / "docs" / "sweep" / "report.html"
FAULTS = (
    "td { white-space: nowrap !important; } table.matrix { width: 300px; }",
    "h2 { margin-bottom: -24px; }",
    "h1 { width: 1400px; }",
)


async def collisions(urls: Sequence[str], width: int, theme: str) -> list[list[str]]:
    async with chromium() as browser, browser.page(width, 900) as tab:
        found = []
        for url in urls:
            await tab.open(f"{url}?theme={theme}")
            await tab.until(
                f"location.href.startsWith('{url}') && document.documentElement.dataset.drawn", 30
            )
            found.append(list(await tab.ask(COLLISIONS)))
        assert tab.complaints == []
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "theme"),
    [(360, "light"), (500, "light"), (500, "dark"), (800, "light"), (821, "light"), (1280, "dark")],
)
def test_no_text_stands_on_another_or_beyond_its_cell(report: Path, width: int, theme: str) -> None:
    assert asyncio.run(collisions([report.as_uri(), SWEEP.as_uri()], width, theme)) == [[], []]


@pytest.mark.slow
def test_the_check_for_collisions_sees_each_fault(report: Path, tmp_path: Path) -> None:
    text, pages = report.read_text(encoding="utf-8"), []
    for number, fault in enumerate(FAULTS):
        pages.append(tmp_path / f"broken-{number}.html")
        pages[-1].write_text(text.replace("</style>", fault + "</style>", 1), encoding="utf-8")
    assert all(asyncio.run(collisions([each.as_uri() for each in pages], 821, "light")))


@pytest.mark.slow
def test_it_prints_on_a4(report: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.pdf"
    browser(
        f"{report.as_uri()}?theme=dark",
        tmp_path,
        f"--print-to-pdf={target}",
        "--no-pdf-header-footer",
    )
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    sizes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", content)
    assert 3 <= len(sizes) <= 10
    assert all((round(float(w)), round(float(h))) == (595, 842) for w, h in sizes)


def test_figures_are_plain_json(data: ReportData) -> None:
    for figure in (
        versus_figure(data.cells),
        over_load_figure(data.cells),
        parts_figure(data.cells),
        tails_figure(data.cells),
    ):
        assert json.loads(json.dumps(figure, allow_nan=False)) == figure


def test_panels_side_by_side_have_axes_of_their_own_or_share_one() -> None:
    assert [Panel.at(index).axes for index in (0, 1)] == [
        {"xaxis": "x", "yaxis": "y"},
        {"xaxis": "x2", "yaxis": "y2"},
    ]
    assert Panel.at(2, shared_y=True).axes == {"xaxis": "x3", "yaxis": "y"}


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("done", None, "nothing was dispatched"),
        ("missing", None, "missing"),
        ("done", "the gateway was killed", "the gateway was killed"),
    ],
)
def test_a_missing_cell_says_why(state: str, reason: str | None, said: str) -> None:
    cell = SweepCell(name="a", policy="single", load=0.5, rate=1.0, max_output_tokens=None, count=1)
    result = CellResult(cell=cell, state=state, reason=reason, attempts=1, done=None)
    assert result.missing.reason == said


def test_only_the_arrivals_of_the_compared_epoch_are_audited(data: ReportData) -> None:
    records = [
        Record(request_id=str(index), outcome="completed", arrived_at=float(index), epoch=index % 2)
        for index in range(200)
    ]
    file = RunFile(Path("a.jsonl"), Header(writer="gateway"), records)
    comparison = dataclasses.replace(data.cells[0].comparison, epoch=1)
    audit = file.audit(comparison)
    assert audit is not None
    assert (audit.n, audit.rate) == (100, pytest.approx(0.5))


def test_the_policy_of_a_group_is_that_of_its_first_request() -> None:
    (only, *_) = served(drive(parse_policy("single"), 5.0, n=20))
    assert EpochSample([only], {}).policy == parse_policy("single")


def shortened(value: Any) -> Any:
    """Three digits a number; of a long row of numbers how many, its ends and its mean."""
    if isinstance(value, float):
        return float(f"{value:.3g}") if abs(value) > 1e-9 else 0.0
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > 12 and all(isinstance(each, int | float) for each in value):
        mean = sum(value) / len(value)
        return f"{len(value)} numbers, {value[0]:.3g} to {value[-1]:.3g}, mean {mean:.3g}"
    return [shortened(each) for each in value]


def test_the_page_looks_as_it_did_when_somebody_looked(
    data: ReportData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word, number, size and colour of it, without its style sheet and its scripts; with a
    cell that is too short and one that is invalid.
    """
    module = kendall.loadgen.report.html.page
    slow = next(cell for cell in data.cells if cell.verdict.kind == "speed")
    asked = np.random.default_rng(3).exponential(0.02, 400).cumsum()
    late = np.linspace(0.0, 0.2, 400)
    invalid = dataclasses.replace(
        slow,
        audit=audit_arrivals(asked + late, asked_rate=50.0, intended=asked),
        lateness=summarise(late),
    )
    assert invalid.invalid
    monkeypatch.setattr(module, "today", lambda: "TODAY")
    drawn = dataclasses.replace(
        data,
        cells=[slow, data.cells[3], data.cells[4], widened(slow), invalid],
        events=["the gateway was started again"],
        date="2026-01-02T03:04:05Z",
    )
    figures = [
        draw(drawn.cells) for draw in (versus_figure, over_load_figure, parts_figure, tails_figure)
    ]
    whole = page(drawn)  # the figures come digit by digit
    title = whole.partition("<title>")[2].partition("</title>")[0]
    body = whole.partition("<main>\n")[2].partition("\n</main>")[0]
    text = (title + body).replace("><", ">\n<")
    shown = json.dumps(
        shortened(json.loads(json.dumps(figures, default=float))), indent=1, ensure_ascii=False
    )
    assert is_as_kept("report.html", text)
    assert is_as_kept("report-figures.json", shown)


def test_panels_are_laid_out_from_left_to_right_and_from_top_to_bottom() -> None:
    assert columns(2, 0.2) == [[0.0, 0.4], [pytest.approx(0.6), pytest.approx(1.0)]]
    assert rows(2, 0.2) == [[pytest.approx(0.6), 1.0], [pytest.approx(0.0), pytest.approx(0.4)]]


def test_a_cell_that_cannot_be_judged_is_counted_under_one_reason() -> None:
    def cell(*, others: int, invalid: bool, bare: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            comparison=SimpleNamespace(of_others=others),
            invalid=invalid,
            counts=bare,
            verdict=SimpleNamespace(kind="no prediction" if bare else "agree"),
        )

    every = [
        cell(others=others, invalid=invalid)
        for others in (0, 3)
        for invalid in (False, True)
        if others or invalid
    ]
    bare = cell(others=0, invalid=False, bare=True)
    said = steady_state([*every, bare])  # type: ignore[list-item]
    assert said == (
        "4 cells, and none can be judged: 1 disturbed, 2 invalid, 1 without a prediction."
    )


@pytest.mark.parametrize(("loads", "panels"), [(1, 1), (6, 6), (7, 0)])
def test_a_row_has_six_panels_at_most(data: ReportData, loads: int, panels: int) -> None:
    """More loads than that are in the figure over load alone."""
    cells = [dataclasses.replace(data.cells[0], load=0.1 * number) for number in range(loads)]
    figure = versus_figure([*cells, *cells])
    layout = {} if figure is None else figure["layout"]
    assert len([key for key in layout if key.startswith("xaxis")]) == panels
