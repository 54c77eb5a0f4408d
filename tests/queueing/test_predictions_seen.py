"""How good predictions were, and what of a preempted request counts as its delay, from a window."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.lengths.predictions import FEWEST, predictor_of_lengths
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record

POLICY = "single:order=spjf"
LAW = LatencyModel(k3=0.001, k4=0.01)


def ended(place: int, tokens: int, predicted: float | None, **changed: object) -> Record:
    at = 0.05 * place
    record = Record(
        request_id=str(place),
        outcome="completed",
        policy=POLICY,
        epoch=0,
        server_id=0,
        batch_id=place,
        batch_size=1,
        arrived_at=at,
        dispatched_at=at + 0.25,
        queueing_delay=0.25,
        released_at=at + 0.5,
        server_free_at=at + 0.5,
        prompt_tokens=4,
        output_tokens=tokens,
        predicted_output_tokens=predicted,
        clipped=False,
    )
    return msgspec.structs.replace(record, **changed)


def seen(records: list[Record]) -> Estimates:
    window = Window(epoch_at=0.0)
    for record in records:
        assert record.arrived_at is not None
        window.on_arrival(record.arrived_at)
        window.on_record(record)
    snapshot = window.snapshot(POLICY, 0.05 * len(records) + 15.0)
    return estimate(snapshot, parse_policy(POLICY), LAW)


def spread(found: Estimates) -> float:
    assert found.predictor is not None
    assert found.predictor.startswith("lognormal:sigma=")
    return float(found.predictor.partition("=")[2])


@pytest.mark.parametrize("bias", [1.0, 3.0])
def test_the_spread_of_the_errors_whatever_their_bias(bias: float) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 200, 3000)
    told = bias * lengths * np.exp(0.5 * rng.standard_normal(3000))
    found = seen(
        [ended(i, int(n), float(y)) for i, (n, y) in enumerate(zip(lengths, told, strict=True))]
    )
    assert spread(found) == pytest.approx(0.5, rel=0.04)


def test_predictions_without_errors_are_exact() -> None:
    assert seen([ended(i, 5 + i, 5.0 + i) for i in range(FEWEST)]).predictor == "exact"
    nearly = [ended(i, 500, 500.0 * (1 + 0.009 * (-1) ** i)) for i in range(FEWEST)]
    assert seen(nearly).predictor == "exact"
    farther = [ended(i, 500, 500.0 * (1 + 0.012 * (-1) ** i)) for i in range(FEWEST)]
    assert spread(seen(farther)) == pytest.approx(0.012, rel=0.01)


def test_too_few_say_nothing_and_some_without_a_prediction_say_none() -> None:
    assert seen([ended(i, 9, 9.0) for i in range(FEWEST - 1)]).predictor is None
    for count, expected in ((5, "exact"), (6, "none")):
        records = [ended(i, 9, None if i < count else 9.0) for i in range(100)]
        assert seen(records).predictor == expected


def test_two_values_four_times_apart_are_a_bit_that_errs_as_often_as_it_does() -> None:
    lengths = np.repeat([10.0, 20.0, 21.0, 40.0], 25)
    told = np.where(lengths > 20, 40.0, 10.0)
    assert predictor_of_lengths(lengths, told) == "onebit:threshold=20,accuracy=1"
    told[:10] = 40.0
    assert predictor_of_lengths(lengths, told) == "onebit:threshold=20,miss_short=0.2,miss_long=0"
    odd = np.where(lengths > 20, 42.0, 10.0)
    assert predictor_of_lengths(lengths, odd) == (
        "onebit:threshold=21,miss_short=0.333,miss_long=0"
    )
    assert predictor_of_lengths(np.full(40, 30.0), np.repeat([10.0, 40.0], (4, 36))) == (
        "onebit:threshold=20,accuracy=0.9"
    )
    assert predictor_of_lengths(np.tile([1.0, 3.0], 20), np.tile([1.0, 2.0], 20)) == (
        "onebit:threshold=1,accuracy=1"
    )


def test_two_other_values_are_errors_as_any_and_one_value_is_no_prediction() -> None:
    lengths = np.repeat([10.0, 20.0, 21.0, 40.0], 25)
    found = predictor_of_lengths(lengths, np.where(lengths > 20, 41.0, 10.0))
    assert found is not None
    assert found.startswith("lognormal:sigma=")
    assert predictor_of_lengths(lengths, np.full(100, 64.0)) == "none"
    assert predictor_of_lengths(np.full(100, 64.0), np.full(100, 64.0)) == "exact"


def test_lengths_that_were_cut_do_not_count() -> None:
    whole = [ended(i, 9, 9.0) for i in range(FEWEST)]
    cut = [ended(100 + i, 4, 50.0, clipped=True) for i in range(FEWEST)]
    left = [ended(200 + i, 4, 50.0, outcome="cancelled") for i in range(FEWEST)]
    assert seen([*whole, *cut, *left]).predictor == "exact"
    assert seen(cut).predictor is None


def test_all_waits_of_a_preempted_request_are_its_delay() -> None:
    window = Window(epoch_at=0.0)
    window.on_arrival(1.0)
    window.on_record(
        ended(
            1,
            9,
            9.0,
            arrived_at=1.0,
            first_dispatched_at=1.1,
            dispatched_at=5.0,
            queueing_delay=2.5,
            preemptions=2,
            released_at=6.0,
            server_free_at=6.0,
        )
    )
    snapshot = window.snapshot(POLICY, 9.0)
    assert snapshot.column("dispatched_at").tolist() == [3.5]
    assert snapshot.column("server_free_at").tolist() == [6.0]
