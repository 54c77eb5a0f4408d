"""M/M/1, M/D/1, M/G/1, GI/G/1, M/G/c, tandems and Little's law against textbook values, each
other and simulation.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from scipy.integrate import quad
from scipy.optimize import brentq

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import (
    TokenDistribution,
    Vector,
    parse_distribution,
)
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.measurement.little import little
from kendall.queueing.models.gg1 import kingman
from kendall.queueing.models.mg1 import delay_tail, mean_delay, solve_mg1, solve_service
from kendall.queueing.models.mgc import mmc, solve_mgc, solve_servers
from kendall.queueing.models.mm1 import md1, misprinted_md1_delay, mm1
from kendall.queueing.models.tandem import phases, solve_disaggregated, solve_tandem, tandem_path
from papers.limited_moments import (
    kept_of_lognormal,
    lognormal_limited_moment,
)

ONE = np.ones(1)
CONSTANT, EXPONENTIAL, ERLANG = (
    ServiceTime(ONE, ONE),
    ServiceTime(ONE, ONE, 1.0),
    ServiceTime(ONE, ONE, 0.5**0.5),
)
UNIFORM = ServiceTime(np.arange(1, 41) * 2 / 41, np.full(40, 1 / 40))
LOGNORMAL = ServiceTime.of(
    LatencyModel(k2=0.3, k4=0.05), parse_distribution("lognormal:mu=3,sigma=0.7", 200)
)
TWO = ServiceTime(np.array([0.2, 4.2]), np.array([0.8, 0.2]))
HEAVY = ServiceTime.of(LatencyModel(k4=0.01), parse_distribution("lognormal:mu=4,sigma=1.2", 3000))
LAWS = {
    "constant": CONSTANT,
    "uniform": UNIFORM,
    "erlang": ERLANG,
    "exponential": EXPONENTIAL,
    "lognormal": LOGNORMAL,
    "two": TWO,
    "heavy": HEAVY,
}


@njit(cache=False)
def smallest_work(gaps: Vector, services: Vector, servers: int) -> Vector:
    """Kiefer and Wolfowitz's recursion: what each request waits for one of the servers; with one
    server Lindley's.
    """
    work, waits = np.zeros(servers), np.empty(len(gaps))
    for i in range(len(gaps)):
        least = 0
        for j in range(servers):
            work[j] = max(0.0, work[j] - gaps[i])
            if work[j] < work[least]:
                least = j
        waits[i] = work[least]
        work[least] += services[i]
    return waits


def drawn(service: ServiceTime, rng: np.random.Generator, n: int) -> Vector:
    values = rng.choice(service.values, size=n, p=service.weights)
    return (
        np.asarray(values * rng.gamma(service.cv**-2, service.cv**2, n)) if service.cv else values
    )


def mean_and_error(values: Vector) -> tuple[float, float]:
    blocks = values[: len(values) // 40 * 40].reshape(40, -1).mean(axis=1)
    return float(blocks.mean()), float(blocks.std(ddof=1) / math.sqrt(40))


def assert_meets(
    values: Vector, expected: float | None, *, guard: float = 0.05, slack: float = 0.0
) -> None:
    """Within 4 standard errors, which are at most `guard` of the value; `slack` is a relative
    error that is allowed.
    """
    mean, error = mean_and_error(values)
    assert expected is not None
    assert error < guard * abs(expected)
    assert mean == pytest.approx(expected, abs=4 * error + slack * abs(expected))


# --- M/M/1 and M/D/1


def test_the_serving_chapters_numbers() -> None:
    """E[S] = 0.25 s, 3.2 requests/s: W = 1.25 s, Wq = 1.0 s, p99 of W 5.756 s."""
    queue = mm1(3.2, 0.25)
    assert queue.sojourn.mean == pytest.approx(1.25, rel=1e-12)
    assert queue.delay.mean == pytest.approx(1.0, rel=1e-12)
    assert queue.sojourn.p99 == pytest.approx(5.756, abs=5e-4)


def test_the_printed_m_d_1_delay_is_wrong_by_the_load() -> None:
    """rho^2/(2 mu (1 - rho)) against Pollaczek and Khinchine's exact value."""
    load, right = mean_delay(CONSTANT, 0.8)
    assert md1(0.8, 1.0).mean_delay == pytest.approx(right, rel=1e-12)
    assert misprinted_md1_delay(0.8, 1.0) == pytest.approx(load * right, rel=1e-12)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.8, 0.95])
