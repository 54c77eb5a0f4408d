"""GI/G/1 as `predict` answers it: closed forms, Pollaczek and Khinchine, simulation, and servers
that requests are sent to in turn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.gig1 import gamma_points, solve_gig1
from kendall.queueing.models.mg1 import solve_service
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Quantiles
from kendall.queueing.simulation.experiment import simulate_model

ONE = "deterministic:value=1"
EXPONENTIAL = "k1=0,k2=0,k3=0,k4=1,cv=1"  # services of mean 1 s
LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=2e-3,kp=1e-4"
SERVICE = ServiceTime(np.ones(1), np.ones(1), cv=1.0)


def root(load: float, scv: float) -> float:
    """Sigma of GI/M/1 with gamma gaps: sigma = E e^{-(1 - sigma) A}, services of mean 1."""

    def rest(sigma: float) -> float:
        s = (1 - sigma) / load
        return (math.exp(-s) if scv == 0 else (1 + scv * s) ** (-1 / scv)) - sigma

    return float(brentq(rest, 0.0, 1 - (1 - load) * 1e-3, xtol=1e-15, rtol=1e-13))


@pytest.mark.parametrize("scv", [0.0, 0.02, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 100.0])
@pytest.mark.parametrize("load", [0.1, 0.3, 0.6, 0.85, 0.95, 0.99])
@pytest.mark.thinned(12)
def test_exponential_services_wait_as_the_root_says(scv: float, load: float) -> None:
    """D/M/1, E_k/M/1, M/M/1 and GI/M/1: P(Wq > x) = sigma e^{-(1 - sigma) x}, the sojourn is
    exponential.
    """
    found, sigma = solve_gig1(SERVICE, load, scv), root(load, scv)
    mean = found.delay.mean
    assert mean == pytest.approx(sigma / (1 - sigma), rel=2e-6)
    for name, level in LEVELS.items():
        over = sigma / (1 - level)
        if abs(over - 1) > 1e-9:  # else the quantile is that of the atom or just beyond
            expected = math.log(over) / (1 - sigma) if over > 1 else 0.0
            assert getattr(found.delay, name) == pytest.approx(expected, rel=1e-4)
        assert getattr(found.sojourn, name) == pytest.approx(
            -math.log(1 - level) / (1 - sigma), rel=1e-4
        )


@pytest.mark.parametrize(
    ("lengths", "law", "limits"),
    [
        ("lognormal:mu=7,sigma=0.7", "a=0.001,c=0.1", {}),
        ("lognormal:mu=3,sigma=2", "a=0.001,c=0.001", {"max_output_tokens": 4096}),
        ("pareto:alpha=1.5,minimum=10", "a=0.001,c=0.001", {"max_output_tokens": 100_000}),
        ("geometric:mean=16", LAW, {"prompt_tokens": "uniform:low=10,high=600"}),
        ("geometric:mean=16", f"{LAW},stall_share=0.1,stall=0.2", {}),
        ("deterministic:value=64", "a=0.01,c=0", {}),
    ],
)
@pytest.mark.parametrize("load", [0.2, 0.5, 0.9])
@pytest.mark.thinned(9)
def test_exponential_gaps_are_m_g_1(
    lengths: str, law: str, limits: dict[str, object], load: float
) -> None:
    model = Queue.read("single", lengths, law, **limits)  # type: ignore[arg-type]
    service = ServiceTime.of(
        model.engine.law, model.requests.output_tokens, model.requests.prompt_tokens
    )
    rate = load * model.largest_stable_rate
    found, known = solve_gig1(service, rate, 1.0), solve_service(service, rate)
    assert found.delay.mean == pytest.approx(known.delay.mean, rel=2e-6)
    assert found.sojourn.p99 == pytest.approx(known.sojourn.p99, rel=1e-3)
    for name in LEVELS:
        assert getattr(found.delay, name) == pytest.approx(getattr(known.delay, name), rel=2e-3)


CELLS = [
    ("lognormal:mu=3,sigma=0.8", LAW, {}),
    ("uniform:low=1,high=5", "a=1,c=0", {}),  # five lengths: delays of few values under equal gaps
    ("geometric:mean=16", f"{LAW},cv=0.4", {"prompt_tokens": "uniform:low=10,high=60"}),
    ("geometric:mean=16", f"{LAW},stall_share=0.1,stall=0.2", {}),
]


@pytest.mark.parametrize("scv", [0.0, 0.2, 0.5, 4.0])
@pytest.mark.parametrize("load", [0.7, 0.85])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.thinned(32)
def test_any_services_wait_as_simulated(
    cell: tuple[str, str, dict[str, object]], scv: float, load: float
) -> None:
    lengths, law, limits = cell
    model = Queue.read("single", lengths, law, arrival_scv=scv, **limits)  # type: ignore[arg-type]
    rate = load * model.largest_stable_rate
    found = predict_model(model, rate)
    assert found.method == "exact"
    drawn = simulate_model(model, rate, num_requests=150_000, replications=10, seed=11)
    for name in ("queueing_delay", "sojourn_time"):
        exact, simulated = getattr(found, name), getattr(drawn, name)
        assert simulated.standard_error < 0.05 * simulated.mean, "too few requests to tell"
        assert exact.mean == pytest.approx(simulated.mean, abs=4 * simulated.standard_error)
        assert exact.p99 == pytest.approx(simulated.p99, rel=0.08)
    assert found.utilisation == pytest.approx(load)
    first = drawn.time_to_first_token
    assert first.standard_error is not None
    assert found.time_to_first_token.mean == pytest.approx(
        first.mean, abs=4 * first.standard_error + 1e-9
    )


def test_equal_gaps_longer_than_every_service_let_nobody_wait() -> None:
    model = Queue.read("single", "uniform:low=1,high=4", "a=0.25,c=0", arrival_scv=0.0)
    found = predict_model(model, 0.9)
    assert found.method == "exact"
    assert found.queueing_delay == Quantiles(*[0.0] * (1 + len(LEVELS)))
    assert (found.sojourn_time.mean, found.sojourn_time.p99) == (pytest.approx(0.625), 1.0)


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_requests_sent_in_turn_wait_as_behind_erlang_gaps(servers: int) -> None:
    """E_c/M/1, c servers of exponential services: by two moments +14, +9, +5 % too long."""
    model = Queue.read("single", ONE, EXPONENTIAL, servers=servers, routing="round_robin")
    load = 0.3
    found, sigma = predict_model(model, load * servers), root(load, 1 / servers)
    assert found.method == "exact"
    assert found.queueing_delay.mean == pytest.approx(sigma / (1 - sigma), rel=1e-6)
    assert found.model == f"{servers} queues M/G/1"


def test_the_p99_of_two_servers_in_turn() -> None:
    """Geometric lengths of mean 500 at 2 ms a token: nearly E_2/M/1 with a mean service of 1 s,
    whose p99 is 8 s at 1.2222 requests/s and 5 s at 0.8705.
    """
    model = Queue.read(
        "single",
        "geometric:mean=500",
        "k1=0,k2=0,k3=0,k4=0.002",
        servers=2,
        routing="round_robin",
    )
    for rate, seconds in ((1.2222, 8.0), (0.8705, 5.0)):
        p99 = predict_model(model, rate).queueing_delay.p99
        assert p99 == pytest.approx(seconds, rel=2e-3)


def test_arrivals_of_that_name_have_the_same_answer() -> None:
    by_scv = Queue.read("single", "geometric:mean=16", LAW, arrival_scv=4.0)
    by_name = Queue.read(
        "single", "geometric:mean=16", LAW, arrivals="gamma:rate=12,burstiness=0.25"
    )
    assert methods(by_name)[0] == methods(by_scv)[0] == "exact"
    one, other = predict_model(by_name, 12.0), predict_model(by_scv, 12.0)
    assert one.queueing_delay == other.queueing_delay
    assert other.assumptions[0] == (
        "independent gamma gaps between arrivals at a constant rate, squared coefficient of "
        "variation 4"
    )
    regular = Queue.read("single", "geometric:mean=16", LAW, arrivals="deterministic:rate=12")
    assert predict_model(regular, 12.0).method == "exact"


def test_the_two_moments_are_named_as_in_doubt() -> None:
    model = Queue.read("single", ONE, EXPONENTIAL, arrival_scv=4.0)
    found = predict_model(model, 0.3, "approximation")
    assert found.assumptions[-1].startswith("approximation in doubt: two moments of the gaps")


def test_services_of_a_hundred_thousand_mean_ones_are_simulated_and_say_so() -> None:
    limits: dict[str, Any] = {"arrival_scv": 0.5, "max_output_tokens": 1_000_000}
    model = Queue.read("single", "pareto:alpha=1.2,minimum=1", "a=0.001,c=0", **limits)
    rate = 0.5 * model.largest_stable_rate
    found = predict_model(model, rate)
    assert found.method == "simulation"
    assert found.fallback is not None
    assert found.fallback.startswith("simulation, not exact: the delay of GI/G/1 on a lattice")
    with pytest.raises(NotConvergedError, match="GI/G/1 on a lattice"):
        predict_model(model, rate, "exact")


def test_a_load_of_1_is_refused() -> None:
    with pytest.raises(UnstableQueueError):
        solve_gig1(SERVICE, 1.0, 0.5)


@pytest.mark.parametrize("scv", [1e-9, 1e-6, 1e-3, 0.25, 1.0, 7.0])
def test_the_points_of_a_gamma_law_have_its_moments(scv: float) -> None:
    values, weights = gamma_points(scv, 2.0, 0.05, 2000.0)
    assert weights.sum() == pytest.approx(1.0, abs=1e-9)
    assert weights @ values == pytest.approx(2.0, rel=1e-8)
    assert weights @ values**2 == pytest.approx(4.0 * (1 + scv), rel=1e-8)
    assert weights @ values**3 == pytest.approx(8.0 * (1 + scv) * (1 + 2 * scv), rel=1e-7)
