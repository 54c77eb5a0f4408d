"""Which of the settings one knob away, and what stands against it: in an unstable queue, in a
stable one, outside the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kendall.policies import parse_policy
from kendall.policies.text import counted
from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds, Rules, knob_between
from kendall.queueing.choosing.autopilot.candidates import candidates
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.knowledge import Knowledge
from kendall.queueing.choosing.autopilot.state import State
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.result import QUANTITY_WORDS, Quantity

DELAY = Objective(name="delay")
TRIED = 3  # of the settings that seem better: how many are asked for a sure gain


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change, and what stands against it, if anything does."""

    decision: Decision
    against: str | None = None


@dataclass(frozen=True, slots=True)
class RankedSetting:
    """A setting with the mean that orders it, seconds; infinite without a steady state."""

    setting: Setting
    load: float
    mean: float
    quantity: Quantity = "queueing_delay"

    def beats(self, other: RankedSetting, rules: Rules) -> bool:
        """Whether the gain over another one, as it is simulated, exceeds the thresholds; where
        neither is stable, whether the load falls.
        """
        if math.isinf(self.mean):
            return math.isinf(other.mean) and self.load <= (1 - rules.safer) * other.load
        return (
            self.mean <= (1 - rules.threshold) * other.mean
            and other.mean - self.mean >= rules.floor
        )


@dataclass(frozen=True, eq=False)
class Chooser:
    """Everything that a choice depends on."""

    seen: AssessedWindow
    known: Knowledge
    bounds: AutopilotBounds
    state: State
    rules: Rules

    @property
    def current(self) -> Setting:
        """In force."""
        return self.seen.current

    def loads(self, setting: Setting) -> list[float]:
        """At each operating point."""
        return [each.load(setting) for each in self.known.operating_points]

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

    @property
    def unstable(self) -> bool:
        """Whether the queue in force surely has no steady state: at every operating point."""
        if self.seen.limits.patience is not None:
            return False
        if self.seen.holds("stable_queue") is False and self.seen.enough:
            return True
        return all(load * self.known.lowest > 1 for load in self.loads(self.current))

    def against(self, setting: Setting) -> str | None:
        """Why a setting is not tried, though it seems better."""
        if not self.safe(setting):
            load = self.loads(setting)[0]
            return (
                f"at load {load:.2f} (up to {load * self.known.highest:.2f}) the queue might "
                "become unstable"
            )
        return self.failed(setting)

    def failed(self, setting: Setting) -> str | None:
        """Why it is remembered not to work."""
        failure = self.state.failure_of(setting, self.known.rate.value, self.seen.now, self.rules)
        if failure is None:
            return None
        return (
            f"it did worse than predicted {counted(failure.times, 'time')} at this load and is "
            "not tried again yet"
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
            predicted_before=self.known.operating_points[-1].predicted_mean(self.current, quantity),
            predicted_after=cautious.predicted_mean(after, quantity),
            predicted_gain=gain,
            observed_before=self.seen.observed_of(quantity) if self.seen.enough else UNKNOWN,
        )

    def rescue(self) -> Proposal:
        """In a queue without a steady state: the lowest load one knob away."""
        pool = [
            each
            for each in candidates(self.seen, self.bounds, urgent=True)
            if self.lowers(each, self.rules.safer)
        ]
        tried = [each for each in pool if self.failed(each) is None] or pool
        load = self.loads(self.current)[-1]
        words = (
            f"the load is {load:.2f} ({load * self.known.lowest:.2f} to "
            f"{load * self.known.highest:.2f}): the queue grows without bound"
        )
        if not tried:
            against = (
                "no setting one knob away is known to lower the load by much: fewer requests or "
                "more servers may be needed"
            )
            return Proposal(self.decision(self.current, words, UNKNOWN), against)
        best = min(tried, key=lambda each: self.loads(each)[0])
        then = self.loads(best)[0]
        gain = 1 - then / self.loads(self.current)[0] if then >= 1 else 1.0
        reason = f"{words}; of the settings one knob away this has the lowest load, {then:.2f}"
        return Proposal(self.decision(best, reason, Estimate(gain, gain, gain, 0.0)))

    def to_bounds(self, target: Setting, why: str) -> Proposal:
        """Back inside the bounds, if the queue stays stable there."""
        reason = f"{why}; this is the nearest setting inside the bounds"
        against = None if self.safe(target) else "but there the queue might have no steady state"
        return Proposal(self.decision(target, reason, UNKNOWN), against)

    def search(self) -> Proposal | None:
        """In a stable queue: the shortest mean delay or sojourn one knob away, if it is surely
        shorter.
        """
        cautious, rules, doubts = self.known.operating_points[0], self.rules, self.doubts()
        pool = [
            each
            for each in candidates(self.seen, self.bounds)
            if doubts is None or self.lowers(each, rules.safer)
        ]
        better = [
            each
            for each in ranked(cautious, self.current, pool)
            if each.beats(_ranking(cautious, self.current, each.quantity), rules)
        ]
        if not better:
            return None
        against = [self.against(each.setting) for each in better]
        allowed = [each for each, reason in zip(better, against, strict=True) if reason is None]
        if not allowed:
            return Proposal(self.described(better[0], self.gain(better[0]), doubts), against[0])
        unsure: Proposal | None = None
        for each in allowed[:TRIED]:
            gain = self.gain(each)
            if gain.value <= rules.threshold:
                continue
            proposal = Proposal(self.described(each, gain, doubts))
            if gain.low > 0:
                return proposal
            unsure = unsure or replace(
                proposal, against="the gain is not sure: its interval holds 0"
            )
        return unsure

    def gain(self, chosen: RankedSetting) -> Estimate:
        """What holds at every operating point."""
        gains = [gain_or_load(each, self.current, chosen) for each in self.known.operating_points]
        return replace(
            gains[0], low=min(each.low for each in gains), high=max(each.high for each in gains)
        )

    def described(self, chosen: RankedSetting, gain: Estimate, doubts: str | None) -> Decision:
        """The change to a setting, with why it is the best one."""
        reason = f"the shortest mean {QUANTITY_WORDS[chosen.quantity]} one knob away"
        if doubts is not None:
            reason = f"only the safe direction, a lower load ({chosen.load:.2f}), as {doubts}"
        return self.decision(chosen.setting, reason, gain)


