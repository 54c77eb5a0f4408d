"""Conditions on every cell of a comparison or a sweep (`--assert`): a sweep reads them before
anything runs; both check them at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kendall.loadgen.compare.assertions import (
    Assertion,
    broken_lines,
    parse_assertions,
    require_known,
)
from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.compare import compare
from kendall.loadgen.report.html import ReportData
from kendall.queueing.measurement.record import Record


def parse_conditions(texts: Iterable[str]) -> list[Assertion]:
    """Raises SpecError, for a name that no cell has too: a sweep takes too long to learn that at
    its end.
    """
    conditions = parse_assertions(texts)
    if conditions:
        instants = dict.fromkeys(("arrived_at", "dispatched_at"), 0.0)
        ends = dict.fromkeys(("server_free_at", "released_at"), 1.0)
        counts = {"epoch": 0, "server_id": 0, "prompt_tokens": 1, "output_tokens": 1}
        shared = {"outcome": "completed", "policy": "single", "batch_size": 1} | counts
        records = [
            msgspec.convert(
                instants | ends | shared | {"request_id": str(i), "batch_id": i}, Record
            )
            for i in range(2)
        ]
        any_cell = ReportCell(name="", comparison=compare(records)[0], load=None)
        require_known(conditions, any_cell.values())
    return conditions


def broken(conditions: Sequence[Assertion], data: ReportData) -> list[str]:
    """One line for every condition that a cell breaks; a cell without a result breaks them all."""
    if not conditions:
        return []
    lines = [
        line for cell in data.cells for line in broken_lines(conditions, cell.values(), cell.name)
    ]
    return lines + [
        f"{cell.name}: got no result ({cell.state}); expected one to check" for cell in data.missing
    ]
