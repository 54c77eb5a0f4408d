"""The result file of `vllm bench serve`, beside files that it wrote itself
(tests/loadgen/samples/README.md).
"""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kendall.loadgen.measures.failures import is_failure
from kendall.loadgen.measures.metrics import lateness
from kendall.loadgen.report.files.bench_json import (
    BENCH_METRICS,
    CLIENT_QUEUE,
    WITH_CLIENT_QUEUE,
    bench_result,
    write_bench_json,
)
from kendall.loadgen.report.files.bench_read import is_bench_json
from kendall.loadgen.report.summary import summarise_records
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Header, Record, write_run
from tests.loadgen.answers import answered
from tests.loadgen.bench_samples import DETAILED, OURS, SAMPLES, from_bench_json, options

SUMMARY = SAMPLES / "vllm_bench_summary.json"  # without --save-detailed, with --max-concurrency 2
AT = datetime(2026, 11, 21, 7, 13, 5, tzinfo=UTC)


def real(path: Path = DETAILED) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def rewritten(**more: Any) -> dict[str, Any]:
    """The sample read and written again, through JSON."""
    result = bench_result(from_bench_json(DETAILED)[1], options(**more), at=AT)
    return dict(json.loads(msgspec.json.encode(result)))


def test_keys_and_their_order_are_those_of_vllm() -> None:
    assert [key for key in rewritten() if key not in OURS] == list(real())


def test_types_are_those_of_vllm() -> None:
    ours, theirs = rewritten(), real()
    assert {key: _type(ours[key]) for key in theirs} == {
        key: _type(value) for key, value in theirs.items()
    }


def _type(value: Any) -> Any:
    return (
        [type(value), *sorted({str(type(one)) for one in value})]
        if isinstance(value, list)
        else type(value)
    )


def test_without_details_the_keys_are_those_of_vllm_too() -> None:
    flags = {
        "metadata": {},
        "max_concurrency": 2,
        "percentile_metrics": BENCH_METRICS,
        "metric_percentiles": (50.0, 99.0),
        "goodput": (),
    }
    ours, theirs = rewritten(save_detailed=False, **flags), real(SUMMARY)
    assert list(ours) == list(theirs)
    assert {key: _type(ours[key]) for key in theirs} == {
        key: _type(value) for key, value in theirs.items()
    }


def test_every_number_is_the_one_that_vllm_computes_from_the_same_requests() -> None:
    ours, theirs = rewritten(), real()
    # vLLM's clock starts before its first gap and stops after its last answer
    span = ours["duration"] / theirs["duration"]
    assert 0.9 < span < 1
    for key, value in theirs.items():
        if (
            key in {"date", "duration", "generated_texts", "itls", "errors", "queue_times"}
            or "_itl_" in key
        ):
            continue
        wanted = value / span if key.endswith(("throughput", "goodput")) else value
        if key == "max_output_tokens_per_s":  # it counts the chunk that ends an answer as a token
            wanted = pytest.approx(value, rel=0.3)
        assert ours[key] == (wanted if isinstance(wanted, str | None) else pytest.approx(wanted)), (
            key
        )


def test_gaps_between_tokens_leave_out_the_chunk_that_ends_a_padded_answer() -> None:
    theirs, ours = real(), rewritten()
    for index, (kept, every) in enumerate(zip(ours["itls"], theirs["itls"], strict=True)):
        assert len(every) == theirs["output_lens"][index]  # as many gaps as tokens: one too many
        assert kept == pytest.approx(every[:-1], abs=1e-9)
    pooled = [gap * 1e3 for every in theirs["itls"] for gap in every[:-1]]
    assert ours["mean_itl_ms"] == pytest.approx(np.mean(pooled))
    assert ours["p99.9_itl_ms"] == pytest.approx(np.percentile(pooled, 99.9))


def test_foreign_file_is_read_as_records_and_says_no_more_than_it_knows() -> None:
    header, records = from_bench_json(DETAILED)
    theirs = real()
    assert (
        header.writer,
        header.configuration["request_rate"],
        header.configuration["purpose"],
    ) == ("load", 40.0, "sample")
    assert [record.outcome for record in records].count("rejected") == theirs["failed"] == 1
    assert sum(record.outcome == "completed" for record in records) == theirs["completed"]
    for record, start, ttft, latency in zip(
        records, theirs["start_times"], theirs["ttfts"], theirs["latencies"], strict=True
    ):
        assert record.sent_at == start
        assert record.intended_at is record.queueing_delay is record.arrived_at is None
        if record.outcome == "completed":
            assert record.first_token_at == pytest.approx(start + ttft)
            assert record.released_at == pytest.approx(start + latency)
            assert record.sojourn_time == pytest.approx(latency)
            assert record.token_at is not None
            assert len(record.token_at) == record.output_tokens
        else:
            assert record.error == "Too Many Requests"
            assert record.released_at is record.first_token_at is record.output_tokens is None


