"""What windows of several diseases are estimated at, compared with and advised: every number and
word as kept.

Which of them are right, the other tests of the estimates say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import parse_objective
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.histogram import beside, drawn
from kendall.queueing.estimation.speed.speed_change import speed_change
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.window.window import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from tests.kept_values import moved
from tests.queueing.advised import advise, what_ifs
from tests.queueing.estimation_runs import LAW, Engine, gamma, modulated, poisson, seen, serve

POLICY = "capped:max_batch_size=8"
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))


def window(
    arrivals: Any, seed: int = 3, policy: str = POLICY, **about: Any
) -> Callable[[], Snapshot]:
    again = about.pop("again", None)
    return lambda: seen(
        serve(arrivals, Engine(most=8, **about), seed, again=again, most=1500), policy
    )


WINDOWS: Mapping[str, Callable[[], Snapshot]] = {
    "clean": window(poisson(60.0, 1500, 1)),
    "few": window(poisson(60.0, 70, 1)),
    "bursty": window(gamma(60.0, 1500, 1, 0.3)),
    "modulated": window(modulated((20.0, 110.0), (3.0, 3.0), 1500, 1)),
    "stalls": window(poisson(60.0, 1500, 1), stall=lambda batch: 0.4 if batch % 90 == 7 else 0.0),
    "wander": window(
        poisson(60.0, 1500, 1), speed=lambda at: 1 + 0.25 * math.sin(2 * math.pi * at / 6)
    ),
    "step": window(poisson(60.0, 1500, 1), speed=lambda at: 1.0 if at < 15 else 1.4),
    "closed loop": window(np.zeros(6), again=lambda end, rng: float(end + rng.exponential(0.05))),
    "overload": window(poisson(260.0, 1500, 1)),
}


@cache
def assessed(name: str) -> Assessment:
    return assess(WINDOWS[name](), LAW, LIMITS)


def numbers(name: str) -> list[Any]:
    found = assessed(name)
    comparison: dict[str, Any] = json_object(found.compared.summary())
    for judgement in comparison["assumptions"].values():
        del judgement["applies"]
    return [
        json_object(found.estimates.saved()),
        json_object(found.estimates.summary()),
        found.load,
        found.prediction,
        comparison,
        found.compared.assumptions,
    ]


@pytest.mark.parametrize("name", WINDOWS)
def test_assessments_are_as_kept(name: str) -> None:
    assert moved(f"assessed-{name.replace(' ', '-')}.json", {name: lambda: numbers(name)}) == []


def test_speeds_are_as_kept() -> None:
    def speeds(name: str) -> list[Any]:
        found = Speeds.of(parse_policy(POLICY), WINDOWS[name](), LAW)
        return [
            found.stalls,
            found.step,
            found.recent.count,
            found.without_stalls.count,
            found.slow,
            speed_change(found.steady),
        ]

    assert moved("speeds.json", {name: lambda name=name: speeds(name) for name in WINDOWS}) == []  # type: ignore[misc]


def test_histograms_are_as_kept() -> None:
    def histogram(*, sojourn: bool) -> Any:
        observed, model = WINDOWS["clean"](), assessed("clean").model
        assert model is not None
        values = observed.judged(sojourn=sojourn)
        return beside(values, drawn(model, 40.0, sojourn=sojourn))

    assert (
        moved(
            "histograms.json",
            {
                "delay": lambda: histogram(sojourn=False),
                "sojourn": lambda: histogram(sojourn=True),
                "few": lambda: [beside(np.arange(float(n)), np.ones(1)) for n in (19, 20)],
            },
        )
        == []
    )


@pytest.mark.parametrize("name", ["clean", "overload"])
def test_what_ifs_are_as_kept(name: str) -> None:
    def forecasts() -> list[Any]:
        found = what_ifs(assessed(name).estimates, LAW, Setting(policy=POLICY), LIMITS, beside=True)
        return [json_object(each) for each in found]

    assert moved(f"what-ifs-{name}.json", {name: forecasts}) == []


@pytest.mark.parametrize(
    "objective",
    [
        "objective=delay",
        "slo=p99_queueing_delay=0.3s",
        "objective=v1 theta=0.999",
        "objective=throughput",
    ],
)
@pytest.mark.parametrize("target", ["policy", "batch-size", "max-output-tokens", "servers"])
def test_advice_is_as_kept(objective: str, target: str) -> None:
    given = dict(part.partition("=")[::2] for part in objective.split())

    def advice() -> Any:
        estimates = assessed("clean").estimates
        try:
            (found,) = advise(
                estimates,
                LAW,
                Setting(policy=POLICY),
                LIMITS,
                parse_objective(given),
                targets=[target],
            )
        except SpecError as error:
            return str(error)
        return json_object(found)

    name = f"advice-{given.get('objective', 'slo')}-{target}.json"
    assert moved(name, {target: advice}) == []
