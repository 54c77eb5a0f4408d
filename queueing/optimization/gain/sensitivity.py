"""How what is measured of a setting moves with the estimates of its window: by simulations that
share their arrivals and lengths (common random numbers).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

import numpy as np
from scipy.special import stdtrit

from policies import parse_policy
from queueing.distributions.token_distribution import TokenDistribution, Vector
from queueing.estimation.interval import NORMAL, Estimate
from queueing.latency.law import LatencyModel
from queueing.optimization.answer import own_error, rough
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.response import Asked, Response, slope
from queueing.optimization.gain.window_model import WindowModel
from queueing.result import Prediction

# relative and downwards: never into an unstable queue, and wide enough to stand out of a
# simulation's noise
STEP = 0.05
UNKNOWN_HALF = 2.0  # half width of the logarithm of what was not seen


class Sensitivity:
    """Of settings at one operating point; what was simulated or found out is kept."""

    def __init__(self, point: WindowModel) -> None:
        self.point = point
        self._simulated: dict[Hashable, Prediction] = {}
        self._responses: dict[tuple[Setting, Measure], Response] = {}

    def response(self, setting: Setting, measure: Measure) -> Response:
        """How what is measured of the setting moves. Only for a setting with a steady state."""
        if (setting, measure) not in self._responses:
            self._responses[setting, measure] = self._response(setting, measure)
        return self._responses[setting, measure]

    def at_rate(self, setting: Setting, measure: Measure, factor: float) -> float:
        """What is measured of the setting at another arrival rate, by simulation. Where it has a
        steady state there.
        """
        return self._ask(setting, measure, rate=factor).value

    def _response(self, setting: Setting, measure: Measure) -> Response:
        known, patient = self.point.estimates, self.point.limits.patience is None
        base, pole = self._ask(setting, measure), measure.has_pole and patient
        more = slope(base, self._ask(setting, measure, rate=1 - STEP), STEP, pole=pole)
        slower = slope(base, self._ask(setting, measure, speed=1 - STEP), STEP, pole=pole)
        rate, speed = _half_width(known.arrival_rate), _half_width(known.speed)
        loads, smooth = self._by_lengths(setting, measure, base, more, pole=pole)
        return Response(
            smooth=np.concatenate(
                [
                    [
                        more * rate,
                        slower * speed,
                        self._by_residual(setting, measure, base),
                        self._by_stalls(setting, measure, base),
                    ],
                    smooth,
                ]
            ),
            loads=np.concatenate([[rate, speed, 0.0, 0.0], loads]),
            load=base.load,
            pole=pole,
            needs_stability=patient and measure.needs_stability,
            own=own_error(self.point.predicted(setting), measure.quantity),
        )

    def _by_lengths(
        self, setting: Setting, measure: Measure, base: Asked, more: float, *, pole: bool
    ) -> tuple[Vector, Vector]:
        """What the parts of the lengths do to ln load and ln g, scaled to a 95 % half width of
        all of them.
        """
        assert self.point.lengths is not None
        loads, smooth = [], []
        for part in self.point.lengths.parts:
            heavier = self.point.model(setting, part).load(self.point.rate) / base.load
            asked = self._ask(setting, measure, rate=1 / heavier, whole=part)
            loads.append(math.log(heavier))
            smooth.append(asked.smooth(pole=pole) + more * loads[-1])
        degrees = len(loads) - 1
        scale = float(stdtrit(degrees, 0.975)) * self.point.lengths.to_error / math.sqrt(degrees)
        return scale * (np.array(loads) - np.mean(loads)), scale * (
            np.array(smooth) - np.mean(smooth)
        )

    def _by_stalls(self, setting: Setting, measure: Measure, base: Asked) -> float:
        """Of n stalls, each as likely as any other moment, what they add to M has the relative
        error 1 / sqrt(n).
        """
        if not self.point.law.stall_share and not self.point.backlog(
            self.point.model(setting), self.point.rate
        ):
            return 0.0
        assert self.point.lengths is not None
        without = self._asked(
            setting,
            measure,
            self.point.law.without_stalls(),
            self.point.lengths.whole,
            1.0,
            stalling=False,
        )
        return (
            NORMAL
            * (1 - without.value / base.value)
            / math.sqrt(max(1, self.point.estimates.stalls.count))
            if base.value
            else 0.0
        )

    def _ask(
        self,
        setting: Setting,
        measure: Measure,
        *,
        rate: float = 1.0,
        speed: float = 1.0,
        cv: float | None = None,
        whole: TokenDistribution | None = None,
    ) -> Asked:
        """The number at other estimates, by simulation."""
        assert self.point.lengths is not None
        law = dataclasses.replace(
            self.point.law,
            speed=self.point.law.speed * speed,
            cv=self.point.law.cv if cv is None else cv,
        )
        return self._asked(
            setting, measure, law, self.point.lengths.whole if whole is None else whole, rate
        )

    def _asked(
        self,
        setting: Setting,
        measure: Measure,
        law: LatencyModel,
        whole: TokenDistribution,
        rate: float,
        *,
        stalling: bool = True,
    ) -> Asked:
        """One simulation for all measures that need no quantile."""
        model, at = self.point.model(setting, whole, law), self.point.rate * rate
        key = (setting, measure.slo, law, id(whole), rate, stalling)
        if key not in self._simulated:
            ask = self.point.measured(
                lambda queue, arrivals: rough(queue, arrivals, measure.slos), stalling=stalling
            )
            self._simulated[key] = ask(model, at)
        return Asked(measure.of(self._simulated[key], model, whole), model.load(at))

    def _by_residual(self, setting: Setting, measure: Measure, base: Asked) -> float:
        cv = self.point.estimates.cv
        if (
            not cv.known
            or cv.high <= self.point.law.cv
            or parse_policy(setting.policy).joins_running
        ):
            return 0.0
        return self._ask(setting, measure, cv=cv.high).smooth(pole=False) - base.smooth(pole=False)


def _half_width(estimate: Estimate) -> float:
    """Of the logarithm."""
    return estimate.relative if estimate.known and estimate.value else UNKNOWN_HALF
