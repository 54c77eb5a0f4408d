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

from kendall.policies.text import counted
from kendall.queueing.measurement.record import Header, Record


def missing_records(
    header: Header, records: Sequence[Record], *, cut: bool = False
) -> tuple[str, ...]:
    """One sentence for each thing that is missing or too much; `cut`: the last line was
    incomplete and is left out.
    """
    missing = list(header.configuration.get("missing") or ())
    number, asked = len(records), _count(header, "num_prompts")
    ended = header.configuration.get("interrupted")
    whole = _count(header, "recorded") or (0 if missing or ended else asked)
    if header.writer == "load" and ended is None and number < asked:
        missing.append(
            f"the run was killed, or is still running: {number:,} of {counted(asked, 'request')} "
            "recorded"
        )
    elif header.writer == "load" and ended is not None and number < whole:
        missing.append(f"the file was cut: {number} of {whole} requests are in it")
    elif cut:
        missing.append(
            "the file was cut: its last line is incomplete and left out; "
            f"{counted(number, 'record')} before it"
        )
    repeated = sum(count > 1 for count in Counter(record.request_id for record in records).values())
    if repeated:
        missing.append(
            f"request ids with more than one record: {repeated}; the file is damaged, or joined "
            "from several"
        )
    return tuple(missing)


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
