"""Two models, each on servers of its own or both on one server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Self

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.policies.text import SpecError, short_number
from kendall.queueing.description.parts import Parts, refuse
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.changeover import Changeover
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.second_model import SecondModel

LEAST_SHARE = 1e-12  # of the requests, for a model to be served


class Models(Parts):
    """A queue for one or two models."""

    def _check_models(self, second: SecondModel) -> None:
        requests = self.requests
        given = {
            f"patience={requests.patience}": requests.patience is not None,
            "sequences": requests.sequences is not None,
            f"prediction_cost={requests.prediction_cost}": requests.prediction_cost is not None,
        }
        refuse(given, "got {} and second_model; expected one of the two")
        if requests.endless:
            raise SpecError(
                "got second_model for output lengths without a limit; expected max_output_tokens "
                "too"
            )
        if second.threshold is not None and requests.predictor == NO_PREDICTION:
            raise SpecError(
                f"got threshold={short_number(second.threshold)} in second_model and no "
                "predictor; expected a predictor of output lengths: exact, lognormal:sigma=0.5 .."
            )
        if second.servers is not None:
            return
        order = order_of(self.policy)
        plain = order.is_formal() and not (order.preemptive or order.form.ratio or order.form.bins)
        known = plain and order.form.quantity in ("arrival", "prediction")
        if not isinstance(self.policy, Single) or not known or order.form.prompt_weight:
            raise SpecError(
                f"got policy {self.text} and second_model on the same server; expected single, "
                "with order fcfs, spjf, ljf or threshold and no prompt_weight, or servers for each "
                "model"
            )
        if second.first == "loaded" and not in_arrival_order(self.policy):
            raise SpecError(
                f"got policy {self.text} and first=loaded in second_model; expected order fcfs, or "
                "first=arrival"
            )

    @cached_property
    def models(self) -> tuple[tuple[float, Self], ...]:
        """Of the first and the second of two models the share of the requests that go to it, and
        the queue of these alone, on the servers that it has or shares. None where there is no
        second model.
        """
        second = self.engine.second_model
        if second is None:
            return ()
        requests, own = self.requests, second.servers or 0
        lengths, limit = requests.output_tokens, requests.token_limit
        chances = second.chances(lengths, requests.predictor, limit)

        def of_model(chances: Vector, law: LatencyModel, servers: int) -> tuple[float, Self]:
            share = float((pmf := lengths.pmf * chances).sum())
            share = 0.0 if share < LEAST_SHARE else share
            queue = self.but(
                output_tokens=TokenDistribution(pmf / share) if share else lengths,
                max_output_tokens=limit,
                law=law,
                servers=servers,
                second_model=None,
            )
            return share, queue

        return (
            of_model(1 - chances, self.engine.law, self.engine.servers - own),
            of_model(chances, second.law, own or self.engine.servers),
        )

    @property
    def models_apart(self) -> bool:
        """Whether each of two models has servers, and so a queue, of its own."""
        second = self.engine.second_model
        return second is not None and second.servers is not None

    @property
    def shares_server(self) -> bool:
        """Whether two models are served by one server."""
        return self.engine.second_model is not None and not self.models_apart

    @cached_property
    def changeover(self) -> Changeover:
        """Two models on one server, one request at a time."""
        second = self.engine.second_model
        assert second is not None
        (first, one), (share, other) = self.models
        services = tuple(
            ServiceTime.of(
                each.engine.law, each.requests.output_tokens, each.requests.prompt_tokens
            )
            for each in (one, other)
        )
        return Changeover((first, share), (services[0], services[1]), second.switch)

    @property
    def loads_unknown(self) -> bool:
        """Whether the order of service decides how often a model is loaded, which the load leaves
        out then.
        """
        second = self.engine.second_model
        if second is None or not second.switch:
            return False
        return second.first != "arrival" or not in_arrival_order(self.policy)

    def _rate_of_models(self) -> float:
        if self.models_apart:
            return min(queue.largest_stable_rate / share for share, queue in self.models if share)
        if not self.loads_unknown:
            return 1 / self.changeover.mean
        return 1 / sum(share / queue.largest_stable_rate for share, queue in self.models)

    def _models_assumed(self) -> Iterator[str]:
        second, requests = self.engine.second_model, self.requests
        if second is None:
            return
        share = f"{self.models[1][0]:.1%} of the requests"
        which = "any length"
        if second.threshold is not None:
            which = (
                f"predicted up to {short_number(second.threshold)} tokens ({requests.predictor})"
            )
        where = f"on {second.servers} of {self.engine.servers} servers"
        if second.servers is None:
            where = "on the same server"
        yield f"second model: {share}, {which}, {where}"
        if not self.models_apart and second.switch:
            most = "the load leaves that out" if self.loads_unknown else "the load has that in it"
            yield (
                f"the server holds one model at a time and takes {short_number(second.switch)} s "
                f"to load the other, which counts as service; {most}"
            )
        if second.first == "loaded":
            yield "requests of the model that is loaded go before all others"
