"""A cached prediction: how far and how long it is used, and that each quantity moves by its
own factor.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies import parse_policy
from queueing.estimation.band import Sensitivity
from queueing.estimation.cached_prediction import CachedPrediction
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.prediction.bounds import delay_bound
from queueing.result import Prediction, Quantiles
from tests.queueing.estimation_runs import LAW, LENGTHS
from tests.queueing.made import prediction_of

AT = 1000.0
FOUND = prediction_of(
    policy="capped:max_batch_size=8",
    load=0.6,
    utilisation=0.6,
    queueing_delay=Quantiles(1.0, 0.5, 2.0, 2.5, 4.0),
    served_queueing_delay=Quantiles(0.8, p90=1.6),
    sojourn_time=Quantiles(1.4, 1.0, 2.5, 3.0, 4.5),
    time_to_first_token=Quantiles(1.1, p99=3.3),
    inter_token_latency=Quantiles(0.02, p99=0.05, standard_error=0.001),
    assumptions=("one",),
)


def model(
    policy: str = "capped:max_batch_size=8",
    *,
    law: LatencyModel = LAW,
    servers: int = 1,
    patience: float | None = None,
) -> Model:
    return Model(
        policy=parse_policy(policy),
        output_tokens=LENGTHS,
        law=law,
        max_num_seqs=64,
        servers=servers,
        patience=patience,
    )


MODEL = model()
RATE = 0.6 * MODEL.largest_stable_rate


def slope(rate: float = 0.0, speed: float = 0.0) -> Sensitivity:
    return Sensitivity(rate, speed, 0.0, 0.0, 0, 0.0, 0.0)


def moved(
    rate: float = 1.0, speed: float = 1.0, seconds: float = 10.0, by: Sensitivity | None = None
) -> Prediction | None:
    """Factors of the rate and of service times, `seconds` after the prediction was solved."""
    cached = CachedPrediction.of(FOUND, MODEL, RATE, 0, AT)
    return cached.moved(model(law=LAW.at_speed(speed)), RATE * rate, by or slope(), AT + seconds)


@pytest.mark.parametrize(
    ("about", "stands"),
    [
        ({"seconds": 0.0}, True),
        ({"seconds": 59.9}, True),
        ({"seconds": 60.0}, False),
        ({"seconds": -0.1}, False),
        # three per cent of rate or speed, either way
        ({"rate": math.exp(0.0299)}, True),
        ({"rate": math.exp(0.0301)}, False),
        ({"rate": math.exp(-0.0299)}, True),
        ({"rate": math.exp(-0.0301)}, False),
        ({"speed": math.exp(0.0299)}, True),
        ({"speed": math.exp(0.0301)}, False),
        ({"speed": math.exp(-0.0299)}, True),
        ({"speed": math.exp(-0.0301)}, False),
        # a tenth of the delay
        ({"rate": math.exp(0.0099), "by": slope(rate=10.0)}, True),
        ({"rate": math.exp(0.0101), "by": slope(rate=10.0)}, False),
        ({"speed": math.exp(0.0099), "by": slope(speed=10.0)}, True),
        ({"speed": math.exp(0.0101), "by": slope(speed=10.0)}, False),
        ({"speed": math.exp(-0.0101), "by": slope(speed=10.0)}, False),
        # a faster machine that gets more to do
        (
            {"rate": math.exp(0.02), "speed": math.exp(-0.02), "by": slope(rate=10.0, speed=10.0)},
            True,
        ),
        (
            {"rate": math.exp(0.02), "speed": math.exp(0.02), "by": slope(rate=10.0, speed=10.0)},
            False,
        ),
        ({"by": slope(rate=math.nan)}, False),
    ],
)
def test_an_anchor_stands_for_a_minute_near_where_it_was_solved(
    about: dict[str, float], stands: bool
) -> None:
    assert (moved(**about) is not None) == stands  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "stands"), [(0.0039, True), (0.0041, False), (-0.0039, True), (-0.0041, False)]
)
def test_an_anchor_stands_while_the_scatter_moves_by_four_thousandths_of_a_squared_variation(
    more: float, stands: bool
) -> None:
    cached = CachedPrediction.of(FOUND, MODEL, RATE, 0, AT)
    other = model(law=replace(LAW, cv=math.sqrt(LAW.cv**2 + more)))
    assert (cached.moved(other, RATE, slope(), AT + 1) is not None) == stands


def test_the_scatter_holds_residual_and_stalls() -> None:
    assert CachedPrediction.of(FOUND, MODEL, RATE, 0, AT).scatter == pytest.approx(0.15**2)
    stalling = model(law=replace(LAW, stall_share=0.05, stall=0.1))
    of = CachedPrediction.of(FOUND, stalling, RATE, 3, AT)
    assert of.scatter == pytest.approx(0.15**2 + 0.05 * 0.1 / stalling.batch_time.mean(1))
    assert (of.rate, of.capacity, of.epoch, of.at) == (RATE, stalling.largest_stable_rate, 3, AT)


@pytest.mark.parametrize(
    ("queue", "stands"),
    [
        (model("single"), False),
        (model("capped:max_batch_size=1"), False),
        (model("continuous:max_batch_size=8"), False),
        (model("single", servers=2), True),
        (model("single", patience=1.0), True),
        (model("dynamic"), True),
    ],
)
def test_what_costs_little_is_solved_each_time(queue: Model, stands: bool) -> None:
    rate = 0.5 * queue.largest_stable_rate
    assert (
        CachedPrediction.of(FOUND, queue, rate, 0, AT).moved(queue, rate, slope(), AT + 1)
        is not None
    ) == stands


@pytest.mark.parametrize(
    ("load", "patience", "stands"),
    [(0.999, None, True), (1.0, None, False), (1.01, None, False), (1.01, 1.0, True)],
)
def test_an_anchor_is_not_moved_to_where_there_is_no_steady_state(
    load: float, patience: float | None, stands: bool
) -> None:
    queue = model(patience=patience)
    capacity = queue.largest_stable_rate
    found = CachedPrediction.of(FOUND, queue, 0.99 * capacity, 0, AT).moved(
        queue, load * capacity, slope(), AT + 1
    )
    assert (found is not None) == stands


def test_delays_move_by_the_elasticities_and_services_by_the_speed() -> None:
    """One per cent more arrivals and two per cent slower: 1.01^3 times 1.02^2 of the delay."""
    found = moved(1.01, 1.02, by=slope(rate=3.0, speed=2.0))
    assert found is not None
    delays = 1.01**3 * 1.02**2
    for level in ("mean", "p50", "p90", "p95", "p99"):
        assert getattr(found.queueing_delay, level) == pytest.approx(
            delays * getattr(FOUND.queueing_delay, level)
        )
    assert (found.served_queueing_delay.mean, found.served_queueing_delay.p90) == pytest.approx(
        (0.8 * delays, 1.6 * delays)
    )
    assert found.served_queueing_delay.p99 is None
    sojourn = 0.8 * delays + 1.02 * 0.6
    assert found.sojourn_time.mean == pytest.approx(sojourn)
    assert found.sojourn_time.p99 == pytest.approx(4.5 * sojourn / 1.4)
    first = 0.8 * delays + 1.02 * 0.3
    assert (found.time_to_first_token.mean, found.time_to_first_token.p99) == pytest.approx(
        (first, 3 * first)
    )
    assert found.time_to_first_token.p50 is None
    between = found.inter_token_latency
    assert (between.mean, between.p99, between.standard_error) == pytest.approx(
        (0.0204, 0.051, 0.00102)
    )
    load = model(law=LAW.at_speed(1.02)).load(1.01 * RATE)
    assert (found.load, found.utilisation) == (load, load)
    assert found.bounds == {}
    assert found.assumptions == ("one", "moved to first order from 10 s before")


@pytest.mark.parametrize("utilisation", [None, 0.7])
def test_a_utilisation_that_is_not_the_load_stays(utilisation: float | None) -> None:
    found = CachedPrediction.of(replace(FOUND, utilisation=utilisation), MODEL, RATE, 0, AT).moved(
        MODEL, 1.01 * RATE, slope(), AT + 1
    )
    assert found is not None
    assert found.utilisation == utilisation


def test_a_prediction_without_a_sojourn_is_moved_all_the_same() -> None:
    bare = replace(
        FOUND,
        sojourn_time=Quantiles(),
        time_to_first_token=Quantiles(),
        inter_token_latency=Quantiles(),
    )
    found = CachedPrediction.of(bare, MODEL, RATE, 0, AT).moved(
        MODEL, 1.01 * RATE, slope(rate=1.0), AT + 1
    )
    assert found is not None
    assert (
        found.sojourn_time.mean,
        found.time_to_first_token.mean,
        found.inter_token_latency.mean,
    ) == (None, None, None)
    assert found.queueing_delay.mean == pytest.approx(1.01)


def test_a_bound_is_that_of_the_new_rate() -> None:
    open_ended = Model(
        policy=parse_policy("dynamic"), output_tokens=LENGTHS, law=replace(LAW, cv=0.0)
    )
    rate = 0.5 * open_ended.largest_stable_rate
    found = CachedPrediction.of(FOUND, open_ended, rate, 0, AT).moved(
        open_ended, 1.01 * rate, slope(), AT + 1
    )
    assert found is not None
    assert found.bounds == {"queueing_delay_upper": delay_bound(open_ended, 1.01 * rate)}
