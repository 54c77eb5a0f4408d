"""Arrivals of a run file, ready to be judged: the instants, what they were asked to be, the
timetable where it is known.

Of a load generator's run these are the instants of sending, held against those at which a request
could be sent: where a limit on the requests at once has held some back, the stream is judged by its
timetable and those waits are no lateness; requests that were all due at once are judged by their
order. Of a gateway's the instants at which the kernel had the requests (else those at which they
were read); of a simulation's the arrivals. One call of several sequences is one arrival. The epochs
of a gateway, its policies, are judged one by one. A gateway's run beside the load generator's that
fed it is held against the timetable too: on one machine both read the same clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kendall.loadgen.compare.epoch_sample import timetable_of
from kendall.loadgen.measures.metrics import due_at
from kendall.loadgen.measures.missing import incomplete
from kendall.loadgen.sending.job import row_of
from kendall.policies.text import short_number
from kendall.queueing.arrivals.text import EXAMPLES
from kendall.queueing.measurement.arrival_audit import SIGNIFICANCE, Audit, Budget, audit_arrivals
from kendall.queueing.measurement.arrival_tests import FloatArray
from kendall.queueing.measurement.record import Header, Record

ALL_AT_ONCE, PARTLY_CLOSED = (
    "all at once",
    "partly closed",
)  # what arrivals are asked to be, beside the names of processes
PROCESSES = (*EXAMPLES, "trace", "closed loop", ALL_AT_ONCE, PARTLY_CLOSED)
ALL_AT_ONCE_TEXT = "poisson:rate=inf"
# seconds between timetable and arrival beyond which two clocks differ, not a sender is late
FAR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The arrivals of one run, or of one epoch of a gateway's."""

    name: str
    instants: FloatArray
    what: str  # which instants: sent, received, arrived
    asked_rate: float | None = None  # per second
    process: str = "poisson"
    intended: FloatArray | None = None
    incomplete: tuple[str, ...] = ()  # how the run or its file was cut short, a sentence each
    # of requests due at once: whether each sender sent them in the order of the timetable
    in_order: bool | None = None

    def audit(self, significance: float = SIGNIFICANCE, budget: Budget | None = None) -> Audit:
        """Judge it; requests due at once by their order alone."""
        audit = audit_arrivals(
            self.instants,
            asked_rate=self.asked_rate,
            intended=self.intended,
            process=self.process,
            significance=significance,
            budget=budget,
        )
        if self.in_order is None:
            return audit
        within = f"in the order of the timetable, within {short_number(audit.span, 3)} s"
        other = "requests left in another order than the timetable's"
        return dataclasses.replace(
            audit,
            verdict=f"as asked ({ALL_AT_ONCE}): {within}"
            if self.in_order
            else f"not as asked ({ALL_AT_ONCE}): {other}",
            reasons=() if self.in_order else (other,),
            valid=self.in_order,
            lateness=None,
        )

    def planned(self, significance: float = SIGNIFICANCE) -> Audit:
        """The audit of the timetable itself: what chance has drawn is not the sender's doing."""
        assert self.intended is not None
        return audit_arrivals(
            self.intended,
            asked_rate=self.asked_rate,
            process=self.process,
            significance=significance,
        )


def instant_of(record: Record) -> float | None:
    """The earliest instant at which a gateway had the request; a simulation's only one."""
    return record.arrived_at if record.received_at is None else record.received_at


def streams_of(runs: Sequence[tuple[Path, Header, list[Record], bool]]) -> list[Stream]:
    """Every stream of arrivals in the files, each with whether its last line was cut. Raises
    ValueError naming a file without any.
    """
    sent = [(header, records) for _, header, records, _ in runs if header.writer == "load"]
    every: list[Stream] = []
    for path, header, records, cut in runs:
        streams = (
            [sent_stream(path.name, header, records)]
            if header.writer == "load"
            else list(_received_streams(path, header, records, sent))
        )
        if not any(stream.instants.size for stream in streams):
            raise ValueError(
                f"{path}: got no instant of sending or of arrival; expected a run file with at "
                "least one request"
            )
        every += [
            dataclasses.replace(stream, incomplete=incomplete(header, records, cut=cut))
            for stream in streams
        ]
    return every


