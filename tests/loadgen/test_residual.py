"""One thing is broken in each synthetic run, and the split names that thing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from scipy import stats

import kendall
from kendall.loadgen.compare import residual, sampling_error
from kendall.loadgen.compare.cells import TheoryInputs, theory_for
from kendall.loadgen.compare.compare import (
    Comparison,
    DifferencePart,
    Predicted,
    Quantity,
    Split,
    Theory,
    TheoryEstimate,
    compare,
    compare_samples,
)
from kendall.loadgen.compare.comparison import SamplingError
from kendall.loadgen.compare.residual import (
    PARTS,
    cause_of,
    parts_of,
    verdict,
)
from kendall.loadgen.compare.theory import theory_of
from kendall.policies import Policy, parse_policy
from kendall.queueing.arrivals.notation import read_arrivals
from kendall.queueing.arrivals.text import parse_arrivals
from kendall.queueing.arrivals.timetable import Timetable, draw_timetable
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed import Speed
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import Served, served
from kendall.queueing.measurement.statistics import Interval
from kendall.queueing.queue import Queue
from tests.loadgen.driver import LAW, LENGTHS, Driver, timetable

RATES = {
    "single": 6.0,
    "dynamic": 40.0,
    "capped:max_batch_size=4": 15.0,
    "fixed:batch_size=4": 15.0,
    "elastic:max_batch_size=4": 16.0,
}
N = 3000
each_policy = pytest.mark.parametrize("policy", list(RATES))


def asked(policy: str, law: LatencyModel = LAW) -> Theory:
    return dataclasses.replace(
        theory_of(law, LENGTHS, RATES[policy], bounds=EngineBounds(max_num_seqs=64)),
        live=None,
        published=None,
    )  # for speed


def run(policy: str, table: Timetable, law: LatencyModel = LAW, seed: int = 0) -> list[Record]:
    return Driver(parse_policy(policy), table, law, seed).run()


def drawn(policy: str, seed: int = 1) -> Timetable:
    return timetable(RATES[policy], N, seed)


def at(table: Timetable, instants: np.ndarray) -> Timetable:
    return Timetable(instants, table.prompt_tokens, table.output_tokens)


def joined(records: Sequence[Record], table: Timetable) -> tuple[list[Record], list[Record]]:
    """The gateway's records with the callers' ids, and the load generator's own."""
    seen = [
        msgspec.structs.replace(r, client_request_id=r.request_id.partition("-")[2])
        for r in records
    ]
    sent = [
        Record(request_id=str(i), outcome="completed", intended_at=t, sent_at=t)
        for i, t in enumerate(table.intended_at.tolist())
    ]
    return seen, sent


def only(records: Sequence[Record], theory: Theory, sent: Sequence[Record] = ()) -> Comparison:
    (comparison,) = compare(records, theory, sent)
    assert comparison.split is not None
    return comparison


def largest(difference: Split) -> DifferencePart:
    """The part with the largest absolute value, beyond chance or not."""
    return max(difference.parts, key=lambda part: abs(part.seconds))


def cause(comparison: Comparison) -> str:
    assert comparison.split is not None
    return largest(comparison.split).name


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", [*RATES, "continuous:max_batch_size=8"])
def test_the_parts_add_up_to_the_difference(policy: str) -> None:
    rate = RATES.get(policy, 50.0)
    table = timetable(rate, 800, 3)
    records = run(
        policy,
        table,
        dataclasses.replace(LAW, speed=1.1, cv=0.0 if policy.startswith("cont") else 0.1),
    )
    comparison = only(records, theory_of(LAW, LENGTHS, rate, bounds=EngineBounds(max_num_seqs=64)))
    split, quantity = comparison.split, comparison.quantity
    assert split is not None
    assert quantity.a_priori is not None
    assert tuple(part.name for part in split.parts) == parts_of([comparison])
    assert set(PARTS) - set(parts_of([comparison])) == {"predictor", "process"}
    assert math.fsum(part.seconds for part in split.parts) == pytest.approx(split.total, abs=1e-12)
    assert split.total == pytest.approx(quantity.observed.mean - quantity.a_priori.mean, abs=1e-12)
    assert all(part.half_width >= 0 for part in split.parts)


