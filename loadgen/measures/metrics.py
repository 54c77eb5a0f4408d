"""The durations of one answered request, under the names that load tests know. All count from the
INTENDED instant.

    ttfb    time to first byte       first byte of the answer - intended
    ttft    time to first token      first token - intended
    tpot    time per output token    (end - first token) / (output tokens - 1);
                                     as vLLM: the end, not the last token
    itl     inter-token latency      every gap between two tokens of an answer
    e2el    end to end               end - intended
    queueing_delay, batch_forming_delay, service_time      as the server reports them

A sender that falls behind would otherwise flatter the server: the time that a request waited to be
sent is part of what its user waited. Where a file does not know the intended instant, durations
count from the instant of sending. Under a padded policy an answer ends with its batch, so tpot can
exceed every gap that itl counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.spec_text import listed
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.statistics import FloatArray


def began_at(record: Record) -> float | None:
    """The instant from which its durations count."""
    return record.sent_at if record.intended_at is None else record.intended_at


def between(begin: float | None, end: float | None) -> float | None:
    """Seconds from one to the other; None where one is not known."""
    return None if begin is None or end is None else end - begin


def due_at(record: Record) -> float | None:
    """When it could be sent: at its intended instant, or when a limit on the requests at once
    had a place for it.
    """
    if record.intended_at is None or record.held_until is None:
        return record.intended_at
    return max(record.intended_at, record.held_until)


def lateness(record: Record) -> float | None:
    """How late the sender was; waiting for a place among `--max-concurrency` is not its doing."""
    return between(due_at(record), record.sent_at)


def time_per_output_token(record: Record) -> float | None:
    """Mean time of every token after the first; None for a single token."""
    span = between(record.first_token_at, record.released_at)
    return (
        None
        if span is None or not record.output_tokens or record.output_tokens < 2
        else span / (record.output_tokens - 1)
    )


def gaps(record: Record) -> list[float]:
    """Between the tokens of one answer; empty where their instants were not recorded."""
    return [later - earlier for earlier, later in pairwise(record.token_at or ())]


@dataclass(frozen=True, slots=True)
class Metric:
    """One duration: its name in flags and files, its name in words, and how a record gives it
    (None: it cannot).
    """

    name: str
    words: str
    of: Callable[[Record], float | None]


# what the sender itself did is no part of the answer, and itl is many values to a request: both
# stand apart
METRICS = {
    metric.name: metric
    for metric in (
        Metric("ttfb", "time to first byte", lambda r: between(began_at(r), r.first_byte_at)),
        Metric("ttft", "time to first token", lambda r: between(began_at(r), r.first_token_at)),
        Metric("tpot", "time per output token", time_per_output_token),
        Metric("e2el", "end to end", lambda r: between(began_at(r), r.released_at)),
        Metric("queueing_delay", "queueing delay", lambda r: r.queueing_delay),
        Metric("batch_forming_delay", "batch forming delay", lambda r: r.batch_forming_delay),
        Metric("service_time", "service time", lambda r: r.service_time),
    )
}
ITL = "itl"
LATENESS = "send_lateness"
WORDS = {LATENESS: "lateness of the sender", ITL: "inter-token latency"} | {
    name: metric.words for name, metric in METRICS.items()
}
ORDER = (
    LATENESS,
    "ttfb",
    "ttft",
    "tpot",
    ITL,
    "e2el",
    "queueing_delay",
    "batch_forming_delay",
    "service_time",
)


def values(name: str, records: Iterable[Record]) -> FloatArray:
    """All values of one metric, in the order of the records; fewer than records where some
    cannot give it.
    """
    if name == ITL:
        return np.array([gap for record in records for gap in gaps(record)], dtype=np.float64)
    of = lateness if name == LATENESS else METRICS[name].of
    return np.array(
        [value for record in records if (value := of(record)) is not None], dtype=np.float64
    )


def parse_metrics(text: str) -> tuple[str, ...]:
    """Names from `ttft,tpot,itl,e2el`, as in vLLM's --percentile-metrics. Raises SpecError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(ORDER):
        raise SpecError(f"got metrics {text!r}; expected some of {', '.join(ORDER)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Ascending percentiles from `50,90,99.9`, as in vLLM's --metric-percentiles. Raises
    SpecError.
    """
    try:
        found = sorted({float(part) for part in listed(text) if part})
    except ValueError:
        found = []
    if not found or not 0 <= found[0] <= found[-1] <= 100:
        raise SpecError(
            f"got percentiles {text!r}; expected numbers from 0 to 100, for example 50,90,99"
        )
    return tuple(found)


def percentile_name(percentile: float) -> str:
    return f"p{int(percentile)}" if percentile == int(percentile) else f"p{percentile}"
