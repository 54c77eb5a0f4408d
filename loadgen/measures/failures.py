"""How many requests of a load run failed, when the first one did, and whether that is more than was
allowed.

Failed are requests that the server answered with an error, with 503 (it could not serve anybody) or
not in full, and those without an answer within `--drain-limit`. Rejected (429) and abandoned (out
of patience) are none: the server has decided about the request, and what it decided is what the run
measures. Requests cut short by an interrupted run, and those whose client was to hang up
(--cancel), count as neither.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np

from kendall.loadgen.measures.goodput import share_interval
from kendall.loadgen.measures.metrics import began_at
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.measurement.record import Outcome, Record

ALLOWED = 0.01  # share of the requests
OK, UNAVAILABLE = 200, 503
NO_WHOLE_ANSWER = "none"  # in the place of a status
_STATUS = re.compile(r"([1-5]\d\d)(?: |$)")  # an error of the client begins with the answer's
BURSTS, LONG = 10, 2.0  # fewer bursts, longer by this factor than of independent requests: a few
_PHRASES = {status.phrase: status.value for status in HTTPStatus}  # all that vLLM's file keeps
REFUSED = ("rejected", "abandoned")
HUNG_UP = "the client hung up"  # error of a request that was to be cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailures:
    """Failures among the requests that have an outcome."""

    requests: int
    failed: int
    refused: int  # rejected or abandoned by the server
    first_at: float | None  # seconds after the first intended instant
    first_error: str | None
    allowed: float  # share
    empty: int = 0  # completed without a token

    @property
    def share(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    @property
    def too_many(self) -> bool:
        return self.share > self.allowed

    @property
    def too_many_empty(self) -> bool:
        return self.requests > 0 and self.empty / self.requests > self.allowed

    def empty_text(self) -> str:
        return (
            f"{self.empty} of {counted(self.requests, 'request')} completed without a token "
            f"({percent(self.empty / self.requests)})"
        )

    def lines(self) -> list[str]:
        lines = [f"{'failures':<14}{self.text()}"] if self.failed else []
        if self.empty:
            lines.append(f"{'empty':<14}{self.empty_text()}")
        if self.refused:
            share = (
                f"{self.refused} of {counted(self.requests, 'request')} "
                f"({percent(self.refused / self.requests)})"
            )
            lines.append(
                f"{'refused':<14}{share} rejected or abandoned by the server; durations are those "
                "of the others"
            )
        return lines

    def text(self) -> str:
        first = (
            ""
            if self.first_at is None
            else f", the first {short_number(self.first_at, 3)} s after the start"
        )
        why = f": {self.first_error}" if self.first_error else ""
        return (
            f"{self.failed} of {counted(self.requests, 'request')} failed "
            f"({percent(self.share)}){first}{why}"
        )

    def as_object(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failed": self.failed,
            "refused": self.refused,
            "empty": self.empty,
            "share": self.share,
            "allowed": self.allowed,
            "first_at": self.first_at,
            "first_error": self.first_error,
        }


def count_failures(
    records: Sequence[Record], *, cut_short: bool, allowed: float = ALLOWED
) -> RunFailures:
    """Count the failures of a run. `cut_short`: it was interrupted, and the requests that it
    cancelled say nothing about the server.
    """
    ended = _ended(records, cut_short=cut_short)
    failed = sorted(
        (record.released_at or record.sent_at or record.intended_at or 0.0, record.error or "")
        for record in ended
        if is_failure(record)
    )
    began = min((at for record in records if (at := began_at(record)) is not None), default=0.0)
    return RunFailures(
        requests=len(ended),
        failed=len(failed),
        refused=sum(record.outcome in REFUSED and not is_failure(record) for record in ended),
        first_at=failed[0][0] - began if failed else None,
        first_error=failed[0][1] or None if failed else None,
        allowed=allowed,
        empty=sum(record.outcome == "completed" and record.output_tokens == 0 for record in ended),
    )


def _ended(records: Sequence[Record], *, cut_short: bool) -> list[Record]:
    """Those whose end was the server's."""
    return [
        record
        for record in records
        if not (hung_up(record) or (cut_short and record.outcome == "cancelled"))
    ]


def hung_up(record: Record) -> bool:
    """Whether its client hung up as it was to do."""
    return record.outcome == "cancelled" and record.error == HUNG_UP


def is_failure(record: Record) -> bool:
    """Whether the server is to blame that there was no answer."""
    if hung_up(record):
        return False
    unavailable = record.outcome == "rejected" and status_of(record) == UNAVAILABLE
    return record.outcome in ("failed", "cancelled") or unavailable


def outcome_of(record: Record) -> Outcome:
    """The outcome as a run counts it: 503 is a failure, though the record says rejected, as the
    gateway's own record of a request that came while it drained does.
    """
    return "failed" if record.outcome == "rejected" and is_failure(record) else record.outcome


def status_of(record: Record) -> int | None:
    """The HTTP status of its answer; None where no whole answer came: the connection failed or
    broke, or the answer did not end in time.
    """
    if record.outcome == "completed":
        return OK
    error = record.error or ""
    found = _STATUS.match(error)
    return int(found[1]) if found else _PHRASES.get(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCount:
    """Requests with one status, their share of those that ended, and its 95 % interval."""

    requests: int
    share: float
    low: float | None  # None of a status that came in a few bursts: the next run has other bursts
    high: float | None


def status_counts(records: Sequence[Record], *, cut_short: bool) -> dict[str, StatusCount]:
    """By status in ascending order, then NO_WHOLE_ANSWER; of records in the order of sending.
    `cut_short`: as in `count_failures`.
    """
    ended = _ended(records, cut_short=cut_short)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, record in enumerate(ended):
        status = status_of(record)
        rows[NO_WHOLE_ANSWER if status is None else str(status)].append(row)
    counts = {}
    for name in sorted(rows):
        has, requests = np.zeros(len(ended)), len(rows[name])
        has[rows[name]] = 1.0
        share, low, high, _ = share_interval(has)
        bursts = np.count_nonzero(np.diff(has, prepend=0.0) > 0)
        independent = 1 / (1 - share) if share < 1 else math.inf  # mean length of a burst then
        a_few = bursts < BURSTS and requests / bursts > LONG * independent
        counts[name] = StatusCount(
            requests=requests,
            share=share,
            low=None if a_few else low,
            high=None if a_few else high,
        )
    return counts


def parse_share(flag: str, value: float) -> float:
    """Check a fraction. Raises SpecError."""
    if not 0 <= value <= 1:
        raise SpecError(
            f"got {flag} {value:g}; expected a fraction between 0 and 1, for example 0.01"
        )
    return value


def percent(share: float) -> str:
    """A share with three digits."""
    return f"{share * 100:.3g} %"
