"""The dashboards: made by code, valid, whole, and asking only for what is there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models import units

from grafana import generate
from kendall.queueing.measurement.check import SAID
from tests.grafana import schema
from tests.grafana.asked import BOUNDS, FILES, FOLDER, queries_of

ROOT = FOLDER.parents[1]
UNITS = {
    value
    for name, value in vars(units).items()
    if isinstance(value, str) and not name.startswith("_")
}
WANTED = {"kendall", "kendall-theory", "kendall-policies", "kendall-engine", "kendall-load"}


def read(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in read(path)["panels"] if panel["type"] != "row"]


each_dashboard = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_the_files_are_what_the_code_makes() -> None:
    """`make dashboards` writes them."""
    assert {path.stem for path in FILES} == WANTED
    assert generate.outdated() == []


def test_a_file_that_was_changed_by_hand_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in FILES[1:]:
        (tmp_path / path.name).write_text(path.read_text())
    changed = tmp_path / FILES[1].name
    changed.write_text(changed.read_text().replace("1", "2", 1))
    (tmp_path / "mine.json").write_text("{}")
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    assert generate.outdated() == sorted([FILES[0].name, FILES[1].name, "mine.json"])
    assert generate.main(["--check"]) == 3
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@each_dashboard
def test_a_dashboard_is_valid_under_the_schema_version_that_it_names(path: Path) -> None:
    assert schema.faults(read(path)) == []


def newer(dashboard: dict[str, Any]) -> None:
    dashboard["schemaVersion"] += 1


def number_for_a_title(dashboard: dict[str, Any]) -> None:
    dashboard["panels"][1]["title"] = 5


def unknown_key(dashboard: dict[str, Any]) -> None:
    dashboard["panels"][1]["unti"] = "s"


def unknown_style(dashboard: dict[str, Any]) -> None:
    panel = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] = "dotted"


def text_for_a_width(dashboard: dict[str, Any]) -> None:
    dashboard["panels"][1]["gridPos"]["w"] = "wide"


@pytest.mark.parametrize(
    "break_it", [newer, number_for_a_title, unknown_key, unknown_style, text_for_a_width]
)
def test_a_fault_in_the_json_is_found(break_it: Callable[[dict[str, Any]], None]) -> None:
    dashboard = copy.deepcopy(read(FOLDER / "kendall.json"))
    break_it(dashboard)
    assert schema.faults(dashboard)


@each_dashboard
def test_every_panel_has_a_unit_thresholds_a_sentence_and_a_place_of_its_own(path: Path) -> None:
    numbers = [panel["id"] for panel in read(path)["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells = [cell for panel in read(path)["panels"] for cell in cells_of(panel["gridPos"])]
    assert len(set(cells)) == len(cells), "two panels overlap"
    for panel in panels(path):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS or defaults["unit"].startswith("suffix: "), panel["title"]
        assert defaults["unit"] in BOUNDS, panel["title"]
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert [step["value"] for step in steps[1:]] == sorted(
            step["value"] for step in steps[1:]
        ), panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"] or target["format"] == "table", panel["title"]


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    for x in range(place["x"], place["x"] + place["w"]):
        assert x < 24, "the grid has 24 columns"
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


@each_dashboard
def test_the_variables_the_marks_and_the_links_are_there(path: Path) -> None:
    dashboard = read(path)
    source, *variables = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert [variable["name"] for variable in variables] == ["model", "instance", "policy"]
    assert all(variable["definition"] == variable["query"]["query"] for variable in variables)
    (mark,) = dashboard["annotations"]["list"]
    assert "kendall_policy_info" in mark["expr"]
    assert "{{policy}}" in mark["titleFormat"]
    (link,) = dashboard["links"]
    assert link["tags"] == dashboard["tags"] == ["kendall"]


def test_the_overview_begins_with_observed_model_forecast_and_verdict() -> None:
    """Side by side, before anything else; what is not known yet is said in words, in no colour of
    its own.
    """
    row, *first = read(FOLDER / "kendall.json")["panels"][:5]
    assert row["type"] == "row"
    assert [panel["gridPos"] | {"h": 0} for panel in first] == [
        {"x": x, "y": 1, "w": 6, "h": 0} for x in (0, 6, 12, 18)
    ]
    for panel, metrics in zip(
        first,
        (
            {"kendall_observed_queueing_delay_seconds", "kendall_observed_sojourn_time_seconds"},
            {"kendall_checked_queueing_delay_seconds", "kendall_checked_sojourn_time_seconds"},
            {"kendall_predicted_queueing_delay_seconds", "kendall_predicted_sojourn_time_seconds"},
            {"kendall_check_verdict"},
        ),
        strict=True,
    ):
        (target,) = panel["targets"]
        assert set(re.findall(r"kendall_\w+", target["expr"])) == metrics
        assert target["instant"] is True
        assert panel["fieldConfig"]["defaults"]["noValue"].endswith(" yet")
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "text"
    (words,) = first[3]["fieldConfig"]["defaults"]["mappings"]
    assert {result["text"] for result in words["options"].values()} == set(SAID.values())


def under(tree: Any, key: str) -> Iterator[Any]:
    """Every value under a key, however deep."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, child in children:
        if name == key:
            yield child
        yield from under(child, key)


@each_dashboard
def test_every_query_goes_to_the_data_source_that_is_chosen_above_the_dashboard(path: Path) -> None:
    """No uid of one Grafana: the dashboards are imported into others."""
    dashboard = read(path)
    sources = list(under(dashboard, "datasource"))
    assert len(sources) >= len(list(under(dashboard, "expr"))) + 3
    assert [
        source for source in sources if source != {"type": "prometheus", "uid": "${datasource}"}
    ] == []


def test_a_state_is_asked_for_at_the_end_of_the_time_range_alone() -> None:
    """After a switch, a query over the range has the old policy and the new one, and the panel
    shows both.
    """
    states = [
        panel
        for path in FILES
        for panel in panels(path)
        if panel["type"] == "stat" and panel["fieldConfig"]["defaults"]["unit"] == "none"
    ]
    assert {"Policy", "Engine"} <= {panel["title"] for panel in states}
    for target in (target for panel in states for target in panel["targets"]):
        assert target["instant"] is True
        assert not target.get("range")


def test_what_stands_beside_a_unit_is_of_that_unit() -> None:
    """Seconds come from a metric of seconds, requests a second from a rate; what a run shows is
    tested with a real Prometheus.
    """
    for asked in (asked for path in FILES for asked in queries_of(path)):
        if asked.unit == "s":
            assert re.search(r"(_seconds(_bucket|_sum|:\w+)?\b)", asked.expr), asked
        if asked.unit == "reqps":
            assert "rate(" in asked.expr or "kendall_arrival_rate" in asked.expr, asked
        if asked.unit == "bytes":
            assert "_bytes" in asked.expr, asked
