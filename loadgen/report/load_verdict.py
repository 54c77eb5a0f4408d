"""The verdict on a load run, whether it was the run that was asked for: what failed, what it sent,
how late, and what is missing.

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

from kendall.loadgen.measures.failures import ALLOWED, RunFailures, count_failures, percent
from kendall.loadgen.measures.little_check import LittleCheck
from kendall.loadgen.measures.missing import interruption
from kendall.loadgen.report.audit import ALL_AT_ONCE, Stream, sent_stream
from kendall.loadgen.sending.run import LoadResult
from kendall.policies.durations import seconds_or_nan
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.measurement.arrival_audit import Audit, Budget

BUDGET = Budget(mean=0.001, p99=0.005)  # seconds
_PART = re.compile(r"(mean|p99)=(.+)")


def parse_budget(text: str) -> Budget:
    """`mean=1ms,p99=5ms`; what is left out stays as it is by default. Raises SpecError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        seconds = math.nan if match is None else seconds_or_nan(match[2])
        if match is None or not 0 < seconds < math.inf:
            raise SpecError(f"got lateness budget {text!r}; expected for example mean=1ms,p99=5ms")
        limits[match[1]] = seconds
    return Budget(mean=limits.get("mean", BUDGET.mean), p99=limits.get("p99", BUDGET.p99))


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason that makes a run INVALID."""

    of: Literal["failures", "arrivals", "lateness", "records", "wrong", "interrupted"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerdict:
    """The verdict on a run as a whole."""

    audit: Audit | None  # of the instants of sending; None where nothing was sent
    loop: str  # open | partly closed | closed
    held: int  # requests that waited for a place
    held_for: float  # seconds, their mean wait
    missing: tuple[str, ...]
    failures: RunFailures
    reasons: tuple[Reason, ...]

    @property
    def valid(self) -> bool:
        """True where it was the run that was asked for."""
        return not self.reasons

    def invalid_for(self, *kinds: str) -> bool:
        """True where one of the reasons is of these kinds."""
        return any(reason.of in kinds for reason in self.reasons)

    def lines(self) -> list[str]:
        """The lines for a terminal, without the word INVALID."""
        lines = [] if self.audit is None else [f"{'arrivals':<14}{self.audit.verdict}"]
        if self.loop == "closed":
            lines.append(
                f"{'loop':<14}closed: users wait for their answers, so a slow server receives "
                "fewer requests and its delay looks shorter"
            )
        elif self.loop != "open":
            lines.append(
                f"{'loop':<14}partly closed: {counted(self.held, 'request')} waited for a place, "
                f"{short_number(self.held_for, 3)} s on average; the wait counts in their delay, "
                "not as lateness of the sender"
            )
        missing = [f"{'missing':<14}{sentence}" for sentence in self.missing]
        return lines + self.failures.lines() + missing

    def why_invalid(self) -> list[str]:
        """One line for each reason."""
        return [f"INVALID: {reason.text}" for reason in self.reasons]

    def as_object(self) -> dict[str, Any]:
        """The verdict as JSON has it."""
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
    """Judge a run by what its header says was asked for; `max_failed` is a share of the requests,
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
        reasons=tuple(_reasons(result, stream, audit, failures, little)),
    )


def _reasons(
    result: LoadResult,
    stream: Stream,
    audit: Audit | None,
    failures: RunFailures,
    little: LittleCheck | None,
) -> Iterator[Reason]:
    if little is not None and not little.holds:
        off = short_number(abs(little.residual))
        text = f"Little's law is off by {off} requests in the system: the records are wrong"
        yield Reason("wrong", text)
    allowed = f"--max-failed-fraction allows {percent(failures.allowed)}"
    if failures.too_many:
        yield Reason("failures", f"{failures.text()}; {allowed}")
    if failures.too_many_empty:
        yield Reason("failures", f"{failures.empty_text()}; {allowed}")
    if result.interrupted:
        cut = bool(result.missing)
        yield Reason("interrupted", interruption(result.header, result.records, cut=cut))
    if result.missing:
        yield Reason("records", f"records are missing or repeated: {'; '.join(result.missing)}")
    if audit is None:
        yield Reason("records", "nothing was sent")
        return
    yield from _sending_reasons(result, stream, audit)


def _sending_reasons(result: LoadResult, stream: Stream, audit: Audit) -> Iterator[Reason]:
    if not any(record.outcome == "completed" for record in result.records):
        yield Reason("records", "no request completed")
    unsent = [record for record in result.records if record.sent_at is None]
    if stream.process == ALL_AT_ONCE and unsent and not result.interrupted:
        yield Reason(
            "records", f"{len(unsent)} of {counted(len(result.records), 'request')} not sent"
        )
    if audit.valid is False and (late := audit.lateness) is not None:
        times = f"mean {short_number(late.mean * 1e3, 3)} ms, p99 {short_number(late.p99 * 1e3, 3)}"
        budget = f"mean {late.budget.mean * 1e3:g} ms, p99 {late.budget.p99 * 1e3:g} ms"
        yield Reason("lateness", f"lateness {times} ms; the budget is {budget}")
    elif audit.valid is False:
        yield Reason("lateness", audit.reasons[0])
    if strange(audit, stream):
        yield Reason("arrivals", f"arrivals are {audit.verdict}")


def strange(audit: Audit, stream: Stream) -> bool:
    """True where the sender has made other arrivals than those it was to make: one in 100
    timetables fails its audit by chance.
    """
    if audit.poisson is not False:
        return False
    planned = stream.planned() if stream.intended is not None else None
    by_chance = {test.name for test in planned.tests if not test.holds} if planned else set()
    return not audit.tests or not {test.name for test in audit.tests if not test.holds} <= by_chance
