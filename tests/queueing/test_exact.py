"""Exact numerics against textbook values, against each other and against independent
computations.
"""

import itertools
import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.distributions.lattice import Grid
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.batch_delay import batch_quantiles, checked
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.prediction import largest_stable_rate, predict
from kendall.queueing.result import LEVELS, Quantiles

ONE = parse_distribution("deterministic:value=1")
UNIFORM = parse_distribution("uniform:low=1,high=32")
LOGNORMAL = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("uniform:low=10,high=50")
LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, cv=0.12, speed=1.1)
ALL = [
    (padded, lengths, prompts)
    for padded in (True, False)
    for lengths in (UNIFORM, LOGNORMAL)
    for prompts in (None, PROMPTS)
]


def test_m_d_1_has_the_textbook_delay() -> None:
    assert solve_mg1(LatencyModel(k4=1.0), ONE, 0.8).delay.mean == pytest.approx(
        0.8 / (2 * 0.2), rel=1e-12
    )


@pytest.mark.parametrize(
    ("mean", "lost", "answered"),
    [
        (100.0, 0.0, True),
        (100.39, 0.0, True),  # 0.3 % and a width of 0.1
        (99.61, 0.0, True),
        (100.42, 0.0, False),
        (99.58, 0.0, False),
        (99.905, 0.0009, True),  # the mass that is lost takes its part of the mean with it
        (99.885, 0.0011, False),
    ],
)
def test_quantiles_are_given_only_of_a_law_with_the_exact_mean_and_all_its_mass(
    mean: float, lost: float, answered: bool
) -> None:
    grid, masses = Grid(0.1, 2001), np.zeros(2001)
    masses[[500, 1500]] = (1 - lost) / 2  # 50 and 150
    found = checked(mean, masses, grid)
    assert found.mean == mean
    assert (found.p90 is not None) is answered
    if answered:
        assert found.p90 == pytest.approx(150.0, abs=0.2)


def test_m_m_1_has_the_textbook_delay_and_quantiles() -> None:
    """Exponential service: one token and a residual of cv = 1; P(Wq > x) = rho e^{-(1-rho) x}."""
    queue = solve_mg1(LatencyModel(k4=1.0, cv=1.0), ONE, 0.8)
    assert queue.delay.mean == pytest.approx(4.0, rel=1e-12)
    assert queue.delay.p90 == pytest.approx(math.log(0.8 / 0.1) / 0.2, rel=1e-3)
    assert queue.delay.p99 == pytest.approx(math.log(0.8 / 0.01) / 0.2, rel=1e-3)
    assert queue.sojourn.p95 == pytest.approx(math.log(1 / 0.05) / 0.2, rel=1e-3)


def test_m_d_1_quantiles_match_erlangs_series() -> None:
    """P(Wq <= x) = (1 - rho) sum_k (-rho (x-k))^k / k! e^{rho (x-k)}, D = 1 (THEORY b)."""
    rho = 0.7
    queue = solve_mg1(LatencyModel(k4=1.0), ONE, rho)
    for level, x in ((0.9, queue.delay.p90), (0.99, queue.delay.p99)):
        assert x is not None
        terms = [
            (-rho * (x - k)) ** k / math.factorial(k) * math.exp(rho * (x - k))
            for k in range(math.floor(x) + 1)
        ]
        assert (1 - rho) * sum(terms) == pytest.approx(level, abs=1e-5)


def test_the_median_delay_is_zero_where_the_server_is_mostly_idle() -> None:
    assert (
        solve_mg1(LAW, UNIFORM, 0.4 / BatchTime(LAW, UNIFORM, None, False).mean(1)).delay.p50 == 0.0
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("padded", "lengths", "prompts"), ALL)
def test_a_cap_of_one_and_fixed_one_are_m_g_1(
    padded: bool, lengths: TokenDistribution, prompts: TokenDistribution | None
) -> None:
    time = BatchTime(LAW, lengths, prompts, padded)
    rate = 0.7 / time.mean(1)
    single = solve_mg1(LAW, lengths, rate, prompts)
    chain, fixed = solve_batch_chain(time, rate, 1), solve_fixed_batches(time, rate, 1)
    assert chain.queueing_delay == pytest.approx(single.delay.mean, rel=1e-9)
    assert fixed.delay.mean == pytest.approx(single.delay.mean, rel=1e-9)
    assert chain.sojourn_time == pytest.approx(single.sojourn.mean, rel=1e-9)
    assert chain.utilisation == pytest.approx(0.7, rel=1e-9)


