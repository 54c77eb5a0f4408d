"""Live agreement where lengths spread, calls hold several sequences and the machine stalls: within
5 %, or the broken assumption is named.

As in `test_live_agreement`, by the same `assess`. The stalls are not those of the law: the machine
stands still at Poisson instants of the wall clock, whether it serves or not, under every policy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.window import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.estimation_windows import snapshot_of_run
from tests.server.stalled_runs import SHARE, stalled_run

POLICIES = (
    "single",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "dynamic",
    "continuous:max_batch_size=4",
)
LENGTHS = {
    "geometric": parse_distribution("geometric:mean=16", 256),
    "lognormal": parse_distribution("lognormal:mu=1.68,sigma=1.45", 256),  # SCV 4 within the limit
    "bimodal": TokenDistribution(np.bincount([8, 80], [0.9, 0.1])),
}
SHAPE = parse_law(
    "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,turnaround=0.0015"
)  # as calibrated: the speed and the residual are the run's
SPEED, CV, BOUND = 1.15, 0.12, 16
WITHIN, KNOWN = 0.05, 0.04
FIRST, MOST = 20_000, 5_120_000  # requests
RUNS, COUNT, LONG = (
    400,
    3000,
    4_000_000,
)  # runs, requests of each; of the run that tells the true mean


@pytest.fixture(autouse=True)
def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of millions of requests, and judged elsewhere (test_checked)."""
    monkeypatch.setattr("kendall.queueing.control.assess.check_window", lambda *_: None)


def model_of(policy: str, lengths: str, sequences: str | None = None) -> Queue:
    law = replace(SHAPE, speed=SPEED, cv=CV)
    calls = None if sequences is None else parse_distribution(sequences)
    return Queue.read(policy, LENGTHS[lengths], law, sequences=calls, max_num_seqs=BOUND)


def window(
    policy: str,
    lengths: str,
    load: float,
    seed: int,
    sequences: str | None = None,
    *,
    stalls: bool = True,
) -> Snapshot:
    """The stop rule of `test_live_agreement`, here until the mean is known to `KNOWN`."""
    model, count = model_of(policy, lengths, sequences), FIRST
    rate = load * model.largest_stable_rate * (1 - SHARE if stalls else 1.0)
    while True:
        run = (
            stalled_run(model, rate, count, seed)
            if stalls
            else simulate_run(model, rate, count, np.random.SeedSequence(seed))
        )
        seen = snapshot_of_run(run, model)
        if mean_interval(seen.judged(sojourn=model.policy.joins_running)).relative <= KNOWN:
            return seen
        count *= 2
        assert count <= MOST


def live(seen: Snapshot, lengths: str) -> Assessment:
    return assess(
        seen,
        SHAPE,
        QueueLimits(
            max_output_tokens=LENGTHS[lengths].longest, engine=EngineBounds(max_num_seqs=BOUND)
        ),
    )


def assert_agrees(
    policy: str,
    lengths: str,
    load: float,
    seed: int,
    sequences: str | None = None,
    *,
    stalls: bool = True,
) -> None:
    """Within 5 %, whether the law holds the stalls or, under continuous batching, their backlog
    is added to its means.
    """
    compared = live(window(policy, lengths, load, seed, sequences, stalls=stalls), lengths).compared
    says = {each.name: each for each in compared.assumptions}
    assert all(
        says[name].holds is not False
        for name in ("poisson_arrivals", "open_loop", "constant_speed", "stable_queue")
    ), says
    assert abs(compared.error) <= WITHIN, compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lengths", "load", "sequences"),
    [
        ("single", "geometric", 0.3, None),
        ("single", "bimodal", 0.3, "deterministic:value=3"),
        ("fixed:batch_size=4", "bimodal", 0.6, None),
        ("capped:max_batch_size=8", "lognormal", 0.3, None),
        ("elastic:max_batch_size=8", "bimodal", 0.6, None),
        ("dynamic", "bimodal", 0.75, None),
        ("dynamic", "geometric", 0.3, "deterministic:value=3"),
        ("continuous:max_batch_size=4", "geometric", 0.3, None),
        ("continuous:max_batch_size=4", "bimodal", 0.75, None),
    ],
)
def test_stalls_and_spread_lengths_in_a_few_cells(
    policy: str, lengths: str, load: float, sequences: str | None
) -> None:
    assert_agrees(policy, lengths, load, 1, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.75])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_stalls_and_spread_lengths_in_every_cell(
    policy: str, lengths: str, load: float, stalls: bool
) -> None:
    assert_agrees(policy, lengths, load, 2, stalls=stalls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sequences", [*(f"deterministic:value={n}" for n in range(2, 9)), "uniform:low=1,high=8"]
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_calls_of_several_sequences_under_stalls_in_every_cell(
    policy: str, lengths: str, sequences: str
) -> None:
    assert_agrees(policy, lengths, 0.6, 3, sequences)


@pytest.mark.slow
def test_stalls_of_a_continuous_engine_are_a_part_of_the_prediction() -> None:
    stalling = live(window("continuous:max_batch_size=4", "geometric", 0.75, 1), "geometric")
    says = next(each for each in stalling.compared.assumptions if each.name == "no_stalls")
    assert says.says.endswith("ms of the predicted delay")
    assert (
        stalling.compared.predicted.value * (1 - says.measure)
        < (1 - WITHIN) * stalling.compared.observed.value
    )  # not without them
    assert abs(stalling.compared.error) <= WITHIN
    assert stalling.prediction is not None
    assert any("stalls of the engine add" in each for each in stalling.prediction.assumptions)
    calm = live(
        window("continuous:max_batch_size=4", "geometric", 0.75, 1, stalls=False), "geometric"
    )
    assert calm.estimates.stalls.count == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lengths", "load", "sequences"),
    [
        ("capped:max_batch_size=8", "geometric", 0.5, None),
        ("capped:max_batch_size=8", "lognormal", 0.3, None),
        ("capped:max_batch_size=8", "geometric", 0.5, "deterministic:value=2"),
        ("elastic:max_batch_size=8", "bimodal", 0.3, None),
        ("dynamic", "bimodal", 0.6, None),
        ("continuous:max_batch_size=4", "geometric", 0.3, None),
    ],
)
def test_the_intervals_of_observation_and_prediction_cover_the_true_mean(
    policy: str, lengths: str, load: float, sequences: str | None
) -> None:
    model = model_of(policy, lengths, sequences)
    rate = load * model.largest_stable_rate * (1 - SHARE)
    long = stalled_run(model, rate, LONG, RUNS).after(LONG // 100)
    true = float((long.sojourn_time if model.policy.joins_running else long.queueing_delay).mean())
    covered, widths = {"observed": 0, "predicted": 0}, []
    for seed in range(RUNS):
        compared = live(
            snapshot_of_run(stalled_run(model, rate, COUNT, seed), model), lengths
        ).compared
        for name in covered:
            covered[name] += getattr(compared, name).covers(true)
        widths.append(compared.predicted.relative)
    assert min(covered.values()) >= 0.88 * RUNS, covered
    assert np.median(widths) < 0.4  # an interval that covers everything says nothing
