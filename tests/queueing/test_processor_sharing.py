"""The fluid model of continuous batching against closed forms and against an event simulation of
the fluid, written here.
"""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from kendall.policies.text import SpecError
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.models.mgc import ExponentialServers
from kendall.queueing.models.slots.processor_sharing import (
    SharedEngine,
    SharedQueue,
    solve_sharing,
    unbounded_states,
)

Vector = npt.NDArray[np.float64]
ENGINE = SharedEngine(per_member=0.2, per_step=0.8, mean_tokens=1.0, slots=4)


@njit(cache=False)
def _fluid(arrived, lengths, per_member, per_step, admission, slots):  # type: ignore[no-untyped-def]
    """Waits and sojourns: all in service gain 1 / t(a) tokens a second, but none while an
    admission lasts.
    """
    count = len(arrived)
    started, ended = np.empty(count), np.empty(count)
    goal, name = np.empty(slots), np.empty(slots, dtype=np.int64)
    active = head = tail = 0
    now = level = blocked = 0.0
    while tail < count or active > 0:
        arrival = arrived[tail] if tail < count else np.inf
        first = 0
        for i in range(1, active):
            if goal[i] < goal[first]:
                first = i
        step = per_member * active + per_step
        end = now + blocked + (goal[first] - level) * step if active > 0 else np.inf
        if arrival < end:
            used = min(blocked, arrival - now) if active > 0 else 0.0
            if active > 0:
                level += (arrival - now - used) / step
            blocked -= used
            now = arrival
            tail += 1
        else:
            now, level, blocked = end, goal[first], 0.0
            ended[name[first]] = now
            active -= 1
            goal[first], name[first] = goal[active], name[active]
        while head < tail and active < slots:
            goal[active], name[active], started[head] = level + lengths[head], head, now
            active += 1
            head += 1
            blocked += admission
    return started - arrived, ended - arrived


def draw(kind: str, rng: np.random.Generator, size: int) -> tuple[Vector, float]:
    """Lengths of mean 1 and their SCV."""
    if kind == "exponential":
        return rng.exponential(1.0, size), 1.0
    if kind == "deterministic":
        return np.ones(size), 0.0
    sigma = float(kind)
    return rng.lognormal(-(sigma**2) / 2, sigma, size), math.expm1(sigma**2)


