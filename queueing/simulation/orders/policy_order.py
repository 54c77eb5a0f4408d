"""The queue of a policy whose order interrupts nobody, as the compiled replays take it: ranks and
groups of all requests at once, equal to `Order.rank` and `Binned.bin_of` to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kendall.policies.core import Policy
from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.policies.orders.by_age import LeastAttained, Levels
from kendall.policies.orders.by_length import Binned, LongestFirst, ShortestFirst, Threshold
from kendall.policies.orders.by_urgency import ByPriority, EarliestDeadline, HighestRatio
from kendall.policies.orders.order import Order, Ranked
from kendall.policies.orders.preemptive import (
    PreemptiveShortest,
    PreemptiveThreshold,
    ShortestRemaining,
    Trail,
)
from kendall.policies.registry import is_built_in
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.simulation.orders.interrupting_kernels import (
    FIXED,
    LEVELS,
    NEVER,
    QUANTA,
    REMAINING,
    Interrupting,
)
from kendall.queueing.simulation.orders.waiting_kernels import (
    FIRST_IN,
    GROUPS,
    RANKED,
    RATIO,
    RankedQueue,
    ordered_queue,
)

_COMPILED = frozenset(
    {
        Order,
        ShortestFirst,
        LongestFirst,
        Threshold,
        EarliestDeadline,
        ByPriority,
        HighestRatio,
        Binned,
    }
)  # not their subclasses
_INTERRUPTING = {
    PreemptiveShortest: FIXED,
    PreemptiveThreshold: FIXED,
    ShortestRemaining: REMAINING,
    Trail: REMAINING,
    Levels: LEVELS,
    LeastAttained: QUANTA,
}


def has_queue(policy: Policy) -> bool:
    """Whether it is built in, with an order that the queues of `waiting_kernels` have."""
    return is_built_in(policy) and type(order_of(policy)) in _COMPILED


def interrupts(policy: Policy) -> bool:
    """Whether it serves one request at a time in an order that `interrupting_kernels` has."""
    return isinstance(policy, Single) and type(order_of(policy)) in _INTERRUPTING


def interrupting_of(policy: Single, predicted: Vector, limit: float) -> Interrupting:
    """For requests with these predictions, tokens; all have the token limit `limit`."""
    order: Any = order_of(policy)
    tokens = np.minimum(predicted, limit)
    kind = _INTERRUPTING[type(order)]
    value = tokens if kind == REMAINING else np.zeros(len(tokens))
    if kind == FIXED:
        value = _values(order, tokens)
    return Interrupting(
        kind,
        np.asarray(value, float),
        math.nan if order.aging is None else order.aging,
        order.c if isinstance(order, Trail) else math.inf,
        order.quantum if isinstance(order, LeastAttained) else 1,
        order.levels if isinstance(order, Levels) else 1,
        NEVER if policy.max_preemptions is None else policy.max_preemptions,
    )


def queue_of(
    policy: Policy,
    arrived_at: Vector,
    predicted: Vector,
    limit: float,
    largest: int,
    *,
    lanes: int = 1,
) -> RankedQueue:
    """An empty one for requests with these predictions, tokens; all have the token limit `limit`,
    no priority and one patience. `lanes`: queues, where each server has one.
    """
    order = order_of(policy)
    tokens = np.minimum(predicted, limit)
    none = np.zeros(len(arrived_at))
    if isinstance(order, Binned):
        bins = np.maximum(1, np.ceil(order.bins * (tokens / limit))) - 1
        return ordered_queue(GROUPS, none, bins, largest, lanes)
    if isinstance(order, HighestRatio):
        return ordered_queue(RATIO, tokens, none, largest, lanes)
    if in_arrival_order(policy):
        return ordered_queue(FIRST_IN, none, none, largest, lanes)
    return ordered_queue(RANKED, _ranks(order, arrived_at, tokens), none, largest, lanes)


def _values(order: Ranked, tokens: Vector) -> Vector:
    value: Any = tokens
    if isinstance(order, Threshold):
        value = np.where(tokens > order.threshold, 1.0, 0.0)
    elif isinstance(order, LongestFirst):
        value = -tokens
    elif isinstance(order, ByPriority):
        value = np.zeros(len(tokens))
    return np.asarray(value, float)


def _ranks(order: Order, arrived_at: Vector, tokens: Vector) -> Vector:
    if not isinstance(order, Ranked):
        return np.zeros(len(tokens))  # of arrival, or of deadlines that come in that order
    value = _values(order, tokens)
    return np.asarray(value if order.aging is None else arrived_at + order.aging * value)
