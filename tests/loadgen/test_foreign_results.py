"""Result files of GuideLLM, AIPerf and inference-perf, read as runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import kendall.cli
from kendall.loadgen.commands.audit_cli import app as audit_app
from kendall.loadgen.commands.compare_cli import app as compare_app
from kendall.loadgen.measures.failures import HUNG_UP
from kendall.loadgen.report.files.bench_read import read_either
from kendall.loadgen.report.files.saved_run import read_results
from kendall.loadgen.report.load_report import parse_wishes, report_on
from kendall.loadgen.report.options import ReportOptions
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Header, Record, write_run

SAMPLES = Path(__file__).parent / "samples"
FILES = {"guidellm.json": 12, "aiperf.jsonl": 12, "inference_perf.json": 12}


def read(name: str) -> tuple[Header, list[Record]]:
    header, records, cut = read_either(SAMPLES / name)
    assert not cut
    return header, records


@pytest.mark.parametrize("name", FILES)
def test_every_request_becomes_a_record_in_the_order_of_the_schedule(name: str) -> None:
    header, records = read(name)
    assert header.writer == "load"
    assert len(records) == FILES[name]
    instants = [(r.sent_at if r.intended_at is None else r.intended_at) or 0.0 for r in records]
    assert instants == sorted(instants)
    assert [record.request_id for record in records] == [
        f"{Path(name).stem}-{row}" for row in range(len(records))
    ]
    for record in records:
        if record.outcome == "completed":
            assert record.sent_at is not None
            assert record.first_token_at is not None
            assert record.last_token_at is not None
            assert record.released_at is not None
            assert record.sent_at < record.first_token_at <= record.last_token_at
            assert record.last_token_at <= record.released_at + 1e-6
            assert 1 <= (record.prompt_tokens or 0) <= 24
            assert 1 <= (record.output_tokens or 0) <= 5


def test_guidellm_keeps_schedule_status_and_strategy() -> None:
    header, records = read("guidellm.json")
    assert header.configuration == {"tool": "GuideLLM", "arrivals": "poisson", "request_rate": 20.0}
    assert Counter(record.outcome for record in records) == {
        "completed": 10,
        "cancelled": 1,
        "rejected": 1,
    }
    rejected = next(record for record in records if record.outcome == "rejected")
    assert (rejected.error or "").startswith("429 Client error")
    assert next(r for r in records if r.outcome == "cancelled").error == HUNG_UP
    late = [(r.sent_at or 0.0) - (r.intended_at or 0.0) for r in records]
    assert all(0 < each < 0.005 for each in late)


def test_aiperf_keeps_ids_and_gaps_and_leaves_warm_up_out() -> None:
    _, records = read("aiperf.jsonl")
    assert Counter(record.outcome for record in records) == {
        "completed": 7,
        "abandoned": 3,
        "cancelled": 2,
    }
    second = records[1]
    assert second.client_request_id == "b24e1a07-be09-484c-82db-5d9ce50548a3"
    assert [at - (second.sent_at or 0.0) for at in second.token_at or ()] == pytest.approx(
        [0.070629, 0.072848, 0.073736, 0.076097], abs=1e-6
    )
    assert second.released_at == pytest.approx(second.last_token_at)
    assert second.intended_at is not None  # when its rate limiter let it go
    assert (second.sent_at or 0.0) - second.intended_at == pytest.approx(0.004542, abs=1e-6)
    left = next(record for record in records if record.outcome == "abandoned")
    assert (left.error or "").startswith("429 Too Many Requests: ")
    assert {r.error for r in records if r.outcome == "cancelled"} == {HUNG_UP}


def test_other_errors_of_aiperf_are_failures(tmp_path: Path) -> None:
    text = (SAMPLES / "aiperf.jsonl").read_text().replace('"code":429', '"code":500')
    (tmp_path / "profile_export.jsonl").write_text(text)
    records = read_either(tmp_path / "profile_export.jsonl")[1]
    assert sum(record.outcome == "failed" for record in records) == 3


def test_inference_perf_keeps_token_times_and_says_no_schedule() -> None:
    _, records = read("inference_perf.json")
    assert {record.intended_at for record in records} == {None}
    done = [record for record in records if record.outcome == "completed"]
    assert all(1 <= len(r.token_at or ()) <= (r.output_tokens or 0) for r in done)
    assert done[0].queueing_delay == pytest.approx(0.000473)  # as the gateway's usage says
    left = next(record for record in records if record.outcome == "abandoned")
    assert (left.error or "").startswith("429 HTTP Error 429: ")


def test_a_schedule_is_read_where_a_later_version_writes_it(tmp_path: Path) -> None:
    entries = json.loads((SAMPLES / "inference_perf.json").read_text())
    for entry in entries:
        entry["scheduled_time"] = entry["start_time"] - 0.001
    path = tmp_path / "per_request_lifecycle_metrics.json"
    path.write_text(json.dumps(entries, indent=2))
    assert [(r.sent_at or 0.0) - (r.intended_at or 0.0) for r in read_either(path)[1]] == (
        pytest.approx([0.001] * 12)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_summary_and_an_audit_of_each(name: str) -> None:
    ((_, result),) = read_results([SAMPLES / name])
    report = report_on(result, parse_wishes(ReportOptions()))
    assert report.summary.completed >= 7
    assert report.verdict.failures.requests + report.summary.hung_up == FILES[name]
    audited = CliRunner().invoke(audit_app, [str(SAMPLES / name), "--json"])
    assert audited.exit_code == 0, audited.output
    (audit,) = json.loads(audited.stdout)["audits"]
    assert (audit["instants"], audit["n"]) == ("sent", FILES[name])


def test_compare_joins_aiperf_to_a_gateway_by_its_ids(tmp_path: Path) -> None:
    """The lateness of AIPerf stands beside the gateway's delays."""
    _, sent = read("aiperf.jsonl")
    received = [
        Record(
            request_id=f"g-{row}-0",
            client_request_id=record.client_request_id,
            outcome="completed",
            policy="single",
            epoch=0,
            server_id=0,
            batch_id=row,
            batch_size=1,
            arrived_at=100.0 + row,
            dispatched_at=100.0 + row,
            released_at=100.5 + row,
            server_free_at=100.5 + row,
            queueing_delay=0.0,
            service_time=0.5,
            sojourn_time=0.5,
            prompt_tokens=8,
            output_tokens=4,
        )
        for row, record in enumerate(sent)
    ]
    gateway = tmp_path / "gateway.jsonl"
    write_run(gateway, Header(writer="gateway"), received)

    def compared(*files: Path) -> Any:
        result = CliRunner().invoke(compare_app, [*map(str, files), "--json"])
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.stdout)["comparisons"]
        return found

    beside = compared(gateway, SAMPLES / "aiperf.jsonl")
    assert "send_lateness" in json.dumps(beside) or "lateness" in json.dumps(beside)
    assert beside != compared(gateway)