@pytest.mark.slow
@each_policy
def test_a_run_that_is_as_asked_agrees(policy: str) -> None:
    comparison = only(run(policy, drawn(policy)), asked(policy))
    assert verdict(comparison).kind in ("agree", "sampling noise")
    assert comparison.split is not None
    for name in ("theory", "sender", "speed", "scatter", "shape", "gateway"):
        assert comparison.split.part(name).seconds == pytest.approx(0.0, abs=1e-9)


BURSTS = "mmpp:rates=4/14,durations=2/0.5"  # mean rate 6


def bursty(seed: int = 1, count: int = 6000) -> Timetable:
    return draw_timetable(
        parse_arrivals(BURSTS),
        count=count,
        seed=seed,
        prompt_tokens=parse_distribution("deterministic:value=1"),
        output_tokens=LENGTHS,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_bursts_that_were_asked_for_show_as_the_process_and_not_as_arrivals(seed: int) -> None:
    """Beside Poisson arrivals at the mean rate, which is what predictions are made for."""
    records = run("single", bursty(seed))
    told = theory_of(
        LAW,
        LENGTHS,
        RATES["single"],
        bounds=EngineBounds(max_num_seqs=64),
        process=read_arrivals(BURSTS),
    )
    explained, unexplained = only(records, told), only(records, asked("single"))
    split = explained.split
    assert split is not None
    assert tuple(part.name for part in split.parts) == parts_of([explained])
    assert math.fsum(part.seconds for part in split.parts) == pytest.approx(split.total, abs=1e-12)
    process = split.part("process")
    assert process.significant
    assert process.seconds > 0
    assert largest(split).name == "process"
    assert not split.part("arrivals").significant
    assert cause(unexplained) == "arrivals"
    assert unexplained.split is not None
    assert unexplained.split.part("arrivals").significant
    assert "process" not in parts_of([unexplained])
    mine, theirs = explained.quantity, unexplained.quantity
    assert mine.a_priori is not None
    assert theirs.a_priori is not None
    assert mine.a_priori.mean == theirs.a_priori.mean, "predictions stay those of Poisson arrivals"
    own = kendall.simulate("single", None, LENGTHS, LAW, arrivals=BURSTS, num_requests=200_000)
    assert process.seconds + split.predicted == pytest.approx(own.queueing_delay.mean, rel=1e-9)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        (BURSTS, True),
        ("gamma:rate=6,burstiness=0.3", True),
        ("poisson:rate=6", False),
        ("ramp:start=1,end=9,duration=60", False),
        ("closed loop", False),
        ("timetable", False),
        (None, False),
    ],
)
def test_the_header_of_the_load_run_names_the_process(text: str | None, is_named: bool) -> None:
    theory = theory_for(
        LAW, {"arrivals": text, "request_rate": 6.0}, TheoryInputs(output_tokens=LENGTHS)
    )
    assert theory.sampling_error is not None
    requests = served(run("single", drawn("single")))[:400]
    predicted = Predicted(load=0.5, queueing_delay=0.1, sojourn_time=0.2, method="exact")
    found = theory.sampling_error(
        parse_policy("single"), 6.0, requests, "queueing_delay", predicted
    )
    assert found is not None
    assert (found.process is not None) == is_named


@pytest.mark.slow
@each_policy
def test_a_machine_that_is_20_percent_slower_shows_as_speed(policy: str) -> None:
    comparison = only(run(policy, drawn(policy), LAW.at_speed(1.2)), asked(policy))
    assert cause(comparison) == "speed" or policy.startswith(
        "fixed"
    )  # there forming the batch is most of the delay
    assert comparison.split is not None
    speed = comparison.split.part("speed")
    assert speed.significant
    assert speed.seconds > 0
    if verdict(comparison).kind != "agree":
        assert verdict(comparison).text == "machine slower than calibrated by 20 %"


