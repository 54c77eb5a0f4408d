"""Assessed windows made by hand, for the autopilot and for what it asks."""

from __future__ import annotations

import numpy as np

from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import Lengths, lengths
from kendall.queueing.estimation.summaries import NO_WANDER, Stalls
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue

LAW = LatencyModel(k1=0.0003, k2=0.0014, k3=0.0001, k4=0.0012, cv=0.15)
SEQS, LONGEST = 8, 256
LAWFUL = parse_distribution("lognormal:mu=3,sigma=0.8", LONGEST)
HOLDS = tuple(
    Assumption(name, True, 0.0, "")
    for name in ("settled", "stable_queue", "constant_speed", "poisson_arrivals")
)
BOUNDS = AutopilotBounds(policies=("capped", "elastic"), smallest_token_limit=8)


def capacity(setting: Setting) -> float:

    lawful = LAWFUL if setting.max_output_tokens is None else LAWFUL.clip(setting.max_output_tokens)
    return Queue.read(setting.policy, lawful, LAW, max_num_seqs=SEQS).largest_stable_rate


def sample(count: int = 2000, limit: int | None = None) -> Lengths:
    counts = LAWFUL.sample(np.random.default_rng(1), count)
    return lengths(counts) if limit is None else lengths(np.minimum(counts, limit), counts >= limit)


def seen(
    now: float,
    current: Setting,
    rate: float,
    *,
    relative: float = 0.01,
    epoch: int = 0,
    observed: Estimate = UNKNOWN,
    judged: int = 1000,
    count: int = 1000,
    known: Lengths | None = None,
    failing: tuple[Assumption, ...] = (),
    waiting: int = 0,
    **others: object,
) -> AssessedWindow:
    names = {each.name for each in failing}
    estimates = Estimates(
        policy=current.policy,
        epoch=epoch,
        start=0.0,
        now=now,
        count=count,
        arrival_rate=symmetric(rate, relative * rate, 1000.0),
        dispersion=symmetric(1.0, 0.2, 20.0),
        rate_changed_at=None,
        output_tokens=sample() if known is None else known,
        prompt_tokens=lengths([1] * 10),
        speed=others.pop("speed", symmetric(1.0, 0.005, 500.0)),  # type: ignore[arg-type]
        cv=symmetric(LAW.cv, 0.01, 500.0),
        wander=NO_WANDER,
        speed_changed_at=None,
        stalls=Stalls(0, 0.0, 0.0, None),
    )
    return AssessedWindow(
        now=now,
        estimates=estimates,
        shape=LAW,
        current=current,
        limits=others.pop(
            "limits",
            QueueLimits(
                max_output_tokens=current.max_output_tokens, engine=EngineBounds(max_num_seqs=SEQS)
            ),
        ),  # type: ignore[arg-type]
        observed=observed,
        observed_sojourn=observed,
        judged=judged,
        assumptions=(*(each for each in HOLDS if each.name not in names), *failing),
        waiting=waiting,
        longest=LONGEST,
    )
