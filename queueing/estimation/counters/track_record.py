"""The track record of the model on servers whose queue is not ours: each hour as predicted from the
hour before, beside what was observed.

Nothing of an hour goes into its prediction. Its own estimates give a second one, which says why the
first one missed: what came differed from the hour before, or the engine did, or the model does not
have what happened.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.text import counted
from kendall.queueing.estimation.counters.fleet import (
    FleetPrediction,
    Level,
    Movement,
    ObservedFleet,
    observed_fleet,
    predicted,
    slots_of,
)
from kendall.queueing.estimation.counters.samples import (
    Totals,
    one_after_the_other,
    side_by_side,
)
from kendall.queueing.estimation.counters.step_law import StepLaw, pace_of, step_law
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.json_form import to_json
from kendall.queueing.latency.law import LatencyModel

PARTS = 60  # of an hour, for the step law
WHOLE = 0.95  # of the longest part: a shorter one lacks scrapes
TOGETHER = 5  # of them, for the dispersion of the arrivals
ENOUGH = 10  # requests of a part; else it is longer
REMEMBERED = 24  # hours whose loads the step law is fitted to
KEPT = 10_000  # rows
SHOWN = 3  # hours that were missed most
ALIKE = 0.10  # a prediction that is so near, relative, needs no cause
PREEMPTED = 0.005  # of the requests
FULL = 0.95  # of the KV memory
BURSTY = 2.0  # index of dispersion
SLOWED = 1.5  # times the gap between tokens of its fast parts
COVERED = 0.9  # of an hour


@dataclass(frozen=True, eq=False, kw_only=True)
class Hour:
    """One stretch of the record, by its parts and replicas; instants in seconds since 1970."""

    start: float
    end: float
    totals: Totals
    parts: tuple[Totals, ...]  # of single replicas, one after the other
    stretches: tuple[Totals, ...]  # likewise, each with enough requests for the step law
    arrivals: tuple[float, ...]  # of all replicas, by part of the hour that was scraped throughout
    replicas: int

    @classmethod
    def of(cls, edges: Sequence[float], replicas: Iterable[Sequence[Totals]]) -> Hour:
        """`edges` of its parts; for each replica what it counted in them."""
        found = [each for each in replicas if any(part.seconds for part in each)]
        by_part = [
            side_by_side(part for each in found for part in each[first : first + TOGETHER])
            for first in range(0, len(edges) - 1, TOGETHER)
        ]
        whole = WHOLE * max(part.seconds for part in by_part)
        return cls(
            start=edges[0],
            end=edges[-1],
            totals=side_by_side([one_after_the_other(each) for each in found]),
            parts=tuple(part for each in found for part in each),
            stretches=tuple(part for each in found for part in _with_enough(each)),
            arrivals=tuple(
                part.total("arrived") for part in by_part if part.seconds and part.seconds >= whole
            ),
            replicas=len(found),
        )

    @property
    def dispersion(self) -> float:
        """Variance over mean of the arrivals of its parts; 1 where too little came."""
        counts = np.array(self.arrivals)
        known = counts[np.isfinite(counts)]
        if known.size < 3 or not known.mean() > 0:
            return 1.0
        return float(known.var(ddof=1) / known.mean())

    @property
    def slowed(self) -> str:
        """What is said of an engine whose tokens took much longer at times; else nothing."""
        gaps = np.array([part.gap for part in self.stretches])
        known = gaps[np.isfinite(gaps)]
        if known.size < TOGETHER:
            return ""
        low, high = np.quantile(known, (0.1, 0.9))
        if high <= SLOWED * low:
            return ""
        ends = f"{low * 1e3:.3g} to {high * 1e3:.3g} ms"
        return f"the speed of the engine changed: {ends} between tokens"

    @property
    def covered(self) -> float:
        """The share of its time of which scrapes tell."""
        return self.totals.longest / (self.end - self.start)


def _with_enough(parts: Sequence[Totals]) -> Iterator[Totals]:
    """Successive parts of one replica, each with enough requests."""
    together: list[Totals] = []
    for part in parts:
        together.append(part)
        if sum(each.increases.get("finished", 0.0) for each in together) >= ENOUGH:
            yield one_after_the_other(together)
            together = []


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Means of an hour, seconds and tokens; not a number where the server does not count it."""

    requests: float
    arrival_rate: float  # of all replicas
    replicas: int
    queueing_delay: float
    sojourn_time: float
    time_to_first_token: float
    token_gap: float
    prompt_tokens: float
    output_tokens: float
    running: float  # in a replica
    waiting: float
    preemptions: float
    prefix_hits: float  # share of the prompt tokens
    kv_usage: float  # the most
    dispersion: float
    restarts: int
    missing_seconds: float

    @classmethod
    def of(cls, hour: Hour) -> Observed:
        """What the counters of an hour say."""
        seen = hour.totals
        length = hour.end - hour.start
        return cls(
            requests=seen.total("arrived"),
            arrival_rate=seen.rate("arrived") * seen.seconds / seen.longest
            if seen.longest
            else math.nan,
            replicas=hour.replicas,
            queueing_delay=seen.mean("queue_time"),
            sojourn_time=seen.mean("sojourn"),
            time_to_first_token=seen.mean("first_token"),
            token_gap=seen.mean("token_gap"),
            prompt_tokens=seen.mean_prompt,
            output_tokens=seen.mean_output,
            running=seen.mean_running,
            waiting=seen.mean_waiting,
            preemptions=seen.total("preempted"),
            prefix_hits=seen.hit_share,
            kv_usage=seen.kv_usage,
            dispersion=hour.dispersion,
            restarts=seen.restarts,
            missing_seconds=max(seen.missing, length - seen.longest),
        )