def replayed(rate: float) -> Theory:
    """Of the law's theory the simulator only; the prediction and what chance does to it are made
    up.
    """
    predicted, sampling = (
        Predicted(load=0.5, queueing_delay=0.1, sojourn_time=0.2),
        SamplingError(0.1, 0.0, 0.05),
    )
    whole = theory_of(LAW, LENGTHS, rate, bounds=EngineBounds(max_num_seqs=64))
    return dataclasses.replace(
        whole,
        predict=lambda *_: predicted,
        sampling_error=lambda *_: sampling,
        live=None,
        published=None,
    )


@pytest.mark.thinned(6)
@pytest.mark.parametrize("factor", [0.8, 1.2])
@pytest.mark.parametrize("policy", [*RATES, "continuous:max_batch_size=8"])
def test_the_speed_of_a_steady_machine_leaves_no_doubt(policy: str, factor: float) -> None:
    """Service times without scatter: the part's own half width is next to nothing, and it has
    the sign of the change.
    """
    rate = RATES.get(policy, 50.0)
    records = run(policy, timetable(rate, 800, 3), LAW.at_speed(factor))
    split = only(records, replayed(rate)).split
    assert split is not None
    speed = split.part("speed")
    assert speed.seconds * (factor - 1) > 0
    assert speed.half_width < 0.02 * abs(speed.seconds)


def test_at_the_calibrated_speed_itself_nothing_is_left_to_doubt() -> None:
    """A part over a change of the speed is no slope where the speed has not changed."""
    (found,) = compare_samples(run("single", timetable(RATES["single"], 200, 3)))
    predicted = Predicted(load=0.5, queueing_delay=0.1, sojourn_time=0.2)
    theory, sampling = replayed(RATES["single"]), SamplingError(0.1, 0.0, 0.05)
    speed = Speed(LAW.speed, LAW.cv, 200)
    made = residual.split(found.sample, theory, predicted, speed, sampling)
    assert made is not None
    assert made.part("speed") == DifferencePart("speed", 0.0, 0.0)


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=4"])
def test_the_doubt_about_the_speed_is_that_of_the_mean_of_the_service_times(policy: str) -> None:
    """Independent residuals of cv 0.3: 1.96 standard errors of a ratio, carried over by the
    part's own slope.
    """
    records = run(policy, drawn(policy), dataclasses.replace(LAW, speed=1.1, cv=0.3))
    comparison = only(records, replayed(RATES[policy]))
    assert comparison.split is not None
    assert comparison.speed is not None
    speed = comparison.split.part("speed")
    lawful = np.array(
        [held for held, _ in {(r.server_free_at - r.dispatched_at, r.batch_id) for r in records}]
    )  # type: ignore[operator]
    error = 1.96 * 0.3 * math.sqrt(float(np.mean(lawful**2)) / lawful.size) / lawful.mean()
    slope = speed.seconds / (comparison.speed.factor - 1)
    assert (
        0.6 < speed.half_width / (slope * error) < 1.8
    )  # 20 batches tell a standard error to a sixth, and may correlate


def judged(
    observed: float, half: float, *parts: DifferencePart, effective_n: float = 1000.0
) -> Comparison:
    """A run whose delay is predicted as 1 s, and its parts."""
    interval = Interval(observed, half, 5000, effective_n, 0.0)
    a_priori = TheoryEstimate(1.0, observed - 1.0, half)
    quantity = Quantity(observed=interval, a_priori=a_priori, predicted=a_priori)
    return Comparison(
        policy="single",
        epoch=0,
        compared="queueing_delay",
        n=5000,
        arrival_rate=5.0,
        asked_rate=5.0,
        load=0.5,
        batch_size=1.0,
        speed=Speed(1.2, 0.3, 5000),
        calibrated=Speed(1.0, 0.1, 0),
        queueing_delay=quantity,
        sojourn_time=quantity,
        split=Split(predicted=1.0, observed=observed, parts=parts) if parts else None,
    )


