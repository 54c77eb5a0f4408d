"""The trace formats, each a reader of (instant, prompt tokens, output tokens, predicted output
tokens) from a file.

    azure      CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces 2023 and
               2024): dates with up to 9 fractional digits, in UTC unless they name a time zone
    burstgpt   CSV with the columns `Timestamp`, `Request tokens`, `Response tokens` (BurstGPT,
               every release): seconds
    mooncake   JSON lines `{"timestamp": ms, "input_length": n, "output_length": n}`
               (Mooncake, and the like), with `hash_ids` of the prompt's blocks of 512 tokens:
               equal ids are equal text after equal text
    bailian    the same fields and `chat_id` (Qwen-Bailian traces), but the timestamp in seconds
               and blocks of 16 tokens
    run        a run file of this program: the intended instant, or the arrival where there is none
    timetable  a saved timetable

Columns are found by their names, whatever stands between them. An instant of a CSV file is a whole
number of nanoseconds (a float64 of seconds since 1970 would be wrong by 100 of them), else a number
of the format's own unit.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import HASH_IDS, load_timetable
from kendall.queueing.measurement.record import read_run, shown, unmarked

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


class Row(NamedTuple):
    """One request of a trace; 0 tokens where the request failed or the count is not known."""

    at: float  # an int in CSV formats
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: float | None = None
    flow: str | None = None  # whose it is
    hash_ids: tuple[int, ...] | None = None  # of the blocks of its prompt


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How a kind of trace is read."""

    read: Callable[[Path], Iterator[Row]]
    per_second: float  # units of `Row.at` in a second
    # the first arrival is instant 0: the origin of the file's clock means nothing
    from_first: bool = True
    block_tokens: int | None = None  # of a block with a hash id


def _csv_rows(path: Path, columns: Sequence[str], instant: Callable[[str], float]) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        header = [name.strip() for name in next(lines, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise SpecError(
                f"{path}, line 1: got the columns {', '.join(header)}; expected {missing[0]} too"
            )
        at, prompt, output = (header.index(name) for name in columns)
        for cells in lines:
            if not cells:
                continue
            try:
                yield Row(instant(cells[at]), whole(cells[prompt]), whole(cells[output]))
            except (ValueError, IndexError) as error:
                raise bad_line(
                    path, lines.line_num, ",".join(cells), ",".join(columns), error
                ) from None


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row: Any = msgspec.json.decode(unmarked(line) if number == 1 else line)
                    yield Row(
                        finite(row["timestamp"]),
                        whole(row["input_length"]),
                        whole(row["output_length"]),
                        hash_ids=_hash_ids(row.get("hash_ids")),
                    )
                except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
                    got = line.decode(errors="replace").strip()
                    raise bad_line(
                        path, number, got, f"an object with {', '.join(MOONCAKE)}", error
                    ) from None


def _hash_ids(value: Any) -> tuple[int, ...] | None:
    """Raises ValueError, TypeError."""
    if value is None:
        return None
    ids = tuple(map(whole, value))
    if any(number >= HASH_IDS for number in ids):
        raise ValueError(f"a hash id of {max(ids)} is not below 2**62")
    return ids


def _run(path: Path) -> Iterator[Row]:
    for record in read_run(path)[1]:
        at = record.arrived_at if record.intended_at is None else record.intended_at
        if at is None:
            raise SpecError(
                f"{path}: got request {record.request_id} without an instant; expected "
                "intended_at or arrived_at"
            )
        yield Row(
            at,
            record.prompt_tokens or 0,
            record.output_tokens or 0,
            record.predicted_output_tokens,
            record.flow,
        )


def _timetable(path: Path) -> Iterator[Row]:
    columns = load_timetable(path)[1].columns()
    columns = {name: columns[name] for name in columns if name in TIMETABLE_COLUMNS}
    names = ["at" if name == "intended_at" else name for name in columns]
    for values in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield Row(**dict(zip(names, values, strict=True)))


# a trace is arrivals and lengths; the rest of a saved timetable is for --timetable
TIMETABLE_COLUMNS = frozenset({"intended_at", *Row._fields})

FORMATS = {
    "azure": TraceFormat(lambda path: _csv_rows(path, AZURE, nanoseconds), 1e9),
    "burstgpt": TraceFormat(lambda path: _csv_rows(path, BURSTGPT, decimal_nanoseconds), 1e9),
    "mooncake": TraceFormat(_json_lines, 1e3, block_tokens=512),
    "bailian": TraceFormat(_json_lines, 1.0, block_tokens=16),
    "run": TraceFormat(_run, 1.0),
    "timetable": TraceFormat(_timetable, 1.0, from_first=False),
}


def detect(path: Path) -> str:
    """The kind of a trace, by its first line. Raises SpecError where it is none."""
    with path.open("rb") as file:
        first = unmarked(file.readline()).strip()
    if first.startswith(b"{"):
        try:
            fields: Any = msgspec.json.decode(first)
        except msgspec.MsgspecError:
            fields = {}
        if "writer" in fields:
            return "timetable" if fields["writer"] == "timetable" else "run"
        names, known = set(fields), {"bailian": ("chat_id", *MOONCAKE), "mooncake": MOONCAKE}
    else:
        names, known = (
            {name.strip() for name in first.decode(errors="replace").split(",")},
            {"azure": AZURE, "burstgpt": BURSTGPT},
        )
    for kind, columns in known.items():
        if names.issuperset(columns):
            return kind
    raise SpecError(
        f"{path}, line 1: got {shown(first)}; expected the first line of one of "
        f"{', '.join(FORMATS)}"
    )


def nanoseconds(text: str) -> int:
    """A date, in nanoseconds since 1970, exactly. Raises ValueError."""
    match = _DATE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a date such as 2023-11-16 18:15:46.6805900")
    seconds, fraction, zone = match.groups()
    at = datetime.fromisoformat(seconds + (zone or ""))
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return int(at.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))


def decimal_nanoseconds(text: str) -> int:
    """Seconds in decimal digits as nanoseconds, exactly. Raises ValueError."""
    try:
        value = Decimal(text.strip()) * 10**9
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not (value.is_finite() and abs(value) < 2**63):
        raise ValueError(
            f"{text!r} is not a number of seconds, or beyond what nanoseconds can hold"
        )
    return round(value)


def finite(value: Any) -> float:
    """A finite number. Raises ValueError or TypeError."""
    number = _number(value)
    if not abs(number) < float("inf"):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def whole(value: Any) -> int:
    """A whole number >= 0. Raises ValueError or TypeError."""
    number = _number(value)
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"{value!r} is not a number of tokens")
    return int(number)


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def bad_line(path: Path, number: int, got: str, expected: str, error: Exception) -> SpecError:
    """The complaint about one line of a file."""
    return SpecError(f"{path}, line {number}: got {got[:80]!r}; expected {expected} ({error})")
