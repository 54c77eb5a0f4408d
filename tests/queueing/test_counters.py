"""What counters tell of servers whose queue is not ours: lengths, step law, track record.

The servers are `tests.counted_engine`, whose law is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.counters.bucketed_lengths import law_of_buckets
from kendall.queueing.estimation.counters.fleet import (
    Level,
    Movement,
    observed_fleet,
    predicted,
    slots_in_words,
    slots_of,
)
from kendall.queueing.estimation.counters.samples import (
    LengthCounts,
    Samples,
    Totals,
    one_after_the_other,
    side_by_side,
)
from kendall.queueing.estimation.counters.step_law import StepLaw, met, moved, pace_of, step_law
from kendall.queueing.estimation.counters.track_record import (
    Hour,
    TrackRecord,
    fleet_of,
    track_record,
)
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed_path import SpeedPath
from kendall.queueing.measurement.server_signals import GAUGES
from tests.counted_engine import (
    BUCKETS,
    Law,
    at_speed,
    begun_anew,
    counters,
    hours,
    of_lengths,
    poisson,
    seen,
    wandering,
)

LAW, SLOTS, TOKENS, PROMPT = Law(), 8, 100, 200
CAPACITY = SLOTS / (
    (LAW.k4 + LAW.k3 * SLOTS) * TOKENS + SLOTS * (LAW.k1 + LAW.kp * PROMPT)
)  # requests/s


def samples(at: Sequence[float], **columns: Sequence[float]) -> Samples:
    found = {name: np.array(values, dtype=float) for name, values in columns.items()}
    gauges = {name: values for name, values in found.items() if name in GAUGES}
    counted = {name: values for name, values in found.items() if name not in GAUGES}
    return Samples(replica="a", model="m", at=np.array(at), counters=counted, gauges=gauges)


def over_all(found: Samples) -> Totals:
    return found.between([found.at[0], found.at[-1]])[0]


def test_what_came_is_what_finished_and_what_is_there_more() -> None:
    found = over_all(samples([0, 10, 20], finished=[5, 8, 9], running=[1, 2, 4], waiting=[0, 0, 3]))
    assert found.total("finished") == 4
    assert found.total("arrived") == 4 + 3 + 3
    assert found.seconds == 20
    assert found.most_while_waiting == 4


def test_a_restart_gives_no_negative_number() -> None:
    found = over_all(samples([0, 10, 20, 30], finished=[100, 110, 4, 9]))
    assert found.total("finished") == 15
    assert (found.seconds, found.missing, found.restarts) == (20, 10, 1)


def test_a_late_scrape_is_used_and_a_missing_hour_is_a_gap() -> None:
    at = [0, 10, 20, 45, 55, 65, 75, 500]
    found = over_all(samples(at, finished=[0, 1, 2, 3, 4, 5, 6, 99]))
    assert found.total("finished") == 6
    assert (found.seconds, found.missing, found.restarts) == (75, 425, 0)


def test_a_stretch_belongs_to_the_part_in_which_it_ends() -> None:
    found = samples([0, 10, 20, 30], finished=[0, 1, 3, 7]).between([0, 15, 30])
    assert [part.total("finished") for part in found] == [1, 6]


def test_without_two_scrapes_nothing_is_known() -> None:
    assert math.isnan(samples([5], finished=[3]).between([0, 10])[0].total("finished"))


def test_replicas_add_and_so_does_time() -> None:
    one = over_all(samples([0, 10], finished=[0, 4], running=[0, 0], waiting=[0, 0]))
    both, twice = side_by_side([one, one]), one_after_the_other([one, one])
    assert (both.total("finished"), both.seconds, both.longest) == (8, 20, 10)
    assert (twice.total("finished"), twice.seconds, twice.longest) == (8, 20, 20)
    assert both.rate("arrived") == one.rate("arrived") == 0.4


@pytest.mark.parametrize("text", ["geometric:mean=100", "lognormal:mu=5,sigma=0.9"])
def test_lengths_from_buckets_have_their_shares_and_the_mean(text: str) -> None:
    law = parse_distribution(text, 5000)
    counts = np.array([law.cdf[min(int(min(upper, 5000)), law.longest)] for upper in BUCKETS])
    found = law_of_buckets(BUCKETS, counts, law.mean)
    assert found is not None
    assert found.mean == pytest.approx(law.mean, rel=1e-6)
    assert found.cdf[200] == pytest.approx(law.cdf[200], abs=1e-9)
    assert found.scv == pytest.approx(law.scv, rel=0.05)


def test_lengths_of_one_bucket_keep_a_mean_that_it_allows() -> None:
    found = law_of_buckets(np.array([10.0, 20.0]), np.array([0.0, 7.0]), 12.0)
    assert found is not None
    assert found.mean == pytest.approx(12)
    assert found.shortest == 11
    beyond = law_of_buckets(np.array([10.0, 20.0]), np.array([0.0, 7.0]), 25.0)
    assert beyond is not None
    assert 19 < beyond.mean <= 20
    assert law_of_buckets(BUCKETS, np.zeros(BUCKETS.size), 3.0) is None


def test_a_token_meets_more_sequences_than_there_are_on_average() -> None:
    three = np.array([3.0])
    assert met(three, None) == 4
    assert 3 < met(three, 6)[0] < 4
    assert met(np.array([5.99]), 6) == 6
    assert moved(np.array([1e-6])) == 0
    assert moved(np.array([1e6])) == pytest.approx(1, abs=1e-5)


def test_the_step_law_is_that_of_the_engine() -> None:
    rng = np.random.default_rng(3)
    rates = np.repeat([0.3, 0.5, 0.7], 2) * CAPACITY
    served = of_lengths(poisson(rates, 3600.0, rng), TOKENS, PROMPT, LAW, SLOTS, rng)
    rows = hours(counters(served, np.arange(0, 6 * 3600.0 + 1, 15)), 6)
    found = step_law([part for row in rows for part in row.stretches], SLOTS)
    assert found is not None
    for active in (1, 4, 8):
        assert found.law.step(active) == pytest.approx(LAW.k4 + LAW.k3 * active, rel=0.03)
    prompt = LAW.k1 + LAW.kp * PROMPT
    assert found.law.admission(1, PROMPT) == pytest.approx(prompt, rel=0.1)


def test_what_stretches_cannot_separate_is_said() -> None:
    part = Totals(
        seconds=60,
        increases={
            "finished": 20,
            "arrived": 20,
            "token_gap_sum": 120,
            "token_gap_count": 2000,
            "service_sum": 125,
            "service_count": 20,
            "output_tokens_sum": 2020,
            "output_tokens_count": 20,
        },
    )
    found = step_law([part, part], None)
    assert found is not None
    assert found.law.step(1) == found.law.step(50) == pytest.approx(0.06, rel=1e-6)
    assert "hardly varied" in found.notes[0]
    assert "no time of a prefill" in found.notes[1]


def test_the_track_record_of_an_engine_that_follows_the_law() -> None:
    """Two replicas, each with its half of the requests: means within 5 % of those of a run ten
    times as long, and nine of ten hours in their intervals.
    """
    rng = np.random.default_rng(11)
    number, rate = 12, 0.6 * CAPACITY
    series = []
    for name in ("a:1", "b:1"):
        arrived = poisson(np.full(number, rate), 3600.0, rng)
        served = of_lengths(arrived, TOKENS, PROMPT, LAW, SLOTS, rng)
        series += counters(served, np.arange(0, number * 3600.0 + 1, 30), instance=name)
    record = track_record(hours(series, number), model="tiny", server="vLLM")
    truth = of_lengths(poisson(np.full(120, rate), 3600.0, rng), TOKENS, PROMPT, LAW, SLOTS, rng)
    assert record.slots == SLOTS
    same = [row.same_hour for row in record.rows if row.same_hour is not None]
    for name, expected in (("queueing_delay", truth.delay), ("sojourn_time", truth.sojourn)):
        predicted = np.mean([getattr(each, name).value for each in same])
        assert predicted == pytest.approx(expected.mean(), rel=0.05)
    for inside, of in (record.coverage, record.sojourn_coverage):
        assert of == number - 1
        assert inside >= 0.85 * of
    assert all(row.observed.replicas == 2 for row in record.rows)


def test_prompts_that_a_cache_holds_in_part_take_what_is_computed() -> None:
    """Three quarters of the prompt tokens are hits; the law is that of the computed ones."""
    rng = np.random.default_rng(8)
    number, rate = 6, 0.6 * CAPACITY
    served = of_lengths(
        poisson(np.full(number, rate), 3600.0, rng), TOKENS, PROMPT, LAW, SLOTS, rng
    )
    cached = rng.integers(0, 6 * PROMPT, served.prompts.size)
    series = counters(served, np.arange(0, number * 3600.0 + 1, 15), cached=cached)
    record = track_record(hours(series, number), model="tiny", server="vLLM")
    last = record.rows[-1]
    assert last.observed.prefix_hits == pytest.approx(0.75, abs=0.02)
    assert record.law is not None
    assert record.law.law.admission(1, PROMPT) == pytest.approx(LAW.k1 + LAW.kp * PROMPT, rel=0.1)
    told = np.mean([row.same_hour.sojourn_time.value for row in record.rows if row.same_hour])
    assert told == pytest.approx(served.sojourn.mean(), rel=0.05)


def test_an_engine_whose_speed_changes_within_seconds() -> None:
    """On average over windows of some minutes the delay is told, which at one speed is half of it;
    an engine that keeps its speed is told as before.
    """
    rng = np.random.default_rng(21)
    seconds, number, rate = 240.0, 8, 0.7 * CAPACITY
    observed, told = [], []
    for _ in range(number):
        arrived = poisson(np.array([rate]), seconds, rng)
        knots, speed = wandering(seconds, 0.3, rng)
        served = at_speed(arrived, TOKENS, PROMPT, LAW, SLOTS, rng, knots=knots, speed=speed)
        (hour,) = hours(counters(served, np.arange(0, seconds + 1)), 1, seconds)
        law = step_law(hour.stretches, SLOTS)
        assert law is not None
        fleet = fleet_of(hour, law.law, SLOTS)
        assert fleet is not None
        observed.append(hour.totals.mean("queue_time"))
        told.append(predicted(fleet).queueing_delay.value)
    assert np.mean(told) == pytest.approx(np.mean(observed), rel=0.25)
    steady = of_lengths(arrived, TOKENS, PROMPT, LAW, SLOTS, rng)
    (hour,) = hours(counters(steady, np.arange(0, seconds + 1)), 1, seconds)
    assert pace_of(hour.parts, LatencyModel(k1=LAW.k1, k3=LAW.k3, k4=LAW.k4, kp=LAW.kp), 8) is None


def test_a_miss_has_its_cause() -> None:
    """More requests in the fourth hour, a restart in the sixth, few scrapes in the eighth."""
    rng = np.random.default_rng(4)
    rates = np.array([0.4, 0.4, 0.4, 0.9, 0.4, 0.4, 0.4, 0.4]) * CAPACITY
    served = of_lengths(poisson(rates, 3600.0, rng), TOKENS, PROMPT, LAW, SLOTS, rng)
    instants = np.arange(0, 8 * 3600.0 + 1, 15)
    series = begun_anew(counters(served, instants), 5.5 * 3600)
    series = seen(series, (instants < 7.2 * 3600) | (instants > 7.8 * 3600))
    record = track_record(hours(series, 8), model="tiny", server="vLLM", slots=SLOTS)
    rush, restarted, gap = record.rows[3], record.rows[5], record.rows[7]
    assert rush.inside is False
    assert "arrivals" in rush.cause
    assert "more" in rush.cause
    assert restarted.observed.restarts == 1
    assert restarted.observed.requests > 0
    assert gap.observed.missing_seconds == pytest.approx(0.6 * 3600, abs=60)
    assert rush in record.missed[:2]  # beside the hour after it, which was expected to be as busy


def test_a_replica_that_leaves_and_several_models() -> None:
    rng = np.random.default_rng(6)
    instants = np.arange(0, 2 * 3600.0 + 1, 30)
    made = {
        name: counters(
            of_lengths(
                poisson(np.full(2, 0.5 * CAPACITY), 3600.0, rng), TOKENS, PROMPT, LAW, 8, rng
            ),
            instants,
            instance=name,
        )
        for name in ("a:1", "b:1")
    }
    series = made["a:1"] + seen(made["b:1"], instants < 3600)
    first, second = hours(series, 2)
    assert (first.replicas, second.replicas) == (2, 1)
    assert second.covered == pytest.approx(1)
    record = track_record([first, second], model="tiny", server="vLLM", slots=SLOTS)
    forecast = record.rows[1].forecast
    assert forecast is not None
    assert forecast.load == pytest.approx(0.5, rel=0.1)


def test_an_hour_without_some_scrapes_has_the_dispersion_of_the_rest() -> None:
    """Parts that were scraped for a shorter time count fewer arrivals: that is no burst."""
    at = np.arange(0.0, 3601.0, 15.0)
    whole = samples(at, finished=2.0 * at, running=np.zeros(at.size), waiting=np.zeros(at.size))
    kept = (at < 1000) | (at > 2190)
    gap = samples(
        at[kept],
        finished=2.0 * at[kept],
        running=np.zeros(kept.sum()),
        waiting=np.zeros(kept.sum()),
    )
    edges = np.linspace(0.0, 3600.0, 61).tolist()
    for each in (whole, gap):
        hour = Hour.of(edges, [each.between(edges)])
        assert len(hour.arrivals) >= 6
        assert hour.dispersion < 0.5


# ---- what counters tell, by hand ----


def totals(seconds: float = 60.0, longest: float | None = None, **increases: float) -> Totals:
    return Totals(
        seconds=seconds,
        longest=seconds if longest is None else longest,
        increases={name: float(value) for name, value in increases.items()},
    )


TIMES = {
    "finished": 10,
    "sojourn_sum": 50,
    "sojourn_count": 10,
    "queue_time_sum": 20,
    "queue_time_count": 10,
    "first_token_sum": 26,
    "first_token_count": 10,
    "generated": 110,
    "prompted": 300,
}


@pytest.mark.parametrize(
    ("name", "added", "expected"),
    [
        ("service", {}, 5.0 - 2.0),
        ("service", {"service_sum": 28, "service_count": 10}, 2.8),
        ("decoding", {}, 10 / 60 * (5.0 - 2.6)),
        ("decoding", {"token_gap_sum": 90}, 90 / 60),
        ("decoding", {"first_token_count": 0}, 10 / 60 * 3.0),
        ("gap", {}, (5.0 - 2.6) / 10),
        ("gap", {"generated": 15}, (5.0 - 2.6) / 1.0),
        ("gap", {"token_gap_sum": 90, "token_gap_count": 450}, 0.2),
        ("gap", {"first_token_count": 0}, 3.0 / 11),
        ("prefill", {}, 2.6 - 2.0),
        ("prefill", {"prefill_sum": 5, "prefill_count": 10}, 0.5),
        ("outside", {}, 0.0),
        ("outside", {"service_sum": 28, "service_count": 10}, 5.0 - 2.0 - 2.8),
        ("outside", {"service_sum": 38, "service_count": 10}, 0.0),
        ("mean_output", {}, 11.0),
        ("mean_output", {"output_tokens_sum": 90, "output_tokens_count": 10}, 9.0),
        ("mean_output", {"finished": 0}, math.nan),
        ("mean_prompt", {}, 30.0),
        ("mean_prompt", {"prompt_tokens_sum": 200, "prompt_tokens_count": 10}, 20.0),
        ("hit_share", {"prefix_queries": 0, "prefix_hits": 0}, math.nan),
        ("hit_share", {"prefix_queries": 1, "prefix_hits": 1}, 1.0),
        ("mean_computed", {}, 30.0),
        ("mean_computed", {"prefix_queries": 400, "prefix_hits": 100}, 30.0 * 3 / 4),
        ("mean_computed", {"computed_tokens_sum": 70, "computed_tokens_count": 10}, 7.0),
        ("mean_running", {}, 10 / 60 * 3.0),
        ("mean_running", {"service_sum": 30, "service_count": 9}, 0.5),
        ("mean_waiting", {}, 20 / 60),
    ],
)
def test_every_mean_is_that_of_the_best_counter_that_there_is(
    name: str, added: dict[str, float], expected: float
) -> None:
    found = getattr(totals(**TIMES | added), name)
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"finished": [0, 3], "sojourn_count": [0, 4]}, 3),
        ({"sojourn_count": [0, 4], "queue_time_count": [0, 5]}, 4),
        ({"queue_time_count": [0, 5], "output_tokens_count": [0, 6]}, 5),
        ({"output_tokens_count": [0, 6]}, 6),
        ({"finished": [math.nan, math.nan], "sojourn_count": [0, 4]}, 4),
    ],
)
def test_requests_are_counted_by_the_first_counter_of_them(
    columns: dict[str, list[float]], expected: float
) -> None:
    found = over_all(samples([0, 10], **columns, running=[4, 2], waiting=[0, 1]))
    assert found.total("finished") == expected
    assert found.total("arrived") == expected - 2 + 1
    assert (found.most_running, found.scrapes, found.restarts) == (2, 1, 0)
    assert found.rate("finished") == expected / 10


def test_arrivals_are_never_negative_and_gauges_may_be_missing() -> None:
    found = over_all(samples([0, 10], finished=[0, 1], running=[5, 0]))
    assert found.total("arrived") == 0
    assert math.isnan(found.most_while_waiting)
    assert found.most_running == 0
    assert math.isnan(over_all(samples([0, 10], running=[5, 0])).total("arrived"))
    assert math.isnan(Totals(increases={"finished": 1.0}).rate("finished"))


def test_a_gap_is_more_than_four_usual_stretches() -> None:
    at = [0, 10, 20, 30, 40, 50, 90, 130.1]
    kv_usage = [0.1, 0.5, 0.2, 0.2, 0.2, 0.2, 0.3, 0.9]
    found = over_all(samples(at, finished=range(8), kv_usage=kv_usage))
    assert (found.seconds, found.missing, found.scrapes) == (90, pytest.approx(40.1), 6)
    assert (found.total("finished"), found.kv_usage) == (6, 0.5)


def test_replicas_with_other_buckets_have_those_that_both_have() -> None:
    def of(uppers: list[float], counts: list[float], **more: float) -> Totals:
        lengths = {"output_tokens": LengthCounts(np.array(uppers), np.array(counts))}
        return Totals(lengths=lengths, **more)  # type: ignore[arg-type]

    one = of([10, 20, math.inf], [1, 3, 4], kv_usage=0.3, restarts=1, missing=5.0, scrapes=2)
    other = of([20, 40, math.inf], [5, 6, 9], most_while_waiting=3, most_running=7, scrapes=4)
    found = side_by_side([one, other])
    assert found.lengths["output_tokens"].uppers.tolist() == [20, math.inf]
    assert found.lengths["output_tokens"].counts.tolist() == [8, 13]
    assert (found.kv_usage, found.most_while_waiting, found.most_running) == (0.3, 3, 7)
    assert (found.restarts, found.missing, found.scrapes) == (1, 5.0, 6)
    same = one_after_the_other([one, one]).lengths["output_tokens"]
    assert (same.uppers.tolist(), same.counts.tolist()) == ([10, 20, math.inf], [2, 6, 8])
    assert side_by_side([]).longest == 0


# ---- lengths ----


@pytest.mark.parametrize("uppers", [[10.0, 20.0], [10.5, 20.0, 30.0]])
def test_buckets_of_a_geometric_law_have_that_law(uppers: list[float]) -> None:
    """Shares of equal buckets fall by one factor; so does the density, within them too."""
    n = np.arange(int(uppers[-1]) + 1)
    pmf = np.where(n > 0, 0.93**n, 0.0)
    pmf /= pmf.sum()
    counts = 50 * np.cumsum(pmf)[np.floor(uppers).astype(int)]
    found = law_of_buckets(np.array(uppers), counts, math.nan)
    assert found is not None
    assert found.pmf == pytest.approx(pmf, rel=1e-9)


def test_a_last_bucket_without_an_end_ends_at_twice_its_begin() -> None:
    found = law_of_buckets(np.array([10.5, math.inf]), np.array([5.0, 9.0]), math.nan)
    assert found is not None
    assert found.longest == 20
    assert found.cdf[10] == pytest.approx(5 / 9)
    one = law_of_buckets(np.array([math.inf]), np.array([9.0]), math.nan)
    assert one is not None
    assert one.pmf.tolist() == [0, 0.5, 0.5]


def test_lengths_are_tilted_by_one_factor_a_token() -> None:
    """Even buckets: the density within each is exponential, with one rate for both."""
    found = law_of_buckets(np.array([10.0, 20.0]), np.array([3.0, 6.0]), 12.0)
    assert found is not None
    logs = np.log(found.pmf[1:])
    steps = np.delete(np.diff(logs), 9)
    assert steps == pytest.approx(np.full(18, steps[0]), abs=1e-9)
    assert found.mean == pytest.approx(12.0, abs=1e-9)
    assert steps[0] > 0.05, "even lengths would have a mean of 10.5"


@pytest.mark.parametrize(("mean", "expected"), [(1.0, 6.0), (50.0, 15.0)])
def test_a_mean_that_the_buckets_exclude_is_moved_to_their_ends(
    mean: float, expected: float
) -> None:
    found = law_of_buckets(np.array([10.0, 20.0]), np.array([3.0, 6.0]), mean)
    assert found is not None
    assert found.mean == pytest.approx(expected, abs=1e-6)


# ---- the step law ----


def steady(
    arrivals: float,
    decoding: float,
    prompt: float,
    law: LatencyModel,
    *,
    slots: int | None = None,
    service: float = 3.0,
    seconds: float = 60.0,
    prefills: bool = True,
) -> Totals:
    """What is counted where the equations of the module hold: so many sequences make tokens, on
    average.
    """
    ratio = seconds / service
    within = 1 - 2 * (ratio - 1 + math.exp(-ratio)) / ratio**2
    sequences = decoding + within * (met_by_hand(decoding, slots) - decoding)
    cost = law.k1 + law.kp * prompt
    gap = (law.k4 + law.k3 * max(1.0, sequences)) / (1 - arrivals * (law.k3 + cost))
    together = 1 + arrivals * gap * (1 - math.exp(-decoding))
    prefill = law.k4 + law.k3 * (decoding + together) + together * cost
    count = arrivals * seconds
    counted = {"finished": count, "arrived": count}
    counted |= {"token_gap_sum": decoding * seconds, "token_gap_count": decoding * seconds / gap}
    counted |= {"service_sum": service * count, "service_count": count}
    if prompt:
        counted |= {"prompt_tokens_sum": prompt * count, "prompt_tokens_count": count}
    if prefills:
        counted |= {"prefill_sum": prefill * count, "prefill_count": count}
    return totals(seconds, **counted)


def met_by_hand(mean: float, slots: int | None) -> float:
    """E[n^2] / E[n] of those in service of M/M/c, whose mean number is the offered load."""
    if slots is None:
        return mean + 1
    weights = [mean**n / math.factorial(n) for n in range(slots)]
    weights.append(mean**slots / math.factorial(slots) / (1 - mean / slots))
    moments = [sum(n**k * weight for n, weight in enumerate(weights)) for k in (1, 2)]
    return moments[1] / moments[0]


TRUE = LatencyModel(k1=0.004, k3=0.002, k4=0.02, kp=0.0001)
FOUR = [(0.5, 2.0, 100.0), (0.8, 2.9, 160.0), (1.0, 4.4, 120.0), (1.3, 5.0, 200.0)]


@pytest.mark.parametrize("slots", [None, 6])
@pytest.mark.parametrize("service", [3.0, 30.0])
def test_stretches_that_hold_the_equations_have_their_law(
    slots: int | None, service: float
) -> None:
    """Four stretches determine four coefficients whatever the arrivals explain."""
    stretches = [steady(*each, TRUE, slots=slots, service=service) for each in FOUR]
    found = step_law(stretches, slots)
    assert found is not None
    told = [found.law.k1, found.law.k3, found.law.k4, found.law.kp]
    assert told == pytest.approx([TRUE.k1, TRUE.k3, TRUE.k4, TRUE.kp], rel=1e-5)
    assert (found.stretches, found.notes) == (4, ())


def test_what_the_arrivals_do_not_explain_is_not_blamed_on_the_sequences() -> None:
    """The gaps are those of the sequences that arrivals of each stretch and the one before leave,
    m' = lam - m / s; those that are seen have a disturbance too of which arrivals know nothing.
    """
    rates, seconds, service = [0.6, 1.2, 0.7, 1.5, 0.9, 0.8, 1.4, 1.0], 20.0, 9.0
    present, stretches, means = rates[0] * service, [], []
    times = np.linspace(0.0, seconds, 20_001)
    for rate in rates:
        path = rate * service + (present - rate * service) * np.exp(-times / service)
        mean, present = float(np.trapezoid(path, times) / seconds), float(path[-1])
        law = LatencyModel(k3=0.002, k4=0.02)
        means.append(mean)
        stretches.append(
            steady(rate, mean, 0.0, law, service=service, seconds=seconds, prefills=False)
        )
    gaps = np.array([each.gap for each in stretches])
    known = np.stack([np.ones(8), means, np.array(rates) * gaps], axis=1)
    weights = np.array([each.total("finished") for each in stretches])
    drawn = np.random.default_rng(1).standard_normal(8)
    disturbed = drawn - known @ np.linalg.solve(
        known.T @ (known * weights[:, None]), known.T @ (weights * drawn)
    )
    seen = []
    for each, gap, more in zip(stretches, gaps, disturbed, strict=True):
        making = each.total("token_gap_sum") + more * seconds
        counted = {"token_gap_sum": making, "token_gap_count": making / gap}
        seen.append(totals(seconds, **each.increases | counted))
    found = step_law(seen, None)
    assert found is not None
    assert (found.law.k3, found.law.k4) == pytest.approx((0.002, 0.02), rel=1e-5)
    assert found.notes == ("no time of a prefill is counted: prompts count as taking none",)
    blank = totals(seconds, **seen[0].increases | {"token_gap_sum": 0.0})
    again = step_law([blank, *seen], None)
    assert again is not None
    assert again.stretches == 8, "one without a time tells nothing"


def test_the_fit_weighs_relative_errors_by_requests() -> None:
    """Gaps of three stretches that no law of two coefficients has: the normal equations hold."""
    chosen = [(0.5, 2.0, 0.02), (1.0, 4.0, 0.026), (1.4, 7.0, 0.021)]
    stretches = [
        steady(rate, decoding, 0.0, LatencyModel(k3=0.002, k4=k4), seconds=1e6, prefills=False)
        for rate, decoding, k4 in chosen
    ]
    found = step_law(stretches, None)
    assert found is not None
    rates, sequences, _ = np.array(chosen).T
    law = found.law
    # a gap has one token more, and those who enter in it
    fitted = (law.k4 + law.k3 * (sequences + 1 - 6e-6)) / (1 - rates * law.k3)
    design = np.stack([np.ones(3), sequences + 1 + rates * fitted])
    off = np.array([each.gap for each in stretches]) / fitted - 1
    weights = np.array([each.total("finished") for each in stretches])
    assert np.abs(off).max() > 0.02
    assert (design / fitted) @ (weights * off) / weights.sum() == pytest.approx([0, 0], abs=1e-4)


def test_stretches_count_by_their_requests_and_those_with_few_do_not() -> None:
    law = LatencyModel(k4=0.06)
    stretches = [
        steady(rate, 2.0, 0.0, LatencyModel(k4=gap), prefills=False)
        for rate, gap in ((1.0, 0.06), (3.0, 0.063), (5.0 / 60, 0.07), (4.9 / 60, 9.0))
    ]
    found = step_law(stretches, None)
    assert found is not None
    assert found.stretches == 3
    assert found.law.k3 == 0
    weights, gaps = np.array([60.0, 180.0, 5.0]), np.array([0.06, 0.063, 0.07])
    assert found.law.k4 == pytest.approx(float(np.average(gaps, weights=weights)), rel=1e-9)
    assert step_law([steady(4.9 / 60, 2.0, 0.0, law)], None) is None


@pytest.mark.parametrize(
    ("prompts", "notes", "zero"),
    [
        ((0.0, 0.0, 0.0, 0.0), ["no prompt lengths are counted"], "kp"),
        ((100.0, 100.0, 100.0, 101.0), ["prompts were of one mean length"], "k1"),
        ((100.0, 90.0, 110.0, 120.0), [], None),
    ],
)
def test_what_prompts_cost_is_told_as_far_as_they_differ(
    prompts: tuple[float, ...], notes: list[str], zero: str | None
) -> None:
    stretches = [
        steady(rate, decoding, prompt, TRUE)
        for (rate, decoding, _), prompt in zip(FOUR, prompts, strict=True)
    ]
    found = step_law(stretches, None)
    assert found is not None
    assert [note.split(":")[0] for note in found.notes] == notes
    taken = found.law.admission(1, prompts[0])
    assert taken == pytest.approx(TRUE.k1 + TRUE.kp * prompts[0], rel=0.02)
    assert [name for name in ("k1", "kp") if not getattr(found.law, name)] == (
        [] if zero is None else [zero]
    )


@pytest.mark.parametrize(("apart", "told"), [(0.0195, False), (0.0205, True)])
def test_sequences_that_vary_by_two_hundredths_tell_what_one_more_costs(
    apart: float, told: bool
) -> None:
    """The coefficient of variation of those in a step, which are one more than on average."""
    law = LatencyModel(k3=0.002, k4=0.02)
    stretches = [
        steady(rate, 9.0 + sign * 10.0 * apart, 0.0, law, seconds=1e7, prefills=False)
        for sign, rate in ((-1, 1e-3), (1, 1.01e-3))
    ]
    found = step_law(stretches, None)
    assert found is not None
    assert bool(found.law.k3) is told
    assert len(found.notes) == 2 - told


@pytest.mark.parametrize(("ratio", "known"), [(math.exp(0.0795), False), (math.exp(0.0805), True)])
def test_the_speed_of_successive_stretches_is_that_of_their_gaps(ratio: float, known: bool) -> None:
    """The standard deviation of two logs is half of their distance; a token each counts alike."""
    law = LatencyModel(k4=0.02)
    slow = LatencyModel(k4=0.02 * ratio)
    parts = [
        steady(1.0, 2.0, 0.0, law, seconds=60.0),
        steady(1.0, 3.0, 0.0, slow, seconds=30.0),
    ]
    found = pace_of(parts, law, None)
    assert (found is not None) is known
    if found is not None:
        tokens = np.array([2.0 / 0.02 * 60, 3.0 / (0.02 * ratio) * 30])
        mean = float(np.average([1.0, ratio], weights=tokens))
        assert found.at.tolist() == [0, 60, 90]
        assert found.speed == pytest.approx([1 / mean, ratio / mean], rel=1e-12)
        assert found.outside == 1
    assert pace_of(parts[:1], law, None) is None


# ---- the queue that they describe ----


# 100 requests of 10 tokens, 3 s of service each
USUAL = {
    "finished": 100,
    "arrived": 100,
    "output_tokens_sum": 1000,
    "output_tokens_count": 100,
    "service_sum": 300,
    "service_count": 100,
}


def fleet(*, law: LatencyModel | None = None, slots: int | None = None, **counted: float) -> Any:
    """USUAL in 100 s of two replicas."""
    told = totals(200.0, 100.0, **USUAL | counted)
    return observed_fleet(told, law or LatencyModel(k4=0.2), slots)


def test_a_queue_has_the_rate_lengths_and_speed_of_its_counters() -> None:
    """Steps of one length: a request takes as many as it has tokens, each 3 / 10 s."""
    found = fleet(sojourn_sum=400, sojourn_count=100, queue_time_sum=50, queue_time_count=100)
    assert found.arrival_rate == 0.5
    n = np.arange(1, 401)
    law = 0.1 * 0.9 ** (n - 1)
    assert found.output_tokens.pmf[1:] == pytest.approx(law / law.sum(), rel=1e-9)
    assert found.law.step(1) == pytest.approx(0.3, rel=1e-3)
    assert found.outside == pytest.approx(4 - 0.5 - 3)
    assert (found.requests, found.dispersion, found.pace) == (100, 1.0, None)
    assert found.rate_error == pytest.approx(0.1)
    assert found.at(dispersion=4.0).rate_error == pytest.approx(0.2)
    assert found.at(dispersion=0.5).rate_error == pytest.approx(0.1)
    assert found.length_error == pytest.approx(math.sqrt(0.9 / 100), rel=1e-3)
    level = found.level
    assert level == (0.5, found.rate_error, pytest.approx(3.0, rel=1e-3), found.length_error)


@pytest.mark.parametrize(
    ("counted", "known"),
    [
        ({"arrived": 20}, True),
        ({"arrived": 19}, False),
        ({"output_tokens_count": 0}, False),
        ({"output_tokens_count": 0, "generated": 900}, True),
    ],
)
def test_a_queue_needs_twenty_requests_and_a_length(counted: dict[str, float], known: bool) -> None:
    assert (fleet(**counted) is not None) is known


@pytest.mark.parametrize(
    ("seconds", "step"), [(3.0, 0.3), (39.0, 3.9), (41.0, 0.2), (0.105, 0.0105), (0.095, 0.2)]
)
def test_a_speed_is_found_up_to_twenty_times_faster_and_slower(seconds: float, step: float) -> None:
    """e^3 is 20.1; what is farther off is no speed of this law."""
    found = fleet(service_sum=100 * seconds)
    assert found.law.step(1) == pytest.approx(step, rel=1e-3)


@pytest.mark.parametrize(("tokens", "mean"), [(100, 1.0), (90, 1.0)])
def test_answers_of_a_token_are_of_one_length(tokens: float, mean: float) -> None:
    found = fleet(output_tokens_sum=tokens)
    assert found.output_tokens.pmf.tolist() == [0, 1]
    assert found.prompt_tokens is None
    prompts = fleet(output_tokens_sum=tokens, computed_tokens_sum=760, computed_tokens_count=100)
    assert prompts.prompt_tokens.mean == 8
    assert fleet(computed_tokens_sum=1, computed_tokens_count=100).prompt_tokens.mean == 1


def test_slots_that_are_never_taken_are_left_out() -> None:
    """1.5 sequences on average, and 8 standard deviations and 8 more."""
    assert fleet(slots=8).queue.bound == 8
    expected = math.ceil(1.5 + 8 * math.sqrt(1.5) + 8)
    assert abs(fleet(slots=500).queue.bound - expected) <= 1
    assert fleet().queue.bound is None
    law = LatencyModel(k4=0.2, kp=0.001)
    prompts = {"computed_tokens_sum": 700, "computed_tokens_count": 100}
    assert fleet(**prompts).queue.requests.prompt_tokens is None
    assert fleet(law=law, **prompts).queue.requests.prompt_tokens.mean == 7


def test_how_far_stretches_move_is_beyond_chance_and_never_nothing() -> None:
    """One usual step, and those that were seen less their errors; Student's, over the normal."""
    few = float(scipy.stats.t.ppf(0.95, 2) / scipy.stats.norm.ppf(0.95))
    none = Movement.of([Level(1.0, 0.1, 3.0, 0.1)])
    assert none.arrivals == pytest.approx(few * 0.2)
    assert none.services == pytest.approx(few * 0.02)
    levels = [Level(1.0, 0.1, 3.0, 0.05), Level(2.0, 0.2, 3.0, 0.05), Level(1.9, 0.1, 4.0, 0.01)]
    found = Movement.of(levels)
    few = float(scipy.stats.t.ppf(0.95, 4) / scipy.stats.norm.ppf(0.95))
    arrivals = math.log(2) ** 2 - 0.1**2 - 0.2**2  # the second step is within chance
    services = math.log(4 / 3) ** 2 - 0.05**2 - 0.01**2
    assert found.arrivals == pytest.approx(few * math.sqrt((0.2**2 + arrivals) / 3))
    assert found.services == pytest.approx(few * math.sqrt((0.02**2 + services) / 3))


