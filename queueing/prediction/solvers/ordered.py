"""A policy's `order`, where it is not first come first served: by which methods it is answered, and
its means.

single, one server             exact          queueing.models.soap
single, several servers        approximation  W(c) = W_fcfs(c) W(1) / W_fcfs(1)
continuous                     approximation  its delay first come first served, times the same
                                              ratio at its load, service in a slot while all are
                                              taken
orders that interrupt          approximation  queueing.models.soap.resuming: single, one server,
                                              orders that interrupt for arrivals only, no
                                              predictions on the server; others simulation
dynamic by bins of like length exact          one bin (with quantiles), two
                               approximation  more (queueing.models.batches.bin_chain); large
                                              batches simulation
other batches; other orders;
aging; max_preemptions         simulation

The queueing delay is the time outside of service, interruptions included. Only means: quantiles are
simulated (queueing.prediction.steady_state), and so is an approximation in doubt. Conditions:
Poisson arrivals of single sequences, no patience, one stage, lengths without a tail beyond their
table, a step that takes time. For single also: one prompt length, or no cost of prompts (`kp` = 0),
which orders that interrupt need in any case.
"""

from __future__ import annotations

from typing import Any

from kendall.policies.immediate import Continuous, Dynamic, Single
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.batch_delay import batch_quantiles
from kendall.queueing.models.batches.bin_chain import solve_bin_chain
from kendall.queueing.models.batches.binned import bins_of
from kendall.queueing.models.slots.continuous import doubt, solve_continuous
from kendall.queueing.models.soap.several_servers import order_doubt
from kendall.queueing.models.soap.token_orders import (
    TokenService,
    delay_ratio,
    is_solved,
    solve_in_tokens,
)
from kendall.queueing.prediction.solver import IN_DOUBT, Solver, answered, of_batches, token_times
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles

EXACT_BINS = 2
_NEGLIGIBLE = 1e-6  # share of the batches above the engine's bound, below which the chain holds


def is_ordered(model: Queue) -> bool:
    """Whether the policy's order is one other than first come, first served."""
    return not in_arrival_order(model.policy)


def resumes_cost(model: Queue) -> bool:
    """Whether resuming a request costs time, which is the case under every order that interrupts:
    even where `kr` is 0, the request is admitted once more and has lost the token in the making.
    """
    return order_of(model.policy).preemptive


def _is_plain(model: Queue) -> bool:
    return (
        model.requests.patience is None
        and model.requests.sequences is None
        and model.arrivals.scv == 1
        and not model.engine.disaggregated
        and not model.requests.endless
        and model.law.step(1) > 0  # the analysis counts service in tokens
    )


def _covers_one_by_one(model: Queue) -> tuple[str, ...]:
    """Methods for `single`. Orders that interrupt need `kp` = 0: with it, a resume costs more with
    every token made.
    """
    policy, order = model.policy, order_of(model.policy)
    if not isinstance(policy, Single) or not _is_plain(model):
        return ()
    if resumes_cost(model):
        plain = (
            policy.max_preemptions is None
            and model.engine.servers == 1
            and model.engine.law.kp == 0
            and not model.predicts_on_server
        )
        return ("approximation",) if plain and is_solved(order, resuming=True) else ()
    if not is_solved(order) or (
        model.requests.prompt_tokens is not None and model.engine.law.kp != 0
    ):
        return ()
    return ("exact",) if model.engine.servers == 1 else ("approximation",)


def _one_by_one(model: Queue, arrival_rate: float) -> dict[str, Any]:
    order = order_of(model.policy)
    service = TokenService.alone(
        model.law, model.requests.output_tokens, model.requests.token_limit
    )
    queue = solve_in_tokens(
        order, service, arrival_rate, model.engine.servers, model.requests.predictor
    )
    delay, tokens = Quantiles(queue.delay), dict[str, Any]()
    if not order.preemptive:  # else a service may be interrupted between two tokens
        tokens = token_times(delay, model.batch_time.first_token(1), model.law.step(1))
    return {
        **answered(delay, Quantiles(queue.sojourn), 1.0, queue.load),
        "service_time": Quantiles(queue.sojourn - queue.delay),
        "assumptions": _noted(model, queue.doubt),
        **tokens,
    }


