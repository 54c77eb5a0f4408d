"""The summary of a load run for its clients, from its records alone; durations count from the
INTENDED instant.

Means and quantiles carry a 95 % interval that respects how alike successive delays are, or "too
short" (queueing.measurement.statistics). The first requests, which met an emptier system, are left
out of every duration and of goodput; counts, rates, lengths and the sender's lateness are of the
whole run. What nobody measured is None, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from kendall.loadgen.measures.failures import StatusCount, hung_up, outcome_of, status_counts
from kendall.loadgen.measures.goodput import Goodput, Limit, duration, goodput
from kendall.loadgen.measures.histogram import Bin, histogram
from kendall.loadgen.measures.lengths import LengthsReceived, lengths_received
from kendall.loadgen.measures.little_check import LittleCheck, little_check
from kendall.loadgen.measures.metrics import (
    LATENESS,
    METRICS,
    ORDER,
    began_at,
    percentile_name,
    values,
)
from kendall.loadgen.measures.stability import Growth, backlog
from kendall.loadgen.sending.client.server_queue import ServerQueue
from kendall.loadgen.sending.run import LoadResult
from kendall.queueing.arrivals.timetable import delivered_rate
from kendall.queueing.measurement.delay_variance import AsymptoticVariance, single_server_variance
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.statistics import (
    FloatArray,
    find_warm_up,
    mean_interval,
    quantile_intervals,
)

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
ENDS = ("low", "high")
# digits, nanoseconds: equal durations are equal, whatever the instants they were taken from
RESOLUTION = 9
CONTAIN_THE_DELAY = ("ttfb", "ttft", "e2el")
LATER_TURNS = 8  # of a conversation, from which on turns are shown together
COMPLETED = 0.98  # share of the requests; what the others took of the server is not known


Ends = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredQuantity:
    """One quantity: mean with half the width of its 95 % interval (infinite below two values),
    spread and quantiles.
    """

    mean: float
    half_width: float
    std: float
    max: float
    n: int
    effective_n: float  # independent values that would tell as much about the mean
    too_short: bool  # the run cannot state the mean
    quantiles: Mapping[str, float]  # by p50, p99.9, ...
    intervals: Mapping[str, Ends | None]  # of the quantiles; None where the run is too short to say
    histogram: tuple[Bin, ...]

    def as_object(self) -> dict[str, Any]:
        """The object for JSON: the quantiles and the ends of their intervals (`p99_low`,
        `p99_high`) stand beside the mean.
        """
        plain = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in {"quantiles", "intervals"}
        }
        ends = {
            f"{name}_{end}": at
            for name, interval in self.intervals.items()
            for end, at in zip(ENDS, interval or (None, None), strict=True)
        }
        return plain | dict(self.quantiles) | ends


def measure(
    values: FloatArray,
    percentiles: Sequence[float] = PERCENTILES,
    theory: AsymptoticVariance | None = None,
) -> MeasuredQuantity | None:
    """Statistics of a sequence in its order; None of nothing. `theory`: what is known of the
    variance of its mean without it.
    """
    if not values.size:
        return None
    values = np.round(values, RESOLUTION)
    mean = mean_interval(values, theory=theory)
    words = [percentile_name(percentile) for percentile in percentiles]
    levels = [percentile / 100 for percentile in percentiles]
    intervals = quantile_intervals(values, levels)
    return MeasuredQuantity(
        mean=mean.mean,
        half_width=mean.half_width,
        std=float(values.std()),
        max=float(values.max()),
        n=mean.n,
        effective_n=mean.effective_n,
        too_short=bool(mean.too_short),
        quantiles=dict(zip(words, np.percentile(values, percentiles).tolist(), strict=True)),
        intervals={
            word: (at.low, at.high) if (at := intervals[level]) else None
            for word, level in zip(words, levels, strict=True)
        },
        histogram=histogram(values),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The requests for one model, or of one turn of conversations; durations of completed ones in
    seconds, None where there are none.
    """

    of: str  # model | turn
    name: str
    requests: int
    completed: int
    mean_ttft: float | None
    p99_ttft: float | None
    mean_e2el: float | None
    p99_e2el: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Rates per second, durations in seconds, lengths in tokens; None where nothing was
    measured.
    """

    asked_rate: float | None
    drawn_rate: float  # of the timetable's own instants; of conversations where it has them
    delivered_rate: float  # of the instants of sending
    completed_rate: float  # completed requests over the duration
    duration: float  # from the first intended instant to the last end
    outcomes: Mapping[str, int]
    hung_up: int  # of those cancelled: by their clients, as they were to do
    status_codes: Mapping[str, StatusCount]
    warm_up: int  # requests left out of every duration, the first ones
    warm_up_why: str
    durations: Mapping[
        str, MeasuredQuantity
    ]  # by the names of loadgen.measures.metrics; only what was measured
    percentiles: tuple[float, ...]
    prompt_tokens: MeasuredQuantity | None  # of completed requests
    output_tokens: MeasuredQuantity | None
    # shares of the prompt tokens: in the server's prefix cache, as it reports; in blocks of a trace
    # that came before
    cached_prompt_tokens: float | None
    shared_prompt_tokens: float | None
    conversations: int | None
    parts: tuple[Part, ...]  # by model where there are several, by turn
    output_tokens_per_second: float
    tokens_per_second: float  # prompts and answers
    goodput: Goodput | None
    little: LittleCheck | None
    growth: Growth | None  # of the queue while requests were sent
    errors: Mapping[str, int]  # texts of what failed, most frequent first, at most five
    interrupted: bool
    lengths: LengthsReceived | None = None  # where each request carried its own length
    server_queue: ServerQueue | None = None  # of a server that is no gateway of ours
    uncounted: int = 0  # completed answers without usage, whose tokens are those events

    @property
    def sent(self) -> int:
        """Requests, however they ended."""
        return sum(self.outcomes.values())

    @property
    def completed(self) -> int:
        """Requests answered in full."""
        return self.outcomes.get("completed", 0)

    @property
    def lateness(self) -> MeasuredQuantity | None:
        """The lateness of the sender."""
        return self.durations.get(LATENESS)

    def as_object(self) -> dict[str, Any]:
        """The object for JSON: every duration by its name, null where it was not measured."""
        plain = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in {"durations", "percentiles"}
        }
        lengths = {
            name: None if plain[name] is None else plain[name].as_object()
            for name in ("prompt_tokens", "output_tokens")
        }
        durations = {
            name: self.durations[name].as_object() if name in self.durations else None
            for name in ORDER
        }
        return plain | lengths | durations


def summarise_load(
    result: LoadResult,
    asked_rate: float | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    limits: Sequence[Limit] = (),
) -> LoadSummary:
    """Summarise a run; `limits` ask for its goodput."""
    summary = summarise_records(
        result.records,
        asked_rate,
        percentiles=percentiles,
        limits=limits,
        interrupted=result.interrupted,
        shared_prompt_tokens=result.header.configuration.get("shared_prompt_tokens"),
    )
    configured = result.header.configuration
    queue = configured.get("server_queue")
    forced = configured.get("lengths") == "ignore_eos"
    return replace(
        summary,
        lengths=lengths_received(result.records) if forced else None,
        server_queue=None if queue is None else msgspec.convert(queue, ServerQueue),
        uncounted=configured.get("uncounted", 0),
    )


def summarise_records(
    records: Sequence[Record],
    asked_rate: float | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    limits: Sequence[Limit] = (),
    interrupted: bool = False,
    shared_prompt_tokens: float | None = None,
) -> LoadSummary:
    """Summarise a run file's records."""
    begins = [(np.inf if (at := began_at(record)) is None else at) for record in records]
    records = [records[place] for place in np.argsort(begins, kind="stable")]
    done = [record for record in records if record.outcome == "completed"]
    # the warm-up: from the queueing delays where the server reports them, else from the times end
    # to end
    name = "queueing_delay" if any(r.queueing_delay is not None for r in done) else "e2el"
    known = [
        place
        for place, record in enumerate(records)
        if record.outcome == "completed" and METRICS[name].of(record) is not None
    ]
    warm_up = find_warm_up(values(name, [records[place] for place in known]))
    left_out = known[warm_up.dropped] if known else 0
    steady = [record for record in records[left_out:] if record.outcome == "completed"]
    variances = variances_of_records(steady, records[left_out:])
    durations = {
        name: measure(
            values(name, records if name == LATENESS else steady), percentiles, variances.get(name)
        )
        for name in ORDER
    }
    prompt, output = (_column(done, name) for name in ("prompt_tokens", "output_tokens"))
    span = duration(records)
    firsts = [record for record in records if record.turn in (None, 1)]
    return LoadSummary(
        asked_rate=asked_rate,
        drawn_rate=delivered_rate(_column(firsts, "intended_at")),
        delivered_rate=delivered_rate(_column(firsts, "sent_at")),
        completed_rate=_per_second(len(done), span),
        duration=span,
        outcomes=dict(Counter(map(outcome_of, records))),
        hung_up=sum(map(hung_up, records)),
        status_codes=status_counts(records, cut_short=interrupted),
        warm_up=left_out,
        warm_up_why=warm_up.why,
        durations={name: one for name, one in durations.items() if one is not None},
        percentiles=tuple(percentiles),
        prompt_tokens=measure(prompt, percentiles),
        output_tokens=measure(output, percentiles),
        cached_prompt_tokens=_cached(done),
        shared_prompt_tokens=shared_prompt_tokens,
        conversations=len(firsts) if len(firsts) < len(records) else None,
        parts=(*_parts("model", records, left_out), *_parts("turn", records, left_out)),
        output_tokens_per_second=_per_second(float(output.sum()), span),
        tokens_per_second=_per_second(float(prompt.sum() + output.sum()), span),
        goodput=goodput(records[left_out:], limits) if limits else None,
        little=little_check(records, left_out),
        growth=backlog(records),
        errors=dict(
            Counter(
                record.error for record in records if record.error and not hung_up(record)
            ).most_common(5)
        ),
        interrupted=interrupted,
    )