def test_summary_of_a_foreign_file_has_vllms_numbers() -> None:
    header, records = from_bench_json(DETAILED)
    found = summarise_records(
        records, header.configuration["request_rate"], percentiles=(50.0, 90.0, 99.9)
    )
    assert found.lateness is None
    assert found.completed == 23
    assert found.durations["ttft"].n == 22  # one is warm-up
    assert found.delivered_rate == pytest.approx(40, rel=0.1)


def test_a_bound_on_concurrency_tells_when_the_client_would_have_sent() -> None:
    path_result = {**real(), "max_concurrency": 2, "queue_times": [0.5] * 24}
    _, records = bench_runs_of(path_result)
    assert all(record.intended_at == pytest.approx(record.sent_at - 0.5) for record in records)  # type: ignore[operator]
    assert records[0].sojourn_time == pytest.approx(real()["latencies"][0] + 0.5)
    assert [lateness(record) for record in records] == [0.0] * 24, (
        "what waited for a place was not late"
    )
    unbound, waited = (
        bench_runs_of({**path_result, "max_concurrency": None})[1],
        bench_runs_of({**path_result, "queue_times": [0.0] * 24})[1],
    )
    assert [record.held_until for record in (*unbound, *waited)] == [None] * 48


@pytest.mark.parametrize(("held", "late"), [(0.3, 0.02), (0.3, 0.0), (0.0, 0.02)])
def test_a_wait_for_a_place_comes_back_from_our_own_file_as_such(
    held: float, late: float, tmp_path: Path
) -> None:
    """`kendall summary` of the JSON says of lateness what `kendall load` said."""
    placed = 5.0 + held
    record = answered(1, 5.0, late=held + late)
    record = msgspec.structs.replace(record, held_until=placed if held else None)
    write_bench_json(
        tmp_path / "run.json", bench_result([record], options(max_concurrency=2), at=AT)
    )
    (back,) = from_bench_json(tmp_path / "run.json")[1]
    assert lateness(back) == pytest.approx(late, abs=1e-6)
    assert (back.held_until is not None) == bool(held)
    assert back.intended_at == 5.0


