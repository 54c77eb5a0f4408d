"""What an assessed window tells, made whole: an earlier epoch's rate and speed where this one is
young, lengths beyond the longest seen.

A switch begins an epoch and the window of arrivals with it; but how often clients ask does not
depend on the policy. So the sharper of the two is used (`Carried.or_sharper`).

Lengths censored at the largest count (all answers so far cut at a limit; or the longest still in
service) may end anywhere between there and the engine's context. Settings under such a limit do not
depend on it. Where the setting in force does, every question is asked under both extremes, and an
answer must hold under both: what lies beyond ends at once, or at the context's end.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import counted
from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import Rules
from kendall.queueing.choosing.autopilot.state import Carried, State
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.lengths.lengths import Lengths


@dataclass(frozen=True, eq=False)
class Knowledge:
    """`operating_points`: one, or two where lengths beyond the longest matter, the cautious one
    first.
    """

    operating_points: tuple[OperatingPoint, ...]
    rate: Estimate
    speed: Estimate

    @property
    def highest(self) -> float:
        """Factor on a load at the upper ends of rate and speed."""
        return math.prod(each.high / each.value for each in (self.rate, self.speed))

    @property
    def lowest(self) -> float:
        """Factor on a load at the lower ends."""
        return math.prod(max(0.0, each.low) / each.value for each in (self.rate, self.speed))


def learn(seen: AssessedWindow, state: State, rules: Rules) -> Knowledge | str:
    """The knowledge from an assessed window, or what is missing. Notes rate and speed in the state,
    for the next epoch.
    """
    found = seen.estimates
    if state.rate.epoch != found.epoch:
        state.rate_before, state.speed_before = state.rate, state.speed
    rate = state.rate_before.or_sharper(found.arrival_rate, seen.now, rules)
    speed = state.speed_before.or_sharper(found.speed, seen.now, rules)
    state.rate, state.speed = (Carried(each, seen.now, found.epoch) for each in (rate, speed))
    if not rate.known or not rate.value > 0 or rate.effective_n < rules.fewest_arrivals:
        return (
            f"{counted(round(rate.effective_n), 'arrival')} known, {rules.fewest_arrivals} are "
            "needed"
        )
    ended = int(np.count_nonzero(~found.output_tokens.censored))
    if ended < rules.fewest_ended:
        return f"{counted(ended, 'answer')} ended, {rules.fewest_ended} are needed"
    if not speed.known:
        # no window has shown it with an interval: anything between its value, if it has one, and
        # the calibrated one
        both = [each for each in (speed.value, seen.shape.speed) if math.isfinite(each)]
        low, high = (1 - rules.unseen_speed) * min(both), (1 + rules.unseen_speed) * max(both)
        speed = Estimate(both[0], low, high, 0.0)
    whole = dataclasses.replace(found, arrival_rate=rate, speed=speed)
    operating_points = tuple(
        OperatingPoint(estimates=each, shape=seen.shape, limits=seen.limits)
        for each in _completed(whole, seen)
    )
    refusal = operating_points[0].refusal(seen.current.max_output_tokens)
    return Knowledge(operating_points, rate, speed) if refusal is None else refusal


def _completed(found: Estimates, seen: AssessedWindow) -> list[Estimates]:
    """The estimates with lengths of which nothing is left open: what is censored at the largest
    count ends somewhere.
    """
    lengths, limit = found.output_tokens, seen.current.max_output_tokens
    if not lengths.unknown_mass:
        return [found]
    ends = (
        [seen.longest]
        if limit is not None and limit <= lengths.known_to
        else [seen.longest, lengths.known_to]
    )
    top = lengths.censored & (lengths.counts == lengths.known_to)
    samples = [
        Lengths(
            np.where(top, max(end, lengths.known_to), lengths.counts),
            lengths.censored & ~top,
            lengths.weights,
            lengths.restored_n,
        )
        for end in dict.fromkeys(ends)
    ]
    return [dataclasses.replace(found, output_tokens=each) for each in samples]
