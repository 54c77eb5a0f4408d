"""The methods that answer a queue, and the prediction by each of them but simulation.

single                             exact          mg1; with patience mg1d; with several servers an
                                                  approximation, mgc
dynamic, capped, elastic           exact          batch_chain, batch_delay
fixed without max_wait             exact          mgb1
continuous                         approximation  continuous
batch policy on several servers    simulation
batch policy with patience         simulation
fixed with max_wait                simulation
single, --max-num-queued-reqs      exact means    mg1k; with patience, several servers, and
                                                  under other policies simulation
single, independent gaps that      exact          gig1; on several servers, with patience and
are not exponential                               under other policies simulation
prefill and decode on two servers  exact          tandem where Burke's or Friedman's theorem holds;
                                                  else an approximation, tandem; under other
                                                  policies and in pools each station by its own
                                                  method where prefills are exponential, first come,
                                                  first served; else simulation
another order than fcfs            exact means    single; on several servers, in the slots of
                                                  continuous, and where requests are interrupted,
                                                  an approximation or simulation (ordered)
dynamic by bins of like length     exact means    two bins; more an approximation (bin_chain)
a policy from outside              simulation
c servers with a queue each        as one server  routed at random: Poisson arrivals at each; in
                                                  turn: gaps of SCV 1/c; to the server with the
                                                  fewest requests: simulation
memory or prompt tokens may bind,  simulation
interruptions by kv, tool calls,
servers of different speeds
two models on one server           exact means    changeover: single, first come, first served; else
                                                  simulation
two models on servers of their own as two queues  each with the requests that go to it
calls of several sequences         exact          batch_chain of whole calls for dynamic, capped,
                                                  elastic on one server where no batch splits one
                                   exact means    call_chain where some do, if the lengths in a call
                                                  are independent, and for single; else simulation

Two more methods where they exist: `bound` is a value that the mean delay does not exceed, `paper`
the formula that the papers print (queueing.models.as_published).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from operator import mul
from typing import Any

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.models.tandem import is_exponential
from kendall.queueing.prediction import solvers
from kendall.queueing.prediction.solver import IN_DOUBT, Solver
from kendall.queueing.prediction.solvers.bounds import delay_bound, has_bound, is_renewal
from kendall.queueing.prediction.solvers.ordered import is_ordered
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Prediction, Quantiles, Station

BEST_FIRST = ("exact", "approximation", "bound", "paper", "simulation")


def best_method(model: Queue) -> str:
    """The method that `auto` means for this queue."""
    return methods(model)[0]


def methods(model: Queue) -> tuple[str, ...]:
    """The methods that answer this queue, the best first; the last one is simulation."""
    one_server = model.one_of_several
    if one_server is not None:
        return methods(one_server)
    if model.models_apart:
        return _methods_apart(model)
    known = {method for solver in _solvers(model) for method in solver.covers(model)}
    known |= {*_methods_of_stations(model)} if not known else set()
    return tuple(sorted({*known, "simulation"}, key=BEST_FIRST.index))


def answer(model: Queue, arrival_rate: float, method: str) -> Prediction:
    """The prediction by one of `methods`, which may not be simulation. Raises UnstableQueueError,
    NotConvergedError.
    """
    defaults: dict[str, Any] = {"utilisation": None, "assumptions": model.assumptions}
    if model.models_apart:
        solved = _of_models(model, arrival_rate)
    else:
        defaults |= {"load_bound": model.load_bound, "bounds": _upper(model, arrival_rate)}
        solved = _solved(model, arrival_rate, method)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=method,
        stable=True,
        load=model.load(arrival_rate),
        **model.counted(arrival_rate),
        **(defaults | {"served_queueing_delay": solved["queueing_delay"]} | solved),
    )


def _solved(model: Queue, arrival_rate: float, method: str) -> dict[str, Any]:
    solvers = (solver for solver in _solvers(model) if method in solver.covers(model))
    solver = next(solvers, None)
    if solver is None:
        return _of_stations(model, arrival_rate)
    return _after_predictions(model, solver.solve[method](model, arrival_rate))


def _upper(model: Queue, arrival_rate: float) -> dict[str, float]:
    if not has_bound(model) or is_ordered(model):
        return {}
    return {"queueing_delay_upper": delay_bound(model, arrival_rate)}


def _methods_of_stations(model: Queue) -> tuple[str, ...]:
    """Of prefill and decode on servers of their own, where the decodes come by a Poisson process:
    the worse of the two stations' methods.
    """
    apart = model.engine.disaggregated and not model.engine.pooled
    if not apart or not model.arrivals.poisson or model.requests.endless:
        return ()
    try:
        poisson = is_exponential(model.stations[0]) and in_arrival_order(model.policy)
    except NotConvergedError:  # more stalls than its law can hold
        poisson = False
    stations = [_formula(queue) for queue in (model.prefill, model.decode)] if poisson else [None]
    if None in stations:
        return ()
    return ("exact",) if set(stations) == {"exact"} else ("approximation",)


def _formula(model: Queue) -> str | None:
    best = best_method(model)
    return best if best in ("exact", "approximation") else None


def _of_stations(model: Queue, arrival_rate: float) -> dict[str, Any]:
    """Each station on its own (Burke): what a request meets at one says nothing of the other."""
    engine, transfer = model.engine, model.mean_transfer
    queues = model.prefill, model.decode
    prefill, decode = (answer(queue, arrival_rate, best_method(queue)) for queue in queues)
    used = [found.utilisation for found in (prefill, decode)]
    servers = engine.prefill_servers, engine.servers
    return {
        "queueing_delay": _sum(prefill.queueing_delay, decode.queueing_delay),
        "sojourn_time": _sum(prefill.sojourn_time, decode.sojourn_time, transfer),
        "time_to_first_token": _sum(prefill.sojourn_time, decode.time_to_first_token, transfer),
        "inter_token_latency": decode.inter_token_latency,
        "service_time": _sum(prefill.service_time, decode.service_time, transfer),
        "batch_size": decode.batch_size,
        "utilisation": _mean(used, servers),
        "stations": tuple(
            Station(name, found.load, found.queueing_delay, Mean(found.service_time.mean))
            for name, found in (("prefill", prefill), ("decode", decode))
        ),
        "assumptions": (*model.assumptions, *_doubts((prefill, decode))),
    }


def _doubts(found: Sequence[Prediction]) -> list[str]:
    return [text for each in found for text in each.assumptions if text.startswith(IN_DOUBT)]


def _sum(first: Quantiles, second: Quantiles, more: float = 0.0) -> Quantiles:
    """The mean."""
    known = first.mean is not None and second.mean is not None
    return Quantiles((first.mean or 0.0) + (second.mean or 0.0) + more if known else None)


def _methods_apart(model: Queue) -> tuple[str, ...]:
    """Of two queues the worse of their best methods. Requests that are sorted by what is predicted
    for them have other predictions than all.
    """
    second = model.engine.second_model
    assert second is not None
    sorted_by_errors = second.threshold is not None and model.requests.predictor.name != "exact"
    reads = order_of(model.policy).predicts and sorted_by_errors
    best = [best_method(queue) for share, queue in model.models if share]
    worst = max(best, key=BEST_FIRST.index)
    if reads or not model.arrivals.poisson or worst == "simulation":
        return ("simulation",)
    return (worst, "simulation")


def _of_models(model: Queue, arrival_rate: float) -> dict[str, Any]:
    """Of all requests, from those of each model."""
    parts = [
        (share, queue, answer(queue, share * arrival_rate, best_method(queue)))
        for share, queue in model.models
        if share
    ]
    shares = [share for share, *_ in parts]
    weights = [share * (queue.requests.output_tokens.mean - 1) for share, queue, _ in parts]
    servers = [queue.engine.servers for _, queue, _ in parts]
    found = [each for *_, each in parts]
    used = _mean([each.utilisation for each in found], servers)
    batches = [None if not (size := each.batch_size.mean) else 1 / size for each in found]
    rate = _mean(batches, shares)
    return {
        **{name: _of_all(found, name, shares) for name in _DURATIONS},
        "inter_token_latency": _of_all(found, "inter_token_latency", weights),
        "utilisation": None if used is None else used * sum(servers) / model.engine.servers,
        "batch_size": Mean(None if rate is None else 1 / rate),
        "assumptions": (*model.assumptions, *_doubts(found)),
    }


_DURATIONS = (
    *("queueing_delay", "sojourn_time", "served_queueing_delay", "time_to_first_token"),
    "service_time",
)


def _of_all(found: Sequence[Prediction], name: str, weights: Sequence[float]) -> Quantiles:
    """The mean; with the quantiles where all go to one model."""
    durations: list[Quantiles] = [getattr(each, name) for each in found]
    if len(durations) == 1:
        return durations[0]
    return Quantiles(_mean([each.mean for each in durations], weights))


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not sum(weights):
        return None
    return float(sum(map(mul, known, weights)) / sum(weights))


def _after_predictions(model: Queue, solved: dict[str, Any]) -> dict[str, Any]:
    """With the time that requests wait for predictions outside of the engine: all as long, but
    under skippredict, of which formulas have means only.
    """
    seconds = model.external_prediction
    if not seconds:
        return solved
    later = solved.keys() & {"queueing_delay", "sojourn_time", "time_to_first_token"}
    return solved | {name: solved[name].mapped(lambda _, value: value + seconds) for name in later}


def _solvers(model: Queue) -> tuple[Solver, ...]:
    """The solvers for the queue's policy and order of service; none for a queue that only a
    simulation models.
    """
    engine, arrivals = model.engine, model.arrivals
    if (
        model.memory_limited
        or model.on_demand
        or model.prompt_limited
        or engine.has_queues
        or engine.server_speeds
        or (engine.disaggregated and not isinstance(model.policy, Single))
        or (arrivals.process is not None and not is_renewal(model))
    ):
        return ()
    ordered, policy = is_ordered(model), type(model.policy)
    models = 1 if engine.second_model is None else 2
    finite = engine.max_num_queued_reqs is not None
    return tuple(
        solver
        for solver in _all_solvers()
        if (solver.ordered, solver.finite, solver.models) == (ordered, finite, models)
        and policy in solver.policies
    )


@cache
def _all_solvers() -> tuple[Solver, ...]:
    """The `SOLVERS` of every module in queueing/prediction/solvers."""
    modules = pkgutil.iter_modules(solvers.__path__, f"{solvers.__name__}.")
    return tuple(solver for module in modules for solver in import_module(module.name).SOLVERS)