def ranked(
    operating_point: OperatingPoint, current: Setting, pool: Sequence[Setting]
) -> list[RankedSetting]:
    """In the order of what compares all of them; each with what compares it with the setting in
    force.
    """
    common = between(current, *pool)
    in_order = sorted(
        (_ranking(operating_point, each, common) for each in pool),
        key=lambda each: (each.mean, each.load),
    )
    return [
        _ranking(operating_point, each.setting, between(current, each.setting)) for each in in_order
    ]


def _ranking(
    operating_point: OperatingPoint, setting: Setting, quantity: Quantity
) -> RankedSetting:
    mean = operating_point.ranking_mean(setting, quantity)
    return RankedSetting(setting, operating_point.load(setting), mean, quantity)


def between(*settings: Setting) -> Quantity:
    """By which duration they are compared."""
    return compared_by(parse_policy(each.policy) for each in settings)


def gain_or_load(
    operating_point: OperatingPoint, current: Setting, chosen: RankedSetting
) -> Estimate:
    """What a setting gains over the one in force; where neither has a steady state, of loads."""
    gain = operating_point.gain(current, chosen.setting, Criterion(DELAY, chosen.quantity))
    forecasts = [operating_point.forecast(each) for each in (current, chosen.setting)]
    if any(each.prediction is not None or not each.load >= 1 for each in forecasts):
        return gain
    less = 1 - forecasts[1].load / forecasts[0].load
    return Estimate(less, less, less, operating_point.effective_n)
