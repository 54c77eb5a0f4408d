"""Queues that are served first come, first served, and prefills first where a request waits for its
decode too: one solver for each kind of queue.

Where all calls have the same number of sequences and no batch splits a call, BATCHES treats a call
as one request: its batch sizes are those of the chain, times the sequences of a call. CALLS covers
other calls, if the lengths in a call are independent.
"""

from __future__ import annotations

import math
from itertools import starmap
from typing import Any

from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Capped, Continuous, Dynamic, Elastic, Single
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.policies.orders.by_arrival import FirstCome
from kendall.policies.orders.prefill import PrefillFirst
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.batch_delay import batch_quantiles
from kendall.queueing.models.batches.call_chain import solve_call_chain
from kendall.queueing.models.batches.calls import Calls
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.gg1 import best_estimate
from kendall.queueing.models.gig1 import solve_gig1
from kendall.queueing.models.mg1 import solve_service
from kendall.queueing.models.mg1d import solve_lossy_service
from kendall.queueing.models.mg1k import LARGEST_ROOM, solve_finite
from kendall.queueing.models.mgc import doubt as doubt_of_servers
from kendall.queueing.models.mgc import solve_servers
from kendall.queueing.models.slots.continuous import doubt, solve_continuous
from kendall.queueing.models.tandem import is_exact, solve_pooled, solve_tandem
from kendall.queueing.prediction.solver import IN_DOUBT, Solver, answered, of_batches, token_times
from kendall.queueing.prediction.solvers.bounds import is_renewal, two_moments
from kendall.queueing.queue import Queue
from kendall.queueing.result import MEANLESS, Mean, Quantiles, Station
from kendall.queueing.simulation.counts import count_of
from kendall.queueing.simulation.simulated_means import no_second_moment


def _is_alone(model: Queue) -> bool:
    """Whether there is one server, one stage, no patience, Poisson arrivals, and lengths without a
    tail beyond their table.
    """
    return (
        model.engine.servers == 1
        and model.requests.patience is None
        and model.arrivals.scv == 1
        and not model.engine.disaggregated
        and not model.requests.endless
    )


def _covers_single(model: Queue) -> tuple[str, ...]:
    if not isinstance(model.policy, Single) or model.requests.sequences is not None:
        return ()
    if model.arrivals.scv != 1 or model.engine.disaggregated:
        return ()
    if (
        model.requests.endless
    ):  # with stalls, the longest services have more of them than a table holds
        known = (
            model.engine.servers == 1
            and model.requests.patience is None
            and not model.engine.law.stall_share
        )
        return ("exact",) if known else ()
    if model.engine.servers == 1:
        return ("exact",)
    return ("approximation",) if model.requests.patience is None else ()


def _single(model: Queue, arrival_rate: float) -> dict[str, Any]:
    levels = model.levels
    own = model.batch_time.first_token(1), model.engine.law.step(1)
    service = ServiceTime.of(
        model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
    )
    served = {"service_time": service.quantiles(levels)}
    if model.requests.patience is not None:
        lossy = solve_lossy_service(service, arrival_rate, model.requests.patience, levels=levels)
        answer = answered(lossy.delay, lossy.sojourn, 1.0, lossy.utilisation) | token_times(
            lossy.served, *own
        )
        answer |= {"served_queueing_delay": lossy.served, "loss_fraction": lossy.loss_fraction}
        return answer | served
    if model.engine.servers > 1:
        several = solve_servers(service, arrival_rate, model.engine.servers, levels=levels)
        answer = answered(several.delay, several.sojourn, 1.0, several.load) | served
        reason = doubt_of_servers(service, model.engine.servers, several)
        if reason is not None:
            answer["assumptions"] = (*model.assumptions, f"{IN_DOUBT}{reason}")
        return answer | token_times(several.delay, *own)
    single = solve_service(service, arrival_rate, levels=levels)
    answer = answered(single.delay, single.sojourn, 1.0, single.load) | served
    answer |= token_times(single.delay, *own)
    if single.delay.mean is not None:
        return answer
    return answer | {
        "assumptions": (
            *model.assumptions,
            f"{MEANLESS}the mean delay is infinite: {no_second_moment(model)}",
        )
    }


def _covers_finite(model: Queue) -> tuple[str, ...]:
    most = model.engine.max_num_queued_reqs
    covered = (
        most is not None
        and most <= LARGEST_ROOM
        and isinstance(model.policy, Single)
        and _is_alone(model)
        and model.requests.sequences is None
    )
    return ("exact",) if covered else ()


