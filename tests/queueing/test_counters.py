"""What counters tell of servers whose queue is not ours: lengths, step law, track record.

The servers are `tests.counted_engine`, whose law is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.counters.bucketed_lengths import law_of_buckets
from kendall.queueing.estimation.counters.fleet import predicted
from kendall.queueing.estimation.counters.samples import (
    Samples,
    Totals,
    one_after_the_other,
    side_by_side,
)
from kendall.queueing.estimation.counters.step_law import met, moved, pace_of, step_law
from kendall.queueing.estimation.counters.track_record import Hour, fleet_of, track_record
from kendall.queueing.latency.law import LatencyModel
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
