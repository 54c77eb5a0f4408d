"""Elastic batches whose answers may be thousands of tokens long: one law for tables and moments,
a lattice that begins below 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_laws import MOST_COUNTS, thinned
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles
from kendall.queueing.simulation.experiment import simulate_run

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
CHAT = "lognormal:mu=6,sigma=1"
LONGEST = (
    (CHAT, 4096),
    ("geometric:mean=600", 4096),
    ("lognormal:mu=7,sigma=1", 32_768),
    ("uniform:low=1,high=32768", 32_768),
)


def queue(
    lengths: str, limit: int, policy: str = "elastic:max_batch_size=8", law: LatencyModel = LAW
) -> Queue:
    return Queue.read(policy, parse_distribution(lengths, limit), law)


@pytest.mark.parametrize(("lengths", "limit"), LONGEST)
def test_the_arrivals_of_a_batch_of_long_answers_have_the_moments_of_its_service_time(
    lengths: str, limit: int
) -> None:
    time = queue(lengths, limit).batch_time
    rate = 0.3 * time.largest_stable_rate(3)
    j = np.arange(400)
    for size, row in enumerate(time.table(3).arrivals(rate, 400), start=1):
        assert row.sum() == pytest.approx(1, abs=1e-11)
        assert row @ j == pytest.approx(rate * time.mean(size), rel=1e-9)
        assert row @ j**2 == pytest.approx(
            rate * time.mean(size) + rate**2 * time.second_moment(size), rel=1e-9
        )


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0])
def test_stencils_that_reach_below_zero_do_not_come_out_at_the_end_of_the_lattice(
    cv: float,
) -> None:
    """Setup and shortest answer of almost nothing: eight lattice points of each term are at 0."""
    law = LatencyModel(k3=0.001953125, k4=0.001, cv=cv)
    time = BatchTime(law, parse_distribution("geometric:mean=12", 60), None, padded=False)
    rate, j = 0.5 * time.largest_stable_rate(17), np.arange(2000)
    for size, row in enumerate(time.table(17).arrivals(rate, 2000), start=1):
        assert row.min() > -1e-12
        assert row.sum() == pytest.approx(1, abs=1e-11)
        assert row @ j == pytest.approx(rate * time.mean(size), rel=1e-9)


def test_a_wide_residual_does_not_make_the_table_large() -> None:
    """The lattice below 0 must be finer where the residual has a near pole; not for batches of
    thousands.
    """
    time = BatchTime(
        LatencyModel(k1=0.001, k3=0.001, k4=0.004, cv=1.0),
        parse_distribution("geometric:mean=20", 64),
        None,
        padded=False,
    )
    assert time.table(4).laws.size <= 2**22
    assert time.table(512).laws.size <= 2**25


def test_prompts_of_thousands_of_tokens_are_exact_in_padded_batches_too() -> None:
    law = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=2e-5)
    time = BatchTime(
        law,
        parse_distribution("uniform:low=1,high=32"),
        parse_distribution(CHAT, 8192),
        padded=True,
    )
    assert solve_batch_chain(time, 0.8 * time.largest_stable_rate(8), 8).residual < 1e-9


def test_thinned_lengths_keep_their_mean_their_ends_and_nearly_their_variance() -> None:
    for lengths, limit in LONGEST:
        whole = parse_distribution(lengths, limit)
        few = thinned(whole, 1024)
        assert np.count_nonzero(few.pmf) <= 1024 < np.count_nonzero(whole.pmf)
        assert few.mean == pytest.approx(whole.mean, rel=1e-12)
        assert few.longest == whole.longest
        assert 0 <= few.variance / whole.variance - 1 < 1e-4
    assert thinned(whole, whole.longest) is whole


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "limit"), LONGEST[:2])
def test_thinning_does_not_move_the_prediction(lengths: str, limit: int) -> None:
    """Four times fewer counts than are kept apart: the mean delay near saturation moves by 1e-5."""
    whole = queue(lengths, limit)
    few = Queue.read(whole.policy, thinned(whole.requests.output_tokens, MOST_COUNTS // 4), LAW)
    rate = 0.97 * whole.largest_stable_rate
    means = [predict_model(model, rate, "exact").queueing_delay.mean for model in (whole, few)]
    assert means[0] != means[1]
    assert means[1] == pytest.approx(means[0], rel=3e-5)


@pytest.mark.slow
@settings(max_examples=2)
@given(
    st.sampled_from(LONGEST),
    st.builds(
        LatencyModel,
        k1=st.floats(0, 0.02),
        k2=st.floats(0, 0.05),
        k3=st.floats(0, 0.003),
        k4=st.floats(1e-4, 0.02),
        cv=st.sampled_from([0.0, 0.1, 0.3]),
    ),
    st.integers(2, 24),
    st.floats(0.05, 0.97),
)
@example((CHAT, 4096), LAW, 8, 0.14)
def test_long_answers_are_answered_exactly(
    case: tuple[str, int], law: LatencyModel, cap: int, load: float
) -> None:
    """No fallback to simulation, whatever the law."""
    model = queue(*case, f"elastic:max_batch_size={cap}", law)
    answer = predict_model(model, load * model.largest_stable_rate)
    assert answer.method == "exact"
    assert answer.queueing_delay.mean is not None
    assert 0 < answer.queueing_delay.mean < math.inf
    assert answer.utilisation is not None
    assert 0 < answer.utilisation < 1


@dataclass(frozen=True)
class Measured:
    """A simulated value and its relative standard error, from independent runs."""

    value: float
    noise: float


def measured(runs: Sequence[np.ndarray], of: Callable[[np.ndarray], float]) -> Measured:
    each = np.array([of(run) for run in runs])
    value = of(np.concatenate(runs))
    return Measured(value, float(each.std(ddof=1)) / math.sqrt(len(each)) / value)


def p99(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.99))


def compare(
    model: Queue, load: float, requests: int, runs: int, seed: int
) -> list[tuple[Quantiles, Measured, Measured]]:
    """Queueing delay and sojourn: predicted, simulated mean and 99th percentile."""
    rate = load * model.largest_stable_rate
    answer = predict_model(model, rate, "exact")
    names = ("queueing_delay", "sojourn_time")
    streams = np.random.SeedSequence(seed).spawn(runs)
    pairs = [
        [getattr(run, name) for name in names]
        for run in (simulate_run(model, rate, requests, s).after(requests // 10) for s in streams)
    ]
    series = zip(*pairs, strict=True)
    return [
        (getattr(answer, name), measured(run, np.mean), measured(run, p99))
        for name, run in zip(names, series, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "limit"), [LONGEST[0], LONGEST[2]])
def test_half_a_million_requests_agree(lengths: str, limit: int) -> None:
    for predicted, mean, _ in compare(queue(lengths, limit), 0.5, 50_000, 10, seed=7):
        assert predicted.mean is not None
        assert mean.noise < 0.02
        assert abs(predicted.mean / mean.value - 1) < max(0.005, 4 * mean.noise)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("policy", ["elastic:max_batch_size=8", "elastic:max_batch_size=32"])
@pytest.mark.parametrize(("lengths", "limit"), LONGEST)
def test_ten_million_requests_agree_in_the_mean_and_the_99th_percentile(
    lengths: str, limit: int, policy: str, load: float
) -> None:
    """Mean within 0.5 % and p99 within 2 %, or each within four of its own standard errors, which
    must be small themselves.

    Near saturation delays are correlated over 10^5 requests and more: there 6 times 10^7.
    """
    runs = 60 if load == 0.97 else 10
    for predicted, mean, tail in compare(
        queue(lengths, limit, policy), load, 1_000_000, runs, seed=17
    ):
        assert predicted.mean is not None
        assert predicted.p99 is not None
        assert mean.noise < 0.02
        assert tail.noise < 0.03
        assert abs(predicted.mean / mean.value - 1) < max(0.005, 4 * mean.noise)
        assert abs(predicted.p99 / tail.value - 1) < max(0.02, 4 * tail.noise)


def test_a_law_of_lengths_with_gaps_is_thinned_too() -> None:
    """Counts of a file, far apart: each that is kept is one of them."""
    rng = np.random.default_rng(3)
    whole = TokenDistribution.from_counts(np.unique(rng.integers(1, 90_000, 9000)))
    few = thinned(whole, 500)
    assert set(np.flatnonzero(few.pmf)) <= set(np.flatnonzero(whole.pmf))
    assert few.mean == pytest.approx(whole.mean, rel=1e-12)
