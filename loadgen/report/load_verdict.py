"""Whether a load run was the run that was asked for: what failed, what it sent, how late, and what
is missing.

A run is INVALID for one reason or several. Too many requests failed: its durations are those of the
survivors. Its arrivals are not the process that was asked for, or its sender was late: its delays
are partly those of the sender's machine. Records are missing, or contradict Little's law. Waiting
for a place among the requests at once is no lateness; requests due at once are judged by their
order and their number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from loadgen.measures.failures import ALLOWED, RunFailures, count_failures, percent
from loadgen.measures.little_check import LittleCheck
from loadgen.measures.missing import interruption
from loadgen.report.audit import ALL_AT_ONCE, Stream, sent_stream
from loadgen.sending.run import LoadResult
from policies.durations import seconds_or_nan
from policies.text import SpecError, counted, short_number
from queueing.measurement.arrival_audit import Audit, Budget

BUDGET = Budget(mean=0.001, p99=0.005)  # seconds
_PART = re.compile(r"(mean|p99)=(.+)")


def parse_budget(text: str) -> Budget:
    """`mean=1ms,p99=5ms`; what is left out stays as it is by default. Raises SpecError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        seconds = math.nan if match is None else seconds_or_nan(match[2])
        if match is None or not 0 < seconds < math.inf:
            raise SpecError(f"got lateness budget {text!r}; expected for example mean=1ms,p99=5ms")
        found[match[1]] = seconds
    return Budget(mean=found.get("mean", BUDGET.mean), p99=found.get("p99", BUDGET.p99))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is INVALID."""

    of: Literal["failures", "arrivals", "lateness", "records", "wrong", "interrupted"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerdict:
    """What is said of a run as a whole."""

    audit: Audit | None  # of the instants of sending; None where nothing was sent
    loop: str  # open | partly closed | closed
    held: int  # requests that waited for a place
    held_for: float  # seconds, their mean wait
    missing: tuple[str, ...]
    failures: RunFailures
    reasons: tuple[Reason, ...]

    @property
    def valid(self) -> bool:
        """Whether it was the run that was asked for."""
        return not self.reasons

    def invalid_for(self, *kinds: str) -> bool:
        """Whether one of the reasons is of these kinds."""
        return any(reason.of in kinds for reason in self.reasons)

    def lines(self) -> list[str]:
        """For a terminal, without the word INVALID."""
        told = [] if self.audit is None else [f"{'arrivals':<14}{self.audit.verdict}"]
        if self.loop != "open":
            told.append(f"{'loop':<14}{self._loop()}")
        return (
            told
            + self.failures.lines()
            + [f"{'missing':<14}{sentence}" for sentence in self.missing]
        )

    def _loop(self) -> str:
        if self.loop == "closed":
            return (
                "closed: users wait for their answers, so a slow server receives fewer "
                "requests and its delay looks shorter"
            )
        return (
            f"partly closed: {counted(self.held, 'request')} waited for a place, "
            f"{short_number(self.held_for, 3)} s on average; the wait counts in their delay, not "
            "as lateness of the sender"
        )

    def why_invalid(self) -> list[str]:
        """One line for each reason."""
        return [f"INVALID: {reason.text}" for reason in self.reasons]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "valid": self.valid,
            "reasons": [reason.text for reason in self.reasons],
            "failures": self.failures.as_object(),
            "loop": self.loop,
            "held": self.held,
            "missing": self.missing,
            "arrival_audit": None if self.audit is None else asdict(self.audit),
        }


def judge(
    result: LoadResult,
    *,
    budget: Budget = BUDGET,
    max_failed: float = ALLOWED,
    little: LittleCheck | None = None,
) -> LoadVerdict:
    """Of a run, by what its header says was asked for; `max_failed` is a share of the requests,
    `little` the summary's check.
    """
    closed = result.header.configuration.get("loop") == "closed"
    stream = sent_stream("run", result.header, result.records)
    audit = stream.audit(budget=budget) if stream.instants.size else None
    waits = [
        record.held_until - record.intended_at
        for record in result.records
        if record.held_until and record.intended_at
    ]
    failures = count_failures(
        result.records, cut_short=result.interrupted or bool(result.missing), allowed=max_failed
    )
    return LoadVerdict(
        audit=audit,
        loop="closed" if closed else "partly closed" if result.held else "open",
        held=result.held,
        held_for=sum(waits) / len(waits) if waits else 0.0,
        missing=result.missing,
        failures=failures,
        reasons=(*_law(little), *_reasons(result, stream, audit, failures)),
    )


def _reasons(
    result: LoadResult, stream: Stream, audit: Audit | None, failures: RunFailures
) -> Iterator[Reason]:
    yield from _server_reasons(failures)
    yield from _record_reasons(result)
    if audit is None:
        yield Reason("records", "nothing was sent")
        return
    if not any(record.outcome == "completed" for record in result.records):
        yield Reason("records", "no request completed")
    unsent = [record for record in result.records if record.sent_at is None]
    if stream.process == ALL_AT_ONCE and unsent and not result.interrupted:
        yield Reason(
            "records", f"{len(unsent)} of {counted(len(result.records), 'request')} not sent"
        )
    if audit.valid is False:
        yield Reason("lateness", _too_late(audit))
    if strange(audit, stream):
        yield Reason("arrivals", f"arrivals are {audit.verdict}")


def _law(little: LittleCheck | None) -> Iterator[Reason]:
    if little is not None and not little.holds:
        yield Reason(
            "wrong",
            (
                f"Little's law is off by {short_number(abs(little.residual))} requests in the "
                "system: the records are wrong"
            ),
        )


def _server_reasons(failures: RunFailures) -> Iterator[Reason]:
    if failures.too_many:
        yield Reason(
            "failures",
            f"{failures.text()}; --max-failed-fraction allows {percent(failures.allowed)}",
        )
    if failures.too_many_empty:
        yield Reason(
            "failures",
            f"{failures.empty_text()}; --max-failed-fraction allows {percent(failures.allowed)}",
        )


def _record_reasons(result: LoadResult) -> Iterator[Reason]:
    if result.interrupted:
        yield Reason(
            "interrupted", interruption(result.header, result.records, cut=bool(result.missing))
        )
    if result.missing:
        yield Reason("records", f"records are missing or repeated: {'; '.join(result.missing)}")


def _too_late(audit: Audit) -> str:
    late = audit.lateness
    if late is None:
        return audit.reasons[0]
    found = f"mean {short_number(late.mean * 1e3, 3)} ms, p99 {short_number(late.p99 * 1e3, 3)} ms"
    return (
        f"lateness {found}; the budget is mean {late.budget.mean * 1e3:g} ms, p99 "
        f"{late.budget.p99 * 1e3:g} ms"
    )


def strange(audit: Audit, stream: Stream) -> bool:
    """Whether the sender has made other arrivals than those it was to make: one in 100
    timetables fails its audit by chance.
    """
    if audit.poisson is not False:
        return False
    planned = stream.planned() if stream.intended is not None else None
    by_chance = {test.name for test in planned.tests if not test.holds} if planned else set()
    return not audit.tests or not {test.name for test in audit.tests if not test.holds} <= by_chance