@dataclass(frozen=True, kw_only=True)
class RecordRow:
    """One hour; `forecast` is from the hour before, `same_hour` from its own estimates."""

    start: float
    end: float
    observed: Observed
    forecast: FleetPrediction | None
    same_hour: FleetPrediction | None
    step_seconds: float  # of a step with one sequence, at the hour's own speed
    cause: str = ""  # of a miss

    @property
    def judged(self) -> bool:
        """Whether there is a prediction beside an observation."""
        return self.forecast is not None and math.isfinite(self.by)

    @property
    def inside(self) -> bool | None:
        """Whether the observation lies in the interval; None where there are not both."""
        if self.forecast is None or not self.judged:
            return None
        return self.compared(self.forecast).covers(self.by)

    @property
    def off(self) -> float:
        """How far the observation is from the prediction, as a share of the observed sojourn."""
        if self.forecast is None or not self.judged:
            return 0.0
        whole = self.observed.sojourn_time
        whole = whole if math.isfinite(whole) else self.by
        return abs(self.by - self.compared(self.forecast).value) / whole if whole else 0.0

    @property
    def by(self) -> float:
        """The observed mean that is compared: of the queueing delay, else of the sojourn."""
        delay = self.observed.queueing_delay
        return delay if math.isfinite(delay) else self.observed.sojourn_time

    def compared(self, prediction: FleetPrediction) -> Estimate:
        """The same of a prediction."""
        by_delay = math.isfinite(self.observed.queueing_delay)
        return prediction.queueing_delay if by_delay else prediction.sojourn_time

    @property
    def sojourn_inside(self) -> bool | None:
        """The same of the sojourn."""
        if self.forecast is None or not math.isfinite(self.observed.sojourn_time):
            return None
        return self.forecast.sojourn_time.covers(self.observed.sojourn_time)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrackRecord:
    """Every hour, and how many lay in their intervals."""

    model: str
    server: str
    rows: tuple[RecordRow, ...]
    law: StepLaw | None
    slots: int | None

    @property
    def coverage(self) -> tuple[int, int]:
        """Hours whose queueing delay lay in its interval, and hours that were judged."""
        known = [row.inside for row in self.rows if row.inside is not None]
        return sum(known), len(known)

    @property
    def sojourn_coverage(self) -> tuple[int, int]:
        """The same of the sojourn."""
        known = [inside for row in self.rows if (inside := row.sojourn_inside) is not None]
        return sum(known), len(known)

    @property
    def missed(self) -> tuple[RecordRow, ...]:
        """The hours outside their intervals that were farthest off, the worst first."""
        outside = [row for row in self.rows if row.inside is False]
        return tuple(sorted(outside, key=lambda row: -row.off)[:SHOWN])

    def last(self, number: int) -> TrackRecord:
        """With so many rows at most."""
        return dataclasses.replace(self, rows=self.rows[-number:])

    def as_dict(self) -> dict[str, object]:
        """As JSON; null where the counters do not tell."""
        (inside, of), (also, all_of) = self.coverage, self.sojourn_coverage
        return {
            "model": self.model,
            "server": self.server,
            "slots": self.slots,
            "law": None if self.law is None else self.law.law.as_dict(),
            "notes": [] if self.law is None else list(self.law.notes),
            "coverage": {
                "queueing_delay": {"inside": inside, "hours": of},
                "sojourn_time": {"inside": also, "hours": all_of},
                "level": 0.9,
            },
            "rows": [row_object(row) for row in self.rows],
            "missed": [row.start for row in self.missed],
        }


