"""`kendall compare` as a user meets it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kendall.loadgen.commands.compare_cli import app
from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import load_profile
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
from tests.loadgen.driver import LAW, drive

ROOT = Path(__file__).parents[2]

LENGTHS = "uniform:low=1,high=60"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_file(
    folder: Path, policy: str = "dynamic", rate: float = 40.0, **configuration: object
) -> str:
    path = folder / f"{policy.partition(':')[0]}.jsonl"
    write_run(
        path,
        Header(writer="simulator", configuration={"max_num_seqs": 64, **configuration}),
        drive(parse_policy(policy), rate, n=1500),
    )
    return str(path)


def test_without_a_law_there_are_observation_and_measured_service(tmp_path: Path) -> None:
    result = invoke(run_file(tmp_path))
    assert result.exit_code == 0, result.output
    assert "dynamic" in result.stdout
    assert "0.0 %" in result.stdout, "the gateway's share"
    assert "model:" not in result.stdout
    assert "a priori" not in result.stdout


@pytest.mark.slow
def test_a_law_fills_every_column(tmp_path: Path) -> None:
    files = [
        run_file(tmp_path, "dynamic", 40.0),
        run_file(tmp_path, "capped:max_batch_size=4", 14.0),
    ]
    result = invoke(*files, "--latency", str(LAW), "--output-tokens", LENGTHS, "--json")
    assert result.exit_code == 0, result.output
    comparisons = json.loads(result.stdout)["comparisons"]
    assert [c["policy"] for c in comparisons] == ["dynamic", "capped:max_batch_size=4"]
    for comparison in comparisons:
        delay = comparison["queueing_delay"]
        assert delay["measured_service"]["deviation"] == pytest.approx(0.0, abs=1e-6)
        assert delay["same_arrivals"]["deviation"] == pytest.approx(0.0, abs=1e-6)
        assert abs(comparison["prediction_error"]) < 0.35
        assert 0 < comparison["load"] < 1
        assert comparison["speed"]["factor"] == pytest.approx(1.0)
        assert len(comparison["split"]["parts"]) == 7
        for quantity in (delay, comparison["sojourn_time"]):
            observed, laws = quantity["observed"], quantity["theory_quantiles"]
            assert 0 < observed["half_width"] < observed["mean"]
            assert 0 < observed["effective_n"] <= observed["n"] == comparison["n"]
            assert set(laws) >= {"a_priori", "predicted", "live"}
            for levels in (quantity["quantiles"], *laws.values()):
                values = [levels[name] for name in LEVELS]
                assert values == sorted(values)
                assert 0 <= values[0] < values[-1]
            for name in laws:
                assert quantity[name]["deviation"] == pytest.approx(
                    observed["mean"] / quantity[name]["mean"] - 1
                )
        assert comparison["verdict"]["text"]
        assert comparison["utilisation"] == pytest.approx(
            comparison["predicted_utilisation"], abs=0.1
        )
    assert comparisons[0]["queueing_delay"]["paper"]["mean"] > 0
    assert comparisons[1]["queueing_delay"]["paper"] is None


@pytest.mark.slow
@pytest.mark.parametrize("pads", [False, True])
def test_padded_batches_of_an_engine_that_cannot_pad_are_elastic(
    pads: bool, tmp_path: Path
) -> None:
    """The header says so; else the padded law would take the machine for a quicker one."""
    records = [
        msgspec.structs.replace(record, policy="capped:max_batch_size=4")
        for record in drive(parse_policy("elastic:max_batch_size=4"), 14.0, n=1500)
    ]
    path = tmp_path / "run.jsonl"
    configuration = {"max_num_seqs": 64} | ({} if pads else {"pads": False})
    write_run(path, Header(writer="gateway", configuration=configuration), records)
    result = invoke(str(path), "--latency", str(LAW), "--output-tokens", LENGTHS, "--json")
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads(result.stdout)["comparisons"]
    assert comparison["policy"] == "capped:max_batch_size=4"
    deviations = (
        comparison["speed"]["factor"] - 1,
        comparison["queueing_delay"]["same_arrivals"]["deviation"],
    )
    if pads:  # the padded law expects more of the machine than it did
        assert deviations[0] < -0.01
        assert abs(deviations[1]) > 0.001
    else:
        assert deviations == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize("said", [True, False])
def test_an_engine_that_computes_long_prompts_in_parts_is_compared_as_one(
    said: bool, tmp_path: Path
) -> None:
    """Where the header says so; else its machine seems slower than it is."""
    law = parse_law("k1=0.0003,k2=0,k3=0.000025,k4=0.00092,kp=0.000005")
    queue = Queue.read(
        "continuous:max_batch_size=8", LENGTHS, law, prompt_tokens="uniform:low=100,high=500"
    )
    jobs, rngs = draw_jobs(queue, 80.0, 1500, np.random.SeedSequence(1))
    engine = SimulatedEngine(law, max_batch_size=64, step_tokens=64)
    path = tmp_path / "run.jsonl"
    configuration = {"max_num_seqs": 64} | ({"step_tokens": 64} if said else {})
    header = Header(writer="gateway", configuration=configuration)
    write_run(path, header, simulate_trace(queue.policy, jobs, engine, rngs))
    result = invoke(str(path), "--latency", str(law), "--output-tokens", LENGTHS, "--json")
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads(result.stdout)["comparisons"]
    delay, sojourn = comparison["queueing_delay"], comparison["sojourn_time"]
    found = (
        comparison["speed"]["factor"],
        delay["same_arrivals"]["deviation"],
        sojourn["a_priori"]["deviation"],
    )
    if said:
        assert found == pytest.approx((1.0, 0.0, 0.0), abs=0.05)
        assert found[:2] == pytest.approx((1.0, 0.0), abs=0.01)
    else:
        assert found[0] > 1.1


def test_a_profile_that_fits_poorly_is_named_on_stderr(tmp_path: Path) -> None:
    profile = tmp_path / "mine.json"
    msgspec.structs.replace(load_profile("tiny"), name="mine", r2=0.5).save(profile)
    result = invoke(run_file(tmp_path), "--latency", str(profile), "--output-tokens", LENGTHS)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("kendall: warning: profile mine: the law fits poorly: R2 0.50")


@pytest.mark.slow
def test_the_table_says_why_and_where(tmp_path: Path) -> None:
    file = run_file(tmp_path, "dynamic", 40.0, request_rate=40.0, output_tokens=LENGTHS)
    result = invoke(file, "--latency", str(LAW.at_speed(0.7)))
    assert "machine slower than calibrated by 43 %" in result.stdout
    for word in ("theory", "arrivals", "sender", "speed", "scatter", "shape", "gateway", "p99"):
        assert word in result.stdout
    assert "…" not in result.stdout


@pytest.mark.slow
def test_the_header_says_what_was_asked(tmp_path: Path) -> None:
    file = run_file(tmp_path, "dynamic", 40.0, request_rate=38.5, output_tokens=LENGTHS)
    (comparison,) = json.loads(invoke(file, "--latency", str(LAW), "--json").stdout)["comparisons"]
    assert comparison["asked_rate"] == 38.5
    (other,) = json.loads(
        invoke(file, "--latency", str(LAW), "--request-rate", "39", "--json").stdout
    )["comparisons"]
    assert other["asked_rate"] == 39


def test_a_load_run_beside_it_tells_the_senders_part(tmp_path: Path) -> None:
    records = drive(parse_policy("dynamic"), 40.0, n=600)
    seen = [msgspec.structs.replace(r, client_request_id=f"c{i}") for i, r in enumerate(records)]
    sent = [
        Record(
            request_id=f"c{i}",
            outcome="completed",
            intended_at=r.arrived_at,
            sent_at=(r.arrived_at or 0.0) + 0.003,
        )
        for i, r in enumerate(records)
    ]
    write_run(
        tmp_path / "gateway.jsonl",
        Header(writer="gateway", configuration={"max_num_seqs": 64}),
        seen,
    )
    write_run(tmp_path / "load.jsonl", Header(writer="load"), sent)
    files = [str(tmp_path / "gateway.jsonl"), str(tmp_path / "load.jsonl")]
    (comparison,) = json.loads(invoke(*files, "--latency", str(LAW), "--json").stdout)[
        "comparisons"
    ]
    sender = next(part for part in comparison["split"]["parts"] if part["name"] == "sender")
    assert sender["note"] == ""
    assert sender["seconds"] == pytest.approx(0.0, abs=1e-9)
    assert comparison["lateness"]["mean"] == pytest.approx(0.003)
    assert isinstance(invoke(files[1]).exception, SpecError)


@pytest.mark.slow
def test_files_are_written(tmp_path: Path) -> None:
    file = run_file(tmp_path, "dynamic", 40.0, request_rate=40.0, output_tokens=LENGTHS, load=0.5)
    written = {
        flag: tmp_path / "out" / name for flag, name in (("--csv", "t.csv"), ("--picture", "p.svg"))
    }
    result = invoke(
        file, "--latency", str(LAW), *(str(part) for pair in written.items() for part in pair)
    )
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader(written["--csv"].read_text(encoding="utf-8").splitlines())
    assert (row["policy"], row["load"]) == ("dynamic", "0.5")
    assert float(row["observed_ms"]) > float(row["half_width_ms"]) > 0
    assert float(row["part_speed_ms"]) == pytest.approx(0.0, abs=1e-6)
    assert written["--picture"].read_text(encoding="utf-8").lstrip().startswith("<?xml")


@pytest.mark.slow
def test_a_broken_condition_exits_3_and_names_the_cell(tmp_path: Path) -> None:
    file = run_file(tmp_path, "dynamic", 40.0, request_rate=40.0, output_tokens=LENGTHS)
    given = (file, "--latency", str(LAW))
    assert (
        invoke(
            *given, "--assert", "prediction_error < 0.5", "--assert", "p99_queueing_delay < 60s"
        ).exit_code
        == 0
    )
    broken = invoke(*given, "--assert", "mean_queueing_delay < 1us")
    assert broken.exit_code == 3
    assert "dynamic: got mean_queueing_delay" in broken.stderr
    assert (
        invoke(file, "--assert", "prediction_error < 0.5").exit_code == 3
    )  # without a law there is no prediction
    assert isinstance(invoke(*given, "--assert", "nonsense < 1").exception, SpecError)


@pytest.mark.parametrize(
    "content", ["", "{broken", '{"writer":"simulator"}\n{"request_id":"a","outcome":"completed"}\n']
)
def test_what_is_no_run_file_raises_a_spec_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    assert isinstance(invoke(str(path)).exception, SpecError)
    assert isinstance(invoke(str(tmp_path / "none")).exception, SpecError)


def test_arguments_that_contradict_each_other_raise_a_spec_error(tmp_path: Path) -> None:
    assert isinstance(invoke().exception, SpecError)
    assert isinstance(invoke("--sweep", str(tmp_path), "run.jsonl").exception, SpecError)
    assert isinstance(
        invoke("--sweep", str(tmp_path), "--latency", "reference").exception, SpecError
    )
    assert isinstance(invoke("--sweep", str(tmp_path)).exception, SpecError)


def test_every_part_and_theory_of_the_tables_is_explained_below_them_and_in_the_documentation() -> (
    None
):
    from kendall.loadgen.compare.residual import PARTS
    from kendall.loadgen.report.report import ORDER_NOTES, PART_NOTES, QUANTILE_NOTES

    notes, page = (
        " ".join((*QUANTILE_NOTES, *PART_NOTES, *ORDER_NOTES)),
        (ROOT / "docs" / "why" / "agreement.md").read_text(encoding="utf-8"),
    )
    for name in (*PARTS, "live", "as printed"):
        assert f"{name}: " in notes
        assert f"\n| {name} | " in page


def test_a_file_that_was_cut_is_named_below_the_table_in_json_and_in_the_report(
    tmp_path: Path,
) -> None:
    file = Path(run_file(tmp_path))
    assert "the file was cut" not in invoke(str(file)).stdout
    file.write_bytes(file.read_bytes()[:-30])
    says = (
        "dynamic.jsonl: the file was cut: its last line is incomplete and left out; 1,499 "
        "records before it"
    )
    result = invoke(str(file), "--html", str(tmp_path / "report.html"))
    assert result.exit_code == 0
    assert says in " ".join(result.stdout.split())
    assert says in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads(invoke(str(file), "--json").stdout)["events"] == [says]


@pytest.mark.parametrize("rate", ["-3", "0", "nan", "inf"])
def test_an_arrival_rate_that_is_none_is_refused(tmp_path: Path, rate: str) -> None:
    from kendall import cli

    arguments = [str(run_file(tmp_path)), "--request-rate", rate, "--latency", "a=0.01,c=0"]
    assert cli.run_command("compare", arguments) == 2
