"""What a load summary says, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kendall.loadgen.measures.failures import count_failures
from kendall.loadgen.measures.goodput import Limit
from kendall.loadgen.measures.little_check import LittleCheck, little_check
from kendall.loadgen.measures.metrics import (
    ORDER,
    parse_metrics,
    parse_percentiles,
    percentile_name,
    values,
)
from kendall.loadgen.report.summary import (
    LoadSummary,
    measure,
    summarise_load,
    summarise_records,
    variances_of_records,
)
from kendall.loadgen.report.summary_text import in_ms, load_lines, load_notes, load_table
from kendall.loadgen.sending.client.client import CUT_SHORT
from kendall.loadgen.sending.run import LoadResult
from kendall.policies.text import SpecError
from kendall.queueing.commands.terminal import say
from kendall.queueing.measurement.record import Header, Record
from kendall.queueing.measurement.statistics import mean_interval, quantile_interval, summarise
from tests.loadgen.answers import answered


def summary_of(records: list[Record], **more: object) -> LoadSummary:
    return summarise_records(records, **more)  # type: ignore[arg-type]


def rendered(summary: LoadSummary, width: int = 100) -> str:
    out = io.StringIO()
    to = Console(file=out, width=width)
    to.print(load_table(summary))
    for note in load_notes(summary):
        say(to, note)
    return "\n".join([*load_lines(summary), out.getvalue()])


def test_every_duration_counts_from_the_intended_instant() -> None:
    found = summary_of([answered(i, float(i)) for i in range(10)]).durations
    assert found["send_lateness"].mean == pytest.approx(0.01)
    assert found["ttfb"].mean == pytest.approx(0.095)
    assert found["ttft"].mean == pytest.approx(0.1)
    assert found["e2el"].mean == pytest.approx(0.14)
    assert (found["tpot"].mean, found["itl"].mean) == (pytest.approx(0.02), pytest.approx(0.02))
    assert found["queueing_delay"].mean == pytest.approx(0.05)
    assert not {"batch_forming_delay", "service_time"} & set(found)


def test_time_per_output_token_is_vllms_and_reaches_to_the_end_of_the_answer() -> None:
    padded = answered(
        0, 0.0, released_at=0.34
    )  # three tokens until 0.14; the batch held the answer back
    assert values("tpot", [padded]).tolist() == pytest.approx([(0.34 - 0.1) / 2])
    assert values("itl", [padded]).tolist() == pytest.approx([0.02, 0.02])
    assert values("tpot", [answered(0, 0.0, tokens=1)]).size == 0


def test_gaps_between_tokens_are_pooled_and_are_not_guessed() -> None:
    assert values(
        "itl", [answered(0, 0.0, tokens=4), answered(1, 5.0, gap=0.1, tokens=2)]
    ).tolist() == pytest.approx([0.02, 0.02, 0.02, 0.1])
    assert (
        "itl" not in summary_of([answered(i, float(i), token_at=None) for i in range(9)]).durations
    )


def test_without_an_intended_instant_durations_count_from_sending_and_lateness_is_unknown() -> None:
    found = summary_of([answered(i, float(i), intended_at=None) for i in range(10)])
    assert found.durations["ttft"].mean == pytest.approx(0.09)
    assert found.lateness is None
    assert math.isnan(found.drawn_rate)


def test_a_request_cut_by_the_drain_limit_is_a_failed_one_in_every_line() -> None:
    records = [answered(i, float(i)) for i in range(60)]
    cut = [
        msgspec.structs.replace(record, outcome="cancelled", error=CUT_SHORT)
        for record in records[:39]
    ]
    (first, *_) = load_lines(summary_of(cut + records[39:]))
    assert first.split(maxsplit=1)[1] == "21 completed, 39 failed (39 without an answer in time)"
    assert (
        "39 of 60 requests failed (65 %)"
        in count_failures(cut + records[39:], cut_short=False).text()
    )


def test_warm_up_is_left_out_of_durations_and_of_nothing_else() -> None:
    records = [answered(i, float(i), first=10.0 if i < 5 else 0.1) for i in range(100)]
    found = summary_of(records[::-1])  # records come in any order
    assert (found.warm_up, found.completed, found.durations["ttft"].n) == (5, 100, 95)
    assert "the first 5 of 100 requests are left out" in found.warm_up_why
    assert found.durations["ttft"].max == pytest.approx(0.1)
    assert found.durations["send_lateness"].n == found.output_tokens.n == 100  # type: ignore[union-attr]


def test_interval_is_by_batch_means_and_percentiles_are_numpys() -> None:
    delays = np.round(np.random.default_rng(1).exponential(0.2, 500), 9)
    found = measure(delays, (50.0, 99.9))
    assert found is not None
    assert found.half_width == mean_interval(delays).half_width
    assert found.intervals["p99.9"] is None  # half a value lies beyond it
    assert found.intervals["p50"] == (
        (ends := quantile_interval(delays, 0.5)) and (ends.low, ends.high)
    )
    assert (found.as_object()["p50_low"], found.as_object()["p99.9_high"]) == (
        ends and ends.low,
        None,
    )
    assert found.quantiles == {
        "p50": np.percentile(delays, 50),
        "p99.9": np.percentile(delays, 99.9),
    }
    assert found.as_object()["p99.9"] == np.percentile(delays, 99.9)
    assert measure(np.array([])) is None


def test_every_number_of_a_summary_is_there_in_order_and_inside_its_interval() -> None:
    rng = np.random.default_rng(2)
    records = [
        answered(
            row,
            float(at),
            late=float(rng.uniform(0, 0.01)),
            first=float(rng.uniform(0.1, 0.3)),
            gap=float(rng.uniform(0.01, 0.03)),
            tokens=int(rng.integers(2, 9)),
            service_time=float(rng.uniform(0.1, 0.2)),
            batch_forming_delay=float(rng.uniform(0, 0.05)),
        )
        for row, at in enumerate(np.cumsum(rng.exponential(0.5, 3000)))
    ]
    found = json.loads(
        msgspec.json.encode(
            summary_of(records, asked_rate=2.0, limits=[Limit("ttft", 0.2)]).as_object()
        )
    )
    for name in (*ORDER, "prompt_tokens", "output_tokens"):
        levels = [found[name][level] for level in ("p50", "p90", "p95", "p99")]
        assert levels == sorted(levels), name
        assert levels[0] > 0, name
        assert levels[-1] <= found[name]["max"]
        assert found[name]["mean"] <= found[name]["max"]
        assert 0 <= found[name]["half_width"] < 0.2 * found[name]["mean"], name
        assert found[name]["std"] >= 0
        assert 1 <= found[name]["effective_n"] <= found[name]["n"]
        assert not found[name]["too_short"]
        for level in ("p50", "p90", "p95"):
            assert (
                found[name][f"{level}_low"] <= found[name][level] <= found[name][f"{level}_high"]
            ), (name, level)
    assert found["ttfb"]["mean"] < found["ttft"]["mean"] < found["e2el"]["mean"]
    share = found["goodput"]
    assert 0 < share["low"] < share["share"] < share["high"] < 1
    assert share["share"] == pytest.approx(0.5, abs=0.05)
    assert 0 < share["rate"] < found["completed_rate"]
    for rate in ("asked_rate", "drawn_rate", "delivered_rate", "completed_rate"):
        assert found[rate] == pytest.approx(2.0, rel=0.1), rate


@pytest.mark.parametrize(
    ("number", "off", "holds"),
    [(5.0, 4.9e-6, True), (5.0, 5.1e-6, False), (0.1, 0.9e-6, True), (0.1, 1.1e-6, False)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_littles_law_may_be_off_by_a_millionth_of_the_number_in_the_system(
    number: float, off: float, holds: bool, sign: int
) -> None:
    """Or of one request, where there are fewer; what the edges explain is no difference."""
    check = LittleCheck(number, number - 0.3 - sign * off, 0.3)
    assert check.residual == pytest.approx(sign * off, rel=1e-6)
    assert check.holds == holds


@pytest.mark.parametrize(("completed", "known"), [(980, True), (979, False)])
def test_the_variance_of_the_mean_is_known_where_nearly_every_request_was_completed(
    completed: int, known: bool
) -> None:
    """One server, exponential gaps, services of half a mean gap; 98 of 100 of the thousand that
    were sent.
    """
    records, free = [], 0.0
    for row, at in enumerate(np.cumsum(np.random.default_rng(4).exponential(1.0, 1000)).tolist()):
        begun = max(at, free)
        free = begun + 0.5
        records.append(
            answered(
                row,
                at,
                late=0.0,
                first=begun - at + 0.1,
                queueing_delay=begun - at,
                service_time=0.5,
            )
        )
    assert bool(variances_of_records(records[:completed], records)) == known


def test_rates_are_asked_drawn_delivered_and_completed() -> None:
    records = [
        answered(i, i / 4, late=i / 4) for i in range(11)
    ]  # sent at half the rate of the timetable
    found = summary_of(records, asked_rate=5.0)
    assert (found.asked_rate, found.drawn_rate, found.delivered_rate) == (
        5.0,
        pytest.approx(4.0),
        pytest.approx(2.0),
    )
    assert found.duration == pytest.approx(2.5 + 0.14)
    assert found.completed_rate == pytest.approx(11 / 2.64)
    assert found.output_tokens_per_second == pytest.approx(33 / 2.64)
    assert found.tokens_per_second == pytest.approx(143 / 2.64)


def test_littles_law_holds_on_a_run_and_shows_records_that_are_wrong() -> None:
    rng = np.random.default_rng(3)
    instants = np.cumsum(rng.exponential(0.05, 400))
    records = [
        answered(i, float(at), first=float(rng.exponential(0.2))) for i, at in enumerate(instants)
    ]
    check = little_check(records, 20)
    assert check is not None
    assert check.holds
    assert check.number_in_system == pytest.approx(20 * 0.24, rel=0.25)
    assert check.number_in_system == pytest.approx(check.rate_times_time, rel=0.1)
    wrong = [
        msgspec.structs.replace(record, sojourn_time=0.9 * (record.sojourn_time or 0))
        for record in records
    ]
    assert not little_check(wrong, 20).holds  # type: ignore[union-attr]
    backwards = [
        *records[:-2],
        msgspec.structs.replace(records[-2], released_at=0.0, sojourn_time=None),
        records[-1],
    ]
    assert not little_check(backwards, 20).holds  # type: ignore[union-attr]
    assert "THEY DIFFER" in rendered(summary_of(wrong))


def test_littles_law_holds_in_windows_far_shorter_than_their_requests() -> None:
    """A burst within a microsecond, answered within an hour: what is left is rounding."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        begun = 10.0 + np.cumsum(rng.exponential(1e-7, 4))
        ended = begun + rng.exponential(3600.0, 4)
        records = [
            Record(
                request_id=str(row),
                outcome="completed",
                intended_at=at,
                released_at=end,
                sojourn_time=end - at,
            )
            for row, (at, end) in enumerate(zip(begun.tolist(), ended.tolist(), strict=True))
        ]
        check = little_check(records)
        assert check is not None
        assert check.holds, check.residual


