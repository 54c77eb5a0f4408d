"""The window holds one epoch, keeps lengths across, survives a file; checks and guards say when not to believe it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from policies import parse_policy
from queueing.distributions import parse_distribution
from queueing.estimation.assess import Limits, assess, while_requests_came
from queueing.estimation.batch_times import batch_times
from queueing.estimation.checks import conservation, little_law, utilisation_law
from queueing.estimation.energy_fit import energy_estimate
from queueing.estimation.engine_assumptions import settled, stable_queue
from queueing.estimation.estimates import Estimates, estimate
from queueing.estimation.identifiability import of_cells, of_window
from queueing.estimation.interval import Estimate
from queueing.estimation.window import Window
from queueing.fit import Measured, fit_law
from queueing.latency import LatencyModel
from queueing.model import Model
from queueing.record import Record
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve
from tests.queueing.estimation_windows import window_of

POLICY = "capped:max_batch_size=8"


def record(number: int, at: float, **changed: object) -> Record:
    fields = {
        "request_id": str(number),
        "outcome": "completed",
        "epoch": 0,
        "batch_id": number,
        "batch_size": 1,
        "arrived_at": at,
        "dispatched_at": at,
        "released_at": at + 1,
        "server_free_at": at + 1,
        "prompt_tokens": 8,
        "output_tokens": 10,
    }
    return Record(**(fields | changed))  # type: ignore[arg-type]


def test_a_new_epoch_forgets_everything_but_lengths() -> None:
    window = Window(seconds=100.0, epoch=0, epoch_at=0.0)
    for number in range(30):
        window.on_arrival(float(number))
        window.on_record(record(number, float(number)))
    window.begin_epoch(1, 30.0)
    window.on_arrival(31.0)
    window.on_record(record(31, 31.0, epoch=1, output_tokens=20))
    snapshot = window.snapshot(POLICY, 40.0)
    assert snapshot.arrivals.tolist() == [31.0]
    assert len(snapshot.mine.rows) == 1
    found = estimate(snapshot, parse_policy(POLICY), LAW)
    assert found.count == 1
    assert found.output_tokens.counts.size == 31
    assert found.notes == ("lengths of 30 requests of earlier epochs are used: they do not depend on the policy",)
    window.begin_epoch(2, 45.0, carry_lengths=False)
    assert not estimate(window.snapshot(POLICY, 50.0), parse_policy(POLICY), LAW).output_tokens.counts.size


def test_a_request_of_the_old_epoch_that_ends_in_the_new_one_is_no_part_of_it() -> None:
    window = Window(epoch=1, epoch_at=10.0)
    window.on_record(record(1, 9.0, epoch=1, dispatched_at=11.0))  # arrived before the switch
    window.on_record(record(2, 9.5, epoch=0))
    window.on_record(record(3, 12.0, epoch=1))
    assert window.snapshot(POLICY, 20.0).mine.column("batch_id").tolist() == [3.0]


def test_the_window_slides_and_is_bounded() -> None:
    window = Window(seconds=10.0, most=50, epoch_at=0.0)
    for number in range(500):
        window.on_arrival(number / 10)
        window.on_record(record(number, number / 10))
    snapshot = window.snapshot(POLICY, 50.0)
    assert snapshot.arrivals[0] > 44.9  # the last 50 arrivals, not the last 10 s: the start follows
    assert snapshot.start == pytest.approx(45.0)
    assert len(snapshot.rows) == 50
    assert window.snapshot(POLICY, 1000.0).arrivals.size == 0


def test_endings_say_what_is_known_of_a_length() -> None:
    window = Window(epoch_at=0.0)
    window.on_record(record(1, 1.0))
    window.on_record(record(2, 1.0, clipped=True))
    window.on_record(record(3, 1.0, outcome="cancelled"))
    window.on_record(record(4, 1.0, outcome="failed"))
    window.on_record(record(5, 1.0, outcome="cancelled", output_tokens=0))
    window.on_record(record(6, 1.0, outcome="abandoned", dispatched_at=None, released_at=4.0))
    snapshot = window.snapshot(POLICY, 9.0, in_service=((2.0, 6),))
    sample = estimate(snapshot, parse_policy(POLICY), LAW).output_tokens
    assert sorted(zip(sample.counts.tolist(), sample.censored.tolist(), strict=True)) == [(7, True), (10, False), (11, True), (11, True)]
    assert snapshot.lost_at.tolist() == [4.0]


def test_feeding_does_not_modify_a_snapshot() -> None:
    window = Window(epoch_at=0.0)
    window.on_arrival(1.0)
    window.on_record(record(1, 1.0))
    snapshot = window.snapshot(POLICY, 5.0)
    window.on_arrival(2.0)
    window.on_record(record(2, 2.0))
    assert snapshot.arrivals.tolist() == [1.0]
    assert len(snapshot.rows) == 1


def test_estimates_survive_a_file() -> None:
    found = estimate(seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW)
    text = json.dumps(found.to_dict(), allow_nan=False)
    again = Estimates.from_dict(json.loads(text))
    assert again.speed == found.speed
    assert again.arrival_rate == found.arrival_rate
    assert again.output_tokens.mean(32).value == pytest.approx(found.output_tokens.mean(32).value)
    assert again.summary() == json.loads(json.dumps(found.summary()))
    assert len(text) < 10_000
    with pytest.raises(ValueError, match="schema version 7"):
        Estimates.from_dict(found.to_dict() | {"schema_version": 7})


def test_estimates_of_nothing_are_unknown() -> None:
    found = estimate(Window(epoch_at=0.0).snapshot(POLICY, 10.0), parse_policy(POLICY), LAW)
    assert found.arrival_rate.value == 0.0
    assert not found.speed.known
    assert found.law(LAW) == LAW
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_self_checks_hold_on_a_run_and_break_when_a_request_is_lost() -> None:
    records = serve(poisson(50.0, 400, 1), Engine(most=8), 1)
    arrived, left = (np.array([getattr(each, name) for each in records]) for name in ("arrived_at", "released_at"))
    begun, server = np.array([each.dispatched_at for each in records]), np.zeros(len(records))
    start, end = 1.0, float(arrived.max())
    grid = np.linspace(start, end, 200_001)
    number = np.searchsorted(np.sort(arrived), grid, "right") - np.searchsorted(np.sort(left), grid, "right")
    counted = float(number.mean())
    assert little_law(counted, arrived, left, start, end).holds
    kept = np.arange(len(records)) % 20 != 0
    assert not little_law(counted, arrived[kept], left[kept], start, end).holds
    busy = float(np.mean([np.any((begun <= at) & (left > at)) for at in grid[::20]]))
    assert utilisation_law(busy, (begun, left, server), start, end).holds
    assert not utilisation_law(busy + 0.05, (begun, left, server), start, end).holds
    assert conservation(10, {"completed": 6, "rejected": 1}, 2, 1).holds
    assert not conservation(10, {"completed": 6}, 2, 1).holds
    assert not little_law(1.0, arrived, left, 2.0, 2.0).holds


def test_the_guard_names_what_designed_cells_cannot_tell() -> None:
    rng = np.random.default_rng(1)
    cells = [(size, length) for size in (1, 4, 16) for length in (4, 16, 64)] * 4
    grid = [Measured((length,) * size, 8 * size, LAW.padded(size, length) * rng.normal(1, 0.01)) for size, length in cells]
    fitted = fit_law(grid, rng, bootstrap=50)
    good = of_cells(grid, {name: fitted.intervals[name] for name in ("k3", "k4")})
    assert good.doubts == ()
    assert (good.largest_batch, good.longest) == (16, 64)
    thin = [Measured((length,) * 8, 64, LAW.padded(8, length)) for length in (15, 16)]
    doubts = " ".join(of_cells(thin, {"k1": (-0.001, 0.0016)}).doubts)
    assert "only batches of 8 were measured" in doubts
    assert "trade against each other" in doubts
    assert "k1 is known to" in doubts
    assert of_cells([], {}).doubts == ("nothing was measured: no coefficient is known",)


def test_the_guard_names_batches_that_were_never_calibrated() -> None:
    times = batch_times(parse_policy("dynamic"), seen(serve(poisson(400.0, 3000, 1), Engine(most=64), 1), "dynamic").mine, LAW)
    assert of_window(times, 64, 32) == ()
    doubts = of_window(times, 8, 16)
    assert doubts[0].startswith("batch sizes up to")
    assert "(largest: 8)" in doubts[0]
    assert doubts[1].startswith("lengths up to 32 were never calibrated")


def test_energy_per_batch_is_a_line_with_intervals() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 17, 500).astype(float)
    tokens = sizes * 20
    covered = 0
    for _ in range(100):
        found = energy_estimate(sizes, 3.0 * sizes + 11.0 + rng.normal(0, 2.0, 500), tokens)
        assert found is not None
        covered += found.beta.covers(3.0) and found.c0.covers(11.0)
    assert covered >= 85
    assert found.per_token.value == pytest.approx((3 * sizes.sum() + 11 * 500) / tokens.sum(), rel=0.02)
    assert energy_estimate(np.ones(100), np.ones(100), np.ones(100)) is None


def test_a_queue_above_capacity_is_unstable_and_patience_saves_it() -> None:
    quiet = np.random.default_rng(0).exponential(1.0, 1000)
    assert stable_queue(Estimate(0.8, 0.75, 0.85, 100), quiet).holds
    assert stable_queue(Estimate(0.98, 0.9, 1.06, 100), quiet).holds
    assert stable_queue(Estimate(0.98, 0.9, 1.06, 100), np.arange(1000.0)).holds is False
    assert stable_queue(Estimate(1.2, 1.1, 1.3, 100), quiet).holds is False
    assert stable_queue(Estimate(1.2, 1.1, 1.3, 100), quiet, patience=True).holds
    assert stable_queue(Estimate(math.nan, 0, 1, 0), quiet).holds is None


def test_a_young_epoch_is_a_transient_and_a_backlog_makes_it_longer() -> None:
    assert settled(100.0, 0.0, 1.0).holds
    assert settled(10.0, 0.0, 1.0).holds is False
    assert settled(10.0, 50.0, 1.0).holds  # the epoch began long before the window
    assert settled(100.0, 0.0, 1.0, waiting_before=500, free_rate=10.0).holds is False
    assert settled(10.0, 0.0, math.inf).holds is None


def test_a_later_part_of_a_window_is_a_window() -> None:
    snapshot = seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY)
    later = snapshot.since(5.0)
    assert later.arrivals[0] > 5.0
    assert later.mine.column("arrived_at").min() >= 5.0
    assert replace(later, start=0.0).mine.rows.shape[0] > later.mine.rows.shape[0]


def test_a_law_of_the_window_has_the_shape_and_only_speed_and_cv_of_the_run() -> None:
    found = estimate(seen(serve(poisson(30.0, 1500, 1), Engine(most=8, law=LAW.at_speed(1.4)), 1), POLICY), parse_policy(POLICY), LAW)
    law = found.law(LAW)
    assert replace(law, speed=1.0, cv=LAW.cv) == LAW
    assert law.speed == pytest.approx(1.4, rel=0.03)
    assert isinstance(law, LatencyModel)


@pytest.mark.parametrize("idle", [30.0, 250.0])
def test_when_requests_stop_the_comparison_stays_that_of_the_time_before(idle: float) -> None:
    """A rate that fell with the silence made the page say that the engine does not follow its law."""
    model = Model(policy=parse_policy(POLICY), output_tokens=parse_distribution("uniform:low=1,high=31"), law=LAW)
    seen = window_of(model, 0.5, 2000, 3)
    then, now = (assess(each, LAW, Limits()) for each in (seen, replace(seen, now=seen.now + idle)))
    assert now.estimates.arrival_rate.value == pytest.approx(then.estimates.arrival_rate.value, rel=0.01)
    assert now.compared.predicted.value == pytest.approx(then.compared.predicted.value, rel=0.02)
    assert now.compared.verdict == then.compared.verdict


def test_a_pause_that_such_arrivals_make_ends_nothing() -> None:
    model = Model(policy=parse_policy(POLICY), output_tokens=parse_distribution("uniform:low=1,high=31"), law=LAW)
    seen = window_of(model, 0.5, 2000, 3)
    gap = float(np.diff(seen.arrivals).max())
    assert while_requests_came(replace(seen, now=float(seen.arrivals[-1]) + 1.2 * gap)).now > seen.arrivals[-1]
    few = replace(seen, arrivals=seen.arrivals[:5])
    assert while_requests_came(few) is few
