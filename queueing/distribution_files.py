"""Output token counts from a file: numbers, CSV, JSON lines or a run file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from policies.text import SpecError
from queueing.record import cut_run_of

FIELD = "output_tokens"
FORMS = f"one count per line, a CSV file with a column {FIELD} (or one column only), JSON lines with a field {FIELD}, or a run file"


def read_counts(path: Path) -> list[int]:
    """The counts of a file, in its order; a request that made no token has no length to learn from and is left out.

    Raises SpecError: not readable, not whole numbers, no such column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        first = text.lstrip().partition("\n")[0]
        if not first.startswith("{"):
            return [count for count in _from_csv(text) if count != 0]
        if _is_run(first):
            return [record.output_tokens for record in cut_run_of(text.encode(), path)[1] if record.output_tokens]
        return [count for count in _from_json_lines(text) if count]
    except OSError as error:
        raise SpecError(f"got path={path}: {error.strerror}; expected a file with {FORMS}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise SpecError(f"got path={path}: {error}; expected {FORMS}") from None


def _is_run(first: str) -> bool:
    header: Any = msgspec.json.decode(first)
    return isinstance(header, dict) and "writer" in header


def _from_csv(text: str) -> Iterator[int]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    if not rows:
        return
    header = None if all(_is_number(cell) for cell in rows[0]) else rows.pop(0)
    width = len(header) if header else len(rows[0])
    if header and FIELD in header:
        column = header.index(FIELD)
    elif width == 1:
        column = 0
    else:
        raise ValueError(f"got {width} columns ({', '.join(header) if header else 'no header'})")
    for number, row in enumerate(rows, start=2 if header else 1):
        if column >= len(row):
            raise ValueError(f"row {number} has no {FIELD}")
        yield _whole(row[column])


def _from_json_lines(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        value: Any = msgspec.json.decode(line)
        if not isinstance(value, dict) or FIELD not in value:
            raise ValueError(f"line {number} has no field {FIELD}")
        if value[FIELD] is not None:  # a request that was lost
            yield _whole(value[FIELD])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _whole(value: Any) -> int:
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"got {value!r}")
    return int(number)
