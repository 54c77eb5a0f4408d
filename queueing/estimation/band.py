"""How sure a prediction is: the estimators' uncertainty carried over, and what the slow wander of
the speed adds.

    d ln W = e_rate d ln lambda + e_speed d ln f + (cv) + (lengths)         first order

e: by predictions a step to either side; lengths, and sequences of a call where some have several:
delete-a-group jackknife over the sampled requests; cv, and the correlation of lengths in a call:
the predictions at both ends of its interval; n stalls, each as likely as any other moment: what
they add to W has the relative error 1 / sqrt(n). The interval is W e^(+-1.96 s). Slow wander is
quasi-static,

    d ln W = e_speed s Z,  s^2 = sigma^2 tau / (tau + relaxation)

as what is fast against the queue's relaxation time averages out in it; over a window of T seconds
the mean moves by 1.96 e_speed s sqrt(2 tau / T).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import stdtrit

from queueing.distributions.token_distribution import TokenDistribution
from queueing.estimation.estimates import Estimates
from queueing.estimation.interval import NORMAL, Estimate, without_interval
from queueing.estimation.lengths.within_calls import significant
from queueing.latency.law import LatencyModel

# relative, to either side: what the sample path's luck adds to an elasticity falls with it
STEP = 0.05
FREE = 0.25  # of what is free at this load, at most
GROUPS = 5
KEPT = 60.0  # seconds
MOVED = 0.2


class Ask(Protocol):
    """The mean delay of a policy."""

    def __call__(
        self,
        rate: float,
        lengths: TokenDistribution,
        law: LatencyModel,
        sequences: TokenDistribution | None = None,
        correlation: float | None = None,
    ) -> float:
        """Seconds; infinite if unstable. `sequences` of a call, and the intraclass correlation of
        their lengths: in place of the window's.
        """


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Elasticities of the mean delay, the relative standard errors that lengths and cv leave, and
    what it were with `independent` lengths, as a share of it.

    May be kept for a while: see `fresh`.
    """

    rate: float
    speed: float
    lengths_error: float
    cv_error: float
    epoch: int
    at: float  # seconds, of the window that it was found for
    load: float
    sequences_error: float = 0.0
    correlation_error: float = 0.0
    independent: float = 1.0

    def fresh(self, epoch: int, now: float, load: float) -> bool:
        """Whether it may stand for this window: same epoch, no older than `KEPT`, load moved by
        less than `MOVED` of what is free.
        """
        near = abs(load - self.load) <= MOVED * max(1 - load, 0.02)
        return epoch == self.epoch and 0 <= now - self.at < KEPT and near

    def wander_effect(self, estimates: Estimates, relaxation: float) -> float:
        """By what share the slow wander of the speed moves the mean of a window, at most (95 %)."""
        slow, window = estimates.wander, estimates.now - estimates.start
        kept = slow.tau / (slow.tau + relaxation)
        spread = slow.sigma.value * math.sqrt(kept * min(1.0, 2 * slow.tau / window))
        return NORMAL * abs(self.speed) * spread

    def interval(self, mean: float, estimates: Estimates, stalls_effect: float = 0.0) -> Estimate:
        """The predicted mean with its 95 % interval; `stalls_effect`: the share of it that
        stalls make.
        """
        rate, speed = (_error(each) for each in (estimates.arrival_rate, estimates.speed))
        stalls = stalls_effect / math.sqrt(max(1, estimates.stalls.count))
        error = math.hypot(
            self.rate * rate,
            self.speed * speed,
            self.lengths_error,
            self.sequences_error,
            self.correlation_error,
            self.cv_error,
            stalls,
        )
        if not math.isfinite(mean) or not math.isfinite(error):
            return without_interval(mean)
        factor = math.exp(min(700.0, NORMAL * error))
        return Estimate(
            mean,
            mean / factor,
            mean * factor,
            min(estimates.arrival_rate.effective_n, estimates.speed.effective_n),
        )


