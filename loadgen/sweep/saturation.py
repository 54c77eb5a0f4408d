"""Where a policy saturates: bisection on the rate, and what the law says about it beforehand.

The bracket starts a little around the predicted rate, moves where a probe contradicts it, and is
halved (on a logarithmic scale) until high / low - 1 is within the tolerance. The answer is the
bracket: low passed, high failed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kendall.loadgen.sweep.grid import LEAST_SECONDS, Basis, SweepCell, cell_name
from kendall.loadgen.sweep.slo import SATURATION, ObservedSlo
from kendall.policies import Fixed, is_first_come
from kendall.queueing.choosing.rates import heaviest_scanned
from kendall.queueing.choosing.search import bisected
from kendall.queueing.errors import PredictionError
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

FIRST = 1.1  # factor of the first bracket, around the prediction
WIDEN = 1.25
MOST_PROBES = 16
PRECISION = 2**-20  # of a predicted load
DETECT = 3.5  # standard errors by which a growth of half the tolerance should stand out
LEAST_REQUESTS, MOST_REQUESTS = 300, 20_000


@dataclass(frozen=True, slots=True)
class RateBracket:
    """The bracket: 0 where no probe passed, infinite where none failed."""

    low: float
    high: float
    probes: int

    def within(self, tolerance: float) -> bool:
        return self.low > 0 and self.high / self.low <= 1 + tolerance


async def bisect(
    passes: Callable[[float], Awaitable[bool]],
    start: float,
    tolerance: float,
    most: int = MOST_PROBES,
) -> RateBracket:
    """Around `start`, with at most `most` probes."""
    bracket, down, up = RateBracket(0.0, math.inf, 0), start / FIRST, start * FIRST
    while bracket.probes < most and not bracket.within(tolerance):
        low, high, probes = bracket.low, bracket.high, bracket.probes + 1
        rate = down if not low else up if math.isinf(high) else math.sqrt(low * high)
        if await passes(rate):
            bracket = RateBracket(rate, high, probes)
            up = max(up, rate * WIDEN) if rate >= up else up
        else:
            bracket = RateBracket(low, rate, probes)
            down = min(down, rate / WIDEN) if rate <= down else down
    return bracket


def probe_requests(model: Queue, rate: float, tolerance: float) -> int:
    """So many evenly spaced ones that a growth of half the tolerance stands out of the scatter of
    the service.

    A batch of b requests takes a time with at most the scatter of one length; the number in the
    system swings by b.
    """
    lengths, size = model.requests.output_tokens, model.bound or 64
    cv2 = lengths.moment(2) / lengths.mean**2 - 1 + model.engine.law.cv**2
    scatter = (DETECT / (tolerance / 2)) ** 2 * cv2
    return int(
        min(
            MOST_REQUESTS,
            max(LEAST_REQUESTS, rate * LEAST_SECONDS, 2 * size / (tolerance / 2), scatter),
        )
    )


def probe_cell(basis: Basis, policy: str, limit: int | None, goal: str, rate: float) -> SweepCell:
    """One probe of a search."""
    plan, model, saturation = basis.plan, basis.model(policy, limit), goal == SATURATION
    own_length = saturation and plan.num_prompts is None and plan.duration is None
    count, cut = basis.count(
        model,
        rate,
        probe_requests(model, rate, plan.tolerance) if own_length else basis.needed(model, rate),
    )
    return SweepCell(
        name=cell_name(policy, limit, f"{goal}-probe-{rate:.6g}"),
        policy=policy,
        load=model.load(rate),
        rate=rate,
        max_output_tokens=limit,
        count=count,
        cut=cut,
        evenly=saturation,
        purpose="saturation" if saturation else "slo",
    )


def probes_expected(tolerance: float) -> int:
    """The two ends of the first bracket, one more where the prediction is off, and as many as
    halve it down to the tolerance.
    """
    halvings = math.ceil(math.log2(max(1.0, 2 * math.log(FIRST) / math.log1p(tolerance))))
    return min(MOST_PROBES, 3 + halvings)


def first_rate(model: Queue, predicted: float | None) -> float:
    """Around which a search begins; `predicted` as `predicted_rate` has it."""
    return predicted or model.largest_stable_rate / 2


def predicted_rate(model: Queue, slo: ObservedSlo | None) -> float | None:
    """The largest stable rate, or the largest at which the predicted quantity keeps its bound;
    None where no method gives it.
    """
    if slo is None:
        return model.largest_stable_rate

    limit = model.largest_stable_rate

    def kept(load: float) -> bool:
        try:
            value = slo.predicted(predict_model(model, load * limit))
        except PredictionError:
            return False
        if value is None:
            raise _NoValueError
        return value <= slo.bound

    def between(low: float, high: float) -> float | None:
        return (low + high) / 2 if high - low > PRECISION else None

    try:
        # the delay of others rises with the load
        rises = is_first_come(model.policy) and not isinstance(model.policy, Fixed)
        low = 0.0 if rises else heaviest_scanned(kept)
        if low is None:
            return None
        return limit * bisected(kept, low, 1.0, between) or None
    except _NoValueError:
        return None


class _NoValueError(Exception):
    """No method gives the quantity."""
