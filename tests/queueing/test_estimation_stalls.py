"""A live prediction under stalls: on a run recorded from the real engine, and wherever a few stalls
fall in a simulated one.

`samples/hiccups.jsonl.gz` was recorded by the gateway (tiny model on vLLM's CPU build, capped at 8,
Poisson arrivals of 10/s, geometric answers of 48 tokens on average) on a shared machine; the
engine's process was stopped for 67 ms twice, while it served an answer of one token. `CALIBRATED`
is what the engine's calibration before the run gave. A third stall was the machine's own.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies import parse_policy
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption, StalledDelay
from kendall.queueing.estimation.assumptions.engine_assumptions import no_stalls
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.speed.batch_times import BatchTimes, batch_times
from kendall.queueing.estimation.speed.slot_stalls import slot_stalls
from kendall.queueing.estimation.speed.speed_process import residual_cv, stalled, stalls
from kendall.queueing.estimation.window.window import Snapshot, snapshot_of
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.fit import Measured, fit_law
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed import residual_cv as run_cv
from kendall.queueing.measurement.record import Record, read_run
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import poisson, record_of, seen
from tests.queueing.estimation_windows import window_of

POLICY = "capped:max_batch_size=8"
SAMPLE = Path(__file__).parent / "samples" / "hiccups.jsonl.gz"
CALIBRATED = LatencyModel(
    k1=0.0004850452664883736,
    k2=0.0020340680235056037,
    k3=3.132981079824513e-05,
    k4=0.0011077713505104891,
    kp=2.3196392952673147e-08,
)
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=64))
LAW = LatencyModel(k1=0.0003, k2=0.0011, k3=0.00002, k4=0.0006, cv=0.12)
RATE, COUNT = 10.0, 400
LENGTHS = parse_distribution("geometric:mean=48", 512)


class Run:
    """The same arrivals, lengths and residuals whichever batches stall: a capped server, batch
    by batch.
    """

    def __init__(self, seed: int, law: LatencyModel = LAW) -> None:
        rng = np.random.default_rng(seed)
        self.law = law
        self.arrivals = poisson(RATE, COUNT, seed)
        self.lengths = LENGTHS.sample(rng, COUNT)
        self.residuals = [law.residual(rng) for _ in range(COUNT)]

    def records(self, stalling: dict[int, float]) -> list[Record]:
        """`stalling`: seconds that the batch of the request with that number loses."""
        found: list[Record] = []
        head, free, batch = 0, 0.0, 0
        while head < COUNT:
            start = max(free, float(self.arrivals[head]))
            last = head + 1
            while last < min(head + 8, COUNT) and self.arrivals[last] <= start:
                last += 1
            lost = sum(stalling.get(each, 0.0) for each in range(head, last))
            free = (
                start
                + self.law.padded(last - head, int(self.lengths[head:last].max()))
                * self.residuals[head]
                + lost
            )
            members = zip(
                self.arrivals[head:last].tolist(), self.lengths[head:last].tolist(), strict=True
            )
            found += [
                record_of(head + i, batch, last - head, arrived, start, free, count)
                for i, (arrived, count) in enumerate(members)
            ]
            head, batch = last, batch + 1
        return found


RUN = Run(1)


def of(records: list[Record]) -> Estimates:
    return estimate(seen(records, POLICY), parse_policy(POLICY), LAW)


def mean_delay(law: LatencyModel, found: Estimates) -> float:
    """By theory, at the window's rate and lengths, seconds."""
    model = Queue.read(POLICY, found.output_tokens.law(), law)
    mean = predict_model(model, found.arrival_rate.value).queueing_delay.mean
    assert mean is not None
    return mean


