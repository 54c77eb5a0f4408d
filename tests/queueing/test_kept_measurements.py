"""Simulations under a seed, and what is said of given series: every number and word as kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.measurement import arrival_tests
from kendall.queueing.measurement.arrival_audit import (
    Budget,
    above_dead_time,
    audit_arrivals,
    resolution,
)
from kendall.queueing.measurement.batch_means import (
    batch_means,
    batch_means_interval,
    lag_correlation,
    normal,
    replications_interval,
    student,
    variance_of_mean,
)
from kendall.queueing.measurement.delay_variance import (
    AsymptoticVariance,
    mg1_delay_moments,
    single_server_variance,
)
from kendall.queueing.measurement.little import little, mean_number
from kendall.queueing.measurement.mean_interval import (
    mean_interval,
    plug_in,
    run_factor,
    widest_interval,
)
from kendall.queueing.measurement.quantile_interval import quantile_intervals
from kendall.queueing.measurement.statistics import summarise
from kendall.queueing.measurement.warm_up import find_warm_up, warm_up
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import experiment
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.queueing.simulation.run_length import advise_model, describe
from kendall.queueing.simulation.run_limits import affordable_requests
from tests.kept_values import moved

LAW = "k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,cv=0.2"
STALLED = "k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,stall_share=0.1,stall=0.05"
PROMPTED = "k1=1e-3,k2=10e-3,k3=0.1e-3,k4=3e-3,kp=1e-4"
TURNING = "k1=1e-3,k2=0,k3=0.1e-3,k4=3e-3,turnaround=2e-3"
MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "single": ("single", LAW, {}),
    "single with patience": ("single", LAW, {"patience": 0.05}),
    "single that stalls": ("single", STALLED, {}),
    "single on three servers": ("single", LAW, {"servers": 3}),
    "single, regular arrivals": ("single", LAW, {"arrival_scv": 0.25}),
    "dynamic": ("dynamic", LAW, {}),
    "dynamic with prompts": ("dynamic", PROMPTED, {"prompt_tokens": "uniform:low=1,high=9"}),
    "dynamic with patience": ("dynamic", LAW, {"patience": 0.05}),
    "capped": ("capped:max_batch_size=4", LAW, {}),
    "capped on two servers": ("capped:max_batch_size=4", STALLED, {"servers": 2}),
    "elastic": ("elastic:max_batch_size=4", LAW, {}),
    "fixed": ("fixed:batch_size=4", LAW, {}),
    "fixed up to an instant": ("fixed:batch_size=4,max_wait=0.02", LAW, {}),
    "continuous": ("continuous:max_batch_size=4", TURNING, {}),
    "continuous with patience": ("continuous:max_batch_size=4", TURNING, {"patience": 0.02}),
    "calls": ("capped:max_batch_size=4", LAW, {"sequences": "uniform:low=1,high=3"}),
}


def said(calculate: Callable[[], Any]) -> Any:
    try:
        return calculate()
    except (SpecError, ValueError) as error:
        return str(error)


def simulated(name: str, *, generic: bool) -> Any:
    policy, law, limits = MODELS[name]
    model = Queue.read(policy, "uniform:low=1,high=9", law, **({"max_num_seqs": 8} | limits))
    rate = 0.6 * model.largest_stable_rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "simulate_run", partial(simulate_run, generic=generic))
        found = simulate_model(model, rate, num_requests=500, seed=3, replications=2)
    return [found, affordable_requests(model, rate, 10**9)]


@pytest.mark.slow
def test_simulations_are_as_kept() -> None:
    cases = {
        f"{name}{', generic' * generic}": lambda name=name, generic=generic: said(
            lambda: simulated(name, generic=generic)
        )
        for name in MODELS
        for generic in (False, True)
    }
    assert moved("simulations.json", cases) == []


@pytest.mark.slow
def test_advised_lengths_are_as_kept() -> None:
    def advised(name: str, share: float, **about: Any) -> Any:
        policy, law, limits = MODELS[name]
        model = Queue.read(policy, "uniform:low=1,high=9", law, **({"max_num_seqs": 8} | limits))
        found = advise_model(model, share * model.largest_stable_rate, **about)
        return [found, describe(found)]

    cases: dict[str, Callable[[], Any]] = {
        f"{name} at {share} {about}": lambda name=name, share=share, about=about: said(  # type: ignore[misc]
            lambda: advised(name, share, **about)
        )
        for name, share, about in (
            ("single", 0.5, {}),
            ("single", 0.9, {"relative": 0.05}),
            ("single", 0.5, {"quantity": "sojourn_time"}),
            ("single", 0.5, {"confidence": 0.8}),
            ("dynamic", 0.5, {}),
            ("continuous", 0.8, {}),
            ("single", 0.5, {"relative": 0.0}),
            ("single", 0.5, {"relative": 0.26}),
            ("single", 0.5, {"confidence": 1.0}),
        )
    }
    assert moved("advised-lengths.json", cases) == []


def series(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(8)
    white = rng.exponential(size=3000)
    return {
        "independent": white,
        "correlated": np.convolve(white, np.ones(30) / 30, "valid"),
        "settling": white * (1 - 0.9 * np.exp(-np.arange(3000) / 200)),
        "waiting": np.maximum(white - 1.2, 0.0),
        "few": white[:40],
        "three": white[:3],
        "one": white[:1],
        "signed": white - 1,
        "zero": np.zeros(50),
    }[name]


SERIES = (
    "independent",
    "correlated",
    "settling",
    "waiting",
    "few",
    "three",
    "one",
    "signed",
    "zero",
)


def measured(name: str) -> Any:
    values = series(name)
    theory = AsymptoticVariance(3.0, 5.0)
    return {
        "batch means": said(lambda: batch_means_interval(values)),
        "at 80 %": said(lambda: batch_means_interval(values, 0.8)),
        "interval": said(lambda: mean_interval(values)),
        "by theory": said(lambda: mean_interval(values, theory=theory)),
        "widest": said(lambda: widest_interval(values, 0.9)) if len(values) > 1 else None,
        "quantiles": said(
            lambda: {
                str(u): each for u, each in quantile_intervals(values, (0.5, 0.9, 0.99)).items()
            }
        ),
        "summary": said(lambda: summarise(values)),
        "warm-up": said(lambda: find_warm_up(values)),
        "lag": said(lambda: lag_correlation(values)) if len(values) > 1 else None,
        "parts": said(lambda: [variance_of_mean(values, 3), batch_means(values, 3)])
        if len(values) > 2
        else None,
    }


def test_intervals_are_as_kept() -> None:
    cases: dict[str, Callable[[], Any]] = {
        name: lambda name=name: measured(name)  # type: ignore[misc]
        for name in SERIES
    }
    cases |= {
        "factors": lambda: [
            [run_factor(relative, n), plug_in(relative)]
            for relative in (0.05, 0.25, 0.5, 1.0, 3.0)
            for n in (20.0, 100.0, 400.0)
        ],
        "replications": lambda: [
            replications_interval([series("few"), series("correlated")]),
            said(lambda: replications_interval([series("few")])),
        ],
        "levels": lambda: [[student(n, 0.95), normal(0.8)] for n in (1, 4, 30)],
        "warm-up": lambda: [warm_up(n) for n in (0, 1, 9, 100)] + [warm_up(100, 0.5)],
        "moments": lambda: [
            (found := mg1_delay_moments(0.7, [1.0, 1.5, 3.0, 8.0])),
            AsymptoticVariance.of(found),
            AsymptoticVariance.of(dataclasses.replace(found, mean=0.0)),
            AsymptoticVariance(3.0, 5.0).with_rest(series("waiting"), series("independent")),
        ],
        "little": lambda: [
            little(*visits(), 10.0, 900.0),
            mean_number(*visits(), 10.0, 900.0),
        ],
    }
    assert moved("intervals.json", cases) == []


def evenly(number: int) -> Any:
    return np.arange(float(number))


def visits() -> tuple[Any, Any]:
    arrived = np.cumsum(series("independent"))
    return arrived, arrived + 2 * series("independent")[::-1]


def test_the_variance_of_a_single_server_is_as_kept() -> None:
    def found(number: int, gap: float = 1.0) -> Any:
        rng = np.random.default_rng(2)
        arrived: Any = np.cumsum(rng.exponential(gap, number))
        services: Any = rng.gamma(2.0, 0.3, number)
        delays: Any = np.empty(number)
        ends, regular = 0.0, evenly(number)
        for place, (at, service) in enumerate(zip(arrived, services, strict=True)):
            delays[place] = max(ends - at, 0.0)
            ends = at + delays[place] + service
        return [
            single_server_variance(arrived, delays, services),
            single_server_variance(arrived, delays / 2, services),
            single_server_variance(regular, delays, services),
        ]

    cases = {str(n): lambda n=n: found(n) for n in (30, 400, 2000)}
    assert moved("single-server-variance.json", cases) == []


def streams() -> dict[str, Any]:
    rng = np.random.default_rng(9)
    poisson = np.cumsum(rng.exponential(0.1, 2500))
    gamma = np.cumsum(rng.gamma(0.3, 1 / 3, 2500))
    regular = np.arange(2500) / 10
    return {
        "poisson": poisson,
        "bursty": gamma,
        "regular": regular,
        "in whole seconds": np.sort(np.floor(poisson)),
        "in milliseconds": np.round(poisson, 3),
        "repeated": np.cumsum(np.tile(np.diff(poisson[:101]), 20)),
        "with pauses": np.cumsum(
            np.where(np.arange(2500) % 500 == 0, 9.0, np.diff(poisson, prepend=0))
        ),
        "dead time": np.cumsum(np.diff(poisson, prepend=0.0) + 0.03),
        "growing": np.sort(300 * np.sqrt(rng.random(2500))),
        "trimmed": np.sort(250 * rng.random(2500)),
        "few": poisson[:50],
        "two": poisson[:2],
        "none": poisson[:0],
    }


def test_audits_are_as_kept() -> None:
    found = streams()
    cases: dict[str, Callable[[], Any]] = {}
    for name, instants in found.items():
        for title, about in (
            ("", {}),
            (" at 10/s", {"asked_rate": 10.0}),
            (" at 12/s", {"asked_rate": 12.0, "significance": 0.001}),
            (" as gamma", {"process": "gamma"}),
            (" beside its timetable", {"intended": instants - 0.0004}),
            (" late", {"intended": instants - 0.004, "budget": Budget(mean=0.003, p99=0.005)}),
        )[: 6 if name in ("poisson", "bursty", "few", "two", "none") else 2]:
            cases[name + title] = lambda instants=instants, about=about: said(  # type: ignore[misc]
                lambda: audit_arrivals(instants, **about)
            )
    cases["lengths"] = lambda: said(lambda: audit_arrivals(evenly(3), intended=evenly(3)[1:]))
    cases["not finite"] = lambda: said(lambda: audit_arrivals(np.array([0.0, np.nan, np.inf])))
    assert moved("audits.json", cases) == []


def test_statistics_of_arrivals_are_as_kept() -> None:
    found = {name: each for name, each in streams().items() if len(each) > 2}

    def of(instants: Any) -> Any:
        gaps = np.diff(instants)
        return [
            arrival_tests.constant_rate(instants),
            arrival_tests.gap_law(gaps),
            arrival_tests.gap_law(gaps, 0.1),
            arrival_tests.gap_spacings(gaps),
            arrival_tests.rank_correlations(gaps, 3),
            arrival_tests.correlation(gaps, 2),
            arrival_tests.dispersion(instants, 5.0),
            arrival_tests.longest_gap(gaps),
            arrival_tests.phase(instants, 1.0),
            arrival_tests.repeated_gaps(gaps, 1e-3),
            arrival_tests.pairs_within(gaps, 1e-4),
            resolution(instants),
            above_dead_time(gaps),
        ]

    cases: dict[str, Callable[[], Any]] = {
        name: lambda instants=instants: said(lambda: of(instants))  # type: ignore[misc]
        for name, instants in found.items()
    }
    cases["rates"] = lambda: [
        arrival_tests.rate(100, 9.0, 10.0),
        arrival_tests.rate(100, 12.0, 10.0),
        arrival_tests.rate_interval(100, 9.0),
        arrival_tests.rate_interval(4, 9.0, 0.8),
        arrival_tests.too_exact([(100, 10.0), (200, 20.01)], 10.0),
        arrival_tests.too_exact([(100, 11.0)], 10.0),
    ]
    assert moved("arrival-statistics.json", cases) == []
