"""A run of the simulator agrees with itself; a gateway that loses time, a slow machine and a
wrong law each show in their own column.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kendall.loadgen.compare.cells import RunFile, TheoryInputs, cells_of_files
from kendall.loadgen.compare.compare import (
    Comparison,
    Predicted,
    Theory,
    TheoryEstimate,
    compare,
    compare_samples,
)
from kendall.loadgen.compare.residual import verdict
from kendall.loadgen.compare.theory import theory_of
from kendall.loadgen.report.report import as_object, notes, show
from kendall.policies import Policy, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Header, Record
from kendall.queueing.measurement.recursion import Served, measured_starts, served
from kendall.queueing.measurement.statistics import Interval
from tests.loadgen.driver import LAW, drive, timetable
from tests.loadgen.policy_cases import CASES, each_policy

THEORY = Theory(law=LAW, replay=theory_of(LAW).replay, check=theory_of(LAW).check)


def only(records: Sequence[Record], theory: Theory | None = None) -> Comparison:
    (comparison,) = compare(records, theory)
    return comparison


@pytest.mark.thinned(3)
@each_policy
def test_the_recursion_meets_every_start_of_a_simulation(policy: str, rate: float) -> None:
    records = drive(parse_policy(policy), rate)
    starts = measured_starts(served(records))
    for record in records:
        assert starts[record.request_id] == pytest.approx(record.dispatched_at, abs=1e-9)
    waited = np.mean([record.dispatched_at - record.arrived_at > 1e-9 for record in records])  # type: ignore[operator]
    assert waited > 0.05 or policy == "continuous"  # else nothing was checked


@pytest.mark.thinned(3)
@each_policy
def test_a_simulation_agrees_with_itself_in_every_column(policy: str, rate: float) -> None:
    comparison = only(drive(parse_policy(policy), rate, n=1000), THEORY)
    assert comparison.speed is not None
    assert comparison.speed.factor == pytest.approx(1.0, abs=0.004)
    assert comparison.speed.cv == pytest.approx(0.0, abs=1e-9)
    for quantity in (comparison.queueing_delay, comparison.sojourn_time):
        assert quantity.measured_service is not None
        assert quantity.measured_service.deviation == pytest.approx(0.0, abs=1e-6)
        assert quantity.same_arrivals is not None
        assert quantity.same_arrivals.deviation == pytest.approx(
            0.0, abs=0.02 if comparison.compared == "sojourn_time" else 1e-6
        )


@pytest.mark.thinned(18)
@pytest.mark.parametrize("factor", [1.2, 0.8])
@each_policy
def test_a_slower_or_faster_machine_shows_as_speed(policy: str, rate: float, factor: float) -> None:
    comparison = only(
        drive(parse_policy(policy), rate * 0.8, n=1000, law=LAW.at_speed(factor)), THEORY
    )
    assert comparison.speed is not None
    assert comparison.speed.factor == pytest.approx(factor, rel=0.005)
    assert comparison.quantity.same_arrivals is not None
    assert comparison.quantity.same_arrivals.deviation == pytest.approx(0.0, abs=0.02)


def test_a_gateway_that_loses_time_shows_as_measured_service() -> None:
    """Every batch leaves 5 ms after it could have: the recursion falls short of the observation."""
    records = drive(parse_policy("single"), 8.0, n=1000)
    late = [
        msgspec.structs.replace(record, dispatched_at=record.dispatched_at + 0.005)
        for record in records
    ]  # type: ignore[operator]
    measured = only(late).quantity.measured_service
    assert measured is not None
    assert measured.deviation > 0.03


def test_the_way_of_an_answer_out_of_the_gateway_is_the_gateways_share() -> None:
    """Of sojourn times: every answer leaves 5 ms after the engine was done with it."""
    policy = parse_policy("continuous:max_batch_size=4")
    records = [
        msgspec.structs.replace(record, released_at=record.server_free_at + 0.005)  # type: ignore[operator]
        for record in drive(policy, 20.0, n=500)
    ]
    quantity = only(records).quantity
    assert quantity.measured_service is not None
    assert quantity.measured_service.mean == pytest.approx(quantity.observed.mean - 0.005, rel=1e-3)


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=4"])
def test_dispatches_later_than_the_model_has_them_are_found_by_the_check(policy: str) -> None:
    """By 20 ms of everyone who waited; nobody is served for longer."""
    late = 0.02
    records = [
        msgspec.structs.replace(
            r, **{name: getattr(r, name) + late for name in ("dispatched_at", "server_free_at")}
        )
        if r.dispatched_at > r.arrived_at
        else r
        for r in drive(parse_policy(policy), 0.5 * CASES[policy], n=1000)
    ]
    exact, found = (
        only(each, THEORY)
        for each in (drive(parse_policy(policy), 0.5 * CASES[policy], n=1000), records)
    )
    assert exact.check is not None
    assert found.check is not None
    assert exact.check.difference == pytest.approx(0.0, abs=1e-9)
    assert found.check.difference > found.check.half_width
    moved = found.queueing_delay.observed.mean - exact.queueing_delay.observed.mean
    assert found.check.difference == pytest.approx(moved, rel=0.15)
    assert found.queueing_delay.same_arrivals is not None
    assert found.queueing_delay.same_arrivals.deviation == found.check.ratio - 1


@pytest.mark.parametrize("late", [0.01, -0.01])
def test_the_recursion_deviates_by_what_each_dispatch_was_late_or_early(late: float) -> None:
    """Seconds; nobody is dispatched before he arrives, and the observed ends stay as they are."""
    exact = drive(parse_policy("single"), 8.0, n=1000)
    records = [
        msgspec.structs.replace(r, dispatched_at=max(r.arrived_at, r.dispatched_at + late))  # type: ignore[operator,type-var]
        for r in exact
    ]
    moved, before = only(records).queueing_delay, only(exact).queueing_delay.observed.mean
    assert moved.measured_service is not None
    assert moved.measured_service.mean == pytest.approx(
        before, rel=0.02
    )  # but for the requests left out at the beginning
    assert moved.measured_service.deviation == pytest.approx(
        moved.observed.mean / moved.measured_service.mean - 1
    )
    assert (
        (moved.measured_service.deviation > 0.02)
        if late > 0
        else (moved.measured_service.deviation < -0.02)
    )
    assert moved.measured_service.half_width < 0.5 * abs(moved.measured_service.deviation)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_every_theory_deviates_by_observed_over_its_mean_minus_one(factor: float) -> None:
    records = drive(parse_policy("single"), 8.0, n=1000)
    observed = only(records).queueing_delay.observed

    def told(*_: object) -> Predicted:
        return Predicted(
            load=0.6,
            queueing_delay=factor * observed.mean,
            sojourn_time=None,
            quantiles={"queueing_delay": {"p90": factor}},
        )

    theory = Theory(
        law=LAW, predict=told, live=told, published=lambda *_: (factor * observed.mean, "exact")
    )
    comparison = only(records, theory)
    for name in ("a_priori", "predicted", "live", "paper"):
        beside = getattr(comparison.queueing_delay, name)
        assert beside.mean == factor * observed.mean
        assert beside.deviation == pytest.approx(1 / factor - 1)
        assert beside.half_width == pytest.approx(observed.half_width / (factor * observed.mean))
        assert getattr(comparison.sojourn_time, name) is None, "it says nothing of it"
        assert name == "paper" or comparison.queueing_delay.theory_quantiles[name] == {
            "p90": factor
        }
    assert comparison.paper_kind == "exact"


def test_the_observed_quantiles_are_those_of_the_records() -> None:
    comparison = only(drive(parse_policy("dynamic"), 40.0, n=1000))
    for quantity in (comparison.queueing_delay, comparison.sojourn_time):
        levels = [quantity.quantiles[name] for name in ("p50", "p90", "p95", "p99")]
        assert levels == sorted(levels)
        assert 0 < levels[0] < quantity.observed.mean * 3
        assert levels[0] < levels[-1]
    every = comparison.distribution
    assert list(every) == sorted(every)
    assert every[50] == comparison.queueing_delay.quantiles["p50"]
    assert every[-1] >= comparison.queueing_delay.quantiles["p99"] > every[0] >= 0


def test_the_scatter_of_service_times_is_measured() -> None:
    law = dataclasses.replace(LAW, cv=0.2)
    speed = only(
        drive(parse_policy("capped:max_batch_size=4"), 16.0, n=3000, law=law), Theory(law=LAW)
    ).speed
    assert speed is not None
    assert speed.factor == pytest.approx(1.0, abs=0.03)
    assert speed.cv == pytest.approx(0.2, rel=0.1)


def test_batches_that_were_not_served_whole_do_not_count_for_the_speed() -> None:
    records = drive(parse_policy("dynamic"), 40.0, n=500)
    wounded = [
        msgspec.structs.replace(r, outcome="cancelled", output_tokens=0) if i % 7 == 0 else r
        for i, r in enumerate(records)
    ]
    whole = only(wounded, Theory(law=LAW)).speed
    assert whole is not None
    assert whole.factor == pytest.approx(1.0, abs=1e-9)
    assert (
        only([msgspec.structs.replace(r, outcome="failed") for r in records], Theory(law=LAW)).speed
        is None
    )


def test_fixed_below_the_engines_bound_waits_for_the_bound() -> None:
    records = drive(parse_policy("fixed:batch_size=9"), 18.0, n=800, max_num_seqs=3)
    starts = measured_starts(served(records))
    assert all(starts[r.request_id] == pytest.approx(r.dispatched_at) for r in records)


def test_a_switch_of_policy_makes_two_comparisons() -> None:
    first = drive(parse_policy("dynamic"), 40.0, n=600)
    end = max(r.server_free_at or 0.0 for r in first)
    second = [
        _shifted(r, end)
        for r in drive(parse_policy("capped:max_batch_size=4"), 18.0, n=600, epoch=1)
    ]
    one, two = compare([*first, *second])
    assert (one.policy, one.epoch, two.policy, two.epoch) == (
        "dynamic",
        0,
        "capped:max_batch_size=4",
        1,
    )
    for comparison in (one, two):
        assert comparison.quantity.measured_service is not None
        assert comparison.quantity.measured_service.deviation == pytest.approx(0.0, abs=1e-9)


def _shifted(record: Record, by: float) -> Record:
    names = ("arrived_at", "dispatched_at", "released_at", "server_free_at")
    return msgspec.structs.replace(record, **{name: getattr(record, name) + by for name in names})


def test_who_arrived_in_one_epoch_and_was_dispatched_in_another_is_left_out() -> None:
    records = drive(parse_policy("capped:max_batch_size=4"), 25.0, n=400)
    slowest = max(records[100:200], key=lambda r: r.dispatched_at - r.arrived_at)  # type: ignore[operator,return-value]
    assert slowest.dispatched_at is not None
    switched = [
        msgspec.structs.replace(r, epoch=0 if r.dispatched_at < slowest.dispatched_at else 1)
        for r in records
    ]  # type: ignore[operator]
    first = slowest.dispatched_at  # of the new epoch
    stray = [r for r in switched if r.epoch == 1 and r.arrived_at < first]  # type: ignore[operator]
    assert stray
    one, two = compare(switched)
    assert one.n == pytest.approx(0.95 * len([r for r in switched if r.epoch == 0]), abs=1)
    assert two.n == pytest.approx(
        0.95 * (len([r for r in switched if r.epoch == 1]) - len(stray)), abs=1
    )


def _at(name: str, arrived_at: float, dispatched_at: float, epoch: int, batch: int) -> Record:
    return Record(
        request_id=name,
        outcome="completed",
        policy="single",
        epoch=epoch,
        server_id=0,
        batch_id=batch,
        arrived_at=arrived_at,
        dispatched_at=dispatched_at,
        released_at=dispatched_at + 0.1,
        server_free_at=dispatched_at + 0.1,
        output_tokens=1,
    )


def _compared(records: Sequence[Record], *, began_idle: bool = False) -> list[list[str]]:
    samples = compare_samples(records, began_idle=began_idle)
    return [[request.id for request in each.sample.requests] for each in samples]


def test_who_arrived_in_an_epoch_without_dispatches_is_left_out_of_the_next() -> None:
    """A policy that fails (epoch 1) dispatches nobody, and is replaced at 8 s."""
    before = [_at("early", 0.0, 0.0, 0, 0)]
    stranded = [_at(f"stranded {i}", 5.0 + i / 10, 8.0 + i / 10, 2, 1 + i) for i in range(5)]
    after = [_at(f"own {i}", 9.0 + i, 9.0 + i, 2, 10 + i) for i in range(3)]
    records = [*before, *stranded, *after]
    assert _compared(records) == [["early"], ["own 0", "own 1", "own 2"]]


def test_who_arrived_between_the_last_dispatch_and_the_change_is_left_out() -> None:
    records = [
        _at("before", 0.0, 0.0, 0, 0),
        _at("waits", 3.0, 6.0, 1, 1),  # the change came at 5
        _at("after", 7.0, 7.0, 1, 2),
    ]
    assert _compared(records) == [["before"], ["after"]]


def test_a_preempted_request_tells_nothing_of_the_change_by_the_sum_of_its_waits() -> None:
    """Dispatched at 1, preempted at 9, dispatched again in the next epoch at 12."""
    again = msgspec.structs.replace(
        _at("again", 0.5, 12.0, 1, 3),
        first_dispatched_at=1.0,
        queueing_delay=3.5,
        preemptions=1,
    )
    records = [_at("before", 0.0, 0.0, 0, 0), again, _at("waits", 6.0, 13.0, 1, 4)]
    assert _compared([*records, _at("after", 12.5, 14.0, 1, 5)]) == [["before"], ["after"]]


def test_the_first_epoch_of_a_file_is_whole_only_where_nothing_came_before_it() -> None:
    """A gateway that calibrates at its start has no dispatch in epoch 0."""

    def records(epoch: int) -> list[Record]:
        return [_at("waits", 1.0, 4.0, epoch, 0), _at("after", 5.0, 5.0, epoch, 1)]

    assert _compared(records(0)) == [["waits", "after"]]
    assert _compared(records(1)) == [["after"]]
    assert _compared(records(1), began_idle=True) == [["waits", "after"]]


@pytest.mark.parametrize(
    ("header", "began_idle"),
    [
        (Header(writer="gateway"), False),
        (Header(writer="gateway", configuration={"request_rate": 1.0}), True),
        (Header(writer="simulator"), True),
    ],
)
def test_nothing_came_before_a_simulation_or_a_cell_of_a_sweep(
    header: Header, began_idle: bool
) -> None:
    """The first of ten requests waited for the first dispatch of epoch 1."""
    records = [
        _at("waits", 1.0, 4.0, 1, 0),
        *(_at(f"own {i}", 5.0 + i, 5.0 + i, 1, 1 + i) for i in range(9)),
    ]
    (cell,) = cells_of_files([RunFile(Path("run.jsonl"), header, records)], TheoryInputs())
    assert cell.comparison.arrival_rate == (9 / 12 if began_idle else 8 / 8)


def test_the_table_says_why_nothing_is_predicted_and_has_no_infinite_deviation() -> None:
    records = drive(parse_policy("dynamic"), 40.0, n=200)
    shown: list[str] = []
    for theory in (None, THEORY):
        show(compare(records, theory), Console(file=(text := io.StringIO()), width=200))
        shown.append(text.getvalue())
    said = "they need a latency law, which a run file does not have: --latency gives it"
    assert [said in text for text in shown] == [True, False]
    comparison = only(records)
    nothing = TheoryEstimate(0.0, math.inf, math.inf)
    quantity = dataclasses.replace(comparison.queueing_delay, measured_service=nothing)
    idle = dataclasses.replace(comparison, queueing_delay=quantity)
    show([idle], Console(file=(text := io.StringIO()), width=200))
    assert "inf" not in text.getvalue()
    (row,) = (line for line in text.getvalue().splitlines() if line.startswith("dynamic"))
    assert row.split()[6:9] == ["-", "-", "-"], "no model, no difference, no share of the gateway"


def test_what_never_was_dispatched_is_not_compared() -> None:
    records = drive(parse_policy("single"), 8.0, n=200)
    lost = Record(request_id="lost", outcome="rejected", policy="single", epoch=0, arrived_at=0.5)
    assert only([*records, lost]).n == only(records).n
    with pytest.raises(ValueError, match="run file of a gateway"):
        compare([lost])


def predict(policy: Policy, rate: float, group: Sequence[Served], law: LatencyModel) -> Predicted:
    return Predicted(load=0.625, queueing_delay=0.1, sojourn_time=0.2)


def test_the_prediction_error_is_observed_over_predicted_minus_one() -> None:
    records = drive(parse_policy("single"), 8.0, n=1000)
    comparison = only(records, Theory(law=LAW, predict=predict, asked_rate=8.0))
    observed = comparison.queueing_delay.observed
    assert comparison.prediction_error == pytest.approx(observed.mean / 0.1 - 1)
    assert comparison.quantity.predicted is not None
    assert comparison.quantity.predicted.half_width == pytest.approx(observed.half_width / 0.1)
    assert (comparison.load, comparison.asked_rate) == (0.625, 8.0)
    assert comparison.arrival_rate == pytest.approx(8.0, rel=0.1)
    assert comparison.prediction_error is not None
    assert only(records).prediction_error is None


def test_continuous_compares_the_sojourn_and_carries_the_delay() -> None:
    comparison = only(
        drive(parse_policy("continuous:max_batch_size=8"), 50.0, n=500),
        Theory(law=LAW, predict=predict),
    )
    assert comparison.compared == "sojourn_time"
    assert comparison.quantity is comparison.sojourn_time
    assert comparison.queueing_delay.observed.mean < comparison.sojourn_time.observed.mean


def test_a_short_run_is_marked() -> None:
    short = only(drive(parse_policy("single"), 8.0, n=60))
    assert short.too_short
    assert not only(drive(parse_policy("dynamic"), 40.0)).too_short


def text(comparisons: list[Comparison]) -> str:
    out = io.StringIO()
    show(comparisons, Console(file=out, width=80, force_terminal=True, color_system=None))
    return out.getvalue()


def test_the_table_fits_and_shows_every_column() -> None:
    theory = dataclasses.replace(THEORY, predict=predict, asked_rate=8.0)
    comparisons = [
        only(drive(parse_policy(p), CASES[p], n=300), theory)
        for p in ("single", "fixed:batch_size=4,max_wait=0.05", "continuous")
    ]
    shown = text(comparisons)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for word in ("single", "continuous*", "(ms)", "predicted", "0.62", "±", "%"):
        assert word in shown
    bare = text([only(drive(parse_policy("single"), 8.0, n=300))])
    assert "-" in bare


def test_json_has_seconds_and_nulls() -> None:
    records = drive(parse_policy("single"), 8.0, n=300)
    decoded = msgspec.json.decode(msgspec.json.encode(as_object(only(records))))
    assert decoded["queueing_delay"]["observed"]["mean"] == pytest.approx(
        only(records).queueing_delay.observed.mean
    )
    assert decoded["prediction_error"] is None
    assert decoded["speed"] is None
    assert decoded["too_short"] in (True, False)


def test_the_drivers_are_not_one_shape() -> None:
    """A power guard of the cases above: padded batches of several, and queues that build up."""
    assert only(drive(parse_policy("dynamic"), 40.0)).batch_size > 3
    assert timetable(1.0, 5).output_tokens.std() > 0


# requests of other clients


def sent_by(client: str, records: Sequence[Record]) -> list[Record]:
    return [
        msgspec.structs.replace(record, client_request_id=f"{client}-{record.request_id}")
        for record in records
    ]


def load_side(records: Sequence[Record]) -> list[Record]:
    return [
        Record(
            request_id=record.client_request_id or "",
            outcome="completed",
            intended_at=record.arrived_at,
        )
        for record in records
    ]


@pytest.mark.parametrize(
    ("foreign", "own", "others"),
    [
        (slice(0), slice(0, 1000), 0),
        (slice(300, 303), slice(0, 1000), 3),
        (slice(0, 100), slice(300, 700), 0),  # long before
        (slice(900, 1000), slice(300, 700), 0),  # long after
        (slice(0, 1000), slice(0), 0),  # a run file without its load generator's: nothing is known
    ],
)
def test_a_run_among_requests_of_other_clients_is_disturbed_and_not_judged(
    foreign: slice, own: slice, others: int
) -> None:
    records = drive(parse_policy("single"), 5.0, n=1000)
    of_others = sent_by("other", records[foreign])
    strange = {record.request_id for record in of_others}
    ours = sent_by("own", [record for record in records[own] if record.request_id not in strange])
    (comparison,) = compare([*ours, *of_others], None, load_side(ours))
    assert comparison.of_others == others
    assert any("other clients" in line for line in notes([comparison])) == bool(others)
    estimate = TheoryEstimate(mean=comparison.quantity.observed.mean, deviation=0.0, half_width=0.0)
    agreeing = dataclasses.replace(
        comparison.queueing_delay,
        observed=Interval(0.1, 0.001, 1000, 1000.0, 0.0),
        a_priori=estimate,
    )
    found = verdict(dataclasses.replace(comparison, queueing_delay=agreeing))
    assert (found.kind == "disturbed") == bool(others)
