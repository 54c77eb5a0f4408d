"""The queueing delay of a policy before it runs, by the best method that there is
(queueing.prediction.solutions), its numbers checked; by simulation where that method fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from kendall.policies.core import Policy
from kendall.policies.registry import is_first_come
from kendall.policies.text import SpecError, counted
from kendall.queueing.arrivals.notation import has_end
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import (
    INFINITE_MEAN,
    InfiniteMeanError,
    NotConvergedError,
    OutOfReachError,
)
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction.answer_check import checked_answer
from kendall.queueing.prediction.solutions import answer, best_method, methods
from kendall.queueing.prediction.solver import IN_DOUBT
from kendall.queueing.prediction.solvers.ordered import cost_of_resuming, is_ordered, resumes_cost
from kendall.queueing.queue import (
    Queue,
)
from kendall.queueing.result import (
    APPROXIMATE_MEANS,
    FALLBACK,
    PARTIAL,
    Levels,
    Mean,
    Prediction,
    Quantiles,
)
from kendall.queueing.simulation.experiment import of_several, simulate_model, simulate_steady_state
from kendall.queueing.simulation.simulated_means import MORE, TOO_SHORT, tail_notes

SIMULATED_REQUESTS = 1_000_000
QUANTILE_REQUESTS = 300_000
DOUBTED_REQUESTS = 100_000  # in place of an approximation in doubt where only means are asked for
_SHARE = 3  # of what a simulation may take where a formula answers too: a second or two at most
_DURATIONS = ("queueing_delay", "sojourn_time", "served_queueing_delay")
_OTHER_TIMES = ("time_to_first_token", "inter_token_latency", "service_time")
METHODS = ("auto", "exact", "approximation", "bound", "paper", "simulation")


def predict(
    policy: Policy,
    arrival_rate: float,
    output_tokens: TokenDistribution,
    law: LatencyModel,
    *,
    method: str = "auto",
    **limits: Any,
) -> Prediction:
    """The steady state; `limits` are those of `Queue.read`.

    Raises SpecError where `method` has no answer for this queue, UnstableQueueError,
    NotConvergedError.
    """
    return predict_model(Queue.read(policy, output_tokens, law, **limits), arrival_rate, method)


def predict_model(
    model: Queue,
    arrival_rate: float,
    method: str = "auto",
    *,
    quantiles: bool = False,
    of: int = 1,
) -> Prediction:
    """`predict` for a model that is put together already: predictions at several rates share its
    tables. Under "auto" an approximation in doubt is simulated. `quantiles`: under "auto" also
    those that go with means by a formula, by a simulation of about a second. `of`: so many
    predictions share the time of one.
    """
    model = model.at_mean_rate(arrival_rate)
    _check_method(model, method)
    load = model.stable_load(arrival_rate)
    if model.one_of_several is not None:
        one, own_rate = model.seen_by_a_request(arrival_rate)
        return of_several(model, predict_model(one, own_rate, method, quantiles=quantiles, of=of))
    chosen = best_method(model) if method == "auto" else method
    if chosen == "simulation":
        notes = (_why_simulated(model),) if method == "auto" else ()
        count = _count(model, arrival_rate, of)
        return _finite_means(_simulated(model, arrival_rate, count, *notes), model, load)
    try:
        found = checked_answer(lambda: answer(model, arrival_rate, chosen))
        if method != "auto":
            return _with_quantiles(found, model, arrival_rate, simulating=False)
        return _completed(found, model, arrival_rate, quantiles=quantiles, of=of)
    except NotConvergedError as error:
        if method != "auto":
            raise _with_reason(error, model, load) from None
        note = f"{FALLBACK}{chosen}: {error.reason}"
        count = _count(model, arrival_rate, of)
        return _finite_means(_simulated(model, arrival_rate, count, note), model, load)


def predict_durations(
    model: Queue, arrival_rate: float, wanted: Collection[str], *, of: int = 1
) -> Prediction:
    """`predict_model` with quantiles, those of the wanted durations by simulation where no formula
    gives them. Raises as `predict_model`.
    """
    found = predict_model(model, arrival_rate, quantiles=True, of=of)
    missing = [
        name
        for name in dict.fromkeys(wanted)
        if _lacks_quantiles(getattr(found, name), model.levels)
    ]
    if not missing or found.method == "simulation":
        return found
    count = _count(model, arrival_rate, of)
    simulated = _simulated(model, arrival_rate, count, delay=known_delay(found, model))
    note = f"quantiles of the {' and the '.join(missing).replace('_', ' ')} from a simulation"
    noted = dataclasses.replace(found, assumptions=(*found.assumptions, note))
    return with_quantiles_of(simulated, noted, missing)


def _check_method(model: Queue, method: str) -> None:
    if method not in METHODS:
        raise SpecError(f"got method {method!r}; expected one of {', '.join(METHODS)}")
    known = methods(model)
    if method != "auto" and method not in known:
        expected = ", ".join(("auto", *known[:-1]))
        raise SpecError(
            f"got method {method!r} for {model.text} ({_described(model)}); expected {expected} "
            f"or {known[-1]}"
        )


def _completed(
    found: Prediction, model: Queue, arrival_rate: float, *, quantiles: bool, of: int
) -> Prediction:
    """A formula's answer under "auto": simulated where it is in doubt, and its quantiles where it
    has none.
    """
    if (doubt := doubt_of(found)) is not None:
        return _instead(found, model, arrival_rate, doubt, quantiles=quantiles, of=of)
    if found.method == "exact":
        simulating = quantiles or not is_ordered(model)
        return _with_quantiles(found, model, arrival_rate, simulating=simulating, of=of)
    return _with_simulated_quantiles(found, model, arrival_rate, of) if quantiles else found


def doubt_of(found: Prediction) -> str | None:
    """The assumption that says why an approximation may be off by more than 5 %, if it does."""
    return next((text for text in found.assumptions if text.startswith(IN_DOUBT)), None)


def _instead(
    found: Prediction, model: Queue, arrival_rate: float, doubt: str, *, quantiles: bool, of: int
) -> Prediction:
    """A simulation in place of an approximation in doubt, which stays where none is affordable."""
    from kendall.queueing.simulation.run_limits import affordable_requests  # noqa: PLC0415 - loads numba

    most = SIMULATED_REQUESTS if quantiles else DOUBTED_REQUESTS
    try:
        count = affordable_requests(model, arrival_rate, most, of=of)
    except OutOfReachError:
        return found
    simulated = _simulated(model, arrival_rate, count, f"{FALLBACK}{doubt}")
    missing: dict[str, Any] = {  # of the latency law alone, which is not in doubt
        name: getattr(found, name)
        for name in _OTHER_TIMES
        if getattr(found, name).mean is not None and getattr(simulated, name).mean is None
    }
    by_field = {**simulated.methods, **dict.fromkeys(missing, found.method)}
    simulated = dataclasses.replace(simulated, methods=by_field, **missing)
    return _finite_means(simulated, model, model.load(arrival_rate))


def _with_quantiles(
    found: Prediction, model: Queue, arrival_rate: float, *, simulating: bool, of: int = 1
) -> Prediction:
    """The same means; quantiles that no exact law gives, as of calls of several sequences, of
    heavy tails and under orders, are simulated or, also where that takes too long, named.
    """
    missing = [name for name in _DURATIONS if _lacks_quantiles(getattr(found, name), model.levels)]
    if found.method != "exact" or not missing:
        return found
    from kendall.queueing.simulation.run_limits import affordable_requests  # noqa: PLC0415 - loads numba

    try:
        count = (
            affordable_requests(model, arrival_rate, QUANTILE_REQUESTS, of=of) if simulating else 0
        )
    except OutOfReachError:
        count = 0
    noted = dataclasses.replace(
        found, assumptions=(*found.assumptions, _without(model, missing, count))
    )
    if not count:
        return noted
    if is_ordered(model):
        simulated = simulate_steady_state(model, arrival_rate, count)
        return with_quantiles_of(simulated, noted, (*_DURATIONS, *_OTHER_TIMES))
    delay = known_delay(found, model)
    simulated = (
        simulate_model(model, arrival_rate, num_requests=count)
        if delay is None
        else simulate_steady_state(model, arrival_rate, count, delay)
    )
    return _with_missing(simulated, noted, missing)


def known_delay(found: Prediction, model: Queue) -> Quantiles | None:
    """Its law, where a formula has it and every request is served."""
    known = model.lossless and model.requests.sequences is None and not model.engine.disaggregated
    return found.queueing_delay if known and found.queueing_delay.p50 is not None else None


def _with_simulated_quantiles(
    found: Prediction, model: Queue, arrival_rate: float, of: int
) -> Prediction:
    """All quantiles, where the means are an approximation."""
    from kendall.queueing.simulation.fast import is_compiled  # noqa: PLC0415
    from kendall.queueing.simulation.run_limits import affordable_requests, enough_slots  # noqa: PLC0415 - loads numba

    try:
        affordable = affordable_requests(model, arrival_rate, _SHARE * SIMULATED_REQUESTS, of=of)
    except OutOfReachError:
        return found
    # the policy's own code is slow: few of its requests are dear, and a third of few says little
    count = affordable // _SHARE if is_compiled(enough_slots(model, arrival_rate)) else affordable
    simulated = simulate_steady_state(enough_slots(model, arrival_rate), arrival_rate, count)
    note = f"{APPROXIMATE_MEANS}quantiles from a simulation of {count:,} requests"
    noted = dataclasses.replace(found, assumptions=(*found.assumptions, note))
    return with_quantiles_of(simulated, noted, (*_DURATIONS, *_OTHER_TIMES))


def with_quantiles_of(simulated: Prediction, found: Prediction, names: Sequence[str]) -> Prediction:
    """`found` with its own means, and the simulated quantiles of these durations, which
    `methods` says. A mean that no formula has is simulated too.
    """
    quantiles: dict[str, Any] = {
        name: getattr(simulated, name)
        if getattr(found, name).mean is None
        else dataclasses.replace(
            getattr(simulated, name), mean=getattr(found, name).mean, standard_error=None
        )
        for name in names
    }
    by_field = {**found.methods, **dict.fromkeys(names, simulated.method)}
    return dataclasses.replace(found, methods=by_field, **quantiles)


def _with_missing(simulated: Prediction, found: Prediction, names: Sequence[str]) -> Prediction:
    """`with_quantiles_of`, of which those that `found` has are kept."""
    drawn = with_quantiles_of(simulated, found, names)
    kept: dict[str, Any] = {
        name: _filled(getattr(found, name), getattr(drawn, name)) for name in names
    }
    return dataclasses.replace(drawn, **kept)


def _filled(found: Quantiles, simulated: Quantiles) -> Quantiles:
    """With what is simulated of it where it is not known."""
    known = {name for name, value in found.numbers().items() if value is not None}
    errors = {name: error for name, error in simulated.errors.items() if name not in known}
    numbers = simulated.numbers() | {name: found.value(name) for name in known}
    mean = numbers.pop("mean")
    levels = dict.fromkeys(numbers, 0.0)
    return Quantiles.of(levels, mean, numbers.values(), simulated.standard_error, errors)


def _lacks_quantiles(duration: Quantiles, levels: Levels) -> bool:
    return duration.mean is not None and any(duration.value(name) is None for name in levels)


def _without(model: Queue, missing: list[str], simulated: int) -> str:
    if model.requests.patience is None:  # then every request is served: one delay
        missing = [name for name in missing if name != "served_queueing_delay"]
    every = len(_DURATIONS) - (model.requests.patience is None)
    of = (
        ""
        if len(missing) == every
        else " of the " + " and the ".join(name.replace("_", " ") for name in missing)
    )
    if model.requests.sequences is not None:
        drawn, why = (
            "sequences",
            "no formula covers the law of the delay where calls hold several sequences",
        )
    elif model.engine.disaggregated:
        drawn, why = "requests", "no formula covers the law of the delay in two phases"
    elif model.engine.second_model is not None:
        drawn, why = "requests", "no formula covers their law where there are two models"
    elif is_ordered(model):
        drawn, why = "requests", "no formula covers their law under this order"
    elif model.engine.max_num_queued_reqs is not None:
        drawn, why = "requests", "no formula covers their law where requests are rejected"
    else:
        drawn, why = "requests", "their law could not be computed accurately"
    what = (
        f"quantiles{of} from a simulation of {simulated:,} {drawn}"
        if simulated
        else f"no quantiles{of}"
    )
    return f"{PARTIAL}{what}: {why}"


def _simulated(
    model: Queue, arrival_rate: float, count: int, *notes: str, delay: Quantiles | None = None
) -> Prediction:
    from kendall.queueing.simulation.run_limits import enough_slots  # noqa: PLC0415 - loads numba

    simulated = checked_answer(
        lambda: simulate_steady_state(enough_slots(model, arrival_rate), arrival_rate, count, delay)
    )
    short = [
        text.replace(MORE, "`kendall simulate --num-requests` follows more")
        for text in (*simulated.assumptions, *_first_answer(count))
        if text.startswith(TOO_SHORT)
    ]
    return dataclasses.replace(
        simulated,
        effective_max_batch_size=model.bound,
        model=model.name,
        load=model.load(arrival_rate),
        load_bound=model.load_bound,
        assumptions=(*model.assumptions, *tail_notes(model), *notes, *short),
    )


def _first_answer(count: int) -> tuple[str, ...]:
    from kendall.queueing.simulation.run_limits import FEWEST  # noqa: PLC0415 - loads numba

    if count >= FEWEST:
        return ()
    return (f"{TOO_SHORT}a first answer, from {count:,} requests in a few seconds: {MORE}",)


def _count(model: Queue, arrival_rate: float, of: int) -> int:
    """Requests; where too few for a mean are affordable, as many as give a first one."""
    from kendall.queueing.simulation import run_limits as budget  # noqa: PLC0415 - loads numba

    try:
        return budget.affordable_requests(model, arrival_rate, SIMULATED_REQUESTS, of=of)
    except OutOfReachError:
        least = budget.FIRST
        return budget.affordable_requests(model, arrival_rate, budget.FEWEST, of=of, fewest=least)


def _finite_means(simulated: Prediction, model: Queue, load: float) -> Prediction:
    return without_means(simulated) if infinite_mean(model, load) else simulated


def _with_reason(error: NotConvergedError, model: Queue, load: float) -> NotConvergedError:
    """The same, or, where the delay has no mean to find, that."""
    return InfiniteMeanError() if infinite_mean(model, load) else error


def infinite_mean(model: Queue, load: float) -> bool:
    """Whether the delay has no mean though the queue is stable: unbounded batches with a
    residual are a Kesten recursion (THEORY c).
    """
    model = model.one_of_several or model
    if model.engine.disaggregated:
        load *= model.largest_stable_rate / model.decode.largest_stable_rate
        model = model.decode
    unbounded = (
        model.bound is None
        and is_first_come(model.policy)
        and not model.policy.joins_running
        and model.engine.servers == 1
        and model.lossless
        and not has_end(model.arrivals.process)
    )
    return unbounded and load * math.sqrt(1 + model.engine.law.cv**2) >= 1


def without_means(prediction: Prediction) -> Prediction:
    """A simulated mean of something that has none says nothing."""
    bare = prediction.without_means(*_DURATIONS, "time_to_first_token")
    assumptions = (*bare.assumptions, INFINITE_MEAN)
    return dataclasses.replace(bare, batch_size=Mean(), assumptions=assumptions)


def unstable(model: Queue, load: float, method: str) -> Prediction:
    """The answer for an unstable queue: its load, and no delays."""
    # a load that holds them is not that of the requests alone
    notes = (cost_of_resuming(model),) if resumes_cost(model) and not model.on_demand else ()
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=best_method(model) if method == "auto" else method,
        stable=False,
        load=load,
        load_bound=model.load_bound,
        utilisation=None,
        loss_fraction=None,
        assumptions=(*model.assumptions, *notes),
    )


def largest_stable_rate(
    policy: Policy, output_tokens: TokenDistribution, law: LatencyModel, **limits: Any
) -> float:
    """Requests/s at which `load` is 1; `limits` are those of `Queue.read`."""
    return Queue.read(policy, output_tokens, law, **limits).largest_stable_rate


def _why_simulated(model: Queue) -> str:
    if model.arrivals.process is not None:
        return f"{FALLBACK}exact: arrivals are not Poisson"
    return f"{FALLBACK}exact: no formula covers {model.text} with {_described(model)}"


def _servers(model: Queue) -> str:
    if model.engine.pooled:
        return f"prefill and decode on the same {counted(model.engine.servers, 'server')}"
    if model.engine.disaggregated:
        pools = f"{model.engine.prefill_servers} and {model.engine.servers} servers"
        return f"prefill and decode on {'two servers' if pools == '1 and 1 servers' else pools}"
    if model.engine.second_model is not None:
        where = "one server" if model.shares_server else f"{model.engine.servers} servers"
        return f"two models on {where}"
    if model.engine.has_queues:
        return f"{model.engine.servers} servers with a queue each"
    speeds = " of different speed" if model.engine.server_speeds else ""
    return "one server" if model.engine.servers == 1 else f"{model.engine.servers} servers{speeds}"


def _described(model: Queue) -> str:
    engine, requests, scv = model.engine, model.requests, model.arrivals.scv
    known, most = model.arrivals.process is not None, engine.max_num_queued_reqs
    resume = engine.law.setup(1, 0.0, 1.0)
    parts = {
        model.arrivals_assumed[0]: known,
        f"arrivals of SCV {scv:g}": scv != 1 and not known,
        f"lengths beyond {requests.output_tokens.longest:,} tokens": requests.endless,
        f"KV memory of {engine.bounds.max_context_tokens or 0:,} tokens": model.memory_limited,
        f"{model.step_tokens or 0:,} tokens of prompts in a batch": model.prompt_limited,
        f"at most {counted(most or 0, 'request')} present": most is not None,
        "KV memory by the token": model.on_demand,
        "predictions on the engine": model.predicts_on_server,
        f"{resume:.3g} s for each resume (k1 + k2 + kr)": resumes_cost(model)
        and not model.on_demand,
        f"patience {requests.patience} s": requests.patience is not None,
    }
    return ", ".join([_servers(model), *(text for text, holds in parts.items() if holds)])
