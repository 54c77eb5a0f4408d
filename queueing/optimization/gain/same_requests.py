"""What a setting would have done with the very requests of a window, and what it gains there over
the one in force.

    gain = 1 - sum M(after) / sum M(before),    over the same requests, each side the model's

Both sides have the requests, their lengths and the draws of the residuals in common, so that the
gain is known far better than either mean (queueing.measurement.check), in bursts and overload too.
Its interval is for as many requests of the same traffic to come: batch means of the paired
differences over time, once for these and once for those, one draw among the others, and beyond
that what the gain is at the ends of the speeds that the window allows, and its slow changes: near
saturation a machine that is a tenth slower changes a gain by several times that.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.ordered import counts
from queueing.estimation.checked import FEWEST, Requests, cut_at, plain, requests_of, trace_of
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.estimation.replayed import replayed
from queueing.estimation.window.snapshot import Snapshot
from queueing.measurement.batch_means import batch_means_interval, student
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.window_model import WindowModel
from queueing.result import Quantity
from queueing.simulation import fast

MOST, DRIVEN = 5_000, 500  # requests; where the policy object is driven
DRAWS = 4
NORMAL = 1.96
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SameRequests:
    """The last requests of a window."""

    seen: Snapshot
    point: WindowModel
    current: Setting

    @cached_property
    def _found(self) -> dict[tuple[Setting, float], Matrix | None]:
        return {}

    @cached_property
    def _apart(self) -> float:
        """Relative, of the speed in the minutes to come from that of the window."""
        known = self.point.estimates
        slow = known.wander.sigma.value if known.wander.significant else 0.0
        own = known.speed.relative if known.speed.known else 0.0
        return min(0.5, math.hypot(NORMAL * slow, own))

    @cached_property
    def _requests(self) -> Requests:
        model = plain(self.point.model(self.current))
        requests = requests_of(self.seen, model)
        driven = not fast.is_compiled(model)
        return requests.part(slice(-(DRIVEN if driven else MOST), None))

    def gain(self, setting: Setting, quantity: Quantity) -> Estimate:
        """Over the setting in force; unknown where a side cannot be told."""
        before, after = (self._durations(each, quantity) for each in (self.current, setting))
        if before is None or after is None or not before.sum() > 0:
            return UNKNOWN
        gains = [
            1 - self._mean(setting, quantity, speed) / self._mean(self.current, quantity, speed)
            for speed in (1 - self._apart, 1 + self._apart)
        ]
        ratio = float(after.mean() / before.mean())
        apart = after.mean(axis=0) - ratio * before.mean(axis=0)
        within = batch_means_interval(apart).half_width / float(before.mean())
        each = after.mean(axis=1) / before.mean(axis=1)  # steps of a continuous engine: one draw
        draw = student(DRAWS - 1, 0.95) * float(each.std(ddof=1)) if each.size > 1 else 0.0
        half = math.hypot(math.sqrt(2) * within, draw)
        low, high = min(*gains, 1 - ratio) - half, max(*gains, 1 - ratio) + half
        return Estimate(1 - ratio, low, high, float(before.shape[1]))

    def mean(self, setting: Setting, quantity: Quantity) -> float | None:
        """The model's, seconds."""
        found = self._durations(setting, quantity)
        return None if found is None else float(found.mean())

    def to_dict(self, setting: Setting, quantity: Quantity) -> dict[str, Any]:
        """As JSON, beside the forecast of a setting."""
        gain = self.gain(setting, quantity)
        known = math.isfinite(gain.low) and math.isfinite(gain.high)
        return {
            "same_requests": self.mean(setting, quantity),
            "gain": gain.value if known else None,
            "gain_low": gain.low if known else None,
            "gain_high": gain.high if known else None,
        }

    def _mean(self, setting: Setting, quantity: Quantity, speed: float) -> float:
        found = self._durations(setting, quantity, speed)
        return math.nan if found is None else float(found.mean())

    def _durations(self, setting: Setting, quantity: Quantity, speed: float = 1.0) -> Matrix | None:
        """A row for each draw, a column for each request; seconds. `speed`: over the window's."""
        if (setting, speed) not in self._found:
            self._found[setting, speed] = self._replayed(setting, speed)
        both = self._found[setting, speed]
        return None if both is None else both[0 if quantity == "queueing_delay" else 1]

    def _replayed(self, setting: Setting, speed: float) -> Matrix | None:
        limit = setting.max_output_tokens
        if self.point.refusal(limit) is not None or self._unknown(limit):
            return None
        model = cut_at(plain(self.point.model(setting)), self.point.limits.batch_tokens)
        requests = self._requests
        alone = not fast.is_compiled(model) and requests.row.size > DRIVEN
        if counts(model.policy) or alone or np.count_nonzero(requests.judged) < FEWEST:
            return None
        if limit is not None:
            requests = dataclasses.replace(
                requests,
                outputs=np.minimum(requests.outputs, limit),
                limits=np.fmin(requests.limits, limit),
            )
        model = dataclasses.replace(model, law=model.law.at_speed(speed * model.law.speed))
        found = replayed(model, trace_of(requests), draws=DRAWS)
        judged = requests.judged & np.isfinite(found.released).all(axis=0)
        arrived = requests.arrived[judged]
        both = np.stack([found.dispatched[:, judged], found.released[:, judged]]) - arrived
        return np.maximum(both, 0.0)

    def _unknown(self, limit: int | None) -> bool:
        """Whether answers that the limit in force cuts would be longer."""
        held = self.current.max_output_tokens
        if held is None or (limit is not None and limit <= held):
            return False
        return bool(np.any(self._requests.outputs >= held))
