"""What the autopilot remembers between two decisions, and across a restart: plain values, to and
from JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kendall.queueing.choosing.autopilot.bounds import Rules
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric

SCHEMA_VERSION = 1
DRIFT = 0.05  # of an estimate of an earlier epoch, relative, per minute
CARRIED = ("rate", "speed", "rate_before", "speed_before")


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

    setting: Setting
    until: float
    times: int
    rate: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        plain = dataclasses.asdict(self)
        return {"knobs": plain.pop("setting"), **plain}  # the state file's name for it

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> FailedSetting:
        """What `to_dict` wrote."""
        about = {name: plain[name] for name in ("until", "times", "rate")}
        return cls(setting=Setting(**plain["knobs"]), **about)


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

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"estimate": self.estimate.to_dict(), "at": _number(self.at), "epoch": self.epoch}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Carried:
        """What `to_dict` wrote."""
        return cls(Estimate.from_dict(plain["estimate"]), _instant(plain["at"]), plain["epoch"])


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

    def remember(self, setting: Setting, rate: float, now: float, rules: Rules) -> None:
        """That this setting failed at this rate."""
        others = [each for each in self.failures if each.setting != setting]
        times = 1 + max(
            (each.times for each in self.failures if each.setting == setting), default=0
        )
        until = now + rules.forbidden * 2 ** (times - 1)
        failure = FailedSetting(setting=setting, until=until, times=times, rate=rate)
        self.failures = (*others, failure)

    def failure_of(
        self, setting: Setting, rate: float, now: float, rules: Rules
    ) -> FailedSetting | None:
        """The failure that speaks against a setting now."""
        return next(
            (
                each
                for each in self.failures
                if each.setting == setting
                and now < each.until
                and abs(math.log(rate / each.rate)) <= rules.forgiven
            ),
            None,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        plain: dict[str, Any] = {
            name: _number(getattr(self, name))
            for name in ("changed_at", "cool_until", "think_at", "said_at")
        }
        plain |= {
            "schema_version": SCHEMA_VERSION,
            "said": None if self.said is None else dataclasses.asdict(self.said),
        }
        plain |= {name: getattr(self, name).to_dict() for name in CARRIED}
        plain["failures"] = [each.to_dict() for each in self.failures]
        trial = self.trial
        plain["trial"] = None
        if trial is not None:
            plain["trial"] = {
                "decision": trial.decision.to_dict(),
                "rate": trial.rate.to_dict(),
                "waiting": trial.waiting,
                "unstable_before": trial.unstable_before,
            }
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> State:
        """What `to_dict` wrote. Raises ValueError for another schema."""
        if plain.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"got an autopilot state of schema version {plain.get('schema_version')}; this "
                f"Kendall reads {SCHEMA_VERSION}"
            )
        fields: dict[str, Any] = {
            name: _instant(plain[name])
            for name in ("changed_at", "cool_until", "think_at", "said_at")
        }
        fields |= {name: Carried.from_dict(plain[name]) for name in CARRIED}
        failures = tuple(FailedSetting.from_dict(each) for each in plain["failures"])
        trial = plain["trial"]
        if trial is not None:
            trial = Trial(
                decision=Decision.from_dict(trial["decision"]),
                rate=Estimate.from_dict(trial["rate"]),
                waiting=trial["waiting"],
                unstable_before=trial["unstable_before"],
            )
        return cls(
            **fields,
            failures=failures,
            trial=trial,
            said=plain["said"] and Setting(**plain["said"]),
        )

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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _instant(value: float | None) -> float:
    return -math.inf if value is None else float(value)