def _covers_slots(model: Queue) -> tuple[str, ...]:
    solved = is_solved(order_of(model.policy)) and not resumes_cost(model)
    in_slots = isinstance(model.policy, Continuous) and model.engine.servers == 1 and model.bound
    return ("approximation",) if solved and in_slots and _is_plain(model) else ()


def _in_slots(model: Queue, arrival_rate: float) -> dict[str, Any]:
    assert model.bound is not None
    order = order_of(model.policy)
    slots = solve_continuous(model.slot_time, arrival_rate, model.bound)
    service = TokenService.in_slots(model.slot_time, model.bound, model.requests.token_limit)
    ratio = delay_ratio(order, service, slots.load, model.requests.predictor)
    delay, saved = slots.queueing_delay * ratio, slots.queueing_delay * (1 - ratio)
    first = slots.time_to_first_token - saved
    return {
        **answered(
            Quantiles(delay),
            Quantiles(slots.sojourn_time - saved),
            slots.batch_size,
            slots.utilisation,
        ),
        "service_time": Quantiles(slots.sojourn_time - slots.queueing_delay),
        "assumptions": _noted(
            model,
            doubt(model.slot_time, arrival_rate, model.bound, slots),
            order_doubt(ratio, slots.load, model.bound),
        ),
        "time_to_first_token": Quantiles(first if first >= delay else None),
        "inter_token_latency": Quantiles(slots.inter_token_latency),
    }


def _covers_bins(model: Queue) -> tuple[str, ...]:
    bins = order_of(model.policy).form.bins
    if not isinstance(model.policy, Dynamic) or bins is None:
        return ()
    if model.engine.servers != 1 or not _is_plain(model):
        return ()
    few = bins <= EXACT_BINS or model.requests.predictor == NO_PREDICTION
    return ("exact",) if few else ("approximation",)


def _in_bins(model: Queue, arrival_rate: float) -> dict[str, Any]:
    time, bound, count = model.batch_time, model.bound, order_of(model.policy).form.bins
    assert count is not None
    bins = list(
        bins_of(
            model.requests.output_tokens,
            count,
            model.requests.predictor,
            model.requests.token_limit,
        )
    )
    if len(bins) == 1:
        one = solve_batch_chain(time, arrival_rate, bound)
        delay, sojourn = batch_quantiles(time, arrival_rate, one, model.levels)
        return of_batches(model, time, one, delay, sojourn)
    several = solve_bin_chain(time, arrival_rate, bins)
    if bound is not None and float(several.sizes[bound:].sum()) > _NEGLIGIBLE:
        raise OutOfReachError(f"batches from bins that reach the engine's bound of {bound}")
    delay, sojourn = Quantiles(several.queueing_delay), Quantiles(several.sojourn_time)
    found = of_batches(model, time, several, delay, sojourn)
    if len(bins) <= EXACT_BINS:
        return found
    note = "approximation of the requests that a batch leaves: within 4 % of simulation"
    return found | {"assumptions": (*model.assumptions, note)}


def cost_of_resuming(model: Queue) -> str:
    """The note on a prediction that says what it assumes of resuming, under an order that
    interrupts.
    """
    seconds = model.engine.law.setup(1, 0.0, 1.0)
    return (
        f"an interrupted request loses the token in the making and takes {seconds:.3g} s to go on "
        "(k1 + k2 + kr), which counts as service"
    )


def _noted(model: Queue, *doubts: str | None) -> tuple[str, ...]:
    notes = [f"{IN_DOUBT}{reason}" for reason in doubts if reason is not None]
    if resumes_cost(model):
        notes.insert(0, cost_of_resuming(model))
    return (*model.assumptions, *notes)


ONE_BY_ONE = Solver(
    _covers_one_by_one, {"exact": _one_by_one, "approximation": _one_by_one}, ordered=True
)
IN_SLOTS = Solver(_covers_slots, {"approximation": _in_slots}, ordered=True)
IN_BINS = Solver(_covers_bins, {"exact": _in_bins, "approximation": _in_bins}, ordered=True)
SOLVERS = (ONE_BY_ONE, IN_SLOTS, IN_BINS)
