"""What the documents give where we have the exact answer: `--method bound`, `--method paper`.

dynamic   Yang et al. Eq. 16 (Inoue's Theorem 2 as a queueing delay), H <= alpha b + beta:
          psi = min(lam (alpha + beta)^2, lam alpha beta + lam alpha^2 + beta)
                / (2 (1 - lam^2 alpha^2))
          padded, lengths at most m: alpha = k1 + k3 m, beta = k2 + k4 m (Eq. 20);
          prompts padded, at most m1: alpha + kp m1 (Eq. 17).
          A bound where H has no residual and no cap binds: derived for deterministic H, it held
          for H below a line in every case tried; with a random H of the same mean it fails.
elastic   the same with alpha = k1 + k3 E[N], beta = k2 + k4 m (after Eq. 26). Printed, but NOT a
          bound: k3 sum N is random.
fixed     Eq. 25, 20 terms, H replaced by its mean. Printed as the queueing delay; it is the
          sojourn minus the forming delay: the queueing delay is Eq. 25 - H + (b - 1)/(2 lam).
single    Eq. 1-5 are right and are the exact answer. Other arrivals than Poisson: Kingman's bound,
          and the serving chapter's 25.4 as "paper" (queueing.models.gg1). With patience: de Kok
          and Tijms's interpolation (Eq. 6-9), queueing.models.mg1d.
"""

from __future__ import annotations

import math
from typing import Any

from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Continuous, Dynamic, Elastic, Single
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.as_published import fixed_batch_delay, kingman_delay, psi
from kendall.queueing.models.gg1 import TwoMomentDelay, kingman
from kendall.queueing.models.mg1d import de_kok_tijms
from kendall.queueing.prediction.solver import Solver
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles


def has_bound(model: Queue) -> bool:
    """Whether a bound on the mean delay is known: GI/G/1, and uncapped padded batches without a
    residual or stalls.
    """
    if is_renewal(model):
        return True
    open_ended = isinstance(model.policy, Dynamic) and model.bound is None
    return (
        open_ended
        and model.arrivals.scv == 1
        and model.engine.law.cv == model.engine.law.stall_share == 0
        and _plain_prompts(model)
        and _plain(model)
    )


def is_renewal(model: Queue) -> bool:
    """GI/G/1 with gaps that are not Poisson's."""
    alone = (
        model.engine.servers == 1
        and model.requests.patience is None
        and model.requests.sequences is None
    )
    return (
        model.arrivals.scv != 1
        and isinstance(model.policy, Single)
        and alone
        and not model.engine.disaggregated
    )


def two_moments(model: Queue, arrival_rate: float) -> tuple[TwoMomentDelay, ServiceTime]:
    """Kingman's two forms and Kraemer and Langenbach-Belz's for GI/G/1, and the service time."""
    service = ServiceTime.of(
        model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
    )
    return kingman(arrival_rate, service.mean, model.arrivals.scv, service.scv), service


def has_paper(model: Queue) -> bool:
    """Whether the documents print a formula for it."""
    if model.engine.disaggregated or model.arrivals.scv != 1:
        return is_renewal(model)
    if isinstance(model.policy, Single):
        return model.engine.servers == 1 and model.requests.sequences is None
    open_ended = isinstance(model.policy, Dynamic | Elastic) and model.bound is None
    pure_fixed = isinstance(model.policy, Fixed) and model.policy.max_wait == math.inf
    return _plain(model) and _plain_prompts(model) and (open_ended or pure_fixed)


def delay_bound(model: Queue, arrival_rate: float) -> float:
    """Upper bound of the mean queueing delay, seconds. Raises UnstableQueueError where the
    bound's own line is.
    """
    if is_renewal(model):
        return two_moments(model, arrival_rate)[0].upper_bound
    return psi(arrival_rate, *_line(model))


def _bound(model: Queue, arrival_rate: float) -> dict[str, Any]:
    return {"queueing_delay": Quantiles(delay_bound(model, arrival_rate))}


def _paper(model: Queue, arrival_rate: float) -> dict[str, Any]:
    """What the documents print."""
    if isinstance(model.policy, Fixed):
        service = model.batch_time.mean(model.bound or 1)
        return {
            "queueing_delay": Quantiles(fixed_batch_delay(arrival_rate, service, model.bound or 1))
        }
    if not isinstance(model.policy, Single):
        return _bound(model, arrival_rate)
    if is_renewal(model):
        renewal, own = two_moments(model, arrival_rate)
        delay = kingman_delay(
            arrival_rate, own.mean, math.sqrt(model.arrivals.scv), math.sqrt(own.scv)
        )
        return {
            "queueing_delay": Quantiles(delay),
            "sojourn_time": Quantiles(delay + own.mean),
            "utilisation": renewal.load,
        }
    mean, second = model.batch_time.mean(1), model.batch_time.second_moment(1)
    if model.requests.patience is not None:
        lossy = de_kok_tijms(arrival_rate, mean, second / mean**2 - 1, model.requests.patience)
        return {
            "queueing_delay": Quantiles(lossy.delay),
            "served_queueing_delay": Quantiles(lossy.served),
            "loss_fraction": lossy.loss_fraction,
        }
    delay = arrival_rate * second / (2 * (1 - arrival_rate * mean))
    return {
        "queueing_delay": Quantiles(delay),
        "sojourn_time": Quantiles(delay + mean),
        "utilisation": arrival_rate * mean,
    }


def _line(model: Queue) -> tuple[float, float]:
    law, longest = model.engine.law, model.requests.output_tokens.longest
    each = longest if model.policy.padded else model.requests.output_tokens.mean
    prompt = 0 if model.requests.prompt_tokens is None else model.requests.prompt_tokens.longest
    return law.speed * (law.k1 + law.kp * prompt + law.k3 * each), law.speed * (
        law.k2 + law.k4 * longest
    )


def _plain_prompts(model: Queue) -> bool:
    """None, or padded ones, whose longest stands for all (after Eq. 17)."""
    return model.requests.prompt_tokens is None or model.pads_prompts


def _plain(model: Queue) -> bool:
    return (
        model.engine.servers == 1
        and model.requests.patience is None
        and model.requests.sequences is None
        and not isinstance(model.policy, Continuous)
    )


SOLVERS = (
    Solver(
        lambda model: ("bound",) if has_bound(model) and not model.requests.endless else (),
        {"bound": _bound},
    ),
    Solver(
        lambda model: ("paper",) if has_paper(model) and not model.requests.endless else (),
        {"paper": _paper},
    ),
)
