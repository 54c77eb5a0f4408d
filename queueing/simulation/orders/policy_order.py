"""The form of an order (`policies.orders.order`), as the compiled replays take it: ranks and groups
of all requests at once, equal to `Order.rank` and `Order.bin_of` to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies.core import Policy
from kendall.policies.immediate import Continuous, Single
from kendall.policies.ordered import Ordered, order_of
from kendall.policies.orders.order import Form, boosted
from kendall.policies.registry import is_built_in
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.predictors.prediction_cost import NO_COST, PaidPredictions
from kendall.queueing.simulation.orders.interrupting_kernels import NEVER, Interrupting
from kendall.queueing.simulation.orders.waiting_kernels import (
    FIRST_IN,
    GROUPS,
    RANKED,
    RATIO,
    RankedQueue,
    ordered_queue,
)


def has_queue(policy: Policy) -> bool:
    """Whether it is built in, with an order that the queues of `waiting_kernels` have."""
    order = order_of(policy)
    return is_built_in(policy) and order.is_formal() and not order.preemptive


def interrupts(policy: Policy) -> bool:
    """Whether it interrupts requests in an order that `interrupting_kernels` has."""
    order = order_of(policy)
    form = order.form
    by_rank = order.is_formal() and not (form.ratio or form.bins or form.prompt_weight)
    return isinstance(policy, Single | Continuous) and order.preemptive and by_rank


def interrupting_of(
    policy: Ordered,
    predicted: Vector,
    limit: float,
    paid: PaidPredictions,
    prompts: npt.NDArray[Any] | float = 0.0,
) -> Interrupting:
    """For requests with these predictions, tokens, which take the server's time `paid`; all have
    the token limit `limit`.
    """
    form, tokens = order_of(policy).form, np.minimum(predicted, limit)
    values, rows = _values(form, tokens, prompts), np.empty(0, dtype=np.int64)
    if form.classes:
        rows = len(form.starts) * np.searchsorted(form.classes, tokens)
    return Interrupting(
        values,
        values if form.settled is None else tokens,  # not read: one array fewer in the caches
        math.nan if form.settled is None else form.settled,
        math.nan if form.aging is None else form.aging,
        form.per_token,
        form.bounces,
        min(form.first_tokens, NEVER),
        np.array([min(start, NEVER) for start in form.starts], dtype=np.int64),
        np.array(form.ranks, dtype=float),
        rows,
        form.every,
        NEVER if policy.max_preemptions is None else policy.max_preemptions,
        paid.every,
        paid.some,
    )


def ranks_of(
    policy: Ordered, predicted: Vector, limit: float, prompts: npt.NDArray[Any]
) -> tuple[Interrupting, Vector]:
    """As `interrupting_of`, of any order by arrival, prediction and tokens made, and what prompts
    add to each rank before the first token; one that interrupts nobody is settled with 0 tokens.
    """
    order, tokens = order_of(policy), np.minimum(predicted, limit)
    form = order.form
    held = prompts if form.quantity == "memory" else 0.0  # whatever is made
    whole = interrupting_of(policy, predicted, limit, NO_COST, held)
    if not order.preemptive:
        whole = whole._replace(settled=0.0, predicted=tokens)
    if not form.prompt_weight:
        return whole, np.empty(0)
    scale = form.weight * form.prompt_weight * (1.0 if form.aging is None else form.aging)
    return whole, scale * prompts


def queue_of(
    policy: Policy,
    arrived_at: Vector,
    predicted: Vector,
    limit: float,
    largest: int,
    *,
    prompts: npt.NDArray[np.int64] | None = None,
    lanes: int = 1,
) -> RankedQueue:
    """An empty one for requests with these predictions and prompts, tokens; all have the token
    limit `limit`, no priority and one patience. `lanes`: queues, where each server has one.
    """
    form, tokens = order_of(policy).form, np.minimum(predicted, limit)
    none = np.zeros(len(arrived_at))
    if form.bins is not None:
        bins = np.maximum(1, np.ceil(form.bins * (tokens / limit))) - 1
        return ordered_queue(GROUPS, none, bins, largest, lanes)
    if form.ratio:
        return ordered_queue(RATIO, _values(form, tokens, none), none, largest, lanes)
    if form.quantity == "arrival" and not form.starts:
        return ordered_queue(FIRST_IN, none, none, largest, lanes)
    ranks = _values(form, tokens, none if prompts is None else prompts)
    if form.aging is not None:
        ranks = arrived_at + form.aging * ranks
    return ordered_queue(RANKED, ranks, none, largest, lanes)


def phase_ranks(
    policy: Policy,
    arrived_at: Vector,
    predicted: Vector,
    limit: float,
    prompts: npt.NDArray[Any],
    *,
    in_tokens: Vector | None = None,
) -> npt.NDArray[np.float64]:
    """Of requests that wait for their prefill, and for their decode, [2, n]: with no token made and
    with one. `in_tokens`: what the prefills take as tokens of an answer, where each phase ranks by
    its own service.
    """
    form, tokens = order_of(policy).form, np.minimum(predicted, limit)
    behind = replace(form, prompt_weight=0.0)
    values = [_values(form, tokens, prompts), _values(behind, tokens, prompts)]
    if in_tokens is not None:
        values[0] = _values(behind, in_tokens, prompts)
    if form.starts:
        values = [value + form.level(made) for made, value in enumerate(values)]
    if form.aging is not None:
        values = [arrived_at + form.aging * value for value in values]
    return np.array(values)


def _values(form: Form, tokens: Vector, prompts: npt.NDArray[Any] | float) -> Vector:
    """Before the first token. Priorities are all the same, deadlines come in order of arrival."""
    value = tokens if form.quantity == "prediction" else np.zeros(len(tokens))
    if form.quantity == "memory":
        value = tokens * (prompts + (tokens + 1) / 2)
    if form.prompt_weight:
        value = value + form.prompt_weight * prompts
    if form.weight != 1:
        value = form.weight * value
    if form.boosts is not None:  # not numpy's: its logarithm differs in the last bit
        return np.array([boosted(each) for each in (value / form.boosts).tolist()])
    if form.first_up_to is not None:
        return np.where(value <= form.first_up_to, -math.inf, value)
    return value if form.above is None else np.where(value > form.above, 1.0, 0.0)