@pytest.mark.parametrize(
    ("observed", "half", "kind"),
    [
        # within 10 % of the prediction, however sharp the observation
        (1.0999, 0.001, "agree"),
        (1.1001, 0.001, "differ"),
        (0.9001, 0.001, "agree"),
        (0.8999, 0.001, "differ"),
        # inside the observed interval
        (1.2, 0.2001, "agree"),
        (1.2, 0.1999, "differ"),
        (0.85, 0.1501, "agree"),
        (0.85, 0.1499, "differ"),
        # wider than a quarter of the mean: the prediction in it says nothing
        (1.2, 0.2999, "agree"),
        (1.2, 0.3001, "sampling noise"),
        (1.0999, 0.3001, "agree"),
    ],
)
def test_the_verdict_turns_at_its_tolerances(observed: float, half: float, kind: str) -> None:
    assert verdict(judged(observed, half)).kind == kind


def test_a_run_is_long_enough_from_100_independent_samples_on() -> None:
    assert verdict(judged(1.2, 0.21, effective_n=100.0)).kind == "agree"
    assert verdict(judged(1.2, 0.21, effective_n=99.0)).kind == "sampling noise"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        # a quarter of the difference of 0.4 s, and beyond its own chance
        ([DifferencePart("speed", 0.1001, 0.01)], "speed"),
        ([DifferencePart("speed", 0.0999, 0.01)], None),
        ([DifferencePart("speed", 0.2, 0.1999)], "speed"),
        ([DifferencePart("speed", 0.2, 0.2001)], None),
        # of the sign of the difference
        ([DifferencePart("speed", -0.3, 0.01)], None),
        ([DifferencePart("speed", -0.9, 0.01), DifferencePart("arrivals", 0.2, 0.01)], "arrivals"),
        # the largest of several
        ([DifferencePart("speed", 0.15, 0.01), DifferencePart("arrivals", 0.25, 0.01)], "arrivals"),
        ([DifferencePart("speed", 0.25, 0.01), DifferencePart("arrivals", 0.15, 0.01)], "speed"),
        ([DifferencePart("speed", 0.15, 0.01), DifferencePart("arrivals", 0.25, 0.26)], "speed"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_is_named_after_its_largest_part_beyond_chance(
    parts: list[DifferencePart], name: str | None, sign: int
) -> None:
    turned = [dataclasses.replace(part, seconds=sign * part.seconds) for part in parts]
    comparison = judged(1 + 0.4 * sign, 0.01, *turned)
    assert comparison.split is not None
    cause = cause_of(comparison.split)
    assert (cause and cause.name) == name
    assert verdict(comparison).kind == (name or "sampling noise")


def test_what_a_part_means_is_said_with_its_sign_and_size() -> None:
    def said(name: str, share: float, sign: int = 1) -> str:
        return verdict(judged(1 + 0.5 * sign, 0.01, DifferencePart(name, sign * share, 0.01))).text

    slower = judged(1.5, 0.01, DifferencePart("speed", 0.3, 0.01))
    assert verdict(slower).text == "machine slower than calibrated by 20 %"
    faster = dataclasses.replace(slower, speed=Speed(0.3, 0.3, 5000))
    assert verdict(faster).text == "machine faster than calibrated by 70 %"
    assert said("scatter", 0.3) == "service times scatter more than calibrated (cv 0.30, 0.10)"
    assert said("scatter", 0.3, -1) == "service times scatter less than calibrated (cv 0.30, 0.10)"
    assert said("theory", 0.3) == "approximation off by 20 %"  # 0.3 of the observed 1.5
    assert said("gateway", 0.45) == "gateway loses time: 30 % of the delay"


def test_the_verdict_on_a_slow_machine_names_its_speed() -> None:
    assert (
        verdict(only(run("dynamic", drawn("dynamic"), LAW.at_speed(1.2)), asked("dynamic"))).text
        == "machine slower than calibrated by 20 %"
    )
    assert (
        verdict(only(run("dynamic", drawn("dynamic"), LAW.at_speed(0.8)), asked("dynamic"))).text
        == "machine faster than calibrated by 20 %"
    )


def single_file(
    table: Timetable, lost: float = 0.0, factors: np.ndarray | None = None
) -> list[Record]:
    """One request at a time; `lost` seconds go by between the instant at which each could start
    and its dispatch.
    """
    records, free = [], -math.inf
    ones = np.ones(len(table)) if factors is None else factors
    for i, (arrived, tokens) in enumerate(
        zip(table.intended_at.tolist(), table.output_tokens.tolist(), strict=True)
    ):
        start = max(arrived, free) + lost
        free = start + LAW.padded(1, tokens, 1) * float(ones[i])
        records.append(
            Record(
                request_id=f"0-{i}",
                outcome="completed",
                policy="single",
                epoch=0,
                batch_id=i,
                batch_size=1,
                arrived_at=arrived,
                dispatched_at=start,
                released_at=free,
                server_free_at=free,
                prompt_tokens=1,
                output_tokens=tokens,
            )
        )
    return records


def test_a_gateway_that_loses_time_before_every_dispatch_shows_as_gateway() -> None:
    """With what it makes those behind wait longer, which the recursion on observed ends does not
    see.
    """
    comparison = only(single_file(drawn("single"), lost=0.03), asked("single"))
    assert cause(comparison) == "gateway"
    assert verdict(comparison).text.startswith("gateway loses time")
    assert comparison.split is not None
    assert comparison.split.part("gateway").seconds > 2 * 0.03
    assert comparison.split.part("shape").seconds == pytest.approx(0.0, abs=1e-6)


def test_a_speed_that_wanders_shows_as_shape() -> None:
    factors = np.where(np.arange(N) // 100 % 2, 1.6, 0.4)
    comparison = only(single_file(drawn("single"), factors=factors), asked("single"))
    assert comparison.split is not None
    assert comparison.split.part("shape").seconds > 0.5 * comparison.split.total > 0


def test_scatter_of_service_times_shows_as_scatter() -> None:
    records = run(
        "capped:max_batch_size=4",
        drawn("capped:max_batch_size=4"),
        dataclasses.replace(LAW, cv=0.6),
    )
    comparison = only(records, asked("capped:max_batch_size=4"))
    assert cause(comparison) == "scatter"
    assert comparison.speed is not None
    assert comparison.speed.cv == pytest.approx(0.6, abs=0.1)


def stalled(instants: np.ndarray, every: float, stall: float) -> np.ndarray:
    """What was meant to be sent during a stall is sent at its end."""
    within = instants % every
    return np.where(within < stall, instants - within + stall, instants)


def test_a_sender_that_stalls_shows_as_sender_where_its_timetable_is_known() -> None:
    table = drawn("dynamic")
    records = run("dynamic", at(table, stalled(table.intended_at, 4.0, 1.5)))
    seen, sent = joined(records, table)
    comparison = only(seen, asked("dynamic"), sent)
    assert cause(comparison) == "sender"
    assert verdict(comparison).text == "sender late"


@pytest.mark.slow
def test_without_the_timetable_the_senders_part_is_nothing_and_says_so() -> None:
    table = drawn("dynamic")
    comparison = only(
        run("dynamic", at(table, stalled(table.intended_at, 4.0, 1.5))), asked("dynamic")
    )
    assert comparison.split is not None
    sender = comparison.split.part("sender")
    assert sender.seconds == 0
    assert "no load run" in sender.note
    assert cause(comparison) == "arrivals"


@pytest.mark.parametrize(("known", "joins"), [(380, True), (379, False)])
def test_the_senders_part_needs_the_timetable_of_95_in_100_requests(
    known: int, joins: bool
) -> None:
    table = timetable(RATES["dynamic"], 400, 3)
    seen, sent = joined(run("dynamic", at(table, table.intended_at + 0.02)), table)
    split = only(seen, replayed(RATES["dynamic"]), sent[:known]).split
    assert split is not None
    assert (split.part("sender").note == "") == joins


def test_a_sender_on_time_has_no_part_whatever_the_way_to_the_gateway_takes() -> None:
    table = drawn("dynamic")
    seen, sent = joined(run("dynamic", at(table, table.intended_at + 0.02)), table)
    comparison = only(seen, asked("dynamic"), sent)
    assert comparison.split is not None
    assert comparison.split.part("sender").seconds == pytest.approx(0.0, abs=1e-9)
    assert comparison.split.part("sender").note == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        ("dynamic", 0.1),
        ("capped:max_batch_size=4", 0.1),
        ("single", 0.1),
        ("capped:max_batch_size=4", 20.0),
        ("single", 20.0),
    ],
)
def test_bursty_and_regular_arrivals_show_as_arrivals(policy: str, shape: float) -> None:
    """Gamma gaps: of a shape below 1 they make delays longer than those asked for, above it
    shorter.
    """
    rng = np.random.default_rng(5)
    gaps = rng.gamma(shape, 1 / shape / RATES[policy], N)
    comparison = only(run(policy, at(drawn(policy), np.cumsum(gaps))), asked(policy))
    assert cause(comparison) == "arrivals"
    assert comparison.split is not None
    arrivals = comparison.split.part("arrivals")
    assert arrivals.significant
    assert (arrivals.seconds > 0) == (shape < 1)