def asked(configuration: Mapping[str, Any]) -> tuple[str, float | None]:
    """Process and rate per second that a header names; Poisson where it names none, as `vllm
    bench serve` means it.
    """
    process = str(configuration.get("arrivals") or "poisson").partition(":")[0]
    rate = configuration.get("request_rate")
    known = (
        float(rate) if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0 else None
    )
    if configuration.get("trace") or configuration.get("loop") == "closed":
        return "trace" if configuration.get("trace") else "closed loop", None
    if process == "poisson" and configuration.get("burstiness") not in (None, 1, 1.0):
        return "gamma", known
    # JSON has no infinity
    at_once = rate in (math.inf, "inf") or configuration.get("arrivals") == ALL_AT_ONCE_TEXT
    return (ALL_AT_ONCE, None) if at_once else (process, known)


def asked_of(header: Header, sent: Iterable[Record]) -> tuple[str, float | None]:
    """Process and rate of a run that may have held requests back."""
    process, rate = asked(header.configuration)
    held = process != ALL_AT_ONCE and any(record.held_until is not None for record in sent)
    return (PARTLY_CLOSED, None) if held else (process, rate)


def sent_stream(name: str, header: Header, records: Iterable[Record]) -> Stream:
    """The arrivals that a load generator sent; of conversations their first turns, as the others
    wait for answers.
    """
    sent = [record for record in records if record.sent_at is not None and record.turn in (None, 1)]
    process, rate = asked_of(header, sent)
    due = [at for record in sent if (at := due_at(record)) is not None]
    intended = _array(due) if due and len(due) == len(sent) else None
    if process == ALL_AT_ONCE:
        by_sender: dict[int | None, list[float]] = {}  # several do not wait for one another
        for record in sorted(sent, key=row_of):
            by_sender.setdefault(record.sender_id, []).append(record.sent_at or 0.0)
        in_order = None
        if intended is not None:
            in_order = all(
                earlier <= later
                for instants in by_sender.values()
                for earlier, later in pairwise(instants)
            )
        return Stream(
            name=name, instants=_instants(sent), what="sent", process=process, in_order=in_order
        )
    return Stream(
        name=name,
        instants=_instants(sent),
        what="sent",
        asked_rate=rate,
        process=process,
        intended=intended,
    )


def _instants(sent: Iterable[Record]) -> FloatArray:
    return _array(record.sent_at for record in sent if record.sent_at is not None)


def _received_streams(
    path: Path,
    header: Header,
    records: Iterable[Record],
    sent: Sequence[tuple[Header, list[Record]]],
) -> Iterator[Stream]:
    """The arrivals that a gateway received, or a simulation had, epoch by epoch."""
    epochs: dict[int, dict[str, Record]] = {}  # the first sequence of each call
    for record in records:
        if instant_of(record) is not None:
            call = record.request_id
            if header.writer == "gateway":
                call = call.rpartition("-")[0]
            epochs.setdefault(record.epoch or 0, {}).setdefault(call, record)
    for epoch, first in sorted(epochs.items()):
        calls = list(first.values())
        instants = _array(at for record in calls if (at := instant_of(record)) is not None)
        (process, rate), intended = asked(header.configuration), None
        for other, rows in sent:  # the load generator's run that sent all these calls
            due = timetable_of(calls, rows, due_at) or {}
            if len(due) == len(calls):
                process, rate = asked_of(other, rows)
                intended = _array(due[record.request_id] for record in calls)
                break
        if intended is not None and (
            process == ALL_AT_ONCE or abs(float(np.median(instants - intended))) > FAR
        ):
            intended = None
        yield Stream(
            name=path.name if len(epochs) == 1 else f"{path.name}, epoch {epoch}",
            instants=instants,
            what="received" if all(r.received_at is not None for r in calls) else "arrived",
            asked_rate=rate,
            process=process,
            intended=intended,
        )


def _array(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, dtype=np.float64)
