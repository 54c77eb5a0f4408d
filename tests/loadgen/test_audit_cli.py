"""`kendall audit RUN`: which instants it judges, what it prints, when it exits with 3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kendall import cli
from kendall.loadgen.report.audit import asked, streams_of
from kendall.queueing.commands.terminal import LEAST_SENTENCE
from kendall.queueing.measurement.record import (
    SCHEMA_VERSION,
    Header,
    Record,
    read_cut_run,
    read_run,
    write_run,
)

RATE = 20.0


def poisson(seed: int = 0, n: int = 600) -> list[float]:
    return (100.0 + np.cumsum(np.random.default_rng(seed).exponential(1 / RATE, n))).tolist()


def load_run(path: Path, instants: list[float], late: float = 0.0005, **configuration: Any) -> Path:
    configured = {"arrivals": f"poisson:rate={RATE:g}", "request_rate": RATE} | configuration
    records = [
        Record(request_id=f"load-1-{i}", outcome="completed", intended_at=at, sent_at=at + late)
        for i, at in enumerate(instants)
    ]
    write_run(path, Header(writer="load", configuration=configured), records)
    return path


def gateway_run(
    path: Path, instants: list[float], late: float = 0.001, epochs: int = 1, sequences: int = 1
) -> Path:
    records = [
        Record(
            request_id=f"cmpl-{i:x}-{sequence}",
            client_request_id=f"load-1-{i}",
            outcome="completed",
            epoch=i * epochs // len(instants),
            received_at=at + late,
            arrived_at=at + late + 0.01 * (i % 3),  # a gateway too busy to look
        )
        for i, at in enumerate(instants)
        for sequence in range(sequences)
    ]
    write_run(path, Header(writer="gateway"), records)
    return path


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit", *map(str, arguments)])
    return int(stop.value.code or 0)


def audits(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    run(*arguments, "--json")
    return list(json.loads(capsys.readouterr().out)["audits"])


def test_a_load_run_is_judged_by_the_instants_of_sending(tmp_path, capsys):
    assert (
        run(
            load_run(tmp_path / "load.jsonl", poisson()),
            "--require",
            "poisson",
            "--require",
            "timetable",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("load.jsonl: poisson\n600 sent in ")
    assert "asked 20)" in out
    assert "late by 0.5 ms on average, p99 0.5 ms: within its budget (mean 1 ms, p99 5 ms)" in out
    assert "FAILS" not in out


def test_a_bad_verdict_exits_with_3_only_where_it_was_asked_for(tmp_path, capsys):
    path = load_run(tmp_path / "load.jsonl", [100 + i / RATE for i in range(300)])
    assert run(path) == 0
    assert "not poisson: gaps are nearly constant" in capsys.readouterr().out
    assert run(path, "--require", "poisson") == 3
    assert run(path, "--require", "timetable") == 0


def test_lateness_beyond_the_budget_is_invalid(tmp_path, capsys):
    path = load_run(tmp_path / "load.jsonl", poisson(), late=0.0031234)
    assert run(path, "--require", "poisson") == 0
    said = "late by 3.12 ms on average, p99 3.12 ms: INVALID: beyond its budget (mean 1 ms"
    assert said in capsys.readouterr().out
    assert run(path, "--require", "timetable") == 3
    assert run(path, "--require", "timetable", "--lateness-budget", "mean=4ms,p99=4ms") == 0


def test_a_gateways_run_is_judged_by_the_kernels_instants_and_one_call_is_one_arrival(
    tmp_path, capsys
):
    (audit,) = audits(
        capsys,
        gateway_run(tmp_path / "gateway.jsonl", poisson(), sequences=3),
        "--asked-rate",
        "20",
    )
    assert (audit["instants"], audit["n"], audit["verdict"]) == ("received", 600, "poisson")
    assert audit["lateness"] is None


def test_beside_the_load_run_a_gateways_run_has_its_timetable_and_rate(tmp_path, capsys):
    files = (
        load_run(tmp_path / "load.jsonl", poisson()),
        gateway_run(tmp_path / "gateway.jsonl", poisson(), late=0.0009),
    )
    sent, received = audits(capsys, *files)
    assert (sent["name"], received["name"]) == ("load.jsonl", "gateway.jsonl")
    assert received["asked_rate"] == RATE
    assert received["lateness"]["mean"] == pytest.approx(0.0009)
    assert received["valid"] is True


@pytest.mark.parametrize(
    ("late", "known"), [(3599.0, True), (3601.0, False), (-3599.0, True), (-3601.0, False)]
)
def test_clocks_that_are_an_hour_apart_are_two_clocks(tmp_path, late, known):
    files = (
        load_run(tmp_path / "load.jsonl", poisson()),
        gateway_run(tmp_path / "gateway.jsonl", poisson(), late=late),
    )
    _, received = streams_of([(path, *read_run(path), False) for path in files])
    assert (received.intended is not None) == known
    assert received.asked_rate == RATE


def test_the_epochs_of_a_gateway_are_judged_one_by_one(tmp_path, capsys):
    found = audits(capsys, gateway_run(tmp_path / "gateway.jsonl", poisson(), epochs=2))
    assert [audit["name"] for audit in found] == [
        "gateway.jsonl, epoch 0",
        "gateway.jsonl, epoch 1",
    ]
    assert [audit["n"] for audit in found] == [300, 300]


def test_a_simulation_has_arrivals(tmp_path, capsys):
    write_run(
        tmp_path / "s.jsonl",
        Header(writer="simulator"),
        [Record(request_id=f"a-{t}", outcome="completed", arrived_at=t) for t in poisson()],
    )
    (audit,) = audits(capsys, tmp_path / "s.jsonl")
    assert (audit["instants"], audit["verdict"]) == ("arrived", "poisson")


def test_what_was_asked_to_be_gamma_is_compared_with_its_timetable(tmp_path, capsys):
    instants = (100 + np.cumsum(np.random.default_rng(0).gamma(0.3, 1 / RATE / 0.3, 400))).tolist()
    path = load_run(tmp_path / "load.jsonl", instants, arrivals="gamma:rate=20,burstiness=0.3")
    run(path)
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(
        "load.jsonl: timetable kept (mean 0.5 ms, p99 0.5 ms late); not tested: the distribution "
        "of the gaps (asked: gamma)"
    )
    assert (
        "the tests below are for a Poisson process; their results do not enter the verdict" in out
    )
    run(path, "--process", "poisson")
    assert "not poisson: arrivals come in bursts" in capsys.readouterr().out
    assert run(path, "--require", "poisson") == 3


def test_rescaled_schedules_are_told_by_several_runs(tmp_path, capsys):
    def spans(scale: bool) -> float:
        files = []
        for seed in range(5):
            instants = np.array(poisson(seed)) - 100
            files.append(
                load_run(
                    tmp_path / f"{seed}.jsonl",
                    (instants * (600 / RATE / instants[-1] if scale else 1)).tolist(),
                )
            )
        run(*files, "--json")
        return float(json.loads(capsys.readouterr().out)["spans_too_exact_p_value"])

    assert spans(scale=True) < 1e-3
    assert spans(scale=False) > 0.01


@pytest.mark.parametrize(
    ("configuration", "found"),
    [
        ({"arrivals": "poisson:rate=10", "request_rate": 10.0}, ("poisson", 10.0)),
        ({"request_rate": 10, "burstiness": 1.0}, ("poisson", 10.0)),
        ({"request_rate": 10, "burstiness": 0.5}, ("gamma", 10.0)),
        ({"request_rate": "inf", "burstiness": 1.0}, ("all at once", None)),
        ({"arrivals": "mmpp:rates=1/9,durations=1/1", "request_rate": 5.0}, ("mmpp", 5.0)),
        ({"trace": "azure.csv", "request_rate": 3.0}, ("trace", None)),
        ({"arrivals": "closed loop", "loop": "closed"}, ("closed loop", None)),
        ({}, ("poisson", None)),
    ],
)
def test_a_header_says_what_was_asked(configuration, found):
    assert asked(configuration) == found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--asked-rate", "0"], "got --asked-rate 0.0; expected requests per second > 0"),
        (["--significance", "1"], "got --significance 1.0"),
        (["--require", "gamma"], "got --require gamma; expected poisson or timetable"),
        (["--lateness-budget", "soon"], "got lateness budget 'soon'"),
        (
            ["--process", "possion"],
            "got --process possion; expected one of poisson, gamma, deterministic",
        ),
        (["--process", "possion"], "; did you mean 'poisson'?"),
    ],
)
def test_wrong_arguments_exit_with_2(tmp_path, capsys, arguments, says):
    assert run(load_run(tmp_path / "load.jsonl", poisson()), *arguments) == 2
    assert says in capsys.readouterr().err


def test_files_without_arrivals_exit_with_2(tmp_path, capsys):
    assert run(tmp_path / "none.jsonl") == 2
    write_run(tmp_path / "empty.jsonl", Header(writer="load"), [])
    assert run(tmp_path / "empty.jsonl") == 2
    assert "got no instant of sending or of arrival" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no instant"):
        streams_of([(tmp_path, Header(writer="gateway"), [], False)])


def test_a_timetable_that_was_not_kept_is_said_of_any_process(tmp_path, capsys):
    path = load_run(
        tmp_path / "load.jsonl", poisson(), late=0.02, arrivals="gamma:rate=20,burstiness=1"
    )
    assert run(path, "--require", "timetable") == 3
    assert capsys.readouterr().out.startswith(
        "load.jsonl: timetable not kept (mean 20 ms, p99 20 ms late); not tested:"
    )


def test_a_poisson_run_is_not_said_to_be_untested(tmp_path, capsys):
    run(load_run(tmp_path / "load.jsonl", poisson()))
    out = capsys.readouterr().out
    assert "not tested" not in out
    assert "tests below" not in out


@pytest.mark.parametrize(
    ("configuration", "kept", "says"),
    [
        (
            {"num_prompts": 1000},
            600,
            ["the run was killed, or is still running: 600 of 1,000 requests recorded"],
        ),
        (
            {"num_prompts": 1000, "interrupted": True, "missing": [], "recorded": 600},
            600,
            ["interrupted: 600 of 1,000 requests sent"],
        ),
        (
            {"num_prompts": 1000, "interrupted": True, "missing": [], "recorded": 600},
            599,
            [
                "interrupted before all 1,000 requests were sent",
                "the file was cut: 599 of 600 requests are in it",
            ],
        ),
        (
            {"num_prompts": 600, "interrupted": False, "missing": []},
            590,
            ["the file was cut: 590 of 600 requests are in it"],
        ),
        ({"num_prompts": 600, "interrupted": False, "missing": [], "recorded": 600}, 600, []),
    ],
)
def test_records_that_are_missing_are_said_in_a_line_each(
    tmp_path, capsys, configuration, kept, says
):
    path = load_run(tmp_path / "load.jsonl", poisson()[:kept], **configuration)
    (audit,) = audits(capsys, path)
    assert audit["incomplete"] == says
    run(path)
    out = capsys.readouterr().out.splitlines()
    assert [
        line for line in out if line.startswith(("the run was", "interrupted", "the file was"))
    ] == says


def test_a_run_file_whose_first_record_was_cut_has_none(tmp_path):
    path = gateway_run(tmp_path / "gateway.jsonl", poisson())
    header, record, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + record[:-30])
    found, records, cut = read_cut_run(path)
    assert (found.schema_version, records, cut) == (SCHEMA_VERSION, [], True)


def test_a_gateways_file_with_a_cut_last_line_is_said_to_be_cut(tmp_path, capsys):
    path = gateway_run(tmp_path / "gateway.jsonl", poisson())
    path.write_bytes(path.read_bytes()[:-30])
    (audit,) = audits(capsys, path)
    assert audit["incomplete"] == [
        "the file was cut: its last line is incomplete and left out; 599 records before it"
    ]


def test_on_a_narrow_terminal_every_block_names_the_test_and_its_p_value(
    tmp_path, capsys, monkeypatch
):
    path = load_run(tmp_path / "load.jsonl", [100 + i / RATE for i in range(300)])
    (audit,) = audits(capsys, path)
    tests = {test["name"]: f"{test['p_value']:.3g}" for test in audit["tests"]}
    names, values = (max(map(len, column)) for column in (tests, ("p-value", *tests.values())))
    monkeypatch.setenv("COLUMNS", str(names + 2 + values + 2 + LEAST_SENTENCE))
    run(path)
    lines = capsys.readouterr().out.splitlines()
    headings = [line.split() for line in lines if line.startswith("test ")]
    assert headings == [["test", "p-value"], ["test", "p-value", "finding"]]
    for name, value in tests.items():
        rows = [line for line in lines if line.startswith(f"{name}  ")]
        assert [line.removeprefix(name).split()[0] for line in rows] == [value] * 2
