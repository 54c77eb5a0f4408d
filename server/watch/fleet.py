"""Servers that send spans, as one window: requests of every replica on one clock, in the order of
their arrivals, as far as all that arrived is known.

A span comes when its request has ended, with others of the same seconds. So the window ends
earlier: at the instant before which, by the longest stay that was seen, whatever arrived has ended
and been sent. Each replica's instants are of its own clock; they are moved by the least time that
one of its spans has taken to come here, once (`SETTLED` seconds after its first span), so that its
own durations stay as they are.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kendall.queueing.estimation.served_times import ServedTimes
from kendall.queueing.measurement.record import Record
from kendall.server.watch.spans import RequestSpan

WAITED = 0.5  # of its own step: less in the queue is no wait for a slot
KEPT = 20_000  # requests
MOST_REPLICAS = 64
SETTLED = 6.0  # seconds: two exports of OpenTelemetry's batches
EXPORTED = 6.0  # seconds after its end in which a span is sent, at least
LATER = 1.5  # times the longest time that a span has taken
RECENT = 500  # requests
HELD_BACK = 120.0  # seconds that the end of the window is before what is known, at most
JUMP = 60.0  # seconds by which a clock may be off what it was
SAME_CLOCK = 0.5  # seconds by which replicas with one clock may seem to differ
AGREEING = 10  # spans in turn that are off it alike, after which the clock is another one
GONE = 20.0  # mean times between spans without one, after which a replica is gone
SILENT = 30.0  # seconds without a span, at least
EARLY = "before_the_start"
CLOCK, CROWD, REPEATED = "clock_jumped", "too_many_replicas", "repeated"
UNUSED = {
    EARLY: "spans of requests that had ended before this watch began",
    CLOCK: f"spans of a server whose clock moved by more than {JUMP:g} s",
    CROWD: f"spans of more than {MOST_REPLICAS} servers",
    REPEATED: "spans that had come before",
}


@dataclass(slots=True)
class WatchedReplica:
    """One server; seconds."""

    name: str
    number: int
    offset_ns: int  # its clock beyond ours, less the least time that a span took until it settled
    least_ns: int  # the same of all its spans
    since: float  # its first span came
    settled: bool = False
    requests: int = 0
    last_came: float = -math.inf
    last_ended: float = -math.inf  # of its requests, on our clock
    # from the end of a request until its span came, of the last ones
    delays: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    gone: bool = False
    other_ns: int = 0  # the offset of spans that are off its clock
    others: int = 0  # such spans in turn, which agree

    def follows(self, offset_ns: int, now: float) -> bool:
        """Whether a span with this offset is of its clock, which has changed for good where
        `AGREEING` of them say so.
        """
        if abs(offset_ns - self.offset_ns) <= JUMP * 1e9:
            self.others = 0
            return True
        agrees = abs(offset_ns - self.other_ns) <= JUMP * 1e9
        self.others, self.other_ns = (self.others + 1 if agrees else 1), offset_ns
        if self.others < AGREEING:
            return False
        self.offset_ns = self.least_ns = offset_ns
        self.others, self.settled, self.since = 0, False, now
        return True

    def at(self, instant_ns: int) -> float:
        """On our clock."""
        return (instant_ns - self.offset_ns) * 1e-9

    def known_until(self, now: float) -> float:
        """Every request of it that had ended by then has been told of."""
        return max(self.last_ended, now - max(EXPORTED, LATER * max(self.delays, default=0.0)))

    def silent(self, now: float) -> bool:
        """Whether it has sent nothing for so long that it serves no more."""
        mean = (self.last_came - self.since) / max(1, self.requests - 1)
        return now - self.last_came > max(SILENT, GONE * mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """On our clock; `started` to `last`: in the engine."""

    record: Record
    arrived: float
    queued: float  # seconds
    started: float
    first: float
    last: float


@dataclass(slots=True)
class Fleet:
    """Fed with `add`; `advance` moves the end of the window. Instants are seconds of the receiver's
    clock.
    """

    replicas: dict[str, WatchedReplica] = field(default_factory=dict)
    end: float = -math.inf  # of the window
    # those whose replica's clock is not known yet, and when they came
    _waiting: list[tuple[RequestSpan, WatchedReplica, float]] = field(default_factory=list)
    _served: list[ServedRequest] = field(default_factory=list)  # by arrival
    early: int = 0  # spans from before the first export, which are not used
    known: int = 0  # requests that arrived before the end, so far
    _numbers: int = 0  # replicas so far
    # spans that came, so that one that is sent again counts once
    _known: dict[tuple[str, str, int], None] = field(default_factory=dict)
    _handed: int = 0  # of `_served`, those that arrived before the end
    _late: list[ServedRequest] = field(default_factory=list)  # that came after the end had passed

    def add(self, span: RequestSpan, now: float) -> str | None:
        """One request that came now; the reason of `UNUSED` where it cannot be used."""
        key = (span.replica, span.request_id, span.started_ns)
        if key in self._known:
            return REPEATED
        replica = self.replicas.get(span.replica)
        if replica is None:
            self._forget_gone(now)
            if len(self.replicas) >= MOST_REPLICAS:
                return CROWD
            offset = span.ended_ns - round(now * 1e9)
            replica = WatchedReplica(span.replica, self._numbers, offset, offset, now)
            self._numbers += 1
            self.replicas[span.replica] = replica
        offset = span.ended_ns - round(now * 1e9)
        if not replica.follows(offset, now):
            return CLOCK
        self._known[key] = None
        if len(self._known) > 2 * KEPT:
            self._known = dict(islice(self._known.items(), KEPT, None))
        replica.least_ns = max(replica.least_ns, offset)
        if not replica.settled:
            replica.offset_ns = max(replica.offset_ns, offset)
        replica.requests += 1
        replica.last_came, replica.gone = now, False
        if replica.settled:
            self._place(span, replica, now)
        else:
            self._waiting.append((span, replica, now))
        return None

    def _forget_gone(self, now: float) -> None:
        """Of a full fleet: room for replicas that come."""
        if len(self.replicas) >= MOST_REPLICAS:
            kept = {name: each for name, each in self.replicas.items() if not each.silent(now)}
            self.replicas = kept

    def advance(self, now: float) -> tuple[list[ServedRequest], int]:
        """Move the end of the window; what arrived within it and is new, and the number of replicas
        that serve.
        """
        self._settle(now)
        settled = [each for each in self.replicas.values() if each.settled]
        silent = [each.silent(now) for each in settled]
        for replica, is_silent in zip(settled, silent, strict=True):
            replica.gone = is_silent and not all(silent)  # else nobody sends requests
        here = [each for each in settled if not each.gone]
        if here:
            self.end = max(self.end, self.known_until(now) - min(self.longest(), HELD_BACK))
        upto = bisect.bisect_right(self._served, self.end, key=_arrival)
        new, self._handed = self._served[self._handed : upto], max(self._handed, upto)
        late, self._late = self._late, []
        self.known += len(late) + len(new)
        return late + new, max(1, len(here))

    @property
    def begin(self) -> float:
        """From then on every request that ended is known."""
        return min((each.since for each in self.replicas.values()), default=0.0) - EXPORTED

    def longest(self) -> float:
        """Stay of a request, of those that are known last; seconds."""
        return max((each.last - each.arrived for each in self._served[-RECENT:]), default=0.0)

    def since(self, start: float) -> Sequence[ServedRequest]:
        """What is kept of those that arrived from then on, up to the end of the window."""
        first = bisect.bisect_left(self._served, start, key=_arrival)
        return self._served[first : self._handed]

    def in_service(self, served: Sequence[ServedRequest]) -> list[int]:
        """How many each one's server had in service just after its dispatch, itself included."""
        if not served:
            return []
        low = min(each.arrived for each in served) - self.longest()
        near = self._served[bisect.bisect_left(self._served, low, key=_arrival) :]
        begins: dict[int, list[float]] = {}
        ends: dict[int, list[float]] = {}
        for each in near:
            begins.setdefault(each.record.server_id or 0, []).append(_dispatch(each))
            ends.setdefault(each.record.server_id or 0, []).append(each.last)
        for instants in (*begins.values(), *ends.values()):
            instants.sort()
        numbers = []
        for each in served:
            at, server = _dispatch(each), each.record.server_id or 0
            here = bisect.bisect_right(begins[server], at) - bisect.bisect_right(ends[server], at)
            numbers.append(max(1, here))
        return numbers

    def served_times(self) -> ServedTimes:
        """Of all that is kept up to the end of the window, on clocks as they are known now."""
        late, rows = self._late_by(), []
        for each in self._served[: self._handed]:
            shift = late.get(each.record.server_id or 0, 0.0)
            instants = (each.started - shift, each.first - shift, each.last - shift)
            rows.append((each.arrived - shift, each.queued, *instants, _held(each), *_sizes(each)))
        arrived, queued, started, first, last, held, prompts, outputs, server = (
            np.array(rows, dtype=np.float64).reshape(-1, 9).T
        )
        return ServedTimes(
            arrived=arrived,
            queued=queued,
            started=started,
            first=first,
            last=last,
            held=held,
            prompts=prompts,
            outputs=outputs,
            server=server.astype(np.int64),
        )

    def _late_by(self) -> dict[int, float]:
        """By the number of a replica: seconds by which its instants are later than others know
        them. Clocks that seem to differ by no more than exports are late are one clock.
        """
        known = [each.least_ns for each in self.replicas.values()]
        if not known:
            return {}
        one = max(known) - min(known) <= SAME_CLOCK * 1e9
        return {
            each.number: ((max(known) if one else each.least_ns) - each.offset_ns) * 1e-9
            for each in self.replicas.values()
        }

    def ended_between(self, start: float, end: float) -> int:
        """Requests whose answers ended in (start, end]."""
        return sum(start < each.last <= end for each in self._served)

    def known_until(self, now: float) -> float:
        """Every request that had ended by then has been told of."""
        here = [each for each in self.replicas.values() if not each.gone]
        return min((each.known_until(now) for each in here), default=-math.inf)

    def _settle(self, now: float) -> None:
        ready = {
            each.name
            for each in self.replicas.values()
            if not each.settled and now - each.since >= SETTLED
        }
        if not ready:
            return
        for name in ready:
            self.replicas[name].settled = True
        waiting, self._waiting = self._waiting, []
        for span, replica, came in waiting:
            if replica.settled:
                self._place(span, replica, came)
            else:
                self._waiting.append((span, replica, came))

    def _place(self, span: RequestSpan, replica: WatchedReplica, came: float) -> None:
        """In the order of arrivals."""
        served = _served(span, replica)
        if served.last < replica.since - EXPORTED:
            self.early += 1  # kept back by the server until somebody listened: others are lost
            return
        replica.last_ended = max(replica.last_ended, served.last)
        replica.delays.append(min(came - served.last, JUMP))
        place = bisect.bisect_right(self._served, served.arrived, key=_arrival)
        self._served.insert(place, served)
        if place < self._handed:
            self._handed += 1
            self._late.append(served)
        if len(self._served) > 2 * KEPT:
            del self._served[:KEPT]
            self._handed = max(0, self._handed - KEPT)