def test_without_a_wait_for_slots_a_request_waits_for_the_next_step() -> None:
    """Each step takes 0.3 s, however many requests are in it. A request waits half a step where
    the engine is busy, which is all but a share e^(-lam s) of the time. The sojourn is that wait,
    the service, and the time outside the engine.
    """
    found = fleet(sojourn_sum=400, sojourn_count=100, queue_time_sum=50, queue_time_count=100)
    told = predicted(found)
    wait = 0.15 * (1 - math.exp(-0.5 * 3.0))
    assert told.queueing_delay.value == pytest.approx(wait, rel=0.05)
    assert told.sojourn_time.value == pytest.approx(wait + 3.0 + 0.5, rel=0.01)
    assert (told.load, told.method) == (0, "approximation")
    assert not told.sojourn_time.known
    interval = predicted(found, Movement())
    for each, least in ((interval.queueing_delay, 0.0), (interval.sojourn_time, 0.5)):
        assert each.low <= least + 0.95 * (each.value - least) + 1e-12
        assert each.high >= least + 1.05 * (each.value - least) - 1e-12
        assert each.known
    assert interval.queueing_delay.high < 3 * wait


def test_one_slot_is_a_single_server() -> None:
    """Pollaczek and Khinchine; geometric lengths of 10 tokens at 0.1 s and a load of 0.5."""
    found = fleet(slots=1, service_sum=100)
    told = predicted(found)
    assert told.load == pytest.approx(0.5, rel=0.01)
    second = 0.01 * (2 - 0.1) / 0.01
    delay = 0.5 * second / (2 * (1 - 0.5))
    assert told.queueing_delay.value == pytest.approx(delay, rel=0.02)
    assert told.sojourn_time.value == pytest.approx(delay + 1.0, rel=0.02)