def bench_runs_of(result: dict[str, Any]) -> tuple[Header, list[Record]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        path.write_text(json.dumps(result))
        return from_bench_json(path)


def test_an_answer_that_never_came_failed_even_without_a_reason() -> None:
    result = real()
    lost = result["errors"].index("Too Many Requests")
    result["errors"][lost] = ""  # HTTP/1.1 servers may leave the reason out
    assert [record.outcome for record in bench_runs_of(result)[1]].count("failed") == 1


def test_an_unavailable_server_of_a_foreign_file_has_failed() -> None:
    """As in a run file, where the error begins with 503; a refusal is none."""
    result = real()
    lost = result["errors"].index("Too Many Requests")
    assert [is_failure(record) for record in bench_runs_of(result)[1]].count(True) == 0
    result["errors"][lost] = "Service Unavailable"
    assert [is_failure(record) for record in bench_runs_of(result)[1]].count(True) == 1


def test_our_own_file_comes_back_whole(tmp_path: Path) -> None:
    records = [answered(i, 100.0 + i / 4, service_time=0.09, batch_size=3) for i in range(20)]
    lost = Record(
        request_id="r",
        outcome="abandoned",
        intended_at=105.0,
        sent_at=105.1,
        prompt_tokens=10,
        error="429 queue_timeout",
    )
    write_bench_json(tmp_path / "run.json", bench_result([*records, lost], options(), at=AT))
    _, back = from_bench_json(tmp_path / "run.json")
    for before, after in zip([*records, lost], back, strict=True):
        for name in (
            "request_id",
            "outcome",
            "intended_at",
            "sent_at",
            "queueing_delay",
            "service_time",
            "batch_size",
            "error",
            "prompt_tokens",
        ):
            assert getattr(after, name) == getattr(before, name), name
        for name in ("first_token_at", "last_token_at", "token_at", "released_at", "sojourn_time"):
            assert getattr(after, name) == (
                None if (value := getattr(before, name)) is None else pytest.approx(value)
            ), name


def test_statistics_count_from_sending_and_ours_stand_beside_them() -> None:
    result = bench_result(
        [answered(i, float(i), late=0.04) for i in range(10)],
        options(max_concurrency=4),
        extras={"prediction": {"mean": 1.0}},
    )
    assert result["mean_ttft_ms"] == pytest.approx(60)
    assert result["mean_e2el_ms"] == pytest.approx(100)
    assert result["send_lateness_s"] == result["queue_times"] == pytest.approx([0.04] * 10)
    assert result["intended_times"] == [float(i) for i in range(10)]
    assert result["server_queue_times"] == [0.05] * 10
    assert result["prediction"] == {"mean": 1.0}


def test_queue_in_the_client_is_reported_only_where_vllm_does() -> None:
    records = [answered(i, float(i), late=0.04) for i in range(10)]
    both = (CLIENT_QUEUE, WITH_CLIENT_QUEUE)
    bounded = bench_result(records, options(percentile_metrics=both, max_concurrency=4))
    assert bounded["mean_client_queue_time_ms"] == pytest.approx(40)
    assert bounded["mean_e2el_including_client_queue_ms"] == pytest.approx(140)
    at_once = bench_result(
        records, options(percentile_metrics=both, max_concurrency=4, request_rate=float("inf"))
    )
    assert at_once["request_rate"] == "inf"
    assert "mean_client_queue_time_ms" in at_once
    assert "mean_e2el_including_client_queue_ms" not in at_once
    assert not [
        key
        for key in bench_result(records, options(percentile_metrics=both))
        if "client_queue" in key
    ]


def test_nothing_completed_gives_zeros_as_vllm_does(tmp_path: Path) -> None:
    refused = [
        Record(
            request_id=str(i),
            outcome="rejected",
            intended_at=float(i),
            sent_at=float(i),
            released_at=i + 0.1,
        )
        for i in range(3)
    ]
    for records in (refused, []):
        result = bench_result(records, options())
        assert (
            result["completed"],
            result["failed"],
            result["mean_ttft_ms"],
            result["p99.9_itl_ms"],
        ) == (0, len(records), 0.0, 0.0)
        assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (0.0, 0)
    assert bench_result(refused, options())["errors"] == ["rejected"] * 3


def test_gaps_that_were_not_recorded_are_null_not_zero() -> None:
    result = bench_result([answered(i, float(i), token_at=None) for i in range(5)], options())
    assert (
        result["mean_itl_ms"] is result["p99.9_itl_ms"] is result["max_output_tokens_per_s"] is None
    )
    assert result["mean_tpot_ms"] == pytest.approx(20)
    assert result["itls"] == [[]] * 5


def test_peaks_are_counted_in_whole_seconds_from_the_first_sending() -> None:
    records = [answered(i, at, late=0.0) for i, at in enumerate((10.0, 10.5, 10.95, 12.2))]
    result = bench_result(records, options())
    assert (
        result["max_output_tokens_per_s"] == 6.0
    )  # three tokens each of the first two; the third's fall into the next second
    assert result["max_concurrent_requests"] == 3


def test_results_are_appended_one_to_a_line_and_several_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "all.json"
    for _ in range(3):
        write_bench_json(path, rewritten(), append=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == 3 * [rewritten()]
    several = tmp_path / "summary.json"
    several.write_text(json.dumps([real(), real()]))
    with pytest.raises(ValueError, match="got 2 results; expected one"):
        from_bench_json(several)
    with pytest.raises(ValueError, match="got 3 results; expected one"):
        from_bench_json(path)


def test_file_without_details_is_refused_and_says_which_flag_was_missing() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"vllm_bench_summary.json: got a result without input_lens.*expected one written "
            r"with --save-detailed"
        ),
    ):
        from_bench_json(SUMMARY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "truncated|no benchmark result"),
        ("{broken", "malformed|expected"),
        ("[]", "no benchmark result"),
        ('{"writer":"load"}', "no benchmark result"),
        (json.dumps({**real(), "ttfts": [0.1]}), "arrays of different lengths"),
        (json.dumps({**real(), "ttfts": ["soon"] * 24}), "Expected `float`"),
    ],
)
def test_what_is_no_result_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        from_bench_json(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_result_files_are_told_from_run_files(tmp_path: Path) -> None:
    write_run(
        tmp_path / "run.jsonl",
        Header(writer="load", configuration={"endpoint_type": "x"}),
        [answered(0, 0.0)],
    )
    assert is_bench_json(DETAILED.read_bytes())
    assert is_bench_json(SUMMARY.read_bytes())
    assert not is_bench_json((tmp_path / "run.jsonl").read_bytes())


def test_metadata_and_extras_must_not_take_a_name_of_the_file() -> None:
    for more in ({"metadata": {"label": "mine"}}, {"metadata": {"duration": "mine"}}):
        with pytest.raises(
            SpecError, match="expected a name that the result file does not use itself"
        ):
            bench_result([answered(0, 0.0)], options(**more))
    with pytest.raises(SpecError, match="got a key named ttfts;"):
        bench_result([answered(0, 0.0)], options(), extras={"ttfts": []})
