"""Assumptions and self-checks: what lies just inside a threshold holds, what lies just outside does
not; what arrivals meet, the shape of the law, steps and wander, by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.assumptions import engine_assumptions, forecast_assumptions
from kendall.queueing.estimation.assumptions.assumption import LEVEL, StalledDelay
from kendall.queueing.estimation.assumptions.checks import conservation, little_law, utilisation_law
from kendall.queueing.estimation.assumptions.engine_assumptions import (
    constant_speed,
    law_shape,
    no_stalls,
)
from kendall.queueing.estimation.assumptions.forecast_assumptions import (
    all_admitted,
    independent_lengths,
    no_retries,
    number_in_system,
    open_loop,
    settled,
    stable_queue,
)
from kendall.queueing.estimation.change import Change, burstiness
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.lengths.same_lengths import differ
from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.drift import SIGMAS, most_likely
from kendall.queueing.estimation.speed.speed_change import speed_change
from kendall.queueing.estimation.speed.speed_process import stalled
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import SpeedDrift, Stalls
from kendall.queueing.estimation.window.snapshot import COLUMN, Snapshot
from kendall.queueing.estimation.window.window import snapshot_of
from kendall.queueing.measurement.statistics import Interval
from tests.queueing.estimation_runs import Engine, poisson, serve
from tests.queueing.estimation_windows import arrival_assumptions
from tests.queueing.speed_runs import rest, wandering

QUIET = np.random.default_rng(0).exponential(size=1000)
WINDOW = Snapshot(
    policy="single",
    epoch=0,
    epoch_at=0.0,
    start=0.0,
    now=1000.0,
    arrivals=np.arange(1000.0),
    rows=np.empty((0, 13)),
)


@pytest.mark.parametrize(("retries", "holds"), [(0, True), (19, True), (20, False), (500, False)])
def test_retries_are_tolerated_below_two_in_a_hundred(retries: int, holds: bool) -> None:
    found = no_retries(replace(WINDOW, retries=retries))
    assert (found.holds, found.measure) == (holds, retries / 1000)
    assert no_retries(replace(WINDOW, arrivals=np.empty(0))).holds is None


@pytest.mark.parametrize(
    ("share", "delay", "holds"),
    [
        # without a prediction by their share of the busy time
        (0.0199, None, True),
        (0.02, None, False),
        # with one by what they add to it: a tenth of it, and a millisecond
        (0.5, StalledDelay(mean=0.02, smooth=0.0181), True),
        (0.0001, StalledDelay(mean=0.02, smooth=0.0179), False),
        (0.5, StalledDelay(mean=0.009, smooth=0.0081), True),
        (0.5, StalledDelay(mean=0.009, smooth=0.0079), False),
        (0.5, StalledDelay(mean=0.0, smooth=0.0), True),
    ],
)
def test_stalls_are_tolerated_by_their_share_or_by_what_they_cost(
    share: float, delay: StalledDelay | None, holds: bool
) -> None:
    stalls = Stalls(3, share, 2.0, None)
    found = no_stalls(100, stalls, delay)
    assert found.holds == holds
    assert found.measure == pytest.approx(share if delay is None else delay.effect)
    assert "3 stalls hold" in found.says
    assert no_stalls(0, stalls, delay).holds is None
    assert no_stalls(100, Stalls(0, 0.0, 0.0, None), delay).holds


@pytest.mark.parametrize(
    ("effect", "holds"), [(0.0, True), (0.0999, True), (0.1001, False), (None, False)]
)
def test_a_speed_that_wanders_is_tolerated_as_long_as_it_moves_the_delay_by_less_than_a_tenth(
    effect: float | None, holds: bool
) -> None:
    """By 8 %: without a computed effect three times that counts."""
    found = constant_speed(Speeds(wandering(1, 0.08, 40.0)), effect)
    assert found.holds == holds
    assert found.measure == pytest.approx(0.08, rel=0.5)
    assert constant_speed(Speeds(wandering(1, 0.0, 40.0)), effect).holds


@pytest.mark.parametrize(
    ("value", "low", "delays", "holds"),
    [
        (0.99, 0.97, QUIET, True),
        (1.2, 0.999, QUIET, None),  # the estimate may be off: neither headline nor tick
        (1.001, 0.9, QUIET, None),
        (1.2, 1.001, QUIET, False),
        # a growing queue counts near saturation only, and only where it doubles
        (0.94, 0.9, np.arange(1000.0), True),
        (0.96, 0.9, np.arange(1000.0), False),
        (0.96, 0.9, np.arange(99.0), True),
        (0.96, 0.9, np.arange(100.0), False),
        (0.96, 0.9, np.arange(1000.0)[::-1], True),
        (
            0.96,
            0.9,
            np.linspace(1, 4.9, 1000),
            True,
        ),  # 3.925 in the later half, 1.975 in the earlier
        (0.96, 0.9, np.linspace(1, 5.1, 1000), False),
    ],
)
def test_a_queue_is_unstable_by_its_load_or_by_its_growth(
    value: float, low: float, delays: np.ndarray, holds: bool | None
) -> None:
    load = Estimate(value, low, 2 * value - low, 100.0)
    found = stable_queue(load, delays)
    assert (found.holds, found.measure) == (holds, value)
    assert stable_queue(load, delays, kept_finite="patience").holds
    assert ("grows without bound" in found.says) == (holds is False)
    assert ("not known yet" in found.says) == (holds is None)


def test_without_a_load_nothing_is_said_of_stability() -> None:
    found = stable_queue(UNKNOWN, np.arange(1000.0))
    assert (found.name, found.holds, found.says) == ("stable_queue", None, "no law, or no arrivals")
    assert stable_queue(UNKNOWN, np.arange(1000.0), kept_finite="patience").holds


@pytest.mark.parametrize(
    ("relaxation", "about", "holds"),
    [
        # three relaxation times against a fifth of the window of 100 s
        (6.6, {}, True),
        (6.7, {}, False),
        # and the time to serve those who waited when the epoch began: 10 s
        (3.3, {"waiting_before": 100, "free_rate": 10.0}, True),
        (3.4, {"waiting_before": 100, "free_rate": 10.0}, False),
        (6.6, {"waiting_before": 0, "free_rate": 0.0}, True),
        # less what had gone by when the window began
        (8.3, {"since_epoch": 5.0}, True),
        (8.4, {"since_epoch": 5.0}, False),
    ],
)
def test_a_window_is_settled_as_long_as_a_fifth_of_it_or_less_remembers(
    relaxation: float, about: dict[str, float], holds: bool
) -> None:
    given = {"since_epoch": 0.0} | about
    found = settled(100.0, relaxation=relaxation, **given)  # type: ignore[arg-type]
    assert found.holds == holds
    assert found.measure == pytest.approx(0.2, abs=0.01)
    assert (found.says == "settled") == holds
    assert settled(0.0, relaxation=relaxation, **given).holds is False  # type: ignore[arg-type]
    assert settled(100.0, relaxation=math.inf, **given).holds is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "holds"), [(0.0, True), (0.99, True), (-0.99, True), (1.01, False), (-1.01, False)]
)
def test_littles_law_and_the_utilisation_may_be_off_by_the_slack_of_each_event(
    seconds: float, holds: bool
) -> None:
    """Five requests, two seconds each, in a window of 20 s: ten events, each of which may be
    seen half a millisecond too late.
    """
    arrived = np.arange(0.0, 20.0, 4.0)
    left, off = arrived + 2.0, seconds * 10 * 0.0005 / 20
    check = little_law(0.5 + off, arrived, left, 0.0, 20.0)
    assert (check.expected, check.tolerance) == (
        pytest.approx(0.5),
        pytest.approx(10 * 0.0005 / 20),
    )
    assert check.holds == holds
    used = utilisation_law(0.5 + off, (arrived, left, np.zeros(5)), 0.0, 20.0)
    assert (used.expected, used.tolerance) == (pytest.approx(0.5), pytest.approx(10 * 0.0005 / 20))
    assert used.holds == holds
    assert utilisation_law(0.25, (arrived, left, np.zeros(5)), 0.0, 20.0, servers=2).holds


def test_intervals_that_cross_the_edges_of_the_window_are_cut_there() -> None:
    """From 3 to 9 s: one second of the first request, all of the second, one of the third, which
    is still there; two at once count once.
    """
    arrived, left = (
        np.array([0.0, 5.0, 8.0, 8.5, 20.0]),
        np.array([4.0, 7.0, math.inf, math.inf, 30.0]),
    )
    assert little_law(0.0, arrived, left, 3.0, 9.0).expected == pytest.approx((1 + 2 + 1 + 0.5) / 6)
    assert utilisation_law(0.0, (arrived, left, np.zeros(5)), 3.0, 9.0).expected == pytest.approx(
        (1 + 2 + 1) / 6
    )
    assert utilisation_law(
        0.0, (arrived, left, np.array([0, 0, 0, 1, 1])), 3.0, 9.0, servers=2
    ).expected == pytest.approx(4.5 / 12)


def test_one_request_too_many_or_too_few_is_seen() -> None:
    assert conservation(10, {"completed": 6, "failed": 1}, 2, 1).holds
    for arrived in (9, 11):
        check = conservation(arrived, {"completed": 6, "failed": 1}, 2, 1)
        assert not check.holds
        assert (check.expected, check.measured) == (arrived, 10)


@pytest.mark.parametrize(
    ("score", "most", "holds"),
    [
        # 400 arrivals, a variance of 1: 4.5 standard errors are 90 fewer met than on average
        (-89.9, 2.0, True),
        (-90.1, 2.0, False),
        (90.1, 2.0, True),
        # met 100 fewer: of 5 clients, who are never more than a tenth and one beyond that
        (-100.0, 6.4, False),
        (-100.0, 6.6, True),
    ],
)
def test_a_loop_is_closed_by_what_arrivals_meet_and_by_how_many_there_ever_are(
    score: float, most: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None and two in the system in turn, and `most` of them for no time at all."""
    at = np.insert(np.arange(401.0), 200, 200.0)
    number = np.insert(np.append(np.tile([0.0, 2.0], 200), 0.0), 200, most)
    monkeypatch.setattr(
        forecast_assumptions,
        "number_in_system",
        lambda _: (np.full(400, 1 + score / 400), at, number),
    )
    found = open_loop(replace(WINDOW, arrivals=np.arange(400.0)))
    assert (found.holds, found.measure) == (holds, pytest.approx(score / 20))
    assert holds or found.says.startswith(f"about {1 + 400 / -score:.0f} clients")
    assert open_loop(replace(WINDOW, arrivals=np.arange(99.0))).holds is None
    assert open_loop(replace(WINDOW, arrivals=np.arange(100.0))).holds is holds