def _arrival(served: ServedRequest) -> float:
    return served.arrived


def _held(served: ServedRequest) -> float:
    record = served.record
    assert record.dispatched_at is not None
    assert record.released_at is not None
    return record.released_at - record.dispatched_at


def _sizes(served: ServedRequest) -> tuple[int, int, int]:
    record = served.record
    return record.prompt_tokens or 0, record.output_tokens or 0, record.server_id or 0


def _served(span: RequestSpan, replica: WatchedReplica) -> ServedRequest:
    arrived, ended = replica.at(span.started_ns), replica.at(span.ended_ns)
    first = max(arrived, ended - span.decode)
    started = max(arrived, first - span.prefill)
    # who had to wait for a slot took it as the scheduler says; the others took theirs as they came,
    # and what passes until the scheduler sees them is a part of their service
    waited = span.queued > WAITED * (span.decode / max(1, span.output_tokens - 1) or span.prefill)
    dispatched = started if waited else min(arrived + span.queued, started)
    record = Record(
        request_id=f"{span.request_id}-0",
        client_request_id=span.request_id,
        outcome="completed",
        server_id=replica.number,
        batch_id=None,
        arrived_at=arrived,
        dispatched_at=dispatched,
        first_dispatched_at=dispatched,
        first_token_at=min(arrived + span.first_token, ended),
        last_token_at=ended,
        released_at=ended,
        queueing_delay=dispatched - arrived,
        service_time=ended - dispatched,
        sojourn_time=ended - arrived,
        prompt_tokens=span.prompt_tokens,
        output_tokens=span.output_tokens,
        max_output_tokens=span.max_tokens,
    )
    return ServedRequest(
        record=record,
        arrived=arrived,
        queued=span.queued,
        started=started,
        first=first,
        last=ended,
    )


def _dispatch(served: ServedRequest) -> float:
    dispatched = served.record.dispatched_at
    return served.arrived if dispatched is None else dispatched