def test_littles_law_counts_what_was_cut_off_and_the_edges() -> None:
    lost = Record(request_id="x", outcome="cancelled", intended_at=0.0, sent_at=0.0)
    check = little_check([lost, answered(1, 1.0), answered(2, 2.0)])
    assert check is not None
    assert check.holds  # the lost one stays until 2.14, 0.14 s behind the window's end
    assert check.number_in_system == pytest.approx((2 + 0.14) / 2)
    assert little_check([lost]) is None
    assert little_check([lost, lost]) is None


def test_a_run_without_a_success_is_summarised_sparsely() -> None:
    refused = [
        Record(
            request_id=str(i),
            outcome="rejected",
            intended_at=float(i),
            sent_at=float(i),
            error="429 queue_full",
        )
        for i in range(7)
    ]
    found = summary_of(refused, asked_rate=100 / 11)
    text = rendered(found)
    assert "asked 9.091, drawn 1, delivered 1, " in text, "4 digits each"
    assert "7 rejected" in text
    assert "7 x 429 queue_full" in text
    assert "end to end" not in text
    assert set(found.durations) == {"send_lateness"}
    assert msgspec.json.decode(msgspec.json.encode(found.as_object()))["e2el"] is None


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Record(request_id="a", outcome="cancelled")],
        [Record(request_id="a", outcome="completed")],
    ],
)
def test_nothing_measured_at_all_is_no_error(records: list[Record]) -> None:
    found = summary_of(records)
    json.loads(msgspec.json.encode(found.as_object()))
    assert rendered(found)
    assert found.durations == {}


