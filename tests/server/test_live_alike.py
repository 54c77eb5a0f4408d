"""Calls whose sequences are as long as each other, as those of one prompt under one limit are: the
live model finds how alike they are, predicts with it, and says what it is worth.

The lengths are drawn here, not by the simulator: of each call all equal, all independent, or either
by chance. The compiled simulator serves them (`test_gateway_equals_simulator`), and the gateway's
own batcher on the emulated engine where the test says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kendall.policies import Request
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.control.assess import Assessment
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.measurement.record import call_of
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.queueing.simulation.fast import draw_trace
from kendall.queueing.simulation.fast import replay as rerun
from tests.queueing.estimation_windows import snapshot_of_run
from tests.server.live_harness import CAPPED, looked, real_site, records_of, sent
from tests.server.live_machine import block_speeds, moved
from tests.server.test_live_agreement import (
    FIRST,
    LENGTHS,
    MOST,
    Snapshot,
    gateway_window,
    live,
    model_of,
)

FOUR = "deterministic:value=4"
EQUAL, HALF, INDEPENDENT = 1.0, 0.5, 0.0  # share of the calls whose sequences are equally long
KNOWN, WITHIN = 0.025, 0.05
CELLS = (
    ("capped:max_batch_size=8", 0.5),
    ("capped:max_batch_size=6", 0.5),
    ("dynamic", 0.5),
    ("fixed:batch_size=8", 0.5),
    ("elastic:max_batch_size=8", 0.5),
    ("continuous:max_batch_size=4", 0.4),
    ("single", 0.3),
)


def alike(
    lengths: npt.NDArray[np.int64], calls: npt.NDArray[np.int64], share: float, seed: int
) -> npt.NDArray[np.int64]:
    """`calls[i]`: number of the call of the i-th sequence, in order; in that share of them all get
    the length of the first.
    """
    _, first, call = np.unique(calls, return_index=True, return_inverse=True)
    equal = np.random.default_rng((seed, 9)).random(first.size) < share
    return np.where(equal[call], lengths[first[call]], lengths)


def alike_window(policy: str, load: float, share: float, seed: int, sequences: str) -> Snapshot:
    """Until its mean is known; `load`: that of independent lengths."""
    model, count = model_of(policy, sequences), FIRST
    while True:
        trace = draw_trace(
            model, load * model.largest_stable_rate, count, np.random.SeedSequence(seed)
        )
        lengths = alike(np.asarray(trace.output_tokens), np.asarray(trace.call_ends), share, seed)
        run = rerun(model, dataclasses.replace(trace, output_tokens=lengths))
        seen = snapshot_of_run(run, model)
        if mean_interval(seen.judged(sojourn=model.policy.joins_running)).relative <= KNOWN:
            return seen
        count *= 2
        assert count <= MOST


def assert_predicted(policy: str, load: float, share: float, sequences: str = FOUR) -> Assessment:
    found = live(alike_window(policy, load, share, 8, sequences))
    assert abs(found.compared.error) <= WITHIN, found.compared
    names = {each.name: each for each in found.compared.assumptions}
    assert not [each for each in names.values() if each.holds is False] or share > 0
    assert names["constant_speed"].holds
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "load", "share"),
    [
        ("capped:max_batch_size=8", 0.5, EQUAL),
        ("capped:max_batch_size=6", 0.5, HALF),
        ("elastic:max_batch_size=8", 0.5, EQUAL),
        ("single", 0.3, EQUAL),
    ],
)
def test_calls_of_four_are_predicted_in_a_few_cells(policy: str, load: float, share: float) -> None:
    assert_predicted(policy, load, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", [EQUAL, HALF, INDEPENDENT])
@pytest.mark.parametrize(("policy", "load"), CELLS)
def test_calls_of_four_are_predicted_however_alike_they_are(
    policy: str, load: float, share: float
) -> None:
    assert_predicted(policy, load, share)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dynamic", "capped:max_batch_size=8", "single"])
def test_calls_of_any_number_too(policy: str) -> None:
    assert_predicted(policy, 0.5, EQUAL, "uniform:low=1,high=8")


@pytest.mark.slow
@pytest.mark.parametrize("share", [EQUAL, INDEPENDENT])
def test_the_assumption_says_what_independent_lengths_would_cost(share: float) -> None:
    """Equal lengths make the delay of capped batches a third shorter."""
    found = assert_predicted("capped:max_batch_size=8", 0.75, share)
    (mine,) = [each for each in found.compared.assumptions if each.name == "independent_lengths"]
    assert mine.holds is (share == INDEPENDENT)
    assert found.compared.verdict == "agree"
    if share == EQUAL:
        assert "drawn independently" in mine.says
        assert found.model is not None
        independent = found.model.but(intraclass_correlation=0.0)
        assert independent.largest_stable_rate < 0.9 * found.model.largest_stable_rate


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "dynamic"])
def test_a_gateways_own_window_of_equal_lengths_agrees(policy: str) -> None:
    """As people's calls are: the emulated engine under its exact law, 4 sequences a call."""
    model = model_of(policy, FOUR)
    rate = 0.4 * model.largest_stable_rate
    jobs, _ = draw_jobs(model, rate, 16_000, np.random.SeedSequence(12))
    equal: list[tuple[Request, int]] = []
    for _, call in itertools.groupby(jobs, key=lambda job: call_of(job.request.id)):
        members = list(call)
        equal += [(job.request, members[0].output_tokens) for job in members]
    found = live(gateway_window(policy, equal, 12))
    assert found.compared.verdict == "agree", found.compared
    names = {each.name for each in found.compared.assumptions if each.holds is False}
    assert names == {"independent_lengths"}


