"""The queue that what-ifs and advice are asked about, and what they answer for a window."""

from __future__ import annotations

from typing import Any

from policies import parse_policy
from queueing.control.advice import advise as advice
from queueing.control.advice import what_if
from queueing.distributions.token_distribution import TokenDistribution
from queueing.estimation.estimates import Estimates
from queueing.estimation.window_queue import Limits
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.optimization.forecast import Advice, Forecast, Setting
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.objective import Objective
from tests.queueing.estimation_runs import LAW, LENGTHS

POLICY = "capped:max_batch_size=8"


def capacity(policy: str = POLICY, tokens: TokenDistribution = LENGTHS) -> float:
    return Model(
        policy=parse_policy(policy), output_tokens=tokens, law=LAW, max_num_seqs=16
    ).largest_stable_rate


def forecast(
    estimates: Estimates,
    shape: LatencyModel,
    setting: Setting,
    limits: Limits,
    *,
    family: str | None = None,
) -> Forecast:
    """Of one setting."""
    return OperatingPoint(estimates=estimates, shape=shape, limits=limits, family=family).forecast(
        setting
    )


def what_ifs(
    estimates: Estimates, shape: LatencyModel, current: Setting, limits: Limits, **asked: Any
) -> list[Forecast]:
    """Of the settings one knob away."""
    operating_point = OperatingPoint(estimates=estimates, shape=shape, limits=limits)
    return list(what_if.what_ifs(operating_point, current, **asked))


def advise(
    estimates: Estimates,
    shape: LatencyModel,
    current: Setting,
    limits: Limits,
    objective: Objective,
    *,
    family: str | None = None,
    **targets: Any,
) -> list[Advice]:
    """Of every target, unless they are named."""
    operating_point = OperatingPoint(estimates=estimates, shape=shape, limits=limits, family=family)
    return advice.advise(operating_point, current, objective, **targets)
