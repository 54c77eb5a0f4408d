"""What is known to be missing of a run file: the records after the instant at which its writer was
killed, or a cut.

A load run that ended has written so into its header, with the number of its records. A gateway's
run file says neither: it grows until the gateway ends, and a cut shows only in a last line that is
incomplete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from policies.text import counted
from queueing.measurement.record import Header, Record


def missing_records(
    header: Header, records: Sequence[Record], *, cut: bool = False
) -> tuple[str, ...]:
    """One sentence for each thing that is missing or too much; `cut`: the last line was
    incomplete and is left out.
    """
    told = tuple(header.configuration.get("missing") or ())
    found = (*told, *_fewer(header, len(records), cut, told))
    repeated = sum(count > 1 for count in Counter(record.request_id for record in records).values())
    return (
        (
            *found,
            (
                f"request ids with more than one record: {repeated}; the file is damaged, or "
                "joined from several"
            ),
        )
        if repeated
        else found
    )


def _fewer(header: Header, number: int, cut: bool, told: Sequence[str]) -> Sequence[str]:
    asked, written, ended = (
        _count(header, "num_prompts"),
        _count(header, "recorded"),
        header.configuration.get("interrupted"),
    )
    if header.writer == "load" and ended is None and number < asked:
        return (
            f"the run was killed, or is still running: {number:,} of {counted(asked, 'request')} "
            "recorded",
        )
    whole = written or (0 if told or ended else asked)
    if header.writer == "load" and ended is not None and number < whole:
        return (f"the file was cut: {number} of {whole} requests are in it",)
    return (
        (
            "the file was cut: its last line is incomplete and left out; "
            f"{counted(number, 'record')} before it",
        )
        if cut
        else ()
    )


def _count(header: Header, name: str) -> int:
    value: Any = header.configuration.get(name)
    return value if isinstance(value, int) else 0


def incomplete(header: Header, records: Sequence[Record], *, cut: bool = False) -> tuple[str, ...]:
    """How a run was interrupted, if it was, and what is missing."""
    missing = missing_records(header, records, cut=cut)
    if header.configuration.get("interrupted") is not True:
        return missing
    return (interruption(header, records, cut=bool(missing)), *missing)


def interruption(header: Header, records: Sequence[Record], *, cut: bool = False) -> str:
    """How far a run that was interrupted had come. `cut`: records are missing, and how many were
    sent is not known.
    """
    asked = _count(header, "num_prompts") or len(records)
    if cut:
        return f"interrupted before all {asked:,} requests were sent"
    return (
        f"interrupted: {sum(record.sent_at is not None for record in records):,} of "
        f"{counted(asked, 'request')} sent"
    )
