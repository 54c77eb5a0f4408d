"""One decision of the autopilot, with all that explains it: a value that is logged, shown and
kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from kendall.queueing.choosing.autopilot.bounds import Knob
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.phrases import bounded, less
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.result import QUANTITY_WORDS, Quantity

Kind = Literal["change", "rollback", "kept", "held back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do (`change`, `rollback`: put `after` in force), or what was found (`kept`, `held
    back`: do nothing, log it).

    `predicted_*` and `observed_*` are means of `compared`, seconds; unknown where there is no
    steady state. For `kept` and `rollback` the setting and predictions are those of the change that
    was measured (`rollback` turns the knob from `before` back to `after`).
    """

    at: float
    kind: Kind
    knob: Knob
    before: Setting
    after: Setting
    reason: str
    load_before: float = math.nan
    load_after: float = math.nan
    predicted_before: Estimate = UNKNOWN
    predicted_after: Estimate = UNKNOWN
    predicted_gain: Estimate = UNKNOWN  # 1 - after / before
    observed_before: Estimate = UNKNOWN
    observed_after: Estimate = UNKNOWN
    measured_gain: Estimate = UNKNOWN
    compared: Quantity = "queueing_delay"  # or the sojourn time, across families

    says: str = field(init=False, default="")  # one line for the log
    acts: bool = field(init=False, default=False)  # a knob is to be turned

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self._words())
        object.__setattr__(self, "acts", self.kind in ("change", "rollback"))

    def _words(self) -> str:
        before, after = (f"{each.policy}, {each.limit_words}" for each in (self.before, self.after))
        turned = before if self.before == self.after else f"{self.knob}, {before} -> {after}"
        parts = [f"{self.kind}: {turned}", self.reason]
        predicted, observed = (
            _beside(
                self.predicted_before, self.predicted_after, self.predicted_gain, "without bound"
            ),
            _beside(self.observed_before, self.observed_after, self.measured_gain, "not measured"),
        )
        parts += [f"predicted {QUANTITY_WORDS[self.compared]} {predicted}"] if predicted else []
        parts += [f"observed {QUANTITY_WORDS[self.compared]} {observed}"] if observed else []
        return "; ".join(parts)


def _beside(before: Estimate, after: Estimate, gain: Estimate, missing: str) -> str:
    if not (math.isfinite(before.value) or math.isfinite(after.value)):
        return ""
    words = f"{bounded(before, missing)} -> {bounded(after, missing)}"
    return (
        f"{words}, {less(gain)}"
        if math.isfinite(gain.value) and math.isfinite(before.value)
        else words
    )
