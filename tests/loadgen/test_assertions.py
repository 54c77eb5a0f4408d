"""Conditions: how they are written, what they mean, what breaks them."""

from __future__ import annotations

import math

import pytest

from kendall.loadgen.compare.assertions import (
    Assertion,
    broken_lines,
    check,
    parse_assertion,
    percentiles_of,
    require_known,
)
from kendall.loadgen.measures.goodput import parse_goodput
from kendall.loadgen.report.summary import summarise_records
from kendall.loadgen.report.summary_values import flat, names
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Record
from tests.loadgen.answers import answered


@pytest.mark.parametrize(
    ("text", "name", "operator", "limit"),
    [
        ("prediction_error < 0.15", "prediction_error", "<", 0.15),
        ("prediction_error<15%", "prediction_error", "<", 0.15),
        ("p99_queueing_delay < 2s", "p99_queueing_delay", "<", 2.0),
        ("mean_ttft<200ms", "mean_ttft", "<", 0.2),
        ("goodput >= 95%", "goodput", ">=", 0.95),
        ("completed == 1000", "completed", "==", 1000.0),
        ("send_lateness_p99 <= 5ms", "p99_send_lateness", "<=", 0.005),
        ("mean_lateness < 250us", "mean_send_lateness", "<", 0.00025),
        ("p99_ttft_ms < 200", "p99_ttft", "<", 0.2),
        ("p99.9_itl < .5 ms", "p99.9_itl", "<", 0.0005),
        ("median_end_to_end < 1e-1s", "p50_e2el", "<", 0.1),
        ("time-to-first-token-max != 3s", "max_ttft", "!=", 3.0),
        ("delivered_rate > 9.5", "delivered_rate", ">", 9.5),
        ("duration < 1m30s", "duration", "<", 90.0),
        ("duration < 1.5min", "duration", "<", 90.0),
        ("duration < 2 m", "duration", "<", 120.0),
        ("p50_itl > 100ns", "p50_itl", ">", 1e-7),
        ("p99_ttft <= 250µs", "p99_ttft", "<=", 0.00025),
    ],
)
def test_condition_is_read_in_any_of_its_forms(
    text: str, name: str, operator: str, limit: float
) -> None:
    found = parse_assertion(text)
    assert (found.name, found.operator, found.limit) == (name, operator, limit)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "ttft",
        "ttft = 3ms",
        "p99_ttft < fast",
        "< 3",
        "p99_ttft < 3 minutes",
        "a < b < 3",
        "p99_ttft < nan",
        "p99_ttft < inf",
        "p99_ttft < -5ms",
        "p99_ttft < 1e400s",
        "p99_ttft < 1e999999h",
        "p99_ttft < 3 ms s",
    ],
)
def test_what_is_no_condition_is_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(SpecError, match=r'expected NAME < VALUE, for example "p99_ttft < 200ms"'):
        parse_assertion(wrong)


@pytest.mark.parametrize(
    "bare", ["mean_ttft < 200", "p99_queueing_delay < 2", "duration < 60", "p99_send_lateness < 5%"]
)
def test_a_duration_needs_its_unit(bare: str) -> None:
    with pytest.raises(SpecError, match="expected a unit"):
        parse_assertion(bare)


def test_a_unit_of_time_on_something_else_is_refused() -> None:
    with pytest.raises(SpecError, match="it is not a duration"):
        require_known([parse_assertion("completed < 5ms")], names())


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("completed == 10", 10.0, True),
        ("completed == 10", 9.0, False),
        ("goodput >= 95%", 0.95, True),
        ("goodput > 95%", 0.95, False),
        ("mean_ttft <= 5ms", 0.005, True),
        ("mean_ttft < 5ms", 0.005, False),
        ("error_rate != 0", 0.0, False),
        ("prediction_error < 0.15", -0.14, True),
        ("prediction_error < 0.15", -0.16, False),
        ("prediction_error < 0.15", 0.16, False),
    ],
)
def test_condition_holds_or_not(text: str, value: float, holds: bool) -> None:
    assert parse_assertion(text).holds(value) is holds


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_was_not_measured_breaks_every_condition(operator: str, missing: float | None) -> None:
    [broken] = check([parse_assertion(f"goodput {operator} 0.5")], {"goodput": missing})
    assert "got goodput unknown (not measured)" in str(broken)