@pytest.mark.parametrize(("count", "judged"), [(99, False), (100, True)])
def test_arrivals_are_judged_from_a_hundred_on(count: int, judged: bool) -> None:
    rate, process = arrival_assumptions(poisson(1.0, count, 1))
    assert (rate.holds, process.holds) == ((True, True) if judged else (None, None))
    explained = arrival_assumptions(poisson(1.0, count, 1), explained=True)
    assert [each.holds for each in explained] == [None, None]


@pytest.mark.parametrize(
    ("changed_at", "pieces", "passes", "holds"),
    [
        # one change or two between pieces that pass: the rate changed
        ([100.0], [100, 200], True, (False, True)),
        ([100.0, 200.0], [100, 100, 100], True, (False, True)),
        # none, three, or a piece that does not pass: they are not Poisson
        ([], [], True, (None, False)),
        ([60.0, 120.0, 180.0], [], True, (None, False)),
        ([100.0], [100], False, (None, False)),
        # pieces of 50 arrivals at least are asked
        ([50.0], [50, 250], True, (False, True)),
        ([49.0], [251], True, (False, True)),
    ],
)
def test_few_changes_between_poisson_pieces_are_changes_of_the_rate(
    changed_at: list[float],
    pieces: list[int],
    passes: bool,
    holds: tuple[bool | None, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 arrivals at equal distances, which are not Poisson."""
    asked: list[int] = []

    def judged(piece: np.ndarray, significance: float) -> SimpleNamespace:
        asked.append(piece.size)
        return SimpleNamespace(poisson=passes and significance == LEVEL)

    monkeypatch.setattr(
        forecast_assumptions, "changes", lambda _: [Change(at, at + 1, 2.0) for at in changed_at]
    )
    monkeypatch.setattr(forecast_assumptions, "audit_arrivals", judged)
    rate, process = arrival_assumptions(np.arange(300.0))
    assert (rate.holds, process.holds) == holds
    assert asked == pieces


@pytest.mark.parametrize(("ratio", "above"), [(0.4226, False), (0.4229, True)])
def test_gaps_are_bursty_from_three_standard_errors_on(ratio: float, above: bool) -> None:
    """100 pairs: a third and three times sqrt(4 / 45 / 100); of a mean m the squared coefficient
    is 2 m / (1 - m).
    """
    gaps = np.tile([1 + math.sqrt(ratio), 1 - math.sqrt(ratio)], 100)
    assert burstiness(gaps) == pytest.approx(2 * ratio / (1 - ratio) if above else 1.0)


FIVE = np.arange(5.0)  # in turn: the mean of the five before is always the same


def in_turn(count: int, moved: float, by: str = "batch size") -> BatchTimes:
    """Batches without scatter, whose times move by that factor's logarithm from the smallest to
    the largest, or from short to long.
    """
    turn, ones = np.resize(FIVE, count), np.ones(count)
    ratio = np.exp(moved * turn / 4)
    size, decoding = (2**turn, 0.5 * ones) if by == "batch size" else (ones, 0.1 + 0.2 * turn)
    return BatchTimes(np.arange(count, dtype=float), ratio, ones, size, ones, decoding)


@pytest.mark.parametrize(
    ("moved", "count", "holds"),
    [
        (0.0799, 500, True),
        (0.0801, 500, False),
        (-0.0799, 500, True),
        (-0.0801, 500, False),
        (0.2, 100, False),
        (0.2, 99, None),
    ],
)
@pytest.mark.parametrize("by", ["batch size", "length"])
def test_a_law_may_miss_less_than_8_percent_between_small_and_large(
    moved: float, count: int, holds: bool | None, by: str
) -> None:
    found = law_shape(in_turn(count, moved, by))
    assert found.holds is holds
    if holds is False:
        assert found.measure == pytest.approx(abs(moved))
        assert f"on the {by}: {abs(moved):.0%}" in found.says
    judged = law_shape(in_turn(count, moved, by), constant=False).holds
    assert judged is (False if holds is False and by == "length" else None), (
        "sizes are not judged where the speed changes"
    )


@pytest.mark.parametrize(("errors", "holds"), [(4.51, False), (4.49, True)])
def test_a_law_misses_only_beyond_four_and_a_half_standard_errors(
    errors: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = in_turn(500, 0.2)
    column = np.log(times.size)[6:]
    scatter = (
        0.2 / math.log(16) / errors * float(np.sum((column - column.mean()) ** 2)) / column.size
    )
    told = Interval(0.0, 2.093 * scatter, column.size, 20.0, 0.0)
    monkeypatch.setattr(engine_assumptions, "batch_means_interval", lambda _: told)
    assert law_shape(times).holds == holds


def stepped(step: float, uneven: float = 0.0) -> BatchTimes:
    """480 batches in 24 blocks of 20, a log speed of `step` more in the later half and every
    other block `uneven` off.
    """
    block = np.arange(480) // 20
    log = (
        np.where(block >= 12, step, 0.0)
        + np.where(block % 2, uneven, -uneven)
        + np.where(np.arange(480) % 2, 0.01, -0.01)
    )
    ones = np.ones(480)
    return BatchTimes(np.arange(480.0), np.exp(log), ones, ones, ones, 0.5 * ones)


@pytest.mark.parametrize(
    ("step", "uneven", "found"),
    [
        # a tenth of the log speed, up or down
        (0.1001, 0.0, True),
        (0.0999, 0.0, False),
        (-0.1001, 0.0, True),
        (-0.0999, 0.0, False),
        # four fifths of what is not constant: 0.2^2 of 0.2^2 + 0.1^2
        (0.4, 0.0995, True),
        (0.4, 0.101, False),
    ],
)
def test_a_step_of_the_speed_is_a_tenth_and_explains_four_fifths(
    step: float, uneven: float, found: bool
) -> None:
    change = speed_change(stepped(step, uneven))
    assert (change is not None) == found
    if change is not None:
        assert (change.at, change.ratio) == (
            pytest.approx(239.5, abs=0.5),
            pytest.approx(math.exp(step)),
        )
        assert ("slower" if step > 0 else "faster") in constant_speed(
            Speeds(stepped(step, uneven))
        ).says


@pytest.mark.parametrize(
    ("measured", "fitted", "stalls"),
    [
        # three times as long as usual
        (3.01, 1.0, True),
        (2.99, 1.0, False),
        # and longer by an average batch, of 0.991 s here
        (1.092, 0.1, True),
        (1.09, 0.1, False),
    ],
)
def test_a_batch_stalled_where_it_took_three_times_its_time_and_an_average_batch_more(
    measured: float, fitted: float, stalls: bool
) -> None:
    ones = np.ones(100)
    times = BatchTimes(
        np.arange(100.0),
        np.append(ones[1:], measured),
        np.append(ones[1:], fitted),
        ones,
        ones,
        ones,
    )
    assert stalled(times).tolist() == [False] * 99 + [stalls]


@pytest.mark.parametrize(
    ("arrivals", "silence", "ended"),
    [
        # twenty mean gaps
        (np.arange(11.0), 19.9, False),
        (np.arange(11.0), 20.1, True),
        # or three times the largest, of 10 s
        (np.append(np.arange(101.0), 110.0), 29.9, False),
        (np.append(np.arange(101.0), 110.0), 30.1, True),
        # of ten arrivals at least
        (np.arange(9.0), 1000.0, False),
        (np.arange(10.0), 1000.0, True),
    ],
)
def test_requests_have_stopped_after_a_silence_that_these_arrivals_do_not_make(
    arrivals: np.ndarray, silence: float, ended: bool
) -> None:
    last = float(arrivals[-1])
    assert while_requests_came(replace(WINDOW, arrivals=arrivals, now=last + silence)).now == (
        last if ended else last + silence
    )


@pytest.mark.parametrize(("share", "significant"), [(6.49, False), (6.51, True)])
def test_a_wander_is_significant_from_a_likelihood_on_and_its_interval_ends_where_it_drops(
    share: float, significant: bool
) -> None:
    likelihood = np.full((2, SIGMAS.size), -30.0)
    likelihood[:, 0] = -share
    likelihood[1, 9:12] = -1.91, 0.0, -1.93
    found = most_likely(likelihood, np.array([1.0, 2.0]), span=100.0, fast_cv=0.1)
    assert (found.significant, found.tau) == (significant, 2.0)
    assert (found.sigma.low, found.sigma.value, found.sigma.high) == (
        SIGMAS[8],
        SIGMAS[10],
        SIGMAS[11],
    )


@pytest.mark.parametrize(
    ("count", "above", "differs"),
    [
        # of 10,000 each: five in a hundred
        (10_000, 5499, False),
        (10_000, 5501, True),
        (10_000, 4501, False),
        (10_000, 4499, True),
        # of 100 each: 1.95 sqrt(2 / 100), which is 27.6 in a hundred
        (100, 77, False),
        (100, 78, True),
        (100, 23, False),
        (100, 22, True),
    ],
)
def test_lengths_differ_beyond_chance_and_five_in_a_hundred(
    count: int, above: int, differs: bool
) -> None:
    """Half of the one sample and `above` of the other go beyond one token."""
    half, other = (lengths([2] * number + [1] * (count - number)) for number in (count // 2, above))
    assert differ(half, other) == differ(other, half) == differs


def test_arrivals_meet_who_is_there_and_those_of_before_count() -> None:
    """From 10 to 20 s: two were there, one of them without an answer; one left before, one
    stays; one was lost at 17.5 s.
    """
    ends = {
        8.0: (12.0, 12.0),
        9.0: (math.nan, 14.0),
        11.0: (15.0, 15.5),
        13.0: (25.0, 25.0),
        5.0: (9.0, 9.0),
    }
    rows = np.zeros((len(ends), len(COLUMN)))
    for place, (arrived, (released, free)) in enumerate(ends.items()):
        rows[place, [COLUMN["arrived_at"], COLUMN["released_at"], COLUMN["server_free_at"]]] = (
            arrived,
            released,
            free,
        )
    arrivals, lost = np.array([11.0, 13.0, 16.0]), np.array([17.5])
    seen = replace(WINDOW, start=10.0, now=20.0, arrivals=arrivals, rows=rows, lost_at=lost)
    met, at, number = number_in_system(seen)
    assert met.tolist() == [2, 2, 1]
    assert at.tolist() == [10, 11, 12, 13, 14, 15, 16, 17.5, 20]
    assert number.tolist() == [2, 3, 2, 3, 2, 1, 2, 1, 1]
    met, _, number = number_in_system(replace(seen, sequences=np.array([1.0, 3.0, 1.0])))
    assert met.tolist() == [2, 2, 3]
    assert number.tolist() == [2, 3, 2, 5, 4, 3, 4, 3, 3]
    last = replace(seen, now=15.0, arrivals=np.array([11.0, 13.0, 15.0]), lost_at=np.empty(0))
    assert number_in_system(last)[0].tolist() == [2, 2, 1], "who leaves then is gone already"
    later = replace(seen, start=12.0, arrivals=arrivals[1:])
    assert number_in_system(later)[0].tolist() == [2, 1], "and was not there who left then"


def test_an_open_loop_is_judged_by_what_arrivals_meet_against_the_time_average() -> None:
    """z = sum (met - mean) / sqrt(N var), by the clock."""
    window = served(100)
    met, at, number = number_in_system(window)
    spans = np.diff(at)
    mean = sum(number[i] * spans[i] for i in range(spans.size)) / spans.sum()
    variance = sum((number[i] - mean) ** 2 * spans[i] for i in range(spans.size)) / spans.sum()
    found = open_loop(window)
    assert found.holds
    assert found.measure == pytest.approx(sum(met - mean) / math.sqrt(100 * variance))
    assert open_loop(served(99)).holds is None


def served(count: int) -> Snapshot:
    """Single requests, each for a fixed time, Poisson arrivals."""
    records = serve(poisson(20.0, count, 4), Engine(most=1), 4)
    found = snapshot_of(records, "single", 0.0, float(records[-1].released_at or 0.0))
    assert found.arrivals.size == count
    return found


def test_a_closed_loop_is_one_from_four_and_a_half_errors_on() -> None:
    """Six clients, each thinking for 0.1 s, before a server that takes one at a time: z falls
    with the root of the number.
    """
    found = {}
    for count in (150, 200, 300, 400, 600, 1000):
        records = serve(
            np.linspace(0, 0.1, 6),
            Engine(most=1),
            1,
            again=lambda end, rng: end + rng.exponential(0.1),
            most=count,
        )
        judged = open_loop(
            snapshot_of(records, "single", 0.0, float(records[-1].released_at or 0.0))
        )
        found[judged.measure] = judged.holds
    assert all(holds == (z > -4.5) for z, holds in found.items())
    assert any(-9 < z <= -4.5 for z in found)
    assert any(z > -4.5 for z in found)


def steps_of(speeds: Speeds, sigma: float, *, significant: bool) -> Speeds:
    """With that wander in place of its own."""
    slow = SpeedDrift(
        Estimate(sigma, 0.5 * sigma, 2 * sigma, 50.0), 20.0, 0.1, significant=significant
    )
    vars(speeds)["slow"], vars(speeds)["step"] = slow, None
    return speeds


@pytest.mark.parametrize(
    ("sigma", "significant", "holds"),
    [(0.033, True, True), (0.034, True, False), (0.5, False, True), (math.nan, True, None)],
)
def test_without_a_computed_effect_three_standard_deviations_of_the_speed_count(
    sigma: float, significant: bool, holds: bool | None
) -> None:
    found = constant_speed(
        steps_of(Speeds(wandering(1, 0.0, 40.0)), sigma, significant=significant), None
    )
    assert found.holds == holds
    if holds is False:
        assert "by 3.4% over 20 s" in found.says
        assert "moves by 10%" in found.says


@pytest.mark.parametrize(("factor", "word"), [(2.0, "slower"), (0.5, "faster")])
def test_a_step_of_the_speed_is_told_with_its_direction(factor: float, word: str) -> None:
    times = wandering(3, 0.0, 40.0)
    stepped = BatchTimes(
        times.at, times.measured * np.where(times.at > 600, factor, 1.0), *rest(times)
    )
    found = constant_speed(Speeds(stepped))
    assert (found.holds, found.measure) == (False, pytest.approx(factor, rel=0.1))
    assert f"became {word} by a factor of " in found.says


def shaped(slope: float, count: int = 2000, noise: float = 1e-3, *, by: str = "size") -> BatchTimes:
    """Batches of 1 to 8 whose ratio goes with the size, or with the share of decoding (from 0.1
    to 0.9), to that power.
    """
    rng = np.random.default_rng(7)
    size, decoding = rng.integers(1, 9, count).astype(float), rng.uniform(0.1, 0.9, count)
    ratio = np.exp(
        slope * (np.log(size) if by == "size" else decoding) + noise * rng.normal(size=count)
    )
    ones = np.ones(count)
    return BatchTimes(np.arange(count) * 1.0, ratio, ones, size, ones, decoding)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("by", "words", "spread"), [("size", "batch size", math.log(8)), ("decoding", "length", 0.64)]
)
@pytest.mark.parametrize(("moved", "holds"), [(0.07, True), (0.09, False)])
def test_a_shape_fails_where_it_moves_the_time_by_eight_per_cent(
    sign: int, by: str, words: str, spread: float, moved: float, holds: bool
) -> None:
    """Between the tenth and the ninetieth percentile: sizes of 1 and 8, shares of 0.18 and 0.82."""
    found = law_shape(shaped(sign * moved / spread, by=by))
    assert found.holds == holds
    assert found.measure == (0.0 if holds else pytest.approx(moved, rel=0.05))
    if not holds:
        assert words in found.says


@pytest.mark.parametrize(
    ("noise", "holds"), [(0.03, False), (0.28, False), (0.3, True), (0.35, True)]
)
def test_a_shape_that_chance_could_have_made_holds(noise: float, holds: bool) -> None:
    """More than a tenth between small and large, by 40, 4.7, 4.3 and 3.4 errors of the scatter."""
    assert law_shape(shaped(0.08, noise=noise)).holds == holds


def test_a_shape_is_judged_of_a_hundred_batches() -> None:
    assert law_shape(shaped(0.2, 99)).holds is None
    assert law_shape(shaped(0.2, 100)).holds is not None
    flat = shaped(0.0)
    assert (
        law_shape(BatchTimes(flat.at, flat.measured, *(np.ones(flat.count),) * 4)).says
        == "the length does not vary"
    )


def growing(inversions: int) -> np.ndarray:
    """A thousand delays in ten blocks, each longer than the one before but for neighbours that
    change places.
    """
    levels = list(np.linspace(1, 60, 10))
    for place in range(0, 2 * min(inversions, 5), 2):
        levels[place], levels[place + 1] = levels[place + 1], levels[place]
    if inversions > 5:
        levels[1], levels[2] = levels[2], levels[1]
    return np.repeat(levels, 100)


@pytest.mark.parametrize(("inversions", "holds"), [(0, False), (5, False), (6, True)])
def test_a_queue_grows_from_thirty_five_rises_of_forty_five_on(
    inversions: int, holds: bool
) -> None:
    """Each pair of blocks in the wrong order takes two off."""
    found = stable_queue(Estimate(0.96, 0.9, 1.02, 100.0), growing(inversions))
    assert found.holds == holds


def test_without_time_there_is_no_law_to_hold() -> None:
    nothing = utilisation_law(0.5, (np.zeros(1), np.ones(1), np.zeros(1)), 2.0, 2.0)
    assert not nothing.holds
    assert (nothing.measured, nothing.tolerance) == (0.5, 0.0)
    assert math.isnan(nothing.expected)


def test_where_the_speed_changes_only_the_lengths_accuse() -> None:
    by_length, by_size = (
        law_shape(shaped(0.3, by=by), constant=False) for by in ("decoding", "size")
    )
    assert (by_length.holds, by_size.holds) == (False, None)
    assert "length" in by_length.says
    assert (
        by_size.says
        == "right for the lengths; not judged for the sizes, which change with the speed"
    )
    assert by_length == law_shape(shaped(0.3, by="decoding"))


def test_a_batch_is_held_against_the_five_before_the_last() -> None:
    """The slope between small and large, by hand."""
    times = shaped(0.3, noise=0.05)
    logs, sizes = np.log(times.ratio), np.log(times.size)
    against = [logs[i] - logs[i - 6 : i - 1].mean() for i in range(6, times.count)]
    slope = np.polyfit(sizes[6:], against, 1)[0]
    found = law_shape(times)
    assert "batch size" in found.says
    low, high = np.quantile(sizes[6:], [0.1, 0.9])
    assert found.measure == pytest.approx(slope * (high - low))


@pytest.mark.parametrize("power", [1, 2])
def test_what_the_size_says_of_the_lengths_is_taken_away_up_to_its_square(power: int) -> None:
    """Both the ratio and the share of decoding go with that power of the logarithm of the size."""
    times = shaped(0.0)
    logs = np.log(times.size) ** power
    own = 1e-3 * np.random.default_rng(3).normal(size=times.count)
    times = replace(times, measured=times.measured * np.exp(0.3 * logs), decoding=0.1 * logs + own)
    assert law_shape(times, constant=False).holds is None


ALIKE = "the lengths in a call have an intraclass correlation of 0.25"


@pytest.mark.parametrize(
    ("alike", "mean", "worth", "holds", "says"),
    [
        (None, 0.1, 1.0, None, "not judged: every call is of one sequence"),
        (
            UNKNOWN,
            0.1,
            1.0,
            None,
            "not judged: too few calls of several sequences, or all answers are equally long",
        ),
        (Estimate(0.25, 0.0, 0.5), 0.1, 2.0, True, "the lengths in a call are independent"),
        (Estimate(0.25, 0.01, 0.5), None, 1.0, None, ALIKE),
        (
            Estimate(0.25, 0.01, 0.5),
            0.1,
            0.91,
            True,
            f"{ALIKE}: drawn independently, the predicted mean would be 91 ms, not 100 ms; the "
            "prediction draws lengths by call",
        ),
        (
            Estimate(0.25, 0.01, 0.5),
            0.1,
            1.11,
            False,
            f"{ALIKE}: drawn independently, the predicted mean would be 111 ms, not 100 ms; the "
            "prediction draws lengths by call",
        ),
        (
            Estimate(0.25, 0.01, 0.5),
            0.001,
            0.1,
            True,
            f"{ALIKE}: drawn independently, the predicted mean would be 0.1 ms, not 1 ms; the "
            "prediction draws lengths by call",
        ),
        (
            Estimate(0.25, 0.01, 0.5),
            0.002,
            1e6,
            False,
            f"{ALIKE}: drawn independently, the predicted mean would be without bound, not 2 ms; "
            "the prediction draws lengths by call",
        ),
    ],
)
def test_lengths_in_a_call_matter_by_a_tenth_and_a_millisecond(
    alike: Estimate | None, mean: float | None, worth: float, holds: bool | None, says: str
) -> None:
    found = independent_lengths(alike, mean, worth)
    assert (found.name, found.holds, found.says) == ("independent_lengths", holds, says)
    if alike is not None and alike.known:
        assert found.measure == 0.25


def test_refused_calls_are_named_by_limit_the_most_first() -> None:
    told = all_admitted(replace(WINDOW, refused={"rate": 100, "none": 0, "slo": 150}))
    assert (told.holds, told.measure) == (False, 0.2)
    assert "20.0% of the calls were refused" in told.says
    assert "(slo 12.0%, rate 8.0%)" in told.says
    assert all_admitted(replace(WINDOW, refused={"slo": 20})).says == (
        "2.0% of the calls were refused"
    )
    nothing = all_admitted(replace(WINDOW, arrivals=np.empty(0)))
    assert (nothing.holds, nothing.says) == (None, "no arrivals")
