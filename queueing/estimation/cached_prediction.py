"""An exact prediction kept for several assessments: moved along its elasticities while the
estimates move little.

    ln W' - ln W = e_rate ln (lambda' / lambda) - e_speed ln (mu' / mu)    mu: largest stable rate

A slower engine and longer answers alike stretch the time that service takes, and mu holds both. It
is first order: the second is below `CHANGE`^2 / 2 of W. It is kept while rate and mu are
within `STEP` of where it was solved, W within `CHANGE`, the residual's variance and that of the
stalls within `SCATTER`, and for `KEPT` seconds: what it does not follow, as the shape of the
lengths' law, moves slowly. Means are then within 1 % of the exact ones, p90 and p99 within 1.5 %
(tests). What costs little, a continuous engine and one server for single requests, is solved each
time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from policies.registry import is_first_come
from queueing.estimation.band import KEPT, Sensitivity
from queueing.model import Model
from queueing.prediction.bounds import delay_bound, has_bound
from queueing.result import Prediction, Quantiles

STEP = 0.03
CHANGE = 0.1
SCATTER = 0.004  # of cv^2; the mean goes as 1 + cv^2


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedPrediction:
    """A prediction, where it was solved and when (seconds)."""

    prediction: Prediction
    rate: float
    capacity: float
    scatter: float  # SCV that residual and stalls give to the shortest batch
    epoch: int
    at: float
    server_speeds: tuple[float, ...] = ()
    intraclass_correlation: float = 0.0
    smooth: Prediction | None = (
        # of the same machine if it did not stall; None where it does not, or theory has no answer
        None
    )

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        model: Model,
        rate: float,
        epoch: int,
        at: float,
        *,
        smooth: Prediction | None = None,
    ) -> CachedPrediction:
        """Of a model that was solved at this rate."""
        return cls(
            prediction=prediction,
            rate=rate,
            capacity=model.largest_stable_rate,
            scatter=_scatter(model),
            epoch=epoch,
            at=at,
            server_speeds=model.server_speeds,
            intraclass_correlation=model.intraclass_correlation,
            smooth=smooth,
        )

    def moved(self, model: Model, rate: float, slope: Sensitivity, now: float) -> Prediction | None:
        """The prediction at another rate and model of the same policy and limits; None where it
        must be solved anew.
        """
        faster = math.log(model.largest_stable_rate / self.capacity)
        busier = math.log(rate / self.rate)
        change = slope.rate * busier - slope.speed * faster
        old = now - self.at < 0 or now - self.at >= KEPT
        far = (
            abs(faster) > STEP
            or abs(busier) > STEP
            or not abs(change) <= CHANGE
            or abs(_scatter(model) - self.scatter) > SCATTER
            or _apart(self.server_speeds, model.server_speeds) > STEP
            or abs(model.intraclass_correlation - self.intraclass_correlation) > STEP
        )
        if old or far or _cheap(model) or (model.patience is None and model.load(rate) >= 1):
            return None
        return self._at(
            model,
            rate,
            math.exp(change),
            math.exp(-faster),
            f"moved to first order from {now - self.at:.0f} s before",
        )

    def _at(self, model: Model, rate: float, delays: float, times: float, note: str) -> Prediction:
        """`delays`, `times`: factors of delays and of service times."""
        was = self.prediction
        delay = scaled(was.queueing_delay, delays)
        served = scaled(was.served_queueing_delay, delays)
        gone = total(
            served.mean, difference(was.sojourn_time.mean, was.served_queueing_delay.mean), times
        )
        first = total(
            served.mean,
            difference(was.time_to_first_token.mean, was.served_queueing_delay.mean),
            times,
        )
        stretch = (
            gone / was.sojourn_time.mean if gone is not None and was.sojourn_time.mean else 1.0
        )
        return dataclasses.replace(
            was,
            load=model.load(rate),
            utilisation=model.load(rate)
            if was.utilisation is not None and math.isclose(was.utilisation, was.load)
            else was.utilisation,
            queueing_delay=delay,
            served_queueing_delay=served,
            sojourn_time=scaled(was.sojourn_time, stretch),
            time_to_first_token=_moved_to(was.time_to_first_token, first),
            inter_token_latency=scaled(was.inter_token_latency, times),
            bounds={"queueing_delay_upper": delay_bound(model, rate)} if has_bound(model) else {},
            assumptions=(*was.assumptions, note),
        )


def _scatter(model: Model) -> float:
    stalls = model.law.stall_share * model.law.stall
    return model.law.cv**2 + (stalls / model.batch_time.mean(1) if stalls else 0.0)


def _apart(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    """The largest change of a server's speed beside the others, of logarithms; infinite where there
    is another number of them.
    """
    if len(ours) != len(theirs):
        return math.inf
    pairs = zip(ours, theirs, strict=True)
    return max((abs(math.log(one / other)) for one, other in pairs), default=0.0)


def _cheap(model: Model) -> bool:
    return is_first_come(model.policy) and (
        (model.policy.joins_running and model.max_context_tokens is None)
        or (model.bound == 1 and model.servers == 1 and model.patience is None)
    )


def _moved_to(found: Quantiles, mean: float | None) -> Quantiles:
    """With another mean, and its quantiles in proportion."""
    if mean is None or not found.mean:
        return dataclasses.replace(found, mean=mean)
    return scaled(found, mean / found.mean)


def scaled(found: Quantiles, factor: float) -> Quantiles:
    """All of it, the standard errors too."""
    error = None if found.standard_error is None else found.standard_error * factor
    moved = found.mapped(lambda _, value: value * factor)
    errors = {name: of * factor for name, of in found.errors.items()}
    return dataclasses.replace(moved, standard_error=error, errors=errors)


def difference(whole: float | None, part: float | None) -> float | None:
    """None where one of them is not known."""
    return None if whole is None or part is None else whole - part


def total(delay: float | None, service: float | None, times: float) -> float | None:
    """The delay, and so many times the service; None where one of them is not known."""
    return None if delay is None or service is None else delay + times * service