def test_what_the_approximation_does_not_tell_is_simulated() -> None:
    """A short delay, more than is served, an engine whose speed changes."""
    assert predicted(fleet(slots=3)).method == "approximation"
    short = predicted(fleet(slots=8))
    assert short.method == "simulation"
    assert short.queueing_delay.value == pytest.approx(0.15 * (1 - math.exp(-1.5)), rel=0.1)
    assert short.sojourn_time.value == pytest.approx(3.1, rel=0.1)
    more = predicted(fleet(slots=1, service_sum=250))
    assert (more.method, more.load) == ("simulation", pytest.approx(1.25, rel=0.01))
    # request after request waits half a second longer, 100 of them
    assert more.queueing_delay.value == pytest.approx(25, rel=0.3)
    even, changing = fleet(slots=2), SpeedPath(np.array([0.0, 50, 100]), np.array([0.6, 3.0]), 1.0)
    told = predicted(even.at(pace=changing))
    assert told.method == "simulation"
    assert told.queueing_delay.value > 2 * predicted(even).queueing_delay.value


@pytest.mark.parametrize(
    ("most", "expected"), [([], None), ([math.nan, 0.0], None), ([math.nan, 1.0, 3.0, 2.0], 3)]
)
def test_slots_are_the_most_that_ran_while_something_waited(
    most: list[float], expected: int | None
) -> None:
    assert slots_of([Totals(most_while_waiting=each) for each in most]) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8, 16, 4.0), "16 slots a replica, as given"),
        ((8, None, 9.0), "8 slots a replica: the most that ran while something waited"),
        (
            (None, None, 9.0),
            "slots not known, 9 ran at most and nothing waited: no wait for a slot is predicted; "
            "--max-num-seqs says how many there are",
        ),
        (
            (None, None, math.nan),
            "slots not known, nothing is counted and nothing waited: no wait for a slot is "
            "predicted; --max-num-seqs says how many there are",
        ),
    ],
)
def test_where_the_number_of_slots_is_from(
    arguments: tuple[int | None, int | None, float], text: str
) -> None:
    assert slots_in_words(*arguments) == text


