"""`predict`: the mean queueing delay of a policy before it runs, by the best method that there is.

single                            exact            mg1
dynamic, capped, elastic          exact            batch_chain
fixed without max_wait            exact            mgb1
continuous                        approximation    continuous
several servers, patience, fixed with max_wait     simulation
"""

from __future__ import annotations

import math

from policies.core import Policy
from policies.fixed import Fixed
from policies.immediate import Continuous, Single
from policies.text import SpecError
from queueing.batch_chain import solve_batch_chain
from queueing.continuous import solve_continuous
from queueing.distributions import TokenDistribution
from queueing.errors import NotConvergedError, UnstableQueueError
from queueing.experiment import simulate_model
from queueing.latency import LatencyModel
from queueing.mg1 import solve_mg1
from queueing.mgb1 import solve_fixed_batches
from queueing.model import Model
from queueing.result import Mean, Prediction, Quantiles

METHODS = ("auto", "exact", "approximation", "bound", "paper", "simulation")

__all__ = ["METHODS", "Mean", "Prediction", "Quantiles", "largest_stable_rate", "predict"]


def predict(
    policy: Policy,
    arrival_rate: float,
    output_tokens: TokenDistribution,
    law: LatencyModel,
    *,
    max_output_tokens: int | None = None,
    max_num_seqs: int | None = None,
    prompt_tokens: TokenDistribution | None = None,
    servers: int = 1,
    patience: float | None = None,
    method: str = "auto",
) -> Prediction:
    """The steady state. Raises SpecError where `method` has no answer for this queue, UnstableQueueError, NotConvergedError."""
    model = Model(
        policy=policy,
        output_tokens=output_tokens if max_output_tokens is None else output_tokens.clip(max_output_tokens),
        law=law,
        prompt_tokens=prompt_tokens,
        max_num_seqs=max_num_seqs,
        servers=servers,
        patience=patience,
    )
    return predict_model(model, arrival_rate, method)


def predict_model(model: Model, arrival_rate: float, method: str = "auto") -> Prediction:
    """`predict` for a model that is put together already."""
    load, best = model.load(arrival_rate), best_method(model)
    if method not in METHODS:
        raise SpecError(f"got method {method!r}; expected one of {', '.join(METHODS)}")
    if method not in ("auto", "simulation", best):
        known = "auto or simulation" if best == "simulation" else f"auto, {best} or simulation"
        raise SpecError(f"got --method {method} for {model.text} ({_described(model)}); expected {known}")
    if load >= 1 and model.patience is None:
        raise UnstableQueueError(load)
    if "simulation" in (method, best):
        return simulate_model(model, arrival_rate)
    try:
        return _analytic(model, arrival_rate, best)
    except NotConvergedError as error:
        if method != "auto":
            raise
        return simulate_model(model, arrival_rate, notes=(str(error),))


def unstable(model: Model, load: float, method: str) -> Prediction:
    """What an unstable queue answers: no delays."""
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=best_method(model) if method == "auto" else method,
        stable=False,
        load=load,
        utilisation=None,
        loss_fraction=None,
        assumptions=model.assumptions,
    )


def largest_stable_rate(
    policy: Policy,
    output_tokens: TokenDistribution,
    law: LatencyModel,
    *,
    max_output_tokens: int | None = None,
    max_num_seqs: int | None = None,
    prompt_tokens: TokenDistribution | None = None,
    servers: int = 1,
) -> float:
    """Requests/s at which `load` is 1."""
    lengths = output_tokens if max_output_tokens is None else output_tokens.clip(max_output_tokens)
    model = Model(policy=policy, output_tokens=lengths, law=law, prompt_tokens=prompt_tokens, max_num_seqs=max_num_seqs, servers=servers)
    return model.largest_stable_rate


def best_method(model: Model) -> str:
    """exact, else approximation, else simulation."""
    timed = isinstance(model.policy, Fixed) and math.isfinite(model.policy.max_wait) and model.bound != 1
    if model.servers > 1 or model.patience is not None or timed:
        return "simulation"
    return "approximation" if isinstance(model.policy, Continuous) else "exact"


def _described(model: Model) -> str:
    servers = "one server" if model.servers == 1 else f"{model.servers} servers"
    return servers if model.patience is None else f"{servers}, patience {model.patience} s"


def _analytic(model: Model, arrival_rate: float, method: str) -> Prediction:
    delay, sojourn, batch_size, utilisation = _solved(model, arrival_rate)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method=method,
        stable=True,
        load=model.load(arrival_rate),
        utilisation=utilisation,
        queueing_delay=delay,
        sojourn_time=sojourn,
        batch_size=Mean(batch_size),
        served_queueing_delay=delay,
        assumptions=model.assumptions,
    )


def _solved(model: Model, arrival_rate: float) -> tuple[Quantiles, Quantiles, float, float]:
    if isinstance(model.policy, Single):
        single = solve_mg1(model.law, model.output_tokens, arrival_rate, model.prompt_tokens)
        return single.delay, single.sojourn, 1.0, single.load
    if isinstance(model.policy, Continuous):
        slots = solve_continuous(model.slot_time, arrival_rate, model.bound)
        return Quantiles(slots.queueing_delay), Quantiles(slots.sojourn_time), slots.batch_size, slots.utilisation
    if isinstance(model.policy, Fixed):
        batches = solve_fixed_batches(model.batch_time, arrival_rate, model.bound or model.policy.batch_size)
    else:
        batches = solve_batch_chain(model.batch_time, arrival_rate, model.bound)
    return Quantiles(batches.queueing_delay), Quantiles(batches.sojourn_time), batches.batch_size, batches.utilisation
