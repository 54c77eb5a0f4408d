"""Each broken assumption is named, and clean runs are left in peace."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.control.long_run import relaxation_time
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.assumptions.compared_window import ENGINE, compare
from kendall.queueing.estimation.assumptions.forecast_assumptions import open_loop
from kendall.queueing.estimation.estimates import estimate
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.window.snapshot import WIDTH
from kendall.queueing.estimation.window.window import COLUMN, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import Check
from kendall.queueing.measurement.record import Record
from kendall.queueing.prediction import predict
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import (
    LAW,
    LENGTHS,
    Engine,
    gamma,
    modulated,
    poisson,
    record_of,
    seen,
    serve,
)

POLICY = "capped:max_batch_size=8"
LIMITS = QueueLimits(max_output_tokens=32, engine=EngineBounds(max_num_seqs=64))
N = 4000


@cache
def capacity(policy: str = POLICY) -> float:
    return Queue.read(policy, LENGTHS, LAW, max_num_seqs=64).largest_stable_rate


def judge(records: list[Record], policy: str = POLICY, **changed: object) -> Assessment:
    return assess(replace(seen(records, policy), **changed), LAW, LIMITS)  # type: ignore[arg-type]


def failing(found: Assessment) -> list[str]:
    return [each.name for each in found.compared.assumptions if each.holds is False]


def clean(seed: int, load: float = 0.6) -> list[Record]:
    return serve(poisson(load * capacity(), N, seed), Engine(most=8), seed)


def slowed(seed: int) -> list[Record]:
    half = N / 2 / (0.4 * capacity())
    return serve(
        poisson(0.4 * capacity(), N, seed),
        Engine(most=8, speed=lambda at: 1.0 if at < half else 2.0),
        seed,
    )


def closed(seed: int) -> list[Record]:
    """Six clients before a server that takes one at a time, each thinking for 0.1 s."""
    return serve(
        np.linspace(0, 0.1, 6),
        Engine(most=1),
        seed,
        again=lambda end, rng: end + rng.exponential(0.1),
        most=N,
    )


BROKEN: dict[str, tuple[Callable[[int], list[Record]], str, str]] = {
    "gamma arrivals of burstiness 0.3": (
        lambda seed: serve(gamma(0.6 * capacity(), N, seed, 0.3), Engine(most=8), seed),
        POLICY,
        "poisson_arrivals",
    ),
    "Markov-modulated arrivals": (
        lambda seed: serve(
            modulated((0.2 * capacity(), 0.9 * capacity()), (3.0, 3.0), 2 * N, seed),
            Engine(most=8),
            seed,
        ),
        POLICY,
        "poisson_arrivals",
    ),
    "clients in a closed loop": (closed, "single", "open_loop"),
    "clients in a closed loop that never think": (
        lambda seed: serve(
            np.linspace(0, 0.01, 12), Engine(most=8), seed, again=lambda end, _: end, most=N
        ),
        POLICY,
        "open_loop",
    ),
    "the engine slows down by 2 in mid-run": (slowed, POLICY, "constant_speed"),
    "an unstable load": (
        lambda seed: serve(poisson(1.15 * capacity(), N, seed), Engine(most=8), seed),
        POLICY,
        "stable_queue",
    ),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_assumption_is_named(name: str) -> None:
    run, policy, expected = BROKEN[name]
    for seed in range(2):
        found = judge(run(seed), policy)
        assert failing(found) == [expected], (seed, found.compared)
        if expected not in ENGINE:  # of those who send, which the check takes as it is
            assert found.compared.verdict != "disagree", (seed, found.compared)


def test_retrying_clients_are_named_by_their_header() -> None:
    """Each of the requests that waited long is asked again: arrivals beget arrivals, and the
    header says whose.
    """
    for seed in range(3):
        rng = np.random.default_rng(seed)
        first = poisson(0.5 * capacity(), N, seed)
        again = first[rng.random(N) < 0.15]
        again = np.concatenate([again + 0.5, again + 1.0, again + 1.5])
        records = serve(np.sort(np.concatenate([first, again])), Engine(most=8), seed)
        found = judge(records, retries=again.size)
        assert "no_retries" in failing(found)
        assert "poisson_arrivals" not in failing(found)  # explained by the retries
        assert found.compared.verdict == "agree"


def admitted(rate: float, seed: int, most: int) -> tuple[list[Record], int]:
    """One at a time; who comes while `most` are waiting is refused. What was served, and how many
    were not.
    """
    rng, engine = np.random.default_rng(seed), Engine(most=1)
    starts: deque[float] = deque()
    free, refused, records = 0.0, 0, list[Record]()
    for at in poisson(rate, N, seed).tolist():
        while starts and starts[0] <= at:
            starts.popleft()
        if len(starts) >= most:
            refused += 1
            continue
        count, number = int(LENGTHS.sample(rng, 1)[0]), len(records)
        start = max(free, at)
        free = start + engine.duration(start, number, [count], rng)
        starts.append(start)
        records.append(record_of(number, number, 1, at, start, free, count))
    return records, refused


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("load", "most"), [(1.7, 50), (1.05, 30), (0.95, 5), (3.0, 2)])
def test_what_the_gateway_refuses_is_named_and_no_client_blamed_for_it(
    load: float, most: int
) -> None:
    """Who is admitted depends on the queue, which is what a closed loop looks like."""
    for seed in range(2):
        records, refused = admitted(load * capacity("single"), seed, most)
        found = judge(records, "single", refused={"slo": refused - 7, "rate_limit": 7})
        names = {each.name: each for each in found.compared.assumptions}
        share = refused / N
        assert (names["all_admitted"].holds, names["all_admitted"].measure) == (False, share)
        says, by_slo = names["all_admitted"].says, share * (refused - 7) / refused
        assert says.startswith(f"{share:.1%} of the calls were refused")
        assert f"(slo {by_slo:.1%}, rate_limit {7 / N:.1%})" in says
        for name in ("no_retries", "open_loop", "constant_rate", "poisson_arrivals"):
            assert names[name].holds is None
            assert "client" not in names[name].says
        assert found.compared.verdict != "disagree"
        assert names["stable_queue"].holds, "no queue grows without bound that way"
        blind = judge(records, "single")
        assert {"open_loop", "poisson_arrivals"} & set(failing(blind)) or load < 1.1, (
            "what the test is about"
        )


@pytest.mark.parametrize(("refused", "holds"), [(0, True), (20, True), (21, False), (9000, False)])
def test_refusals_are_tolerated_below_two_in_a_hundred(refused: int, holds: bool) -> None:
    records = clean(1)[:1000]
    found = judge(records, refused={"slo": refused}).compared
    (first, *_) = found.assumptions
    assert (first.name, first.holds) == ("all_admitted", holds)
    judged = {each.name: each.holds for each in found.assumptions}
    assert (judged["poisson_arrivals"] is None) is not holds


def test_a_dozen_requests_are_not_enough() -> None:
    for seed in range(3):
        found = judge(serve(poisson(0.6 * capacity(), 12, seed), Engine(most=8), seed))
        assert (found.compared.verdict, found.compared.reasons) == ("not enough data", ())


def test_the_error_of_a_comparison_has_the_sign_of_what_was_observed() -> None:
    snapshot = seen(clean(1), POLICY)
    observed = compare(snapshot, UNKNOWN, ()).observed.value
    for factor in (0.5, 0.9, 1.1, 2.0):
        found = compare(snapshot, symmetric(factor * observed, 0.0, 500.0), ())
        assert found.error == pytest.approx(1 / factor - 1)
        assert json_object(found.summary())["error"] == found.error


def test_what_is_observed_lies_in_its_interval_and_its_quantiles_in_order() -> None:
    found = compare(seen(clean(1), POLICY), UNKNOWN, ())
    assert found.observed.low < found.observed.value < found.observed.high
    levels = [found.observed_quantiles[name] for name in ("p50", "p90", "p95", "p99")]
    assert [each.value for each in levels] == sorted(each.value for each in levels)
    assert all(each.low <= each.value <= each.high for each in levels)
    assert levels[0].known
    assert levels[0].value < found.observed.value < levels[-1].value
    assert all(each.effective_n == (found.n if each.known else 0.0) for each in levels)


def test_a_change_of_rate_is_no_burstiness() -> None:
    for seed in range(3):
        before = poisson(0.35 * capacity(), N // 2, seed)
        arrivals = np.concatenate(
            [before, before[-1] + poisson(0.7 * capacity(), N // 2, seed + 50)]
        )
        found = judge(serve(arrivals, Engine(most=8), seed))
        assert failing(found) == ["constant_rate"]
        assert found.estimates.rate_changed_at == pytest.approx(before[-1], abs=3.0)
        assert found.estimates.arrival_rate.covers(0.7 * capacity())


def test_a_stalling_engine_and_a_wrong_shape_are_named() -> None:
    stalling = serve(
        poisson(0.4 * capacity(), N, 1),
        Engine(most=8, stall=lambda batch: 1.0 if batch % 300 == 299 else 0.0),
        1,
    )
    assert failing(judge(stalling)) == ["no_stalls"]
    other = LatencyModel(k1=0.0003, k2=0.0014, k3=0.0001, k4=0.0012, cv=0.15)
    assert failing(judge(serve(poisson(0.4 * capacity(), N, 1), Engine(most=8, law=other), 1))) == [
        "law_shape"
    ]


@pytest.mark.left_out
def test_clean_runs_are_not_accused() -> None:
    """At most 1 of 20 disagrees or has a failing assumption; all have enough data to agree."""
    found = [judge(clean(seed)) for seed in range(20)]
    assert sum(each.compared.verdict == "disagree" or bool(failing(each)) for each in found) <= 1
    assert sum(each.compared.verdict == "agree" for each in found) >= 19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "most", "load"), [("single", 1, 0.5), (POLICY, 8, 0.75), ("dynamic", 64, 0.5)]
)
def test_few_of_many_clean_runs_are_accused_and_the_predicted_interval_covers(
    policy: str, most: int, load: float
) -> None:
    rate = load * capacity(policy)
    truth = predict(parse_policy(policy), rate, LENGTHS, LAW, max_num_seqs=64).queueing_delay.mean
    assert truth is not None
    accused = covered = 0
    for seed in range(60):
        found = judge(serve(poisson(rate, 2000, seed), Engine(most=most), seed), policy)
        accused += found.compared.verdict == "disagree" or bool(failing(found))
        covered += found.compared.predicted.covers(truth)
    assert accused <= 3
    assert covered >= 0.88 * 60


def test_regular_arrivals_are_not_taken_for_a_closed_loop() -> None:
    arrivals = np.cumsum(
        np.random.default_rng(1).gamma(20.0, 1 / 20 / (0.6 * capacity("single")), N)
    )
    found = open_loop(seen(serve(arrivals, Engine(most=1), 1), "single"))
    assert found.holds
    assert found.measure < -4.5  # they do see fewer than the time average


def test_clients_of_a_closed_loop_are_counted() -> None:
    assert "about 6 clients" in open_loop(seen(closed(1), "single")).says


def test_a_disagreement_has_the_assumptions_of_the_engine_that_fail() -> None:
    """Or none that explains it; those of the forecast are none of its reasons."""
    snapshot = seen(clean(1), POLICY)
    bursts, slow = (
        Assumption(name, False, 2.0, f"{name} fails")
        for name in ("poisson_arrivals", "constant_speed")
    )
    off = Check(observed=0.2, modelled=0.1, half_width=0.01, requests=500)
    for given, reasons in (((), ("unexplained",)), ((bursts, slow), ("constant_speed",))):
        found = compare(snapshot, UNKNOWN, given).with_check(off, sojourn=False)
        assert (found.verdict, found.reasons) == ("disagree", reasons)
        assert found.check is not None
        assert len(found.check.causes) == 1
    lost = dataclasses.replace(off, measured_services=0.15)
    found = compare(snapshot, UNKNOWN, (slow,)).with_check(lost, sojourn=False)
    assert found.reasons == ("gateway", "constant_speed")
    near = dataclasses.replace(off, observed=0.1)
    assert compare(snapshot, UNKNOWN, (slow,)).with_check(near, sojourn=False).reasons == ()
    assert compare(snapshot, UNKNOWN, (slow,)).verdict == "not enough data"


def test_a_continuous_engine_is_judged_by_its_sojourn() -> None:
    from tests.queueing.speed_runs import simulated

    policy = "continuous:max_batch_size=8"
    found = judge(simulated(policy, 0.6, 3000, 1, LAW), policy)
    assert found.compared.verdict == "agree"
    assert found.compared.observed.value > 10 * judge_delay(found)


def judge_delay(found: Assessment) -> float:
    assert found.prediction is not None
    return found.prediction.queueing_delay.mean or math.nan


def test_what_a_run_under_one_clip_says_of_a_smaller_one() -> None:
    """Clipped at the 90th percentile; the delay that this run predicts for a clip at the median,
    against the truth there.
    """
    long = TokenDistribution.from_counts(
        np.minimum(np.random.default_rng(0).lognormal(2.5, 0.7, 10**5).astype(int) + 1, 200)
    )
    limit, smaller = long.quantile(0.9), long.quantile(0.5)
    records = [
        _clipped(each, limit)
        for each in serve(poisson(40.0, N, 1), Engine(most=8), 1, lengths=long.clip(limit))
    ]
    found = estimate(seen(records, POLICY), parse_policy(POLICY), LAW)
    policy, rate = parse_policy("dynamic"), 300.0
    what_if = predict(
        policy, rate, found.output_tokens.law(smaller), found.law(LAW), max_num_seqs=16
    ).queueing_delay.mean
    truth = predict(policy, rate, long.clip(smaller), LAW, max_num_seqs=16).queueing_delay.mean
    assert what_if == pytest.approx(truth, rel=0.1)
    assert found.output_tokens.unknown_mass == pytest.approx(0.1, abs=0.03)


def _clipped(record: Record, limit: int) -> Record:
    import msgspec

    return msgspec.structs.replace(record, clipped=record.output_tokens == limit)


def test_the_elasticity_is_that_of_the_exact_delay() -> None:
    found = judge(serve(poisson(0.6 * capacity("single"), N, 1), Engine(most=1), 1), "single")
    assert found.long_run is not None
    rate, law = found.estimates.arrival_rate.value, found.estimates.law(LAW)
    lengths = found.estimates.output_tokens.law(32)

    def exact(speed: float) -> float:
        law_there = law.at_speed(law.speed * speed)
        mean = predict(parse_policy("single"), rate, lengths, law_there).queueing_delay.mean
        return math.log(mean or math.nan)

    expected = (exact(1.0) - exact(0.95)) / -math.log(0.95)
    assert found.long_run.speed_elasticity == pytest.approx(expected, rel=0.1)


def test_relaxation_grows_with_the_load() -> None:
    assert relaxation_time(0.25, 1.0, one_by_one=True) == pytest.approx(
        4.0
    )  # M/M/1: 1 / (1 - 1/2)^2
    assert relaxation_time(0.75, 1.0, one_by_one=False) == pytest.approx(4.0)
    assert math.isinf(relaxation_time(1.0, 1.0, one_by_one=False))


def test_an_assessment_speaks_json() -> None:
    import json

    plain = json_object(judge(clean(2)).compared.summary())
    assert json.loads(json.dumps(plain, allow_nan=False))["verdict"] == "agree"
    assert set(plain["assumptions"]) >= {
        "poisson_arrivals",
        "constant_speed",
        "stable_queue",
        "open_loop",
    }


def test_an_empty_window_has_no_verdict() -> None:
    nothing = Snapshot(
        policy=POLICY,
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=10.0,
        arrivals=np.empty(0),
        rows=np.empty((0, WIDTH)),
    )
    found = assess(nothing, LAW, LIMITS)
    assert found.compared.verdict == "not enough data"
    assert found.prediction is None


def test_the_next_look_takes_over_what_stands() -> None:
    """The same window 10 s later is not solved anew, and says the same; another epoch is."""
    snapshot = seen(clean(1), POLICY)
    first = assess(snapshot, LAW, LIMITS)
    again = assess(replace(snapshot, now=snapshot.now + 0.1), LAW, LIMITS, known=first.long_run)
    assert again.long_run is first.long_run is not None
    assert again.compared.predicted == first.compared.predicted
    assert again.compared.verdict == first.compared.verdict
    other = assess(
        replace(snapshot, epoch=1, rows=_of_epoch(snapshot, 1)), LAW, LIMITS, known=first.long_run
    )
    assert other.long_run is not first.long_run


def _of_epoch(snapshot: Snapshot, epoch: int) -> np.ndarray:
    rows = snapshot.rows.copy()
    rows[:, COLUMN["epoch"]] = epoch
    return rows


def test_an_interval_of_a_delay_is_shown_without_what_lies_below_zero() -> None:
    found = compare(seen(clean(1), POLICY), Estimate(0.2, -0.1, 0.5, 30.0), ())
    wide = json_object(replace(found, observed=Estimate(0.1, -0.197, 0.397, 10.0)).summary())
    assert wide["observed"]["low"] == 0.0
    assert wide["observed"]["high"] == 0.397
    assert wide["predicted"]["low"] == 0.0
    unknown = json_object(replace(found, observed=UNKNOWN).summary())
    assert unknown["observed"]["low"] is None


def test_a_change_is_told_by_how_long_before_the_end_it_was() -> None:
    (said,) = [
        each.says for each in judge(slowed(3)).compared.assumptions if each.name == "constant_speed"
    ]
    ago = float(
        said.partition("factor of")[2].partition(", ")[2].partition(" s before the last batch")[0]
    )
    assert ago == pytest.approx(N / 2 / (0.4 * capacity()), rel=0.1), "half-way"
