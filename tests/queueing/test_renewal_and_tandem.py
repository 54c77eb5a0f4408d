"""GI/G/1 and disaggregated prefill and decode as `predict` and `simulate` answer them: exact
special cases, the simulator, the command.
"""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from typer.testing import CliRunner

from kendall.api import largest_stable_rate, predict
from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.gg1 import kingman
from kendall.queueing.models.renewal import RenewalFunction, renewal_function, settled
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantiles
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.queueing.simulation.scenarios.tandem import drawn_services

ONE = "deterministic:value=1"
SECOND = "k1=0,k2=0,k3=0,k4=1,cv=1"  # exponential services of mean 1 s
LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=2e-3,kp=1e-4"
OUTPUT, PROMPTS = "geometric:mean=16", "uniform:low=10,high=60"


def mean_of(duration: Quantiles) -> float:
    assert duration.mean is not None
    return duration.mean


def assert_meets(drawn: Quantiles, expected: float, *, slack: float = 0.0) -> None:
    """Within 4 standard errors, which are at most 3 % of the value; `slack` is a relative error
    that is documented.
    """
    assert drawn.standard_error is not None
    assert drawn.standard_error < 0.03 * mean_of(drawn)
    assert expected == pytest.approx(
        mean_of(drawn), abs=4 * drawn.standard_error + slack * mean_of(drawn)
    )


def exact_gi_m_1(rate: float, scv: float) -> float:
    """Mean delay for services of mean 1: sigma / (1 - sigma), sigma = E e^{-(1 - sigma) A}, A
    gamma.
    """

    def rest(sigma: float) -> float:
        s = (1 - sigma) / rate
        return float((np.exp(-s) if scv == 0 else (1 + scv * s) ** (-1 / scv)) - sigma)

    sigma = float(brentq(rest, 0.0, 1 - (1 - rate) * 1e-3))
    return sigma / (1 - sigma)


# GI/G/1


@pytest.mark.parametrize("scv", [0.0, 0.25, 1.0, 4.0])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.thinned(6)
def test_simulated_gaps_give_the_exact_gi_m_1(scv: float, load: float) -> None:
    model = Queue.read("single", ONE, SECOND, arrival_scv=scv)
    simulated = simulate_model(model, load, num_requests=1_000_000, seed=2)
    assert_meets(simulated.queueing_delay, exact_gi_m_1(load, scv))


@pytest.mark.parametrize(
    ("scv", "load", "low", "high"),
    [(0.0, 0.6, 0, 0.01), (0.25, 0.85, 0, 0.025), (4.0, 0.6, -0.2, -0.18), (4.0, 0.95, -0.025, 0)],
)
def test_the_approximation_has_its_documented_error(
    scv: float, load: float, low: float, high: float
) -> None:
    model = Queue.read("single", ONE, SECOND, arrival_scv=scv)
    answer = predict_model(model, load, "approximation")
    assert (
        low - 0.005 <= mean_of(answer.queueing_delay) / exact_gi_m_1(load, scv) - 1 <= high + 0.005
    )


