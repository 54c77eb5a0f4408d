"""`kendall sweep` before a server that is no gateway: its own policy, and what has to be said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kendall.loadgen.commands.sweep_cli import app
from kendall.loadgen.sweep.plan import load_plan
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import read_run
from tests.small_server import SLOTS, SmallServer, serving

LAW = "k1=0,k2=0,k3=0,k4=0.02"
NEEDED = ("--max-num-seqs", str(SLOTS), "--latency", LAW)


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    with serving() as one:
        yield one


def sweep(server: SmallServer, folder: Path, *more: str) -> Result:
    return CliRunner().invoke(
        app, ["--base-url", server.url, "--output", str(folder / "swept"), *more]
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (NEEDED[:2], "without --latency; expected a law: `kendall calibrate http"),
        (NEEDED[2:], "without --max-num-seqs; expected the number of sequences it serves at once"),
        ((*NEEDED, "--policies", "single"), "got --policies with --base-url"),
        ((*NEEDED, "--orders", "fcfs,ljf"), "got --orders with --base-url"),
    ],
)
def test_what_such_a_sweep_needs(
    flags: tuple[str, ...], expected: str, server: SmallServer, tmp_path: Path
) -> None:
    refused = sweep(server, tmp_path, *flags)
    assert isinstance(refused.exception, SpecError)
    assert expected in str(refused.exception)
    assert not list(tmp_path.iterdir())


def test_loads_by_token_limits_of_the_servers_own_policy(
    server: SmallServer, tmp_path: Path
) -> None:
    grid = ("--request-rates", "40", "--max-output-tokens", "2,none", "--num-prompts", "30")
    result = sweep(server, tmp_path, *NEEDED, *grid, "--output-tokens", "uniform:low=1,high=5")
    assert result.exit_code == 0, (result.output, result.exception)
    folder = tmp_path / "swept"
    plan = load_plan(folder / "plan.json")
    assert (plan.plain_server, plan.policies) == (True, (f"continuous:max_batch_size={SLOTS}",))
    limited, free = json.loads((folder / "sweep.json").read_text())["cells"]
    assert [cell["state"] for cell in (limited, free)] == ["done", "done"]
    longest = []
    for cell in (limited, free):
        (name,) = (name for name in cell["files"] if name.endswith(".gateway.jsonl"))
        _, records = read_run(folder / name)
        longest.append(max(record.output_tokens or 0 for record in records))
        assert all(record.dispatched_at is not None for record in records)
        assert max(record.batch_size or 0 for record in records) <= SLOTS
    assert longest[0] == 2 < longest[1]
    resumed = CliRunner().invoke(app, ["--resume", str(folder)])
    assert resumed.exit_code == 0
    assert "everything is measured already" in resumed.stderr