@pytest.mark.engine
@pytest.mark.slow
def test_calls_of_four_equal_answers_are_predicted_on_the_real_engine(tmp_path: Path) -> None:
    """Taken as independent they made the predicted delay three times the observed one, and the
    engine's speed was blamed.
    """
    with real_site(tmp_path) as site:
        now = site.now()
        offered = now.timetable(Poisson(0.4 * now.capacity() / 4), 21)
        found = now.run(looked(now, CAPPED, sent(now, offered, n=4)))
        after = now.now()
        blocks = block_speeds(now.run(records_of(now, found["epoch"])), CAPPED, now.law)
    compared, names = found["comparison"], found["comparison"]["assumptions"]
    assert names["independent_lengths"]["holds"] is False, compared
    assert compared["verdict"] != "disagree" or moved(blocks, (now.speed, after.speed)), compared
    observed, predicted = compared["observed"]["value"], compared["predicted"]
    assert observed is not None
    assert observed < 1.5 * predicted["high"], compared
    assert predicted["value"] < 1.6 * observed, compared


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_lengths_that_are_alike_but_not_equal_are_predicted_too(policy: str) -> None:
    """Each call has an effect of its own (a Gaussian copula), as answers to one prompt have."""
    model = model_of(policy, FOUR)
    trace = draw_trace(model, 0.5 * model.largest_stable_rate, 640_000, np.random.SeedSequence(3))
    rng, calls = np.random.default_rng(4), len(trace.arrived_at) // 4
    effect = np.repeat(rng.standard_normal(calls), 4)
    scores = np.sqrt(0.6) * effect + np.sqrt(0.4) * rng.standard_normal(4 * calls)
    lengths = by_rank(scores, LENGTHS)
    run = rerun(model, dataclasses.replace(trace, output_tokens=lengths))
    found = live(snapshot_of_run(run, model))
    assert abs(found.compared.error) <= WITHIN, found.compared


def by_rank(scores: npt.NDArray[np.float64], law: TokenDistribution) -> npt.NDArray[np.int64]:
    """Counts of that law in the order of the scores."""
    ranks = np.empty(scores.size)
    ranks[np.argsort(scores)] = (np.arange(scores.size) + 0.5) / scores.size
    return np.searchsorted(law.cdf, ranks).astype(np.int64)