def _finite(model: Queue, arrival_rate: float) -> dict[str, Any]:
    most = model.engine.max_num_queued_reqs
    assert most is not None
    service = ServiceTime.of(
        model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
    )
    queue = solve_finite(service, arrival_rate, most)
    delay, sojourn = Quantiles(queue.queueing_delay), Quantiles(queue.sojourn_time)
    own = model.batch_time.first_token(1), model.engine.law.step(1)
    return {
        **answered(delay, sojourn, 1.0, queue.utilisation),
        **token_times(delay, *own),
        "service_time": service.quantiles(model.levels),
        "loss_fraction": queue.loss_fraction,
        "rejected_fraction": queue.loss_fraction,
        "counts": {
            "number_in_system": count_of(queue.at_most, model.levels),
            "queue_length": count_of(queue.at_most[1:], model.levels),
        },
    }


def _covers_renewal(model: Queue) -> tuple[str, ...]:
    return ("exact", "approximation") if is_renewal(model) and not model.requests.endless else ()


def _renewal(model: Queue, arrival_rate: float) -> dict[str, Any]:
    service = ServiceTime.of(
        model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
    )
    queue = solve_gig1(service, arrival_rate, model.arrivals.scv, levels=model.levels)
    answer = answered(queue.delay, queue.sojourn, 1.0, queue.load)
    answer |= {"service_time": service.quantiles(model.levels)}
    return answer | token_times(
        queue.delay, model.batch_time.first_token(1), model.engine.law.step(1)
    )


def _two_moments(model: Queue, arrival_rate: float) -> dict[str, Any]:
    delays, service = two_moments(model, arrival_rate)
    delay = Quantiles(best_estimate(delays, model.arrivals.scv))
    sojourn = Quantiles((delay.mean or 0.0) + service.mean)
    error = (
        "-42 % at load 0.3, -6 % at 0.85 (SCV 4)"
        if model.arrivals.scv > 1
        else "0 to +10 % from load 0.3 on with exponential services, more with others"
    )
    note = f"{IN_DOUBT}two moments of the gaps and of the services: {error}"
    answer = answered(delay, sojourn, 1.0, delays.load) | {
        "assumptions": (*model.assumptions, note),
        "service_time": service.quantiles(model.levels),
    }
    return answer | token_times(delay, model.batch_time.first_token(1), model.engine.law.step(1))


def transfers_differ(model: Queue) -> bool:
    """Whether requests may overtake each other between the two servers."""
    prompts = model.requests.prompt_tokens
    return bool(model.engine.kv_transfer.token and prompts is not None and prompts.variance)


def _covers_tandem(model: Queue) -> tuple[str, ...]:
    engine = model.engine
    if not engine.disaggregated or model.arrivals.scv != 1 or model.requests.endless:
        return ()
    if engine.pooled or engine.all_servers > 2 or not in_arrival_order(model.policy):
        return ()
    try:
        exact = is_exact(*model.stations, alike=not transfers_differ(model))
    except NotConvergedError:  # more stalls in the longest service than its law can hold
        exact = False
    return ("exact",) if exact else ("approximation",)


def _tandem(model: Queue, arrival_rate: float) -> dict[str, Any]:
    alike = not transfers_differ(model)
    queue, services, step = (
        solve_tandem(*model.stations, arrival_rate, alike=alike, levels=model.levels),
        model.stations,
        model.engine.law.step(1),
    )
    behind, transfer = queue.second_delay, model.mean_transfer
    delay = (
        queue.first.delay if behind == 0 else Quantiles((queue.first.delay.mean or 0.0) + behind)
    )
    answer = answered(delay, Quantiles(queue.sojourn + transfer), 1.0, sum(queue.loads) / 2)
    answer |= token_times(delay, services[0].mean + transfer + step, step)
    delays = queue.first.delay, Quantiles(behind)
    answer["stations"] = tuple(
        map(
            Station,
            ("prefill", "decode"),
            queue.loads,
            delays,
            (Mean(service.mean) for service in services),
        )
    )
    if queue.exact:
        return answer
    note = (
        f"{IN_DOUBT}the decode delay is within 7 % where prefill has at most half the load of "
        "decode, -38 to +51 % off at equal loads"
    )
    return answer | {"assumptions": (*model.assumptions, note)}


def _covers_pooled(model: Queue) -> tuple[str, ...]:
    engine = model.engine
    if not engine.pooled or model.arrivals.scv != 1 or model.requests.endless:
        return ()
    solved = order_of(model.policy).name in (FirstCome.name, PrefillFirst.name)
    return ("exact",) if solved and engine.servers == 1 and not engine.kv_transfer else ()


def _pooled(model: Queue, arrival_rate: float) -> dict[str, Any]:
    services, step = model.stations, model.engine.law.step(1)
    ordered = not in_arrival_order(model.policy)
    delays = solve_pooled(*services, arrival_rate, prefill_first=ordered)
    delay, means = sum(delays), [service.mean for service in services]
    loads = [arrival_rate * mean for mean in means]
    answer = answered(Quantiles(delay), Quantiles(delay + sum(means)), 1.0, sum(loads))
    answer |= token_times(Quantiles(delay), means[0] + step, step)
    names = ("prefill", "decode")
    rows = zip(names, loads, map(Quantiles, delays), map(Mean, means), strict=True)
    return answer | {
        "service_time": Quantiles(sum(means)),
        "stations": tuple(starmap(Station, rows)),
    }


