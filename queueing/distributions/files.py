"""Output token counts from a file: numbers, CSV, JSON lines or a run file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kendall.policies.arguments import short_repr
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import cut_run_of

FIELD = "output_tokens"
CSV, LINES = (
    f"a CSV file with a column {FIELD} (or one column only)",
    f"JSON lines with a field {FIELD}",
)
FORMS = f"whole numbers >= 1: one per line, {CSV}, {LINES}, or a run file"


def read_counts(path: Path) -> list[int]:
    """The counts of a file, in its order; a request that made no token has no length to learn from
    and is left out.

    Raises SpecError: not readable, not whole numbers, no such column, none left.
    """
    try:
        counts = list(_counts(path))
    except OSError as error:
        raise SpecError(
            f"got path={path}: {error.strerror}; expected a file with {FORMS}"
        ) from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise SpecError(f"got path={path}: {error}; expected {FORMS}") from None
    if not any(counts):
        raise SpecError(
            f"got path={path}: {'only counts of 0' if counts else 'no counts'}; expected {FORMS}"
        )
    return [count for count in counts if count]


def _counts(path: Path) -> Iterator[int]:
    text = path.read_text(encoding="utf-8-sig")
    first = text.lstrip().partition("\n")[0]
    if not first.startswith("{"):
        return _from_csv(text)
    header: Any = msgspec.json.decode(first)
    if isinstance(header, dict) and "writer" in header:
        return (record.output_tokens or 0 for record in cut_run_of(text.encode(), path)[1])
    return _from_json_lines(text)


def _from_csv(text: str) -> Iterator[int]:
    reader = csv.reader(text.splitlines())
    rows = [
        (reader.line_num, cells) for row in reader if any(cells := [cell.strip() for cell in row])
    ]
    if not rows:
        return
    first = rows[0][1]
    header: list[str] | None = None
    try:
        list(map(float, first))
    except ValueError:
        header = rows.pop(0)[1]
    if header and not rows:
        raise ValueError(f"no counts, only {short_repr(','.join(header))}")
    if header and FIELD in header:
        column = header.index(FIELD)
    elif len(first) == 1:
        column = 0
    else:
        raise ValueError(
            f"got {len(first)} columns ({', '.join(header) if header else 'no header'})"
        )
    for line, row in rows:
        if column >= len(row):
            raise ValueError(f"line {line} has no {FIELD}")
        yield _count(row[column], line)


def _from_json_lines(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value: Any = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(value, dict) or FIELD not in value:
            raise ValueError(f"line {number} has no field {FIELD}")
        if value[FIELD] is not None:  # a request that was lost
            yield _count(value[FIELD], number)


def _count(value: Any, line: int) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"line {line} has {short_repr(value)}")
    return int(number)
