"""Two models on one server, one request at a time, first come, first served: means only
(`queueing.models.changeover`). On servers of their own they are two queues, of which
`queueing.prediction.solutions` puts the answer together.
"""

from __future__ import annotations

from typing import Any

from kendall.policies.immediate import Single
from kendall.queueing.prediction.solver import Solver, answered, token_times
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles


def _covers(model: Queue) -> tuple[str, ...]:
    plain = model.arrivals.poisson and not model.loads_unknown
    assert model.engine.second_model is not None
    return ("exact",) if plain and model.engine.second_model.first == "arrival" else ()


def _solve(model: Queue, arrival_rate: float) -> dict[str, Any]:
    queue = model.changeover
    delay, seconds = queue.mean_delay(arrival_rate), queue.mean
    gaps = [share * (own.requests.output_tokens.mean - 1) for share, own in model.models]
    steps = [own.engine.law.step(1) for _, own in model.models]
    total = sum(n * step for n, step in zip(gaps, steps, strict=True))
    return {
        **answered(Quantiles(delay), Quantiles(delay + seconds), 1.0, arrival_rate * queue.mean),
        **token_times(Quantiles(delay), seconds - total, total / sum(gaps) if sum(gaps) else None),
        "service_time": Quantiles(seconds),
    }


SOLVERS = (Solver(covers=_covers, solve={"exact": _solve}, models=2, policies=(Single,)),)
