"""What the autopilot remembers between two decisions, and across a restart: plain values, to and
from JSON.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from kendall.queueing.choosing.autopilot.bounds import Rules
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.json_form import from_json

SCHEMA_VERSION = 1
DRIFT = 0.05  # of an estimate of an earlier epoch, relative, per minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change that is in force and not judged yet."""

    decision: Decision
    rate: Estimate  # when it was made
    waiting: int
    unstable_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetting:
    """A setting that did worse than predicted: not to be tried before `until`, unless the rate
    has left that of then.
    """

    knobs: Setting
    until: float
    times: int
    rate: float


@dataclass(frozen=True, slots=True)
class Carried:
    """The last estimate of an epoch, and when it was made."""

    estimate: Estimate = UNKNOWN
    at: float = -math.inf
    epoch: int = -1

    def or_sharper(self, own: Estimate, now: float, rules: Rules) -> Estimate:
        """The estimate of this epoch, or this earlier one where that is sharper: its interval
        widened by `DRIFT` per minute of age. Where the two do not meet, the value has changed, and
        only this epoch's counts.
        """
        age = now - self.at
        if not self.estimate.known or age > rules.carried:
            return own
        value = self.estimate.value
        half = math.hypot((self.estimate.high - self.estimate.low) / 2, DRIFT * value * age / 60)
        earlier = symmetric(value, half, self.estimate.effective_n)
        if not own.known or not own.value > 0:
            return earlier
        apart = own.high < earlier.low or own.low > earlier.high
        return own if apart or own.relative <= earlier.relative else earlier


@dataclass(slots=True)
class State:
    """Instants are on the clock that the driver passes as `now`."""

    changed_at: float = -math.inf
    cool_until: float = -math.inf
    think_at: float = -math.inf
    trial: Trial | None = None
    failures: tuple[FailedSetting, ...] = ()
    rate: Carried = field(default_factory=Carried)  # of this epoch
    speed: Carried = field(default_factory=Carried)
    rate_before: Carried = field(default_factory=Carried)  # of the one before
    speed_before: Carried = field(default_factory=Carried)
    said: Setting | None = None  # the setting that was held back last
    said_at: float = -math.inf
    schema_version: int = SCHEMA_VERSION

    def remember(self, setting: Setting, rate: float, now: float, rules: Rules) -> None:
        """That this setting failed at this rate."""
        others = [each for each in self.failures if each.knobs != setting]
        times = 1 + max((each.times for each in self.failures if each.knobs == setting), default=0)
        until = now + rules.forbidden * 2 ** (times - 1)
        failure = FailedSetting(knobs=setting, until=until, times=times, rate=rate)
        self.failures = (*others, failure)

    def failure_of(
        self, setting: Setting, rate: float, now: float, rules: Rules
    ) -> FailedSetting | None:
        """The failure that speaks against a setting now."""
        return next(
            (
                each
                for each in self.failures
                if each.knobs == setting
                and now < each.until
                and abs(math.log(rate / each.rate)) <= rules.forgiven
            ),
            None,
        )

    @classmethod
    def from_json(cls, plain: object) -> State:
        """What it was saved as. Raises ValueError, also for another schema."""
        state = from_json(plain, cls)
        if state.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"got an autopilot state of schema version {state.schema_version}; this Kendall "
                f"reads {SCHEMA_VERSION}"
            )
        return state

    def shifted(self, seconds: float) -> State:
        """The same on a clock that shows `seconds` more: after a restart the clock begins anew,
        and so do the epochs.
        """
        trial = self.trial
        if trial is not None:
            trial = dataclasses.replace(
                trial, decision=dataclasses.replace(trial.decision, at=trial.decision.at + seconds)
            )
        return State(
            changed_at=self.changed_at + seconds,
            cool_until=self.cool_until + seconds,
            think_at=self.think_at + seconds,
            trial=trial,
            failures=tuple(
                dataclasses.replace(each, until=each.until + seconds) for each in self.failures
            ),
            rate=Carried(self.rate.estimate, self.rate.at + seconds),
            speed=Carried(
                self.speed.estimate, self.speed.at + seconds
            ),  # the one before is of no use any more
            said=self.said,
            said_at=self.said_at + seconds,
        )
