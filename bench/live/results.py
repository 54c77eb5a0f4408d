"""The files of cells: read, and of each cell the attempt that counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.live.judgement import counted

Result = dict[str, Any]


def read_results(paths: Iterable[Path]) -> list[Result]:
    """In the order of measuring: by load, policy's place in the plan (its seed), attempt."""
    found: list[Result] = [msgspec.json.decode(path.read_bytes()) for path in paths]
    return sorted(found, key=lambda result: (result["seed"], result["attempt"]))


def best(results: Sequence[Result]) -> list[Result]:
    """The attempt that counts, of every cell."""
    by_cell: dict[str, list[Result]] = {}
    for result in results:
        by_cell.setdefault(result["cell"], []).append(result)
    return [dict(counted(attempts)) for attempts in by_cell.values()]
