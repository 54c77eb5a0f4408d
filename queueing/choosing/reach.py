"""Whether an SLO can be kept at all: a request that finds everything empty takes the times of the
latency law alone, which no arrival rate, batch size or number of servers shortens.

    time to first token    >= setup of one request + one step of one
    inter-token latency    >= one step of one
    service, sojourn time  >= setup + n steps of one, n output tokens
    queueing delay         >= 0

Every request takes at least that long, so each quantile is at least that of these.
"""

from __future__ import annotations

from kendall.policies.registry import is_first_come
from kendall.policies.text import short_number
from kendall.queueing.choosing.objective import Objective, Slo
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import UnattainableError
from kendall.queueing.queue import Queue
from kendall.queueing.result import QUANTITY_WORDS

NOTHING = "nothing keeps "  # how a reason begins
_REMEDIES = {  # beside a longer bound and a faster engine
    "time_to_first_token": ", or shorter prompts",
    "sojourn_time": ", or a lower token limit",
    "service_time": ", or a lower token limit",
}


def check_reach(model: Queue, objective: Objective) -> None:
    """Raises UnattainableError where even an empty queue breaks an SLO."""
    for slo in objective.slos:
        if (seconds := least_seconds(model, slo)) > slo.seconds:
            part = "mean" if slo.level is None else slo.metric
            why = (
                f"a request that finds everything empty has a {part} "
                f"{QUANTITY_WORDS[slo.field]} of {short_number(seconds, 3)} s"
            )
            other = _REMEDIES.get(slo.field, "")
            remedy = f"expected a longer bound, a faster engine{other}"
            raise UnattainableError(f"{NOTHING}{slo}: {why}", remedy)


def least_seconds(model: Queue, slo: Slo) -> float:
    """The least value that the SLO's duration can have, seconds. 0 where nothing is known: for the
    queueing delay; under a law with a negative coefficient, where more requests may take less; and
    for quantiles where a residual, or patience under an order of its own, may favour short ones.
    """
    law = model.engine.law
    chance = (law.cv > 0 or law.stall_share > 0) and not model.policy.joins_running
    chosen = model.requests.patience is not None and not is_first_come(model.policy)
    if (
        slo.field == "queueing_delay"
        or min(law.k1, law.k2, law.k3, law.k4, law.kp) < 0
        or chosen
        or (chance and slo.level is not None)
    ):
        return 0.0
    fastest = min(model.engine.server_speeds, default=1.0)
    if slo.field == "inter_token_latency":
        return 0.0 if model.policy.padded else fastest * law.step(1)
    setup = law.setup(1)
    if model.policy.joins_running:
        setup = law.admission(1) + law.turnaround * law.speed
    prompts, tokens = model.requests.prompt_tokens, 1.0
    prompt = 0.0 if prompts is None else _statistic(prompts, slo)
    if slo.field != "time_to_first_token":
        tokens = _statistic(model.requests.output_tokens, slo)
        prompt = prompt if slo.level is None else 0.0  # quantiles of a sum are not their sum
    return fastest * (setup + law.speed * law.kp * prompt + law.step(1) * tokens)


def _statistic(lengths: TokenDistribution, slo: Slo) -> float:
    return lengths.mean if slo.level is None else float(lengths.quantile(slo.level))
