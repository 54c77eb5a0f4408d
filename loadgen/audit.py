"""Arrivals of a run file, ready to be judged: the instants, what they were asked to be, the timetable where it is known.

Of a load generator's run these are the instants of sending; of a gateway's the instants at which the kernel had the
requests (else those at which they were read); of a simulation's the arrivals. One call of several sequences is one
arrival. The epochs of a gateway, its policies, are judged one by one. A gateway's run beside the load generator's that
fed it is held against the timetable too: on one machine both read the same clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.group import timetable_of
from queueing.arrival_audit import SIGNIFICANCE, Audit, Budget, audit_arrivals
from queueing.arrival_tests import FloatArray
from queueing.record import Header, Record

FAR = 3600.0  # seconds between timetable and arrival beyond which two clocks differ, not a sender is late


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The arrivals of one run, or of one epoch of a gateway's."""

    name: str
    instants: FloatArray
    what: str  # which instants: sent, received, arrived
    asked_rate: float | None = None  # per second
    process: str = "poisson"
    intended: FloatArray | None = None

    def audit(self, significance: float = SIGNIFICANCE, budget: Budget | None = None) -> Audit:
        """Judge it."""
        return audit_arrivals(
            self.instants,
            asked_rate=self.asked_rate,
            intended=self.intended,
            process=self.process,
            significance=significance,
            budget=budget,
        )


def instant_of(record: Record) -> float | None:
    """The earliest instant at which a gateway had the request; a simulation's only one."""
    return record.arrived_at if record.received_at is None else record.received_at


def streams_of(runs: Sequence[tuple[Path, Header, list[Record]]]) -> list[Stream]:
    """Every stream of arrivals in the files. Raises ValueError naming a file without any."""
    sent = [(header, records) for _, header, records in runs if header.writer == "load"]
    found: list[Stream] = []
    for path, header, records in runs:
        streams = [_sent(path, header, records)] if header.writer == "load" else list(_seen(path, header, records, sent))
        if not any(stream.instants.size for stream in streams):
            raise ValueError(f"{path}: got no instant of sending or of arrival; expected a run file with at least one request")
        found += streams
    return found


def asked(configuration: Mapping[str, Any]) -> tuple[str, float | None]:
    """Process and rate per second that a header names; Poisson where it names none, as `vllm bench serve` means it."""
    process = str(configuration.get("arrivals") or "poisson").partition(":")[0]
    rate = configuration.get("request_rate")
    known = float(rate) if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0 else None
    if configuration.get("trace") or configuration.get("loop") == "closed":
        return "trace" if configuration.get("trace") else "closed loop", None
    if process == "poisson" and configuration.get("burstiness") not in (None, 1, 1.0):
        return "gamma", known
    return ("all at once", None) if rate in (math.inf, "inf") else (process, known)


def _sent(path: Path, header: Header, records: Iterable[Record]) -> Stream:
    process, rate = asked(header.configuration)
    rows = [(r.sent_at, r.intended_at) for r in records if r.sent_at is not None]
    planned = [intended for _, intended in rows if intended is not None]
    return Stream(
        name=path.name,
        instants=_array(at for at, _ in rows),
        what="sent",
        asked_rate=rate,
        process=process,
        intended=_array(planned) if planned and len(planned) == len(rows) else None,
    )


def _seen(path: Path, header: Header, records: Iterable[Record], sent: Sequence[tuple[Header, list[Record]]]) -> Iterator[Stream]:
    epochs: dict[int, dict[str, Record]] = {}
    for record in records:
        if instant_of(record) is not None:
            call = record.request_id.rpartition("-")[0] if header.writer == "gateway" else record.request_id
            epochs.setdefault(record.epoch or 0, {}).setdefault(call, record)
    for epoch, calls in sorted(epochs.items()):
        kept = list(calls.values())
        name = path.name if len(epochs) == 1 else f"{path.name}, epoch {epoch}"
        fed = next(((other, times) for other, rows in sent if len(times := timetable_of(kept, rows) or {}) == len(kept)), None)
        process, rate = asked((fed[0] if fed else header).configuration)
        instants = _array(at for record in kept if (at := instant_of(record)) is not None)
        intended = _array(fed[1][record.request_id] for record in kept) if fed else None
        if intended is not None and abs(float(np.median(instants - intended))) > FAR:
            intended = None
        what = "received" if all(record.received_at is not None for record in kept) else "arrived"
        yield Stream(name=name, instants=instants, what=what, asked_rate=rate, process=process, intended=intended)


def _array(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, dtype=np.float64)