def test_broken_conditions_are_one_line_each_in_the_unit_they_were_written_in() -> None:
    asked = [
        parse_assertion(text)
        for text in ("p99_ttft < 200ms", "prediction_error < 15%", "completed == 3")
    ]
    lines = broken_lines(
        asked, {"p99_ttft": 0.2314, "prediction_error": -0.2, "completed": 3.0}, "dynamic, load 0.5"
    )
    assert lines == [
        "dynamic, load 0.5: got p99_ttft 231.4 ms; expected < 200 ms",
        "dynamic, load 0.5: got prediction_error -20%; expected an absolute value < 15%",
    ]
    assert broken_lines(asked, {"p99_ttft": 0.1, "prediction_error": 0.1, "completed": 3.0}) == []
    assert broken_lines([parse_assertion("duration < 1m30s")], {"duration": 100.0}) == [
        "got duration 100 s; expected < 90 s"
    ]
    assert broken_lines([parse_assertion("completed == 3")], {"completed": 2.0}) == [
        "got completed 2; expected == 3"
    ]


@pytest.mark.parametrize(
    ("written", "near"),
    [("p99_tftt", "p99_ttft"), ("ttft", "mean_ttft"), ("complete", "completed"), ("p95_itl", None)],
)
def test_unknown_name_is_refused_with_a_suggestion_and_the_list(
    written: str, near: str | None
) -> None:
    asked = Assertion(written, written, "<", 1.0, "s")
    with pytest.raises(SpecError) as caught:
        require_known([asked], names((50.0, 99.0)))
    text = str(caught.value)
    assert near is None or f"did you mean {near}?" in text
    assert "(max|mean|p50|p99|std)_(batch_forming_delay|e2el|itl|" in text
    assert "\n" not in text


def test_summary_gives_every_name_it_promises_measured_or_not() -> None:
    runs = (
        [],
        [Record(request_id="a", outcome="failed", intended_at=0.0)],
        [answered(i, float(i)) for i in range(40)],
    )
    for records in runs:
        assert sorted(flat(summarise_records(records, percentiles=(50.0, 99.9)))) == sorted(
            names((50.0, 99.9))
        )


def test_conditions_are_judged_on_a_summary() -> None:
    records = [answered(i, i / 2, outcome="failed" if i == 7 else "completed") for i in range(40)]
    texts = [
        "completed == 39",
        "failed == 1",
        "p99.5_ttft < 101ms",
        "mean_ttft > 99ms",
        "goodput >= 94%",
        "delivered_rate < 2.01",
    ]
    texts += [
        "error_rate < 3%",
        "request_throughput > 1.9",
        "max_output_tokens == 3",
        "number_in_system < 0.3",
        "p50_itl < 20.01ms",
    ]
    held = [parse_assertion(text) for text in texts]
    summary = summarise_records(
        records,
        percentiles=sorted({50.0, *percentiles_of(held)}),
        limits=parse_goodput(["ttft:101"]),
    )
    assert broken_lines(held, flat(summary)) == []
    broken = [
        parse_assertion(text)
        for text in ("goodput > 98%", "mean_service_time < 10s", "asked_rate > 0")
    ]
    assert [line.split(";")[0] for line in broken_lines(broken, flat(summary))] == [
        "got goodput 97.4359%",
        "got mean_service_time unknown (not measured)",
        "got asked_rate unknown (not measured)",
    ]


def test_percentiles_that_conditions_need_are_named() -> None:
    asked = [
        parse_assertion(text)
        for text in ("p99.9_itl < 1s", "ttft_p95 < 1s", "mean_ttft < 1s", "prediction_error < 1")
    ]
    assert percentiles_of(asked) == {99.9, 95.0}
