"""The window holds one epoch, keeps lengths across, survives a file; checks and guards say when
not to believe it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kendall.policies import parse_policy
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.assumptions.checks import conservation, little_law, utilisation_law
from kendall.queueing.estimation.assumptions.compared_window import observed_mean
from kendall.queueing.estimation.assumptions.forecast_assumptions import settled, stable_queue
from kendall.queueing.estimation.estimates import Estimates, estimate, output_lengths
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.lengths.lengths import lengths as lengths_of
from kendall.queueing.estimation.speed.batch_times import batch_times
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window.window import Snapshot, Window
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.fit import Measured, fit_law
from kendall.queueing.latency.identifiability import (
    beyond,
    of_cells,
    trade_offs,
    vague_coefficients,
)
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.delay_variance import single_server_variance
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.measurement.warm_up import find_warm_up
from kendall.queueing.queue import Queue
from kendall.server.telemetry.energy.fit import energy_estimate
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve
from tests.queueing.estimation_windows import record, window_of

POLICY = "capped:max_batch_size=8"


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
    assert found.notes == (
        "lengths of 30 requests of earlier epochs are used: they do not depend on the policy",
    )
    window.begin_epoch(2, 45.0, carry_lengths=False)
    assert not estimate(
        window.snapshot(POLICY, 50.0), parse_policy(POLICY), LAW
    ).output_tokens.counts.size


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
    assert sorted(zip(sample.counts.tolist(), sample.censored.tolist(), strict=True)) == [
        (7, True),
        (10, False),
        (11, True),
        (11, True),
    ]
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
    found = estimate(
        seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW
    )
    text = json.dumps(json_object(found.saved()), allow_nan=False)
    again = Estimates.from_json(json.loads(text))
    assert again.speed == found.speed
    assert again.arrival_rate == found.arrival_rate
    assert again.output_tokens.mean(32).value == pytest.approx(found.output_tokens.mean(32).value)
    assert json_object(again.summary()) == json_object(found.summary())
    assert len(text) < 10_000
    with pytest.raises(ValueError, match="schema version 7"):
        Estimates.from_json(json_object(found.saved()) | {"schema_version": 7})


def test_every_estimate_is_inside_its_interval_and_quantiles_are_in_order() -> None:
    """As `/admin/state` shows them."""
    summary = estimate(
        seen(serve(poisson(50.0, 2000, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW
    ).summary()
    found = json_object(summary)
    for name in ("arrival_rate", "dispersion", "speed", "cv"):
        assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"], name
        assert 1 <= found[name]["effective_n"] <= 2000, name
    assert (
        0
        <= found["wander"]["sigma"]["low"]
        <= found["wander"]["sigma"]["value"]
        <= found["wander"]["sigma"]["high"]
    )
    lengths = found["output_tokens"]
    assert lengths["mean"]["low"] < lengths["mean"]["value"] < lengths["mean"]["high"]
    levels = [lengths[name] for name in ("p50", "p90", "p99")]
    assert all(each["low"] <= each["value"] <= each["high"] for each in levels)
    assert [each["value"] for each in levels] == sorted(each["value"] for each in levels)
    assert (lengths["known_to"], lengths["unknown_mass"]) == (32, 0.0)
    assert found["stalls"]["count"] == 0


def test_estimates_of_nothing_are_unknown() -> None:
    found = estimate(Window(epoch_at=0.0).snapshot(POLICY, 10.0), parse_policy(POLICY), LAW)
    assert found.arrival_rate.value == 0.0
    assert not found.speed.known
    assert found.law(LAW) == LAW
    json.dumps(json_object(found.saved()), allow_nan=False)


def test_the_self_checks_hold_on_a_run_and_break_when_a_request_is_lost() -> None:
    records = serve(poisson(50.0, 400, 1), Engine(most=8), 1)
    arrived, left = (
        np.array([getattr(each, name) for each in records])
        for name in ("arrived_at", "released_at")
    )
    begun, server = np.array([each.dispatched_at for each in records]), np.zeros(len(records))
    start, end = 1.0, float(arrived.max())
    grid = np.linspace(start, end, 200_001)
    number = np.searchsorted(np.sort(arrived), grid, "right") - np.searchsorted(
        np.sort(left), grid, "right"
    )
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
    grid = [
        Measured((length,) * size, 8 * size, LAW.padded(size, length) * rng.normal(1, 0.01))
        for size, length in cells
    ]
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
    times = batch_times(
        parse_policy("dynamic"),
        seen(serve(poisson(400.0, 3000, 1), Engine(most=64), 1), "dynamic").mine,
        LAW,
    )
    assert beyond(times.size, times.longest, 64, 32) == ()
    doubts = beyond(times.size, times.longest, 8, 16)
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
    assert found.per_token.value == pytest.approx(
        (3 * sizes.sum() + 11 * 500) / tokens.sum(), rel=0.02
    )
    assert energy_estimate(np.ones(100), np.ones(100), np.ones(100)) is None


def test_a_queue_above_capacity_is_unstable_and_patience_saves_it() -> None:
    quiet = np.random.default_rng(0).exponential(1.0, 1000)
    assert stable_queue(Estimate(0.8, 0.75, 0.85, 100), quiet).holds
    assert stable_queue(Estimate(0.98, 0.9, 1.06, 100), quiet).holds
    assert stable_queue(Estimate(0.98, 0.9, 1.06, 100), np.arange(1000.0)).holds is False
    assert stable_queue(Estimate(1.2, 1.1, 1.3, 100), quiet).holds is False
    assert stable_queue(Estimate(1.2, 1.1, 1.3, 100), quiet, kept_finite="patience").holds
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
    found = estimate(
        seen(serve(poisson(30.0, 1500, 1), Engine(most=8, law=LAW.at_speed(1.4)), 1), POLICY),
        parse_policy(POLICY),
        LAW,
    )
    law = found.law(LAW)
    assert replace(law, speed=1.0, cv=LAW.cv) == LAW
    assert law.speed == pytest.approx(1.4, rel=0.03)
    assert isinstance(law, LatencyModel)


@pytest.mark.parametrize("idle", [30.0, 250.0])
def test_when_requests_stop_the_comparison_stays_that_of_the_time_before(idle: float) -> None:
    """A rate that fell with the silence made the page say that the engine does not follow its
    law.
    """
    model = Queue.read(POLICY, parse_distribution("uniform:low=1,high=31"), LAW)
    seen = window_of(model, 0.5, 2000, 3)
    then, now = (
        assess(each, LAW, QueueLimits()) for each in (seen, replace(seen, now=seen.now + idle))
    )
    assert now.estimates.arrival_rate.value == pytest.approx(
        then.estimates.arrival_rate.value, rel=0.01
    )
    assert now.compared.predicted.value == pytest.approx(then.compared.predicted.value, rel=0.02)
    assert now.compared.verdict == then.compared.verdict


def test_a_pause_that_such_arrivals_make_ends_nothing() -> None:
    model = Queue.read(POLICY, parse_distribution("uniform:low=1,high=31"), LAW)
    seen = window_of(model, 0.5, 2000, 3)
    gap = float(np.diff(seen.arrivals).max())
    assert (
        while_requests_came(replace(seen, now=float(seen.arrivals[-1]) + 1.2 * gap)).now
        > seen.arrivals[-1]
    )
    few = replace(seen, arrivals=seen.arrivals[:5])
    assert while_requests_came(few) is few


def test_the_window_is_judged_without_its_beginning_where_that_is_the_epochs() -> None:
    snapshot = seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY)
    _, delays, _ = snapshot.mine.served_in_order()
    dropped = find_warm_up(delays).dropped
    assert dropped > 0
    assert snapshot.judged().tolist() == delays[dropped:].tolist()
    assert replace(snapshot, epoch_at=0.5).judged().size == snapshot.judged().size, (
        "a window cannot begin before its epoch"
    )
    later = replace(snapshot, epoch_at=-5.0)
    assert later.judged().tolist() == delays.tolist()
    assert later.judged(sojourn=True).size == delays.size
    assert observed_mean(later).value == pytest.approx(delays.mean())
    assert observed_mean(replace(later, rows=later.rows[:0])).effective_n == 0.0


def test_answers_under_way_and_over_in_a_batch_that_goes_on_count_by_their_dispatch() -> None:
    window = Window(epoch_at=0.0)
    window.on_record(record(1, 1.0))
    under_way, over = ((2.0, 6), (8.0, 0)), ((2.0, 4), (8.0, 3))
    snapshot = window.snapshot(POLICY, 9.0, in_service=under_way, ended=over)
    found = output_lengths(snapshot)
    assert list(zip(found.counts.tolist(), found.censored.tolist(), strict=True)) == [
        (10, False),
        (7, True),
        (1, True),
        (4, False),
        (3, False),
    ]
    assert output_lengths(replace(snapshot, carried_from=5.0)).counts.tolist() == [1, 3]
    assert output_lengths(replace(snapshot, carried_from=2.0)).counts.tolist() == [7, 1, 4, 3]
    aged = output_lengths(snapshot, 1.0)
    assert aged.weights == pytest.approx([2.0**-8, 2.0**-7, 0.5, 2.0**-7, 0.5])


def test_lengths_of_prompts_and_of_calls_fall_in_weight_too() -> None:
    window = Window(epoch_at=0.0)
    for at, size in ((1.0, 1), (6.0, 3), (9.0, 2)):
        for _ in range(size):
            window.on_arrival(at, call=str(at))
        window.on_record(record(int(at), at))
    found = estimate(window.snapshot(POLICY, 9.0), parse_policy(POLICY), LAW, half_life=3.0)
    weights = [2 ** (-8 / 3), 0.5, 1.0]
    assert found.sequences.counts.tolist() == [1, 3, 2]
    for sample in (found.sequences, found.prompt_tokens, found.output_tokens):
        assert sample.weights == pytest.approx(weights)
    assert found.call_sizes is not None
    assert found.call_sizes.mean == pytest.approx((weights[0] + 3 * weights[1] + 2) / sum(weights))
    assert (
        estimate(window.snapshot(POLICY, 9.0).since(20.0), parse_policy(POLICY), LAW).call_sizes
        is None
    )
    alone = Window(epoch_at=0.0)
    for at in (1.0, 6.0):
        alone.on_arrival(at, call=str(at))
        alone.on_record(record(int(at), at))
    known = estimate(alone.snapshot(POLICY, 9.0), parse_policy(POLICY), LAW)
    assert known.sequences.counts.tolist() == [1, 1]
    assert known.call_sizes is None, "each was of one"


def test_a_summary_says_the_lengths_as_far_as_they_are_known() -> None:
    found = estimate(
        seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW
    )
    plain, lengths = json_object(found.summary().output_tokens), found.output_tokens
    assert (plain["known_to"], plain["unknown_mass"]) == (lengths.known_to, 0.0)
    assert plain["mean"] == plain["mean_to_known"] == json_object(lengths.mean())
    assert plain["p50"] == json_object(lengths.quantile(0.5))
    assert plain["p90"]["value"] <= plain["p99"]["value"] <= lengths.known_to
    assert found.summary().prompt_tokens.mean.value == 32.0
    censored = replace(found, output_tokens=lengths_of([3, 8, 8], [False, True, True]))
    cut = json_object(censored.summary().output_tokens)
    assert (cut["mean"]["value"], cut["mean_to_known"]["value"]) == (
        None,
        pytest.approx((3 + 8 + 8) / 3),
    )
    assert cut["unknown_mass"] == pytest.approx(2 / 3)
    assert replace(found, output_tokens=lengths_of([])).summary().output_tokens.known_to == 0


def test_the_law_of_a_window_without_a_known_speed_or_with_continuous_batching_has_no_stalls() -> (
    None
):
    found = estimate(
        seen(serve(poisson(50.0, 600, 1), Engine(most=8), 1), POLICY), parse_policy(POLICY), LAW
    )
    stalling = replace(found, stalls=Stalls(2, 0.02, 1.0, None, 0.5))
    assert (stalling.law(LAW).stall_share, stalling.law(LAW).stall) == (0.02, 0.5)
    assert stalling.law(LAW).speed == found.speed.value
    assert stalling.law(LAW).cv == found.cv.value
    for other in (
        replace(stalling, speed=UNKNOWN),
        replace(stalling, policy="continuous"),
        replace(stalling, stalls=replace(stalling.stalls, count=0)),
    ):
        assert other.law(LAW).stall_share == 0.0
    assert replace(found, speed=UNKNOWN, cv=UNKNOWN).law(LAW.at_speed(1.7)) == LAW.at_speed(1.7)


def test_the_interval_of_the_energy_of_a_token_is_that_of_a_ratio() -> None:
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 9, 200).astype(float)
    tokens, joules = 20 * sizes + rng.integers(0, 5, 200), 3 * sizes + 11 + rng.normal(0, 2, 200)
    found = energy_estimate(sizes, joules, tokens)
    assert found is not None
    ratio = joules.sum() / tokens.sum()
    half = 1.959964 * np.std(joules - ratio * tokens, ddof=1) / tokens.mean() / math.sqrt(200)
    assert (found.per_token.value, found.per_token.high - found.per_token.value) == pytest.approx(
        (ratio, half)
    )
    line = stats.linregress(sizes, joules)
    assert (found.beta.value, found.c0.value, found.r2) == pytest.approx(
        (line.slope, line.intercept, line.rvalue**2)
    )
    assert found.beta.high - found.beta.value == pytest.approx(
        stats.t.ppf(0.975, 198) * line.stderr
    )
    assert found.c0.high - found.c0.value == pytest.approx(
        stats.t.ppf(0.975, 198) * line.intercept_stderr
    )
    assert found.beta.effective_n == found.c0.effective_n == found.per_token.effective_n == 200.0
    assert energy_estimate(sizes, joules, np.zeros(200)) is None
    assert [energy_estimate(sizes[:n], joules[:n], tokens[:n]) is not None for n in (19, 20)] == [
        False,
        True,
    ]


def test_the_condition_of_a_design_is_that_of_its_scaled_columns() -> None:
    cells = [
        Measured((length,) * size, 0, 1.0)
        for size, length in ((1, 4), (4, 4), (1, 64), (4, 64), (16, 16))
    ]
    found = of_cells(cells, {})
    design = np.array(
        [
            [size, 1, size * length, length]
            for size, length in ((1, 4), (4, 4), (1, 64), (4, 64), (16, 16))
        ],
        dtype=float,
    )
    assert found.condition == pytest.approx(np.linalg.cond(design / np.linalg.norm(design, axis=0)))
    assert (found.largest_batch, found.longest) == (16, 64)
    mixed = [
        Measured((3, 9), 0, 1.0),
        Measured((2,), 0, 1.0),
        Measured((5, 5, 8), 0, 1.0),
        Measured((1, 1), 0, 1.0),
    ]
    rows = {True: [18, 2, 24, 2], False: [12, 2, 18, 2]}  # padded: each as long as the longest
    for padded, tokens in rows.items():
        own = np.column_stack([[2, 1, 3, 2], np.ones(4), tokens, [9, 2, 8, 1]])
        assert of_cells(mixed, {}, padded=padded).condition == pytest.approx(
            np.linalg.cond(own / np.linalg.norm(own, axis=0))
        )
    assert math.isinf(of_cells(cells[:3], {}).condition)
    assert math.isinf(of_cells([], {}).condition)


@pytest.mark.parametrize(("condition", "doubted"), [(100.0, False), (100.1, True)])
def test_coefficients_trade_against_each_other_from_a_hundredfold_on(
    condition: float, doubted: bool
) -> None:
    said = trade_offs(condition, np.array([0.31, -0.9, 0.29, -0.31]))
    assert bool(said) == doubted
    if doubted:
        assert said[0].startswith(
            "k1 and k2 and k4 trade against each other (condition number 100)"
        )


@pytest.mark.parametrize(("half", "vague"), [(0.0049, False), (0.0051, True)])
def test_a_coefficient_is_vague_from_half_of_itself_on(half: float, vague: bool) -> None:
    design = np.array([[2.0, 1.0, 30.0, 10.0], [4.0, 1.0, 50.0, 20.0]])
    for sign in (1, -1):
        said = vague_coefficients(design, {"k3": (sign * 0.01 - half, sign * 0.01 + half)})
        assert bool(said) == vague
        if vague:
            assert said == [
                (
                    "k3 is known to +-0.0051 s only (204 ms in a mean batch): its value is "
                    f"{sign * 0.01:.2g} s"
                )
            ]


@pytest.mark.parametrize(("beyond_it", "doubted"), [(10, False), (11, True)])
def test_a_hundredth_of_the_batches_may_lie_beyond_the_calibration(
    beyond_it: int, doubted: bool
) -> None:
    values = np.array([8.0] * (1000 - beyond_it) + [9.0] * beyond_it)
    sizes, longest = (
        beyond(values, np.full(1000, 5.0), 8, 5),
        beyond(np.full(1000, 2.0), values, 2, 8),
    )
    assert (bool(sizes), bool(longest)) == (doubted, doubted)
    if doubted:
        assert sizes == (
            "batch sizes up to 9 were never calibrated (largest: 8); 1% of the requests rest on "
            "the law's form",
        )
    assert beyond(np.empty(0), np.empty(0), 8, 5) == ()


def test_one_size_or_one_length_says_nothing_of_the_other() -> None:
    sizes = of_cells([Measured((4,) * 3, 0, 1.0), Measured((9,) * 3, 0, 1.0)], {}).doubts
    lengths = of_cells([Measured((4,) * 3, 0, 1.0), Measured((4,) * 5, 0, 1.0)], {}).doubts
    assert any(said.startswith("only batches of 3 were measured") for said in sizes)
    assert not any(said.startswith("only lengths") for said in sizes)
    assert any(said.startswith("only lengths of 4 were measured") for said in lengths)
    assert not any(said.startswith("only batches") for said in lengths)
    alone = " ".join(of_cells([Measured((4,) * 3, 0, 1.0)], {}).doubts)
    assert "only batches of 3 were measured" in alone
    assert "only lengths of 4 were measured" in alone


def arriving(*rates: float) -> Snapshot:
    """Four hundred arrivals at each rate, of requests that are not over."""
    rng = np.random.default_rng(2)
    instants = np.cumsum(np.concatenate([rng.exponential(1 / rate, 400) for rate in rates]))
    return Snapshot(
        policy=POLICY,
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=float(instants[-1]),
        arrivals=instants,
        rows=np.empty((0, 13)),
    )


@pytest.mark.parametrize(
    ("rates", "changed"),
    [((1.0,), 0), ((1.0, 4.0), 1), ((1.0, 4.0, 16.0), 2), ((1.0, 4.0, 16.0, 4.0), None)],
)
def test_a_rate_that_changed_up_to_twice_is_that_since_the_last_change(
    rates: tuple[float, ...], changed: int | None
) -> None:
    """One that changed more often bursts, and has the whole window's."""
    window = arriving(*rates)
    found = estimate(window, parse_policy(POLICY), LAW)
    if changed:
        assert found.rate_changed_at == pytest.approx(window.arrivals[400 * changed], abs=10.0)
        assert found.arrival_rate.value == pytest.approx(rates[-1], rel=0.2)
    else:
        assert found.rate_changed_at is None
        assert found.arrival_rate.value == pytest.approx(window.arrivals.size / window.now)
    assert found.dispersion.effective_n == 19.0


