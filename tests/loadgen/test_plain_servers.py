"""The commands that docs/how-to/load-testing.md prints for any server, before a real, plain
`vllm serve`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.gateway_cost.servers import small_vllm
from kendall.queueing.latency.profile import load_profile
from kendall.queueing.measurement.record import read_run
from tests.printed_commands import ROOT, reader, shell_lines

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SLOTS = 8  # as the page prints it
PRINTED = "localhost:8000"
COMMANDS = ("calibrate", "load", "compare", "sweep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's, who has typed the lines in their order."""
    lines = [line.text for line in shell_lines(ROOT / "docs/how-to/load-testing.md")]
    first = next(place for place, text in enumerate(lines) if text.startswith("vllm serve "))
    printed = lines[first + 1 : first + 1 + len(COMMANDS)]
    assert [text.split()[1] for text in printed] == list(COMMANDS)
    assert all(str(SLOTS) in text for text in (lines[first], *printed[2:]))
    with (
        small_vllm(tmp_path_factory.mktemp("vllm"), SLOTS) as server,
        reader(tmp_path_factory.mktemp("user"), engine="auto") as someone,
    ):
        for text in printed:
            someone.run(text.replace(PRINTED, f"127.0.0.1:{server.port}"))
        compare = f"{printed[2]} --json > compared.json"
        someone.run(compare)
        yield someone.folder


def test_calibrate(folder: Path) -> None:
    profile = load_profile(str(folder / "law.json"))
    assert (profile.engine, profile.model) == ("http", "tiny")
    assert profile.law.step(1) > 0
    assert profile.max_num_seqs == 4, "the largest batch that was asked for"


def test_load(folder: Path) -> None:
    header, records = read_run(folder / "run.jsonl")
    queue = header.configuration["server_queue"]
    assert queue["requests"] == len(records)
    assert queue["mean"] >= 0
    assert queue["lacks"] is None
    assert all(record.output_tokens == record.max_output_tokens for record in records)
    assert "over-time" in (folder / "run.html").read_text()
    with (folder / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"ttft", "e2el", "queueing_delay"} <= {row["duration"] for row in rows}


def test_compare(folder: Path) -> None:
    (found,) = json.loads((folder / "compared.json").read_text())["comparisons"]
    names = [each["name"] for each in found["client"]["token_times"]]
    assert names == ["time_to_first_token", "inter_token_latency"]
    assert found["client"]["server"]["mean"] is not None
    assert found["sojourn_time"]["a_priori"]["mean"] > 0
    assert found["check"]["requests"] > 0


def test_sweep(folder: Path) -> None:
    found = msgspec.json.decode((folder / "runs/vllm/sweep.json").read_bytes())
    assert [cell["state"] for cell in found["cells"]] == ["done"] * 3
    assert found["plan"]["policies"] == [f"continuous:max_batch_size={SLOTS}"]
    assert len(found["searches"]) == 2
    for name in ("report.html", "report.csv"):
        assert (folder / "runs/vllm" / name).stat().st_size > 0
