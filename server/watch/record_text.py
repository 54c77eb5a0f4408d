"""The track record, and one stretch of it, as tables for people: one list of columns for the
terminal and for the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from kendall.policies.text import counted, short_number
from kendall.queueing.commands.terminal import Column, Table, say
from kendall.queueing.estimation.counters.fleet import FleetPrediction, slots_in_words
from kendall.queueing.estimation.counters.step_law import StepLaw
from kendall.queueing.estimation.counters.track_record import RecordRow, TrackRecord
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.latency.profile import load_law

NOTHING = "-"
MARKS = {"!": "outside the interval", "?": "no prediction to judge"}


@dataclass(frozen=True, slots=True)
class RecordColumn:
    """A heading, what it means, and the text of a row's cell."""

    heading: str
    about: str
    text: Callable[[RecordRow], str]


def seconds(value: float | None) -> str:
    """A duration with its unit.

    >>> seconds(0.00123), seconds(0.123), seconds(12.3), seconds(None)
    ('1.23 ms', '123 ms', '12.3 s', '-')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{short_number(value * 1e3, 3)} ms" if abs(value) < 1 else f"{short_number(value, 3)} s"


def interval(found: Estimate) -> str:
    """Both ends, with one unit where it is the same."""
    if not found.known:
        return NOTHING
    low, high = seconds(max(0.0, found.low)), seconds(found.high)
    number, unit = low.split()
    return f"{number}..{high}" if high.endswith(f" {unit}") else f"{low}..{high}"


def _number(value: float) -> str:
    return short_number(value, 3) if math.isfinite(value) else NOTHING


def _of(prediction: FleetPrediction | None, name: str) -> Estimate | None:
    return None if prediction is None else getattr(prediction, name)


def _value(prediction: FleetPrediction | None, name: str) -> str:
    found = _of(prediction, name)
    return NOTHING if found is None else seconds(found.value)


def _interval(row: RecordRow, name: str) -> str:
    found = _of(row.forecast, name)
    return NOTHING if found is None else interval(found)


def instant(at: float, form: str = "%m-%d %H:%M") -> str:
    """An instant, in UTC: a page is read elsewhere too."""
    return datetime.fromtimestamp(at, UTC).strftime(form)


def mark(row: RecordRow) -> str:
    """Whether the delay lay in its interval."""
    return {True: "", False: "!", None: "?"}[row.inside]


COLUMNS = (
    RecordColumn("begin\n(UTC)", "when the row begins", lambda row: instant(row.start)),
    RecordColumn(
        "req/s", "arrivals of all replicas", lambda row: _number(row.observed.arrival_rate)
    ),
    RecordColumn(
        "delay\nobserved",
        "mean queueing delay by the servers' counters",
        lambda row: seconds(row.observed.queueing_delay),
    ),
    RecordColumn(
        "\npredicted",
        "from the row before",
        lambda row: _value(row.forecast, "queueing_delay"),
    ),
    RecordColumn(
        "9 of 10\nrows in",
        "interval of the prediction",
        lambda row: _interval(row, "queueing_delay"),
    ),
    RecordColumn(
        "sojourn\nobserved",
        "mean time from the arrival to the end of the answer",
        lambda row: seconds(row.observed.sojourn_time),
    ),
    RecordColumn(
        "\npredicted", "from the row before", lambda row: _value(row.forecast, "sojourn_time")
    ),
    RecordColumn("", ", ".join(f"{mark} {what}" for mark, what in MARKS.items()), mark),
)


def table(rows: Sequence[RecordRow]) -> Table:
    """A row per hour."""
    columns = [Column(heading=each.heading) for each in COLUMNS]
    return Table(columns, [[each.text(row) for each in COLUMNS] for row in rows])


def headline(record: TrackRecord) -> str:
    """How many hours lay in their intervals."""
    inside, of = record.coverage
    also, judged = record.sojourn_coverage
    if not of and not judged:
        return "no row could be judged: it takes two in a row with enough requests"
    parts = []
    if of:
        parts.append(f"queueing delay: {inside} of {counted(of, 'row')} inside the interval")
    if judged:
        parts.append(f"sojourn: {also} of {judged}")
    return "; ".join(parts) + " (9 of 10 expected)"


def missed(record: TrackRecord) -> Iterator[str]:
    """A sentence for each hour that was missed most."""
    for row in record.missed:
        assert row.forecast is not None
        expected = row.compared(row.forecast)
        yield (
            f"{instant(row.start)}: observed {seconds(row.by)}, predicted "
            f"{seconds(expected.value)} ({interval(expected)}): {row.cause}"
        )


def basis(record: TrackRecord, given_slots: int | None) -> Iterator[str]:
    """What the predictions rest on, in sentences."""
    running = [row.observed.running for row in record.rows if math.isfinite(row.observed.running)]
    yield slots_in_words(record.slots, given_slots, max(running, default=math.nan))
    if record.law is None:
        yield "no step law: the counters do not tell how long a token takes"
    else:
        yield from law_in_words(record.law)
    if max((row.observed.replicas for row in record.rows), default=0) > 1:
        yield (
            "replicas are taken as equal, each with a queue of its own and a Poisson share of the "
            "requests"
        )
    yield "counters know means only: no quantiles, no single delays"


def show(records: Sequence[TrackRecord], to: Console, given_slots: int | None = None) -> None:
    """Print each record: its table, the coverage, what was missed most, what it rests on."""
    for number, record in enumerate(records):
        if number:
            say(to, "")
        name = f" serves {record.model}" if record.model else ""
        say(to, f"{record.server}{name}: each row as predicted from the row before")
        to.print(table(record.rows))
        if marks := {mark(row) for row in record.rows} - {""}:
            say(to, "; ".join(f"{each}: {MARKS[each]}" for each in sorted(marks)))
        say(to, headline(record))
        for line in (*missed(record), *basis(record, given_slots)):
            say(to, line)


def law_in_words(law: StepLaw) -> Iterator[str]:
    """The step law, and what it cannot tell apart."""
    stretches = counted(law.stretches, "stretch", "stretches")
    where = f"from {stretches}" if law.stretches else "as given"
    yield f"step law: {law.law.rounded()} (seconds), {where}"
    yield from law.notes


def given_law(text: str | None) -> StepLaw | None:
    """The law of --latency. Raises SpecError."""
    return None if text is None else StepLaw(load_law(text), 0)
