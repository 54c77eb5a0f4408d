"""What a setting would have done with the very requests of a window, and what it gains there over
the one in force.

    gain = 1 - sum M(after) / sum M(before),    over the same requests, each side the model's

Both sides have the requests, their lengths and the draws of the residuals in common, so that the
gain is known far better than either mean (queueing.measurement.check), in bursts and overload too.
The one server of a window is as fast for every setting as it was at each moment. The interval is
for as many requests of the same traffic on the same machine, that of the ratio's logarithm: batch
means of the paired differences over time, once for these and once for those, and one draw among the
others. What the next minutes bring is less sure (queueing.estimation.outlook): near saturation a
machine that is a tenth slower changes a gain by several times that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kendall.policies.ordered import counts
from kendall.queueing.choosing.forecast import Gains, Setting
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.checked import (
    FEWEST,
    WindowRequests,
    cut_at,
    machine_of,
    plain,
    requests_of,
    trace_of,
)
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.outlook import Outlook, band, limited
from kendall.queueing.estimation.replayed import Machine, keeps_pace, replayed
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.batch_means import batch_means_interval, student
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantity
from kendall.queueing.simulation import fast

MOST, DRIVEN = 5_000, 500  # requests; where the policy object is driven
DRAWS = 4
WIDEST = 50.0  # of an exponent
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SameRequests:
    """The last requests of a window."""

    seen: Snapshot
    point: WindowModel
    current: Setting
    ahead: Outlook | None = None

    @cached_property
    def _found(self) -> dict[tuple[Setting, bool], Matrix | None]:
        return {}

    @cached_property
    def _models(self) -> dict[Setting, Queue]:
        return {}

    @cached_property
    def _next(self) -> dict[tuple[Setting, bool], Matrix | None]:
        return {}

    @cached_property
    def _requests(self) -> WindowRequests:
        model = plain(self.point.model(self.current))
        return requests_of(self.seen, model).part(slice(-MOST, None))

    def _driven(self, *settings: Setting) -> bool:
        """Whether one of them is replayed step by step, and so with fewer requests."""
        if self.point.lengths is None:
            return False
        return not all(fast.is_compiled(plain(self._model(each))) for each in settings)

    def gain(self, setting: Setting, quantity: Quantity) -> Estimate:
        """Over the setting in force; unknown where a side cannot be told."""
        both = self.current, setting
        fewer = self._driven(*both)
        before, after = (self._durations(each, quantity, fewer=fewer) for each in both)
        if before is None or after is None or not before.sum() > 0:
            return UNKNOWN
        ratio = float(after.mean() / before.mean())
        apart = after.mean(axis=0) - ratio * before.mean(axis=0)
        within = batch_means_interval(apart).half_width / float(before.mean())
        each = after.mean(axis=1) / before.mean(axis=1)  # steps of a continuous engine: one draw
        draw = student(DRAWS - 1, 0.95) * float(each.std(ddof=1)) if each.size > 1 else 0.0
        half = math.hypot(math.sqrt(2) * within, draw)
        grows = math.exp(min(half / ratio, WIDEST)) if ratio else 1.0
        return Estimate(1 - ratio, 1 - ratio * grows, 1 - ratio / grows, float(before.shape[1]))

    def next_gain(self, setting: Setting, quantity: Quantity) -> Estimate:
        """The same over the next minutes: where nine in ten of their like have it."""
        both = self.current, setting
        fewer = self._driven(*both)
        before, after = (self._ahead(each, quantity, fewer=fewer) for each in both)
        if before is None or after is None:
            return UNKNOWN
        served = np.isfinite(before) & np.isfinite(after)  # stretches, the same of both
        if np.count_nonzero(served) < 2 or not np.all(before[served] > 0):
            return UNKNOWN
        ratio = band(after[served] / before[served])
        return Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.effective_n)

    def mean(self, setting: Setting, quantity: Quantity) -> float | None:
        """The model's, seconds; of all requests where the kernels cover the setting, whatever is in
        force.
        """
        found = self._durations(setting, quantity, fewer=self._driven(setting))
        return None if found is None else float(found.mean())

    def gains(self, setting: Setting, quantity: Quantity) -> Gains:
        """All of it, beside the forecast of a setting."""
        gain, after = self.gain(setting, quantity), self.next_gain(setting, quantity)
        return Gains(
            same_requests=self.mean(setting, quantity),
            gain=gain.value,
            gain_low=gain.low,
            gain_high=gain.high,
            next_gain_low=after.low,
            next_gain_high=after.high,
        )

    def _ahead(self, setting: Setting, quantity: Quantity, *, fewer: bool) -> Vector | None:
        """The mean of each stretch of the next minutes, seconds."""
        limit = setting.max_output_tokens
        if self.ahead is None or self.point.refusal(limit) is not None or self._unknown(limit):
            return None
        if (setting, fewer) not in self._next:
            found = self.ahead.each(self._model(setting), limit, fewer=fewer)
            self._next[setting, fewer] = found
        both = self._next[setting, fewer]
        return None if both is None else both[0 if quantity == "queueing_delay" else 1]

    def _durations(self, setting: Setting, quantity: Quantity, *, fewer: bool) -> Matrix | None:
        """A row for each draw, a column for each request; seconds."""
        if (setting, fewer) not in self._found:
            self._found[setting, fewer] = self._replayed(setting, fewer=fewer)
        both = self._found[setting, fewer]
        return None if both is None else both[0 if quantity == "queueing_delay" else 1]

    def _model(self, setting: Setting) -> Queue:
        if setting not in self._models:
            tokens = self.point.limits.engine.batch_tokens
            self._models[setting] = cut_at(self.point.model(setting), tokens)
        return self._models[setting]

    def _replayed(self, setting: Setting, *, fewer: bool) -> Matrix | None:
        limit = setting.max_output_tokens
        if self.point.refusal(limit) is not None or self._unknown(limit):
            return None
        model, requests = plain(self._model(setting)), self._requests
        if fewer:
            requests = requests.part(slice(-DRIVEN, None))
        if counts(model.policy) or np.count_nonzero(requests.judged) < FEWEST:
            return None
        requests = limited(requests, limit)
        machine = self._machine if keeps_pace(model) else None
        found = replayed(model, trace_of(requests), machine=machine, draws=DRAWS)
        judged = requests.judged & np.isfinite(found.released).all(axis=0)
        arrived = requests.arrived[judged]
        both = np.stack([found.dispatched[:, judged], found.released[:, judged]]) - arrived
        return np.maximum(both, 0.0)

    @cached_property
    def _machine(self) -> Machine | None:
        return machine_of(self.seen, self._requests, plain(self._model(self.current)))

    def _unknown(self, limit: int | None) -> bool:
        """Whether answers that the limit in force cuts would be longer."""
        held = self.current.max_output_tokens
        if held is None or (limit is not None and limit <= held):
            return False
        return bool(np.any(self._requests.outputs >= held))
