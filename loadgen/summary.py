"""What one load run was like for its clients, from its records alone; durations count from the INTENDED instant.

A sender that falls behind would otherwise flatter the server: the time a request waited to be sent is part of what
its user waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from loadgen.run import LoadResult
from loadgen.timetable import delivered_rate
from queueing.record import Record
from queueing.statistics import FloatArray, Interval, Summary, mean_interval, summarise, warm_up

LATE = 0.02  # mean lateness over mean end-to-end time beyond which the sender is part of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Rates per second, durations in seconds, counts in tokens."""

    asked_rate: float | None
    drawn_rate: float  # of the timetable's own instants
    delivered_rate: float  # of the instants of sending
    lateness: Summary
    outcomes: dict[str, int]
    time_to_first_token: Summary
    inter_token_latency: Summary
    end_to_end: Summary
    queueing_delay: Interval | None  # as the server reports it, after warm-up; None where it does not
    output_tokens: Summary
    output_tokens_per_second: float
    errors: dict[str, int]  # texts of what failed, most frequent first, at most five
    interrupted: bool


def summarise_load(result: LoadResult, asked_rate: float | None = None) -> LoadSummary:
    """Everything about a run in one value."""
    records = result.records
    done = [record for record in records if record.outcome == "completed"]
    delays = _values(done, lambda r: r.queueing_delay)
    ends = _values(done, lambda r: r.released_at)
    sent = _values(records, lambda r: r.sent_at)
    tokens = _values(done, lambda r: r.output_tokens)
    return LoadSummary(
        asked_rate=asked_rate,
        drawn_rate=delivered_rate(_values(records, lambda r: r.intended_at)),
        delivered_rate=delivered_rate(sent),
        lateness=result.lateness,
        outcomes=dict(Counter(record.outcome for record in records)),
        time_to_first_token=summarise(_values(done, lambda r: _between(r.intended_at, r.first_token_at))),
        inter_token_latency=summarise(_values(done, _inter_token_latency)),
        end_to_end=summarise(_values(done, lambda r: r.sojourn_time)),
        queueing_delay=mean_interval(delays[warm_up(delays.size) :]) if delays.size else None,
        output_tokens=summarise(tokens),
        output_tokens_per_second=float(tokens.sum() / (ends.max() - sent.min())) if ends.size else 0.0,
        errors=dict(Counter(record.error for record in records if record.error).most_common(5)),
        interrupted=result.interrupted,
    )


def _values(records: Iterable[Record], value: Callable[[Record], float | None]) -> FloatArray:
    return np.array([found for record in records if (found := value(record)) is not None], dtype=np.float64)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _inter_token_latency(record: Record) -> float | None:
    """Mean gap between the tokens of one answer."""
    span = _between(record.first_token_at, record.last_token_at)
    return None if span is None or not record.output_tokens or record.output_tokens < 2 else span / (record.output_tokens - 1)


def load_table(summary: LoadSummary) -> Table:
    """The summary for a terminal; durations in milliseconds."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values, factor in (
        ("lateness of the sender (ms)", summary.lateness, 1e3),
        ("time to first token (ms)", summary.time_to_first_token, 1e3),
        ("inter-token latency (ms)", summary.inter_token_latency, 1e3),
        ("end to end (ms)", summary.end_to_end, 1e3),
        ("output tokens", summary.output_tokens, 1.0),
    ):
        numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
        table.add_row(name, *(_number(number * factor) for number in numbers))
    return table


def load_lines(summary: LoadSummary) -> list[str]:
    """The summary's single numbers, one line each."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(summary.outcomes.items())) or "nothing sent"
    asked = "" if summary.asked_rate is None else f"asked {summary.asked_rate:g}, "
    lines = [
        f"requests: {outcomes}" + (" (interrupted)" if summary.interrupted else ""),
        f"rate (1/s): {asked}drawn {summary.drawn_rate:.4g}, delivered {summary.delivered_rate:.4g}; "
        f"{summary.output_tokens_per_second:.4g} output tokens/s",
    ]
    if (delay := summary.queueing_delay) is not None:
        basis = f"95 %, n={delay.n}, as good as {delay.effective_n:.0f} independent"
        warning = "; batch means hang together: the run is too short" if delay.correlated else ""
        lines.append(f"queueing delay (ms): mean {delay.mean * 1e3:.4g} ± {delay.half_width * 1e3:.3g} ({basis}{warning})")
    if summary.lateness.mean > LATE * summary.end_to_end.mean:
        lines.append(f"the sender was late (mean {summary.lateness.mean * 1e3:.3g} ms): its machine is too busy to judge short delays")
    return lines + [f"{count} x {error}" for error, count in summary.errors.items()]


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"
