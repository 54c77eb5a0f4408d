"""Orders of service beside that of arrival: ratios of paired requests, slowdown by length, and the
part of a difference that predictions make.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from kendall.loadgen.compare.by_order import (
    ComparedSample,
    ratio_of_means,
    with_orders,
)
from kendall.loadgen.compare.compare import Comparison, compare, compare_samples
from kendall.loadgen.compare.comparison import OrderResult, Theory
from kendall.loadgen.compare.epoch_sample import EpochSample, Instants, predictor_of
from kendall.loadgen.compare.planned import with_asked_predictions
from kendall.loadgen.compare.residual import parts_of, verdict
from kendall.loadgen.compare.theory import replay_arrivals, theory_of
from kendall.loadgen.report.orders import order_heads, order_values, show_orders, tenths_of
from kendall.policies import parse_policy
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import Served, served
from kendall.queueing.measurement.statistics import batch_means_interval
from kendall.queueing.prediction.by_length import ByLength
from kendall.queueing.predictors.predictor_text import parse_predictor
from tests.golden_files import is_as_kept
from tests.loadgen.ordered_runs import AGING, FIRST_COME, LAW, LENGTHS, SHORTEST, jobs, records

RATE = 10.0  # load 0.7
COUNT = 400


@cache
def run(policy: str, **drawn: object) -> tuple[Record, ...]:
    return tuple(records(policy, jobs(RATE, COUNT, **drawn)))


def asked(predictor: str | None = "exact") -> Theory:
    """Without the spread of runs, which takes long to simulate."""
    told = None if predictor is None else parse_predictor(predictor)
    theory = theory_of(LAW, LENGTHS, RATE, bounds=EngineBounds(max_num_seqs=64), predictor=told)
    return dataclasses.replace(theory, sampling_error=None, published=None, live=None)


@cache
def sample(policy: str, **drawn: object) -> ComparedSample:
    theory = dataclasses.replace(asked(), predict=None) if "aging" in policy else asked()
    (found,) = compare_samples(run(policy, **drawn), theory)  # aging is predicted by simulation
    return found


def both(first: str, second: str, conditions: tuple[object, object] = (1, 1)) -> list[Comparison]:
    return with_orders([sample(first), sample(second)], conditions)


def order_of(comparison: Comparison) -> OrderResult:
    assert comparison.order is not None
    return comparison.order


def test_a_preempted_request_was_dispatched_after_all_its_waits() -> None:
    found = run("single:order=sprpt")
    by_id = {each.id: each for each in served(found)}
    interrupted = [record for record in found if record.preemptions]
    assert len(interrupted) > 20
    for record in interrupted:
        mine = by_id[record.request_id]
        assert record.arrived_at is not None
        assert record.dispatched_at is not None
        assert mine.dispatched_at - mine.arrived_at == pytest.approx(record.queueing_delay)
        assert mine.server_free_at - mine.dispatched_at == pytest.approx(record.service_time)
        assert mine.dispatched_at < record.dispatched_at


@pytest.mark.slow
def test_the_replay_of_a_preempted_request_counts_all_its_waits() -> None:
    """The run is the simulator's own: its replay gives the very same delays."""
    found = served(run("single:order=sprpt"))
    again = replay_arrivals(parse_policy("single:order=sprpt"), found, LAW)
    for each in found:
        start, release = again[each.id]
        assert start - each.arrived_at == pytest.approx(each.dispatched_at - each.arrived_at)
        assert release == pytest.approx(each.released_at)


def test_the_use_of_a_server_counts_stints_where_they_are_known() -> None:
    single = EpochSample(served(run("single:order=sprpt")), {})
    plain = EpochSample(served(run("single")), {})
    assert single.utilisation == pytest.approx(plain.utilisation, rel=0.05)
    assert 0.6 < single.utilisation < 0.95
    slots = records("continuous:max_batch_size=2,order=sprpt", jobs(RATE, 40))
    assert math.isnan(EpochSample(served(slots), {}).utilisation)
    kept = records("continuous:max_batch_size=2,order=spjf", jobs(RATE, 40))
    assert EpochSample(served(kept), {}).utilisation > 0.1
    at_once = msgspec.structs.replace(kept[0], server_free_at=kept[0].dispatched_at)
    assert math.isnan(EpochSample(served([at_once]), {}).utilisation), "nothing took any time"


