"""What a setting would gain over another, and how far both are from saturation.

Both are simulated with the same arrivals and the same answers (common random numbers), so that
their ratio is far surer than either mean. With r = m' / m, the ratio of the means of what is
compared (queueing.optimization.quantity):

    work      r at both ends of the interval of rate x speed (a slower engine is a faster clock: the
              ratio is the same), not its slope: near saturation that would say far too much
    lengths   scatter of ln r over parts of the answers (queueing.control.advice.known_lengths), to
              either side of their median
    noise     batch means of (w'_i - r w_i) / m

    gain = 1 - r,   ln r +- hypot(work, lengths, noise)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from queueing.control.advice.forecast import Knobs
from queueing.control.advice.situation import Situation
from queueing.distributions.token_distribution import TokenDistribution
from queueing.errors import PredictionError
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.measurement.statistics import FloatArray, batch_means_interval
from queueing.result import Quantity
from queueing.simulation.experiment import simulate_run

REQUESTS = 30_000
NIL = 1e-9  # seconds: delays of nobody do not divide


@dataclass(frozen=True, eq=False)
class Weighed:
    """One setting in one situation; `delays`: what is compared, in order of arrival, seconds;
    None where there is no steady state.
    """

    knobs: Knobs
    load: float
    delays: FloatArray | None
    quantity: Quantity = "queueing_delay"

    @property
    def mean(self) -> float:
        """Seconds; infinite without a steady state."""
        return math.inf if self.delays is None else float(self.delays.mean())


def weigh(
    situation: Situation,
    knobs: Knobs,
    quantity: Quantity,
    *,
    work: float = 1.0,
    whole: TokenDistribution | None = None,
) -> Weighed:
    """Its load and its delays or sojourns; `work`: factor on the rate, `whole`: lengths in place
    of the estimated ones.
    """
    model, rate = situation.model(knobs, whole), situation.rate * work
    load = model.load(rate)
    if load >= 1 and model.patience is None:
        return Weighed(knobs, load, None, quantity)
    run = simulate_run(model, rate, REQUESTS, np.random.SeedSequence(0)).after(REQUESTS // 10)
    values = (
        run.sojourn_time + situation.backlog(model, rate)
        if quantity == "sojourn_time"
        else run.queueing_delay
    )
    return Weighed(knobs, load, np.where(run.lost, model.patience or 0.0, values), quantity)


def gain_of(situation: Situation, before: Weighed, after: Weighed, relative: float) -> Estimate:
    """1 - after / before with its interval; `relative`: half width of rate x speed. Where
    neither is stable, of the loads.
    """
    size, quantity = situation.effective_n, after.quantity
    base = _log_ratio(before, after)
    if before.delays is None and after.delays is None:
        return Estimate(1 - math.exp(base), 1 - math.exp(base), 1 - math.exp(base), size)
    factors = (1 - min(relative, 0.9), 1 + relative)
    pairs = [
        (
            weigh(situation, before.knobs, quantity, work=each),
            weigh(situation, after.knobs, quantity, work=each),
        )
        for each in factors
    ]
    ends = [
        _log_ratio(*pair)
        for pair in pairs
        if pair[0].delays is not None or pair[1].delays is not None
    ]
    more, less = (
        math.hypot(each, _noise(before, after)) for each in _lengths(situation, before, after)
    )
    if math.isinf(base):  # only one of them is stable
        worst = max(ends, default=base)
        return Estimate(1.0, _less(worst + more), 1.0, size) if base < 0 else UNKNOWN
    up, down = (max(0.0, *(sign * (each - base) for each in (*ends, base))) for sign in (1, -1))
    return Estimate(
        _less(base), _less(base + math.hypot(up, more)), _less(base - math.hypot(down, less)), size
    )


def predicted_of(situation: Situation, knobs: Knobs, quantity: Quantity) -> Estimate:
    """The predicted mean with its interval; unknown without a steady state."""
    try:
        found = situation.forecast(knobs)
    except PredictionError:
        return UNKNOWN
    return found.sojourn if quantity == "sojourn_time" else found.mean


def _log_ratio(before: Weighed, after: Weighed) -> float:
    """ln r; of the loads where neither is stable."""
    if before.delays is None or after.delays is None:
        if before.delays is None and after.delays is None:
            return math.log(after.load / before.load)
        return -math.inf if before.delays is None else math.inf
    return math.log((after.mean + NIL) / (before.mean + NIL))


def _lengths(situation: Situation, before: Weighed, after: Weighed) -> tuple[float, float]:
    """Half widths of ln r at 95 %, upwards and downwards, by what the sample of lengths leaves
    open; infinite where that is stability.

    Two, as they differ much: a part with a few very long answers says how bad a setting without a
    limit may be, not that a limit is bad.
    """
    lengths = situation.lengths
    assert lengths is not None
    parts = [
        _log_ratio(
            *(weigh(situation, each.knobs, each.quantity, whole=part) for each in (before, after))
        )
        for part in lengths.parts
    ]
    finite = np.array([each for each in parts if math.isfinite(each)])
    if finite.size < 2:
        return (math.inf if math.inf in parts else 0.0), 0.0
    middle, scale = (
        float(np.median(finite)),
        lengths.to_error * float(stdtrit(finite.size - 1, 0.975)),
    )
    up, down = (
        scale * math.sqrt(float(np.mean(np.maximum(sign * (finite - middle), 0.0) ** 2)) * 2)
        for sign in (1, -1)
    )
    return (math.inf if math.inf in parts else up), down


def _noise(before: Weighed, after: Weighed) -> float:
    """Half width of ln r at 95 % by the simulation."""
    if before.delays is None or after.delays is None or not after.mean > 0:
        return 0.0
    ratio = (after.mean + NIL) / (before.mean + NIL)
    return (
        batch_means_interval(
            (after.delays - ratio * before.delays) / (before.mean + NIL)
        ).half_width
        / ratio
    )


def _less(log_ratio: float) -> float:
    return 1 - math.exp(log_ratio) if log_ratio < 700 else -math.inf
