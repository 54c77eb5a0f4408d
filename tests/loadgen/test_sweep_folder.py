"""The folder of a sweep in which every kind of cell and search occurs: what it is read as, its
files, lines and report.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kendall.loadgen.commands.compare_cli import app
from kendall.loadgen.sweep.grid import Basis, GatewayBounds, SweepCell
from kendall.loadgen.sweep.journal import digest
from kendall.loadgen.sweep.plan import SweepPlan, save_plan
from kendall.loadgen.sweep.report.report import as_json, lines, print_results, search_line
from kendall.loadgen.sweep.report.report_data import of_sweep
from kendall.loadgen.sweep.report.results import Results, results_of
from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import Header, write_run
from tests.golden_files import is_as_kept
from tests.kept_values import moved
from tests.loadgen.driver import LAW, drive

PLAN = SweepPlan(
    policies=("single", "dynamic", "capped:max_batch_size=4"),
    loads=(0.3, 0.6),
    request_rates=(900.0,),
    max_output_tokens=(60,),
    output_tokens="uniform:low=1,high=60",
    num_prompts=300,
    cell_limit=90.0,
    find_saturation=True,
    slo=("p99_queueing_delay=2s",),
)
BOUNDS = GatewayBounds(max_num_seqs=8, max_model_len=256)
BASIS = Basis(PLAN, LAW, BOUNDS)
CELLS = list(BASIS.cells())
SPEEDS = [(1.0, 1.02), (1.0, 1.2), (1.0, None), (1.1, 1.0), (1.0, 1.0)]


def events(folder: Path) -> Iterator[dict[str, Any]]:
    yield {"event": "sweep", "resumed": False, "versions": {"kendall": "1"}}
    yield {
        "event": "calibrated",
        "law": str(LAW),
        "bounds": msgspec.to_builtins(BOUNDS),
    }
    yield {"event": "planned", "cells": msgspec.to_builtins(CELLS)}
    stable = [cell for cell in CELLS if cell.load < 1]
    for cell, speeds in zip(stable, SPEEDS, strict=False):
        yield {"event": "started", "cell": cell.name, "attempt": 1, "epoch": 1}
        if speeds == SPEEDS[0]:
            yield {"event": "noisy", "cell": cell.name, "reason": "noise", "files": {}}
            yield {"event": "started", "cell": cell.name, "attempt": 2, "epoch": 2}
        ended = "unstable" if speeds == SPEEDS[4] else "complete"
        yield {
            "event": "done",
            "cell": cell.name,
            "ended": ended,
            "why": None if ended == "complete" else "the number in the system grew by 9 %",
            "files": written(folder, cell, both=speeds != SPEEDS[3]),
            "speeds": speeds,
            "outcomes": {"completed": cell.count},
            "lateness": {"mean": 0.0002, "p99": 0.001},
            "growth": None,
        }
    (left,) = stable[len(SPEEDS) :]
    yield {"event": "started", "cell": left.name, "attempt": 1, "epoch": 9}
    yield {"event": "cut", "cell": left.name, "reason": "killed", "files": {"cells/x.jsonl": "1"}}
    first, second = (cell for cell in CELLS if cell.load >= 1 and cell.policy != "single")
    yield {"event": "refused", "cell": first.name, "reason": "load 3 by the law"}
    yield {"event": "failed", "cell": second.name, "reason": "given up after 3 attempts"}
    yield {"event": "restarted", "number": 1, "reason": "the gateway ended: killed"}
    for low in (20.0, 31.25):
        yield search(policy="single", goal="saturation", low=low)
    yield search(policy="dynamic", goal="p99_queueing_delay=2s", high=None, predicted=None)
    yield {"event": "finished"}


def search(**about: Any) -> dict[str, Any]:
    return {
        "event": "search",
        "max_output_tokens": 60,
        "low": 30.0,
        "high": 33.5,
        "predicted": 32.0,
        "predicted_at_speed": 31.0,
        "note": None,
    } | about


def written(folder: Path, cell: SweepCell, *, both: bool) -> dict[str, str]:
    """Both sides' records, or the gateway's alone."""
    records = drive(parse_policy(cell.policy), cell.rate, n=cell.count, law=LAW, max_num_seqs=8)
    sides = {"gateway": records}
    if both:
        sides["load"] = [
            msgspec.structs.replace(
                record,
                intended_at=(record.arrived_at or 0.0) - 0.0015,
                sent_at=(record.arrived_at or 0.0) - 0.001,
            )
            for record in records
        ]
    files = {}
    for side, found in sides.items():
        name = f"cells/{cell.name}.{side}.jsonl"
        (folder / name).parent.mkdir(exist_ok=True)
        asked = {"output_tokens": PLAN.output_tokens, "model": "tiny", "max_num_seqs": 8}
        write_run(
            folder / name,
            Header(writer="load" if side == "load" else "gateway", configuration=asked, seed=1),
            found,
        )
        files[name] = digest(folder / name)
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    save_plan(path / "plan.json", PLAN)
    Profile(name="tiny", law=LAW, r2=0.99, mape=0.01).save(path / "profile.json")
    at = {"at": "2026-01-01T00:00:00.000+00:00"}
    (path / "journal.jsonl").write_text(
        "".join(json.dumps(event | at) + "\n" for event in events(path))
    )
    return path


COUNTED: list[tuple[int, int]] = []


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return results_of(folder, lambda number, count: COUNTED.append((number, count)))


def test_results_and_report_are_as_kept(folder: Path, results: Results) -> None:
    assert (
        moved(
            "sweep-folder.json",
            {
                "sweep.json": results.to_dict,
                "comparison.json": results.comparison_objects,
                "report": lambda: of_sweep(folder, results),
            },
        )
        == []
    )
    assert results.law == LAW
    found = [cell.get("files", {}) for cell in results.to_dict()["cells"]]
    assert any(found)
    assert found == [{name: digest(folder / name) for name in files} for files in found]


def test_the_one_object_is_as_kept(folder: Path, results: Results) -> None:
    found = as_json(results, [folder / "sweep.json"])
    assert found.pop("folder") == str(folder)
    assert found.pop("comparisons") == results.comparison_objects()
    assert found.pop("written") == [str(folder / "sweep.json")]
    assert moved("sweep-json.json", {"--json": lambda: found}) == []


def test_what_is_said_is_as_kept(results: Results) -> None:
    to = io.StringIO()
    print_results(results, Console(file=to, width=110))
    assert is_as_kept("sweep-report.txt", "\n".join(lines(results)) + "\n\n" + to.getvalue())


def test_the_folder_is_compared_as_kept(folder: Path) -> None:
    """With a cell that is missing, a condition cannot hold everywhere."""
    found = CliRunner().invoke(app, ["--sweep", str(folder), "--assert", "prediction_error < 50%"])
    assert found.exit_code == 3, found.output
    assert is_as_kept("sweep-compared.txt", f"{found.stdout}\n{found.stderr}")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (
            {"policy": "single", "goal": "saturation"},
            "single, limit 60: stays stable up to a rate between 30 and 33.5/s; predicted 32/s "
            "(31/s at the speed measured)",
        ),
        (
            {"policy": "single", "goal": "saturation", "max_output_tokens": None, "note": "short"},
            "single: stays stable up to a rate between 30 and 33.5/s; predicted 32/s (31/s at the "
            "speed measured); short",
        ),
        (
            {"policy": "x", "goal": "p99_queueing_delay=2s", "high": None, "predicted": None},
            "x, limit 60: keeps p99_queueing_delay=2s up to a rate between 30 and ?/s",
        ),
    ],
)
def test_the_line_of_a_search(about: dict[str, Any], said: str) -> None:
    assert search_line(search(**about)) == said


def test_cells_are_counted_while_they_are_read(results: Results) -> None:
    assert [(number, len(CELLS)) for number in range(1, len(results.cells) + 1)] == COUNTED


def test_a_sweep_that_was_stopped_before_its_law_was_known_has_no_cells(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", PLAN)
    found = results_of(tmp_path)
    assert (found.law, found.cells, found.comparisons, found.restarts) == (None, [], [], [])
    assert found.to_dict()["law"] is None
    assert len(found.missing_searches) == 6
    assert found.missing_searches[:2] == ["saturation of single", "p99_queueing_delay=2s of single"]


def test_a_run_file_that_is_gone_is_named(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", PLAN)
    (tmp_path / "journal.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events(tmp_path))
    )
    gone = next((tmp_path / "cells").glob("*.gateway.jsonl"))
    gone.unlink()
    with pytest.raises(SpecError, match=r"got .*gateway\.jsonl; expected a run file"):
        results_of(tmp_path)