# ---- the record ----


def counted_hour(number: int, delay: float = 0.2, **more: Any) -> Hour:
    """USUAL, whose delay and restarts are what a test is about."""
    increases = USUAL | {
        "queue_time_sum": 100 * delay,
        "queue_time_count": 100,
        "sojourn_sum": 100 * (3.0 + delay),
        "sojourn_count": 100,
    }
    kept = {name: value for name, value in more.items() if name not in increases}
    increases |= {name: value for name, value in more.items() if name in increases}
    if "preempted" in kept:
        increases["preempted"] = kept.pop("preempted")
    arrivals, stretches = kept.pop("arrivals", ()), kept.pop("stretches", ())
    seen = {"seconds": 200.0, "longest": 100.0} | kept
    return Hour(
        start=100.0 * number,
        end=100.0 * (number + 1),
        totals=Totals(increases={k: float(v) for k, v in increases.items()}, **seen),
        parts=(),
        stretches=stretches,
        arrivals=arrivals,
        replicas=2,
    )


GIVEN = StepLaw(LatencyModel(k4=0.3), 5, ("as given",))


def recorded(*hours: Hour) -> TrackRecord:
    return track_record(hours, model="tiny", server="vLLM", given=GIVEN)


def gapped(*gaps: float) -> tuple[Totals, ...]:
    return tuple(totals(token_gap_sum=10 * each, token_gap_count=10) for each in gaps)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"restarts": 1}, "1 restart"),
        ({"longest": 80.0}, "no scrapes for 20% of the time"),
        ({"restarts": 2, "longest": 80.0}, "2 restarts and no scrapes for 20% of the time"),
        ({"longest": 90.0, "preempted": 1}, "KV memory: 1 preemptions"),
        ({"preempted": 0.5, "kv_usage": 0.96}, "KV memory: 96% full"),
        (
            {"kv_usage": 0.95, "stretches": gapped(0.1, 0.1, 0.1, 0.1, 0.2, 0.2)},
            "the speed of the engine changed: 100 to 200 ms between tokens",
        ),
        (
            {"stretches": gapped(0.1, 0.1, 0.2, 0.2), "arrivals": (10.0, 30.0, 20.0)},
            "bursts: arrivals vary 5.0 times as much as Poisson ones",
        ),
        (
            {"stretches": gapped(*[0.1] * 4, 0.15, 0.15), "arrivals": (10.0, 30.0)},
            "not in the counters: with its own estimates the model misses this row too",
        ),
        (
            {"arrivals": (10.0, 10.0 + 2**0.5 * 2, 10.0 + 2**0.5)},
            "not in the counters: with its own estimates the model misses this row too",
        ),
        (
            {"service_sum": 900.0, "queue_time_sum": 45.0},
            "steps: 200% slower than the row before",
        ),
    ],
)
def test_a_row_that_is_missed_says_why(more: dict[str, Any], cause: str) -> None:
    made = counted_hour(0), counted_hour(1, **{"delay": 5.0} | more)
    record = track_record(made, model="tiny", server="vLLM", slots=30, given=GIVEN)
    first, second = record.rows
    assert (first.inside, first.cause) == (None, "")
    assert second.inside is False
    assert second.cause == cause
    assert record.missed == (second,)