def _parts(of: str, records: Sequence[Record], left_out: int) -> Iterator[Part]:
    names = {_part(of, record) for record in records}
    for name in sorted(names, key=lambda name: (len(name), name)) if len(names) > 1 else ():
        members = [record for record in records if _part(of, record) == name]
        steady = [record for record in records[left_out:] if _part(of, record) == name]
        done = [record for record in steady if record.outcome == "completed"]
        statistics: dict[str, float | None] = {}
        for metric in ("ttft", "e2el"):
            seconds = values(metric, done)
            statistics[f"mean_{metric}"] = float(seconds.mean()) if seconds.size else None
            statistics[f"p99_{metric}"] = (
                float(np.percentile(seconds, 99)) if seconds.size else None
            )
        completed = sum(record.outcome == "completed" for record in members)
        yield Part(of=of, name=name, requests=len(members), completed=completed, **statistics)


def _part(of: str, record: Record) -> str:
    """The part that it belongs to; long conversations end in one part."""
    if of == "model":
        return record.model or ""
    turn = record.turn or 1
    return str(turn) if turn < LATER_TURNS else f"{LATER_TURNS} and later"


def _cached(records: Sequence[Record]) -> float | None:
    known = [record for record in records if record.cached_tokens is not None]
    prompts = sum(record.prompt_tokens or 0 for record in known)
    return sum(record.cached_tokens or 0 for record in known) / prompts if prompts else None


def variances_of_records(
    completed: Sequence[Record], sent: Sequence[Record]
) -> dict[str, AsymptoticVariance]:
    """The variances of mean delays without the delays, from arrivals and service times: by metric,
    of the completed requests in order of arrival among those sent.

    Empty where there is no formula: only a server that takes one request at a time, fed by
    exponential gaps, has one (queueing.measurement.delay_variance).
    """
    rows = [(began_at(record), record.queueing_delay, record.service_time) for record in completed]
    if len(completed) < COMPLETED * len(sent) or any(None in row for row in rows):
        return {}
    arrived_at, delays, service_times = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    theory = single_server_variance(arrived_at, delays, service_times)
    if theory is None:
        return {}
    variances = {"queueing_delay": theory}
    for name in CONTAIN_THE_DELAY:
        durations = [METRICS[name].of(record) for record in completed]
        if None not in durations:
            variances[name] = theory.with_rest(delays, np.array(durations, dtype=np.float64))
    return variances


def _column(records: Sequence[Record], name: str) -> FloatArray:
    return np.array(
        [value for record in records if (value := getattr(record, name)) is not None],
        dtype=np.float64,
    )


def _per_second(count: float, span: float) -> float:
    return count / span if span > 0 else 0.0