def row_object(row: RecordRow) -> dict[str, object]:
    """A row as JSON."""
    return {
        "start": row.start,
        "end": row.end,
        "observed": to_json(row.observed),
        "forecast": to_json(row.forecast),
        "same_hour": to_json(row.same_hour),
        "inside": row.inside,
        "step_seconds": to_json(row.step_seconds),
        "cause": row.cause or None,
    }


@dataclass(eq=False, kw_only=True)
class GrowingRecord:
    """A record that is fed with successive hours; `slots` of a replica and the law `given`, where
    these are known.
    """

    model: str
    server: str
    slots: int | None = None
    given: StepLaw | None = None
    _law: StepLaw | None = None
    _rows: deque[RecordRow] = field(default_factory=lambda: deque(maxlen=KEPT))
    _recent: deque[Hour] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _levels: deque[Level] = field(default_factory=lambda: deque(maxlen=KEPT))
    _before: ObservedFleet | None = None
    _observed_slots: int | None = None

    def add(self, hour: Hour) -> RecordRow:
        """Its row."""
        self._recent.append(hour)
        seen = slots_of([hour.totals])
        if seen is not None:
            self._observed_slots = max(seen, self._observed_slots or 0)
        slots, law = self.known_slots, self.given
        if law is None:
            stretches = [part for each in self._recent for part in each.stretches]
            law = step_law(stretches, slots) or self._law
        own = None if law is None else fleet_of(hour, law.law, slots)
        row = _row(hour, own, self._before, self._levels)
        self._rows.append(row)
        self._law, self._before = law, own
        if own is not None:
            self._levels.append(own.level)
        return row

    @property
    def known_slots(self) -> int | None:
        """Of a replica."""
        return self._observed_slots if self.slots is None else self.slots

    @property
    def record(self) -> TrackRecord:
        """So far."""
        return TrackRecord(
            model=self.model,
            server=self.server,
            rows=tuple(self._rows),
            law=self._law,
            slots=self.known_slots,
        )


def track_record(
    hours: Sequence[Hour],
    *,
    model: str,
    server: str,
    slots: int | None = None,
    given: StepLaw | None = None,
) -> TrackRecord:
    """The record of successive hours; where `slots` are not given, the most of them all counts."""
    slots = slots_of([hour.totals for hour in hours]) if slots is None else slots
    growing = GrowingRecord(model=model, server=server, slots=slots, given=given)
    for hour in hours:
        growing.add(hour)
    return growing.record


