"""`kendall summary`: the report of a run from its file, the same as at its end, also where
nobody lived to write one.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kendall import cli
from kendall.loadgen.report.files.saved_run import read_results
from kendall.policies.text import SpecError
from kendall.queueing.distributions.files import read_counts
from kendall.queueing.measurement.record import Header, Record, write_run
from tests.eventually import eventually_here
from tests.loadgen.bench_samples import DETAILED
from tests.loadgen.failing_server import failing_server
from tests.loadgen.growing import completed_in


@pytest.fixture(autouse=True)
def _runs_go_into_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[2])
    )  # the server is a module of the tests
    monkeypatch.chdir(tmp_path)


def kendall(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


def load(port: int, *more: str) -> int:
    flags = (
        "--base-url",
        f"http://127.0.0.1:{port}",
        "--num-prompts",
        "120",
        "--max-tokens",
        "2",
        "--output",
        "run.jsonl",
    )
    return kendall("load", *flags, *more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--request-rate", "400"),
        ("--request-rate", "inf", "--max-concurrency", "5"),
        ("--max-concurrency", "3", "--think-time", "0.002"),
    ],
)
def test_a_saved_run_is_reported_as_it_was_at_its_end(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_server("--delay", "0.002") as port:
        assert load(port, *flags, "--json") == 0
    live = json.loads(capsys.readouterr().out)
    assert kendall("summary", "run.jsonl", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("run") == "run.jsonl"
    assert live.pop("files") == ["run.jsonl"]
    assert again.pop("files") == []
    assert again == live


@pytest.mark.slow
def test_the_table_and_the_exit_status_are_those_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with failing_server("--dies-at", "60") as port:
        status = load(port, "--request-rate", "400", "--max-errors", "0")
    live = capsys.readouterr().out
    assert status == kendall("summary", "run.jsonl") == 3
    again = capsys.readouterr().out
    assert "INVALID: " in again
    assert again.split() == live.replace("written: run.jsonl", "").split()
    assert kendall("summary", "run.jsonl", "--max-failed-fraction", "0.9") == 0
    assert (
        kendall(
            "summary", "run.jsonl", "--max-failed-fraction", "0.9", "--assert", "completed == 0"
        )
        == 3
    )


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_that_was_killed_is_reported_as_far_as_it_came(
    processes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_server() as port:
        flags = [
            "--base-url",
            f"http://127.0.0.1:{port}",
            "--request-rate",
            "100",
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
            "--processes",
            processes,
            "--output",
            "run.jsonl",
        ]
        names = ("run.jsonl",) if processes == "1" else ("run.sender0.jsonl", "run.sender1.jsonl")
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            eventually_here(
                lambda: (
                    process.poll() is not None
                    or all(completed_in(Path(name)) > 20 for name in names)
                ),
                seconds=60,
            )
            assert process.returncode is None
            process.send_signal(signal.SIGKILL)
    assert (
        kendall("summary", "run.jsonl", "--json") == 1
    )  # of several senders nothing but their own files is left
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"]["completed"] > 0
    assert found["valid"] is False
    assert f"{sum(found['outcomes'].values())} of 9,000 requests recorded" in found["missing"][0]
    assert kendall("summary", "run.jsonl") == 1
    assert "end to end" in capsys.readouterr().out


def test_a_last_line_that_was_cut_is_left_out_and_several_files_are_reported_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = Header(
        writer="load",
        configuration={"arrivals": "poisson:rate=1", "request_rate": 1.0, "num_prompts": 9},
    )
    rows = [
        Record(
            request_id=f"load-1-{row}",
            outcome="completed",
            intended_at=float(row),
            sent_at=row + 1e-4,
            released_at=row + 0.5,
        )
        for row in range(5)
    ]
    for name in ("a.jsonl", "b.jsonl"):
        write_run(tmp_path / name, header, rows)
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes()[:-20])
    assert kendall("summary", "a.jsonl", "b.jsonl") == 1
    out = capsys.readouterr().out
    assert out.startswith("a.jsonl\nrequests      5 completed")
    assert "b.jsonl\nrequests      4 completed" in out
    assert "4 of 9 requests recorded" in " ".join(out.split())
    kendall("summary", "a.jsonl", "b.jsonl", "--json")
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == [
        "a.jsonl",
        "b.jsonl",
    ]


def test_a_file_of_a_whole_run_that_was_cut_afterwards_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {
        "arrivals": "poisson:rate=1",
        "request_rate": 1.0,
        "num_prompts": 5,
        "interrupted": False,
        "missing": [],
    }
    rows = [
        Record(
            request_id=f"load-1-{row}",
            outcome="completed",
            intended_at=float(row),
            sent_at=row + 1e-4,
            released_at=row + 0.5,
        )
        for row in range(5)
    ]
    write_run(tmp_path / "whole.jsonl", Header(writer="load", configuration=ended), rows)
    assert json_of("whole.jsonl", capsys)["missing"] == []
    (tmp_path / "cut.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes()[:-20])
    found = json_of("cut.jsonl", capsys)
    assert found["missing"] == ["the file was cut: 4 of 5 requests are in it"]
    assert found["valid"] is False


def json_of(name: str, capsys: pytest.CaptureFixture[str]) -> Any:
    kendall("summary", name, "--json")
    return json.loads(capsys.readouterr().out)


def test_what_is_no_load_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "gateway.jsonl", Header(writer="gateway"), [])
    (tmp_path / "empty.jsonl").touch()
    for name, words in (
        ("nowhere.jsonl", "No such file"),
        ("gateway.jsonl", "written by a gateway"),
        ("empty.jsonl", "the file is empty"),
    ):
        assert kendall("summary", name) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


def test_a_file_of_another_kind_is_told_what_writes_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    page.write_text("<!doctype html>\n<html></html>\n")
    flags = ("--request-rate", "5", "--num-prompts", "1", "--base-url", "http://127.0.0.1:9")
    expected = (
        "got '<!doctype html>'; expected a run file, as `kendall load` and `kendall serve "
        "--record-file` write it"
    )
    for command in (("summary", str(page)), ("audit", str(page)), ("compare", str(page))):
        assert cli.run_command(command[0], list(command[1:])) == 2
        assert expected in capsys.readouterr().err
    for option, named in (
        ("--timetable", "expected a timetable, as `kendall load --save-timetable`"),
        ("--trace", "the first line of one of"),
    ):
        assert cli.run_command("load", [option, str(page), *flags[2:]]) == 2
        said = capsys.readouterr().err
        assert named in said
        assert "b'" not in said


def test_an_empty_a_binary_and_a_joined_run_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"")
    with pytest.raises(SpecError, match="the file is empty; expected a run file"):
        read_results([path])
    path.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(SpecError, match="bytes that are no text") as told:
        read_results([path])
    assert "\\x" not in str(told.value)
    write_run(
        path,
        Header(writer="load"),
        [Record(request_id="load-1-0", outcome="completed", sent_at=1.0)] * 2,
    )
    ((_, result),) = read_results([path])
    assert "request ids with more than one record: 1;" in result.missing[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "(the run was killed, or is still running: 0 of 9 requests recorded)"),
        (
            {"interrupted": True, "missing": [], "recorded": 0},
            "(interrupted: 0 of 9 requests sent)",
        ),
    ],
)
def test_a_file_without_a_record_is_refused_in_one_line(
    more: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(
        tmp_path / "header.jsonl",
        Header(writer="load", configuration={"request_rate": 1.0, "num_prompts": 9, **more}),
        [],
    )
    assert kendall("summary", "header.jsonl") == 2
    out, said = capsys.readouterr()
    assert (out, said) == (
        "",
        (
            f"kendall: got header.jsonl without a record {says}; expected a run file with at least "
            "one request\n"
        ),
    )


def one_request(path: Path, **more: object) -> None:
    ended = {
        "arrivals": "poisson:rate=1",
        "request_rate": 1.0,
        "num_prompts": 1,
        "interrupted": False,
        "missing": [],
        **more,
    }
    row = Record(
        request_id="load-1-0", outcome="completed", intended_at=1.0, sent_at=1.0001, released_at=1.5
    )
    write_run(path, Header(writer="load", configuration=ended), [row])


def test_a_rate_of_one_request_is_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_request(tmp_path / "one.jsonl")
    kendall("summary", "one.jsonl")
    out = capsys.readouterr().out
    assert "asked 1, drawn -, delivered -, completed 2" in out
    assert "nan" not in out


def test_an_interrupted_run_whose_file_was_cut_does_not_say_how_many_were_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_request(tmp_path / "cut.jsonl", num_prompts=9, interrupted=True, recorded=3)
    found = json_of("cut.jsonl", capsys)
    assert found["missing"] == ["the file was cut: 1 of 3 requests are in it"]
    assert "interrupted before all 9 requests were sent" in found["reasons"]
    one_request(
        tmp_path / "old.jsonl", num_prompts=9, interrupted=True
    )  # of a version that did not count its records
    (tmp_path / "old.jsonl").write_bytes(
        (tmp_path / "old.jsonl").read_bytes() + b'{"request_id":"load-1-1","out'
    )
    assert json_of("old.jsonl", capsys)["missing"] == [
        "the file was cut: its last line is incomplete and left out; 1 record before it"
    ]


def test_the_values_of_a_list_may_follow_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_request(tmp_path / "one.jsonl")
    kendall(
        "summary",
        "--goodput",
        "e2el:0.9s",
        "ttfb:800ms",
        "one.jsonl",
        "--metric-percentiles",
        "50",
        "99",
        "--json",
    )
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"]["limits"] == ["e2el <= 900 ms", "ttfb <= 800 ms"]
    assert {name for name in found["e2el"] if re.fullmatch(r"p\d+", name)} == {"p50", "p99"}
    kendall("summary", "--percentile-metrics", "e2el", "tpot", "one.jsonl")
    assert "end to end" in capsys.readouterr().out


def saved(path: Path, rows: list[Record]) -> None:
    ended = {
        "arrivals": "poisson:rate=1",
        "request_rate": 1.0,
        "num_prompts": len(rows),
        "interrupted": False,
        "missing": [],
    }
    write_run(path, Header(writer="load", configuration=ended), rows)


def answered_in(seconds: float, recorded: float, rows: int = 8) -> list[Record]:
    """`recorded`: the time that the records state."""
    return [
        Record(
            request_id=f"load-1-{row}",
            outcome="completed",
            intended_at=float(row),
            sent_at=row + 1e-4,
            released_at=row + seconds,
            sojourn_time=recorded,
            output_tokens=1 + row % 3,
        )
        for row in range(rows)
    ]


def test_records_that_contradict_littles_law_make_a_run_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "wrong.jsonl", answered_in(0.5, recorded=0.4))
    assert kendall("summary", "wrong.jsonl") == 3
    reason = "Little's law is off by 0.1 requests in the system: the records are wrong"
    out = " ".join(capsys.readouterr().out.split())
    assert (f"INVALID: {reason}" in out, out.count("INVALID")) == (True, 1)
    found = json_of("wrong.jsonl", capsys)
    assert (found["valid"], found["reasons"]) == (False, [reason])
    saved(tmp_path / "right.jsonl", answered_in(0.5, recorded=0.5))
    assert kendall("summary", "right.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True


@pytest.mark.parametrize(("instant", "got"), [(-1e9, "-1,000,000,000"), (None, "null")])
def test_a_record_whose_instant_is_damaged_is_named(
    instant: float | None, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answered_in(0.5, recorded=0.5)
    rows[2] = msgspec.structs.replace(rows[2], intended_at=instant)
    saved(tmp_path / "damaged.jsonl", rows)
    assert kendall("summary", "damaged.jsonl") == 2
    expected = (
        f"damaged.jsonl: got intended_at {got} for request load-1-2; expected an instant "
        ">= 0: the file is damaged"
    )
    assert capsys.readouterr().err == f"kendall: {expected}\n"
    saved(
        tmp_path / "unknown.jsonl",
        [
            msgspec.structs.replace(row, intended_at=None)
            for row in answered_in(0.5, recorded=0.4999)
        ],
    )
    assert kendall("summary", "unknown.jsonl") == 0


@contextlib.contextmanager
def piped(path: Path) -> Iterator[str]:
    """The file as a shell's `<(cat FILE)` names it: what is read once is gone."""
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"/dev/fd/{process.stdout.fileno()}"


def test_a_run_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is longer than the 4,096 bytes that are read to recognise a result file of vLLM."""
    saved(tmp_path / "run.jsonl", answered_in(0.5, recorded=0.5, rows=60))
    whole = json_of("run.jsonl", capsys)
    with piped(tmp_path / "run.jsonl") as name:
        assert json_of(name, capsys) | {"run": "run.jsonl"} == whole
    with piped(DETAILED) as name:
        assert json_of(name, capsys)["outcomes"] == json_of(str(DETAILED), capsys)["outcomes"]
    for command in ("audit", "compare"):
        with piped(tmp_path / "run.jsonl") as name:
            cli.run_command(command, [name])
            assert "line 1" not in capsys.readouterr().err, command
    with piped(tmp_path / "run.jsonl") as name:
        assert read_counts(Path(name)) == read_counts(tmp_path / "run.jsonl")


@pytest.mark.parametrize("more", [0, 60])
def test_a_run_may_begin_with_a_byte_order_mark(
    more: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run.jsonl", answered_in(0.5, recorded=0.5, rows=5 + more))
    for file in (tmp_path / "run.jsonl", DETAILED):
        (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert json_of("marked.json", capsys)["outcomes"] == json_of(str(file), capsys)["outcomes"]
