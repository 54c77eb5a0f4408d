"""Properties that every model must have, whatever its parameters: orderings, limits, bounds,
conservation.
"""

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.as_published import elastic_line, padded_line, psi
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.mgb1 import solve_fixed_batches
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.prediction import largest_stable_rate, predict, predict_model
from kendall.queueing.queue import Queue

LENGTHS = (
    "uniform:low=1,high=32",
    "geometric:mean=12",
    "lognormal:mu=2,sigma=1",
    "deterministic:value=9",
    "pareto:alpha=1.5,minimum=3",
)
POLICIES = ("single", "capped:max_batch_size=6", "elastic:max_batch_size=6")
laws = st.builds(
    LatencyModel,
    k1=st.floats(0, 0.02),
    k2=st.floats(0, 0.05),
    k3=st.floats(0, 0.003),
    k4=st.floats(0.001, 0.02),
    cv=st.sampled_from([0.0, 0.1, 0.3]),
)
lengths = st.sampled_from(LENGTHS)


@lru_cache
def tokens(text: str) -> TokenDistribution:
    return parse_distribution(text, 60)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(POLICIES), lengths, laws, st.floats(0.05, 0.7), st.floats(1.05, 1.3))
def test_the_delay_grows_with_the_rate(
    policy: str, text: str, law: LatencyModel, load: float, factor: float
) -> None:
    """For every policy but fixed, whose members wait (b - 1) / (2 lam) for company."""
    queue = Queue.read(policy, tokens(text), law)
    low, high = (
        predict_model(queue, rate * queue.largest_stable_rate) for rate in (load, load * factor)
    )
    assert low.method == high.method == "exact"
    for name in ("mean", "p50", "p90", "p99"):
        first, second = getattr(low.queueing_delay, name), getattr(high.queueing_delay, name)
        # the lattice's width
        slack = 1e-9 if name == "mean" else 2e-3 * (high.queueing_delay.p99 or 0.0)
        assert first is None or second is None or first <= second * (1 + 1e-9) + slack
    assert low.utilisation is not None
    assert high.utilisation is not None
    assert low.utilisation < high.utilisation


def test_fixed_batches_wait_longer_for_company_when_little_arrives() -> None:
    """The forming delay is (b - 1) / (2 lam), and all there is at low rates."""
    law, b = LatencyModel(k2=0.02, k3=0.001, k4=0.004), 8
    for rate in (0.01, 0.1, 1.0):
        delay = predict(
            parse_policy(f"fixed:batch_size={b}"), rate, tokens(LENGTHS[0]), law
        ).queueing_delay.mean
        assert delay == pytest.approx((b - 1) / (2 * rate), rel=1e-3)
        assert delay is not None
        assert delay >= (b - 1) / (2 * rate) * (1 - 1e-12)


UNBOUNDED = LatencyModel(k1=0.002, k2=0.01, k3=0.0004, k4=0.004)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("text", LENGTHS)
def test_a_cap_of_infinity_is_no_cap_and_the_delay_grows_with_the_rate(
    text: str, padded: bool
) -> None:
    time = BatchTime(UNBOUNDED, tokens(text), None, padded)
    delays = []
    for load in (0.1, 0.3, 0.5):
        rate = load * time.largest_stable_rate(None)
        capped, free = solve_batch_chain(time, rate, 200), solve_batch_chain(time, rate, None)
        assert capped.full < 1e-12
        assert capped.queueing_delay == pytest.approx(free.queueing_delay, rel=1e-8)
        assert capped.batch_size == pytest.approx(free.batch_size, rel=1e-8)
        delays.append(free.queueing_delay)
    assert delays == sorted(delays)


@settings(deadline=None, max_examples=15)
@given(lengths, laws, st.booleans(), st.floats(0.05, 0.98))
def test_a_cap_of_one_is_single_is_m_g_1(
    text: str, law: LatencyModel, padded: bool, load: float
) -> None:
    time = BatchTime(law, tokens(text), None, padded)
    rate = load / time.mean(1)
    single = solve_mg1(law, tokens(text), rate)
    assert solve_batch_chain(time, rate, 1).queueing_delay == pytest.approx(
        single.delay.mean, rel=1e-8
    )
    assert solve_fixed_batches(time, rate, 1, quantiles=False).delay.mean == pytest.approx(
        single.delay.mean, rel=1e-8
    )


@settings(deadline=None, max_examples=15)
@given(lengths, laws, st.integers(2, 12), st.floats(0.05, 0.95))
def test_elastic_waits_no_longer_than_padded(
    text: str, law: LatencyModel, cap: int, load: float
) -> None:
    padded, elastic = (BatchTime(law, tokens(text), None, kind) for kind in (True, False))
    rate = load * padded.largest_stable_rate(cap)
    longer, shorter = solve_batch_chain(padded, rate, cap), solve_batch_chain(elastic, rate, cap)
    assert shorter.queueing_delay <= longer.queueing_delay * (1 + 1e-9)
    assert shorter.sojourn_time <= longer.sojourn_time * (1 + 1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 2.0), st.floats(0.0, 20.0), st.floats(0.02, 0.7))