BUSY = {"arrived": 230.0, "finished": 230.0, "delay": 3.7}
LONG = {"output_tokens_sum": 2300.0, "service_sum": 690.0, "delay": 7.5}
SLOW = {"service_sum": 690.0, "delay": 7.5}
QUIET = {"delay": 0.001}


@pytest.mark.parametrize(
    ("hours_", "cause"),
    [
        (({}, BUSY), "arrivals: 130% more than the row before"),
        (({"arrived": 180, "finished": 180}, QUIET), "arrivals: 44% fewer than the row before"),
        (({}, LONG), "answers: 130% longer than the row before"),
        (
            ({"output_tokens_sum": 1800, "service_sum": 540}, QUIET),
            "answers: 44% shorter than the row before",
        ),
        (({}, SLOW), "steps: 130% slower than the row before"),
        (({"service_sum": 540}, QUIET), "steps: 44% faster than the row before"),
    ],
)
def test_of_what_changed_the_cause_is_what_moves_the_delay(
    hours_: tuple[dict[str, float], ...], cause: str
) -> None:
    """Four slots of each replica, of which 1.5 are taken on average, 2.7 or 3.45: M/M/4 has a delay
    of 0.04, 0.5 and 3.9 s, and of 9 s with longer services.
    """
    made = [counted_hour(number, **each) for number, each in enumerate(hours_)]
    record = track_record(made, model="tiny", server="vLLM", slots=4, given=GIVEN)
    assert (record.slots, record.rows[1].inside) == (4, False)
    assert record.rows[1].cause == cause