def test_m_g_1_with_gamma_residual_of_cv_1_is_m_m_1(load: float) -> None:
    general, exact = solve_service(EXPONENTIAL, load), mm1(load, 1.0)
    assert general.delay.mean == pytest.approx(exact.mean_delay, rel=1e-12)
    for ours, theirs in (
        (general.delay.p90, exact.delay.p90),
        (general.delay.p99, exact.delay.p99),
        (general.sojourn.p50, exact.sojourn.p50),
    ):
        assert ours == pytest.approx(theirs, rel=1e-3)
    x = np.array([0.5, 3.0])
    assert delay_tail(EXPONENTIAL, load, x) == pytest.approx(
        [exact.delay_tail(v) for v in x], abs=2e-5
    )


def test_every_delay_exceeds_a_negative_one() -> None:
    assert md1(0.5, 1.0).delay_tail(-1.0) == 1.0
    assert mm1(0.5, 1.0).delay_tail(-1.0) == 1.0


@pytest.mark.thinned(4)
@pytest.mark.parametrize("load", [0.1, 0.5, 0.9, 0.985])
def test_m_d_1_tail_has_the_mean_of_pollaczek_and_khinchine(load: float) -> None:
    """int P(Wq > x) dx, through the direct series, the positive series and the pole."""
    queue, end = md1(load, 1.0), 40 / (1 - load)
    area = sum(
        quad(queue.delay_tail, k, k + 1, epsabs=1e-10, limit=50)[0]
        for k in range(min(math.ceil(end), 60))
    )
    area += quad(queue.delay_tail, 60, end, epsabs=1e-10, limit=200)[0] if end > 60 else 0.0
    assert area == pytest.approx(queue.mean_delay, rel=1e-7)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.95])
def test_m_d_1_tail_is_one_function_whichever_series_gives_it(load: float) -> None:
    """Erlang's alternating series in many digits, from 1e-1 to 1e-25."""
    mp = pytest.importorskip("mpmath").mp
    for x in (0.4, 2.5, 11.3, 40.0):
        with mp.workdps(100):
            rate, y = mp.mpf(load), mp.mpf(x)
            U = sum(
                (-rate * (y - k)) ** k / mp.factorial(k) * mp.exp(rate * (y - k))
                for k in range(math.floor(x) + 1)
            )
            exact = float(1 - (1 - rate) * U)
        assert md1(load, 1.0).delay_tail(x) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("load", [0.2, 0.6, 0.97])
@pytest.mark.parametrize("level", [0.9, 0.99, 0.9999])
def test_a_quantile_is_where_the_tail_is(load: float, level: float) -> None:
    for queue in (mm1(load / 2, 2.0), md1(load / 2, 2.0)):
        x = queue.delay_quantile(level)
        if level > 1 - load:
            assert queue.delay_tail(x) == pytest.approx(1 - level, rel=1e-9)
        else:
            assert x == 0.0


@pytest.mark.parametrize("level", [-0.1, 1.0, 1.5, math.nan])
@pytest.mark.parametrize(
    "ask",
    [
        mm1(0.5, 1.0).delay_quantile,
        mm1(0.5, 1.0).sojourn_quantile,
        md1(0.5, 1.0).delay_quantile,
        mmc(1.5, 1.0, 2).delay_quantile,
    ],
)
def test_a_level_that_is_no_probability_is_refused(
    ask: Callable[[float], float], level: float
) -> None:
    assert ask(0.0) == 0.0
    assert 0 < ask(0.999) < math.inf
    with pytest.raises(SpecError, match=f"got level {level}"):
        ask(level)


