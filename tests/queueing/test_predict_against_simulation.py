"""Acceptance: the predicted queueing delay of each policy against simulation of the policy itself,
with power guards.

Exact predictions: |prediction - simulation| <= max(4 standard errors, 0.5 %), standard error <= 0.5
% (1 % at load 0.85). Continuous (an approximation): within 5 %, standard error <= 1.25 %; its mean
sojourn within 2 %. Replications of 20 000 requests are added until the standard error is small
enough; two processes. `python -m tests.queueing.test_predict_against_simulation [policy ...]`
prints the table.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=0.12, turnaround=1.55e-3)
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=16",
    "continuous:max_batch_size=4",
)
LENGTHS = ("uniform:low=1,high=32", "lognormal:mu=2.5,sigma=0.7")
CASES = [
    (policy, lengths, load)
    for policy in POLICIES
    for lengths in LENGTHS
    for load in (0.3, 0.6, 0.85)
]
REQUESTS, FEWEST, MOST = 20_000, 16, 400


@dataclass(frozen=True)
class Outcome:
    """Both means of delay and sojourn, the standard error of the simulated delay, and the
    method; seconds.
    """

    method: str
    predicted: tuple[float, float]
    simulated: tuple[float, float]
    standard_error: float
    replications: int

    @property
    def error(self) -> float:
        return self.predicted[0] / self.simulated[0] - 1

    @property
    def sojourn_error(self) -> float:
        return self.predicted[1] / self.simulated[1] - 1

    @property
    def noise(self) -> float:
        return self.standard_error / self.simulated[0]


def target(policy: str, load: float) -> float:
    if policy.startswith("continuous"):
        return 0.0125
    return 0.01 if load > 0.8 else 0.005


def play(case: tuple[str, str, float]) -> Outcome:
    policy, lengths, load = case
    model = Queue.read(
        policy,
        parse_distribution(lengths, 64),
        LAW,
        max_num_seqs=64 if policy == "dynamic" else None,
    )
    rate = load * model.largest_stable_rate
    predicted = predict_model(model, rate)
    means: list[tuple[float, float]] = []
    error = np.inf
    while len(means) < FEWEST or (
        error > 0.9 * target(policy, load) * np.mean([delay for delay, _ in means])
        and len(means) < MOST
    ):
        run = simulate_model(model, rate, num_requests=REQUESTS, seed=1000 + len(means))
        means.append((run.queueing_delay.mean or 0.0, run.sojourn_time.mean or 0.0))
        error = (
            np.std([delay for delay, _ in means], ddof=1) / np.sqrt(len(means))
            if len(means) > 1
            else np.inf
        )
    delay, sojourn = np.mean(means, axis=0)
    wanted = (predicted.queueing_delay.mean or 0.0, predicted.sojourn_time.mean or 0.0)
    return Outcome(
        predicted.method, wanted, (float(delay), float(sojourn)), float(error), len(means)
    )


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
) -> Iterator[dict[tuple[str, str, float], Future[Outcome]]]:
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ())
    ]  # type: ignore[attr-defined]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield {case: pool.submit(play, case) for case in chosen}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_prediction_is_what_the_policy_does(
    case: tuple[str, str, float], outcomes: dict[tuple[str, str, float], Future[Outcome]]
) -> None:
    policy, _, load = case
    outcome = outcomes[case].result()
    assert outcome.noise <= target(policy, load)
    if policy.startswith("continuous"):
        assert outcome.method == "approximation"
        assert abs(outcome.error) <= 0.05
        assert abs(outcome.sojourn_error) <= 0.02
    else:
        assert outcome.method == "exact"
        assert abs(outcome.error) <= max(4 * outcome.noise, 0.005)
        assert abs(outcome.sojourn_error) <= max(4 * outcome.noise, 0.005)


def main(policies: Sequence[str]) -> None:
    cases = [case for case in CASES if not policies or case[0] in policies]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for case, outcome in zip(cases, pool.map(play, cases), strict=True):
            text = (
                f"{case[0]:<28} {case[1]:<28} {case[2]:<5} {1e3 * outcome.predicted[0]:9.4f} "
                f"{1e3 * outcome.simulated[0]:9.4f} ms"
            )
            end = (
                f"se {outcome.noise:.2%}  sojourn {outcome.sojourn_error:+7.2%}  "
                f"x{outcome.replications}"
            )
            sys.stdout.write(f"{text} {outcome.error:+8.2%} {end}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