def test_the_ratio_is_that_of_the_requests_that_both_served() -> None:
    first, shortest = both("single", "single:order=spjf")
    assert order_of(first).versus is None
    versus = order_of(shortest).versus
    assert versus is not None
    assert versus.paired
    own, other = sample("single:order=spjf").durations, sample("single").durations
    rows, mine, theirs = np.intersect1d(own.rows, other.rows, return_indices=True)
    assert rows.size > 300
    ratio = own.delay[mine].mean() / other.delay[theirs].mean()
    assert versus.delay.value == pytest.approx(ratio)
    assert 0.4 < ratio < 0.95
    scaled = (own.delay[mine] - ratio * other.delay[theirs]) / other.delay[theirs].mean()
    assert versus.delay.half_width == pytest.approx(batch_means_interval(scaled).half_width)
    assert versus.p99 == pytest.approx(
        np.quantile(own.delay, 0.99) / np.quantile(other.delay, 0.99)
    )


def test_what_both_runs_share_drops_out_of_the_interval() -> None:
    other = tuple(
        msgspec.structs.replace(record, client_request_id=None, request_id=f"x-y{i}")
        for i, record in enumerate(records("single:order=spjf", jobs(RATE, COUNT, seed=2)))
    )
    (apart,) = compare_samples(other, asked())
    unpaired = order_of(with_orders([sample("single"), apart], (1, 1))[1]).versus
    paired = order_of(both("single", "single:order=spjf")[1]).versus
    assert unpaired is not None
    assert paired is not None
    assert not unpaired.paired
    assert paired.delay.half_width < 0.7 * unpaired.delay.half_width
    own, first = apart.durations.delay, sample("single").durations.delay
    assert unpaired.delay.value == pytest.approx(own.mean() / first.mean())
    widths = [batch_means_interval(values).half_width / values.mean() for values in (own, first)]
    assert unpaired.delay.half_width == pytest.approx(unpaired.delay.value * math.hypot(*widths))


def test_predicted_ratios_are_those_of_the_predicted_means() -> None:
    first, shortest = both("single", "single:order=spjf")
    versus = order_of(shortest).versus
    assert versus is not None
    for name in ("predicted", "a_priori"):
        own, other = (getattr(c.queueing_delay, name) for c in (shortest, first))
        assert getattr(versus, name) == pytest.approx(own.mean / other.mean)
    own, other = sample("single:order=spjf").durations, sample("single").durations
    assert own.simulated is not None
    assert other.simulated is not None
    _, mine, theirs = np.intersect1d(own.rows, other.rows, return_indices=True)
    assert versus.same_arrivals == pytest.approx(
        own.simulated[0][mine].mean() / other.simulated[0][theirs].mean()
    )
    assert versus.same_arrivals == pytest.approx(versus.delay.value, rel=1e-3), "the law is right"


def test_slowdowns_are_sojourn_over_service_by_tenths_of_the_lengths() -> None:
    first, shortest = both("single", "single:order=spjf")
    groups = order_of(shortest).groups
    assert [(g.shortest, g.longest) for g in groups] == [
        (g.shortest, g.longest) for g in order_of(first).groups
    ]
    assert len(groups) == 10
    assert all(one.longest + 1 == other.shortest for one, other in itertools.pairwise(groups))
    own = sample("single:order=spjf").durations
    assert sum(g.n for g in groups) == own.tokens.size
    for g in groups:
        inside = (own.tokens >= g.shortest) & (own.tokens <= g.longest)
        delay, service = own.delay[inside], own.service[inside]
        assert g.n == inside.sum()
        assert 0.05 * own.tokens.size < g.n < 0.16 * own.tokens.size
        assert g.mean_tokens == pytest.approx(own.tokens[inside].mean())
        assert g.slowdown.value == pytest.approx((delay + service).sum() / service.sum())
        assert g.same_arrivals == pytest.approx(g.slowdown.value, rel=1e-3)
    by_length = sample("single:order=spjf").by_length
    assert by_length is not None
    last = own.tokens[own.tokens >= groups[-1].shortest]
    delay, service = by_length.at(last)
    assert groups[-1].predicted == pytest.approx((delay + service).sum() / service.sum())
    before = [each.slowdown.value for each in order_of(first).groups]
    gain = [one / g.slowdown.value for one, g in zip(before, groups, strict=True)]
    assert gain[0] > 1.5
    assert gain[-1] < 0.8


def test_the_longest_tenth_is_that_of_the_requests() -> None:
    first, shortest = both("single", "single:order=spjf")
    own = sample("single:order=spjf").durations
    threshold = np.sort(own.tokens)[-math.ceil(0.1 * own.tokens.size)]
    places = own.longest
    assert places.size == math.ceil(0.1 * own.tokens.size)
    assert own.tokens[places].min() == threshold
    assert (np.diff(places) > 0).all()
    longest = order_of(shortest).longest
    assert longest.delay.value == pytest.approx(own.delay[places].mean())
    assert longest.predicted is not None
    assert longest.same_arrivals == pytest.approx(longest.delay.value, rel=1e-3)
    versus = order_of(shortest).versus
    assert versus is not None
    assert versus.longest.value > 1.3
    assert versus.longest_predicted == pytest.approx(
        longest.predicted / (order_of(first).longest.predicted or math.nan)
    )