def test_a_row_as_json() -> None:
    record = recorded(counted_hour(0), counted_hour(1, delay=0.12), counted_hour(2, delay=4.0))
    first, second, third = record.rows
    assert (second.inside, second.sojourn_inside, third.inside) == (True, True, False)
    assert record.coverage == (1, 2)
    assert record.sojourn_coverage == (1, 2)
    told = record.as_dict()
    assert {name: told[name] for name in told if name != "rows"} == {
        "model": "tiny",
        "server": "vLLM",
        "slots": None,
        "law": GIVEN.law.as_dict(),
        "notes": ["as given"],
        "coverage": {
            "queueing_delay": {"inside": 1, "hours": 2},
            "sojourn_time": {"inside": 1, "hours": 2},
            "level": 0.9,
        },
        "missed": [200.0],
    }
    row = told["rows"][0]  # type: ignore[index]
    assert (row["start"], row["end"], row["inside"], row["cause"]) == (0.0, 100.0, None, None)
    assert row["forecast"] is None
    assert row["step_seconds"] == pytest.approx(0.3, rel=1e-3)
    assert row["observed"] == {
        "requests": 100.0,
        "arrival_rate": 1.0,
        "replicas": 2,
        "queueing_delay": pytest.approx(0.2),
        "sojourn_time": pytest.approx(3.2),
        "time_to_first_token": None,
        "token_gap": None,
        "prompt_tokens": None,
        "output_tokens": 10.0,
        "running": 1.5,
        "waiting": pytest.approx(0.1),
        "preemptions": None,
        "prefix_hits": None,
        "kv_usage": None,
        "dispersion": 1.0,
        "restarts": 0,
        "missing_seconds": 0.0,
    }
    assert [each.start for each in record.last(2).rows] == [100.0, 200.0]
    assert third.off == pytest.approx((4.0 - third.forecast.queueing_delay.value) / 7.0)  # type: ignore[union-attr]
    assert first.off == 0


