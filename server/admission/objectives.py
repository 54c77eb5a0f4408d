"""What admission must keep for one call: the operator's `--slo` on the queueing delay, and the
call's own limit on its time to first token.

    time to first token = queueing delay + time from the dispatch to the first token

The second term is a mean (`Waits.first_token`), the first a distribution, so the call's limit
becomes one on the queueing delay, at the same level. It is negative where even an empty queue is
too slow; only a call that finds the gateway idle is admitted then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from queueing.control.wait_ahead import Waiting
from server.admission.limits import DelayTarget
from server.admission.request_deadlines import TTFT


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on the queueing delay, and the time to first token that it comes from, seconds;
    None: from `--slo`.
    """

    delay: DelayTarget
    first_token: float | None = None
    service: float = 0.0  # from the dispatch to the first token

    @classmethod
    def of_first_token(cls, seconds: float, service: float, level: float) -> Objective:
        """P(time to first token <= seconds) >= level."""
        return cls(DelayTarget(seconds - service, level), seconds, service)

    @property
    def param(self) -> str | None:
        """The header that asked for it."""
        return None if self.first_token is None else TTFT.decode()

    def kept(self, wait: Waiting) -> bool:
        """Whether a request with this wait before it meets the objective."""
        if self.delay.level is None:
            return wait.mean <= self.delay.seconds
        return wait.within(self.delay.seconds) >= self.delay.level

    def seconds_until_kept(self, wait: Waiting) -> float:
        """Until the wait has become short enough; infinite where no wait at all would still be
        too long.
        """
        return (
            math.inf
            if self.delay.seconds < 0
            else max(0.0, self._at_level(wait) - self.delay.seconds)
        )

    def rejection(self, wait: Waiting) -> str:
        """One line: got, expected."""
        if self.first_token is None:
            return (
                f"the predicted mean wait is {wait.mean:.3g} s; the objective of "
                f"{self.delay.seconds:.3g} s cannot be met"
            )
        queue = self._at_level(wait)
        level = "mean" if self.delay.level is None else f"p{100 * self.delay.level:g}"
        return (
            f"the predicted {level} of the time to first token is {queue + self.service:.3g} s "
            f"({queue:.3g} s in the queue, {self.service:.3g} s in service); expected at most "
            f"{self.first_token:.3g} s: retry later, or allow more"
        )

    def _at_level(self, wait: Waiting) -> float:
        return wait.mean if self.delay.level is None else wait.quantile(self.delay.level)
