"""When a load run is INVALID: servers that die, refuse, fail or are slow, senders that send
something else; and when it is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kendall.loadgen.commands.load_cli import app
from kendall.loadgen.commands.progress import Lines
from kendall.loadgen.measures.failures import RunFailures, count_failures
from kendall.loadgen.report.files.saved_run import read_results
from kendall.loadgen.report.load_verdict import LoadVerdict, judge, parse_budget
from kendall.loadgen.sending.client.target import LoadError, Target
from kendall.loadgen.sending.job import Counters
from kendall.loadgen.sending.run import LoadResult, RunOutput, held_back, lateness, run_load
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.measurement.arrival_audit import Budget, audit_arrivals
from kendall.queueing.measurement.record import Header, Record, read_run, write_run
from tests.eventually import eventually_here
from tests.loadgen.failing_server import failing_server
from tests.loadgen.growing import completed_in
from tests.virtual_time import run_virtual

RATE = 20.0
# all at once: a machine that stands still changes neither their lateness nor their gaps
WIDE = ("--lateness-budget", "mean=999s,p99=999s", "--request-rate", "inf")
FAILED = [
    (100, 1, 0.01, False),
    (100, 2, 0.01, True),
    (99, 1, 0.01, True),
    (100, 1, 0.0, True),
    (100, 0, 0.0, False),
    (0, 0, 0.0, False),
]


@pytest.fixture(autouse=True)
def _runs_go_into_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[2])
    )  # the server is a module of the tests
    monkeypatch.chdir(tmp_path)


def load(port: int, *more: str, requests: int = 200) -> Result:
    flags = (
        "--base-url",
        f"http://127.0.0.1:{port}",
        "--num-prompts",
        str(requests),
        "--max-tokens",
        "2",
        "--output",
        "run.jsonl",
    )
    rate = () if {"--request-rate", "--max-concurrency"} & set(more) else ("--request-rate", "400")
    return CliRunner().invoke(app, [*flags, *rate, *more])


def found(result: Result) -> dict[str, Any]:
    return dict(json.loads(result.stdout))


def test_a_server_that_dies_in_mid_run_makes_it_invalid_with_share_and_instant() -> None:
    with failing_server("--dies-at", "60") as port:
        result = load(port, "--max-errors", "0", "--json")
    assert result.exit_code == 3, result.output
    said = found(result)
    failures, records = said["failures"], read_run(Path("run.jsonl"))[1]
    ends = [
        record.released_at
        for record in records
        if record.outcome == "failed" and record.released_at is not None
    ]
    began = min(record.intended_at or 0.0 for record in records)
    assert said["valid"] is False
    assert failures["failed"] == said["outcomes"]["failed"] == len(ends) > 100
    assert failures["share"] == pytest.approx(len(ends) / 200)
    assert failures["first_at"] == pytest.approx(min(ends) - began)
    (reason,) = (text for text in said["reasons"] if "failed" in text)
    assert reason.startswith(
        f"{len(ends)} of 200 requests failed ({len(ends) / 2:.3g} %), the first "
    )
    assert "--max-failed-fraction allows 1 %" in reason


def test_the_text_says_so_too() -> None:
    with failing_server("--dies-at", "60") as port:
        result = load(port, "--max-errors", "0")
    assert result.exit_code == 3
    assert "INVALID: " in result.stdout
    assert " s after the start" in result.stdout


@pytest.mark.left_out
def test_the_share_that_may_fail_is_settable() -> None:
    with failing_server("--status", "500") as port:
        assert load(port, *WIDE, requests=40).exit_code == 3
        allowed = load(port, "--max-failed-fraction", "1", *WIDE, "--json", requests=40)
    assert found(allowed)["reasons"] == ["no request completed"]
    assert allowed.exit_code == 1  # nothing was completed all the same
    for share in ("-0.1", "1.5", "nan"):
        assert isinstance(load(1, "--max-failed-fraction", share).exception, SpecError)


@pytest.mark.parametrize(("requests", "failed", "allowed", "too_many"), FAILED)
def test_the_allowed_share_may_fail_and_not_one_more(
    requests: int, failed: int, allowed: float, too_many: bool
) -> None:
    """Those that the server refused do not count."""
    some = RunFailures(
        requests=requests,
        failed=failed,
        refused=50,
        first_at=None,
        first_error=None,
        allowed=allowed,
    )
    assert (some.too_many, some.too_many_empty) == (too_many, False)
    assert some.share == pytest.approx(failed / requests if requests else 0.0)
    empty = dataclasses.replace(some, failed=0, empty=failed)
    assert (empty.too_many, empty.too_many_empty) == (False, too_many)


def test_a_server_that_rejects_has_not_failed_and_one_that_is_unavailable_has() -> None:
    with failing_server("--status", "429") as port:
        rejected = load(port, *WIDE, "--json", requests=40)
    assert (
        rejected.exit_code,
        found(rejected)["valid"],
        found(rejected)["failures"]["refused"],
    ) == (1, False, 40)
    assert found(rejected)["reasons"] == ["no request completed"]
    with failing_server("--status", "503") as port:
        unavailable = load(port, *WIDE, "--json", requests=40)
    assert (
        unavailable.exit_code,
        found(unavailable)["valid"],
        found(unavailable)["failures"]["failed"],
    ) == (3, False, 40)
    assert (found(rejected)["outcomes"], found(unavailable)["outcomes"]) == (
        {"rejected": 40},
        {"failed": 40},
    ), "as `failures` counts them"


def test_every_line_and_condition_counts_503_as_a_failure() -> None:
    with failing_server("--status", "503") as port:
        result = load(
            port, *WIDE, "--assert", "failed == 40", "--assert", "rejected == 0", requests=40
        )
    assert "requests      40 failed" in result.stdout
    assert "broken" not in result.stdout


def test_a_slow_server_leaves_answers_out_beyond_the_drain_limit() -> None:
    with failing_server("--delay", "30") as port:
        result = load(
            port,
            "--drain-limit",
            "0.1",
            *WIDE,
            "--assert",
            "failed == 20",
            "--assert",
            "failed == 0",
            "--json",
            requests=20,
        )
    assert result.exit_code == 3
    assert [one.split(";")[0] for one in found(result)["broken"]] == ["got failed 20"], (
        "as the table and `failures` have it"
    )
    assert found(result)["failures"]["first_error"] == "the run ended before the answer did"


@pytest.mark.slow
def test_requests_held_back_by_the_asked_limit_are_no_lateness() -> None:
    """Two places of 50 ms each take 40 requests a second; 4,000 are asked for."""
    with failing_server("--delay", "0.05") as port:
        result = load(
            port, "--request-rate", "4000", "--max-concurrency", "2", "--json", requests=40
        )
    said, records = found(result), read_run(Path("run.jsonl"))[1]
    assert said["held"] == sum(record.held_until is not None for record in records) >= 36
    assert said["arrival_audit"]["process"] == "partly closed"
    waited = [
        record.sent_at - record.intended_at
        for record in records
        if record.sent_at and record.intended_at
    ]
    late = [
        (record.sent_at or 0.0) - max(record.intended_at or 0.0, record.held_until or 0.0)
        for record in records
    ]
    assert max(waited) > 0.8
    assert said["send_lateness"]["max"] == pytest.approx(max(late), abs=1e-9)
    assert said["arrival_audit"]["lateness"]["max"] == pytest.approx(max(late), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--max-concurrency", "4"), ("--processes", "2")])
def test_a_burst_is_judged_by_order_and_number(flags: tuple[str, ...]) -> None:
    with failing_server("--delay", "0.02") as port:
        result = load(
            port,
            "--request-rate",
            "inf",
            *flags,
            "--lateness-budget",
            "mean=0.001ms,p99=0.001ms",
            "--json",
            requests=60,
        )
    assert result.exit_code == 0, result.output
    said = found(result)
    assert (said["valid"], said["arrival_audit"]["lateness"]) == (True, None)
    assert said["arrival_audit"]["verdict"].startswith(
        "as asked (all at once): in the order of the timetable"
    )


@pytest.mark.slow
def test_sigterm_ends_the_run_prints_the_table_and_keeps_the_file(tmp_path: Path) -> None:
    with failing_server() as port:
        flags = [
            "--base-url",
            f"http://127.0.0.1:{port}",
            "--request-rate",
            "50",
            "--num-prompts",
            "9000",
            "--max-tokens",
            "2",
        ]
        command = [
            sys.executable,
            "-m",
            "kendall.loadgen.commands.load_cli",
            *flags,
            "--output",
            "run.jsonl",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert b" s: sent " in process.stderr.readline(), "the first line of progress"
            eventually_here(
                lambda: process.poll() is not None or completed_in(Path("run.jsonl")) > 5,
                seconds=60,
            )
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert b"completed (interrupted)" in out
    assert b"INVALID: interrupted: " in out
    assert b"end to end" in out
    assert b"Traceback" not in err
    header, records = read_run(tmp_path / "run.jsonl")
    assert header.configuration["interrupted"] is True
    assert 5 < len(records) < 3000


def poisson(seed: int, n: int = 600) -> np.ndarray:
    return 100.0 + np.cumsum(np.random.default_rng(seed).exponential(1 / RATE, n))


def run_of(intended: np.ndarray, sent: np.ndarray, rate: float | None = RATE) -> LoadResult:
    text = "poisson:rate=inf" if rate is None else f"poisson:rate={rate:g}"
    pairs = zip(intended.tolist(), sent.tolist(), strict=True)
    records = [
        Record(
            request_id=f"load-1-{row}",
            outcome="completed",
            intended_at=at,
            sent_at=left,
            released_at=left + 0.01,
        )
        for row, (at, left) in enumerate(pairs)
    ]
    header = Header(
        writer="load",
        configuration={"arrivals": text, "request_rate": rate, "num_prompts": len(records)},
    )
    return LoadResult(
        header, records, lateness(records), interrupted=False, held=held_back(records)
    )


def kinds(verdict: LoadVerdict) -> list[str]:
    return [reason.of for reason in verdict.reasons]


def test_a_failed_audit_of_ones_own_arrivals_is_invalid_and_says_why() -> None:
    intended = poisson(0)
    assert judge(run_of(intended, intended + 1e-4)).valid
    stood_still = np.where(
        (intended > 105) & (intended < 107), np.maximum(intended, 107), intended
    )  # two seconds of 30
    verdict = judge(run_of(intended, stood_still), budget=Budget(mean=9, p99=9))
    assert kinds(verdict) == ["arrivals"]
    assert verdict.why_invalid()[0].startswith("INVALID: arrivals are not poisson: ")
    assert verdict.as_object()["valid"] is False


def test_a_timetable_that_fails_by_chance_is_not_the_senders_fault() -> None:
    """One in a hundred does; sent as it was drawn it is the run that was asked for."""
    seeds = (
        seed for seed in range(2000) if not audit_arrivals(poisson(seed), asked_rate=RATE).good
    )
    unlucky = poisson(next(seeds))
    verdict = judge(run_of(unlucky, unlucky + 1e-5))
    assert verdict.audit is not None
    assert verdict.audit.poisson is False
    assert verdict.valid


def test_a_burst_out_of_order_or_not_whole_is_invalid() -> None:
    at_once, sent = np.full(100, 5.0), 5.0 + np.arange(100) * 1e-3
    assert judge(run_of(at_once, sent, rate=None)).valid
    assert kinds(judge(run_of(at_once, sent[::-1], rate=None))) == ["lateness"]
    run = run_of(at_once, sent, rate=None)
    run.records[3] = Record(request_id="load-1-3", outcome="cancelled", intended_at=5.0)
    assert "1 of 100 requests not sent" in [
        reason.text for reason in judge(run, max_failed=0.5).reasons
    ]


def test_what_counts_as_a_failure() -> None:
    def one(row: int, outcome: str, error: str | None = None, at: float | None = None) -> Record:
        made: dict[str, Any] = {
            "request_id": f"l-{row}",
            "outcome": outcome,
            "error": error,
            "released_at": at,
        }
        return Record(intended_at=10.0 + row, sent_at=10.0 + row, **made)

    records = [
        one(0, "completed", at=10.5),
        one(1, "rejected", "429 queue_full", 11.1),
        one(2, "abandoned", "429 queue_timeout", 12.1),
        one(3, "rejected", "503 engine_unavailable", 15.0),
        one(4, "failed", "500 oops", 14.5),
        one(5, "cancelled", "the run ended before the answer did"),
    ]
    whole, cut = count_failures(records, cut_short=False), count_failures(records, cut_short=True)
    assert (whole.requests, whole.failed, whole.refused, whole.first_at, whole.first_error) == (
        6,
        3,
        2,
        4.5,
        "500 oops",
    )
    assert (cut.requests, cut.failed, cut.share) == (5, 2, 0.4)
    assert whole.too_many
    assert not count_failures(records, cut_short=False, allowed=0.5).too_many
    assert not count_failures([], cut_short=False, allowed=0.0).too_many


def test_an_interrupted_run_is_invalid_and_says_how_far_it_came(tmp_path: Path) -> None:
    intended = poisson(0)
    whole = run_of(intended, intended + 1e-4)
    cut = LoadResult(
        whole.header, whole.records[:32], lateness(whole.records[:32]), interrupted=True
    )
    verdict = judge(cut)
    assert "interrupted" in kinds(verdict)
    assert "interrupted: 32 of 600 requests sent" in verdict.as_object()["reasons"]
    header = Header(
        writer="load",
        configuration={**whole.header.configuration, "interrupted": True, "missing": []},
    )
    write_run(tmp_path / "cut.jsonl", header, whole.records[:32])
    ((_, saved),) = read_results([tmp_path / "cut.jsonl"])
    assert "INVALID: interrupted: 32 of 600 requests sent" in judge(saved).why_invalid()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from kendall.loadgen.commands.load_cli import app
app()
"""


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_file_that_cannot_be_written_ends_the_run_and_keeps_the_report(
    tmp_path: Path, processes: str
) -> None:
    """The file may have 4 kB: about ten of 40,000 records, which would take 400 s."""
    with failing_server() as port:
        flags = [
            "--base-url",
            f"http://127.0.0.1:{port}",
            "--request-rate",
            "100",
            "--num-prompts",
            "40000",
            "--max-tokens",
            "2",
        ]
        command = [
            sys.executable,
            "-c",
            LIMITED,
            *flags,
            "--output",
            "run.jsonl",
            "--processes",
            processes,
            "--max-failed-fraction",
            "1",
        ]
        done = subprocess.run([*command, "--json"], capture_output=True, timeout=120, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert said["valid"] is False
    assert any(
        "cannot write run" in reason and "File too large" in reason for reason in said["reasons"]
    )
    assert said["failures"]["failed"] == 0
    assert said["outcomes"]["completed"] >= 5
    assert not list(tmp_path.glob("*.whole"))


def test_a_device_that_is_full_is_named_before_anything_is_sent() -> None:
    """Through a link: a broken replacement would hit the link, not the machine's device."""
    Path("full").symlink_to("/dev/full")
    with failing_server() as port:
        result = load(port, "--output", "full")
    assert isinstance(result.exception, LoadError)
    assert str(result.exception).startswith("cannot write full: No space left on device; --output")


def test_answers_without_a_token_are_counted_and_too_many_make_the_run_invalid() -> None:
    intended = poisson(0, 200)
    run = run_of(intended, intended + 1e-4)
    for row in (3, 4, 5):
        run.records[row] = msgspec.structs.replace(run.records[row], output_tokens=0)
    few, many = judge(run, max_failed=0.02), judge(run)
    assert few.valid
    assert few.audit is not None
    assert few.lines()[0] == f"{'arrivals':<14}{few.audit.verdict}"
    assert dataclasses.replace(few, audit=None).lines() == few.lines()[1:]
    assert any(
        "3 of 200 requests completed without a token (1.5 %)" in line for line in few.lines()
    )
    assert few.as_object()["failures"]["empty"] == 3
    assert kinds(many) == ["failures"]


class Kept:
    """The counters that a run shows."""

    counters: Counters

    async def show(self, counters: Counters) -> None:
        self.counters = counters
        await asyncio.Event().wait()


def test_progress_counts_refusals_apart_from_failures() -> None:
    kept, lines = Kept(), io.StringIO()
    table = Timetable(np.arange(40) * 0.005, np.full(40, 3), np.full(40, 2))

    async def first_line() -> None:
        showing = asyncio.create_task(Lines(lines).show(kept.counters))
        await asyncio.sleep(1.5)
        showing.cancel()

    with failing_server("--status", "429") as port:
        asyncio.run(
            run_load(
                Target(base_url=f"http://127.0.0.1:{port}", model="fake"),
                table,
                seed=1,
                output=RunOutput(progress=kept),
            )
        )
    run_virtual(first_line())
    assert lines.getvalue() == "1 s: sent 40/40, 0 done, 0 failed, 40 refused\n"


def test_a_budget_that_names_one_part_keeps_the_other() -> None:
    assert parse_budget("p99=7ms") == Budget(mean=0.001, p99=0.007)
    assert parse_budget(" mean=2ms ") == Budget(mean=0.002, p99=0.005)
