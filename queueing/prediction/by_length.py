"""Mean durations by output length under an order of service, where the analysis of orders
(queueing.models.soap) has it: what the longest requests pay for the gain of the others.

    W(n) = W_fcfs w(n),   w(n) = W_1(n) / W_1,fcfs of one server at the same load
    S(n) = setup + step n, with the mean service time of the queue in the order of arrival

W mean time outside of service. Exact for single on one server, the approximation of
`queueing.prediction.solvers.ordered` for several servers and for the slots of a continuous engine;
where a resume costs something, as that analysis has each length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kendall.policies.immediate import Continuous
from kendall.policies.ordered import order_of
from kendall.policies.text import first_come_form
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.token_orders import TokenService, ratios_by_length
from kendall.queueing.prediction.solvers.ordered import IN_SLOTS, ONE_BY_ONE, resumes_cost
from kendall.queueing.prediction.steady_state import predict_model
from kendall.queueing.queue import Queue

LONGEST = 0.1  # share of the requests


@dataclass(frozen=True, eq=False)
class ByLength:
    """Mean time outside of service and mean service time, seconds, of each length; increasing."""

    tokens: Vector
    delay: Vector
    service: Vector

    def at(self, tokens: Vector) -> tuple[Vector, Vector]:
        """Delay and service time of requests of these lengths."""
        return (
            np.interp(tokens, self.tokens, self.delay),
            np.interp(tokens, self.tokens, self.service),
        )

    def of_longest(self, lengths: TokenDistribution, share: float = LONGEST) -> tuple[float, float]:
        """Mean delay and mean service time of the longest `share` of the requests."""
        counts = np.flatnonzero(lengths.pmf)
        beyond = np.cumsum(lengths.pmf[counts][::-1])[::-1]  # at least so long
        weights = np.clip(np.minimum(beyond, share) - (beyond - lengths.pmf[counts]), 0.0, None)
        delay, service = self.at(counts.astype(float))
        return float(weights @ delay) / share, float(weights @ service) / share


def durations_by_length(model: Queue, arrival_rate: float) -> ByLength | None:
    """None where only a simulation knows them, and for batches. Raises UnstableQueueError,
    SpecError.
    """
    if not (ONE_BY_ONE.covers(model) or IN_SLOTS.covers(model)):
        return None
    if resumes_cost(model):
        return _resuming(model, arrival_rate)
    first_come = predict_model(
        model.but(policy=first_come_form(model.policy), law=model.law), arrival_rate
    )
    waited, sojourn = first_come.queueing_delay.mean, first_come.sojourn_time.mean
    if waited is None or sojourn is None:
        return None
    service = _service(model)
    order, load = order_of(model.policy), first_come.load
    tokens, ratios = ratios_by_length(order, service, load, model.requests.predictor)
    step = (sojourn - waited - service.setup) / model.requests.output_tokens.mean
    return ByLength(
        tokens, waited * ratios + _predicted(model, tokens), service.setup + step * tokens
    )


def _resuming(model: Queue, arrival_rate: float) -> ByLength:
    """The delays by length where requests are interrupted: the time that this adds to a service
    counts as service.
    """
    service, order = _service(model), order_of(model.policy)
    told = service.predictor(model.requests.predictor)
    queue = solve_order(service.order(order), service.sizes, arrival_rate, told)
    assert queue.served is not None
    tokens = (queue.sizes - service.setup) / service.step
    delay = queue.by_size - queue.served + _predicted(model, tokens)
    return ByLength(tokens, delay, queue.served)


def _predicted(model: Queue, tokens: Vector) -> Vector:
    """Mean wait of each length for predictions outside of the engine."""
    if model.predicts_on_server:
        return np.zeros(len(tokens))
    seconds = model.prediction_seconds
    return np.interp(tokens, np.arange(1.0, len(seconds) + 1), seconds)


def _service(model: Queue) -> TokenService:
    if isinstance(model.policy, Continuous):
        assert model.bound is not None
        return TokenService.in_slots(model.slot_time, model.bound, model.requests.token_limit)
    return TokenService.alone(model.law, model.requests.output_tokens, model.requests.token_limit)
