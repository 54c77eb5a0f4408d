"""How many requests wait and how many there are, and what they cost in joules."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.latency.energy import EnergyLaw, parse_energy
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Count, Prediction
from kendall.queueing.simulation.counts import count, counts_of
from kendall.queueing.simulation.fast import SimulatedRun
from papers.reproduction.inoue import device

LAW = "k1=0.001,k2=0.01,k3=0.0001,k4=0.005"
EXPONENTIAL = {"latency": "a=0.001", "output_tokens": "geometric:mean=1000"}  # of 1 s, nearly
NAMES = ("queue_length", "number_in_system")


def asked(policy: str, rate: float, **given: object) -> PredictionQuery:
    latency = str(given.pop("latency", LAW))
    lengths = str(given.pop("output_tokens", "geometric:mean=40"))
    return PredictionQuery.read(policy, latency, arrival_rate=rate, output_tokens=lengths, **given)  # type: ignore[arg-type]


def test_the_numbers_of_mm1_are_geometric() -> None:
    """P(L <= n) = 1 - rho^(n + 1), P(Lq <= n) = 1 - rho^(n + 2)."""
    rho = 0.8
    found = asked("single", rho, **EXPONENTIAL).predict()
    for name, beyond in (("number_in_system", 1), ("queue_length", 2)):
        number = getattr(found, name)
        assert number.count.empty == pytest.approx(1 - rho**beyond, abs=2e-3)
        expected = {
            level: math.ceil(math.log(1 - at) / math.log(rho)) - beyond
            for level, at in LEVELS.items()
        }
        assert number.count.quantiles == pytest.approx(expected)
    assert found.number_in_system.mean == pytest.approx(rho / (1 - rho), rel=2e-3)
    assert found.queue_length.mean == pytest.approx(rho**2 / (1 - rho), rel=2e-3)


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("single", 4.0), ("dynamic", 25.0), ("capped:max_batch_size=4", 14.0), ("elastic", 60.0)],
)
def test_formulas_count_as_many_as_a_simulation_sees(policy: str, rate: float) -> None:
    query = asked(policy, rate, output_tokens="uniform:low=1,high=60")
    exact = query.predict()
    runs = [query.simulate(60_000, seed=seed) for seed in range(4)]
    assert exact.method == "exact"
    for name in NAMES:
        number, seen = getattr(exact, name), [getattr(run, name) for run in runs]
        assert_near(number.mean, [each.mean for each in seen])
        assert_near(number.count.empty, [each.count.empty for each in seen], besides=1e-3)
        for level, value in number.count.quantiles.items():
            assert_near(value, [each.count.quantiles[level] for each in seen], besides=1.0)
    assert exact.queue_length.count.quantiles


def assert_near(value: float, samples: list[float], besides: float = 0.0) -> None:
    """Within 4 standard errors of the samples' mean."""
    error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    assert abs(value - float(np.mean(samples))) <= 4 * error + besides


def test_what_is_seen_on_average_is_what_littles_law_says() -> None:
    """Of a queue with patience too, in which those who leave unserved wait as well."""
    for limits in ({}, {"patience": 0.4}):
        query = asked("single", 4.5, **limits)
        found = query.simulate(200_000)
        assert found.queue_length.mean == pytest.approx(4.5 * (found.queueing_delay.mean or 0.0))
        waiting, present = (getattr(found, name).count.quantiles for name in NAMES)
        assert all(waiting[level] <= present[level] for level in LEVELS)
        served = (found.number_in_system.mean or 0.0) - (found.queue_length.mean or 0.0)
        assert served == pytest.approx(found.utilisation, rel=0.02)  # one server, one at a time
        assert found.number_in_system.count.empty == pytest.approx(
            1 - (found.utilisation or 0.0), abs=0.01
        )


def test_a_run_of_two_in_turn_is_counted_by_hand() -> None:
    """Both arrive at 0; one is served to 1, the other to 2: the queue is empty for half the time
    that is seen.
    """
    ends = {"dispatched_at": [0.0, 1.0], "released_at": [1.0, 2.0], "batch_id": [0, 1]}
    run = SimulatedRun(
        np.zeros(2), np.ones(2, np.int64), {name: np.array(of) for name, of in ends.items()}
    )
    model = Queue.read("single", "deterministic:value=1", "a=1")
    assert counts_of([run], model) == {}  # too short to be seen a hundred times
    seen = count(np.array([0, 0, 1, 3]), {"p50": 0.5, "p75": 0.75, "p90": 0.9})
    assert seen == Count(0.5, {"p50": 0.0, "p75": 1.0, "p90": 3.0})


