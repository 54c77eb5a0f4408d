"""True and predicted output lengths of the same requests, from a file.

CSV or JSON lines with `output_tokens` and `predicted_output_tokens` by name, as the saved runs and
timetables of `kendall load` have them; rows without one of the two are left out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kendall.policies.text import SpecError, counted
from kendall.queueing.distributions.token_distribution import Vector

COLUMNS = ("output_tokens", "predicted_output_tokens")
FEWEST = 2  # pairs
EXPECTED = f"expected a file of pairs, CSV or JSON lines with {' and '.join(COLUMNS)}"


def read_pairs(path: str) -> tuple[Vector, Vector]:
    """True and predicted lengths, tokens >= 1, in the order of the file. Raises SpecError."""
    if Path(path).exists() and not Path(path).is_file():
        raise SpecError(f"got path={path}, which is no file; {EXPECTED}")
    try:
        changed = Path(path).stat().st_mtime_ns
        actual, predicted = _read(path, changed)
    except OSError as error:
        raise SpecError(f"got path={path}: {error.strerror}; {EXPECTED}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise SpecError(f"got path={path}: {error}; expected CSV or JSON lines") from None
    if len(actual) < FEWEST:
        raise SpecError(
            f"got path={path} with {counted(len(actual), 'pair')}; expected at least {FEWEST} "
            f"rows that have {' and '.join(COLUMNS)}, tokens >= 1 (others are left out)"
        )
    return actual, predicted


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> tuple[Vector, Vector]:
    del changed  # another version of the file is read anew
    pairs = [pair for row in _rows(Path(path)) if (pair := _pair(row)) is not None]
    found = np.array(pairs, dtype=float).reshape(-1, 2)
    found.flags.writeable = False
    return found[:, 0], found[:, 1]


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        json_lines = file.read(1) == "{"
        file.seek(0)
        if not json_lines:
            yield from csv.DictReader(file)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            if isinstance(row, dict):
                yield row


def _pair(row: Mapping[str, Any]) -> tuple[float, float] | None:
    try:
        actual, predicted = (float(row.get(name) or "nan") for name in COLUMNS)
    except (TypeError, ValueError):
        return None
    return (actual, predicted) if 1 <= actual < np.inf and 1 <= predicted < np.inf else None