def test_table_fits_100_columns_and_shows_the_chosen_metrics() -> None:
    found = summary_of(
        [answered(i, float(i), service_time=12.3456, batch_forming_delay=99.9) for i in range(400)],
        percentiles=(50, 90, 95, 99),
    )
    text = rendered(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for words in (
        "time to first token",
        "time per output token",
        "inter-token latency",
        "batch forming delay",
        "12346",
    ):
        assert words in text
    out = io.StringIO()
    Console(file=out, width=100).print(load_table(found, parse_metrics("ttft,tpot")))
    assert "end to end" not in out.getvalue()
    assert "p95" in out.getvalue()


def test_table_says_too_short_in_place_of_an_interval_and_how_long_a_run_would_do() -> None:
    drifting = " ".join(
        rendered(
            summary_of([answered(i, float(i), first=0.01 + i / 100) for i in range(200)])
        ).split()
    )
    assert re.search(
        r"too short: the run does not know this mean to 25 %; about [\d.]+ (min|h) at this rate "
        r"would do for the queueing delay",
        drifting,
    )
    unreported = [
        answered(i, float(i), first=0.01 + i / 100, queueing_delay=None) for i in range(200)
    ]
    assert "at this rate would do for the end-to-end time" in " ".join(
        rendered(summary_of(unreported)).split()
    )
    assert "? too few samples beyond this quantile for an interval" in drifting
    first_bytes = [
        answered(i, float(i), first=0.01 + i / 100, queueing_delay=0.1 + i % 2 / 100)
        for i in range(200)
    ]
    assert "at this rate would do for the time to first byte" in " ".join(
        rendered(summary_of(first_bytes)).split()
    )
    rng = np.random.default_rng(5)
    steady = rendered(
        summary_of(
            [answered(i, float(i), first=float(rng.uniform(0.1, 0.3))) for i in range(3000)],
            percentiles=(50.0, 90.0),
        )
    )
    assert "too short" not in steady
    assert "?" not in steady


def served_at(
    rate: float, offered: float, n: int = 2000, *, reported: bool = True, service: float = 0.02
) -> list[Record]:
    """One server with this rate, and requests at equal distances."""
    found, free = [], 0.0
    for i in range(n):
        at = i / offered
        start = max(at, free)
        free = start + 1 / rate
        record = Record(
            request_id=str(i),
            outcome="completed",
            intended_at=at,
            sent_at=at,
            first_byte_at=start,
            released_at=start + service,
            queueing_delay=start - at if reported else None,
            sojourn_time=start + service - at,
        )
        found.append(record)
    return found


@pytest.mark.parametrize("reported", [True, False])
def test_a_server_that_does_not_keep_up_is_named_instead_of_asking_for_a_longer_run(
    reported: bool,
) -> None:
    text = " ".join(rendered(summary_of(served_at(16.4, 39.8, reported=reported))).split())
    assert (
        "the server did not keep up with the rate: completed 16.4/s of 39.8/s offered, and the "
        "queue grew to the end of sending"
    ) in text
    assert "would do for" not in text
    assert "a longer run would not either" in text
    assert "did not keep up" not in rendered(summary_of(served_at(45.0, 39.8, reported=reported)))


def test_long_answers_are_no_growing_queue() -> None:
    """Nobody waits, and in a run of 50 s nobody is answered either."""
    assert "did not keep up" not in rendered(summary_of(served_at(45.0, 39.8, service=60.0)))


def test_what_is_shown_of_littles_law_adds_up() -> None:
    for check in (
        LittleCheck(1015.2, 2403.9, -1388.7),
        LittleCheck(0.30124, 0.29991, 0.00133),
        LittleCheck(12345.6, 12340.2, 5.4),
    ):
        summary = dataclasses.replace(
            summary_of([answered(i, float(i)) for i in range(10)]), little=check
        )
        (line,) = [line for line in load_lines(summary) if line.startswith("Little")]
        held, product, edges = (
            float(text.replace(",", ""))
            for text in re.findall(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?", line)
        )
        assert held == pytest.approx(product + edges, abs=1e-9), line
        assert held == pytest.approx(check.number_in_system, rel=1e-3)
    assert "0 in the system" in str(
        load_lines(dataclasses.replace(summary, little=LittleCheck(0.0, 0.0, 0.0)))
    )


def test_table_says_that_the_sender_was_late() -> None:
    """By more than 2 % of the 140 ms from end to end."""
    assert "the sender was late" not in rendered(
        summary_of([answered(i, float(i), late=0.00279) for i in range(200)])
    )
    assert "the sender was late" in rendered(
        summary_of([answered(i, float(i), late=0.00281) for i in range(200)])
    )


def test_a_load_result_is_summarised_with_its_interruption() -> None:
    records = [answered(i, float(i)) for i in range(30)]
    result = LoadResult(Header(writer="load"), records, summarise(np.zeros(30)), interrupted=True)
    found = summarise_load(result, 2.0, percentiles=(50.0,))
    assert found.interrupted
    assert "(interrupted)" in load_lines(found)[0]
    assert found.percentiles == (50.0,)


def test_percentiles_and_metrics_are_written_as_for_vllm() -> None:
    assert parse_percentiles("99, 50,99.9") == (50.0, 99.0, 99.9)
    assert [percentile_name(p) for p in (50.0, 99.9)] == ["p50", "p99.9"]
    assert parse_metrics("ttft,tpot, itl,e2el") == ("ttft", "tpot", "itl", "e2el")
    for wrong in ("", "50,x", "101", "-1", "nan"):
        with pytest.raises(SpecError, match="expected numbers from 0 to 100"):
            parse_percentiles(wrong)
    for wrong in ("", "ttft,speed"):
        with pytest.raises(SpecError, match="expected some of"):
            parse_metrics(wrong)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.9994, "0.999"),
        (1.0, "1.00"),
        (99.994, "99.99"),
        (100.0, "100.0"),
        (9999.94, "9999.9"),
        (10_000.0, "10000"),
        (-0.5, "-0.500"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_milliseconds_have_about_four_digits(value: float, shown: str) -> None:
    assert in_ms(value / 1e3) == shown