def test_the_three_rows_that_were_missed_most_are_shown() -> None:
    delays = enumerate((0.2, 2.0, 9.0, 5.0, 3.0))
    made = [counted_hour(number, delay=delay) for number, delay in delays]
    record = track_record(made, model="tiny", server="vLLM", slots=30, given=GIVEN)
    assert [row.start for row in record.missed] == [200.0, 300.0, 400.0]
    assert record.coverage == (0, 4)


def test_without_a_delay_the_sojourn_is_compared() -> None:
    hours_ = [counted_hour(0, queue_time_count=0), counted_hour(1, 6.0, queue_time_count=0)]
    record = recorded(*hours_)
    row = record.rows[1]
    assert row.by == pytest.approx(9.0)
    assert (row.inside, row.sojourn_inside, record.coverage) == (False, False, (0, 1))
    assert row.off == pytest.approx((9.0 - row.forecast.sojourn_time.value) / 9.0)  # type: ignore[union-attr]


def test_a_record_without_a_law_judges_nothing() -> None:
    record = track_record([counted_hour(0), counted_hour(1)], model="tiny", server="vLLM")
    assert record.law is None
    assert (record.coverage, record.missed) == ((0, 0), ())
    assert record.as_dict()["law"] is None
    assert record.as_dict()["notes"] == []
    assert all(row.forecast is None and math.isnan(row.step_seconds) for row in record.rows)


