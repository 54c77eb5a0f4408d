"""Machines that policies of every family serve, and assessed windows of them."""

from __future__ import annotations

import dataclasses
from functools import cache

from kendall.policies import parse_policy
from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.interval import symmetric
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import parse_law
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import Engine, poisson, seen, serve

POLICY = "capped:max_batch_size=8"
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))
DELAY = Objective(name="delay")
USUAL = (
    "single",
    "dynamic",
    "fixed:batch_size=8",
    POLICY,
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
)
UNIFORM, SKEWED = (
    parse_distribution("uniform:low=10,high=60"),
    parse_distribution("lognormal:mu=3,sigma=0.8", 256),
)
LAWS = {
    "page": (parse_law("k1=1.6e-3,k2=16e-3,k3=0.08e-3,k4=3.2e-3,cv=0.05"), UNIFORM),
    "tiny": (parse_law("k1=3e-4,k2=1.4e-3,k3=25e-6,k4=0.92e-3,cv=0.12,turnaround=0.00155"), SKEWED),
    "steps": (
        parse_law("k1=1e-4,k2=1e-3,k3=6e-4,k4=6e-4,cv=0.1"),
        SKEWED,
    ),  # whose speed falls with each slot taken
}
TURNAROUND = 4e-4
HOLDS = tuple(
    Assumption(name, True, 0.0, "")
    for name in ("settled", "stable_queue", "constant_speed", "poisson_arrivals")
)


def model_of(law: str, policy: str = POLICY) -> Queue:
    shape, lengths = LAWS[law]
    return Queue.read(policy, lengths, shape, max_num_seqs=16)


@cache
def window(law: str = "page", load: float = 0.6, seed: int = 1) -> Estimates:
    """Estimates of 4,000 requests that capped batches served."""
    shape, lengths = LAWS[law]
    records = serve(
        poisson(load * model_of(law).largest_stable_rate, 4000, seed),
        Engine(most=8, law=shape),
        seed,
        lengths=lengths,
    )
    found = estimate(seen(records, POLICY), parse_policy(POLICY), shape)
    return dataclasses.replace(found, gateway_turnaround=TURNAROUND)


def assessed(current: str, load: float = 0.5) -> AssessedWindow:
    estimates = window("page", load)
    return AssessedWindow(
        now=1000.0,
        estimates=estimates,
        shape=LAWS["page"][0],
        current=Setting(policy=current),
        limits=LIMITS,
        observed=symmetric(0.2, 0.02, 100.0),
        observed_sojourn=symmetric(0.5, 0.05, 100.0),
        judged=1000,
        assumptions=HOLDS,
        longest=256,
    )
