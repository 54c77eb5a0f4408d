"""The commands that docs/how-to/load-testing.md prints for any server, before a real, plain
`vllm serve`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator

import msgspec
import pytest

from bench.gateway_cost.servers import Server, small_vllm
from kendall.queueing.latency.profile import load_profile
from kendall.queueing.measurement.record import read_run
from tests.printed_commands import ROOT, Reader, reader, shell_lines

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
SLOTS = 8  # as the page prints it
PRINTED = "localhost:8000"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with small_vllm(tmp_path_factory.mktemp("vllm"), SLOTS) as server:
        yield server


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with reader(tmp_path_factory.mktemp("user"), engine="auto") as someone:
        yield someone


def printed(command: str, server: Server) -> str:
    """The line of the page for this command, with the URL of the server."""
    (line,) = (
        line.text
        for line in shell_lines(ROOT / "docs/how-to/load-testing.md")
        if line.text.startswith(f"kendall {command} ")
        and (PRINTED in line.text or "law.json" in line.text)
    )
    return line.replace(PRINTED, f"127.0.0.1:{server.port}")


def test_calibrate(vllm: Server, user: Reader) -> None:
    user.run(printed("calibrate", vllm))
    profile = load_profile(str(user.folder / "law.json"))
    assert (profile.engine, profile.model) == ("http", "tiny")
    assert profile.law.step(1) > 0
    assert profile.max_num_seqs is not None


def test_load(vllm: Server, user: Reader) -> None:
    user.run(printed("load", vllm))
    header, records = read_run(user.folder / "run.jsonl")
    queue = header.configuration["server_queue"]
    assert queue["requests"] == len(records)
    assert queue["mean"] >= 0
    assert queue["lacks"] is None
    assert all(record.output_tokens == record.max_output_tokens for record in records)
    assert "over-time" in (user.folder / "run.html").read_text()
    rows = list(csv.DictReader((user.folder / "run.csv").open()))
    assert {"ttft", "e2el", "queueing_delay"} <= {row["duration"] for row in rows}


def test_compare(vllm: Server, user: Reader) -> None:
    user.run(f"{printed('compare', vllm)} --json > compared.json")
    (found,) = json.loads((user.folder / "compared.json").read_text())["comparisons"]
    names = [each["name"] for each in found["client"]["token_times"]]
    assert names == ["time_to_first_token", "inter_token_latency"]
    assert all(each["predicted"] > 0 for each in found["client"]["token_times"])
    assert found["client"]["server"]["mean"] is not None
    assert found["sojourn_time"]["predicted"]["mean"] > 0


def test_sweep(vllm: Server, user: Reader) -> None:
    user.run(printed("sweep", vllm))
    found = msgspec.json.decode((user.folder / "runs/vllm/sweep.json").read_bytes())
    assert [cell["state"] for cell in found["cells"]] == ["done"] * 3
    assert found["plan"]["policies"] == [f"continuous:max_batch_size={SLOTS}"]
    assert len(found["searches"]) == 2
    assert (user.folder / "runs/vllm/report.html").stat().st_size > 0
    assert (user.folder / "runs/vllm/report.csv").stat().st_size > 0
