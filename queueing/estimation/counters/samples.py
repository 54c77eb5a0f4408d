"""The counters of one replica at the instants of its scrapes, and what they counted in between.

A counter only grows. One that is smaller than at the scrape before shows a restart: the stretch
between these two scrapes tells nothing and is missing. So is a stretch
that is `GAP` times as long as the usual one; one that is a little late is used as it is, since
counters lose nothing meanwhile. Arrivals in a stretch are the requests that finished plus the
change of those that run or wait.

Signals are named as in `queueing.measurement.server_signals`, whatever the server calls them. A
histogram `NAME` is the two counters `NAME_sum` and `NAME_count`; of lengths the buckets are kept
too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.token_distribution import Vector

GAP = 4.0  # usual stretches
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Buckets:
    """A histogram at each scrape: `counts[i, j]` values were at most `uppers[j]` by scrape i."""

    uppers: Vector  # ascending; the last may be infinite
    counts: Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """One replica; a column of numbers for each signal, not a number where a scrape has none."""

    replica: str
    model: str
    at: Vector  # instants of the scrapes, seconds, ascending
    counters: Mapping[str, Vector]
    gauges: Mapping[str, Vector] = field(default_factory=dict)
    buckets: Mapping[str, Buckets] = field(default_factory=dict)

    def between(self, edges: Sequence[float]) -> list[Totals]:
        """What was counted from each edge to the next, by the stretches that end there."""
        if self.at.size < 2:
            return [NOTHING for _ in edges[1:]]
        part = np.searchsorted(edges, self.at[1:], "left") - 1
        length = np.diff(self.at)
        restarted = self._restarted()
        told = ~restarted & (length <= GAP * float(np.median(length)))
        return [
            self._totals(length, (part == index) & told, (part == index) & ~told, restarted)
            for index in range(len(edges) - 1)
        ]

    def _restarted(self) -> npt.NDArray[np.bool_]:
        """Of each stretch."""
        found = np.zeros(self.at.size - 1, dtype=bool)
        for values in self.counters.values():
            found |= np.diff(values) < 0  # not of what is not a number
        return found

    def _totals(
        self,
        length: Vector,
        told: npt.NDArray[np.bool_],
        missing: npt.NDArray[np.bool_],
        restarted: npt.NDArray[np.bool_],
    ) -> Totals:
        increases = {
            name: float(np.nansum(np.diff(values)[told]))
            for name, values in self.counters.items()
            if np.isfinite(values).any()
        }
        ends = {name: values[1:][told] for name, values in self.gauges.items()}
        running, waiting = (ends.get(name, np.empty(0)) for name in ("running", "waiting"))
        if (finished := _finished(increases)) is not None:
            change = sum(
                float(np.nansum(np.diff(self.gauges[name])[told]))
                for name in ("running", "waiting")
                if name in self.gauges
            )
            increases["finished"] = finished
            increases["arrived"] = max(0.0, finished + change)
        seconds = float(length[told].sum())
        full = running[waiting > 0] if running.size == waiting.size else np.empty(0)
        return Totals(
            seconds=seconds,
            longest=seconds,
            missing=float(length[missing].sum()),
            restarts=int(np.count_nonzero(restarted & missing)),
            scrapes=int(np.count_nonzero(told)),
            increases=increases,
            lengths={
                name: LengthCounts(
                    each.uppers, np.nansum(np.diff(each.counts, axis=0)[told], axis=0)
                )
                for name, each in self.buckets.items()
            },
            most_while_waiting=_most(full),
            most_running=_most(running),
            kv_usage=_most(ends.get("kv_usage", np.empty(0))),
        )


def _finished(increases: Mapping[str, float]) -> float | None:
    """Requests that ended; by the first counter that counts them."""
    names = ("finished", "sojourn_count", "queue_time_count", "output_tokens_count")
    return next((increases[name] for name in names if name in increases), None)


def _most(values: Vector) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else math.nan


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """Requests by length: `counts[j]` had at most `uppers[j]` tokens."""

    uppers: Vector
    counts: Vector


@dataclass(frozen=True, eq=False, kw_only=True)
class Totals:
    """What a replica, or a fleet of them, counted in some time."""

    seconds: float = 0.0  # of all replicas together, as far as scrapes tell
    longest: float = 0.0  # of that replica of which most is told
    missing: float = 0.0  # seconds between scrapes that tell nothing
    restarts: int = 0
    scrapes: int = 0
    increases: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, LengthCounts] = field(default_factory=dict)
    most_while_waiting: float = math.nan  # requests that ran while one waited, in one replica
    most_running: float = math.nan
    kv_usage: float = math.nan  # the most, a share

    def total(self, name: str) -> float:
        """The increase of a counter; not a number where the server has none."""
        return self.increases.get(name, math.nan)

    def mean(self, name: str) -> float:
        """Of a histogram; not a number where nothing was counted."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count > 0 else math.nan

    def rate(self, name: str) -> float:
        """The increase for each second of a replica."""
        return self.total(name) / self.seconds if self.seconds > 0 else math.nan

    @property
    def service(self) -> float:
        """Mean seconds from the first step of a request to its end."""
        own = self.mean("service")
        return own if math.isfinite(own) else self.mean("sojourn") - self.mean("queue_time")

    @property
    def decoding(self) -> float:
        """Sequences of a replica that make tokens, on average over time: by the gaps between
        tokens, else by what follows the first token, or by the whole service.
        """
        if math.isfinite(own := self.rate("token_gap_sum")):
            return own
        after = self.mean("sojourn") - self.mean("first_token")
        return self.rate("finished") * (after if math.isfinite(after) else self.service)

    @property
    def gap(self) -> float:
        """Mean seconds from one token to the next, likewise."""
        if math.isfinite(own := self.mean("token_gap")):
            return own
        after, tokens = self.mean("sojourn") - self.mean("first_token"), self.mean_output
        return after / max(tokens - 1, 1.0) if math.isfinite(after) else self.service / tokens

    @property
    def prefill(self) -> float:
        """Mean seconds from the first step of a request to its first token."""
        own = self.mean("prefill")
        return own if math.isfinite(own) else self.mean("first_token") - self.mean("queue_time")

    @property
    def outside(self) -> float:
        """Mean seconds of a request outside the engine: tokenizer, front end. 0 where the
        counters do not tell the parts.
        """
        rest = self.mean("sojourn") - self.mean("queue_time") - self.mean("service")
        return max(0.0, rest) if math.isfinite(rest) else 0.0

    @property
    def mean_output(self) -> float:
        """Tokens of an answer."""
        if math.isfinite(own := self.mean("output_tokens")):
            return own
        return self.total("generated") / self._ended

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt."""
        if math.isfinite(own := self.mean("prompt_tokens")):
            return own
        return self.total("prompted") / self._ended

    @property
    def hit_share(self) -> float:
        """Of the prompt tokens, those that the prefix cache held."""
        asked = self.total("prefix_queries")
        return self.total("prefix_hits") / asked if asked > 0 else math.nan

    @property
    def mean_computed(self) -> float:
        """Tokens of a prompt that no prefix cache held."""
        if math.isfinite(own := self.mean("computed_tokens")):
            return own
        share = self.hit_share
        return self.mean_prompt * (1 - share) if math.isfinite(share) else self.mean_prompt

    @property
    def mean_running(self) -> float:
        """Requests in service in a replica, on average over time, by Little's law."""
        own = self.rate("service_sum")
        return own if math.isfinite(own) else self.rate("finished") * self.service

    @property
    def mean_waiting(self) -> float:
        """Requests that wait in a replica, on average over time, by Little's law."""
        return self.rate("queue_time_sum")

    @property
    def _ended(self) -> float:
        ended = self.total("finished")
        return ended if ended > 0 else math.nan


