"""Which duration compares settings: the same rule for optimize, advice, what-if and autopilot.

queueing delay        within one family of whole batches (dynamic counts as capped): a wait for the
                      same kind of service
sojourn time          across families, and for continuous: its slots share the engine, so that more
                      of them shorten the wait and slow every answer down
as the SLO names it   where the SLO bounds the sojourn time or the time to first token
"""

from __future__ import annotations

from collections.abc import Iterable

from kendall.policies.core import Policy
from kendall.queueing.choosing.objective import Slo
from kendall.queueing.result import Prediction, Quantity


def compared_by(policies: Iterable[Policy], slo: Slo | None = None) -> Quantity:
    """The quantity by which these candidates are ranked, smaller is better."""
    if slo is not None and slo.field == "sojourn_time":
        return "sojourn_time"
    if slo is not None and slo.field == "time_to_first_token":
        return "time_to_first_token"
    candidates = list(policies)
    families = {"capped" if each.name == "dynamic" else each.name for each in candidates}
    return (
        "queueing_delay"
        if len(families) == 1 and not candidates[0].joins_running
        else "sojourn_time"
    )


def mean_of(prediction: Prediction, quantity: Quantity) -> float | None:
    """Its mean, seconds; None where the method cannot give it. A lost request counts as one that
    waited for its patience.
    """
    found: float | None = getattr(prediction, quantity).mean
    every, served, lost = (
        prediction.queueing_delay.mean,
        prediction.served_queueing_delay.mean,
        prediction.loss_fraction,
    )
    if (
        quantity in ("queueing_delay", "inter_token_latency", "service_time")
        or not lost
        or found is None
        or every is None
        or served is None
    ):
        return found
    return every + (1 - lost) * (found - served)


def served_mean(prediction: Prediction, quantity: Quantity) -> float | None:
    """The mean queueing delay or sojourn time of dispatched requests, seconds: lost requests have
    neither.
    """
    delay = quantity == "queueing_delay"
    return (prediction.served_queueing_delay if delay else prediction.sojourn_time).mean
