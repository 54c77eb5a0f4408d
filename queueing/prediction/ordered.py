"""A policy's `order`, where it is not first come first served: by which methods it is answered, and
its means.

single, one server             exact          queueing.models.soap
single, several servers        approximation  W(c) = W_fcfs(c) W(1) / W_fcfs(1)
continuous                     approximation  its delay first come first served, times the same
                                              ratio at its load, service in a slot while all are
                                              taken
orders that interrupt          approximation  queueing.models.soap.resuming: single, one server,
                                              orders that interrupt for arrivals only; others
                                              simulation
dynamic by bins of like length exact          one bin (with quantiles), two
                               approximation  more (queueing.models.batches.bin_chain); large
                                              batches simulation
other batches; other orders;
aging; max_preemptions         simulation

The queueing delay is the time outside of service, interruptions included. Only means: quantiles are
simulated (queueing.prediction.steady_state), and so is an approximation in doubt. Conditions:
one prompt length (but for batches), Poisson arrivals of single sequences, no patience.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.immediate import Continuous, Dynamic, Single
from policies.ordered import in_arrival_order, order_of
from policies.orders.by_length import Binned
from policies.orders.order import Order
from queueing.errors import OutOfReachError
from queueing.model import Model, token_limit
from queueing.models.batches.batch_chain import BatchQueue, solve_batch_chain
from queueing.models.batches.batch_delay import batch_quantiles
from queueing.models.batches.bin_chain import BinnedQueue, solve_bin_chain
from queueing.models.batches.binned import bins_of
from queueing.models.slots.continuous import doubt, solve_continuous
from queueing.models.soap.predictor_text import NO_PREDICTION
from queueing.models.soap.several_servers import order_doubt
from queueing.models.soap.token_orders import (
    TokenService,
    delay_ratio,
    is_solved,
    solve_in_tokens,
)
from queueing.result import Mean, Quantiles

EXACT_BINS = 2
_NEGLIGIBLE = 1e-6  # share of batches beyond the engine's bound


def is_ordered(model: Model) -> bool:
    """Whether the policy's order is another than first come, first served."""
    return not in_arrival_order(model.policy)


def ordered_methods(model: Model) -> tuple[str, ...]:
    """As `solutions.methods`, for a policy with an order."""
    if is_in_bins(model):
        return ("exact" if _few_bins(model) else "approximation", "simulation")
    if resumes_cost(model):
        solved = _solves_resumes(model)
        return ("approximation", "simulation") if solved else ("simulation",)
    if not is_solved(order_of(model.policy)) or not _is_plain(model):
        return ("simulation",)
    if isinstance(model.policy, Single) and not _varied_prompts(model):
        return ("exact" if model.servers == 1 else "approximation", "simulation")
    in_slots = isinstance(model.policy, Continuous) and model.servers == 1
    return ("approximation", "simulation") if in_slots and model.bound else ("simulation",)


def resumes_cost(model: Model) -> bool:
    """Whether the order interrupts. A resumed request is admitted once more and has lost the token
    in the making, even where `kr` is 0.
    """
    return order_of(model.policy).preemptive


def _solves_resumes(model: Model) -> bool:
    """Without `kp`: it makes a resume dearer with every token made."""
    return (
        isinstance(model.policy, Single)
        and model.policy.max_preemptions is None
        and is_solved(order_of(model.policy), resuming=True)
        and model.servers == 1
        and model.law.kp == 0
        and _is_plain(model)
    )


def _is_plain(model: Model) -> bool:
    return (
        model.patience is None
        and model.sequences is None
        and model.arrival_scv == 1
        and not model.disaggregated
        and not model.endless
        and model.law.step(1) > 0  # the analysis counts service in tokens
    )


def is_in_bins(model: Model) -> bool:
    """Whether it is batches of like lengths that a chain answers."""
    policy = model.policy
    binned = isinstance(policy, Dynamic) and isinstance(order_of(policy), Binned)
    return binned and model.servers == 1 and _is_plain(model)


def _few_bins(model: Model) -> bool:
    order = order_of(model.policy)
    assert isinstance(order, Binned)
    return order.bins <= EXACT_BINS or model.predictor == NO_PREDICTION


def _varied_prompts(model: Model) -> bool:
    return model.prompt_tokens is not None and model.law.kp != 0