def simulate(
    engine: SharedEngine, rate: float, kind: str, requests: int = 100_000, runs: int = 8
) -> tuple[Vector, Vector, Vector, float]:
    """Delays and sojourns by run, the lengths of all, and the SCV."""
    delays, sojourns, lengths = [], [], []
    slots = 500 if engine.slots is None else engine.slots
    for stream in np.random.SeedSequence(3).spawn(runs):
        rng = np.random.default_rng(stream)
        tokens, scv = draw(kind, rng, requests)
        arrived = np.cumsum(rng.exponential(1 / rate, requests))
        wait, sojourn = _fluid(
            arrived, tokens, engine.per_member, engine.per_step, engine.admission, slots
        )
        delays.append(wait[requests // 10 :])
        sojourns.append(sojourn[requests // 10 :])
        lengths.append(tokens[requests // 10 :])
    return np.array(delays), np.array(sojourns), np.array(lengths), scv


def mean_and_error(values: Vector) -> tuple[float, float]:
    means = values.mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


EXACT = [(slots, load) for slots in (1, 2, 4, 8, 32) for load in (0.1, 0.5, 0.8, 0.9)]


@pytest.mark.parametrize(("slots", "load"), EXACT)
@pytest.mark.thinned(12)
def test_exponential_lengths_are_exact(slots: int, load: float) -> None:
    """Sojourn, delay, P(Wq > 0), P(Wq > x), seconds per token: within 4 standard errors."""
    engine = replace(ENGINE, slots=slots)
    queue = solve_sharing(engine, load * engine.capacity)
    delays, sojourns, lengths, _ = simulate(
        engine, queue.arrival_rate, "exponential", 400_000 if load > 0.85 else 100_000
    )
    beyond = 1 / (engine.capacity - queue.arrival_rate)
    pairs = [
        (queue.sojourn_time, sojourns),
        (queue.delay.mean or 0.0, delays),
        (queue.waiting, delays > 0),
        (queue.exceeds(beyond), delays > beyond),
        (queue.seconds_per_token, sojourns - delays),
    ]
    for index, (value, values) in enumerate(pairs):
        mean, error = mean_and_error(np.asarray(values, dtype=float))
        assert index or error <= 0.03 * mean
        rare = 4 / values.size  # nobody of so many waited
        assert abs(value - mean) <= 4 * error + rare
    assert lengths.mean() == pytest.approx(1, rel=0.01)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["exponential", "deterministic", "0.7", "1.2"])
def test_without_a_cap_the_law_of_the_lengths_does_not_matter(kind: str, load: float) -> None:
    """E[T], and E[T | N = x] proportional to x: the sojourn over the length has the same mean
    for short and long requests.
    """
    engine = replace(ENGINE, slots=None)
    queue = solve_sharing(engine, load * engine.capacity)
    delays, sojourns, lengths, _ = simulate(engine, queue.arrival_rate, kind)
    assert np.all(delays == 0)
    mean, error = mean_and_error(sojourns)
    assert error <= 0.05 * mean
    assert abs(queue.sojourn_time - mean) <= 4 * error
    for chosen in (lengths < 0.7, lengths > 1.3):
        if chosen.any():
            given_length = np.array(
                [
                    (s[c].mean(), x[c].mean())
                    for s, x, c in zip(sojourns, lengths, chosen, strict=True)
                ]
            )
            ratios = given_length[:, 0] / given_length[:, 1]
            assert abs(queue.seconds_per_token - ratios.mean()) <= 4 * ratios.std(ddof=1) / np.sqrt(
                len(ratios)
            )
            assert queue.sojourn_given(2.0) == 2 * queue.seconds_per_token


# The largest errors that the module states, of delay and sojourn
GENERAL = [
    *(
        ("deterministic", slots, load, 0.09, 0.01)
        for slots in (2, 4, 8)
        for load in (0.6, 0.85)
        if (slots, load) != (8, 0.6)
    ),
    *(("0.7", slots, load, 0.03, 0.012) for slots in (2, 4, 8) for load in (0.6, 0.85)),
    *(("1.2", slots, load, 0.37, 0.07) for slots in (2, 4, 8) for load in (0.6, 0.85)),
]


@pytest.mark.parametrize(("kind", "slots", "load", "delay_error", "sojourn_error"), GENERAL)
@pytest.mark.thinned(4)
def test_two_moments_of_the_lengths_err_as_stated(
    kind: str, slots: int, load: float, delay_error: float, sojourn_error: float
) -> None:
    engine = replace(ENGINE, slots=slots)
    rate = load * engine.capacity
    delays, sojourns, _, scv = simulate(engine, rate, kind, 500_000 if kind == "1.2" else 100_000)
    queue = solve_sharing(engine, rate, scv)
    for value, values, allowed in (
        (queue.delay.mean or 0.0, delays, delay_error),
        (queue.sojourn_time, sojourns, sojourn_error),
    ):
        mean, error = mean_and_error(values)
        assert error <= 0.06 * mean
        assert abs(value - mean) <= allowed * mean + 4 * error
    assert queue.delay.p99 is None
    with pytest.raises(SpecError):
        queue.exceeds(1.0)


@pytest.mark.parametrize("load", [0.6, 0.85])
@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["exponential", "0.7"])
@pytest.mark.thinned(4)
def test_admissions_that_stop_everybody_err_as_stated(kind: str, slots: int, load: float) -> None:
    """5 % of a mean request, up to 14 % of the engine at capacity. Without phi the delay at c =
    8 would be 15 % too long.
    """
    engine = replace(ENGINE, slots=slots, admission=0.05)
    rate = load * engine.capacity
    delays, sojourns, _, scv = simulate(engine, rate, kind)
    queue = solve_sharing(engine, rate, scv)
    for value, values, allowed in (
        (queue.delay.mean or 0.0, delays, 0.08 if slots == 8 else 0.02),
        (queue.sojourn_time, sojourns, 0.01),
    ):
        mean, error = mean_and_error(values)
        assert error <= 0.05 * mean
        assert abs(value - mean) <= allowed * mean + 3 * error


def test_one_slot_is_m_m_1_and_with_two_moments_m_g_1() -> None:
    engine = replace(ENGINE, slots=1)
    queue = solve_sharing(engine, 0.7)
    assert queue.delay.mean == pytest.approx(0.7 / (1 - 0.7))
    assert queue.sojourn_time == pytest.approx(1 / (1 - 0.7))
    assert queue.delay.p90 == pytest.approx(math.log(0.7 / 0.1) / 0.3)
    assert solve_sharing(engine, 0.7, 3.0).delay.mean == pytest.approx(2 * 0.7 / (1 - 0.7))
    constant = replace(engine, admission=0.25)  # S = 0.25 + exponential of mean 1
    assert solve_sharing(constant, 0.5).delay.mean == pytest.approx(
        0.5 * (0.25**2 + 2 * 0.25 + 2) / 2 / (1 - 0.5 * 1.25)
    )


@pytest.mark.parametrize("slots", [1, 3, 50, None])
def test_a_step_that_is_shared_fully_is_processor_sharing(slots: int | None) -> None:
    """k4 = 0: the total rate is constant, E[T] = E[S] / (1 - rho) whatever the cap."""
    queue = solve_sharing(
        SharedEngine(per_member=0.02, per_step=0.0, mean_tokens=40.0, slots=slots), 1.0
    )
    assert queue.load == pytest.approx(0.8)
    assert queue.sojourn_time == pytest.approx(0.8 / (1 - 0.8))
    assert queue.utilisation == pytest.approx(0.8)


@pytest.mark.parametrize("slots", [2, 5, 40])
def test_a_step_that_does_not_grow_is_m_m_c(slots: int) -> None:
    """k3 = 0."""
    engine = SharedEngine(per_member=0.0, per_step=0.5, mean_tokens=2.0, slots=slots)
    queue, exact = solve_sharing(engine, 0.8 * slots), ExponentialServers(0.8 * slots, 1.0, slots)
    assert queue.delay.mean == pytest.approx(exact.mean_delay, rel=1e-12)
    assert queue.waiting == pytest.approx(exact.waiting, rel=1e-12)


def test_no_cap_is_negative_binomial_and_poisson_at_its_limit() -> None:
    """s = k4 / k3 = 4 and rho = 0.6: P(n) = C(n + 4, n) rho^n (1 - rho)^5."""
    engine = replace(ENGINE, slots=None)
    states = unbounded_states(engine, 3.0, 400)
    exact = [math.comb(n + 4, n) * 0.6**n * 0.4**5 for n in range(401)]
    assert np.allclose(states, exact, rtol=1e-11)
    queue = solve_sharing(engine, 3.0)
    assert states @ np.arange(401) == pytest.approx(queue.active, rel=1e-12)
    assert queue.sojourn_time == pytest.approx(1 / 0.4)
    alone = SharedEngine(per_member=0.0, per_step=0.1, mean_tokens=30.0, slots=None)
    assert unbounded_states(alone, 2.0, 20)[6] == pytest.approx(
        math.exp(-6) * 6**6 / math.factorial(6), rel=1e-12
    )
    nearly = replace(alone, per_member=1e-13)
    assert unbounded_states(nearly, 2.0, 20)[6] == pytest.approx(
        math.exp(-6) * 6**6 / math.factorial(6), rel=1e-8
    )


def test_a_wide_cap_tends_to_none() -> None:
    engine, free = replace(ENGINE, slots=3000), replace(ENGINE, slots=None)
    capped, uncapped = solve_sharing(engine, 4.0), solve_sharing(free, 4.0)
    assert capped.sojourn_time == pytest.approx(uncapped.sojourn_time, rel=1e-10)
    assert capped.utilisation == pytest.approx(uncapped.utilisation, rel=1e-10)
    assert capped.waiting < 1e-200


engines = st.builds(
    SharedEngine,
    per_member=st.floats(0, 0.1),
    per_step=st.floats(0.001, 1),
    mean_tokens=st.floats(1, 1000),
    slots=st.integers(1, 300),
)


@given(engines, st.floats(0.01, 0.99))
def test_the_balance_equations_hold(engine: SharedEngine, load: float) -> None:
    """Little's law within the engine, work conservation, and a quantile that inverts the tail."""
    queue: SharedQueue = solve_sharing(engine, load * engine.capacity)
    assert 0 <= queue.waiting <= queue.utilisation * (1 + 1e-12) <= 1 + 2e-12
    assert queue.seconds_per_token >= (engine.per_member + engine.per_step) * (1 - 1e-9)
    assert queue.seconds_per_token <= (
        engine.per_member * (engine.slots or 0) + engine.per_step
    ) * (1 + 1e-9)
    assert queue.delay.p99 is not None
    assert queue.delay.p99 == 0 or queue.exceeds(queue.delay.p99) == pytest.approx(0.01)


def test_what_has_no_answer_says_so() -> None:
    with pytest.raises(UnstableQueueError) as caught:
        solve_sharing(ENGINE, 1.1 * ENGINE.capacity)
    assert caught.value.load == pytest.approx(1.1)
    with pytest.raises(SpecError, match="no cap"):
        solve_sharing(ENGINE, 1.0).sojourn_given(10)
    with pytest.raises(SpecError, match="no cap"):
        unbounded_states(ENGINE, 1.0, 10)
    for wrong in (
        {"slots": 0},
        {"per_step": -1.0},
        {"per_member": 0.0, "per_step": 0.0},
        {"mean_tokens": 0.0},
    ):
        with pytest.raises(SpecError, match="expected"):
            replace(ENGINE, **wrong)
    with pytest.raises(SpecError, match="arrival_rate"):
        solve_sharing(ENGINE, -1.0)