def test_an_hour_is_its_parts_and_its_replicas() -> None:
    """Parts of 10 s, five together for the dispersion; stretches have ten requests each."""
    at = np.arange(0.0, 101.0, 10.0)
    counts = {"finished": 4 * np.arange(11.0), "running": np.zeros(11), "waiting": np.zeros(11)}
    one = samples(at, **counts).between(at.tolist())
    silent = [Totals()] * 10
    hour = Hour.of(at.tolist(), [one, silent, one])
    assert (hour.start, hour.end, hour.replicas, hour.covered) == (0, 100, 2, 1)
    assert (len(hour.parts), hour.arrivals) == (20, (40.0, 40.0))
    assert [part.total("finished") for part in hour.stretches] == [12] * 6
    assert (hour.totals.total("arrived"), hour.totals.seconds) == (80, 200)
    assert hour.dispersion == 1
    lacking = samples(at[:9], **{k: v[:9] for k, v in counts.items()}).between(at.tolist())
    assert Hour.of(at.tolist(), [lacking]).arrivals == (20.0,)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ((1.0, 3.0, 2.0), 0.5),
        ((1.0, 3.0), 1.0),
        ((0.0, 0.0, 0.0), 1.0),
        ((1.0, math.nan, 3.0, 8.0), 3.25),
    ],
)
def test_the_dispersion_is_variance_over_mean(arrivals: tuple[float, ...], expected: float) -> None:
    assert counted_hour(0, arrivals=arrivals).dispersion == pytest.approx(expected)