def test_a_quantile_is_exactly_zero_where_the_atom_covers_it() -> None:
    """P(Wq = 0) = 1 - rho."""
    for queue in (mm1(0.5, 1.0), md1(0.5, 1.0), mm1(0.05, 1.0)):
        assert queue.delay.p50 == 0.0
    assert mm1(0.05, 1.0).delay.p95 == 0.0
    assert solve_service(UNIFORM, 0.3).delay.p50 == 0.0
    assert solve_servers(UNIFORM, 0.3 * 4, 4).delay.p90 == 0.0


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("name", "load"),
    [
        (name, load)
        for name in ("exponential", "constant")
        for load in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
    ],
)
def test_m_m_1_and_m_d_1_meet_a_simulation(name: str, load: float) -> None:
    rng, n = np.random.default_rng(11), 1_500_000
    waits = smallest_work(rng.exponential(1 / load, n), drawn(LAWS[name], rng, n), 1)[n // 20 :]
    queue = mm1(load, 1.0) if name == "exponential" else md1(load, 1.0)
    assert_meets(waits, queue.mean_delay)
    assert_meets((waits > 0.6).astype(float), queue.delay_tail(0.6))
    assert_meets((waits > queue.delay_quantile(0.99)).astype(float), 0.01, guard=0.2)


# --- M/G/1 and limited moments


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "load"),
    [(name, load) for name in ("uniform", "lognormal", "two", "heavy") for load in (0.2, 0.6, 0.9)],
)
def test_m_g_1_meets_a_simulation(name: str, load: float) -> None:
    """Mean, tail and p90 of the delay, p90 of the sojourn."""
    service, rng, n = LAWS[name], np.random.default_rng(5), 1_500_000
    rate = load / service.mean
    services = drawn(service, rng, n)
    waits = smallest_work(rng.exponential(1 / rate, n), services, 1)[n // 20 :]
    queue, sojourns = solve_service(service, rate), waits + services[n // 20 :]
    assert_meets(waits, queue.delay.mean)
    assert_meets(
        (waits > 2 * service.mean).astype(float),
        float(delay_tail(service, rate, np.array([2 * service.mean]))[0]),
    )
    assert_meets((waits > queue.delay.p90).astype(float), 0.1, slack=1e-3, guard=0.1)
    if name in (
        "lognormal",
        "heavy",
    ):  # services in few steps: their sojourn jumps, and a level says nothing
        assert_meets((sojourns > queue.sojourn.p90).astype(float), 0.1, slack=1e-3, guard=0.1)


@pytest.mark.parametrize("name", ["uniform", "two", "erlang", "heavy"])
def test_pollaczek_and_khinchine_is_the_derivative_of_the_transform(name: str) -> None:
    """E e^{-s Wq} = (1 - rho) s / (s - lam + lam E e^{-s S}); -d/ds at 0 by Richardson's
    differences.
    """
    service = LAWS[name]
    rate = 0.7 / service.mean

    def transform(s: float) -> float:
        own = (
            (1 + s * service.values * service.cv**2) ** -(service.cv**-2)
            if service.cv
            else np.exp(-s * service.values)
        )
        return 0.3 * s / (s - rate + rate * float(service.weights @ own))

    h = 1e-3 / mean_delay(service, rate)[1]
    slopes = [(1 - transform(w)) / w for w in (h, h / 2, h / 4)]
    first = [2 * slopes[1] - slopes[0], 2 * slopes[2] - slopes[1]]
    assert (4 * first[1] - first[0]) / 3 == pytest.approx(mean_delay(service, rate)[1], rel=1e-6)


@pytest.mark.parametrize("cap", [50.0, 300.0, 1600.0])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_limited_moments_are_integrals_of_the_tail(cap: float, k: int) -> None:
    """E[min(N, x)^k] = int_0^x k y^{k-1} P(N > y) dy."""

    def tail(y: float) -> float:
        return 0.5 * math.erfc((math.log(y) - 5.0) / (0.7 * math.sqrt(2))) if y else 1.0

    points = [p for p in (100.0, 1000.0) if p < cap]
    integral = quad(lambda y: k * y ** (k - 1) * tail(y), 0, cap, points=points, epsrel=1e-11)[0]
    assert lognormal_limited_moment(k, cap, 5.0, 0.7) == pytest.approx(integral, rel=1e-9)


def test_without_a_limit_they_are_the_moments() -> None:
    assert lognormal_limited_moment(2, math.inf, 1.0, 0.5) == pytest.approx(math.exp(2 + 0.5))


def test_yang_et_al_figure_4a() -> None:
    """lam = 1/40: 23 s at a limit of 1600 tokens, 58.93 % below the delay at 3000; the product's
    integer counts agree.
    """
    law = LatencyModel(k2=0.7764, k4=0.022032)
    delays = {}
    for cap in (1600, 3000):
        m1, m2 = (lognormal_limited_moment(k, cap, 7.0, 0.7) for k in (1, 2))
        mean, second = law.k4 * m1 + law.k2, law.k4**2 * m2 + 2 * law.k4 * law.k2 * m1 + law.k2**2
        delays[cap] = second / 40 / (2 * (1 - mean / 40))
        rounded = solve_mg1(
            law, parse_distribution("lognormal:mu=7,sigma=0.7", cap), 1 / 40
        ).delay.mean
        assert rounded == pytest.approx(delays[cap], rel=1e-5)
    assert delays[1600] == pytest.approx(23.0, abs=0.01)
    assert 1 - delays[1600] / delays[3000] == pytest.approx(0.5893, abs=2e-4)


def test_the_kept_share_is_its_integral() -> None:
    """E[min(1, x / N)], by quadrature over the normal."""
    expected = quad(
        lambda z: (
            min(1.0, 1300 / math.exp(7 + 0.7 * z)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        ),
        -10,
        10,
        points=[0.2428],
    )[0]
    assert kept_of_lognormal(1300, 7.0, 0.7) == pytest.approx(expected, rel=1e-8)


# --- GI/G/1


def exact_gi_m_1(load: float, arrival_scv: float) -> float:
    """sigma = A*(mu (1 - sigma)), gamma or constant gaps, E[S] = 1: Wq = sigma / (1 - sigma)."""

    def equation(s: float) -> float:
        z = (1 - s) / load
        return (
            math.exp(-z) if arrival_scv == 0 else (1 + arrival_scv * z) ** (-1 / arrival_scv)
        ) - s

    root = brentq(equation, 1e-15, 1 - (1 - load) * 1e-2, xtol=1e-15)
    return float(root / (1 - root))


@pytest.mark.parametrize(
    ("arrival_scv", "load"),
    [(scv, load) for scv in (0.0, 0.25, 4.0) for load in (0.3, 0.6, 0.85, 0.9)],
)
@pytest.mark.thinned(3)
def test_kingmans_bound_holds_and_the_exact_root_meets_a_simulation(
    arrival_scv: float, load: float
) -> None:
    exact, rng, n = exact_gi_m_1(load, arrival_scv), np.random.default_rng(2), 3_000_000
    gaps = (
        rng.gamma(1 / arrival_scv, arrival_scv / load, n) if arrival_scv else np.full(n, 1 / load)
    )
    assert_meets(smallest_work(gaps, rng.exponential(1.0, n), 1)[n // 20 :], exact)
    assert kingman(load, 1.0, arrival_scv, 1.0).upper_bound >= exact


@pytest.mark.parametrize(
    ("arrival_scv", "load", "approximation", "klb"),
    [
        (0.0, 0.3, 403, 6),
        (0.0, 0.6, 56, 0),
        (0.0, 0.85, 12, 0),
        (0.25, 0.3, 121, 10),
        (0.25, 0.6, 29, 5),
        (0.25, 0.95, 2, 0),
        (4.0, 0.3, -42, -55),
        (4.0, 0.6, -19, -30),
        (4.0, 0.85, -6, -12),
        (4.0, 0.95, -2, -4),
    ],
)
def test_the_documented_errors_of_the_approximations(
    arrival_scv: float, load: float, approximation: float, klb: float
) -> None:
    """Per cent. Above 1 the printed Kingman expression is below the truth: no bound."""
    answer, exact = kingman(load, 1.0, arrival_scv, 1.0), exact_gi_m_1(load, arrival_scv)
    assert 100 * (answer.heavy_traffic / exact - 1) == pytest.approx(approximation, abs=0.6)
    assert 100 * (answer.kraemer_langenbach_belz / exact - 1) == pytest.approx(klb, abs=0.6)


def test_for_poisson_arrivals_approximation_and_klb_are_pollaczek_and_khinchine() -> None:
    answer = kingman(0.7, 1.0, 1.0, 2.5)
    assert (
        answer.heavy_traffic
        == answer.kraemer_langenbach_belz
        == pytest.approx(0.7 * 3.5 / (2 * 0.3), rel=1e-12)
    )
    assert kingman(0.7, 1.0, 0.0, 0.0).upper_bound == 0.0  # D/D/1


# --- M/G/c


def test_erlang_c_is_the_sum_of_its_definition() -> None:
    for servers, load in ((1, 0.3), (2, 0.8), (10, 0.8), (40, 0.95)):
        a = servers * load
        terms = [a**k / math.factorial(k) for k in range(servers)]
        top = a**servers / math.factorial(servers) / (1 - load)
        queue = mmc(a, 1.0, servers)
        assert queue.waiting == pytest.approx(top / (sum(terms) + top), rel=1e-12)
        assert queue.mean_delay == pytest.approx(queue.waiting / (servers - a), rel=1e-12)


@pytest.mark.parametrize(
    ("servers", "load"), [(c, load) for c in (2, 5, 10, 32) for load in (0.6, 0.8, 0.9)]
)
@pytest.mark.thinned(3)
def test_m_m_c_meets_a_simulation_and_m_g_c_is_it_for_exponential_service(
    servers: int, load: float
) -> None:
    if servers == 32 and load == 0.6:
        load = 0.7  # at 0.6 nobody waits
    queue, rng, n = mmc(servers * load, 1.0, servers), np.random.default_rng(servers), 2_000_000
    waits = smallest_work(
        rng.exponential(1 / (servers * load), n), rng.exponential(1.0, n), servers
    )[n // 20 :]
    assert_meets(waits, queue.mean_delay, guard=0.1)
    assert_meets((waits > 0).astype(float), queue.waiting)
    general = solve_servers(EXPONENTIAL, servers * load, servers)
    assert general.delay.mean == pytest.approx(queue.mean_delay, rel=1e-4)
    assert general.delay.p99 == pytest.approx(queue.delay_quantile(0.99), rel=5e-3)


@pytest.mark.parametrize(
    ("law", "servers", "load", "reference"),
    [
        ("constant", 2, 0.8, 0.9037),
        ("constant", 2, 0.9, 2.145),
        ("constant", 5, 0.8, 0.2892),
        ("constant", 5, 0.9, 0.776),
        ("constant", 10, 0.8, 0.1099),
        ("constant", 10, 0.9, 0.3442),
        ("erlang", 2, 0.8, 1.3415),
        ("erlang", 2, 0.9, 3.204),
        ("erlang", 5, 0.8, 0.423),
        ("erlang", 5, 0.9, 1.152),
        ("erlang", 10, 0.8, 0.1581),
        ("erlang", 10, 0.9, 0.508),
    ],
)
def test_m_g_c_meets_long_reference_simulations(
    law: str, servers: int, load: float, reference: float
) -> None:
    """4e7 requests each, standard errors 0.1 to 0.5 %: within 2 %."""
    assert solve_servers(LAWS[law], servers * load, servers).delay.mean == pytest.approx(
        reference, rel=0.02
    )


@pytest.mark.parametrize(
    ("law", "servers", "load"),
    [
        (law, c, load)
        for law in ("uniform", "lognormal", "heavy")
        for c in (2, 5)
        for load in (0.5, 0.8, 0.9)
    ],
)
@pytest.mark.thinned(9)
def test_m_g_c_has_its_documented_error(law: str, servers: int, load: float) -> None:
    """Mean within 3.5 %, the tail at p99 within 35 % of its 1 %, p90 of the sojourn within 6 %
    of its 10 %, beyond 4 standard errors.
    """
    service, rng, n = LAWS[law], np.random.default_rng(8), 1_000_000
    rate, services = servers * load / service.mean, drawn(service, rng, n)
    waits = smallest_work(rng.exponential(1 / rate, n), services, servers)[n // 20 :]
    queue = solve_servers(service, rate, servers)
    assert_meets(waits, queue.delay.mean, slack=0.035)
    assert_meets((waits > queue.delay.p99).astype(float), 0.01, slack=0.35, guard=0.25)
    assert_meets(
        (waits + services[n // 20 :] > queue.sojourn.p90).astype(float), 0.1, slack=0.06, guard=0.1
    )


def test_two_far_values_are_where_m_g_c_fails_as_documented() -> None:
    """Short requests behind several long ones at once: ten servers, load 0.8, about 11 % low."""
    rng, n = np.random.default_rng(8), 2_000_000
    waits = smallest_work(rng.exponential(TWO.mean / 8, n), drawn(TWO, rng, n), 10)
    assert solve_servers(TWO, 8 / TWO.mean, 10).delay.mean / waits.mean() - 1 == pytest.approx(
        -0.11, abs=0.05
    )


def test_one_server_is_m_g_1() -> None:
    law, tokens = LatencyModel(k2=0.3, k4=0.05), parse_distribution("lognormal:mu=3,sigma=0.7", 200)
    several, single = solve_mgc(law, tokens, 0.4, 1), solve_mg1(law, tokens, 0.4)
    assert (several.delay, several.sojourn) == (single.delay, single.sojourn)


# --- two phases and tandems

PROMPTS = parse_distribution("uniform:low=10,high=90")
TOKENS = parse_distribution("geometric:mean=20", 200)
PHASED = LatencyModel(k1=0.1, k2=0.2, k4=0.05, kp=0.02)


def test_prefill_then_decode_in_one_server_is_one_m_g_1() -> None:
    """S = setup + kp P + step N: moments of the phases add up to those of solve_mg1's service
    time.
    """
    prefill, decode = phases(PHASED, TOKENS, PROMPTS)
    whole = ServiceTime.of(PHASED, TOKENS, PROMPTS)
    assert whole.mean == pytest.approx(prefill.mean + decode.mean, rel=1e-12)
    second = prefill.second_moment + decode.second_moment + 2 * prefill.mean * decode.mean
    rate = 0.7 / whole.mean
    assert solve_mg1(PHASED, TOKENS, rate, PROMPTS).delay.mean == pytest.approx(
        rate * second / (2 * 0.3), rel=1e-12
    )


def test_two_phases_in_one_server_meet_a_simulation_of_the_phases() -> None:
    rng, n = np.random.default_rng(4), 1_000_000
    prefill, decode = phases(PHASED, TOKENS, PROMPTS)
    rate = 0.7 / (prefill.mean + decode.mean)
    waits = smallest_work(
        rng.exponential(1 / rate, n), drawn(prefill, rng, n) + drawn(decode, rng, n), 1
    )
    assert_meets(waits[n // 20 :], solve_mg1(PHASED, TOKENS, rate, PROMPTS).delay.mean)


def gamma(mean: float, scv: float) -> ServiceTime:
    return ServiceTime(mean * ONE, ONE, scv**0.5)


def scaled(service: ServiceTime, mean: float) -> ServiceTime:
    return ServiceTime(service.values * mean / service.mean, service.weights, service.cv)


EXACT_TANDEMS = [
    (gamma(0.9, 1.0), UNIFORM),
    (gamma(0.5, 1.0), TWO),
    (gamma(0.5, 0.0), CONSTANT),
    (UNIFORM, scaled(UNIFORM, 0.02)),
]
APPROXIMATE_TANDEMS = [
    (scaled(UNIFORM, 0.5), LOGNORMAL, 0.06, 0.03),
    (scaled(UNIFORM, 0.2), UNIFORM, 0.06, 0.03),
    (scaled(LOGNORMAL, 0.5), UNIFORM, 0.06, 0.03),
    (UNIFORM, UNIFORM, 0.51, 0.19),
    (gamma(0.8, 0.2), gamma(1.0, 0.5), 0.51, 0.19),
    (TWO, UNIFORM, 0.63, 0.07),
]


@pytest.mark.parametrize(("first", "second"), EXACT_TANDEMS)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
@pytest.mark.thinned(9)
def test_a_tandem_that_is_exact_meets_a_simulation(
    first: ServiceTime, second: ServiceTime, load: float
) -> None:
    """Burke (two laws of the second station), Friedman (constant services), and a second station
    that is always faster.
    """
    rng, n = np.random.default_rng(6), 2_000_000
    rate = load / max(first.mean, second.mean)
    delays = tandem_path(
        np.cumsum(rng.exponential(1 / rate, n)),
        np.array([drawn(first, rng, n), drawn(second, rng, n)]),
    )
    queue = solve_tandem(first, second, rate)
    assert queue.exact
    assert_meets(delays[0, n // 20 :], queue.first.delay.mean)
    if queue.second_delay:
        assert_meets(delays[1, n // 20 :], queue.second_delay)
    else:
        assert delays[1].max() < 1e-6  # rounding of instants up to 1e7


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "error", "sojourn_error"), APPROXIMATE_TANDEMS)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_a_tandem_that_is_approximate_has_its_documented_error(
    first: ServiceTime, second: ServiceTime, error: float, sojourn_error: float, load: float
) -> None:
    second = scaled(second, 1.0)
    rng, n = np.random.default_rng(6), 1_000_000
    rate = load / max(first.mean, second.mean)
    services = np.array([drawn(first, rng, n), drawn(second, rng, n)])
    delays = tandem_path(np.cumsum(rng.exponential(1 / rate, n)), services)[:, n // 20 :]
    queue = solve_tandem(first, second, rate)
    assert not queue.exact
    assert_meets(delays[1], queue.second_delay, slack=error, guard=0.08)
    assert_meets((delays + services[:, n // 20 :]).sum(axis=0), queue.sojourn, slack=sojourn_error)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 2**31))
def test_the_tandem_recursion_is_the_event_by_event_one(
    requests: int, stations: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrivals, services = (
        np.cumsum(rng.exponential(1.0, requests)),
        rng.exponential(0.8, (stations, requests)),
    )
    instants, expected = arrivals.copy(), np.zeros((stations, requests))
    for j in range(stations):
        free = 0.0
        for i in range(requests):
            start = max(instants[i], free)
            expected[j, i], free = start - instants[i], start + services[j, i]
            instants[i] = free
    assert tandem_path(arrivals, services) == pytest.approx(expected, abs=1e-9)


def test_disaggregation_splits_the_law() -> None:
    prefill, decode = phases(PHASED, TOKENS, PROMPTS)
    rate = 0.5 / max(prefill.mean, decode.mean)
    split = solve_disaggregated(PHASED, TOKENS, rate, PROMPTS)
    assert prefill.mean == pytest.approx(0.3 + 0.02 * PROMPTS.mean)
    assert split.first == solve_service(prefill, rate)
    assert split.loads == pytest.approx((rate * prefill.mean, rate * decode.mean))
    with pytest.raises(SpecError, match="prefill"):
        phases(LatencyModel(k4=1.0), TOKENS)


# --- Little's law


@settings(max_examples=60)
@given(st.integers(1, 50), st.floats(0, 20), st.floats(0.1, 30), st.integers(0, 2**31))
def test_little_is_an_identity_on_every_window(
    requests: int, start: float, length: float, seed: int
) -> None:
    """L from the path of N, lambda and W from the records: nothing is left but the edges,
    wherever the window lies.
    """
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(1.0, requests))
    balance = little(arrived, arrived + rng.exponential(3.0, requests), start, start + length)
    assert balance.residual == pytest.approx(0.0, abs=1e-9)
    assert balance.carried_in >= 0
    assert balance.carried_out >= 0


def test_little_on_a_path_by_hand() -> None:
    """[0, 2), [1, 4), window [1, 3): N is 2, then 1; one came in it and stays 1 s longer; one
    was there for 1 s more.
    """
    balance = little(np.array([0.0, 1.0]), np.array([2.0, 4.0]), 1.0, 3.0)
    assert (balance.number_in_system, balance.arrival_rate, balance.sojourn_time) == (1.5, 0.5, 3.0)
    assert (balance.carried_in, balance.carried_out, balance.residual) == (1.0, 1.0, 0.0)


def test_a_window_has_its_beginning_and_not_its_end_and_a_visit_may_take_no_time() -> None:
    arrived, departed = np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 2.0, 5.0])
    balance = little(arrived, departed, 1.0, 3.0)
    assert (balance.number_in_system, balance.arrival_rate, balance.sojourn_time) == (0.5, 1.0, 0.5)
    assert (balance.carried_in, balance.carried_out, balance.residual) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_littles_law_and_the_sum_to_one_hold_on_a_simulated_queue(load: float) -> None:
    """The gap L - lambda W of a long run is small, L is rho + lam E[Wq], and the server is busy
    for the share rho of the time.
    """
    rng, n = np.random.default_rng(9), 400_000
    arrived, services = np.cumsum(rng.exponential(1 / load, n)), rng.exponential(1.0, n)
    starts = arrived + tandem_path(arrived, services[None])[0]
    end = float(arrived[-1])
    system, server = (
        little(arrived, starts + services, 0.0, end),
        little(starts, starts + services, 0.0, end),
    )
    assert abs(system.gap) < 1e-3 * system.number_in_system
    assert system.number_in_system == pytest.approx(load / (1 - load), rel=0.1)
    idle = 1 - server.number_in_system
    assert idle + load == pytest.approx(1.0, abs=0.01)


def test_records_that_do_not_match_are_refused() -> None:
    with pytest.raises(SpecError):
        little(np.array([1.0]), np.array([0.5]), 0.0, 1.0)
    with pytest.raises(SpecError):
        little(np.array([1.0]), np.array([math.inf]), 0.0, 1.0)
    with pytest.raises(SpecError):
        little(np.array([1.0]), np.array([2.0]), 1.0, 1.0)


# --- bad parameters


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    for solve in (mm1, md1):
        with pytest.raises(SpecError):
            solve(rate, 1.0)
    with pytest.raises(SpecError):
        mmc(rate, 1.0, 2)
    with pytest.raises(SpecError):
        kingman(rate, 1.0, 1.0, 1.0)


def test_other_parameters_that_are_none_are_refused() -> None:
    tokens = TokenDistribution(np.array([0.0, 1.0]))
    bad = [
        lambda: mm1(0.5, 0.0),
        lambda: mmc(0.5, 1.0, 0),
        lambda: solve_mgc(LatencyModel(k4=1.0), tokens, 0.5, 0),
        lambda: kingman(0.5, 1.0, -0.1, 1.0),
        lambda: kingman(0.5, 1.0, 1.0, math.inf),
        lambda: mm1(0.5, 1.0).delay_quantile(1.0),
        lambda: md1(0.5, 1.0).delay_quantile(-0.1),
        lambda: lognormal_limited_moment(0, 10, 1.0, 1.0),
        lambda: lognormal_limited_moment(1, -1, 1.0, 1.0),
        lambda: kept_of_lognormal(10, 1.0, 0.0),
    ]
    for call in bad:
        with pytest.raises(SpecError):
            call()


def test_an_unstable_queue_says_so() -> None:
    for call in (
        lambda: mm1(1.0, 1.0),
        lambda: md1(2.0, 1.0),
        lambda: mmc(4.0, 1.0, 4),
        lambda: solve_tandem(gamma(0.1, 1), CONSTANT, 1.2),
    ):
        with pytest.raises(UnstableQueueError):
            call()


@pytest.mark.parametrize("cv", [0.0, 0.3])
def test_long_prompts_combined_with_long_outputs_keep_the_exact_mean_and_the_quantiles(
    cv: float,
) -> None:
    """100,000 combinations are merged to about 8,000 values, with a residual to 1,000: the moments
    stay exact, the quantiles those of all combinations.
    """
    law = LatencyModel(k1=0.001, k2=0.002, k4=0.001, kp=1e-5, cv=cv)
    outputs, prompts = (
        parse_distribution("lognormal:mu=5,sigma=0.8", 1000),
        parse_distribution("uniform:low=1,high=100"),
    )
    merged = ServiceTime.of(law, outputs, prompts)
    assert len(merged.values) <= (1024 if cv else 8192)
    mean = 0.003 + 0.001 * outputs.mean + 1e-5 * prompts.mean
    variance = 1e-6 * outputs.variance + 1e-10 * prompts.variance
    assert merged.mean == pytest.approx(mean, rel=1e-12)
    assert merged.second_moment == pytest.approx((variance + mean**2) * (1 + cv**2), rel=1e-12)
    if not cv:  # with a residual, all combinations are 40 million values
        seconds = np.add.outer(
            1e-5 * np.arange(1, 101), 0.003 + 0.001 * np.arange(1, outputs.longest + 1)
        ).ravel()
        everything = ServiceTime(
            seconds, np.multiply.outer(prompts.pmf[1:], outputs.pmf[1:]).ravel()
        )
        found, exact = solve_service(merged, 0.7 / mean), solve_service(everything, 0.7 / mean)
        for level in ("p50", "p90", "p99"):
            assert getattr(found.delay, level) == pytest.approx(
                getattr(exact.delay, level), rel=1e-4
            )
            assert getattr(found.sojourn, level) == pytest.approx(
                getattr(exact.sojourn, level), rel=1e-3
            )
