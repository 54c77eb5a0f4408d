"""How what is measured of a setting moves with the estimates of its window: by simulations that
share their arrivals and lengths (common random numbers).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from kendall.policies import parse_policy
from kendall.queueing.choosing.answer import ROUGH, own_error, rough
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.estimation_error import Evaluation, Response
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.estimation.interval import NORMAL, Estimate
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction
from kendall.queueing.simulation.fast import is_compiled

# relative and downwards: never into an unstable queue, and wide enough to stand out of a
# simulation's noise
STEP = 0.05
GROUPS = 5
# requests of a simulation of what no kernel knows, of which a look has some twenty
OUTSIDE = 4_000
UNKNOWN_HALF = 2.0  # half width of the logarithm of what was not seen


class Sensitivity:
    """How settings respond at one operating point; every simulation and response is kept."""

    def __init__(self, point: WindowModel) -> None:
        self.point = point
        self._simulated: dict[Hashable, Prediction] = {}
        self._responses: dict[tuple[Setting, Criterion], Response] = {}

    def response(self, setting: Setting, measure: Criterion) -> Response:
        """How what is measured of the setting moves. Only for a setting with a steady state."""
        if (setting, measure) not in self._responses:
            self._responses[setting, measure] = self._response(setting, measure)
        return self._responses[setting, measure]

    def at_rate(self, setting: Setting, measure: Criterion, factor: float) -> float:
        """What is measured of the setting at another arrival rate, by simulation. Where it has a
        steady state there.
        """
        return self.evaluated(setting, measure, rate=factor).value

    def speed_elasticity(self, setting: Setting, measure: Criterion) -> float:
        """d ln M / d ln speed. Where the setting has a steady state."""
        here, faster = (
            self.evaluated(setting, measure),
            self.evaluated(setting, measure, speed=1 - STEP),
        )
        return here.slope(faster, STEP, pole=False)

    def with_independent_lengths(self, setting: Setting, measure: Criterion) -> float:
        """M with independent output lengths in a call, over M."""
        if not self.point.model(setting).requests.intraclass_correlation:
            return 1.0
        without, here = (
            self.evaluated(setting, measure, correlation=value) for value in (0.0, None)
        )
        return math.exp(without.log_ratio(here))

    def _response(self, setting: Setting, measure: Criterion) -> Response:
        known, patient = self.point.estimates, self.point.limits.patience is None
        base, pole = self.evaluated(setting, measure), measure.has_pole and patient
        more = base.slope(self.evaluated(setting, measure, rate=1 - STEP), STEP, pole=pole)
        slower = base.slope(self.evaluated(setting, measure, speed=1 - STEP), STEP, pole=pole)
        rate, speed = log_half_width(known.arrival_rate), log_half_width(known.speed)
        assert self.point.lengths is not None
        parts = [{"whole": each} for each in self.point.lengths.parts]
        found = [self._by_parts(setting, measure, parts, self.point.lengths.to_error, more)]
        if known.call_sizes is not None:
            calls = [
                {"sequences": known.sequences.only(group, GROUPS).law()} for group in range(GROUPS)
            ]
            found.append(self._by_parts(setting, measure, calls, GROUPS**-0.5, more))
        others = [
            self._by_residual(setting, measure, base),
            self._by_stalls(setting, measure),
            self._by_correlation(setting, measure),
        ]
        return Response(
            smooth=np.concatenate([[more * rate, slower * speed, *others], *(s for _, s in found)]),
            loads=np.concatenate([[rate, speed, 0.0, 0.0, 0.0], *(loads for loads, _ in found)]),
            load=self.point.model(setting).load(self.point.rate),
            pole=pole,
            needs_stability=patient and measure.needs_stability,
            own=own_error(self.point.predicted(setting), measure.quantity),
        )

    def _by_parts(
        self,
        setting: Setting,
        measure: Criterion,
        parts: Sequence[Mapping[str, Any]],
        to_error: float,
        more: float,
    ) -> tuple[Vector, Vector]:
        """What parts of a sample do to ln load and ln g, scaled to a 95 % half width of all of
        them; `to_error`: standard error of the whole over the standard deviation of the parts.
        """
        loads, smooth = [], []
        pole = measure.has_pole and self.point.limits.patience is None
        here = self.evaluated(setting, measure).load
        for part in parts:
            heavier = self._queue(setting, **part).load(self.point.rate) / here
            asked = self.evaluated(setting, measure, rate=1 / heavier, **part)
            loads.append(math.log(heavier))
            smooth.append(asked.smooth(pole=pole) + more * loads[-1])
        degrees = len(loads) - 1
        scale = float(stdtrit(degrees, 0.975)) * to_error / math.sqrt(degrees)
        return scale * (np.array(loads) - np.mean(loads)), scale * (
            np.array(smooth) - np.mean(smooth)
        )

    def _by_stalls(self, setting: Setting, measure: Criterion) -> float:
        """Of n stalls, each as likely as any other moment, what they add to M has the relative
        error 1 / sqrt(n).
        """
        if not self.point.law.stall_share and not self.point.backlog(
            self.point.model(setting), self.point.rate
        ):
            return 0.0
        stalling = self.evaluated(setting, measure, law=self.point.law)
        calm = self.evaluated(setting, measure, stalling=False)
        count = max(1, self.point.estimates.stalls.count)
        return (
            NORMAL * (1 - calm.value / stalling.value) / math.sqrt(count) if stalling.value else 0.0
        )

    def _by_residual(self, setting: Setting, measure: Criterion, base: Evaluation) -> float:
        cv = self.point.estimates.cv
        if (
            not cv.known
            or cv.high <= self.point.law.cv
            or parse_policy(setting.policy).joins_running
        ):
            return 0.0
        wider = dataclasses.replace(self._calm, cv=cv.high)
        return self.evaluated(setting, measure, law=wider).log_ratio(base)

    def _by_correlation(self, setting: Setting, measure: Criterion) -> float:
        """Of output lengths in a call: of one that is not known both ends are possible."""
        if self.point.estimates.call_sizes is None:
            return 0.0
        policy = self.point.model(setting).policy
        alike = self.point.estimates.alike(policy, self.point.limits.engine.max_num_seqs)
        ends = max(0.0, alike.low), min(1.0, max(0.0, alike.high))
        low, high = (self.evaluated(setting, measure, correlation=value) for value in ends)
        return high.log_ratio(low) / 2

    @property
    def _calm(self) -> LatencyModel:
        """Sample paths that stall hide what a small step does."""
        return self.point.law.without_stalls()

    def _queue(
        self,
        setting: Setting,
        *,
        law: LatencyModel | None = None,
        whole: TokenDistribution | None = None,
        sequences: TokenDistribution | None = None,
        correlation: float | None = None,
    ) -> Queue:
        model = self.point.model(setting, whole, self._calm if law is None else law)
        model = model if sequences is None else model.but(sequences=sequences)
        if correlation is None:
            return model
        return model.but(intraclass_correlation=correlation)

    def evaluated(
        self,
        setting: Setting,
        measure: Criterion,
        *,
        rate: float = 1.0,
        speed: float = 1.0,
        stalling: bool = True,
        law: LatencyModel | None = None,
        **about: Any,
    ) -> Evaluation:
        """The number at other estimates, by one simulation for all measures that need no quantile;
        `about` as for `_queue`, `stalling`: with the backlog of a continuous engine.
        """
        law = self._calm if law is None else law
        law = law.at_speed(law.speed * speed)
        model, at = self._queue(setting, law=law, **about), self.point.rate * rate
        others = tuple(each for each in about.items() if each[1] is not None)
        key = (setting, measure.slo, law, rate, stalling, others)
        if key not in self._simulated:
            count = ROUGH if is_compiled(model) else OUTSIDE
            ask = self.point.measured(
                lambda queue, arrivals: rough(queue, arrivals, measure.slos, count),
                stalling=stalling,
            )
            self._simulated[key] = ask(model, at)
        assert self.point.lengths is not None
        whole = about.get("whole") or self.point.lengths.whole
        return Evaluation(measure.of(self._simulated[key], model, whole), model.load(at))


def log_half_width(estimate: Estimate) -> float:
    """Half the width of the 95 % interval of the estimate's logarithm."""
    return estimate.relative if estimate.known and estimate.value else UNKNOWN_HALF