@pytest.mark.slow
def test_chance_in_the_arrivals_is_called_chance() -> None:
    """Over many short runs as asked, the arrivals' part is beyond its half width about once in
    twenty.
    """
    theory, beyond = asked("capped:max_batch_size=4"), 0
    assert theory.predict is not None
    truth = theory.predict(
        parse_policy("capped:max_batch_size=4"),
        15.0,
        served(run("capped:max_batch_size=4", timetable(15.0, 9))),
        LAW,
    )
    quick = dataclasses.replace(theory, predict=lambda *_: truth)
    for seed in range(40):
        comparison = only(run("capped:max_batch_size=4", timetable(15.0, 300, seed)), quick)
        assert comparison.split is not None
        beyond += comparison.split.part("arrivals").significant
    assert beyond <= 6  # binomial(40, 0.05): more in 1 of 200


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_a_formula_that_is_off_shows_as_theory(factor: float) -> None:
    theory = asked("dynamic")
    assert theory.predict is not None
    truth = theory.predict

    def wrong(policy: Policy, rate: float, group: Sequence[Served], law: LatencyModel) -> Predicted:
        answer = truth(policy, rate, group, law)
        assert answer.queueing_delay is not None
        return dataclasses.replace(
            answer, queueing_delay=factor * answer.queueing_delay, method="approximation"
        )

    comparison = only(run("dynamic", drawn("dynamic")), dataclasses.replace(theory, predict=wrong))
    assert cause(comparison) == "theory"
    assert comparison.split is not None
    assert comparison.split.part("theory").seconds * (1 - factor) > 0
    assert verdict(comparison).text.startswith("approximation off by")


