"""What is said of the next minutes comes, nine times in ten."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest

from kendall.queueing.arrivals.text import parse_arrivals
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.outlook import RecentArrivals, band, outlook
from kendall.queueing.estimation.window.window import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_given
from kendall.queueing.simulation.fast import SimulatedRun, Trace
from tests.queueing.estimation_windows import snapshot_of_run

LAW = LatencyModel(k1=2e-3, k2=4e-3, k3=3e-4, k4=6e-3, cv=0.1)
LENGTHS = parse_distribution("geometric:mean=40", 200)
Matrix = npt.NDArray[np.float64]
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=32))


def model(policy: str) -> Queue:
    return Queue.read(policy, LENGTHS, LAW, max_num_seqs=32)


def served(
    policy: str, arrivals: str, seconds: float, seed: int, law: LatencyModel = LAW
) -> SimulatedRun:
    queue, rng = model(policy).but(law=law), np.random.default_rng(seed)
    at = parse_arrivals(arrivals).instants(rng, duration=seconds)
    tokens = LENGTHS.sample(rng, at.size)
    given = Trace(at, tokens, np.ones(at.size, dtype=np.int64))
    return run_given(queue, given, np.random.SeedSequence(seed))


def window(run: SimulatedRun, policy: str, high: float) -> Snapshot:
    """From the begin on, of who arrived and was served by then."""
    whole = snapshot_of_run(run, model(policy))
    return dataclasses.replace(
        whole,
        now=high,
        arrivals=whole.arrivals[whole.arrivals <= high],
        rows=whole.rows[whole.column("server_free_at") <= high],
    )


def ahead_of(before: Snapshot, speed_error: float) -> Matrix:
    """Means of the stretches that follow a window."""
    recent = RecentArrivals()
    recent.add(before)
    assert recent.seconds == pytest.approx(before.now, rel=0.02)
    found = assess(before, LAW, LIMITS)
    assert found.model is not None
    ahead = outlook(before, found.model, recent, speed_error)
    assert ahead is not None
    means = ahead.means(found.model)
    assert means is not None
    return means


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "arrivals"),
    [
        ("dynamic", "poisson:rate=3"),
        ("capped:max_batch_size=4", "mmpp:rates=1/8,durations=20/10"),
        ("single", "poisson:rate=2"),
    ],
)
def test_the_mean_of_the_next_minutes_is_where_it_was_said(policy: str, arrivals: str) -> None:
    inside = 0
    for seed in range(20):
        run = served(policy, arrivals, 1_200.0, seed)
        told = band(ahead_of(window(run, policy, 900.0), 0.02)[0])
        after = (run.arrived_at > 900.0) & (run.arrived_at <= 1_200.0)
        inside += told.low <= run.queueing_delay[after].mean() <= told.high
    assert inside >= 15, "a binomial of 20 at 0.9 is below that once in 90,000 times"


def test_a_stretch_has_the_hours_rate_bursts_and_calls() -> None:
    recent, rng = RecentArrivals(), np.random.default_rng(1)
    at = parse_arrivals("mmpp:rates=1/30,durations=20/10").instants(rng, duration=3_000.0)
    recent.at, recent.sizes, recent.clock = at, 1.0 + (np.arange(at.size) % 2), 3_000.0
    counts, sizes = [], []
    for _ in range(400):
        drawn, size = recent.drawn(300.0, rng)
        assert np.all(np.diff(drawn) >= -300.0)
        assert np.all((drawn >= 0) & (drawn <= 300.0))
        counts.append(drawn.size)
        sizes.append(size.mean())
    assert np.mean(counts) == pytest.approx(300.0 * at.size / 3_000.0, rel=0.05)
    assert np.mean(sizes) == pytest.approx(1.5, rel=0.02)
    assert np.var(counts) > 10 * np.mean(counts), "bursts are kept"


def test_windows_that_overlap_and_gaps_between_epochs_do_not_change_the_rate() -> None:
    at = np.arange(0.0, 100.0, 0.5) + 0.25
    recent = RecentArrivals()
    for start, now in ((0.0, 30.0), (10.0, 40.0), (60.0, 80.0), (60.0, 100.0)):
        recent.add(_of(at[(at > start) & (at <= now)], start, now))
    assert recent.seconds == 80.0
    assert recent.at.size == 160
    assert np.all(np.diff(recent.at) > 0)


def _of(arrivals: np.ndarray, start: float, now: float) -> Snapshot:
    return Snapshot(
        policy="dynamic",
        epoch=0,
        epoch_at=0.0,
        start=start,
        now=now,
        arrivals=arrivals,
        rows=np.empty((0, 16)),
    )


def test_a_constant_rate_drifts_less_than_one_that_moves() -> None:
    steady, moving, short = RecentArrivals(), RecentArrivals(), RecentArrivals()
    rng = np.random.default_rng(3)
    for each, rates in ((steady, [20.0] * 12), (moving, [10.0, 30.0] * 6), (short, [20.0])):
        parts = [
            300.0 * (k + np.sort(rng.random(rng.poisson(300 * rate))))
            for k, rate in enumerate(rates)
        ]
        each.at, each.clock = np.concatenate(parts), 300.0 * len(rates)
        each.sizes = each.tokens = np.ones(each.at.size)
        each.ended_at = each.at
    assert steady.drift(300.0) < 0.08
    assert short.drift(300.0) == pytest.approx(0.2), "nothing was seen to say otherwise"
    assert moving.drift(300.0) > 0.8


def test_without_traffic_there_is_no_outlook() -> None:
    empty = _of(np.empty(0), 0.0, 60.0)
    recent = RecentArrivals()
    recent.add(empty)
    assert outlook(empty, model("dynamic"), recent, 0.0) is None
    assert math.isnan(RecentArrivals().drift(300.0)) is False


def test_what_slowed_the_machine_may_come_in_the_next_minutes_too() -> None:
    means = []
    for law in (LAW, dataclasses.replace(LAW, stall_share=0.1, stall=3.0)):
        run = served("dynamic", "poisson:rate=3", 900.0, 1, law)
        told = ahead_of(window(run, "dynamic", 880.0), 0.0)
        means.append((told[0].mean(), run.queueing_delay.mean()))
    (smooth, _), (stalling, observed) = means
    assert stalling > 1.2 * smooth
    assert stalling == pytest.approx(observed, rel=0.25)


def test_silence_before_the_first_call_is_not_of_the_traffic() -> None:
    at, recent = np.arange(500.0, 560.0, 0.5), RecentArrivals()
    recent.add(_of(np.empty(0), 0.0, 400.0))
    recent.add(_of(at[:3], 380.0, 502.0))
    recent.add(_of(at[at <= 530.0], 410.0, 530.0))
    recent.add(_of(at, 440.0, 560.0))
    assert recent.seconds == pytest.approx(60.0, abs=1.0)
    assert recent.at.size in (at.size - 1, at.size)
