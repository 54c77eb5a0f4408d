"""By which methods a queue can be answered, and what each of them answers.

single                             exact          mg1; with patience mg1d; with several servers an
                                                  approximation, mgc
dynamic, capped, elastic           exact          batch_chain, batch_delay
fixed without max_wait             exact          mgb1
continuous                         approximation  continuous
batch policy on several servers    simulation
batch policy with patience         simulation
fixed with max_wait                simulation
single, independent gaps other     exact          gig1; on several servers, with patience and
than exponential ones                             under other policies simulation
prefill and decode on two servers  exact          tandem where Burke's or Friedman's theorem holds;
                                                  else an approximation, tandem
another order than fcfs            exact means    single; on several servers, in the slots of
                                                  continuous, and where requests are interrupted,
                                                  an approximation or simulation (ordered)
dynamic by bins of like length     exact means    two bins; more an approximation (bin_chain)
a policy from outside              simulation
servers with a queue each          as of one      by chance: Poisson arrivals at each; in turn:
                                                  gaps of SCV 1/c; to the fewest: simulation
memory that may bind               simulation
calls of several sequences         exact          batch_chain of whole calls for dynamic, capped,
                                                  elastic on one server where no batch splits one
                                   exact means    call_chain where some do, if the lengths in a call
                                                  are independent, and for single; else simulation

`bound`: a value that the mean delay does not exceed, where one is known. `paper`: the formula that
the documents print (queueing.models.printed).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from policies.fixed import Fixed
from policies.immediate import Capped, Continuous, Dynamic, Elastic, Single
from policies.unpadded import UnpaddedFixed
from queueing.errors import NotConvergedError
from queueing.latency.service_time import ServiceTime
from queueing.model import (
    Model,
    has_queues,
    load_bound,
    memory_limited,
    one_of_several,
    prompt_limited,
)
from queueing.models.batches.batch_chain import solve_batch_chain
from queueing.models.batches.batch_delay import batch_quantiles
from queueing.models.batches.call_chain import solve_call_chain
from queueing.models.batches.calls import Calls
from queueing.models.batches.mgb1 import solve_fixed_batches
from queueing.models.gg1 import best_estimate
from queueing.models.gig1 import solve_gig1
from queueing.models.mg1 import solve_service
from queueing.models.mg1d import solve_lossy_service
from queueing.models.mgc import doubt as doubt_of_servers
from queueing.models.mgc import solve_servers
from queueing.models.slots.continuous import doubt, solve_continuous
from queueing.models.tandem import is_exact, solve_tandem
from queueing.prediction.bounds import (
    delay_bound,
    has_bound,
    has_paper,
    is_renewal,
    paper_values,
    two_moments,
)
from queueing.prediction.ordered import is_ordered, ordered_methods, ordered_values
from queueing.result import MEANLESS, Mean, Prediction, Quantiles, Station
from queueing.simulation.simulated_means import no_second_moment

IN_DOUBT = "approximation in doubt: "  # how the assumption begins that says why
# any other policy is simulated
SOLVED = (Single, Dynamic, Capped, Elastic, Fixed, UnpaddedFixed, Continuous)


def best_method(model: Model) -> str:
    """exact, else approximation, else simulation."""
    return methods(model)[0]


def methods(model: Model) -> tuple[str, ...]:
    """What this queue can be answered by, the best first."""
    if (one := one_of_several(model)) is not None:
        return methods(one)
    limited = memory_limited(model) or prompt_limited(model)
    if has_queues(model) or limited or model.server_speeds:
        return ("simulation",)
    if type(model.policy) not in SOLVED or (
        model.arrival_process is not None and not is_renewal(model)
    ):
        return ("simulation",)
    return _known(model)


def _known(model: Model) -> tuple[str, ...]:
    found = []
    if is_ordered(model):
        return ordered_methods(model)
    if model.endless:
        return ("exact", "simulation") if _is_plain_single(model) else ("simulation",)
    if model.disaggregated:
        return (
            ("simulation",)
            if model.arrival_scv != 1
            else ("exact" if _is_exact_tandem(model) else "approximation", "simulation")
        )
    if model.arrival_scv != 1:
        return (
            ("exact", "approximation", "bound", "paper", "simulation")
            if is_renewal(model)
            else ("simulation",)
        )
    alone = model.servers == 1 and model.patience is None
    if model.sequences is not None:
        return ("exact", "simulation") if alone and _calls_are_solved(model) else ("simulation",)
    if isinstance(model.policy, Single):
        found.append(
            "exact" if model.servers == 1 else "approximation" if model.patience is None else ""
        )
    elif alone:
        found.append(
            "approximation"
            if isinstance(model.policy, Continuous)
            else ""
            if _timed(model)
            else "exact"
        )
    found += ["bound"] if has_bound(model) else []
    found += ["paper"] if has_paper(model) else []
    return (*(name for name in found if name), "simulation")


def _is_exact_tandem(model: Model) -> bool:
    try:
        return is_exact(*model.stations)
    except NotConvergedError:  # more stalls in the longest service than its law can hold
        return False


def _is_plain_single(model: Model) -> bool:
    """M/G/1 without stalls, whose numbers in the longest services no law could hold."""
    alone = model.servers == 1 and model.patience is None and model.sequences is None
    poisson = model.arrival_scv == 1 and not model.disaggregated
    return isinstance(model.policy, Single) and alone and poisson and not model.law.stall_share


def _calls_are_solved(model: Model) -> bool:
    if isinstance(model.policy, Continuous | Fixed):
        return False
    independent = model.intraclass_correlation == 0
    return independent or model.bound == 1 or model.whole_call is not None


def _timed(model: Model) -> bool:
    return (
        isinstance(model.policy, Fixed)
        and math.isfinite(model.policy.max_wait)
        and model.bound != 1
    )


def answer(model: Model, arrival_rate: float, method: str) -> Prediction:
    """By a method other than simulation. Raises UnstableQueueError, NotConvergedError."""
    if method in ("bound", "paper"):
        values = (
            {"queueing_delay": Quantiles(delay_bound(model, arrival_rate))}
            if method == "bound"
            else paper_values(model, arrival_rate)
        )
    elif is_ordered(model):
        values = ordered_values(model, arrival_rate)
    elif is_renewal(model):
        values = _renewal(model, arrival_rate, method)
    else:
        values = _solved(model, arrival_rate)
    values.setdefault("served_queueing_delay", values["queueing_delay"])
    bounded = has_bound(model) and not is_ordered(model)
    upper = delay_bound(model, arrival_rate) if bounded else None
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=method,
        stable=True,
        load=model.load(arrival_rate),
        load_bound=load_bound(model),
        bounds={} if upper is None else {"queueing_delay_upper": upper},
        **{"utilisation": None, "assumptions": model.assumptions, **values},
    )


def _solved(model: Model, arrival_rate: float) -> dict[str, Any]:
    if model.disaggregated:
        return _tandem(model, arrival_rate)
    if isinstance(model.policy, Single) and model.sequences is None:
        return _single(model, arrival_rate)
    if isinstance(model.policy, Continuous):
        return _continuous(model, arrival_rate)
    time = model.batch_time
    if isinstance(model.policy, Fixed):
        return _fixed(model, model.policy, arrival_rate)
    if model.whole_call is not None:
        time, size = time.of_calls(), model.whole_call
        bound = None if model.bound is None else model.bound // size
        queue = solve_batch_chain(time, arrival_rate, bound)
        delay, sojourn = batch_quantiles(time, arrival_rate, queue, model.levels)
        batch_size = queue.batch_size * size
    else:
        assert model.sequences is not None
        queue = solve_call_chain(time, Calls.of(arrival_rate, model.sequences), model.bound)
        delay, sojourn = Quantiles(queue.queueing_delay), Quantiles(queue.sojourn_time)
        batch_size = queue.batch_size
    sizes = range(1, queue.largest + 1)
    first = queue.by_request(np.array([time.first_token(b) for b in sizes]))
    step = (
        queue.by_request(np.array([time.step(b) for b in sizes])) if model.policy.padded else None
    )  # unpadded batches shrink
    service = queue.by_request(np.array([time.mean(b) for b in sizes]))
    answer = _answered(delay, sojourn, batch_size, queue.utilisation)
    return answer | _token_times(delay, first, step) | {"service_time": Quantiles(service)}


def _fixed(model: Model, policy: Fixed, arrival_rate: float) -> dict[str, Any]:
    time, b = model.batch_time, model.bound or policy.batch_size
    fixed = solve_fixed_batches(time, arrival_rate, b, levels=model.levels)
    sojourn, step = fixed.sojourn, time.law.step(b) if policy.padded else None
    if not policy.padded:  # each leaves with its own last token, and the batch shrinks
        sojourn = Quantiles((fixed.delay.mean or 0.0) + time.own_mean(b))
    answer = _answered(fixed.delay, sojourn, fixed.batch_size, fixed.utilisation)
    answer |= {"service_time": Quantiles(time.mean(b))}
    return answer | _token_times(fixed.delay, time.first_token(b), step)


def _answered(
    delay: Quantiles, sojourn: Quantiles, batch_size: float, utilisation: float
) -> dict[str, Any]:
    return {
        "queueing_delay": delay,
        "sojourn_time": sojourn,
        "batch_size": Mean(batch_size),
        "utilisation": utilisation,
    }


def _token_times(delay: Quantiles, first: float, step: float | None) -> dict[str, Any]:
    """`first` seconds from dispatch to the first token, `step` seconds from one token to the next.

    A law with a negative k1 or k2, fitted to longer answers, may put the first token before the
    dispatch: then it says nothing of it.
    """
    arrived = None if first < 0 or delay.mean is None else delay.mean + first
    return {"time_to_first_token": Quantiles(arrived), "inter_token_latency": Quantiles(step)}


def _continuous(model: Model, arrival_rate: float) -> dict[str, Any]:
    slots = solve_continuous(model.slot_time, arrival_rate, model.bound)
    answer = _answered(
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


def _renewal(model: Model, arrival_rate: float, method: str) -> dict[str, Any]:
    times = model.batch_time.first_token(1), model.law.step(1)
    if method == "exact":
        service = ServiceTime.of(model.law, model.output_tokens, model.prompt_tokens)
        queue = solve_gig1(service, arrival_rate, model.arrival_scv, levels=model.levels)
        answer = _answered(queue.delay, queue.sojourn, 1.0, queue.load)
        answer |= {"service_time": service.quantiles(model.levels)}
        return answer | _token_times(queue.delay, *times)
    delays, service = two_moments(model, arrival_rate)
    delay = Quantiles(best_estimate(delays, model.arrival_scv))
    sojourn = Quantiles((delay.mean or 0.0) + service.mean)
    error = (
        "-42 % at load 0.3, -6 % at 0.85 (SCV 4)"
        if model.arrival_scv > 1
        else "0 to +10 % from load 0.3 on with exponential services, more with others"
    )
    note = f"{IN_DOUBT}two moments of the gaps and of the services: {error}"
    answer = _answered(delay, sojourn, 1.0, delays.load) | {
        "assumptions": (*model.assumptions, note),
        "service_time": service.quantiles(model.levels),
    }
    return answer | _token_times(delay, *times)


def _tandem(model: Model, arrival_rate: float) -> dict[str, Any]:
    queue, services, step = (
        solve_tandem(*model.stations, arrival_rate, levels=model.levels),
        model.stations,
        model.law.step(1),
    )
    behind = queue.second_delay
    delay = (
        queue.first.delay if behind == 0 else Quantiles((queue.first.delay.mean or 0.0) + behind)
    )
    answer = _answered(delay, Quantiles(queue.sojourn), 1.0, sum(queue.loads) / 2)
    answer |= _token_times(delay, services[0].mean + step, step)
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


def _single(model: Model, arrival_rate: float) -> dict[str, Any]:
    levels = model.levels
    own = model.batch_time.first_token(1), model.law.step(1)
    service = ServiceTime.of(model.law, model.output_tokens, model.prompt_tokens)
    served = {"service_time": service.quantiles(levels)}
    if model.patience is not None:
        lossy = solve_lossy_service(service, arrival_rate, model.patience, levels=levels)
        answer = _answered(lossy.delay, lossy.sojourn, 1.0, lossy.utilisation) | _token_times(
            lossy.served, *own
        )
        answer |= {"served_queueing_delay": lossy.served, "loss_fraction": lossy.loss_fraction}
        return answer | served
    if model.servers > 1:
        several = solve_servers(service, arrival_rate, model.servers, levels=levels)
        answer = _answered(several.delay, several.sojourn, 1.0, several.load) | served
        reason = doubt_of_servers(service, model.servers, several)
        if reason is not None:
            answer["assumptions"] = (*model.assumptions, f"{IN_DOUBT}{reason}")
        return answer | _token_times(several.delay, *own)
    single = solve_service(service, arrival_rate, levels=levels)
    answer = _answered(single.delay, single.sojourn, 1.0, single.load) | served
    answer |= _token_times(single.delay, *own)
    if single.delay.mean is not None:
        return answer
    return answer | {
        "assumptions": (
            *model.assumptions,
            f"{MEANLESS}the mean delay is infinite: {no_second_moment(model)}",
        )
    }