def sensitivity(
    ask: Ask,
    estimates: Estimates,
    law: LatencyModel,
    load: float,
    limit: int | None = None,
    *,
    pole: bool = True,
    alike: Estimate | None = None,
) -> Sensitivity:
    """By 11 + `GROUPS` predictions; `law` at the window's speed and cv, `limit` the token limit
    in force, `pole`: no patience, `alike`: the intraclass correlation of lengths.
    """
    law = dataclasses.replace(law, stall_share=0.0, stall=0.0)
    step = min(STEP, FREE * (1 - load)) if pole else STEP
    lengths, rate = estimates.output_tokens.law(limit), estimates.arrival_rate.value

    def at_speed(factor: float) -> float:
        return ask(rate, lengths, law.at_speed(law.speed * factor))

    def at_correlation(value: float) -> float:
        return ask(rate, lengths, law, correlation=value)

    error, independent = 0.0, 1.0
    if alike is not None and estimates.call_sizes is not None:
        error, independent = _of_calls(at_correlation, alike)
    return Sensitivity(
        rate=_elasticity(lambda factor: ask(rate * factor, lengths, law), step),
        speed=_elasticity(at_speed, step),
        lengths_error=_jackknife(np.array(_without_lengths(ask, estimates, law, limit))),
        cv_error=_cv_error(ask, estimates, law, lengths),
        epoch=estimates.epoch,
        at=estimates.now,
        load=load,
        sequences_error=_jackknife(np.array(_without_calls(ask, estimates, law, lengths)))
        if estimates.call_sizes is not None
        else 0.0,
        correlation_error=error,
        independent=independent,
    )


def _of_calls(ask: Callable[[float], float], alike: Estimate) -> tuple[float, float]:
    """Relative standard error that the correlation leaves, and the mean with independent lengths
    over that with the estimated ones. Of one that is not known both ends are possible.
    """
    none, found = ask(0.0), significant(alike)
    low, high = max(0.0, alike.low), min(1.0, alike.high)
    least, most = none if low == 0 else ask(low), none if high <= 0 else ask(high)
    error = abs(_log_ratio(most, least)) / (2 * NORMAL)
    return error, math.exp(min(700.0, _log_ratio(none, ask(found)))) if found else 1.0


def _cv_error(
    ask: Ask, estimates: Estimates, law: LatencyModel, lengths: TokenDistribution
) -> float:
    """Relative standard error, from the means at both ends of the interval of cv."""
    if not estimates.cv.known:
        return 0.0
    low, high = (
        ask(estimates.arrival_rate.value, lengths, dataclasses.replace(law, cv=value))
        for value in (estimates.cv.low, estimates.cv.high)
    )
    return abs(_log_ratio(high, low)) / (2 * NORMAL)


def _without_lengths(
    ask: Ask, estimates: Estimates, law: LatencyModel, limit: int | None
) -> list[float]:
    """The means without each group of output lengths."""
    means = []
    for g in range(GROUPS):
        rest = estimates.output_tokens.without(g, GROUPS).law(_shorter(limit, estimates, g))
        means.append(ask(estimates.arrival_rate.value, rest, law))
    return means


def _without_calls(
    ask: Ask, estimates: Estimates, law: LatencyModel, lengths: TokenDistribution
) -> list[float]:
    """The means without each group of calls."""
    return [
        ask(
            estimates.arrival_rate.value, lengths, law, estimates.sequences.without(g, GROUPS).law()
        )
        for g in range(GROUPS)
    ]


def _shorter(limit: int | None, estimates: Estimates, group: int) -> int | None:
    """The limit, or what is known without that group."""
    rest = estimates.output_tokens.without(group, GROUPS)
    return limit if limit is None or not rest.unknown_mass else min(limit, rest.known_to)


def _elasticity(ask: Callable[[float], float], step: float) -> float:
    return _log_ratio(ask(1 + step), ask(1 - step)) / math.log((1 + step) / (1 - step))


def _log_ratio(above: float, below: float) -> float:
    if not (0 < below < math.inf and above > 0):
        return math.inf if math.isinf(above) else 0.0
    return math.log(above / below)


def _jackknife(means: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Relative standard error, widened for being judged from few groups."""
    if not np.all(np.isfinite(means)) or not np.all(means > 0):
        return math.inf if not np.all(np.isfinite(means)) else 0.0
    return (
        math.sqrt((means.size - 1) * float(np.var(np.log(means))))
        * float(stdtrit(means.size - 1, 0.975))
        / NORMAL
    )


def _error(estimate: Estimate) -> float:
    """Relative standard error."""
    return estimate.relative / NORMAL if estimate.known else math.inf


def relaxation_time(
    load: float, service_time: float, *, one_by_one: bool, scv: float = 1.0
) -> float:
    """Seconds in which a queue forgets where it began; infinite at load 1.

    One by one: that of M/M/1, s / (1 - sqrt(load))^2, times (1 + scv) / 2. Batches of all that
    wait: the number found falls by the factor `load` a batch, so s / (1 - load).
    """
    if load >= 1:
        return math.inf
    return (
        service_time * (1 + scv) / 2 / (1 - math.sqrt(load)) ** 2
        if one_by_one
        else service_time / (1 - load)
    )