@pytest.mark.parametrize(
    ("shortest", "turnaround"), [(0.002, 0.002), (0.0, 0.0), (-0.1, 0.0), (math.inf, 0.0)]
)
def test_the_gateways_turnaround_is_its_shortest_delay_if_it_had_one(
    shortest: float, turnaround: float
) -> None:
    assert (
        estimate(
            replace(arriving(1.0), shortest_delay=shortest), parse_policy(POLICY), LAW
        ).gateway_turnaround
        == turnaround
    )


def test_a_mean_delay_of_requests_one_by_one_has_the_interval_that_theory_gives_it() -> None:
    window = seen(serve(poisson(25.0, 2000, 1), Engine(most=1), 1), "single")
    values, sojourns = window.judged(), window.judged(sojourn=True)
    theory = single_server_variance(*window.mine.served_in_order())
    with_it, without = mean_interval(values, theory=theory), mean_interval(values)
    assert with_it.half_width != without.half_width
    for found, expected in (
        (observed_mean(window), with_it),
        (observed_mean(replace(window, sequences=np.ones(window.arrivals.size))), without),
        (observed_mean(window, sojourn=True), mean_interval(sojourns)),
    ):
        assert (found.value, found.high - found.value) == pytest.approx(
            (expected.mean, expected.half_width)
        )
        assert found.effective_n == expected.effective_n