def test_other_conditions_and_policies_without_orders_are_left_alone() -> None:
    alone = both("single", "single:order=spjf", (1, 2))
    assert alone[0].order is None
    assert order_of(alone[1]).versus is None, "no cell in the order of arrival beside it"
    plain = with_orders([sample("single"), sample("single")], (1, 1))
    assert [each.order for each in plain] == [None, None]
    assert plain[0] == sample("single").comparison
    assert with_orders([], ()) == []


def test_theory_without_an_answer_leaves_the_simulation() -> None:
    _, aged = both("single", "single:order=spjf,aging=0.1")
    order = order_of(aged)
    assert order.order == "spjf:aging=0.1"
    assert {g.predicted for g in order.groups} == {None}
    assert order.longest.predicted is None
    assert all(g.same_arrivals is not None for g in order.groups)


def test_a_run_without_theory_is_compared_by_what_was_observed() -> None:
    pair = [compare_samples(run(policy))[0] for policy in ("single", "single:order=spjf")]
    versus = order_of(with_orders(pair, (1, 1))[1]).versus
    assert versus is not None
    assert versus.paired
    assert versus.predicted is versus.a_priori is versus.same_arrivals is None
    assert versus.longest_predicted is None


def test_rows_with_other_lengths_are_not_paired() -> None:
    cell = sample("single:order=spjf")
    other = sample("single").durations
    other = dataclasses.replace(other, tokens=other.tokens + 1)
    first = dataclasses.replace(sample("single"))
    first.__dict__["durations"] = other
    versus = order_of(with_orders([first, cell], (1, 1))[1]).versus
    assert versus is not None
    assert not versus.paired


def test_a_ratio_to_nothing_is_none() -> None:
    found = ratio_of_means(np.ones(40), np.zeros(40))
    assert math.isnan(found.value)
    assert found.half_width == math.inf