def ordered_values(model: Model, arrival_rate: float) -> dict[str, Any]:
    """What `ordered_methods` names first, by field of a Prediction. Raises UnstableQueueError,
    SpecError.
    """
    order = order_of(model.policy)
    if isinstance(order, Binned):
        return _in_bins(model, arrival_rate, order)
    if isinstance(model.policy, Continuous):
        return _in_slots(model, arrival_rate, order)
    service = TokenService.alone(model.law, model.output_tokens, token_limit(model))
    queue = solve_in_tokens(order, service, arrival_rate, model.servers, model.predictor)
    first = model.batch_time.first_token(1)
    return {
        "queueing_delay": Quantiles(queue.delay),
        "sojourn_time": Quantiles(queue.sojourn),
        "batch_size": Mean(1.0),
        "utilisation": queue.load,
        "service_time": Quantiles(queue.sojourn - queue.delay),
        "assumptions": _noted(model, queue.doubt),
        **_token_times(order, queue.delay + first, model.law.step(1)),
    }


def _in_slots(model: Model, arrival_rate: float, order: Order) -> dict[str, Any]:
    assert model.bound is not None
    slots = solve_continuous(model.slot_time, arrival_rate, model.bound)
    service = TokenService.in_slots(model.slot_time, model.bound, token_limit(model))
    ratio = delay_ratio(order, service, slots.load, model.predictor)
    saved = slots.queueing_delay * (1 - ratio)
    first, step = slots.time_to_first_token - saved, slots.inter_token_latency
    return {
        "queueing_delay": Quantiles(slots.queueing_delay * ratio),
        "sojourn_time": Quantiles(slots.sojourn_time - saved),
        "batch_size": Mean(slots.batch_size),
        "utilisation": slots.utilisation,
        "service_time": Quantiles(slots.sojourn_time - slots.queueing_delay),
        "assumptions": _noted(
            model,
            doubt(model.slot_time, arrival_rate, model.bound, slots),
            order_doubt(ratio, slots.load, model.bound),
        ),
        **_token_times(order, first, step),
    }


def _in_bins(model: Model, arrival_rate: float, order: Binned) -> dict[str, Any]:
    time, bound = model.batch_time, model.bound
    bins = list(bins_of(model.output_tokens, order, model.predictor, token_limit(model)))
    if len(bins) == 1:
        one = solve_batch_chain(time, arrival_rate, bound)
        delay, sojourn = batch_quantiles(time, arrival_rate, one, model.levels)
        return _of_batches(model, one, one.largest, delay, sojourn)
    several = solve_bin_chain(time, arrival_rate, bins)
    if bound is not None and float(several.sizes[bound:].sum()) > _NEGLIGIBLE:
        raise OutOfReachError(f"batches from bins that reach the engine's bound of {bound}")
    delay, sojourn = Quantiles(several.queueing_delay), Quantiles(several.sojourn_time)
    found = _of_batches(model, several, len(several.sizes), delay, sojourn)
    if len(bins) <= EXACT_BINS:
        return found
    note = "approximation of the requests that a batch leaves: within 4 % of simulation"
    return found | {"assumptions": (*model.assumptions, note)}


def _of_batches(
    model: Model,
    queue: BatchQueue | BinnedQueue,
    largest: int,
    delay: Quantiles,
    sojourn: Quantiles,
) -> dict[str, Any]:
    time, sizes = model.batch_time, range(1, largest + 1)
    first = queue.by_request(np.array([time.first_token(size) for size in sizes]))
    step = queue.by_request(np.array([time.law.step(size) for size in sizes]))
    service = queue.by_request(np.array([time.mean(size) for size in sizes]))
    return {
        "queueing_delay": delay,
        "sojourn_time": sojourn,
        "service_time": Quantiles(service),
        "batch_size": Mean(queue.batch_size),
        "utilisation": queue.utilisation,
        **_token_times(order_of(model.policy), (delay.mean or 0.0) + first, step),
    }


def _token_times(order: Order, first: float, step: float | None) -> dict[str, Any]:
    """Unknown where a service may be interrupted between two tokens, or a law puts the first token
    before the dispatch.
    """
    if order.preemptive or first < 0:
        return {}
    return {"time_to_first_token": Quantiles(first), "inter_token_latency": Quantiles(step)}


def cost_of_resuming(model: Model) -> str:
    """What an answer says of it, under an order that interrupts."""
    seconds = model.law.setup(1, 0.0, 1.0)
    return (
        f"an interrupted request loses the token in the making and takes {seconds:.3g} s to go on "
        "(k1 + k2 + kr), which counts as service"
    )


def _noted(model: Model, *doubts: str | None) -> tuple[str, ...]:
    notes = [f"approximation in doubt: {reason}" for reason in doubts if reason is not None]
    if resumes_cost(model):
        notes.insert(0, cost_of_resuming(model))
    return (*model.assumptions, *notes)
