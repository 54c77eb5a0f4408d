"""Conditions on every cell of a comparison or a sweep (`--assert`): a sweep reads them before
anything runs; both check them at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loadgen.compare.assertions import Assertion, broken_lines, parse_assertions, require_known
from loadgen.compare.cells import ReportCell, values_of
from loadgen.compare.compare import compare
from loadgen.report.html import ReportData
from queueing.measurement.record import Record


def parse_conditions(texts: Iterable[str]) -> list[Assertion]:
    """Raises SpecError, for a name that no cell has too: a sweep takes too long to learn that at
    its end.
    """
    conditions = parse_assertions(texts)
    if conditions:
        require_known(conditions, values_of(_any_cell()))
    return conditions


def broken(conditions: Sequence[Assertion], data: ReportData) -> list[str]:
    """One line for every condition that a cell breaks; a cell without a result breaks them all."""
    if not conditions:
        return []
    lines = [
        line for cell in data.cells for line in broken_lines(conditions, values_of(cell), cell.name)
    ]
    return lines + [
        f"{cell.name}: got no result ({cell.state}); expected one to check" for cell in data.missing
    ]


def _any_cell() -> ReportCell:
    """Of two requests: its values have the names of every cell's."""
    instants = {"arrived_at": 0.0, "dispatched_at": 0.0, "server_free_at": 1.0, "released_at": 1.0}
    shared = {
        "outcome": "completed",
        "policy": "single",
        "epoch": 0,
        "server_id": 0,
        "batch_size": 1,
        "prompt_tokens": 1,
        "output_tokens": 1,
    }
    records = [
        msgspec.convert(instants | shared | {"request_id": str(i), "batch_id": i}, Record)
        for i in range(2)
    ]
    return ReportCell(name="", comparison=compare(records)[0], load=None)