def _covers_batches(model: Queue) -> tuple[str, ...]:
    if not _is_alone(model) or model.whole_call is None:
        return ()
    batches = Dynamic | Capped | Elastic
    of_calls = model.requests.sequences is not None and isinstance(model.policy, Single)
    return ("exact",) if isinstance(model.policy, batches) or of_calls else ()


def _batches(model: Queue, arrival_rate: float) -> dict[str, Any]:
    time, size = model.batch_time.of_calls(), model.whole_call
    assert size is not None
    bound = None if model.bound is None else model.bound // size
    queue = solve_batch_chain(time, arrival_rate, bound)
    delay, sojourn = batch_quantiles(time, arrival_rate, queue, model.levels)
    return of_batches(model, time, queue, delay, sojourn) | {
        "batch_size": Mean(queue.batch_size * size)
    }


def _covers_calls(model: Queue) -> tuple[str, ...]:
    if not _is_alone(model) or model.requests.sequences is None or model.whole_call is not None:
        return ()
    solved = isinstance(model.policy, Single | Dynamic | Capped | Elastic)
    independent = model.requests.intraclass_correlation == 0 or model.bound == 1
    return ("exact",) if solved and independent else ()


def _calls(model: Queue, arrival_rate: float) -> dict[str, Any]:
    assert model.requests.sequences is not None
    time = model.batch_time
    queue = solve_call_chain(time, Calls.of(arrival_rate, model.requests.sequences), model.bound)
    delay, sojourn = Quantiles(queue.queueing_delay), Quantiles(queue.sojourn_time)
    return of_batches(model, time, queue, delay, sojourn)


def _covers_fixed(model: Queue) -> tuple[str, ...]:
    policy = model.policy
    if (
        not isinstance(policy, Fixed)
        or not _is_alone(model)
        or model.requests.sequences is not None
    ):
        return ()
    return ("exact",) if policy.max_wait == math.inf or model.bound == 1 else ()


def _fixed(model: Queue, arrival_rate: float) -> dict[str, Any]:
    assert isinstance(model.policy, Fixed)
    time, b = model.batch_time, model.bound or model.policy.batch_size
    fixed = solve_fixed_batches(time, arrival_rate, b, levels=model.levels)
    sojourn, step = fixed.sojourn, time.law.step(b) if model.policy.padded else None
    if not model.policy.padded:  # each leaves with its own last token, and the batch shrinks
        sojourn = Quantiles((fixed.delay.mean or 0.0) + time.own_mean(b))
    answer = answered(fixed.delay, sojourn, fixed.batch_size, fixed.utilisation)
    answer |= {"service_time": Quantiles(time.mean(b))}
    return answer | token_times(fixed.delay, time.first_token(b), step)


def _covers_continuous(model: Queue) -> tuple[str, ...]:
    solved = isinstance(model.policy, Continuous) and model.requests.sequences is None
    return ("approximation",) if solved and _is_alone(model) else ()


def _continuous(model: Queue, arrival_rate: float) -> dict[str, Any]:
    slots = solve_continuous(model.slot_time, arrival_rate, model.bound)
    answer = answered(
        slots.delay, Quantiles(slots.sojourn_time), slots.batch_size, slots.utilisation
    )
    answer |= {
        "time_to_first_token": Quantiles(slots.time_to_first_token),
        "inter_token_latency": Quantiles(slots.inter_token_latency),
        "service_time": Quantiles(slots.sojourn_time - slots.queueing_delay),
    }
    reason = doubt(model.slot_time, arrival_rate, model.bound, slots)
    return (
        answer
        if reason is None
        else answer | {"assumptions": (*model.assumptions, f"{IN_DOUBT}{reason}")}
    )


SINGLE = Solver(_covers_single, {"exact": _single, "approximation": _single})
FINITE = Solver(_covers_finite, {"exact": _finite}, finite=True)
RENEWAL = Solver(_covers_renewal, {"exact": _renewal, "approximation": _two_moments})
POOLED, PREFILL_FIRST = (
    Solver(_covers_pooled, {"exact": _pooled}, ordered=ordered) for ordered in (False, True)
)
TANDEM = Solver(_covers_tandem, {"exact": _tandem, "approximation": _tandem})
BATCHES = Solver(_covers_batches, {"exact": _batches})
CALLS = Solver(_covers_calls, {"exact": _calls})
FIXED = Solver(_covers_fixed, {"exact": _fixed})
CONTINUOUS = Solver(_covers_continuous, {"approximation": _continuous})
SOLVERS = (
    SINGLE,
    FINITE,
    RENEWAL,
    TANDEM,
    POOLED,
    PREFILL_FIRST,
    BATCHES,
    CALLS,
    FIXED,
    CONTINUOUS,
)