def given(law: Quantiles) -> list[float]:
    """p50, p90, p95 and p99, each of which must be there."""
    levels = [getattr(law, name) for name in LEVELS]
    assert None not in levels
    return levels


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("bound", "load"), [*itertools.product((1, 2, 8), (0.3, 0.7, 0.95)), (None, 0.3), (None, 0.6)]
)
@pytest.mark.parametrize("padded", [True, False])
def test_every_quantile_is_given_and_they_are_in_order(
    padded: bool, bound: int | None, load: float
) -> None:
    time = BatchTime(LAW, UNIFORM, None, padded)
    rate = load * time.largest_stable_rate(bound)
    for law in batch_quantiles(time, rate, solve_batch_chain(time, rate, bound)):
        levels = given(law)
        assert levels == sorted(levels)
        assert levels[0] >= 0
        assert levels[-1] > levels[0]
        assert law.mean < levels[-1] < math.inf


@pytest.mark.parametrize("load", [0.3, 0.7, 0.95])
def test_a_cap_of_one_has_the_quantiles_of_m_g_1(load: float) -> None:
    time = BatchTime(LAW, UNIFORM, None, True)
    rate = load / time.mean(1)
    delay, sojourn = batch_quantiles(time, rate, solve_batch_chain(time, rate, 1))
    single = solve_mg1(LAW, UNIFORM, rate)
    assert given(delay) == pytest.approx(given(single.delay), rel=5e-3, abs=1e-5)
    assert given(sojourn) == pytest.approx(given(single.sojourn), rel=5e-3)


@pytest.mark.parametrize("bound", [1, 2, 8])
def test_the_number_left_behind_has_the_probability_and_the_mean_that_the_chain_says(
    bound: int,
) -> None:
    """E[R] from the area under the number waiting: E[Wq] E[b] = E[R] E[H(B)] + lam E[H^2] / 2."""
    time = BatchTime(LAW, UNIFORM, None, True)
    rate = 0.8 * time.largest_stable_rate(bound)
    queue, (first, second, _) = solve_batch_chain(time, rate, bound), time.moments(bound)
    residual = rate * float(np.append(queue.starts, queue.full) @ second) / 2
    mean = (queue.queueing_delay * queue.batch_size - residual) / float(first[-1])
    assert queue.behind.sum() == pytest.approx(queue.full, abs=1e-7)
    assert queue.behind.min() > -1e-9
    assert queue.behind @ np.arange(len(queue.behind)) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(("bound", "most"), [(None, "_LARGEST_BATCH"), (1000, "LARGEST_BOUND")])
