"""An assessment by hand: load, relaxation time, silence before and after the requests, transient
and stalls.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.control.assess import assess, load_interval
from kendall.queueing.control.long_run import LongRun
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.assumptions.forecast_assumptions import settled
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.interval import UNKNOWN, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.stall_backlog import behind_stalls, stall_backlog, utilisation_of
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits, model_of
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Prediction, Quantiles
from kendall.queueing.simulation.experiment import simulate_model
from tests.queueing.assessed_windows import seen
from tests.queueing.estimation_runs import LAW, LENGTHS, Engine, poisson, serve
from tests.queueing.estimation_runs import seen as window_of_run
from tests.queueing.estimation_windows import window_of
from tests.queueing.made import prediction_of

RATE = 10.0


def estimates(**about: object) -> Estimates:
    """Rate 10 +- 1 %, speed 1 +- 0.5 %, from 0 to 50 s."""
    return dataclasses.replace(seen(50.0, Setting(policy="dynamic"), RATE).estimates, **about)  # type: ignore[arg-type]


def model(policy: str, *, servers: int = 1, patience: float | None = None) -> Queue:
    return Queue.read(policy, LENGTHS, LAW, patience=patience, servers=servers, max_num_seqs=16)


def predicted(**about: object) -> Prediction:
    given: dict[str, object] = {
        "utilisation": 0.5,
        "queueing_delay": Quantiles(0.5),
        "served_queueing_delay": Quantiles(0.4),
        "sojourn_time": Quantiles(1.2, p99=3.0),
        "batch_size": Mean(3.4),
    }
    return prediction_of(**(given | about))


def relaxation(queue: Queue, load: float, prediction: Prediction | None) -> float:
    point: Any = None  # nothing is asked of it
    return LongRun(
        point=point,
        setting=Setting(policy="single"),
        model=queue,
        load=symmetric(load, 0.0, 9.0),
        prediction=prediction,
        scatter=None,
    ).relaxation_time


def test_the_load_has_the_doubts_of_rate_and_speed() -> None:
    queue, off = model("single"), math.hypot(0.01, 0.005)
    value = RATE / queue.largest_stable_rate
    found = load_interval(queue, estimates(), LAW)
    assert (found.value, found.low, found.high) == pytest.approx(
        (value, value * (1 - off), value * (1 + off))
    )
    assert found.effective_n == 1000.0
    alone = load_interval(queue, estimates(speed=UNKNOWN), LAW)
    assert alone.high == pytest.approx(value * 1.01)
    vague = load_interval(queue, estimates(arrival_rate=symmetric(RATE, 15.0, 3.0)), LAW)
    assert vague.low == 0.0


@pytest.mark.parametrize(("speed", "low", "high"), [(2.0, 0.5, 1.0), (0.5, 1.0, 2.0)])
def test_a_speed_without_an_interval_leaves_the_load_of_the_calibrated_one_open(
    speed: float, low: float, high: float
) -> None:
    """Twice as slow by a few slots: the load may be half of what they say."""
    queue = model("single")
    found = load_interval(queue, estimates(speed=dataclasses.replace(UNKNOWN, value=speed)), LAW)
    assert (found.low, found.high) == pytest.approx(
        (found.value * low * 0.99, found.value * high * 1.01)
    )


@pytest.mark.parametrize(("servers", "load"), [(1, 0.25), (2, 0.25), (1, 0.81)])
def test_a_queue_of_single_requests_relaxes_as_one_by_one(servers: int, load: float) -> None:
    queue = model("single", servers=servers)
    expected = queue.batch_time.mean(1) / servers / (1 - math.sqrt(load)) ** 2
    assert relaxation(queue, load, predicted(batch_size=Mean(1.0))) == pytest.approx(expected)
    assert relaxation(queue, load, predicted(batch_size=Mean())) == pytest.approx(expected)


def test_a_queue_of_batches_relaxes_in_batches_of_its_mean_size() -> None:
    queue = model("capped:max_batch_size=8", servers=2)
    assert relaxation(queue, 0.6, predicted()) == pytest.approx(queue.batch_time.mean(3) / 2 / 0.4)
    assert relaxation(queue, 0.6, predicted(batch_size=Mean(0.2))) == pytest.approx(
        queue.batch_time.mean(1) / 2 / 0.4
    )
    assert relaxation(queue, 0.6, None) == math.inf


def test_continuous_batching_relaxes_in_the_sojourn_over_those_in_service() -> None:
    queue = model("continuous:max_batch_size=8")
    assert relaxation(queue, 0.64, predicted(batch_size=Mean(4.0))) == pytest.approx(1.2 / 4 / 0.04)
    assert relaxation(queue, 0.64, predicted(batch_size=Mean(0.5))) == pytest.approx(1.2 / 0.04)
    assert relaxation(queue, 0.64, predicted(sojourn_time=Quantiles())) == 0.0


def arriving(gaps: list[float], silence: float) -> Snapshot:
    instants = np.concatenate([[0.0], np.cumsum(gaps)])
    now = float(instants[-1]) + silence
    return Snapshot(
        policy="single",
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=now,
        arrivals=instants,
        rows=np.empty((0, 13)),
    )


@pytest.mark.parametrize(
    ("gaps", "silence", "stopped"),
    [
        # twenty mean gaps
        ([1.0] * 9, 19.9, False),
        ([1.0] * 9, 20.1, True),
        ([0.25] * 9, 4.9, False),
        ([0.25] * 9, 5.1, True),
        # three times the longest
        ([1.0] * 100 + [50.0], 149.0, False),
        ([1.0] * 100 + [50.0], 151.0, True),
        # fewer than ten arrivals say nothing of their gaps
        ([1.0] * 8, 1000.0, False),
    ],
)
def test_requests_have_stopped_after_twenty_mean_gaps_or_three_of_the_longest(
    gaps: list[float], silence: float, stopped: bool
) -> None:
    window = arriving(gaps, silence)
    assert while_requests_came(window).now == (window.arrivals[-1] if stopped else window.now)


@pytest.mark.parametrize(("idle", "begun"), [(48.0, True), (2.1, True), (1.9, False)])
def test_the_silence_before_the_first_request_is_no_gap_of_the_arrivals(
    idle: float, begun: bool
) -> None:
    """A gateway waits for its first load: 10 requests/s then."""
    rng = np.random.default_rng(6)
    gaps = rng.permutation(np.repeat([0.05, 0.1, 0.15], 100))
    arrivals = idle + np.cumsum(gaps) - gaps[0]
    now = float(arrivals[-1])
    window = replace(arriving([1.0], 0.0), start=0.0, now=now, arrivals=arrivals)
    seen = while_requests_came(window)
    assert seen.start == (idle if begun else 0.0)
    assert seen.arrivals.size == (299 if begun else 300)
    rate = seen.arrivals.size / (seen.now - seen.start)
    assert (rate == pytest.approx(10.0, rel=0.01)) == begun


def test_a_transient_is_judged_with_what_waited_before() -> None:
    """100 s from the beginning of the epoch; 6 s of relaxation are 18 s, and 100 that waited
    take 5 s.
    """

    def judged(relaxation_time: float, waiting: int, free: float, begun: float = 0.0) -> Assumption:
        return settled(
            100.0 - begun, begun, relaxation_time, waiting_before=waiting, free_rate=free
        )

    found = judged(6.0, 100, 20.0)
    assert (found.holds, found.measure) == (False, pytest.approx(0.23))
    assert judged(6.0, 0, 20.0).measure == pytest.approx(0.18)
    assert judged(math.inf, 100, 20.0).holds is None
    assert judged(6.0, 0, 20.0, 20.0).measure == 0.0
    assert judged(6.0, 1, 1e-9).holds is False, "what waits is never served"


@pytest.mark.parametrize("closed", [False, True])
def test_a_transient_is_judged_of_an_open_loop_alone(closed: bool) -> None:
    def again(end: float, rng: np.random.Generator) -> float:
        return float(end + rng.exponential(0.05))

    arrivals = np.zeros(6) if closed else poisson(60.0, 1500, 1)
    run = serve(arrivals, Engine(most=8), 3, again=again if closed else None, most=1500)
    found = assess(
        window_of_run(run, "capped:max_batch_size=8"),
        LAW,
        QueueLimits(engine=EngineBounds(max_num_seqs=16)),
    )
    (transient,) = (each for each in found.compared.assumptions if each.name == "settled")
    assert (transient.holds is None) == closed


STALLS = Stalls(3, 0.02, 1.0, None, 0.5)


@pytest.mark.parametrize(
    ("stalls", "load", "patience", "seconds"),
    [
        (STALLS, 0.6, None, 0.02 * 0.5 * 0.6 / 0.8),
        (STALLS, 0.6, 0.001, 0.001),
        (STALLS, 0.6, 9.0, 0.02 * 0.5 * 0.6 / 0.8),
        (STALLS, 1.0, None, 0.0),
        (STALLS, 1.0, 2.0, 2.0),
        (STALLS, 1.5, 2.0, 2.0),
        (Stalls(0, 0.02, 1.0, None, 0.5), 0.6, None, 0.0),
    ],
)
def test_the_backlog_of_stalls_is_that_of_a_single_server_queue(
    stalls: Stalls, load: float, patience: float | None, seconds: float
) -> None:
    assert stall_backlog(stalls, model("single", patience=patience), load) == pytest.approx(seconds)


def test_a_speed_measured_elsewhere_lacks_the_part_of_those_who_came_into_a_stall() -> None:
    patient, hasty = model("single"), model("single", patience=0.001)
    added = stall_backlog(STALLS, patient, 0.6, utilisation=0.9)
    assert added == pytest.approx(0.02 * 0.5 * 0.9 / 0.8)
    assert stall_backlog(STALLS, hasty, 0.6, utilisation=0.9) == 0.001


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_behind_the_stall_of_one_of_several_servers_the_others_go_on(
    servers: int, load: float
) -> None:
    """One slot each, simulated with and without stalls; the mean service is the same."""
    share, size = 0.05, 0.5
    law = LatencyModel(k4=0.001, stall_share=share, stall=size)
    delays = []
    for one in (law, dataclasses.replace(law, stall_share=0.0, stall=0.0)):
        model = Queue.read("single", LENGTHS, one, servers=servers)
        rate = load * model.largest_stable_rate
        delays.append(simulate_model(model, rate, num_requests=1_000_000, seed=3))
    told, smooth = (each.queueing_delay.mean or 0.0 for each in delays)
    found = Stalls(3, share, size, None, size)
    backlog = stall_backlog(found, model, load)
    alone = stall_backlog(found, model.but(servers=1), load)
    assert told - smooth == pytest.approx(backlog, abs=0.2 * alone)
    assert servers == 1 or told - smooth < 0.6 * alone


def test_a_continuous_engine_serves_while_anyone_is_there() -> None:
    """One slot: its load. Steps that cost the same whatever they hold, and more slots than
    anybody needs: M/G/infinity.
    """
    step = LatencyModel(k4=0.001)
    one, many = (
        Queue.read(text, LENGTHS, step) for text in ("continuous:max_batch_size=1", "continuous")
    )
    assert utilisation_of(one, 0.5 * one.largest_stable_rate) == pytest.approx(0.5, rel=1e-3)
    assert utilisation_of(one, 1.1 * one.largest_stable_rate) == 1.0
    alone = 0.001 * LENGTHS.mean
    assert utilisation_of(many, 2 / alone) == pytest.approx(1 - math.exp(-2), rel=0.02)


def test_behind_stalls_the_mean_sojourn_is_longer_and_nothing_else() -> None:
    found = behind_stalls(predicted(), 0.25)
    assert found.sojourn_time == Quantiles(1.45, p99=3.0)
    assert replace(found, sojourn_time=predicted().sojourn_time, assumptions=()) == predicted()
    assert "250 ms" in found.assumptions[-1]
    bare = predicted(sojourn_time=Quantiles())
    assert behind_stalls(bare, 0.25) is bare
    assert behind_stalls(bare, 0.0) is bare


def test_a_model_has_the_prompts_where_the_law_charges_for_them() -> None:
    given = (parse_policy("single"), LENGTHS)
    charged = replace(LAW, kp=1e-6)
    asked = estimates(prompt_tokens=lengths([7, 9]), sequences=lengths([1, 2]))
    limits = QueueLimits(patience=3.0, servers=2, engine=EngineBounds(max_num_seqs=4))
    found = model_of(*given, charged, limits, asked)
    assert found.requests.prompt_tokens is not None
    assert found.requests.prompt_tokens.mean == 8.0
    assert found.requests.sequences is not None
    assert (found.engine.bounds.max_num_seqs, found.requests.patience, found.engine.servers) == (
        4,
        3.0,
        2,
    )
    assert model_of(*given, LAW, limits, asked).requests.prompt_tokens is None
    assert (
        model_of(
            *given, charged, QueueLimits(), estimates(prompt_tokens=lengths([]))
        ).requests.prompt_tokens
        is None
    )
    assert model_of(*given, charged, QueueLimits(), estimates()).requests.sequences is None


def test_a_slow_machine_with_less_than_a_request_a_second_is_predicted_too() -> None:
    """The same run in other seconds."""
    slow = LAW.at_speed(100.0)
    rate = 0.5 * Queue.read("single", LENGTHS, slow).largest_stable_rate
    assert rate < 1
    records = serve(poisson(rate, 600, 1), Engine(most=1, law=slow), 1)
    found = assess(window_of_run(records, "single"), slow, QueueLimits())
    assert found.prediction is not None
    assert found.load.value == pytest.approx(0.5, rel=0.15)
    assert found.load.low < found.load.value < found.load.high
    assert found.model is not None
    (said,) = (each for each in found.compared.assumptions if each.name == "settled")
    assert said.holds


def test_with_few_requests_a_slot_the_prediction_has_no_interval_rather_than_half_of_one() -> None:
    """500 requests in 64 slots are fewer groups than tell how far a speed is off. The gateway's
    own shortest delay is no lower end of a sojourn time.
    """
    model = Queue.read(
        "continuous:max_batch_size=64",
        parse_distribution("geometric:mean=100"),
        LatencyModel(k1=0.0002, k2=0.0, k3=0.00005, k4=0.008, turnaround=0.0002),
        max_num_seqs=64,
    )
    run = replace(window_of(model, 0.6, 500, seed=1), shortest_delay=0.00021)
    found = assess(run, model.engine.law, QueueLimits(engine=EngineBounds(max_num_seqs=64)))
    assert found.estimates.gateway_turnaround == 0.00021
    predicted = json_object(found.compared.summary())["predicted"]
    assert predicted["value"] == pytest.approx(model.engine.law.k4 * 120, rel=0.1)
    assert (predicted["low"], predicted["high"]) == (None, None)
    for estimate in (found.estimates.speed, found.compared.predicted):
        assert not estimate.known