def test_compare_of_load_runs_alone_says_what_is_missing() -> None:
    result = CliRunner().invoke(compare_app, [str(SAMPLES / "guidellm.json")])
    assert isinstance(result.exception, SpecError)
    assert "expected the gateway's own as well" in str(result.exception)


def damaged(name: str, tmp_path: Path, **changes: Any) -> Path:
    report = msgspec.json.decode((SAMPLES / name).read_bytes())
    report.update(changes)
    path = tmp_path / name
    path.write_bytes(msgspec.json.encode(report))
    return path


def test_files_without_one_run_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = msgspec.json.decode((SAMPLES / "guidellm.json").read_bytes())["benchmarks"]
    cases = {
        damaged("guidellm.json", tmp_path, benchmarks=whole * 2): "got 2 benchmarks; expected one",
    }
    bare = tmp_path / "bare.json"
    bare.write_text('{"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{"config": {}}]}')
    cases[bare] = "strategy"
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes((SAMPLES / "aiperf.jsonl").read_bytes()[:2900])
    cases[cut] = "line 2: got"
    cold = tmp_path / "cold.jsonl"
    cold.write_bytes((SAMPLES / "aiperf.jsonl").read_bytes().splitlines()[0])
    cases[cold] = "got no request; expected profile_export.jsonl of AIPerf"
    for path, message in cases.items():
        with pytest.raises(SpecError) as caught:
            read_results([path])
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_help_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kendall.cli.main(["audit", "--help"])
    assert "GuideLLM, AIPerf" in " ".join(capsys.readouterr().out.split())