def test_interrupted_requests_are_counted_in_the_system_alone() -> None:
    found = asked("single:order=sprpt", 4.0, predictor="exact").simulate(20_000)
    assert found.number_in_system.count.empty is not None
    assert found.queue_length.count == Count()
    assert found.queue_length.mean is not None


def test_servers_with_a_queue_each_have_all_their_requests_and_no_common_law() -> None:
    alone, three = (
        asked("single", 4.0).predict(),
        asked("single", 12.0, servers=3, routing="random").predict(),
    )
    for name in NAMES:
        assert getattr(three, name).mean == pytest.approx(3 * getattr(alone, name).mean)
        assert getattr(three, name).count == Count()


def test_every_sequence_of_a_call_is_a_request() -> None:
    found = asked("elastic", 5.0, sequences="deterministic:value=3").predict()
    assert found.queue_length.mean == pytest.approx(15 * (found.queueing_delay.mean or 0.0))


def test_nothing_is_counted_where_no_rate_is_known() -> None:
    bare = Prediction(
        policy="single",
        effective_max_batch_size=1,
        model="",
        method="exact",
        stable=True,
        load=0.5,
        utilisation=0.5,
    )
    assert bare.queue_length.as_dict() == dict.fromkeys(("mean", "p_empty", *LEVELS))
    assert (bare.energy_per_request, bare.watts) == (None, None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["inoue-v100", "inoue-p4"])
@pytest.mark.parametrize("load", [0.1, 0.5, 0.85])
def test_a_gpu_of_the_second_document_uses_its_energy(name: str, load: float) -> None:
    """`kendall predict` with the profile alone, against the chain of `kendall reproduce`."""
    of = device(name)
    rate = 1e3 * of.rate(load)  # jobs/s
    lengths = ["--output-tokens", "deterministic:value=1", "--json"]
    asked_of = ["--policy", "dynamic", "--latency", name, "--arrival-rate", str(rate)]
    said = CliRunner().invoke(app, ["predict", *asked_of, *lengths], catch_exceptions=False)
    found = json.loads(said.stdout)
    eta = of.energy.efficiency(of.queue(load).batch_size)
    assert 1 / found["energy_per_request"] == pytest.approx(eta, rel=1e-6)
    assert found["watts"] == pytest.approx(rate / eta, rel=1e-6)


def test_watts_are_those_of_servers_in_and_out_of_service() -> None:
    found = asked("single", 4.0, energy="busy=300,idle=60,per_token=0.5,beta=1").predict()
    used = found.utilisation or 0.0
    joules = 1 + 0.5 * 40 + (300 * used + 60 * (1 - used)) / 4.0
    assert found.energy_per_request == pytest.approx(joules, rel=1e-3)
    assert found.watts == pytest.approx(4.0 * joules, rel=1e-3)
    assert (
        "energy: 1 J a request, 0.5 J a token, 300 W in service, 60 W out of it"
        in found.assumptions
    )


def test_lost_requests_use_no_energy() -> None:
    found = asked("single", 9.0, patience=0.5, energy="beta=2").predict()
    assert found.loss_fraction
    assert found.energy_per_request == pytest.approx(2)
    assert found.watts == pytest.approx(2 * 9.0 * (1 - found.loss_fraction))


@pytest.mark.parametrize(
    ("policy", "energy", "said"),
    [
        ("single", "beta=-1", "got beta=-1 in an energy law; expected joules >= 0"),
        ("single", "busy=nan", "busy=nan"),
        ("single", "c1=2", "got 'c1' in 'c1=2'; expected beta, c0, per_token, busy, idle"),
        ("single", "beta=0", "got an energy law of nothing"),
        ("single", "tiny", "got energy 'tiny', a profile without watts"),
        ("single", "nobody", "got energy 'nobody'; expected joules, as in beta=0.044,c0=0.155"),
        ("single", 5, "got energy=5; expected an energy law or its text"),
        ("continuous:max_batch_size=4", "c0=1", "got energy c0=1 for policy continuous"),
    ],
)
def test_an_energy_that_makes_no_sense_is_refused(policy: str, energy: object, said: str) -> None:
    with pytest.raises(SpecError) as error:
        asked(policy, 1.0, energy=energy)
    assert said in str(error.value)


def test_a_law_is_read_as_it_is_written() -> None:
    law = EnergyLaw(beta=0.044, c0=0.155, idle=30.0)
    assert parse_energy(str(law)) == law
    assert law.assumption == "energy: 0.044 J a request, 0.155 J a batch, 30 W out of it"
