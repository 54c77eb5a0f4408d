"""The end of a sweep: files for programs, a table and lines for people, the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kendall.loadgen.report.html import ReportData, write_report
from kendall.loadgen.report.report import show_table
from kendall.loadgen.sweep.journal import Event
from kendall.loadgen.sweep.report.results import Results
from kendall.loadgen.sweep.store import Store
from kendall.policies.text import short_number
from kendall.queueing.commands.terminal import say

# change of speed around a cell beyond which its mean says more about the machine than about the
# queue
WANDER = 0.1


def write_results(store: Store, results: Results, data: ReportData) -> list[Path]:
    """comparison.json, sweep.json and the HTML report; what was written."""
    written = [
        store.write_json("comparison.json", results.comparison_objects()),
        store.write_json("sweep.json", results.to_dict()),
    ]
    return [*written, write_report(store.folder, data)]


def print_results(results: Results, console: Console) -> None:
    if results.comparisons:
        show_table(results.comparisons, console)
    for line in lines(results):
        say(console, line)


def lines(results: Results) -> list[str]:
    """The lines below the table."""
    said = [f"unstable, stopped: {r.cell.name}: {r.reason}" for r in results.of("unstable")]
    said += [f"not run: {r.cell.name}: {r.reason}" for r in results.of("refused")]
    said += [f"MISSING: {r.cell.name}: {r.reason}" for r in results.of("missing")]
    said += [f"MISSING: search for {search}" for search in results.missing_searches]
    if short := [result.cell.name for result in results.of("done") if result.cell.cut]:
        said.append(f"shorter than asked (--cell-limit): {', '.join(short)}")
    said += [search_line(event) for event in results.searches]
    if drift := drift_line(results):
        said.append(drift)
    if results.restarts:
        said.append(
            f"times the gateway was started again: {len(results.restarts)} "
            f"({'; '.join(e['reason'] for e in results.restarts)})"
        )
    said += [f"kept as partial: {name}" for event in results.cuts for name in event["files"]]
    return said


def search_line(event: Event) -> str:
    """The bracket of one search beside its prediction."""
    goal = "stays stable" if event["goal"] == "saturation" else f"keeps {event['goal']}"
    limit = "" if event["max_output_tokens"] is None else f", limit {event['max_output_tokens']}"
    high = "?" if event["high"] is None else short_number(event["high"])
    said = (
        f"{event['policy']}{limit}: {goal} up to a rate between {short_number(event['low'])} "
        f"and {high}/s"
    )
    if event["predicted"] is not None:
        said += (
            f"; predicted {short_number(event['predicted'])}/s "
            f"({short_number(event['predicted_at_speed'])}/s at the speed measured)"
        )
    return said + (f"; {event['note']}" if event["note"] else "")


def as_json(results: Results, written: Sequence[Path]) -> dict[str, Any]:
    """The one object of `--json`."""
    return {
        "folder": str(results.folder),
        "comparisons": results.comparison_objects(),
        "unstable": [{"cell": r.cell.name, "reason": r.reason} for r in results.of("unstable")],
        "refused": [{"cell": r.cell.name, "reason": r.reason} for r in results.of("refused")],
        "missing": [{"cell": r.cell.name, "reason": r.reason} for r in results.of("missing")],
        "searches": results.searches,
        "missing_searches": results.missing_searches,
        "restarts": len(results.restarts),
        "written": [str(path) for path in written],
    }


def drift_line(results: Results) -> str | None:
    """The changes of the machine's own speed while cells were measured; None where they are not
    known. Theory cannot be blamed for them.
    """
    if not results.plan.bracket:
        return None
    speeds = {
        r.cell.name: r.done["speeds"]
        for r in results.of("done")
        if r.done and None not in r.done["speeds"]
    }
    changes = {name: abs(after / before - 1) for name, (before, after) in speeds.items()}
    if not changes:
        return None
    repeated = [result.cell.name for result in results.cells if result.disturbed]
    said = (
        "speed of the machine between the short calibrations around a cell: changed by "
        f"{max(changes.values()):.0%} at most"
    )
    wandered = [f"{name} {change:.0%}" for name, change in changes.items() if change > WANDER]
    said += f"; do not trust {', '.join(wandered)}" if wandered else ""
    return said + (f"; measured again for it: {', '.join(repeated)}" if repeated else "")