def test_inoues_bound_is_above_the_exact_delay_for_deterministic_batches(
    alpha: float, setup: float, load: float
) -> None:
    assume(load * setup / (alpha * (1 - load)) < 1500)  # mean batch size; the chain is cut at 2048
    time = BatchTime(
        LatencyModel(k2=setup, k3=alpha, k4=1e-12),
        parse_distribution("deterministic:value=1"),
        None,
        True,
    )
    exact = solve_batch_chain(time, load / alpha, None).queueing_delay
    assert exact <= psi(load / alpha, alpha, setup) * (1 + 1e-7)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "text", ["uniform:low=1,high=32", "deterministic:value=9", "geometric:mean=12"]
)
@pytest.mark.parametrize("load", [0.1, 0.4, 0.7])
def test_the_line_above_padded_bounded_batches_bounds_their_delay(text: str, load: float) -> None:
    law = LatencyModel(k1=0.002, k2=0.01, k3=0.0004, k4=0.004)
    queue = Queue.read("dynamic", tokens(text), law)
    rate = load * queue.largest_stable_rate
    answer = predict_model(queue, rate)
    assert answer.queueing_delay.mean is not None
    assert answer.queueing_delay.mean <= answer.bounds["queueing_delay_upper"]
    assert (
        predict_model(queue, rate, "bound").queueing_delay.mean
        == answer.bounds["queueing_delay_upper"]
    )


def test_the_bound_fails_for_random_batches_of_the_same_mean() -> None:
    """THEORY c: exponential H with E[H] = alpha b + tau0 at rho = .1 waits longer than the bound
    (H deterministic there).
    """
    alpha, setup = 1.0, 1.0
    time = BatchTime(
        LatencyModel(k2=setup, k3=alpha, k4=1e-12, cv=1.0),
        parse_distribution("deterministic:value=1"),
        None,
        True,
    )
    assert solve_batch_chain(time, 0.1, 200).queueing_delay > psi(0.1, alpha, setup)
    assert Queue.read("dynamic", tokens(LENGTHS[3]), time.law).engine.law.cv == 1.0


@pytest.mark.slow
def test_the_lines_are_those_of_the_printed_equations() -> None:
    """alpha = k1 + k3 x, beta = k2 + k4 x: x the longest answer, in Eq. 26 the mean for alpha."""
    assert padded_line(1.0, 2.0, 3.0, 4.0, 6.0) == (19.0, 26.0)
    assert elastic_line(1.0, 2.0, 3.0, 4.0, mean=5.0, longest=6.0) == (16.0, 26.0)


@pytest.mark.slow
def test_the_printed_elastic_line_is_no_bound() -> None:
    """Eq. 26 put into Eq. 16 ignores that k3 sum N is random: the exact delay exceeds it at high
    load.
    """
    law = LatencyModel(k1=0.01, k2=0.03, k3=0.0046, k4=0.0184)
    queue = Queue.read("elastic", parse_distribution("uniform:low=0,high=60"), law)
    rate = 0.95 * queue.largest_stable_rate
    exact = predict_model(queue, rate, "exact").queueing_delay.mean
    printed = predict_model(queue, rate, "paper").queueing_delay.mean
    assert exact is not None
    assert printed is not None
    assert exact > printed
    assert predict_model(queue, rate).bounds == {}


@settings(deadline=None)
@given(st.floats(0.01, 10.0), st.floats(0.0, 50.0), st.floats(0.001, 0.999))
def test_the_first_bound_is_the_smaller_one_exactly_up_to_one_over_alpha_plus_setup(
    alpha: float, setup: float, load: float
) -> None:
    """phi0 <= phi1 iff lam <= 1 / (alpha + tau0)."""
    rate = load / alpha
    assume(abs(rate * (alpha + setup) - 1) > 1e-9)
    light = rate * (alpha + setup) ** 2
    heavy = rate * alpha * setup + rate * alpha**2 + setup
    assume(
        abs(light - heavy) > 1e-12 * heavy
    )  # they differ by setup (rate (alpha + setup) - 1): more than rounding errors
    assert (light <= heavy) == (rate <= 1 / (alpha + setup))
    assert psi(rate, alpha, setup) == pytest.approx(
        min(light, heavy) / (2 * (1 - load**2)), rel=1e-9
    )