def test_by_length_interpolates() -> None:
    found = ByLength(np.array([1.0, 3.0]), np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    delay, service = found.at(np.array([2.0, 3.0]))
    assert delay.tolist() == [3.0, 4.0]
    assert service.tolist() == [1.5, 2.0]


# predictions


def test_predictions_worse_than_asked_are_named() -> None:
    """Asked exact; what came put the longest first."""
    whole = dataclasses.replace(
        theory_of(
            LAW,
            LENGTHS,
            RATE,
            bounds=EngineBounds(max_num_seqs=64),
            predictor=parse_predictor("exact"),
        ),
        live=None,
        published=None,
    )
    (found,) = compare(run("single:order=spjf", reverse=True), whole)
    assert found.predictor == "exact"
    assert found.predictor_measured is not None
    assert found.predictor_measured.startswith("lognormal:sigma=")
    assert found.split is not None
    part = found.split.part("predictor")
    assert part.seconds > 0.1 * found.split.observed
    assert part.half_width == 0
    assert part.significant
    assert sum(each.seconds for each in found.split.parts) == pytest.approx(found.split.total)
    assert parts_of([found]) == (
        "theory", "arrivals", "predictor", "sender", "speed", "scatter", "shape", "gateway"
    )  # fmt: skip
    assert "gateway" not in [each.name for each in found.split.parts], "in shape"
    loud = dataclasses.replace(
        found,
        split=dataclasses.replace(
            found.split, parts=tuple(p for p in found.split.parts if p.name == "predictor")
        ),
        queueing_delay=dataclasses.replace(
            found.queueing_delay,
            observed=dataclasses.replace(
                found.queueing_delay.observed, half_width=1e-4, effective_n=1e4
            ),
        ),
    )
    assert verdict(loud).kind == "predictor"
    assert verdict(loud).text == (
        f"predicted lengths as {found.predictor_measured}, asked as exact"
    )


def test_predictions_as_asked_explain_nothing() -> None:
    theory = theory_of(
        LAW,
        LENGTHS,
        RATE,
        bounds=EngineBounds(max_num_seqs=64),
        predictor=parse_predictor("lognormal:sigma=0.5"),
    )
    drawn = tuple(records("single:order=spjf", jobs(RATE, 200, "lognormal:sigma=0.5")))
    (found,) = compare(drawn, dataclasses.replace(theory, live=None, published=None))
    assert found.split is not None
    part = found.split.part("predictor")
    assert part.half_width > 0
    assert not part.significant


def test_the_doubt_about_asked_predictions_is_that_of_one_more_draw() -> None:
    """t(n - 1) s sqrt(1 + 1 / n) of the means of five replays, whose delays are made up."""
    delays = [0.1, 0.14, 0.11, 0.2, 0.17]
    given = iter(delays)

    def replay(_: object, requests: Sequence[Served], __: object) -> Instants:
        delay = next(given)
        return {r.id: (r.arrived_at + delay, r.arrived_at + delay) for r in requests}

    group = EpochSample(served(run("single:order=spjf")), {})
    told = dataclasses.replace(asked("lognormal:sigma=0.5"), replay=replay)
    found = with_asked_predictions(group, told, np.zeros(1))
    assert next(given, None) is None, "five draws"
    assert found.value == pytest.approx(np.mean(delays))
    half = stats.t.ppf(0.975, 4) * stats.tstd(delays) * math.sqrt(1 + 1 / 5)
    assert found.half_width == pytest.approx(half)


def test_an_order_that_reads_none_has_no_such_part() -> None:
    (found,) = compare(run("single"), asked())
    assert found.predictor is found.predictor_measured is None
    assert "predictor" not in parts_of([found])
    (unknown,) = compare(run("single:order=spjf"), asked(None))
    assert unknown.predictor is None
    assert unknown.predictor_measured == "exact"
    assert unknown.queueing_delay.measured_service is None, "no recursion knows an order's starts"
    assert found.queueing_delay.measured_service is not None


def test_the_runs_own_predictor_is_that_of_lengths_that_were_not_cut() -> None:
    found = served(run("single:order=spjf", predictor="lognormal:sigma=0.5"))
    assert predictor_of(found).sigma == pytest.approx(0.5, rel=0.08)
    cut = [dataclasses.replace(each, max_output_tokens=each.output_tokens) for each in found]
    assert str(predictor_of(cut)) == "none"
    bits = served(run("single:order=spjf", predictor="onebit:threshold=20,accuracy=0.9"))
    assert predictor_of(bits).threshold == 20
    assert predictor_of(bits).misses == pytest.approx((0.1, 0.1), abs=0.09)


# tables


def compared() -> list[Comparison]:
    base = sample("single").comparison
    return [
        dataclasses.replace(base, policy=policy, load=load, order=order)
        for policy, load, order in (
            ("continuous:max_batch_size=4", 0.8, FIRST_COME),
            ("continuous:max_batch_size=4,order=spjf", 0.8, SHORTEST),
            ("continuous:max_batch_size=4,order=spjf,aging=0.02", None, AGING),
            ("dynamic", 0.8, None),
        )
    ]


@pytest.mark.parametrize("width", [80, 150])
def test_the_tables_of_orders_are_as_kept(width: int) -> None:
    to = io.StringIO()
    show_orders(compared(), Console(file=to, width=width))
    assert is_as_kept(f"orders-{width}.txt", to.getvalue())


def test_nothing_is_said_of_orders_where_there_are_none() -> None:
    to = io.StringIO()
    show_orders(compared()[3:], Console(file=to, width=80))
    assert to.getvalue() == ""
    assert order_heads(tenths_of(compared()[3:])) == []
    assert order_values(compared()[3], []) == []


def test_the_columns_of_a_csv_name_their_tenths() -> None:
    tenths = tenths_of(compared())
    assert tenths == [(1, 4), (5, 5), (6, 60)]
    heads = order_heads(tenths)
    found = [dict(zip(heads, order_values(each, tenths), strict=True)) for each in compared()]
    first, shortest, aging, plain = found
    assert set(plain.values()) == {None}
    assert shortest["order"] == "spjf"
    assert shortest["longest_tenth_delay_ms"] == pytest.approx(110.0)
    assert shortest["predicted_longest_tenth_delay_ms"] == pytest.approx(100.0)
    ratios = ("delay_ratio", "delay_ratio_half_width", "predicted_delay_ratio", "p99_delay_ratio")
    assert [shortest[name] for name in ratios] == [0.625, 0.05, 0.6, 1.75]
    far = ("longest_tenth_ratio", "longest_tenth_ratio_half_width", "predicted_longest_tenth_ratio")
    assert [shortest[name] for name in far] == [2.2, 0.3, 2.05]
    assert first["delay_ratio"] is None
    assert shortest["slowdown_1_to_4_tokens"] == 1.25
    assert shortest["slowdown_5_to_5_tokens"] is None
    assert shortest["predicted_slowdown_6_to_60_tokens"] == 2.4
    assert aging["predicted_slowdown_6_to_60_tokens"] is None
    assert aging["same_arrivals_slowdown_6_to_60_tokens"] == 2.1
