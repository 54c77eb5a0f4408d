"""The requests of one policy in one epoch, and what they show by themselves: no law enters here."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from kendall.loadgen.compare.comparison import Compared, Instants
from kendall.policies import Fixed, Policy, is_first_come, parse_policy, served_as
from kendall.policies.ordered import order_of
from kendall.queueing.arrivals.timetable import delivered_rate
from kendall.queueing.estimation.lengths.predictions import predictor_of_lengths
from kendall.queueing.estimation.window.of_run import window_of_run
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.delay_variance import AsymptoticVariance, single_server_variance
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import Served, batches
from kendall.queueing.measurement.statistics import FloatArray
from kendall.queueing.predictors.predictor_text import (
    NO_PREDICTION,
    PredictorText,
    parse_predictor,
)


@dataclass(frozen=True, eq=False)
class EpochSample:
    """Requests in order of arrival, and the start that the recursion gives each."""

    requests: Sequence[Served]
    starts: Mapping[str, float]
    # the timetable's instant by id, where the load generator's records are at hand
    intended: Mapping[str, float] | None = None
    pads: bool = True  # the engine could pad a batch
    shortest_delay: float = math.inf  # of all of the file, seconds

    @cached_property
    def policy(self) -> Policy:
        """The policy, as the engine served it."""
        return served_as(parse_policy(self.requests[0].policy), pads=self.pads)

    @property
    def compared(self) -> Compared:
        """The quantity that is judged."""
        return "sojourn_time" if self.policy.joins_running else "queueing_delay"

    @cached_property
    def rate(self) -> float:
        """Arrivals per second as measured."""
        return delivered_rate(np.array([request.arrived_at for request in self.requests]))

    @cached_property
    def window(self) -> Snapshot:
        """The requests as a window, which has the rule of the warm-up."""
        return window_of_run(self.requests, self.shortest_delay)

    @cached_property
    def kept(self) -> Sequence[Served]:
        """The requests after the warm-up."""
        settled = self.window.judged_rows(sojourn=self.policy.joins_running)
        return list(compress(self.requests, settled))

    @cached_property
    def whole(self) -> Sequence[tuple[Served, float]]:
        """The kept whose answer was whole, each with the instant of its release."""
        return [(r, r.released_at) for r in self.kept if r.completed and r.released_at is not None]

    def judged(self, name: Compared) -> Sequence[Served]:
        """The requests that have the quantity: all the kept, or the kept whose answer was whole."""
        return self.kept if name == "queueing_delay" else [request for request, _ in self.whole]

    def observed(self, name: Compared) -> FloatArray:
        """The quantity of each judged request, seconds."""
        if name == "queueing_delay":
            return _array(r.dispatched_at - r.arrived_at for r in self.kept)
        return _array(released - r.arrived_at for r, released in self.whole)

    def by_recursion(self, name: Compared) -> FloatArray:
        """The quantity with the start that the recursion gives and the measured service, to the
        instant when the engine was done: the rest is the gateway's.
        """
        if name == "queueing_delay":
            return _array(self.starts[r.id] - r.arrived_at for r in self.kept)
        return _array(
            self.starts[r.id] - r.arrived_at + (min(released, r.server_free_at) - r.dispatched_at)
            for r, released in self.whole
        )

    def without_lost_time(self, name: Compared) -> FloatArray:
        """The quantity had no batch left later than it could, with every batch and service time as
        measured.
        """
        chained = is_first_come(self.policy) and not self.policy.joins_running
        earlier = self.chained_starts() if chained else {}
        values = self.by_recursion(name)  # of continuous: its slots are chained there
        return (
            values + _array(earlier[r.id] - self.starts[r.id] for r in self.judged(name))
            if earlier
            else values
        )

    def chained_starts(self) -> dict[str, float]:
        """Start of every request had every batch left as soon as it could, each as large and as
        long as measured.

        The recursion of queueing.measurement.recursion starts from the OBSERVED end of the batch
        before, so it credits a gateway that loses time with the waiting that the loss has caused
        behind it. Here the ends are chained:

            start = max(chained end of the server's batch before, arrival of the last member,
                        fixed: end of max_wait)

        and never later than there.
        """
        starts: dict[str, float] = {}
        ends: dict[int, float] = {}
        for members in batches(self.requests):
            server, limit = members[0].server_id, self.starts[members[0].id]
            ready = max(member.arrived_at for member in members)
            if (
                isinstance(self.policy, Fixed)
                and len(members) < self.policy.batch_size
                and math.isfinite(self.policy.max_wait)
            ):
                ready = max(ready, members[0].arrived_at + self.policy.max_wait)
            start = min(limit, max(ends.get(server, limit), ready))
            ends[server] = (
                start + max(member.server_free_at for member in members) - members[0].dispatched_at
            )
            starts |= {member.id: start for member in members}
        return starts

    def variances(self) -> dict[Compared, AsymptoticVariance]:
        """The variances of the means as far as known without the delays: by the formula of M/G/1,
        where the run is one.
        """
        instants = [(r.arrived_at, r.server_free_at - r.dispatched_at) for r in self.kept]
        arrived_at, service_times = np.array(instants).reshape(-1, 2).T
        delays, sojourns = self.observed("queueing_delay"), self.observed("sojourn_time")
        single = single_server_variance(arrived_at, delays, service_times)
        if single is None:
            return {}
        known: dict[Compared, AsymptoticVariance] = {"queueing_delay": single}
        if sojourns.size == delays.size:
            known["sojourn_time"] = single.with_rest(delays, sojourns)
        return known

    def replayed(
        self, name: Compared, instants: Instants, arrivals: Mapping[str, float] | None = None
    ) -> FloatArray:
        """The quantity by a simulation, of the run's own arrivals or of others."""
        which = 0 if name == "queueing_delay" else 1
        at = arrivals or {r.id: r.arrived_at for r in self.requests}
        return _array(instants[r.id][which] - at[r.id] for r in self.judged(name))

    @property
    def batch_size(self) -> float:
        """Mean over batches; for continuous: mean number in service at a dispatch."""
        return float(np.mean([members[0].batch_size for members in batches(self.kept)]))

    @property
    def utilisation(self) -> float:
        """Fraction of the time from first dispatch to last end that a server was busy, over
        servers. Not a number where interrupted requests shared an engine.
        """
        spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for request in self.requests:
            spans[request.server_id].append((request.dispatched_at, request.server_free_at))
        whole = max(r.server_free_at for r in self.requests) - min(
            r.dispatched_at for r in self.requests
        )
        if not whole > 0 or (order_of(self.policy).preemptive and self.policy.joins_running):
            return math.nan
        busy = []
        for served in spans.values():
            total, end = 0.0, -math.inf
            for begin, until in sorted(served):
                total += max(0.0, until - max(begin, end))
                end = max(end, until)
            if order_of(self.policy).preemptive:  # where they were in service no record tells
                total = math.fsum(until - begin for begin, until in served)
            busy.append(total)
        return math.fsum(busy) / (whole * len(spans))