@settings(deadline=None, max_examples=20)
@given(lengths, laws, st.booleans(), st.integers(2, 20), st.floats(0.05, 0.99))
def test_probabilities_sum_to_one_and_work_is_conserved(
    text: str, law: LatencyModel, padded: bool, cap: int, load: float
) -> None:
    """Sum over the states; drift of Q; a cycle lasts E[b] / lam; Little: the number waiting at
    batch starts against lam E[Wq].
    """
    time = BatchTime(law, tokens(text), None, padded)
    rate = load * time.largest_stable_rate(cap)
    queue = solve_batch_chain(time, rate, cap)
    assert queue.starts.sum() + queue.full == pytest.approx(1, abs=1e-12)
    assert (queue.starts > -1e-13).all()
    assert 0 <= queue.empty <= 1
    assert queue.utilisation == pytest.approx(
        1 - queue.empty / queue.batch_size, rel=1e-7
    )  # idle for p0 / lam of every cycle
    if len(queue.behind):
        first, second, _ = time.moments(cap)
        waiting = (queue.behind @ np.arange(len(queue.behind))) * first[-1]
        weights = np.append(queue.starts, queue.full)
        waiting += rate * float(weights @ second) / 2
        assert queue.queueing_delay == pytest.approx(waiting / queue.batch_size, rel=1e-4)


@settings(deadline=None, max_examples=15)
@given(
    lengths,
    laws,
    st.sampled_from(
        ["capped:max_batch_size=5", "fixed:batch_size=5", "elastic:max_batch_size=5", "single"]
    ),
    st.floats(0.05, 0.95),
)
def test_quantiles_rise_and_the_sojourn_is_longer(
    text: str, law: LatencyModel, policy: str, load: float
) -> None:
    queue = Queue.read(policy, tokens(text), law)
    answer = predict_model(queue, load * queue.largest_stable_rate)
    for law_of in (answer.queueing_delay, answer.sojourn_time):
        values = [
            value for value in (law_of.p50, law_of.p90, law_of.p95, law_of.p99) if value is not None
        ]
        assert values == sorted(values)
        assert law_of.mean is not None
        assert all(value >= 0 for value in values)
    assert answer.sojourn_time.mean is not None
    assert answer.queueing_delay.mean is not None
    assert answer.sojourn_time.mean > answer.queueing_delay.mean


@pytest.mark.parametrize(
    "policy",
    ["single", "capped:max_batch_size=8", "fixed:batch_size=8", "elastic:max_batch_size=8"],
)
def test_a_load_of_999_thousandths_is_solved_or_refused(policy: str) -> None:
    """Heavy traffic: (1 - load) E[Wq] has a finite limit, so ten times nearer is ten times
    longer.
    """
    law = LatencyModel(k1=0.002, k2=0.01, k3=0.0004, k4=0.004)
    queue = Queue.read(policy, tokens(LENGTHS[0]), law)
    delays = [
        predict_model(queue, load * queue.largest_stable_rate, "exact").queueing_delay.mean
        for load in (0.99, 0.999)
    ]
    assert delays[1] / delays[0] == pytest.approx(10, rel=0.06)  # type: ignore[operator]


def test_long_supports_and_wide_caps() -> None:
    """A support of 100,000 counts, and caps up to 512: finite answers in order, none clamped."""
    law = LatencyModel(k1=0.001, k2=0.03, k3=1e-5, k4=0.001)
    wide = parse_distribution("pareto:alpha=1.2,minimum=5", 100_000)
    single = predict(
        parse_policy("single"),
        0.5 * largest_stable_rate(parse_policy("single"), wide, law),
        wide,
        law,
    )
    assert single.queueing_delay.p99 is not None
    delays = []
    for cap in (1, 8, 64, 512):
        queue = Queue.read(f"capped:max_batch_size={cap}", tokens(LENGTHS[2]), law)
        delays.append(predict_model(queue, 10.0).queueing_delay.mean)
    assert all(delay is not None and math.isfinite(delay) for delay in delays)
    assert delays[0] > delays[1] >= delays[2] * (1 - 1e-9)  # type: ignore[operator]
    assert delays[2] == pytest.approx(delays[3], rel=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "dynamic",
        "capped:max_batch_size=4",
        "fixed:batch_size=4",
        "elastic",
        "continuous:max_batch_size=4",
    ],
)
def test_an_unstable_queue_is_an_error_with_its_load(policy: str) -> None:
    law = LatencyModel(k1=0.002, k2=0.01, k3=0.0004, k4=0.004)
    rate = largest_stable_rate(parse_policy(policy), tokens(LENGTHS[0]), law)
    with pytest.raises(UnstableQueueError) as caught:
        predict(parse_policy(policy), 1.0001 * rate, tokens(LENGTHS[0]), law)
    assert caught.value.load == pytest.approx(1.0001, rel=1e-6)


def test_what_the_documents_print_is_a_bound_for_batches_and_khinchine_for_one() -> None:
    lengths, law = (
        parse_distribution("uniform:low=1,high=60"),
        LatencyModel(k1=0.01, k2=0.03, k4=0.02),
    )
    for policy in ("dynamic", "single"):
        queue = Queue.read(policy, lengths, law)
        rate = 0.5 * queue.largest_stable_rate
        printed = predict_model(queue, rate, "paper").queueing_delay.mean
        if policy == "single":
            assert printed == pytest.approx(predict_model(queue, rate).queueing_delay.mean)
        else:
            assert printed == predict_model(queue, rate, "bound").queueing_delay.mean
