"""The queue that what-ifs and advice are asked about, and what they answer for a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kendall.queueing.choosing.advice import advise as advice
from kendall.queueing.choosing.advice.what_if import usual_token_limits
from kendall.queueing.choosing.candidates import (
    at_sizes,
    canonical,
    one_knob_away,
    usual_policies,
    usual_sizes,
)
from kendall.queueing.choosing.forecast import Advice, Forecast, Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import LAW, LENGTHS

POLICY = "capped:max_batch_size=8"


def capacity(policy: str = POLICY, tokens: TokenDistribution = LENGTHS) -> float:
    return Queue.read(policy, tokens, LAW, max_num_seqs=16).largest_stable_rate


def forecast(
    estimates: Estimates,
    shape: LatencyModel,
    setting: Setting,
    limits: QueueLimits,
    *,
    family: str | None = None,
) -> Forecast:
    """Of one setting."""
    return OperatingPoint(estimates=estimates, shape=shape, limits=limits, family=family).forecast(
        setting
    )


def what_ifs(
    estimates: Estimates,
    shape: LatencyModel,
    current: Setting,
    limits: QueueLimits,
    *,
    policies: Sequence[str] | None = None,
    token_limits: Sequence[int | None] | None = None,
    sizes: Sequence[int] | None = None,
    beside: bool = False,
) -> list[Forecast]:
    """Of the settings one knob away, the usual ones where none are given; `beside`: that in force
    comes first.
    """
    point = OperatingPoint(estimates=estimates, shape=shape, limits=limits)
    most = limits.engine.max_num_seqs
    others = one_knob_away(
        current,
        policies=usual_policies(current, most) if policies is None else policies,
        token_limits=usual_token_limits(point) if token_limits is None else token_limits,
        sizes=usual_sizes(current, most) if sizes is None else at_sizes(current, sizes, most),
    )
    return [point.forecast(each) for each in ([canonical(current)] if beside else []) + others]


def advise(
    estimates: Estimates,
    shape: LatencyModel,
    current: Setting,
    limits: QueueLimits,
    objective: Objective,
    *,
    family: str | None = None,
    **targets: Any,
) -> list[Advice]:
    """Of every target, unless they are named."""
    operating_point = OperatingPoint(estimates=estimates, shape=shape, limits=limits, family=family)
    return advice.advise(operating_point, current, objective, **targets)