def fleet_of(hour: Hour, law: LatencyModel, slots: int | None) -> ObservedFleet | None:
    """The estimates of an hour."""
    pace = pace_of(hour.parts, law, slots)
    return observed_fleet(hour.totals, law, slots, hour.dispersion, pace)


def _row(
    hour: Hour,
    own: ObservedFleet | None,
    before: ObservedFleet | None,
    earlier: Sequence[Level],
) -> RecordRow:
    forecast = None
    if before is not None:
        forecast = predicted(before, Movement.of(earlier), seed=len(earlier))
    row = RecordRow(
        start=hour.start,
        end=hour.end,
        observed=Observed.of(hour),
        forecast=forecast,
        same_hour=None if own is None else predicted(own),
        step_seconds=math.nan if own is None else own.law.step(1),
    )
    if row.inside is not False:
        return row
    return _with_cause(row, hour, own, before)


def _with_cause(
    row: RecordRow, hour: Hour, own: ObservedFleet | None, before: ObservedFleet | None
) -> RecordRow:
    cause = _events(hour)
    if not cause and own is not None and before is not None and row.same_hour is not None:
        near = _near(row)
        cause = _changed(row, own, before) if near else _not_modelled(hour)
    return dataclasses.replace(row, cause=cause or "too little is known of this row")


def _near(row: RecordRow) -> bool:
    """Whether the prediction from the hour's own estimates is nearer than the one from before."""
    assert row.forecast is not None
    assert row.same_hour is not None
    same, before = (row.compared(each).value for each in (row.same_hour, row.forecast))
    off = abs(same - row.by)
    return off <= ALIKE * row.by or off < abs(before - row.by) / 2


def _events(hour: Hour) -> str:
    """What a prediction cannot know: restarts and times without scrapes."""
    seen, said = hour.totals, []
    if seen.restarts:
        said.append(counted(seen.restarts, "restart"))
    if hour.covered < COVERED:
        said.append(f"no scrapes for {1 - hour.covered:.0%} of the time")
    return " and ".join(said)


def _changed(row: RecordRow, own: ObservedFleet, before: ObservedFleet) -> str:
    """Which of the estimates differed from those before, by what it alone does to the delay."""
    effects = {
        _by("arrivals", own.arrival_rate, before.arrival_rate): before.at(
            arrival_rate=own.arrival_rate
        ),
        _by("answers", own.output_tokens.mean, before.output_tokens.mean, "longer", "shorter"): (
            before.at(output_tokens=own.output_tokens)
        ),
        _by("steps", own.law.step(1), before.law.step(1), "slower", "faster"): before.at(
            law=own.law
        ),
    }
    if own.pace is not None or before.pace is not None:
        effects["the speed of the engine changed within the row"] = before.at(pace=own.pace)
    assert row.forecast is not None
    base = row.compared(predicted(before)).value
    found = {text: row.compared(predicted(each)).value - base for text, each in effects.items()}
    sign = 1 if row.by > base else -1
    return max(found, key=lambda text: sign * found[text])


def _by(what: str, now: float, before: float, more: str = "more", less: str = "fewer") -> str:
    share = now / before - 1
    return f"{what}: {abs(share):.0%} {more if share >= 0 else less} than the row before"


def _not_modelled(hour: Hour) -> str:
    """What the estimates of the hour itself do not explain."""
    seen = hour.totals
    preempted, requests = seen.total("preempted"), seen.total("arrived")
    if preempted > PREEMPTED * requests:
        return f"KV memory: {preempted:.0f} preemptions"
    if seen.kv_usage > FULL:
        return f"KV memory: {seen.kv_usage:.0%} full"
    if hour.slowed:
        return hour.slowed
    if hour.dispersion > BURSTY:
        return f"bursts: arrivals vary {hour.dispersion:.1f} times as much as Poisson ones"
    return "not in the counters: with its own estimates the model misses this row too"
