"""What predictions of output lengths cost, and where."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from kendall.policies.immediate import Single
from kendall.policies.ordered import order_of
from kendall.policies.text import SpecError, short_number
from kendall.queueing.description.parts import Parts
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.token_orders import predictor_in_tokens
from kendall.queueing.predictors.prediction_cost import PaidPredictions


class Predictions(Parts):
    """A queue whose requests are predicted before they are served."""

    def _check_predictions(self) -> None:
        requests, engine = self.requests, self.engine
        if self.predictions is None:
            return
        given = f"got prediction_cost={requests.prediction_cost}"
        if engine.disaggregated or (requests.patience is not None and not self.predicts_on_server):
            other = "disaggregated" if engine.disaggregated else f"patience={requests.patience:g}"
            raise SpecError(f"{given} and {other}; expected one of the two")
        resumes = self.predicts_on_server and order_of(self.policy).preemptive
        if resumes and (
            not isinstance(self.policy, Single)
            or requests.sequences is not None
            or engine.has_queues
            or engine.law.stall_share
        ):
            raise SpecError(
                f"{given} for order {order_of(self.policy).name}, which interrupts requests; "
                "expected policy single with one queue, one sequence a call and no stalls, or an "
                "external cost"
            )

    @cached_property
    def predictions(self) -> PaidPredictions | None:
        """What predictions cost under this policy's order; None where nothing is paid."""
        cost, order = self.requests.prediction_cost, order_of(self.policy)
        if cost is None or not order.predicts:
            return None
        return cost.under(order.form, self.engine.law.step(1))

    @property
    def predicts_on_server(self) -> bool:
        """Whether predictions take the engine's time."""
        cost = self.requests.prediction_cost
        return cost is not None and cost.place == "server" and self.predictions is not None

    @cached_property
    def prediction_seconds(self) -> Vector:
        """Mean time that the predictions of a request of 1, 2, .. tokens take, s."""
        counts, requests = np.arange(1.0, self.requests.output_tokens.longest + 1), self.requests
        if self.predictions is None:
            return np.zeros(len(counts))
        told = predictor_in_tokens(requests.predictor, requests.token_limit)
        return self.predictions.expected(counts, told)

    @property
    def mean_prediction(self) -> float:
        """That of a random request, s; those beyond a table of lengths take what the last takes."""
        chances = self.requests.output_tokens.pmf[1:]
        return float(chances @ self.prediction_seconds / chances.sum())

    @property
    def external_prediction(self) -> float:
        """Mean time that a request waits for predictions outside of the engine, s."""
        return 0.0 if self.predicts_on_server else self.mean_prediction

    @property
    def law(self) -> LatencyModel:
        """The latency law of a request and of its predictions on the engine, as one service."""
        law = self.engine.law
        if not self.predicts_on_server:
            return law
        return replace(law, k1=law.k1 + self.mean_prediction / law.speed)

    def _predictions_assumed(self) -> tuple[str, ...]:
        paid = self.predictions
        if paid is None:
            unpaid = "the prediction cost is not paid: the order reads no predicted length"
            return () if self.requests.prediction_cost is None else (unpaid,)
        if not self.predicts_on_server:
            return (
                f"predictions outside of the engine: {paid}, which its delay and its sojourn have "
                "on top",
            )
        share = f"predictions cost {short_number(self.mean_prediction)} s of the server a request"
        if self.bound is not None:
            capacity = self.largest_stable_rate * self.requests.call_size / self.engine.servers
            share = f"predictions cost {self.mean_prediction * capacity:.1%} of the server"
            share += "" if self.bound == 1 else " at its largest rate"
        share += f": {paid}"
        if not order_of(self.policy).preemptive:
            return (
                f"{share}; on average {short_number(self.mean_prediction)} s with each service",
            )
        return (
            f"{share}; predictions before the requests that are ranked by them, in order of "
            "arrival, and what is interrupted there goes on where it stopped",
        )