def test_a_short_run_accuses_nobody_and_an_unstable_one_has_no_prediction() -> None:
    short = only(run("single", timetable(6.0, 60, 0)), asked("single"))
    assert verdict(short).kind in ("agree", "sampling noise")
    (unstable,) = compare(run("single", timetable(30.0, 200, 0)), theory_of(LAW, LENGTHS, 30.0))
    assert unstable.split is None
    assert verdict(unstable).text.startswith("no steady state: load")
    (bare,) = compare(run("single", timetable(6.0, 60, 0)))
    assert verdict(bare).kind == "no prediction"


def test_chance_is_the_prediction_interval_of_one_more_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """t(n - 1) s sqrt(1 + 1 / n) of the means of n runs, each with a stream of its own."""
    means = np.random.default_rng(1).normal(0.1, 0.02, 40).tolist()
    given = iter(means)

    def runs(*_: object) -> SimpleNamespace:
        return SimpleNamespace(queueing_delay=np.full(100, next(given)))

    monkeypatch.setattr(sampling_error, "simulate_run", runs)
    model = Queue.read(parse_policy("single"), LENGTHS, LAW)
    half = stats.t.ppf(0.975, 39) * stats.tstd(means) * math.sqrt(1 + 1 / 40)
    answer = Predicted(load=0.5, queueing_delay=0.1, sojourn_time=0.2, method="exact")
    error = sampling_error.sampling_error(model, 1.0, 100, "queueing_delay", answer)
    assert error is not None
    assert error.spread == pytest.approx(half)
    assert next(given, None) is None, "40 runs"