NOTHING = Totals()


def one_after_the_other(parts: Iterable[Totals]) -> Totals:
    """Of one replica, or one fleet, in successive parts of time."""
    found = list(parts)
    return _added(found, sum(each.longest for each in found))


def side_by_side(parts: Iterable[Totals]) -> Totals:
    """Of several replicas in the same time."""
    found = list(parts)
    return _added(found, max((each.longest for each in found), default=0.0))


def _added(parts: Sequence[Totals], longest: float) -> Totals:
    increases: dict[str, float] = {}
    lengths: dict[str, LengthCounts] = {}
    for each in parts:
        for name, increase in each.increases.items():
            increases[name] = increases.get(name, 0.0) + increase
        for name, counted in each.lengths.items():
            lengths[name] = _both(lengths.get(name), counted)
    return Totals(
        seconds=sum(each.seconds for each in parts),
        longest=longest,
        missing=sum(each.missing for each in parts),
        restarts=sum(each.restarts for each in parts),
        scrapes=sum(each.scrapes for each in parts),
        increases=increases,
        lengths=lengths,
        most_while_waiting=_most(np.array([each.most_while_waiting for each in parts])),
        most_running=_most(np.array([each.most_running for each in parts])),
        kv_usage=_most(np.array([each.kv_usage for each in parts])),
    )


def _both(one: LengthCounts | None, other: LengthCounts) -> LengthCounts:
    """Of two replicas whose buckets may differ: those that both have."""
    if one is None:
        return other
    if np.array_equal(one.uppers, other.uppers):
        return LengthCounts(one.uppers, one.counts + other.counts)
    uppers, mine, theirs = np.intersect1d(one.uppers, other.uppers, return_indices=True)
    return LengthCounts(uppers, one.counts[mine] + other.counts[theirs])