def test_an_scv_of_1_is_m_g_1() -> None:
    plain, given = (
        Queue.read("single", OUTPUT, LAW),
        Queue.read("single", OUTPUT, LAW, arrival_scv=1.0),
    )
    assert predict_model(given, 15.0).as_dict() == predict_model(plain, 15.0).as_dict()
    service = given.batch_time
    two = kingman(15.0, service.mean(1), 1.0, service.second_moment(1) / service.mean(1) ** 2 - 1)
    assert (
        two.heavy_traffic
        == two.kraemer_langenbach_belz
        == pytest.approx(mean_of(predict_model(given, 15.0).queueing_delay))
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scv", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_kingmans_bound_is_above_the_simulated_delay(scv: float, load: float) -> None:
    model = Queue.read("single", OUTPUT, LAW, arrival_scv=scv)
    rate = load * model.largest_stable_rate
    bound = predict_model(model, rate, "bound")
    assert bound.bounds["queueing_delay_upper"] == bound.queueing_delay.mean
    simulated = simulate_model(model, rate, num_requests=200_000).queueing_delay
    assert mean_of(simulated) < mean_of(bound.queueing_delay)


def test_paper_is_the_serving_chapters_formula() -> None:
    model = Queue.read("single", ONE, SECOND, arrival_scv=0.25)
    assert mean_of(predict_model(model, 0.6, "paper").queueing_delay) == pytest.approx(
        0.6 / 0.4 * (0.25 + 1) / 2
    )


def test_regular_arrivals_of_regular_work_never_wait() -> None:
    model = Queue.read("single", ONE, "a=1,c=0", arrival_scv=0.0)
    assert mean_of(predict_model(model, 0.9).queueing_delay) == 0
    assert simulate_model(model, 0.9, num_requests=2000).queueing_delay.p99 == pytest.approx(
        0, abs=1e-9
    )


def test_batches_under_other_arrivals_are_simulated_and_say_so() -> None:
    model = Queue.read("fixed:batch_size=4", ONE, "a=0.1,c=0", arrival_scv=0.0)
    answer = predict_model(model, 2.0)  # three wait for the fourth: 1.5, 1.0, 0.5 and 0 s
    assert answer.method == "simulation"
    assert answer.fallback == (
        "simulation, not exact: no formula covers fixed:batch_size=4 with one server, arrivals "
        "of SCV 0"
    )
    assert mean_of(answer.queueing_delay) == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("scv", [0.0, 0.3, 7.0])
@pytest.mark.parametrize("limits", [{}, {"sequences": "uniform:low=1,high=3"}])
def test_both_simulators_draw_the_same_gaps(scv: float, limits: dict[str, Any]) -> None:
    model = Queue.read("capped:max_batch_size=4", OUTPUT, LAW, arrival_scv=scv, **limits)
    fast, generic = (
        simulate_run(model, 20.0, 300, np.random.SeedSequence(8), generic=kind)
        for kind in (False, True)
    )
    assert np.array_equal(fast.arrived_at, generic.arrived_at)
    assert np.array_equal(fast.released_at, generic.released_at)


# prefill and decode


def tandem(law: str, output: str = OUTPUT, **limits: Any) -> Queue:
    return Queue.read("single", output, law, disaggregated=True, **limits)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_two_exponential_stations_are_two_m_m_1_queues(load: float) -> None:
    """Prefill 0.5 s and decode 1 s, both exponential (Burke)."""
    model = tandem("k1=0,k2=0.5,k3=0,k4=1,cv=1", ONE)
    answer, simulated = (
        predict_model(model, load),
        simulate_model(model, load, num_requests=1_000_000, seed=3),
    )
    assert (answer.method, answer.load, answer.model) == ("exact", load, "M/G/1 -> ./G/1")
    expected = 1 / (2 - load) + 1 / (1 - load)
    assert mean_of(answer.sojourn_time) == pytest.approx(expected, rel=1e-12)
    assert_meets(simulated.sojourn_time, expected)
    for station, drawn, rate in zip(answer.stations, simulated.stations, (2.0, 1.0), strict=True):
        assert mean_of(station.queueing_delay) == pytest.approx(
            load / rate / (rate - load), rel=1e-9
        )
        assert_meets(drawn.queueing_delay, mean_of(station.queueing_delay))
    assert_meets(simulated.queueing_delay, mean_of(answer.queueing_delay))
    first = answer.time_to_first_token.mean
    assert first == pytest.approx(expected)  # of an answer of one token
    assert simulated.time_to_first_token.mean == pytest.approx(
        first, abs=4 * (simulated.time_to_first_token.standard_error or 0)
    )


def test_nobody_waits_behind_a_slower_constant_station() -> None:
    model = tandem("k1=0,k2=1,k3=0,k4=0.01", "uniform:low=1,high=50")
    answer, simulated = predict_model(model, 0.7), simulate_model(model, 0.7, num_requests=100_000)
    assert answer.method == "exact"
    assert answer.stations[1].queueing_delay.mean == 0
    assert mean_of(answer.queueing_delay) == pytest.approx(0.7 / (2 * 0.3))
    assert answer.queueing_delay.p99 == pytest.approx(simulated.queueing_delay.p99, rel=0.05)
    assert simulated.stations[1].queueing_delay.p50 == 0


def test_more_stalls_than_a_law_can_hold_are_simulated() -> None:
    """In the longest of these answers there are some 300: it takes 1,500 s."""
    given = ("lognormal:mu=7,sigma=0.7", "k1=0.001,k2=0.1,k3=0,k4=0.01,stall_share=0.1,stall=0.5")
    answer = predict("single", 0.02, *given, disaggregated=True)
    assert answer.fallback is not None
    assert answer.fallback.startswith(
        "simulation, not approximation: the law of the service time (stalls in the longest batch)"
    )
    bare = largest_stable_rate(
        "single", given[0], "k1=0.001,k2=0.1,k3=0,k4=0.01", disaggregated=True
    )
    assert largest_stable_rate("single", *given, disaggregated=True) == pytest.approx(
        bare, rel=1e-12
    )


@pytest.mark.parametrize(
    "settings", [{}, {"cv": 0.5}, {"cv": 0.2, "stall_share": 0.1, "stall": 0.2}]
)
@pytest.mark.parametrize("load", [0.4, 0.85])
@pytest.mark.thinned(12)
def test_the_approximate_tandem_meets_the_simulator_within_its_documented_error(
    settings: dict[str, float], load: float
) -> None:
    """Prefill at less than half the load of decode: 7 %."""
    law = ",".join([LAW, *(f"{name}={value}" for name, value in settings.items())])
    model = tandem(law, prompt_tokens=PROMPTS)
    rate = load * model.largest_stable_rate
    answer, simulated = (
        predict_model(model, rate, "approximation"),
        simulate_model(model, rate, num_requests=1_000_000, seed=6),
    )
    assert answer.assumptions[-1].startswith("approximation in doubt: the decode delay")
    assert answer.stations[0].load < answer.stations[1].load / 2
    assert_meets(simulated.stations[0].queueing_delay, mean_of(answer.stations[0].queueing_delay))
    assert_meets(
        simulated.stations[1].queueing_delay, mean_of(answer.stations[1].queueing_delay), slack=0.07
    )
    assert_meets(simulated.sojourn_time, mean_of(answer.sojourn_time), slack=0.06)
    for station, drawn in zip(answer.stations, simulated.stations, strict=True):
        assert station.service_time.mean == pytest.approx(drawn.service_time.mean, rel=0.01)
        assert station.load == pytest.approx(drawn.load, rel=0.01)
    assert answer.utilisation == pytest.approx(simulated.utilisation, rel=0.01)


def test_a_tandem_under_other_arrivals_is_simulated() -> None:
    model = tandem("k1=0,k2=0.3,k3=0,k4=1", ONE, arrival_scv=0.0)
    answer: Prediction = predict_model(model, 0.9)
    assert (answer.method, answer.model) == ("simulation", "D/G/1 -> ./G/1")
    assert mean_of(answer.queueing_delay) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arrival_scv": -1.0}, "got arrival_scv=-1.0; expected 0"),
        ({"arrival_scv": float("nan")}, "got arrival_scv=nan; expected 0"),
        ({"arrival_scv": "4"}, "got arrival_scv='4'; expected a number"),
        ({"disaggregated": True, "patience": 1.0}, "got patience for disaggregated"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Queue.read(settings.pop("policy", "single"), OUTPUT, LAW, **settings)


def test_prefill_must_take_time() -> None:
    with pytest.raises(SpecError, match="prefill takes no time"):
        predict_model(tandem("a=0.01,c=0"), 1.0)


# the command


def command(name: str, *arguments: str) -> Any:
    given = ("--policy", "single", "--output-tokens", OUTPUT, "--latency", LAW)
    return CliRunner().invoke(app, [name, *given, *arguments])


@pytest.mark.parametrize("name", ["predict", "simulate"])
def test_the_json_of_a_tandem_has_its_stations(name: str) -> None:
    found = json.loads(
        command(
            name, "--arrival-rate", "12", "--disaggregated", "--prompt-tokens", PROMPTS, "--json"
        ).stdout
    )
    assert [station["name"] for station in found["stations"]] == ["prefill", "decode"]
    assert set(found["stations"][0]) == {"name", "load", "queueing_delay", "service_time"}
    delays = sum(station["queueing_delay"]["mean"] for station in found["stations"])
    assert found["queueing_delay"]["mean"] == pytest.approx(delays)
    assert found["sojourn_time"]["mean"] == pytest.approx(
        delays + sum(station["service_time"]["mean"] for station in found["stations"])
    )
    assert "stations" not in json.loads(command(name, "--arrival-rate", "12", "--json").stdout)


def test_an_unstable_tandem_has_no_delays() -> None:
    found = json.loads(
        command("predict", "--arrival-rate", "40", "--disaggregated", "--json").stdout
    )
    assert (found["stable"], found["queueing_delay"]["mean"], found["load"] > 1) == (
        False,
        None,
        True,
    )


def test_the_command_prints_kingmans_bound() -> None:
    result = command("predict", "--arrival-rate", "12", "--arrival-scv", "4")
    found = json.loads(
        command("predict", "--arrival-rate", "12", "--arrival-scv", "4", "--json").stdout
    )
    assert (
        f"upper bound   {found['bounds']['queueing_delay_upper']:.4g} s for the mean queueing delay"
        in result.stdout
    )
    assert result.stdout.startswith("single  GI/G/1, at most 1 together  (exact)")


def test_stalls_of_a_tandem_lengthen_a_service_by_whole_stalls() -> None:
    law = LatencyModel(k4=0.2, stall_share=0.25, stall=0.05)
    pace, seconds = drawn_services(law, np.full(40_000, 0.2), np.random.default_rng(1))
    assert set(pace) == {1.0}
    stalls = (seconds - 0.75 * 0.2) / 0.05
    assert stalls == pytest.approx(np.rint(stalls), abs=1e-9)
    assert seconds.mean() == pytest.approx(0.2, rel=0.02)


def test_a_settled_renewal_function_falls_on_as_it_fell() -> None:
    """Z decays exponentially: at twice the horizon it is the square."""
    known = RenewalFunction(np.array([0.0, 2.0, 4.0]), np.array([0.2, 0.8, 1.0]), 0.3, 0.25, 1.5)
    later = settled(known, 8.0)
    assert (later.tail, later.instants[-1], later.share[-1]) == (pytest.approx(0.0625), 8.0, 1.0)
    assert settled(dataclasses.replace(known, tail=None), 8.0).tail == 0.0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("load", [0.5, 0.9, 1.2])
@pytest.mark.parametrize("horizon", [0.25, 2.0, 9.0])
def test_the_renewal_function_of_exponential_services_is_known(load: float, horizon: float) -> None:
    """U(x) = (1 - rho e^(-(1 - rho) x)) / (1 - rho), x in mean services, up to its last instant."""
    service = ServiceTime(np.array([1.0]), np.array([1.0]), cv=1.0)
    found = renewal_function(service, load, horizon)
    exact = (1 - load * np.exp(-(1 - load) * found.instants)) / (1 - load)
    assert found.inverse == pytest.approx(1 / exact[-1], rel=1e-8)
    assert found.share == pytest.approx(exact / exact[-1], rel=1e-7)
    assert found.instants[-1] == horizon