def predictor_of(requests: Sequence[Served]) -> PredictorText:
    """Estimate how good the run's predictions were, on answers that the token limit did not cut."""
    whole = [
        r
        for r in requests
        if r.completed and r.output_tokens and r.output_tokens != r.max_output_tokens
    ]
    predicted = [r.predicted_output_tokens for r in whole]
    text = predictor_of_lengths(
        np.array([r.output_tokens for r in whole], dtype=np.float64),
        np.array([math.nan if value is None else value for value in predicted]),
    )
    return NO_PREDICTION if text is None else parse_predictor(text)


def first_dispatches(records: Iterable[Record], *, began_idle: bool = False) -> dict[int, float]:
    """Find the first dispatch of every epoch: the epoch began then at the latest. -inf for the
    first one where nothing can have arrived before it.

    A record names the epoch of its last dispatch, so that instant counts, not the sum of its waits.
    """
    dispatched: dict[int, float] = {}
    for record in records:
        if record.batch_id is None or record.dispatched_at is None:
            continue
        epoch = record.epoch or 0
        dispatched[epoch] = min(dispatched.get(epoch, math.inf), record.dispatched_at)
    first = min(dispatched, default=0)
    if began_idle or first == 0:
        dispatched[first] = -math.inf
    return dispatched


def epoch_samples(everyone: Iterable[Served], began_by: Mapping[int, float]) -> list[list[Served]]:
    """Per epoch those that arrived and were dispatched in it, in order of arrival.

    No record has the instant of a change. It lies between the last dispatch before it and the first
    one after it, `began_by` (`first_dispatches`): a request that arrived earlier than that may have
    waited under another policy, or for a calibration, and is left out. That instant does not depend
    on what arrives later, so that leaving out by arrival favours neither short nor long delays; the
    queue that those who are left out form is a part of the warm-up.
    """
    by_epoch: dict[int, list[Served]] = {}
    for request in everyone:
        if request.arrived_at >= began_by[request.epoch]:
            by_epoch.setdefault(request.epoch, []).append(request)
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def timetable_of(
    records: Iterable[Record],
    sent: Iterable[Record],
    of: Callable[[Record], float | None] = lambda record: record.intended_at,
) -> dict[str, float] | None:
    """Intended instant of each of the gateway's records, by its id; None where the two files share
    no request.

    They are joined by the caller's own id: `client_request_id` here, and there `request_id`, or
    `client_request_id` of a foreign load generator.
    """
    planned = {_sent_id(record): at for record in sent if (at := of(record)) is not None}
    instants = {
        record.request_id: planned[record.client_request_id]
        for record in records
        if record.client_request_id is not None and record.client_request_id in planned
    }
    return instants or None


def _sent_id(record: Record) -> str:
    return record.client_request_id or record.request_id


def of_others(records: Iterable[Record], sent: Iterable[Record]) -> dict[int, int]:
    """Count by epoch the requests not among `sent` that were in the system while those were;
    none where an epoch has none of them.
    """
    own = {_sent_id(record) for record in sent}
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    others: list[tuple[int, float, float]] = []
    for record in records:
        if record.epoch is None or record.arrived_at is None:
            continue
        epoch, arrived, released = (
            record.epoch,
            record.arrived_at,
            record.released_at or record.arrived_at,
        )
        if record.client_request_id not in own:
            others.append((epoch, arrived, released))
            continue
        begin[epoch] = min(begin.get(epoch, arrived), arrived)
        end[epoch] = max(end.get(epoch, released), released)
    return Counter(
        epoch
        for epoch, arrived, released in others
        if epoch in begin and arrived <= end[epoch] and released >= begin[epoch]
    )


def _array(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, dtype=np.float64)
