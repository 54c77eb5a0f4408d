"""The objectives that admission keeps for one call: the operator's `--slo`, and the call's own
limit on its time to first token.

    queueing delay         W, the predicted wait
    time to first token    W + time from the dispatch to the first token, its mean of late
    sojourn time           W + time from the dispatch to the end of the answer, as of late
    service time, inter-token latency
                           as of late: not the call's own wait, but what more calls make longer

W is a distribution, and so is what follows it (gamma, by its mean and variance); they count as
independent. A call that finds the gateway idle is admitted whatever is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kendall.queueing.control.wait_ahead import Followed, Wait, WaitLaw
from kendall.queueing.result import QUANTITY_WORDS
from kendall.server.admission.request_deadlines import TTFT
from kendall.server.admission.settings import DelayTarget

AT_ONCE = Wait(0.0)
QUEUED = ("queueing_delay", "time_to_first_token", "sojourn_time")  # which begin with the wait


@dataclass(frozen=True, slots=True)
class AdmissionObjective:
    """A bound on a duration of the call, of which `after` follows the wait; `own`: the call asked
    for it, else it is from `--slo`.
    """

    target: DelayTarget
    after: Wait = AT_ONCE
    own: bool = False

    @property
    def param(self) -> str | None:
        """The header that asked for it."""
        return TTFT.decode() if self.own else None

    def kept(self, wait: WaitLaw) -> bool:
        """Whether a request with this wait before it meets the objective."""
        law = self._law(wait)
        if self.target.level is None:
            return law.mean <= self.target.seconds
        return law.within(self.target.seconds) >= self.target.level

    def seconds_until_kept(self, wait: WaitLaw) -> float:
        """Until the wait has become short enough; infinite where no wait at all would still be
        too long.
        """
        if not self.kept(AT_ONCE):
            return math.inf
        return max(0.0, self._at_level(wait) - self.target.seconds)

    def rejection(self, wait: WaitLaw) -> str:
        """One line: got, expected."""
        words = QUANTITY_WORDS[self.target.quantity]
        part = "mean" if self.target.level is None else f"p{100 * self.target.level:g}"
        found = f"the predicted {part} of the {words} is {self._at_level(wait):.3g} s"
        if self.target.quantity in QUEUED[1:]:
            found += f" (mean {wait.mean:.3g} s in the queue, {self.after.mean:.3g} s in service)"
        advice = "retry later, or allow more" if self.own else "retry later"
        return f"{found}; expected at most {self.target.seconds:.3g} s: {advice}"

    def _law(self, wait: WaitLaw) -> WaitLaw:
        if self.target.quantity not in QUEUED:
            return self.after
        return wait if self.after == AT_ONCE else Followed(wait, self.after)

    def _at_level(self, wait: WaitLaw) -> float:
        law, level = self._law(wait), self.target.level
        return law.mean if level is None else law.quantile(level)
