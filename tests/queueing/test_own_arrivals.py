"""What arrivals that are not Poisson cost: the window's own, replayed in its model."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.assumptions.client_assumptions import FEWEST
from queueing.estimation.assumptions.own_arrivals import own_arrivals_mean
from queueing.estimation.window.window import Window
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Record
from queueing.measurement.statistics import WARM_UP
from queueing.model import Model
from tests.queueing.estimation_runs import Engine, Vector, gamma, modulated, poisson, seen, serve
from tests.queueing.test_estimation_verdict import N, capacity, clean, judge

CONSTANT = Model(
    policy=parse_policy("single"),
    output_tokens=parse_distribution("deterministic:value=10"),
    law=LatencyModel(k2=0.01, k4=0.009),
)


def burst(seed: int) -> Vector:
    return modulated((0.2 * capacity(), 0.9 * capacity()), (3.0, 3.0), N, seed)


ARRIVALS: dict[str, Callable[[int], Vector]] = {
    "bursty gaps": lambda seed: gamma(0.6 * capacity(), N, seed, 0.3),
    "two rates": burst,
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_the_windows_own_arrivals_give_the_observed_mean_where_poisson_ones_do_not(
    name: str,
) -> None:
    """The whole deviation is that of the arrivals: over six runs nothing is left of it. One run's
    lengths are its own.
    """
    own, poisson_ones = [], []
    for seed in range(6):
        compared = judge(serve(ARRIVALS[name](seed), Engine(most=8), seed)).compared
        assert compared.reasons == ("poisson_arrivals",)
        assert compared.own_arrivals is not None
        own.append(compared.own_arrivals / compared.observed.value)
        poisson_ones.append(compared.predicted.value / compared.observed.value)
        (says,) = (each.says for each in compared.assumptions if each.name == "poisson_arrivals")
        told = re.search(r"; with these arrivals .* mean queueing delay of (\S+) s", says)
        assert told is not None
        assert float(told[1]) == pytest.approx(compared.own_arrivals, rel=0.01)
        assert compared.to_dict()["own_arrivals"] == compared.own_arrivals
    error = np.std(own, ddof=1) / math.sqrt(len(own))
    assert error < 0.06
    assert abs(np.mean(own) - 1) < 3 * error + 0.01
    assert np.mean(poisson_ones) < 0.8


def test_regular_arrivals_are_cheaper_than_poisson_ones() -> None:
    """The other sign: the price is below the prediction."""
    regular = np.arange(1, N + 1) / (0.8 * capacity("single"))
    compared = judge(serve(regular, Engine(most=1), 1), "single").compared
    assert compared.own_arrivals is not None
    assert compared.own_arrivals < 0.6 * compared.predicted.value
    assert compared.own_arrivals == pytest.approx(compared.observed.value, rel=0.1)


def test_poisson_arrivals_have_no_price() -> None:
    compared = judge(clean(2)).compared
    assert compared.own_arrivals is None
    assert compared.to_dict()["own_arrivals"] is None


def test_one_server_with_equal_services_follows_lindley_to_the_last_digit() -> None:
    instants = gamma(5.0, 2000, 3, 0.4)
    window = dataclasses.replace(_window(instants), arrivals=instants)
    service, waits = 0.01 + 10 * 0.009, [0.0]
    for gap in np.diff(instants):
        waits.append(max(0.0, waits[-1] + service - gap))
    found = own_arrivals_mean(CONSTANT, window, 2000)
    assert found == pytest.approx(np.mean(waits[int(WARM_UP * 2000) :]), rel=1e-9)


def _window(instants: Vector) -> object:
    records: list[Record] = serve(instants, Engine(most=1), 0)
    return seen(records, "single")


def test_few_arrivals_and_calls_of_several_sequences_are_not_replayed() -> None:
    few = dataclasses.replace(_window(poisson(5.0, 200, 1)), arrivals=poisson(5.0, FEWEST - 1, 1))
    assert own_arrivals_mean(CONSTANT, few, 2000) is None
    enough = dataclasses.replace(few, arrivals=poisson(5.0, FEWEST, 1))
    assert own_arrivals_mean(CONSTANT, enough, 2000) is not None
    calls = dataclasses.replace(CONSTANT, sequences=parse_distribution("deterministic:value=2"))
    assert own_arrivals_mean(calls, enough, 2000) is None


def test_of_a_long_window_the_last_arrivals_are_replayed() -> None:
    """Their number is bounded by what a look may cost."""
    instants = np.concatenate([poisson(1.0, 3000, 1), [*range(4000, 4000 + 500)]]).astype(float)
    window = dataclasses.replace(_window(poisson(5.0, 200, 1)), arrivals=instants)
    assert own_arrivals_mean(CONSTANT, window, 500) == 0.0
    assert own_arrivals_mean(CONSTANT, window, 3500) != 0.0


def test_arrivals_are_those_of_the_kernel_in_any_order_of_reading() -> None:
    """A window sorts them, with the sizes of their calls."""
    instants = gamma(5.0, 500, 3, 0.4)
    read, mixed = Window(seconds=math.inf), Window(seconds=math.inf)
    for at in instants:
        read.on_arrival(at)
    for at in instants[::-1]:
        mixed.on_arrival(at)
    now = float(instants[-1])
    windows = [each.snapshot("single", now) for each in (read, mixed)]
    assert windows[0].arrivals.tolist() == windows[1].arrivals.tolist() == instants.tolist()
    means = [own_arrivals_mean(CONSTANT, each, 500) for each in windows]
    assert means[0] == means[1] is not None
