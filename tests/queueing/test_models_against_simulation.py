"""Every model of `predict` against simulation of its policy: within 4 standard errors, with a power
guard, at a table of points.

Simulation: the compiled replay (equal to the policies' own sample paths, test_kernels.py), 8 or
more replications, the standard error between them. `python -m
tests.queueing.test_models_against_simulation [policy ...]` prints the table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles
from kendall.queueing.simulation.experiment import simulate_model

LIGHT, HEAVY, HEAVIEST = (
    "uniform:low=1,high=64",
    "lognormal:mu=3,sigma=1",
    "pareto:alpha=1.5,minimum=8",
)
LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
LOADS = (0.1, 0.3, 0.5, 0.8, 0.95)
POLICIES = (
    "single",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "fixed:batch_size=8",
    "dynamic",
    "elastic",
)
BOUNDLESS = {
    LIGHT: 0.95,
    HEAVY: 0.65,
    HEAVIEST: 0.65,
}  # elastic without a cap: beyond 0.8 no exact answer within seconds
CASES = [
    *(
        (policy, lengths, BOUNDLESS[lengths] if (policy, load) == ("elastic", 0.95) else load, None)
        for policy in POLICIES
        for lengths in (LIGHT, HEAVY, HEAVIEST)
        for load in LOADS
    ),
    *(
        ("single", lengths, load, 0.05)
        for lengths in (LIGHT, HEAVY, HEAVIEST)
        for load in (0.1, 0.5, 0.95, 1.5, 3.0)
    ),
]
ACCEPTANCE = [
    (policy, lengths, load, patience)
    for policy, patience in (
        ("dynamic", None),
        ("capped:max_batch_size=8", None),
        ("elastic", None),
        ("fixed:batch_size=8", None),
        ("single", 0.05),
    )
    for lengths in (LIGHT, HEAVY)
    for load in (0.2, 0.5, 0.8)
]
Case = tuple[str, str, float, float | None]


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and simulated, with the standard error of the simulated mean."""

    predicted: Quantiles
    simulated: Quantiles

    @property
    def error(self) -> float:
        return (self.predicted.mean or 0.0) / (self.simulated.mean or np.nan) - 1

    @property
    def noise(self) -> float:
        return (self.simulated.standard_error or np.nan) / (self.simulated.mean or np.nan)

    @property
    def tail_error(self) -> float:
        return (self.predicted.p99 or np.nan) / (self.simulated.p99 or np.nan) - 1


def model(case: Case, cv: float = 0.1) -> tuple[Queue, float]:
    policy, lengths, load, patience = case
    law = LatencyModel(
        k1=LAW.k1,
        k2=LAW.k2,
        k3=LAW.k3,
        k4=LAW.k4,
        cv=0.0 if policy in ("dynamic", "elastic") else cv,
    )
    queue = Queue.read(policy, parse_distribution(lengths, 128), law, patience=patience)
    return queue, load * queue.largest_stable_rate


def compare(case: Case, requests: int, replications: int) -> tuple[str, Pair, Pair]:
    queue, rate = model(case)
    answer = predict_model(queue, rate)
    run = simulate_model(queue, rate, num_requests=requests, replications=replications, seed=17)
    return (
        answer.method,
        Pair(answer.queueing_delay, run.queueing_delay),
        Pair(answer.sojourn_time, run.sojourn_time),
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_mean_is_what_the_policy_does(case: Case) -> None:
    """Delay and sojourn within 4 standard errors (bias of the finite run: 0.1 %), standard error
    below 5 %.
    """
    method, delay, sojourn = compare(case, 500_000, 10)
    assert method == "exact"
    for pair in (delay, sojourn):
        assert pair.noise < 0.05
        assert abs(pair.error) < 4 * pair.noise + 0.001


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCEPTANCE, ids=lambda case: "-".join(map(str, case)))
def test_ten_million_requests_agree_in_the_mean_and_the_99th_percentile(case: Case) -> None:
    method, delay, sojourn = compare(case, 1_000_000, 10)
    assert method == "exact"
    for pair in (delay, sojourn):
        assert abs(pair.error) < max(0.005, 4 * pair.noise)
        assert abs(pair.tail_error) < 0.02


def main(policies: list[str]) -> None:
    for case in [*CASES, *ACCEPTANCE]:
        if not policies or case[0] in policies:
            method, delay, sojourn = compare(case, 500_000, 10)
            label = f"{case[0]:<26}{case[1]:<28}{case[2]:<6}{case[3]!s:<6}{method:<12}"
            parts = [
                f"{pair.error:+8.3%} ({pair.noise:.3%}) p99 {pair.tail_error:+7.2%}"
                for pair in (delay, sojourn)
            ]
            sys.stdout.write(f"{label} delay {parts[0]}   sojourn {parts[1]}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
