"""Each bound of an objective at its border: what keeps it, what breaks it, and what is said of
that.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.choosing.forecast import Forecast, Setting
from kendall.queueing.choosing.gain.criterion import Criterion, forbidden, parse_objective
from kendall.queueing.choosing.objective import Objective, Slo, parse_slo
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.interval import UNKNOWN
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantiles
from tests.queueing.made import prediction_of

DELAYS = Quantiles(mean=1.0, p50=0.8, p90=1.8, p95=2.2, p99=3.0)


def predicted(delays: Quantiles = DELAYS, *, stable: bool = True) -> Prediction:
    return prediction_of(
        policy="single",
        effective_max_batch_size=1,
        model="M/G/1",
        stable=stable,
        utilisation=0.5,
        queueing_delay=delays,
        sojourn_time=Quantiles(mean=2.0),
    )


def forecast(cut: float | None = 0.05, prediction: Prediction | None = None) -> Forecast:
    return Forecast(
        setting=Setting(policy="single", max_output_tokens=96),
        load=0.5,
        prediction=prediction or predicted(),
        mean=UNKNOWN,
        clipped_fraction=cut,
    )


@pytest.mark.parametrize(
    ("metric", "value"), [("mean", 1.0), ("p50", 0.8), ("p90", 1.8), ("p95", 2.2), ("p99", 3.0)]
)
def test_an_slo_is_kept_up_to_its_bound_of_its_own_metric(metric: str, value: float) -> None:
    for seconds, kept in ((value - 0.01, False), (value, True), (value + 0.01, True)):
        slo = Slo(metric, "queueing_delay", seconds)
        assert slo.value(predicted()) == value
        assert slo.kept(predicted()) == kept
        objective = parse_objective({"slo": f"{metric}_queueing_delay={seconds}s"})
        against = forbidden(objective, forecast(), limits_tokens=True)
        assert against == (
            None
            if kept
            else f"breaks the SLO {metric}_queueing_delay={seconds:g} (predicted {value:.3g} s)"
        )


def test_an_slo_on_a_quantile_that_is_missing_is_broken_only_by_a_mean_beyond_it() -> None:
    lacking = predicted(Quantiles(mean=1.0))
    assert not parse_slo("p99_queueing_delay=0.99s").kept(lacking)
    with pytest.raises(SpecError, match=r"p99_queueing_delay=1\.01, which exact does not give"):
        parse_slo("p99_queueing_delay=1.01s").kept(lacking)
    with pytest.raises(SpecError, match="p50_queueing_delay"):
        parse_slo("p50_queueing_delay=0.5s").kept(lacking)  # a median may lie below the mean
    with pytest.raises(SpecError, match="which exact does not give"):
        parse_slo("p99_queueing_delay=1s").kept(lacking)  # the mean is within it
    objective = parse_objective({"slo": "p99_queueing_delay=2s"})
    found = forecast(prediction=lacking)
    assert forbidden(objective, found, limits_tokens=False, simulated=[2.0]) is None
    assert "(predicted 2.01 s)" in (
        forbidden(objective, found, limits_tokens=False, simulated=[2.01]) or ""
    )
    assert forbidden(objective, found, limits_tokens=False) is None


@pytest.mark.parametrize(
    ("cut", "allowed"), [(0.0, True), (0.05, True), (0.0501, False), (None, True)]
)
def test_a_token_limit_may_cut_up_to_the_allowed_share(cut: float | None, allowed: bool) -> None:
    for name in ("delay", "throughput", "clipped", "slo"):
        objective = Objective(
            name=name, slo=parse_slo("p99_queueing_delay=9s") if name == "slo" else None
        )
        against = forbidden(objective, forecast(cut), limits_tokens=True)
        assert against == (None if allowed else "cuts 5.0% of the answers, more than 5.0%")
        assert forbidden(objective, forecast(cut), limits_tokens=False) is None, (
            "it is not what is chosen"
        )
    for name in ("v1", "v2"):
        assert forbidden(Objective(name=name), forecast(cut), limits_tokens=True) is None, (
            "it weighs what is cut"
        )


def test_what_has_no_steady_state_is_forbidden_whatever_it_keeps() -> None:
    for found in (
        forecast(prediction=predicted(stable=False)),
        Forecast(
            setting=Setting(policy="single"),
            load=1.25,
            prediction=None,
            mean=UNKNOWN,
            clipped_fraction=0.0,
        ),
    ):
        assert not found.stable
        assert "has no steady state" in (
            forbidden(Objective(name="delay"), found, limits_tokens=False) or ""
        )


@pytest.mark.parametrize(
    ("name", "score"),
    [
        # theta u - (1 - theta) w, and - l pi for v2; smaller is better, so negated
        ("v1", -(0.25 * 0.8 - 0.75 * 2.0)),
        ("v2", -(0.25 * 0.8 - 0.75 * 2.0 - 3.0 * 0.1)),
    ],
)
def test_an_objective_weighs_utility_delay_and_loss(name: str, score: float) -> None:
    objective = Objective(name=name, theta=0.25, loss_cost=3.0)
    assert objective.utility_score(0.8, 2.0, 0.1) == pytest.approx(score)
    assert objective.utility_score(0.9, 2.0, 0.1) < score < objective.utility_score(0.8, 2.1, 0.1)
    printed = Objective(name="v2", theta=0.25, loss_cost=3.0, sign=1)
    assert printed.utility_score(0.8, 2.0, 0.1) == pytest.approx(
        -(0.25 * 0.8 + 0.75 * 2.0 - 3.0 * 0.1)
    )
    assert Objective(name="v1", theta=0.25, sign=1).utility_score(0.8, 2.0, 0.1) == pytest.approx(
        -(0.25 * 0.8 - 0.75 * 2.0)
    )


def test_an_objective_weighs_as_the_command_says_unless_it_is_told() -> None:
    assert Objective(name="v2") == Objective(
        name="v2", theta=0.5, loss_cost=1.0, max_clipped_fraction=0.05, sign=-1
    )


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("theta", (0.0, 1.0), (-0.001, 1.001)),
        ("max_clipped_fraction", (0.0, 0.999), (-0.001, 1.0)),
        ("loss_cost", (0.0, 1e9), (-0.001, float("inf"))),
    ],
)
def test_a_parameter_of_an_objective_has_its_range(
    field: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    for value in inside:
        assert getattr(Objective(name="v2", **{field: value}), field) == value  # type: ignore[arg-type]
    for value in outside:
        with pytest.raises(SpecError, match=field):
            Objective(name="v2", **{field: value})  # type: ignore[arg-type]


LENGTHS = TokenDistribution(np.array([0.0, 0.25, 0.25, 0.25, 0.25]))
MODEL = Queue.read("single", LENGTHS.clip(2), LatencyModel(k4=0.5))
V1, V2 = Objective(name="v1", theta=0.25), Objective(name="v2", theta=0.25, loss_cost=3.0)
P99, SOJOURN = parse_slo("p99_queueing_delay=9s"), parse_slo("mean_sojourn_time=9s")


@pytest.mark.parametrize(
    ("measure", "value", "name", "pole", "stable", "seconds", "compared"),
    [
        (Criterion(), 0.9, "mean queueing delay", True, True, True, "queueing_delay"),
        # of those who are lost, a tenth, the wait alone: 1 s + 0.9 times what follows it
        (
            Criterion(quantity="sojourn_time"),
            1.99,
            "mean sojourn time",
            True,
            True,
            True,
            "sojourn_time",
        ),
        (
            Criterion(Objective(name="delay")),
            1.0,
            "mean queueing delay",
            True,
            True,
            True,
            "queueing_delay",
        ),
        (
            Criterion(Objective(name="clipped"), "sojourn_time"),
            1.99,
            "mean sojourn time",
            True,
            True,
            True,
            "sojourn_time",
        ),
        (
            Criterion(Objective(name="slo", slo=P99)),
            3.0,
            "p99 of the queueing delay",
            True,
            True,
            True,
            "queueing_delay",
        ),
        (
            Criterion(Objective(name="slo", slo=SOJOURN), "sojourn_time"),
            2.0,
            "mean sojourn time",
            True,
            True,
            True,
            "sojourn_time",
        ),
        # an SLO on another duration than the one that is compared
        (
            Criterion(Objective(name="slo", slo=SOJOURN)),
            1.0,
            "mean queueing delay",
            True,
            True,
            True,
            "queueing_delay",
        ),
        # half a second a token, of 1, 2, 2 and 2 tokens
        (
            Criterion(Objective(name="throughput")),
            0.875,
            "time per request at the largest stable rate",
            False,
            False,
            True,
            None,
        ),
        # a reader gets 1, 1, 2/3 and 1/2 of the answer
        (Criterion(V1), 0.25 * 5 / 24 + 0.75 * 1.0, "shortfall of V1", False, True, False, None),
        (
            Criterion(Objective(name="v2", theta=0.25, loss_cost=3.0)),
            0.25 * 5 / 24 + 0.75 * 0.9 + 3 * 0.1,
            "shortfall of V2",
            False,
            True,
            False,
            None,
        ),
    ],
)
def test_what_an_objective_compares_settings_by(
    measure: Criterion,
    value: float,
    name: str,
    pole: bool,
    stable: bool,
    seconds: bool,
    compared: str | None,
) -> None:
    answer = dataclasses.replace(
        predicted(), served_queueing_delay=Quantiles(mean=0.9), loss_fraction=0.1
    )
    assert measure.of(answer, MODEL, LENGTHS) == pytest.approx(value)
    assert (measure.name, measure.has_pole, measure.needs_stability, measure.seconds) == (
        name,
        pole,
        stable,
        seconds,
    )
    assert measure.compared == compared
    nothing = dataclasses.replace(
        answer,
        queueing_delay=Quantiles(),
        served_queueing_delay=Quantiles(),
        sojourn_time=Quantiles(),
    )
    assert math.isnan(measure.of(nothing, MODEL, LENGTHS)) == (
        name != "time per request at the largest stable rate"
    )


def test_the_share_of_an_answer_that_its_reader_gets_grows_with_the_limit() -> None:
    """E[min(1, n / N)] for N = 1, 2, 3, 4."""
    expected = [
        np.mean([min(1.0, limit / length) for length in (1, 2, 3, 4)]) for limit in range(5)
    ]
    assert LENGTHS.utilities == pytest.approx(expected)
