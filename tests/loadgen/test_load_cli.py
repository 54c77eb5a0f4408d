"""`kendall load` as a user meets it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

import kendall.cli
import kendall.loadgen.report.files.result_files
import kendall.loadgen.sending.plan
from kendall.loadgen.commands.flags import named_results
from kendall.loadgen.commands.load_cli import app
from kendall.loadgen.report.files.result_files import ResultOptions
from kendall.loadgen.sending.client.target import LoadError
from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import plan_load
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable
from kendall.queueing.measurement.paths import file_or_folder
from kendall.queueing.measurement.record import read_run
from kendall.remote import Trust
from tests.eventually import eventually_here
from tests.loadgen.fake_server import answer, serving_in_a_thread
from tests.loadgen.growing import completed_in


@pytest.fixture(autouse=True)
def _runs_go_into_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server_url() -> Iterator[str]:
    with serving_in_a_thread(answer) as url:
        yield url


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def load(url: str, *more: str) -> Result:
    return invoke(
        "--base-url",
        url,
        "--request-rate",
        "200",
        "--num-prompts",
        "30",
        "--output-tokens",
        "uniform:low=1,high=9",
        *more,
    )


def test_load_prints_one_json_object_and_writes_the_run(server_url: str, tmp_path: Path) -> None:
    result = load(
        server_url,
        "--json",
        "--result-dir",
        str(tmp_path),
        "--save-result",
        "run.jsonl",
        "--seed",
        "7",
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["outcomes"] == {"completed": 30}
    assert summary["queueing_delay"]["mean"] == pytest.approx(0.0015)
    assert summary["send_lateness"]["n"] == 30
    assert summary["asked_rate"] == 200
    header, records = read_run(tmp_path / "run.jsonl")
    assert (header.writer, header.seed, header.configuration["request_rate"], len(records)) == (
        "load",
        7,
        200.0,
        30,
    )
    assert header.configuration["output_tokens"] == "uniform:low=1,high=9"
    assert (
        sum(record.output_tokens or 0 for record in records)
        == summary["output_tokens"]["mean"] * 30
    )


def test_load_prints_a_table(server_url: str) -> None:
    result = load(server_url)
    assert result.exit_code == 0
    for word in (
        "30 completed",
        "asked 200",
        "delivered",
        "lateness",
        "time to first token",
        "queueing delay",
    ):
        assert word in result.stdout


def test_nobody_there_is_one_line() -> None:
    """The root command prints it, with exit status 1: tests/test_command_line.py."""
    error = load("http://127.0.0.1:9").exception
    assert isinstance(error, LoadError)
    assert "is the server up" in str(error)
    assert "\n" not in str(error)


@pytest.mark.slow
def test_no_success_is_exit_3_and_1_where_failures_are_allowed() -> None:
    nobody = ("--model", "m", "--ready-check-timeout", "0", "--json")
    result = load("http://127.0.0.1:9", *nobody)
    assert result.exit_code == 3
    assert load("http://127.0.0.1:9", *nobody, "--max-failed-fraction", "1").exit_code == 1
    assert json.loads(result.stdout)["outcomes"] == {"failed": 30}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "more",
    [
        ("--request-rate", "0"),
        ("--num-prompts", "0"),
        ("--output-tokens", "gaussian:mean=3"),
        ("--max-tokens", "0"),
        ("--duration", "0"),
        ("--base-url", "localhost:8080"),
        ("--processes", "0"),
        ("--max-concurrency", "0"),
        ("--arrivals", "poisson:rate=3"),
        ("--trace", "none.jsonl"),
        ("--think-time", "1"),
        ("--natural-lengths", "--ignore-eos"),
        ("--dataset-name", "sharegpt"),
        ("--dataset-name", "imagenet"),
        ("--length-prediction", "magic"),
        ("--predictor", "magic"),
        ("--lateness-budget", "p50=1ms"),
        ("--lateness-budget", "mean=1 parsec"),
        ("--goodput", "fps:3"),
        ("--assert", "p99_ttft < 200"),
        ("--assert", "p99_tftt < 200ms"),
        ("--percentile-metrics", "fps"),
        ("--metric-percentiles", "101"),
        ("--metadata", "host"),
    ],
)
def test_wrong_arguments_raise_a_spec_error(more: tuple[str, str]) -> None:
    result = load("http://127.0.0.1:9", "--model", "m", *more)
    assert isinstance(result.exception, SpecError)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--dataset-name", "sharegpt"),
            "got --dataset-name sharegpt without --dataset-path; "
            "expected a file for all but random",
        ),
        (
            ("--dataset-name", "random", "--dataset-path", "x"),
            "got --dataset-name random with --dataset-path x; expected a file for all",
        ),
        (
            ("--request-rate", "inf", "--duration", "10"),
            "expected a number of requests (--num-prompts)",
        ),
    ],
)
def test_a_wrong_combination_names_the_flags(more: tuple[str, ...], message: str) -> None:
    error = (
        CliRunner()
        .invoke(app, ["--base-url", "http://127.0.0.1:9", "--request-rate", "5", *more])
        .exception
    )
    assert isinstance(error, SpecError)
    assert message in str(error)


@pytest.mark.parametrize(
    "more", [("--drain-limit", "-1"), ("--think-time", "-1s"), ("--duration", "5 parsecs")]
)
def test_a_wrong_duration_is_refused(more: tuple[str, str]) -> None:
    result = load("http://127.0.0.1:9", "--model", "m", *more)
    assert result.exit_code == 2
    assert "expected a duration" in " ".join(result.stderr.split()).replace("│ ", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "expected one of --request-rate"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (
            ("--ramp-up-strategy", "cubic", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"),
            "linear or exponential",
        ),
        (
            ("--arrivals", "gamma:rate=3,burstiness=2", "--burstiness", "2"),
            "expected it with --request-rate",
        ),
        (("--timetable", "nowhere.timetable"), "--save-timetable"),
    ],
)
def test_arrivals_come_from_one_source(flags: tuple[str, ...], words: str) -> None:
    result = invoke("--base-url", "http://127.0.0.1:9", "--model", "m", *flags)
    assert isinstance(result.exception, SpecError)
    assert words in str(result.exception)


def test_every_option_is_a_flag_with_a_help_text_and_an_environment_variable() -> None:
    command = kendall.cli.command_of("load")
    options = {
        parameter.name: parameter for parameter in command.params if parameter.name != "help"
    }
    fields = (*dataclasses.fields(LoadOptions), *dataclasses.fields(Trust))
    assert {field.name for field in fields} - {"trust"} <= set(options)
    for parameter in options.values():
        assert parameter.help
        assert str(parameter.envvar).startswith("KENDALL_")


def test_who_calls_from_python_gets_the_defaults_of_the_command() -> None:
    """But for the longest wait for answers."""
    defaults = {each.name: each.default for each in get_command(app).params}

    def of_command(kind: type, *others: str) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)} - {*others}
        return {name: defaults[name] for name in names}

    assert ResultOptions() == ResultOptions(**of_command(ResultOptions, "metadata"))
    assert Trust() == Trust(**of_command(Trust))
    others = ("base_url", "drain_limit", "trust", "model", "header")  # the last two: none given
    assert LoadOptions(base_url="x") == LoadOptions(
        base_url="x", **of_command(LoadOptions, *others)
    )


def test_the_kinds_of_arrivals_draw_what_they_say() -> None:
    """Mean rate and index of dispersion of gaps, from 4000 drawn instants each."""
    for flags, rate, variation in (
        ({"request_rate": 50.0}, 50, 1.0),
        ({"request_rate": 50.0, "burstiness": 4.0}, 50, 0.5),
        ({"request_rate": 50.0, "burstiness": math.inf}, 50, 0.0),
        ({"arrivals": "gamma:rate=20,burstiness=0.25"}, 20, 2.0),
    ):
        plan = plan_load(LoadOptions(base_url="http://x", num_prompts=4000, **flags))  # type: ignore[arg-type]
        gaps = np.diff(plan.timetable.intended_at)
        assert 1 / gaps.mean() == pytest.approx(rate, rel=0.08)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.1)
    ramp = LoadOptions(
        base_url="http://x",
        num_prompts=3000,
        ramp_up_strategy="linear",
        ramp_up_start_rps=10,
        ramp_up_end_rps=90,
    )
    instants = plan_load(ramp).timetable.intended_at
    assert len(instants) == pytest.approx(3000, abs=250)
    assert instants[-1] == pytest.approx(60, abs=1)
    assert np.sum(instants < 30) / len(instants) == pytest.approx(
        0.3, abs=0.04
    )  # (10 + 50) / 2 * 30 of 3000


def test_a_duration_ends_any_kind_of_arrivals(tmp_path: Path) -> None:
    plan = plan_load(LoadOptions(base_url="http://x", request_rate=100.0, duration=3.0))
    assert plan.timetable.intended_at[-1] < 3.0
    assert len(plan.timetable) == pytest.approx(300, abs=70)
    save_timetable(tmp_path / "t", plan.timetable, {"seed": 4})
    again = plan_load(LoadOptions(base_url="http://x", timetable=tmp_path / "t", duration=1.0))
    assert again.timetable.intended_at.tolist() == [
        at for at in plan.timetable.intended_at.tolist() if at <= 1.0
    ]
    assert again.seed == 4
    with pytest.raises(SpecError, match="no request within"):
        plan_load(LoadOptions(base_url="http://x", timetable=tmp_path / "t", duration=1e-9))


@pytest.mark.slow
def test_a_saved_timetable_sends_the_same_requests_again(server_url: str, tmp_path: Path) -> None:
    """The same file byte for byte; the records have the same instants, lengths, predictions."""
    first = load(
        server_url,
        "--seed",
        "9",
        "--length-prediction",
        "lognormal:sigma=0.5",
        "--save-result",
        str(tmp_path / "a.jsonl"),
    )
    assert first.exit_code == 0, first.output
    again = (
        "--timetable",
        str(tmp_path / "a.timetable"),
        "--save-timetable",
        str(tmp_path / "c"),
        "--save-result",
        str(tmp_path / "b.jsonl"),
    )
    second = invoke("--base-url", server_url, *again)
    assert second.exit_code == 0, second.output
    (header, one), (_, two) = read_run(tmp_path / "a.jsonl"), read_run(tmp_path / "b.jsonl")
    assert header.configuration["timetable"] == str(tmp_path / "a.timetable")
    lines = [(tmp_path / name).read_bytes().splitlines()[1:] for name in ("a.timetable", "c")]
    assert lines[0] == lines[1]
    for name in ("output_tokens", "prompt_tokens", "predicted_output_tokens", "max_output_tokens"):
        assert [getattr(r, name) for r in one] == [getattr(r, name) for r in two]
    gaps = [np.diff([r.intended_at for r in records]) for records in (one, two)]  # type: ignore[arg-type]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-9)


def test_vllms_flags_write_vllms_file(server_url: str, tmp_path: Path) -> None:
    """Flags as a script of `vllm bench serve` has them: bare --save-result, values in a row."""
    flags = [
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--label",
        "mine",
    ]
    result = load(
        server_url,
        *flags,
        "--metadata",
        "tp=2",
        "host=a",
        "--goodput",
        "ttft:60000",
        "e2el:60000",
        "--percentile-metrics",
        "ttft,e2el",
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.jsonl", "r.timetable"]
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["label"], found["tp"], found["host"], found["completed"]) == (
        "mine",
        "2",
        "a",
        30,
    )
    assert found["p99_ttft_ms"] > 0
    assert found["request_goodput"] > 0
    assert len(found["ttfts"]) == 30
    assert [len(gaps) for gaps in found["itls"]] == [max(n - 1, 0) for n in found["output_lens"]]
    assert "valid" in found["kendall"]


@pytest.mark.slow
def test_asking_for_gaps_between_tokens_records_their_instants(server_url: str) -> None:
    assert json.loads(load(server_url, "--json").stdout)["itl"] is None
    assert (
        json.loads(load(server_url, "--percentile-metrics", "ttft,itl", "--json").stdout)["itl"][
            "mean"
        ]
        >= 0
    )
    assert load(server_url, "--assert", "p50_itl < 20s").exit_code == 0


@pytest.mark.slow
def test_a_broken_condition_is_exit_3_and_zero_successes_never_0(server_url: str) -> None:
    assert (
        load(server_url, "--assert", "p99_ttft < 20s", "--assert", "completed == 30").exit_code == 0
    )
    broken = load(server_url, "--assert", "p99_ttft < 0.001ms", "--json")
    assert broken.exit_code == 3
    assert "p99_ttft" in json.loads(broken.stdout)["broken"][0]
    nobody = ("--model", "m", "--ready-check-timeout", "0", "--max-failed-fraction", "1")
    assert load("http://127.0.0.1:9", *nobody, "--assert", "completed == 0").exit_code == 1


@pytest.mark.slow
def test_a_run_beyond_the_budget_is_invalid_and_says_so(server_url: str) -> None:
    """Exit 3 where the budget was asked for; a wide one is kept."""
    late = load(server_url, "--lateness-budget", "mean=0.0001ms")
    assert late.exit_code == 3
    assert "INVALID: lateness mean" in late.stdout
    kept = load(server_url, "--lateness-budget", "mean=5s,p99=9s", "--json")
    assert kept.exit_code == 0
    assert json.loads(kept.stdout)["valid"] is True
    found = json.loads(load(server_url, "--lateness-budget", "p99=0.0001ms", "--json").stdout)
    assert found["valid"] is False
    assert found["arrival_audit"]["lateness"]["budget"]["p99"] == pytest.approx(1e-7)


def test_a_bound_alone_is_a_closed_loop_and_beside_a_rate_a_partly_closed_one(
    server_url: str,
) -> None:
    closed = invoke(
        "--base-url",
        server_url,
        "--max-concurrency",
        "2",
        "--num-prompts",
        "12",
        "--output-tokens",
        "deterministic:value=3",
        "--json",
    )
    assert closed.exit_code == 0, closed.output
    found = json.loads(closed.stdout)
    assert (found["loop"], found["outcomes"], found["asked_rate"]) == (
        "closed",
        {"completed": 12},
        None,
    )
    half = load(server_url, "--request-rate", "inf", "--max-concurrency", "1")
    assert "partly closed: 29 requests waited" in half.stdout


def test_several_processes_show_one_result(server_url: str) -> None:
    result = load(server_url, "--processes", "2", "--json", "--token-times")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["outcomes"] == {"completed": 30}
    assert found["itl"]["n"] > 0


def test_conversations_need_the_chat_endpoint(server_url: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"hello"}],"output_tokens":3}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(path))
    assert "expected --chat" in str(load(server_url, *flags).exception)
    result = load(server_url, *flags, "--chat", "--natural-lengths", "--json")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--save-result"], ["--save-result", "."]),
        (["--save-result", "--json"], ["--save-result", ".", "--json"]),
        (["--save-result", "a.jsonl", "--json"], ["--save-result", "a.jsonl", "--json"]),
        (["--save-result=x", "--port", "1"], ["--save-result=x", "--port", "1"]),
        ([], []),
    ],
)
def test_results_without_a_name_are_saved_in_the_current_folder(
    given: list[str], meant: list[str]
) -> None:
    assert named_results(given) == meant


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (["--goodput", "a:1", "b:2", "--json"], {"goodput": ["a:1", "b:2"], "json": True}),
        (["--goodput", "a:1", "--goodput", "b:2"], {"goodput": ["a:1", "b:2"]}),
        (["--seed", "3", "--metadata", "a=1", "b=2"], {"seed": 3, "metadata": ["a=1", "b=2"]}),
        (["--ready-check-timeout-sec=5"], {"ready_check_timeout": 5.0}),
        (["--length-prediction", "exact"], {"predictor": "exact"}),
    ],
)
def test_flags_may_be_in_vllms_form(given: list[str], values: dict[str, Any]) -> None:
    found = get_command(app).make_context("load", given).params
    assert {name: found[name] for name in values} == values


@pytest.mark.slow
def test_a_run_writes_its_file_unless_it_is_told_not_to(server_url: str, tmp_path: Path) -> None:
    """runs/load-<time>.jsonl, one more file for a second run within the same second; the name is
    printed.
    """
    with pytest.MonkeyPatch.context() as clock:
        instant = datetime(2026, 1, 2, 3, 4, 5).astimezone()
        stopped = SimpleNamespace(now=lambda _: instant)
        clock.setattr(kendall.loadgen.report.files.result_files, "datetime", stopped)
        assert "written: runs/load-20260102-030405.jsonl" in load(server_url).stdout
        assert json.loads(load(server_url, "--json").stdout)["files"] == [
            "runs/load-20260102-030405-2.jsonl"
        ]
        assert json.loads(load(server_url, "--label", "night", "--json").stdout)["files"] == [
            "runs/night-20260102-030405.jsonl"
        ]
    assert load(server_url, "--no-save").exit_code == 0
    written = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert written == [
        "runs/" + name
        for name in (
            "load-20260102-030405-2.jsonl",
            "load-20260102-030405.jsonl",
            "night-20260102-030405.jsonl",
        )
    ]
    assert [len(read_run(tmp_path / name)[1]) for name in written] == [30, 30, 30]


@pytest.mark.slow
def test_the_run_file_is_named_by_output(server_url: str, tmp_path: Path) -> None:
    assert "written: deep/mine.jsonl" in load(server_url, "--output", "deep/mine.jsonl").stdout
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["mine.jsonl"]
    (found,) = json.loads(load(server_url, "--output", "deep", "--json").stdout)["files"]
    assert Path(found).parent == Path("deep")
    assert Path(found).name.startswith("load-")
    assert load(server_url, "--save-result", "--output", "three.jsonl").exit_code == 0
    assert sorted(path.name for path in tmp_path.glob("three.*")) == [
        "three.json",
        "three.jsonl",
        "three.timetable",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-save", "--output", "x.jsonl"),
        ("--no-save", "--save-result"),
        ("--output", "x.jsonl", "--save-result", "y.jsonl"),
        ("--output", "x.jsonl", "--result-dir", "y"),
        ("--output", "x.jsonl", "--result-filename", "y"),
    ],
)
def test_the_run_file_has_one_name(flags: tuple[str, ...]) -> None:
    assert "expected" in str(load("http://127.0.0.1:9", *flags).exception)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_sent(
    server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    for flags in ((), ("--output", "runs/mine.jsonl"), ("--save-result", "runs/mine")):
        result = load(server_url, *flags)
        assert result.exit_code == 1, result.output
        assert "cannot write" in (said := f"{result.stderr}{result.exception}")
        assert "--no-save" in said


def test_ctrl_c_keeps_what_was_recorded(server_url: str, tmp_path: Path) -> None:
    # a shell's background job inherits SIGINT ignored; this process must not
    start = (
        "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "runpy.run_module('loadgen.commands.load_cli', run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        start,
        "--base-url",
        server_url,
        "--request-rate",
        "20",
        "--num-prompts",
        "5000",
    ]
    process = subprocess.Popen(
        [*command, "--save-result", str(tmp_path / "run.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert b" s: sent " in process.stderr.readline(), "the first line of progress"
    eventually_here(
        lambda: process.poll() is not None or completed_in(tmp_path / "run.jsonl") > 5, seconds=60
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert b"interrupted" in out, err
    _, records = read_run(tmp_path / "run.jsonl")
    assert 5 < len(records) < 500


@pytest.mark.parametrize(
    ("given", "run", "bench"),
    [
        ({"output": "new/"}, r"new/load-\d{8}-\d{6}\.jsonl", None),
        ({"output": "new/run.jsonl"}, r"new/run\.jsonl", None),
        ({"save_result": "new/"}, r"new/load-7\.jsonl", "new/load-7.json"),
        ({"save_result": "new/a"}, r"new/a", "new/a.json"),
        ({"save_result": ".", "output": "new/"}, r"new/load-7\.jsonl", "new/load-7.json"),
        ({"save_result": "."}, r"load-7\.jsonl", "load-7.json"),
    ],
)
def test_a_slash_at_the_end_names_a_folder_that_does_not_exist_yet(
    given: dict[str, str],
    run: str,
    bench: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    paths: dict[str, Any] = {key: file_or_folder(text) for key, text in given.items()}
    files = kendall.loadgen.report.files.result_files.result_files(
        kendall.loadgen.report.files.result_files.ResultOptions(**paths), seed=7
    )
    assert re.fullmatch(run, str(files.run))
    assert files.bench == (None if bench is None else Path(bench))


@pytest.mark.parametrize(
    ("rate", "count", "says"),
    [
        (1e-9, 5, r"the last of 5 requests is due [\d,]{5,} days after the start"),
        (0.001, 20, "h after the start"),
        (1.0, 20, None),
    ],
)
def test_a_long_timetable_is_announced(rate: float, count: int, says: str | None) -> None:
    announced = plan_load(
        LoadOptions(base_url="http://x", request_rate=rate, num_prompts=count)
    ).announced
    if says is None:
        assert announced is None
    else:
        assert announced is not None
        assert re.search(says, announced)


def test_the_announcement_comes_before_the_first_request(
    server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.plan, "LONG", 0.0)
    result = load(server_url, "--request-rate", "100", "--num-prompts", "1", "--no-save")
    assert "\nkendall: the 1 request is due 0 s after the start; " in result.stderr
