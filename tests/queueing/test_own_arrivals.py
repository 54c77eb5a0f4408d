"""What arrivals that are not Poisson cost: the model of the requests that came."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from kendall.queueing.estimation.window.window import Window
from tests.queueing.estimation_runs import Engine, Vector, gamma, modulated, serve
from tests.queueing.test_estimation_verdict import N, capacity, clean, judge


def burst(seed: int) -> Vector:
    return modulated((0.2 * capacity(), 0.9 * capacity()), (3.0, 3.0), N, seed)


ARRIVALS: dict[str, Callable[[int], Vector]] = {
    "bursty gaps": lambda seed: gamma(0.6 * capacity(), N, seed, 0.3),
    "two rates": burst,
}


@pytest.mark.slow
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
        assert compared.verdict == "agree"
        assert compared.check is not None
        own.append(compared.check.modelled / compared.observed.value)
        poisson_ones.append(compared.predicted.value / compared.observed.value)
        (says,) = (each.says for each in compared.assumptions if each.name == "poisson_arrivals")
        told = re.search(r"; with these arrivals .* mean queueing delay of (\S+) s", says)
        assert told is not None
        assert float(told[1]) == pytest.approx(compared.check.modelled, rel=0.01)
    error = np.std(own, ddof=1) / math.sqrt(len(own))
    assert error < 0.06
    assert abs(np.mean(own) - 1) < 3 * error + 0.01
    assert np.mean(poisson_ones) < 0.8


def test_regular_arrivals_are_cheaper_than_poisson_ones() -> None:
    """The other sign: the price is below the prediction."""
    regular = np.arange(1, N + 1) / (0.8 * capacity("single"))
    compared = judge(serve(regular, Engine(most=1), 1), "single").compared
    assert compared.check is not None
    assert compared.check.modelled < 0.6 * compared.predicted.value
    assert compared.check.modelled == pytest.approx(compared.observed.value, rel=0.1)


def test_poisson_arrivals_have_no_price() -> None:
    compared = judge(clean(2)).compared
    assert all("with these arrivals" not in each.says for each in compared.assumptions)


def test_a_window_has_arrivals_in_order_whatever_the_order_of_reading() -> None:
    instants = gamma(5.0, 500, 3, 0.4)
    read, mixed = Window(seconds=math.inf), Window(seconds=math.inf)
    for at in instants:
        read.on_arrival(at)
    for at in instants[::-1]:
        mixed.on_arrival(at)
    now = float(instants[-1])
    windows = [each.snapshot("single", now) for each in (read, mixed)]
    assert windows[0].arrivals.tolist() == windows[1].arrivals.tolist() == instants.tolist()
