"""Which of the settings one knob away, and what stands against it: in an unstable queue, in a
stable one, outside the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies import parse_policy
from queueing.control.autopilot.assessed_window import AssessedWindow
from queueing.control.autopilot.bounds import Bounds, Rules, knob_between
from queueing.control.autopilot.candidates import candidates
from queueing.control.autopilot.decision import Decision
from queueing.control.autopilot.judging import forbidden
from queueing.control.autopilot.knowledge import Knowledge, predicted_of
from queueing.control.autopilot.state import State
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.gain import gain_of
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.objective import Objective
from queueing.optimization.quantity import WORDS, compared_by
from queueing.result import Quantity

DELAY = Objective(name="delay")
TRIED = 3  # of the settings that seem better: how many are asked for a sure gain


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change, and what stands against it, if anything does."""

    decision: Decision
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A setting with the mean that orders it, seconds; infinite without a steady state."""

    setting: Setting
    load: float
    mean: float
    quantity: Quantity = "queueing_delay"


@dataclass(frozen=True, eq=False)
class Chooser:
    """Everything that a choice depends on."""

    seen: AssessedWindow
    known: Knowledge
    bounds: Bounds
    state: State
    rules: Rules

    @property
    def current(self) -> Setting:
        """In force."""
        return self.seen.current

    def loads(self, setting: Setting) -> list[float]:
        """At each operating point."""
        return [each.model(setting).load(each.rate) for each in self.known.operating_points]

    def lowers(self, setting: Setting, by: float) -> bool:
        """Whether the load falls by that fraction at least, at every operating point."""
        return all(
            then <= (1 - by) * now
            for then, now in zip(self.loads(setting), self.loads(self.current), strict=True)
        )

    def safe(self, setting: Setting) -> bool:
        """Stable with a margin at the upper ends of rate and speed, or nearer to stability than
        what is in force.
        """
        worst = self.loads(setting)[0] * self.known.highest
        return worst <= 1 - self.rules.margin or self.lowers(setting, 0.0)

    def failed(self, setting: Setting) -> str | None:
        """Why it is remembered not to work."""
        found = forbidden(self.state, setting, self.known.rate.value, self.seen.now, self.rules)
        if found is None:
            return None
        return (
            f"it did worse than predicted {found.times} time{'s' * (found.times > 1)} at this "
            "load and is not tried again yet"
        )

    def doubts(self) -> str | None:
        """Why only the safe direction is open."""
        failing = self.seen.failing()
        if failing:
            return "; ".join(each.says for each in failing)
        return (
            None
            if self.seen.enough and len(self.known.operating_points) == 1
            else "there are not enough data for more"
        )

    def decision(self, after: Setting, reason: str, gain: Estimate) -> Decision:
        """The change to a setting."""
        cautious, quantity = self.known.operating_points[0], between(self.current, after)
        return Decision(
            at=self.seen.now,
            kind="change",
            knob=knob_between(self.current, after),
            before=self.current,
            after=after,
            reason=reason,
            load_before=self.loads(self.current)[-1],
            load_after=self.loads(after)[0],
            compared=quantity,
            predicted_before=predicted_of(self.known.operating_points[-1], self.current, quantity),
            predicted_after=predicted_of(cautious, after, quantity),
            predicted_gain=gain,
            observed_before=self.seen.observed_of(quantity) if self.seen.enough else UNKNOWN,
        )


def rescue(chooser: Chooser) -> Proposal | None:
    """In a queue without a steady state: the lowest load one knob away."""
    seen, current = chooser.seen, chooser.current
    pool = [
        each
        for each in candidates(seen, chooser.bounds, urgent=True)
        if chooser.lowers(each, chooser.rules.safer)
    ]
    tried = [each for each in pool if chooser.failed(each) is None] or pool
    load = chooser.loads(current)[-1]
    words = (
        f"the load is {load:.2f} ({load * chooser.known.lowest:.2f} to "
        f"{load * chooser.known.highest:.2f}): the queue grows without bound"
    )
    if not tried:
        against = (
            "no setting one knob away is known to lower the load by much: fewer requests or "
            "more servers may be needed"
        )
        return Proposal(chooser.decision(current, words, UNKNOWN), against)
    best = min(tried, key=lambda each: chooser.loads(each)[0])
    then = chooser.loads(best)[0]
    gain = 1 - then / chooser.loads(current)[0]
    reason = f"{words}; of the settings one knob away this has the lowest load, {then:.2f}"
    return Proposal(
        chooser.decision(
            best,
            reason,
            Estimate(gain, gain, gain, 0.0) if then >= 1 else Estimate(1.0, 1.0, 1.0, 0.0),
        )
    )


def to_bounds(chooser: Chooser, target: Setting, why: str) -> Proposal:
    """Back inside the bounds, if the queue stays stable there."""
    reason = f"{why}; this is the nearest setting inside the bounds"
    against = None if chooser.safe(target) else "but there the queue might have no steady state"
    return Proposal(chooser.decision(target, reason, UNKNOWN), against)


def search(chooser: Chooser) -> Proposal | None:
    """In a stable queue: the shortest mean delay or sojourn one knob away, if it is surely
    shorter.
    """
    cautious, rules, doubts = chooser.known.operating_points[0], chooser.rules, chooser.doubts()
    pool = [
        each
        for each in candidates(chooser.seen, chooser.bounds)
        if doubts is None or chooser.lowers(each, rules.safer)
    ]
    better = [
        each
        for each in ranked(cautious, chooser.current, pool)
        if _worth(_ranking(cautious, chooser.current, each.quantity), each, rules)
    ]
    if not better:
        return None
    against = [_against(chooser, each.setting) for each in better]
    allowed = [each for each, reason in zip(better, against, strict=True) if reason is None]
    if not allowed:
        return Proposal(
            _described(chooser, better[0], _gain(chooser, better[0]), doubts), against[0]
        )
    unsure: Proposal | None = None
    for each in allowed[:TRIED]:
        gain = _gain(chooser, each)
        if gain.value <= rules.threshold:
            continue
        found = Proposal(_described(chooser, each, gain, doubts))
        if gain.low > 0:
            return found
        unsure = unsure or replace(found, against="the gain is not sure: its interval holds 0")
    return unsure


def ranked(
    operating_point: OperatingPoint, current: Setting, pool: Sequence[Setting]
) -> list[Ranked]:
    """In the order of what compares all of them; each with what compares it with the setting in
    force.
    """
    common = between(current, *pool)
    found = sorted(
        (_ranking(operating_point, each, common) for each in pool),
        key=lambda each: (each.mean, each.load),
    )
    return [
        _ranking(operating_point, each.setting, between(current, each.setting)) for each in found
    ]


def _ranking(operating_point: OperatingPoint, setting: Setting, quantity: Quantity) -> Ranked:
    load = operating_point.model(setting).load(operating_point.rate)
    return Ranked(setting, load, operating_point.ranking_mean(setting, quantity), quantity)


def _worth(before: Ranked, after: Ranked, rules: Rules) -> bool:
    """Whether the gain, as it is simulated, exceeds the thresholds; where neither is stable,
    whether the load falls.
    """
    if math.isinf(after.mean):
        return math.isinf(before.mean) and after.load <= (1 - rules.safer) * before.load
    return (
        after.mean <= (1 - rules.threshold) * before.mean
        and before.mean - after.mean >= rules.floor
    )


def _against(chooser: Chooser, setting: Setting) -> str | None:
    if not chooser.safe(setting):
        load = chooser.loads(setting)[0]
        return (
            f"at load {load:.2f} (up to {load * chooser.known.highest:.2f}) the queue might "
            "become unstable"
        )
    return chooser.failed(setting)


def between(*settings: Setting) -> Quantity:
    """By which duration they are compared."""
    return compared_by(parse_policy(each.policy) for each in settings)


def _gain(chooser: Chooser, chosen: Ranked) -> Estimate:
    """What holds at every operating point; where neither setting has a steady state, of loads."""
    gains = [_gain_in(each, chooser.current, chosen) for each in chooser.known.operating_points]
    return replace(
        gains[0], low=min(each.low for each in gains), high=max(each.high for each in gains)
    )


def _gain_in(operating_point: OperatingPoint, current: Setting, chosen: Ranked) -> Estimate:
    found = gain_of(operating_point, current, chosen.setting, Measure(DELAY, chosen.quantity))
    forecasts = [operating_point.forecast(each) for each in (current, chosen.setting)]
    if any(each.prediction is not None or not each.load >= 1 for each in forecasts):
        return found
    less = 1 - forecasts[1].load / forecasts[0].load
    return Estimate(less, less, less, operating_point.effective_n)


def _described(chooser: Chooser, chosen: Ranked, gain: Estimate, doubts: str | None) -> Decision:
    reason = f"the shortest mean {WORDS[chosen.quantity]} one knob away"
    if doubts is not None:
        reason = f"only the safe direction, a lower load ({chosen.load:.2f}), as {doubts}"
    return chooser.decision(chosen.setting, reason, gain)