def test_batches_larger_than_those_that_are_tried_are_an_error_that_says_so(
    bound: int | None, most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cv = 1 the batches of load 0.85 have a tail that no size cuts; here the largest size
    that is tried is 64.
    """
    monkeypatch.setattr(f"kendall.queueing.models.batches.batch_chain.{most}", 64)
    time = BatchTime(LatencyModel(k1=1.0, k4=1e-9, cv=1.0), ONE, None, True)
    limit = "no bound is set" if bound is None else "the bound is 1000"
    with pytest.raises(
        NotConvergedError,
        match=rf"size above 64 \(\S+ of the batches; {limit}\).*bound the batch size at ",
    ) as caught:
        solve_batch_chain(time, 0.85, bound)
    assert 1e-11 < caught.value.residual < 0.5
    assert "load" not in str(caught.value)


@pytest.mark.parametrize("padded", [True, False])
def test_moments_of_a_batch_match_enumeration(padded: bool) -> None:
    """Three sequences of one to four tokens, all 64 combinations."""
    pmf = np.array([0, 0.1, 0.4, 0.3, 0.2])
    time = BatchTime(LAW, TokenDistribution(pmf), None, padded)
    first = second = own = 0.0
    for lengths in np.ndindex(4, 4, 4):
        counts = np.array(lengths) + 1
        weight = float(np.prod(pmf[counts]))
        seconds = (
            LAW.padded(3, counts.max()) if padded else LAW.unpadded(3, counts.sum(), counts.max())
        )
        first, second = first + weight * seconds, second + weight * seconds**2
        alone = LAW.setup(3) + LAW.speed * (
            LAW.k3 * np.minimum(counts, counts[0]).sum() + LAW.k4 * counts[0]
        )
        own += weight * (seconds if padded else alone)
    assert time.mean(3) == pytest.approx(first, rel=1e-12)
    assert time.second_moment(3) == pytest.approx(second * (1 + LAW.cv**2), rel=1e-12)
    assert time.own_mean(3) == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize(("padded", "lengths", "prompts"), ALL)
def test_the_arrivals_of_a_batch_have_the_moments_of_its_service_time(
    padded: bool, lengths: TokenDistribution, prompts: TokenDistribution | None
) -> None:
    time, rate, j = BatchTime(LAW, lengths, prompts, padded), 200.0, np.arange(400)
    for size, row in enumerate(time.table(6).arrivals(rate, 400), start=1):
        assert row.sum() == pytest.approx(1, abs=1e-12)
        assert row @ j == pytest.approx(rate * time.mean(size), rel=1e-11)
        assert row @ j**2 == pytest.approx(
            rate * time.mean(size) + rate**2 * time.second_moment(size), rel=1e-11
        )


@pytest.mark.parametrize("cv", [0.0, 0.12])
@pytest.mark.parametrize("padded", [True, False])
def test_the_arrivals_of_a_batch_match_enumeration(padded: bool, cv: float) -> None:
    """Three sequences of one to four tokens: the mixture of Poisson (negative binomial) laws
    over all 64 combinations.
    """
    pmf = np.array([0, 0.1, 0.4, 0.3, 0.2])
    law = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=cv)
    rate, j, expected = 900.0, np.arange(40), np.zeros(40)
    for lengths in np.ndindex(4, 4, 4):
        counts = np.array(lengths) + 1
        mean = rate * (
            law.padded(3, counts.max()) if padded else law.unpadded(3, counts.sum(), counts.max())
        )
        factorials = np.array([math.lgamma(n + 1) for n in j])
        if cv == 0:
            logs = j * math.log(mean) - mean - factorials
        else:
            shape = cv**-2
            rising = np.array([math.lgamma(n + shape) for n in j]) - math.lgamma(shape)
            logs = (
                rising
                - factorials
                + j * math.log(mean / shape)
                - (j + shape) * math.log1p(mean / shape)
            )
        expected += np.prod(pmf[counts]) * np.exp(logs)
    assert BatchTime(law, TokenDistribution(pmf), None, padded).table(3).arrivals(rate, 40)[
        2
    ] == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_uncapped_batching_lies_between_inoues_bounds(load: float) -> None:
    """Inoue (2021), deterministic H = alpha b + tau0: E[W] <= min(phi0, phi1), and is nearly
    that.
    """
    alpha, setup = 0.14, 1.9
    time = BatchTime(LatencyModel(k1=alpha, k2=setup - 1e-9, k4=1e-9), ONE, None, True)
    rate = load / alpha
    psi0 = rate * (alpha + setup) ** 2 / (2 * (1 - (rate * alpha) ** 2))
    psi1 = (rate * alpha * setup + rate * alpha**2 + setup) / (2 * (1 - (rate * alpha) ** 2))
    delay = solve_batch_chain(time, rate, None).queueing_delay
    assert 0.9 * min(psi0, psi1) < delay <= min(psi0, psi1) * (1 + 1e-9)


def test_a_cap_that_is_never_reached_changes_nothing() -> None:
    time = BatchTime(LAW, UNIFORM, None, True)
    assert solve_batch_chain(time, 100.0, 200).queueing_delay == pytest.approx(
        solve_batch_chain(time, 100.0, None).queueing_delay, rel=1e-10
    )


@pytest.mark.parametrize("batch_size", [2, 5, 12])
@pytest.mark.parametrize("load", [0.05, 0.3, 0.85, 0.97])
def test_fixed_batching_with_deterministic_service_matches_the_roots(
    batch_size: int, load: float
) -> None:
    """E[Q] = (b - (b - mu)^2) / (2 (b - mu)) + sum_k 1 / (1 - z_k), lam E[Wq] = E[Q] - mu + (b -
    1) / 2 (THEORY d).
    """
    time = BatchTime(LatencyModel(k2=1.0, k4=1e-9), ONE, None, True)
    rate = load * batch_size / time.mean(batch_size)
    mu = load * batch_size
    roots = []
    for k in range(1, batch_size):
        z = 0j
        for _ in range(400):
            z = np.exp(2j * np.pi * k / batch_size) * np.exp(mu * (z - 1) / batch_size)
        roots.append(1 / (1 - z))
    queue = (batch_size - (batch_size - mu) ** 2) / (2 * (batch_size - mu)) + sum(roots).real
    expected = (queue - mu + (batch_size - 1) / 2) / rate
    assert solve_fixed_batches(time, rate, batch_size).delay.mean == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("cv", [0.0, 0.12, 1.0])
@pytest.mark.parametrize("load", [0.2, 0.8])
def test_fixed_batching_matches_its_lindley_chain(cv: float, load: float) -> None:
    """R' = (R + A - b)^+ iterated to its fixed point, random H."""
    law, b = LatencyModel(k1=0.3, k2=1.4, k3=0.025, k4=0.92, cv=cv), 4
    time = BatchTime(law, LOGNORMAL, None, True)
    rate = load * b / time.mean(b)
    size = 1500 if cv == 1 else 250
    arrivals = time.table(b).arrivals(rate, size)[b - 1]
    spectrum, left = np.fft.rfft(arrivals, 2 * size), np.eye(1, size)[0]
    for _ in range(4000):
        total = np.fft.irfft(np.fft.rfft(left, 2 * size) * spectrum)
        new = np.append(total[: b + 1].sum(), total[b + 1 : b + size])
        if np.abs(new - left).max() < 1e-16:
            break
        left = new
    expected = (left @ np.arange(size) + (b - 1) / 2) / rate
    assert solve_fixed_batches(time, rate, b).delay.mean == pytest.approx(expected, rel=1e-7)


def test_elastic_waits_less_than_padded_and_both_grow_with_the_load() -> None:
    rate = 0.9 * largest_stable_rate(parse_policy("capped:max_batch_size=8"), LOGNORMAL, LAW)
    delays = [
        predict(parse_policy(f"{name}:max_batch_size=8"), rate, LOGNORMAL, LAW).queueing_delay.mean
        for name in ("elastic", "capped")
    ]
    assert delays[0] is not None
    assert delays[1] is not None
    assert delays[0] < delays[1]


def test_an_unstable_queue_says_its_load() -> None:
    policy = parse_policy("capped:max_batch_size=4")
    with pytest.raises(UnstableQueueError) as caught:
        predict(policy, 2 * largest_stable_rate(policy, UNIFORM, LAW), UNIFORM, LAW)
    assert caught.value.load == pytest.approx(2)


@pytest.mark.slow
def test_a_mean_that_does_not_exist_is_not_given() -> None:
    """THEORY c: with cv = 1 and no bound the mean is infinite above load 1/sqrt 2, though the
    queue is stable.
    """
    time = BatchTime(LatencyModel(k1=1.0, k4=1e-9, cv=1.0), ONE, None, True)
    with pytest.raises(NotConvergedError):
        solve_batch_chain(time, 0.85, None)


@pytest.mark.slow
def test_a_mean_that_does_not_exist_is_null_also_where_it_could_be_simulated() -> None:
    answer = predict(parse_policy("dynamic"), 0.85, ONE, LatencyModel(k1=1.0, k4=1e-9, cv=1.0))
    assert answer.method == "simulation"
    assert answer.queueing_delay.mean is None
    assert answer.queueing_delay.p50 is not None
    assert "infinite" in answer.assumptions[-1]


@pytest.mark.parametrize("text", ["fixed:batch_size=4,max_wait=1", "continuous:max_batch_size=4"])
def test_exact_is_refused_where_there_is_no_exact_answer(text: str) -> None:
    with pytest.raises(SpecError, match="expected auto"):
        predict(parse_policy(text), 10.0, UNIFORM, LAW, method="exact")
