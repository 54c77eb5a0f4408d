"""Measured service times beside the law's, for the same batches with their actual lengths.

    batches      measured = last server_free - dispatch
                 fitted = the law (at speed 1) of size, lengths and prompts
    continuous   measured = time in the slot
                 fitted = turnaround + wait for the next step, prompts in it included + l / mean
                 over its stay of 1 / step(n(t)) + admissions that stopped it

A continuous engine has no batches: n(t), the number in service, is taken as it was, so a slot that
was held longer because more shared the engine is not mistaken for a slower engine. Requests that
overlap share their fate, so consecutive ones are added up in groups of several times the number in
service. Fitted so, the time is right within `SLOT_ERROR`. Only batches that were served whole
count: no member cancelled or failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies import Policy
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.window.snapshot import CENSORED, Snapshot, picked
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import by_batch

# of the speed of a continuous engine, against the step-by-step simulator: 2 to 16 slots, loads 0.3
# to 0.9, one by one; 1.3 % with calls of several prompts
SLOT_ERROR = 0.012
OVERLAP = 4  # requests per group, over the largest number in service
FEWEST = 20  # batches, or groups, of which a speed has an interval


@dataclass(frozen=True, eq=False)
class BatchTimes:
    """One entry a batch (continuous: a group of consecutive requests, counts as their means), in
    order of start; seconds, tokens.
    """

    at: Vector  # dispatch
    measured: Vector
    fitted: Vector  # the law at speed 1
    size: Vector  # members; continuous: in service right after the dispatch
    longest: Vector  # output tokens
    decoding: Vector  # share of the fitted time that depends on lengths

    @classmethod
    def chained(cls, parts: Sequence[BatchTimes]) -> BatchTimes:
        """One part after the other."""
        names = cls.__dataclass_fields__
        return cls(
            *(np.concatenate([[], *(getattr(part, name) for part in parts)]) for name in names)
        )

    @cached_property
    def ratio(self) -> Vector:
        """Measured over fitted."""
        return self.measured / self.fitted

    @property
    def count(self) -> int:
        """How many."""
        return int(self.at.size)

    def part(self, kept: npt.NDArray[Any]) -> BatchTimes:
        """Some of them: a mask, or indices."""
        return BatchTimes(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    def at_factor(self, factor: float) -> BatchTimes:
        """Beside a law whose times are so many times as long."""
        return self if factor == 1 else dataclasses.replace(self, fitted=factor * self.fitted)

    @property
    def _most_together(self) -> int:
        """The largest number in service, of the slots of one server."""
        return int(self.size.max()) if self.count else 1

    def grouped(self) -> BatchTimes:
        """The slots of one server in groups of several times the number in service."""
        return self._added_up(OVERLAP * self._most_together)

    def finely_grouped(self, fewest: int = FEWEST) -> BatchTimes:
        """The slots of one server in groups of one to four times the number in service, as large as
        leaves `fewest` of them: for the mean alone, because neighbours are alike.
        """
        most = self._most_together
        return self._added_up(max(most, min(OVERLAP * most, self.count // fewest)))

    @property
    def last_grouped_at(self) -> float:
        """Dispatch of the last slot of one server that is in a group."""
        per_group = OVERLAP * self._most_together
        kept = self.count // per_group * per_group
        return float(np.sort(self.at)[kept - 1]) if kept else -np.inf

    def _added_up(self, per_group: int) -> BatchTimes:
        """Consecutive requests; what is left over is dropped."""
        kept = self.count // per_group * per_group
        order = np.argsort(self.at, kind="stable")[:kept]
        table = {
            name: getattr(self, name)[order].reshape(-1, per_group)
            for name in self.__dataclass_fields__
        }
        sums = {name: table[name].sum(axis=1) for name in ("measured", "fitted")}
        return BatchTimes(
            at=table["at"][:, 0],
            **sums,
            **{name: table[name].mean(axis=1) for name in ("size", "longest", "decoding")},
        )


def batch_times(
    policy: Policy, seen: Snapshot, law: LatencyModel, slots: Sequence[BatchTimes] | None = None
) -> BatchTimes:
    """Of the snapshot's own rows (`Snapshot.mine`); `slots`: those of `slot_times`, where the
    caller has use for them too.
    """
    if policy.joins_running:
        each_server = slot_times(seen, law) if slots is None else slots
        return joined([each.grouped() for each in each_server])
    law = law.at_speed(1.0)
    order, first = by_batch(seen.column("batch_id"))
    ids = seen.column("batch_id")[order]
    if not first.size:
        return BatchTimes(*np.empty((6, 0)))

    def over(name: str, how: np.ufunc) -> Vector:
        return np.asarray(how.reduceat(seen.column(name)[order], first))

    size, at = over("batch_size", np.maximum), over("dispatched_at", np.minimum)
    total, longest = over("output_tokens", np.add), over("output_tokens", np.maximum)
    prompts, interrupted = over("prompt_tokens", np.add), over("preemptions", np.add)
    setup, decoding = lawful_times(law, (size, total, longest, prompts), padded=policy.padded)
    fitted = setup + (law.k1 + law.k2 + law.kr) * interrupted + decoding
    times = BatchTimes(
        at,
        over("server_free_at", np.maximum) - at,
        fitted,
        size,
        longest,
        decoding / np.where(fitted > 0, fitted, 1.0),
    )
    members = np.diff(np.append(first, ids.size))
    whole = (
        (ids[first] >= 0)
        & (members == size)
        & (over("ending", np.maximum) <= CENSORED)
        & (over("output_tokens", np.minimum) >= 1)
    )
    whole &= np.isfinite(over("released_at", np.maximum))  # who was cancelled has no release
    whole &= ~np.isnan(times.measured)
    return joined([times.part(_uninterrupted(whole, interrupted))])


def joined(parts: Sequence[BatchTimes]) -> BatchTimes:
    """All usable ones in order of start."""
    found = BatchTimes.chained(parts)
    order = np.argsort(found.at, kind="stable")
    usable = (found.measured > 0) & (found.fitted > 0)
    return found.part(order[usable[order]])


def times_by_server(
    policy: Policy, seen: Snapshot, law: LatencyModel, slots: Sequence[BatchTimes]
) -> dict[int, BatchTimes]:
    """The same of each server alone, in the order of their ids."""
    column = seen.column("server_id")
    servers = np.unique(column)
    if policy.joins_running:
        found = [batch_times(policy, seen, law, [each]) for each in slots]
    else:
        own = (seen.having(picked(seen.rows, column == server)) for server in servers)
        found = [batch_times(policy, each, law) for each in own]
    return dict(zip(servers.astype(int).tolist(), found, strict=True))


def lawful_times(
    law: LatencyModel, batches: tuple[Any, Any, Any, Any], *, padded: bool
) -> tuple[Vector, Vector]:
    """Of batches their setup and decoding at speed 1, seconds, from four arrays: sizes, sums of
    output tokens, longest outputs, sums of prompt tokens.
    """
    size, total, longest, prompts = batches
    setup = law.k1 * size + law.k2 + law.kp * prompts
    return setup, (
        law.k3 * size + law.k4
    ) * longest if padded else law.k3 * total + law.k4 * longest


def _uninterrupted(whole: npt.NDArray[np.bool_], interrupted: Vector) -> npt.NDArray[np.bool_]:
    """An interruption wastes a part of a step, which no record tells: those without one, where
    there are FEWEST.
    """
    alone = whole & (interrupted == 0)
    return alone if np.count_nonzero(alone) >= FEWEST else whole


def slot_times(
    seen: Snapshot, law: LatencyModel, step_tokens: int | None = None
) -> list[BatchTimes]:
    """One entry a request, for each continuous server, in the order of their ids; `step_tokens`:
    that a step computes at most, where long prompts take several.
    """
    servers, law = seen.column("server_id"), law.at_speed(1.0)
    ended = np.isfinite(seen.column("server_free_at"))
    found = []
    for server in np.unique(servers):
        own = seen.having(picked(seen.rows, ended & (servers == server)))
        times = _slots_at(own, law, 1.0, step_tokens)
        if times.count:
            pace = float(times.measured.sum() / times.fitted.sum())
            times = _slots_at(own, law, pace, step_tokens)
        found.append(times)
    return found


def _slots_at(
    seen: Snapshot, law: LatencyModel, pace: float, step_tokens: int | None
) -> BatchTimes:
    """`pace`: roughly the speed, at which turnarounds and the waits for a step went by. Rows at the
    window's edges miss some of their batch mates and are left out.
    """
    start, end, tokens, size = (
        seen.column(name)
        for name in ("dispatched_at", "server_free_at", "output_tokens", "batch_size")
    )
    # the sequences of a call enter an idle engine without waiting for each other
    _, place, counts = np.unique(start, return_inverse=True, return_counts=True)
    others = size - counts[place]  # in service when it came
    step = law.k3 * others + law.k4
    wait = np.where(others > 0, wait_for_step(start, end, step, law.turnaround, pace), 0.0)
    stops = law.k1 + law.kp * seen.column("prompt_tokens")
    ready = start + pace * law.turnaround
    left = _stopped_then(ready, ready + pace * wait, pace * stops) / pace
    wait = np.where(left > 0, left + step, wait)
    enter = np.minimum(ready + pace * wait, end)
    instants = np.concatenate([enter, end])
    order = np.argsort(instants, kind="stable")
    at = instants[order]
    number = np.cumsum(np.repeat([1, -1], start.size)[order])
    steps = np.concatenate(
        [[0.0], np.cumsum(np.diff(at) / (law.k3 * np.maximum(number[:-1], 1) + law.k4))]
    )
    stop = np.concatenate([stops, np.zeros(end.size)])[order]
    # by those who entered before: who enters as another leaves does not stop him
    stopped = np.cumsum(stop) - stop
    begins, ends = np.searchsorted(at, enter, "left"), np.searchsorted(at, end, "left")
    share = (steps[ends] - steps[begins]) / np.maximum(end - enter, 1e-12)  # steps per second
    steps_needed = tokens + _without_a_token(seen, enter, law, pace, step_tokens)
    decoding = steps_needed / np.where(share > 0, share, np.inf)
    fitted = law.turnaround + wait + decoding + stopped[ends] - stopped[begins]
    held = end - start
    whole = (
        (seen.column("ending") <= CENSORED)
        & (tokens >= 1)
        & (start >= start.min(initial=np.inf) + held.max(initial=0.0))
    )
    times = BatchTimes(
        start, held, fitted, size, tokens, decoding / np.where(fitted > 0, fitted, 1.0)
    )
    return times.part(_uninterrupted(whole, seen.column("preemptions")))


def _without_a_token(
    seen: Snapshot, enter: Vector, law: LatencyModel, pace: float, step_tokens: int | None
) -> Vector:
    """Steps of each request before its first token's: prompts take the room beside those that make
    tokens, one after the other in the order of their entry.
    """
    if step_tokens is None:
        return np.zeros(enter.size)
    size, prompts = seen.column("batch_size"), seen.column("prompt_tokens")
    room = np.maximum(step_tokens - (size - 1), 1.0)
    full = pace * (law.k3 * size + law.k4 + law.kp * room)
    order = np.argsort(enter, kind="stable")
    work = (prompts / room * full)[order]
    before = np.cumsum(work) - work
    begins = before + np.maximum.accumulate(enter[order] - before)
    waits = np.empty(enter.size)
    waits[order] = begins - enter[order]
    steps: Vector = np.maximum(np.ceil(prompts / room) - 1, 0.0) + np.floor(waits / full)
    return steps


def _stopped_then(ready: Vector, enter: Vector, stops: Vector) -> Vector:
    """Seconds for which the prompts of those who entered before still stop the engine when each is
    ready.
    """
    order = np.argsort(enter, kind="stable")
    work = stops[order]
    before = np.cumsum(work) - work
    free = np.maximum.accumulate(enter[order] - before) + before + work
    last = np.searchsorted(enter[order], ready, "left") - 1
    left: Vector = np.where(last >= 0, free[np.maximum(last, 0)] - ready, 0.0)
    return np.maximum(left, 0.0)


def wait_for_step(
    start: Vector, end: Vector, step: Vector, turnaround: float, pace: float
) -> Vector:
    """Lawful seconds from the end of the turnaround to the next step: steps end as requests do;
    half a step where none just did.
    """
    ended = np.sort(end)
    before = np.searchsorted(ended, start, "right") - 1
    since = np.where(before >= 0, start - ended[np.maximum(before, 0)], np.inf) / pace
    near = since < step
    passed = np.where(near, since, 0.0) + turnaround
    return np.where(near, np.ceil(passed / step - 1e-6) * step - passed, step / 2)