@cache
def recorded() -> Assessment:
    """The recorded run, assessed as a gateway does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hiccups.jsonl"
        path.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
        _, records = read_run(path)
    first = min(each.arrived_at or math.inf for each in records)
    window = snapshot_of(
        records, POLICY, first - 0.1, max(each.released_at or 0.0 for each in records), epoch=1
    )
    return assess(window, CALIBRATED, LIMITS)


def test_two_hiccups_on_short_answers_of_a_real_engine_do_not_spoil_the_prediction() -> None:
    """The plain deviation of measured / fitted was 0.96 here, and the prediction 1.7 times what
    was observed.
    """
    found = recorded()
    assert found.compared.predicted.value == pytest.approx(found.compared.observed.value, rel=0.15)
    assert found.estimates.stalls.count == 3
    assert found.estimates.cv.value < 0.15
    assert found.model is not None
    assert (found.model.engine.law.stall_share, found.model.engine.law.stall) == (
        found.estimates.stalls.time_share,
        found.estimates.stalls.size,
    )


QUICK = LatencyModel(k1=0.0002, k2=0.0009, k3=0.00001, k4=0.0006, cv=0.12)  # 1.7 ms for one token
HICCUPS, HICCUP = 2, 0.067
SLACK = 0.001  # of the mean: what the lattice leaves


@cache
def hiccupping(seed: int, *, calm: bool = False) -> Snapshot:
    """Two hiccups of 67 ms on answers of one token that are served alone, in 400 requests."""
    run = Run(seed, QUICK)
    alone = [
        int(each.request_id)
        for each in run.records({})
        if each.batch_size == 1 and each.output_tokens == 1
    ]
    return seen(run.records({} if calm else dict.fromkeys(alone[:HICCUPS], HICCUP)), POLICY)


def live(window: Snapshot) -> Assessment:
    return assess(window, QUICK, LIMITS)


def predicted_over_observed(seed: int) -> float:
    """Of a run as bad as the one that was reported: plain deviation 2.37, and with it a
    prediction 5 to 8 times what is observed.
    """
    window = hiccupping(seed)
    times = batch_times(parse_policy(POLICY), window.mine, QUICK)
    plain = float(times.ratio.std() / times.ratio.mean())
    assert plain == pytest.approx(2.37, abs=0.05)
    found = live(window)
    predicted, observed = found.compared.predicted.value, found.compared.observed.value
    assert (
        mean_delay(replace(found.estimates.law(QUICK).without_stalls(), cv=plain), found.estimates)
        > 5 * observed
    )
    assert found.estimates.cv.value < 0.15
    (says,) = (each for each in found.compared.assumptions if each.name == "no_stalls")
    assert says.says.startswith("2 stalls hold ")
    assert says.says.endswith(" ms of the predicted delay")
    return predicted / observed


def test_two_hiccups_on_one_token_do_not_multiply_the_prediction() -> None:
    """78.5 ms were predicted, and 10.3 ms observed."""
    assert predicted_over_observed(1) == pytest.approx(1, abs=0.15)


@pytest.mark.slow
def test_two_hiccups_on_one_token_leave_the_prediction_right_on_average() -> None:
    assert np.mean([predicted_over_observed(seed) for seed in range(8)]) == pytest.approx(
        1, abs=0.05
    )


@pytest.mark.parametrize("every", [150, pytest.param(15, marks=pytest.mark.slow)])
def test_no_batch_moves_the_prediction_by_more_than_its_own_share(every: int) -> None:
    """Its share of the busy time, carried over by the load as any second of it, and its share of
    the squares, which E[H^2] is made of.
    """
    base = live(hiccupping(0, calm=True))
    assert base.long_run is not None
    speed = base.long_run.speed_elasticity
    times = batch_times(parse_policy(POLICY), hiccupping(0, calm=True).mine, QUICK)
    run = Run(0, QUICK)
    records = run.records({})
    first = {each.batch_id: each for each in reversed(records)}
    for batch in list(first)[5::every]:
        took = (first[batch].server_free_at or 0.0) - (first[batch].dispatched_at or 0.0)
        for lost in (took / 2, 2 * took, HICCUP):
            found = live(seen(run.records({int(first[batch].request_id): lost}), POLICY))
            moved = found.compared.predicted.value / base.compared.predicted.value - 1
            time, squares = (
                lost / times.measured.sum(),
                ((took + lost) ** 2 - took**2) / (times.measured**2).sum(),
            )
            assert abs(moved) <= 1.1 * ((1 + speed) * time + squares) + SLACK, (
                batch,
                took,
                lost,
                moved,
            )


def test_stalls_are_named_with_what_they_cost() -> None:
    says = {each.name: each for each in recorded().compared.assumptions}["no_stalls"]
    assert says.holds
    assert says.says.endswith("ms of the predicted delay")
    seconds = float(says.says.split(": ")[1].split(" ms")[0]) / 1000
    found = recorded()
    assert found.prediction is not None
    assert found.model is not None
    smooth = predict_model(
        found.model.but(law=found.model.engine.law.without_stalls()),
        found.estimates.arrival_rate.value,
    )
    assert seconds == pytest.approx(
        (found.prediction.queueing_delay.mean or 0.0) - (smooth.queueing_delay.mean or 0.0),
        rel=0.01,
    )


@pytest.mark.slow
def test_wherever_a_few_stalls_fall_the_prediction_moves_by_their_own_effect() -> None:
    """Own effect: theory's with the true law and stalls of that number and size, which the
    simulator confirms (test_stalls).
    """
    rng = np.random.default_rng(0)
    plain = of(RUN.records({}))
    busy = float(
        batch_times(parse_policy(POLICY), seen(RUN.records({}), POLICY).mine, LAW).measured.sum()
    )
    for _ in range(100):
        number, size = int(rng.integers(1, 6)), float(rng.uniform(0.03, 0.3))
        records = RUN.records(
            dict.fromkeys(rng.choice(COUNT, number, replace=False).tolist(), size)
        )
        found = of(records)
        predicted = mean_delay(found.law(LAW), found)
        share = number * size / (busy + number * size)
        true = replace(
            plain.law(LAW), speed=plain.speed.value / (1 - share), stall_share=share, stall=size
        )
        assert predicted == pytest.approx(mean_delay(true, plain), rel=0.1), (number, size)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_hiccup_on_one_token_leaves_the_residual_alone(number: int) -> None:
    short = np.flatnonzero(RUN.lengths <= 2)[:number].tolist()
    plain, hiccups = of(RUN.records({})), of(RUN.records(dict.fromkeys(short, 0.067)))
    assert hiccups.cv.value == pytest.approx(plain.cv.value, abs=0.01)
    assert hiccups.stalls.count == number
    assert hiccups.stalls.size == pytest.approx(0.067, rel=0.02)
    own = number * 0.067**2 * RATE / (2 * COUNT / RATE)  # of an idle machine, by a stall a second
    assert mean_delay(hiccups.law(LAW), hiccups) < 1.1 * mean_delay(plain.law(LAW), plain) + 2 * own


@given(seed=st.integers(0, 10_000), extra=st.floats(0, 5), at=st.integers(0, 199))
@settings(max_examples=60, deadline=None)
def test_no_batch_that_is_no_stall_weighs_more_than_four_of_its_length_or_one_on_average(
    seed: int, extra: float, at: int
) -> None:
    rng = np.random.default_rng(seed)
    fitted = LAW.k2 + LAW.k4 * LENGTHS.sample(rng, 200)
    measured = fitted * rng.gamma(70, 1 / 70, 200)
    times, slower = (
        _times(each, fitted)
        for each in (measured, measured + extra * fitted.mean() * (np.arange(200) == at))
    )
    kept = ~stalled(slower)
    part = slower.part(kept)
    squares = residual_cv(part).value ** 2 * (part.fitted**2).sum()
    before = residual_cv(times).value ** 2 * (fitted**2).sum()
    assert squares - before <= 1.3 * max(4 * fitted[at] ** 2, fitted.mean() ** 2)
    assert stalls(slower).count == 200 - kept.sum()


def _times(measured: np.ndarray, fitted: np.ndarray) -> BatchTimes:
    ones = np.ones(measured.size)
    return BatchTimes(np.cumsum(2 * measured), measured, fitted, ones, ones, ones)


def judged(times: BatchTimes, stalled: StalledDelay | None = None) -> Assumption:
    return no_stalls(times.count, stalls(times), stalled)


def test_stalls_fail_by_what_they_cost() -> None:
    times = _times(np.where(np.arange(200) == 50, 0.3, 0.03), np.full(200, 0.03))
    dear, cheap, tiny = (
        StalledDelay(0.012, 0.010),
        StalledDelay(0.012, 0.0115),
        StalledDelay(0.0012, 0.0006),
    )
    assert [judged(times, each).holds for each in (dear, cheap, tiny)] == [False, True, True]
    assert (
        judged(times, dear).says
        == "1 stall holds 4.3% of the busy time, the longest 0.27 s: 2 ms of the predicted delay"
    )
    assert not judged(times).holds


def test_stalls_of_slots_count_once_whoever_was_in_service() -> None:
    """Two overlap a stall of 0.2 s, a third meets another one alone; the sizes are those of the
    largest excess.
    """
    at = np.arange(100) * 0.05
    measured = np.full(100, 0.04)
    measured[[10, 60]] += 0.2
    at[11], measured[11] = at[10] + 0.01, 0.04 + 0.19
    ones = np.ones(100)
    slots = BatchTimes(at, measured, np.full(100, 0.04), ones, ones, ones)
    found = slot_stalls([slots])
    assert (found.count, found.last_at) == (2, at[60])
    assert found.size == pytest.approx(0.2)
    assert found.time_share == pytest.approx(0.4 / _union(at, at + measured))
    assert slot_stalls([slots.part(np.delete(np.arange(100), [10, 11, 60]))]).count == 0


def _union(starts: np.ndarray, ends: np.ndarray) -> float:
    """Seconds covered, counted by the millisecond."""
    clock = np.arange(0.0, ends.max(), 1e-3) + 5e-4
    return 1e-3 * sum(bool(((starts <= t) & (t < ends)).any()) for t in clock)


def test_stalls_fail_from_a_tenth_of_the_prediction() -> None:
    times = _times(np.where(np.arange(200) == 50, 0.3, 0.03), np.full(200, 0.03))
    dear, cheap = StalledDelay(0.0224, 0.020), StalledDelay(0.0218, 0.020)
    assert [judged(times, each).holds for each in (dear, cheap)] == [False, True]
    assert judged(times, dear).says.endswith("2.4 ms of the predicted delay")


@pytest.mark.parametrize("policy", [POLICY, "dynamic"])
def test_elasticities_of_a_window_with_stalls_are_those_of_theory(policy: str) -> None:
    """By the sample paths of a law that stalls they were anything from -2 to 5."""
    parsed = parse_policy(policy)
    stalling = replace(LAW, stall_share=0.05, stall=0.1)
    model = Queue.read(parsed, LENGTHS, stalling, max_num_seqs=16)
    rate = 0.5 * model.largest_stable_rate
    steps = [
        predict_model(model, rate * factor).queueing_delay.mean or 0.0 for factor in (0.99, 1.01)
    ]
    exact = math.log(steps[1] / steps[0]) / math.log(1.01 / 0.99)
    for seed in range(3):
        found = assess(
            window_of(model, 0.5, 10_000, seed),
            LAW,
            QueueLimits(engine=EngineBounds(max_num_seqs=16)),
        ).long_run
        assert found is not None
        assert found.speed_elasticity == pytest.approx(1 + exact, abs=0.6)


def test_what_if_and_advice_read_the_law_with_its_stalls() -> None:
    found = of(RUN.records({50: 0.2, 150: 0.2}))
    operating_point = OperatingPoint(estimates=found, shape=LAW, limits=LIMITS)
    assert operating_point.law == found.law(LAW)
    assert operating_point.law.stall == pytest.approx(0.2, rel=0.05)
    again = Estimates.from_json(json_object(found.saved()))
    assert again.law(LAW) == found.law(LAW)


def test_a_continuous_engine_has_no_stalls_of_its_own() -> None:
    found = replace(of(RUN.records({50: 0.2})), policy="continuous")
    assert found.law(LAW).stall_share == 0


def test_a_run_and_a_calibration_weigh_their_batches_by_the_seconds_too() -> None:
    fitted = np.where(np.arange(200) % 10 == 0, 0.002, 0.05)
    measured = fitted * np.random.default_rng(1).gamma(70, 1 / 70, 200)
    measured[0] += 0.067
    assert (measured / fitted).std() > 2
    assert run_cv(measured, fitted) == pytest.approx(70**-0.5, rel=0.3)
    assert run_cv(measured[:1], fitted[:1]) == 0.0
    cells = [
        Measured((length,) * size, 3 * size, LAW.padded(size, length))
        for size in (1, 4, 8)
        for length in (1, 16, 64)
    ] * 4
    slow = [replace(cells[0], service_time=cells[0].service_time + 0.067), *cells[1:]]
    assert fit_law(slow, np.random.default_rng(0), bootstrap=2).law.cv < 1.0
