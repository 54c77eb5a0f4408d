"""Searches: the bracket closes around where probes turn from passing to failing."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from loadgen.gateway_process import free_port
from loadgen.sweep.saturation import bisect, predicted_rate, probe_requests
from loadgen.sweep.slo import parse_slo
from policies import parse_policy
from queueing.distributions import parse_distribution
from queueing.latency import parse_law
from queueing.model import Model
from queueing.prediction import predict_model
from tests.loadgen.sweeping import LAW, events, finish, start


def model(policy: str) -> Model:
    return Model.clipped(parse_policy(policy), parse_distribution("uniform:low=2,high=10"), parse_law(LAW), max_num_seqs=16)


@pytest.mark.parametrize("true", [1.0, 0.93, 1.08, 0.31, 3.7])
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_the_bracket_holds_the_true_rate_and_is_narrow(true: float, tolerance: float) -> None:
    """Also where the prediction, 1, is far off."""
    probed = []

    async def passes(rate: float) -> bool:
        probed.append(rate)
        return rate <= true

    found = asyncio.run(bisect(passes, 1.0, tolerance))
    assert found.low <= true < found.high
    assert found.within(tolerance)
    assert found.probes == len(probed) == len(set(probed))
    if 0.92 < true < 1.09:
        assert found.probes <= 5


def test_a_search_that_never_fails_or_never_passes_ends() -> None:
    async def always(rate: float) -> bool:
        return True

    async def never(rate: float) -> bool:
        return False

    assert asyncio.run(bisect(always, 1.0, 0.05, most=6)).high == math.inf
    assert asyncio.run(bisect(never, 1.0, 0.05, most=6)).low == 0.0


def test_the_predicted_rate_is_where_the_prediction_meets_the_bound() -> None:
    single = model("single")
    slo = parse_slo("mean_queueing_delay=30ms")
    rate = predicted_rate(single, slo)
    assert rate is not None
    assert predict_model(single, rate).queueing_delay.mean == pytest.approx(0.03, rel=1e-3)
    assert predicted_rate(single, None) == single.largest_stable_rate
    assert predicted_rate(model("continuous:max_batch_size=4"), parse_slo("p99_sojourn_time=1s")) is None


def test_narrow_tolerances_take_longer_probes() -> None:
    assert probe_requests(model("single"), 1.0, 0.02) > 2 * probe_requests(model("single"), 1.0, 0.05) >= 600
    assert probe_requests(model("single"), 500.0, 0.05) == 7500, "and no less than fifteen seconds"


@pytest.mark.slow
def test_a_saturation_search_on_the_emulated_engine_brackets_the_laws_largest_stable_rate(tmp_path: Path) -> None:
    """Steps of ten milliseconds: the machine's own noise is small beside them."""
    law = "k1=0.0003,k2=0.001,k3=0.00002,k4=0.01"
    common = ("--engine", "emulated", "--latency", law, "--output-tokens", "deterministic:value=6", "--bracket", "1", "--json")
    goal = ("capped:max_batch_size=4", "--find-saturation", "--tolerance", "0.1", "--duration", "8", "--port", str(free_port(0)))
    result = finish(start(tmp_path / "sweep", *goal, *common, own=False))
    (search,) = result["searches"]
    assert search["low"] * 0.95 < search["predicted_at_speed"] < search["high"] * 1.05, search
    assert search["high"] / search["low"] <= 1.1
    assert search["predicted"] / search["predicted_at_speed"] == pytest.approx(search["speed"], rel=1e-6)
    assert len(events(tmp_path / "sweep", "done")) == search["probes"]


@pytest.mark.slow
def test_an_slo_search_keeps_the_objective_at_its_lower_end(tmp_path: Path) -> None:
    arguments = ("single", "--slo", "p90_queueing_delay=60ms", "--tolerance", "0.3", "--num-prompts", "400")
    result = finish(start(tmp_path / "sweep", *arguments))
    (search,) = result["searches"]
    assert 0 < search["low"] < search["high"] <= 1.3 * search["low"]
    assert search["predicted"] == pytest.approx(predicted_rate(model("single"), parse_slo("p90_queueing_delay=60ms")))
