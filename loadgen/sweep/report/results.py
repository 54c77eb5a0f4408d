"""What a sweep's folder says: every cell that is done beside theory, and what is missing and why.

Everything is computed from the files of the folder alone, so a report can be made again at any
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.compare.by_order import ComparedSample, with_orders
from kendall.loadgen.compare.cells import MissingCell
from kendall.loadgen.compare.compare import Comparison, compare_samples
from kendall.loadgen.compare.theory import theory_of
from kendall.loadgen.report.report import as_object
from kendall.loadgen.sweep.grid import Basis, GatewayBounds, SweepCell, planned_cells
from kendall.loadgen.sweep.journal import CellProgress, Event, SweepProgress, read_journal
from kendall.loadgen.sweep.plan import SweepPlan, load_plan
from kendall.policies.text import SpecError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law
from kendall.queueing.measurement.record import Record, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell and what became of it."""

    cell: SweepCell
    state: str  # done | unstable | refused | missing
    reason: str | None
    attempts: int
    done: Event | None
    disturbed: int = 0  # attempts set aside because the engine's speed changed around them
    comparison: Comparison | None = None
    compared: ComparedSample | None = None  # what it was made from

    @property
    def missing(self) -> MissingCell:
        """The cell as one without a comparison, with the reason."""
        nothing = "nothing was dispatched" if self.state == "done" else self.state
        return MissingCell(
            name=self.cell.name,
            policy=self.cell.policy,
            load=self.cell.load,
            state=self.state,
            reason=self.reason or nothing,
        )

    def to_dict(self) -> dict[str, Any]:
        kept = (
            {
                key: self.done.get(key)
                for key in ("files", "speeds", "outcomes", "lateness", "growth")
            }
            if self.done
            else {}
        )
        return (
            dict(msgspec.to_builtins(self.cell))
            | {
                "state": self.state,
                "reason": self.reason,
                "attempts": self.attempts,
                "noisy": self.disturbed,
            }
            | kept
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole sweep."""

    folder: Path
    plan: SweepPlan
    basis: Basis | None  # None: stopped before the law was known
    cells: list[CellResult]
    searches: list[Event]
    restarts: list[Event]
    cuts: list[Event]

    @property
    def law(self) -> LatencyModel | None:
        """The calibrated law; None where the sweep was stopped before it."""
        return self.basis.law if self.basis else None

    @property
    def missing_searches(self) -> list[str]:
        """Searches of the plan without a result."""
        done = {
            (event["policy"], event["max_output_tokens"], event["goal"]) for event in self.searches
        }
        return [
            f"{goal} of {policy}"
            for policy, limit, goal in self.plan.searches
            if (policy, limit, goal) not in done
        ]

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of the cells that are done, in the order of the plan."""
        return [result.comparison for result in self.cells if result.comparison is not None]

    def of(self, state: str) -> list[CellResult]:
        """The cells in a state."""
        return [result for result in self.cells if result.state == state]

    def comparison_objects(self) -> list[dict[str, Any]]:
        """The content of comparison.json."""
        return [
            as_object(result.comparison)
            | {
                "cell": result.cell.name,
                "max_output_tokens": result.cell.max_output_tokens,
                "bracketing_speeds": result.done["speeds"],
                "files": list(result.done["files"]),
            }
            for result in self.cells
            if result.comparison is not None and result.done is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": msgspec.to_builtins(self.plan),
            "law": None if self.law is None else str(self.law),
            "cells": [result.to_dict() for result in self.cells],
            "searches": self.searches,
            "missing_searches": self.missing_searches,
            "restarts": self.restarts,
            "cuts": self.cuts,
        }


def results_of(folder: Path, on_cell: Callable[[int, int], None] | None = None) -> Results:
    """Read a folder, and set every cell that is done beside theory. Raises SpecError where it is
    no sweep's.
    """
    plan = load_plan(folder / "plan.json")
    events = read_journal(folder / "journal.jsonl")
    progress = SweepProgress.fold(events)
    calibrated = next((event for event in reversed(events) if event["event"] == "calibrated"), None)
    basis = (
        Basis(
            plan, load_law(calibrated["law"]), msgspec.convert(calibrated["bounds"], GatewayBounds)
        )
        if calibrated
        else None
    )
    cells: list[CellResult] = []
    if basis is not None:
        planned = planned_cells(events)
        for number, cell in enumerate(planned, start=1):
            if on_cell is not None:
                on_cell(number, len(planned))
            cells.append(_cell(folder, basis, cell, progress.of(cell.name)))
    # orders of service beside one another
    compared = [(cell, cell.compared) for cell in cells if cell.compared is not None]
    conditions = [(cell.cell.rate, cell.cell.max_output_tokens) for cell, _ in compared]
    comparisons = iter(with_orders([sample for _, sample in compared], conditions))
    return Results(
        folder=folder,
        plan=plan,
        basis=basis,
        cells=[
            cell
            if cell.compared is None
            else dataclasses.replace(cell, comparison=next(comparisons), compared=None)
            for cell in cells
        ],
        searches=list(
            {
                (event["policy"], event["max_output_tokens"], event["goal"]): event
                for event in events
                if event["event"] == "search"
            }.values()
        ),
        restarts=[event for event in events if event["event"] == "restarted"],
        cuts=[event for event in events if event["event"] == "cut"],
    )


def _cell(folder: Path, basis: Basis, cell: SweepCell, known: CellProgress) -> CellResult:
    state, reason = "missing", known.reason or "not measured yet"
    if known.done is not None:
        state, reason = (
            ("done" if known.done["ended"] == "complete" else "unstable"),
            known.done["why"],
        )
    elif cell.load >= 1 and not basis.plan.allow_unstable:
        state = "refused"
    result = CellResult(
        cell=cell,
        state=state,
        reason=reason,
        attempts=known.attempts,
        done=known.done,
        disturbed=known.disturbed,
    )
    if state != "done" or known.done is None:
        return result
    sides = {name.rsplit(".", 2)[-2]: read_side(folder / name) for name in known.done["files"]}
    return dataclasses.replace(
        result, compared=compare_cell(basis, cell, sides["gateway"], sides.get("load", []))
    )


def read_side(path: Path) -> list[Record]:
    """The records of one side. Raises SpecError where the file cannot be read."""
    try:
        return read_run(path)[1]
    except (OSError, ValueError) as error:
        raise SpecError(f"got {path}; expected a run file ({error})") from None


def compare_cell(
    basis: Basis, cell: SweepCell, records: Sequence[Record], sent: Sequence[Record]
) -> ComparedSample | None:
    """One cell beside theory; None where nothing was dispatched."""
    theory = theory_of(
        basis.law,
        basis.limited(cell.max_output_tokens),
        asked_rate=cell.rate,
        bounds=basis.bounds,
        predictor=basis.predictor,
    )
    try:
        (found,) = compare_samples(records, theory, sent, began_idle=True)
    except ValueError:
        return None
    comparison = dataclasses.replace(found.comparison, load=cell.load)
    return dataclasses.replace(found, comparison=comparison)
